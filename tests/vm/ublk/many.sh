# hundreds of ublk devices in one process on two threads: time, memory, removal
# set: quick
# seconds: 200 900
# needs: ublk_drv
. "$VM_TESTS/ublk/parts/server.sh"

devices=${VM_DEVICES:-$(quick_or_full 12 500)}
start_server one --devices 1 --workers 2 --depth 16 --size 1024
alone=$(awk '/^VmRSS/ { print $2 }' /proc/$SERVER_PID/status)
stop_server
free_before=$(awk '/^MemAvailable/ { print $2 }' /proc/meminfo)
begin_ns=$(date +%s%N)
READY_S=700 start_server many --devices "$devices" --workers 2 --depth 16 --size 1024
took=$((($(date +%s%N) - begin_ns) / 1000000))
# The kernel's share of that time.
spent=$(awk -v "ticks=$(getconf CLK_TCK)" \
    '{ print $14 / ticks " s user, " $15 / ticks " s kernel" }' \
    "/proc/$SERVER_PID/stat")
free_after=$(awk '/^MemAvailable/ { print $2 }' /proc/meminfo)
[ "$(ls /dev/ublkb* | wc -l)" = "$devices" ] || fail "not $devices devices"
rss=$(awk '/^VmRSS/ { print $2 }' /proc/$SERVER_PID/status)
threads=$(ls /proc/$SERVER_PID/task | wc -l)
[ "$threads" -le 8 ] || fail "$threads threads serve $devices devices"
for node in /dev/ublkb0 /dev/ublkb$((devices / 2)) /dev/ublkb$((devices - 1)); do
    head -c 1000000 /dev/urandom >written
    dd if=written of="$node" bs=64k conv=fsync status=none || fail "no write to $node"
    cmp -n 1000000 written "$node" || fail "other bytes from $node"
done
begin_ns=$(date +%s%N)
stop_server
removal_ms=$((($(date +%s%N) - begin_ns) / 1000000))
! ls /dev/ublkb* 2>/dev/null || fail "devices are left"
echo "$devices devices: start $took ms, process $(((rss - alone) * 1024 / devices)) bytes each," \
    "machine $(((free_before - free_after) * 1024 / devices)) bytes each," \
    "$threads threads, removal $removal_ms ms; the start took the server $spent"
