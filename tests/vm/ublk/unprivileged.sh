# a user without privileges serves a ublk device, which ends with its server
# set: full
# seconds: 200
# needs: ublk_drv
. "$VM_TESTS/ublk/parts/server.sh"

# What udev would do: the control node is for everybody,
# a device's nodes are for the user who added it.
chmod 666 /dev/ublk-control
chmod 755 "$SCRATCH/.."
install -d -o 1000 run
as_user() { setpriv --reuid 1000 --regid 1000 --clear-groups "$@"; }
give_node() { wait_for 30 test -e /dev/ublkc0 && chown 1000 /dev/ublkc0; }
give_node &
privileged=$SERVER
cat >server <<WORDS
#!/bin/bash
exec setpriv --reuid 1000 --regid 1000 --clear-groups $privileged --run $PWD/run "\$@"
WORDS
chmod 755 server
SERVER=$PWD/server
start_server user --unprivileged --size 64 --queues 2 --depth 8
head -c 3000000 /dev/urandom >written
dd if=written of="$NODES" bs=64k conv=fsync,notrunc status=none || fail "a write failed"
echo 3 >/proc/sys/vm/drop_caches
cmp -n 3000000 written "$NODES" || fail "other bytes came back"
fio --name=job --filename="$NODES" --ioengine=libaio --direct=1 --rw=randrw --bsrange=512-64k \
    --iodepth=16 --size=16m --verify=crc32c --verify_fatal=1 >fio.log 2>&1 ||
    fail "$(tail -n 20 fio.log)"
as_user "$privileged" --run "$PWD/run" list |
    grep -q 'state: Live.*is_alive: true, is_ours: true' ||
    fail "it is not listed"
"$privileged" --run "$PWD/run" list |
    grep -q 'state: Live.*is_alive: true, is_ours: true' ||
    fail "root cannot list it"
crash_server
gone() { ! as_user "$privileged" --run "$PWD/run" list | grep -q Live; }
wait_for 60 gone || fail "the device outlives its server"
"$privileged" --run "$PWD/run" sweep | grep -q 'deleted 0' || fail "the orphan is not swept away"
[ ! -e /dev/ublkc0 ] || fail "the device is still there"
