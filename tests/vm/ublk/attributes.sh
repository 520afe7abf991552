# a ublk device shows what it is, takes every operation, and leaves nothing behind
# set: quick
# seconds: 120
# needs: ublk_drv
. "$VM_TESTS/ublk/parts/server.sh"

start_server attributes --size 64 --queues 2 --depth 16 --link
queue=/sys/block/$(basename "$NODES")/queue
expect() {
    local is
    is=$(cat "$queue/$1")
    [ "$is" = "$2" ] || fail "$1 is $is instead of $2"
}
expect rotational 0
expect write_cache "write back"
expect fua 1
expect logical_block_size 512
expect physical_block_size 4096
expect minimum_io_size 4096
expect optimal_io_size 65536
expect max_hw_sectors_kb 1024
expect discard_max_hw_bytes 4294966784
expect discard_granularity 4096
expect write_zeroes_max_bytes 4294966784
limited() { [ "$(cat "$queue/nr_requests")" = 16 ]; }
wait_for 30 limited || fail "no tag is kept back: nr_requests is $(cat "$queue/nr_requests")"
grep -qF '[none]' "$queue/scheduler" || fail "the scheduler is $(cat "$queue/scheduler")"
[ "$(blockdev --getsize64 "$NODES")" = $((64 << 20)) ] || fail "the size is wrong"
[ "$(ls /sys/block/"$(basename "$NODES")"/mq | wc -l)" = 2 ] || fail "not two queues"
[ "$(readlink -f /dev/sawmill/memory0)" = "$NODES" ] || fail "the link does not lead to the device"
"$SERVER" list | grep -q 'state: Live.*is_alive: true, is_ours: true, volume: Some("memory 0")' ||
    fail "it is not listed"
! "$SERVER" delete "${NODES#/dev/ublkb}" || fail "a device was deleted under its living server"

# Threads that serve a disk get memory without writing to one (PF_MEMALLOC_NOIO
# and PF_LOCAL_THROTTLE).
for stat in /proc/$SERVER_PID/task/*/stat; do
    [[ $(cat "$stat") != *"(ublk-"* ]] ||
        (( ($(cut -d ' ' -f 9 "$stat") & 0x180000) == 0x180000)) ||
        fail "not marked: $(cat "$stat")"
done

# Every operation, with the kernel's own tools.
head -c 3000000 /dev/urandom >written
dd if=written of="$NODES" bs=64k oflag=direct,sync conv=notrunc status=none 2>/dev/null \
    || dd if=written of="$NODES" bs=64k conv=fsync,notrunc status=none || fail "a write failed"
cmp -n 3000000 written "$NODES" || fail "other bytes came back"
blkdiscard "$NODES" || fail "a discard failed"
cmp -n 3000000 /dev/zero "$NODES" || fail "the memory device keeps discarded bytes"
dd if=written of="$NODES" bs=64k conv=fsync,notrunc status=none || fail "a write failed"
blkdiscard -z "$NODES" || fail "a write of zeroes failed"
cmp -n 3000000 /dev/zero "$NODES" || fail "zeroes were not written"
dd if="$NODES" of=/dev/null bs=4096 skip=$((64 << 8)) count=1 status=none ||
    fail "a read at the end failed"

echo drain >&"$SERVER_INPUT"
wait_for 20 grep -q '^drained' server.attributes.out || fail "the device does not get quiet"
dd if=written of="$NODES" bs=64k conv=fsync,notrunc status=none || fail "no write after a drain"
cmp -n 3000000 written "$NODES" || fail "other bytes after a drain"

stop_server
[ ! -e "$NODES" ] || fail "the device is still there"
[ ! -e /dev/sawmill/memory0 ] && [ ! -L /dev/sawmill/memory0 ] || fail "the link is still there"
[ -z "$(ls /run/sawmill/ublk)" ] || fail "the run folder is not empty"
