# BUSE: power off without a daemon, rmdir under load, what waits or fails when a daemon dies
# set: quick
# seconds: 300 900
# drivers: buse
# expects-io-errors
. "$VM_TESTS/buse/parts/device.sh"

# Whether fio has written: it may take long to start.
is_busy() { (($(awk '{ print $5 }' /sys/block/buse0/stat) > 100)); }

load
rounds=$(quick_or_full 3 25)

# It never had a daemon.
configure 0
power 0 1
power 0 0
rmdir "$CONFIG/0"

# It has lost its daemon, and a write waits.
configure 0 size=$((16 << 20)) hw_queues=2 write_chunk_size=65536 write_shm_size=65536
power 0 1
start_daemon 0
kill_daemon
dd if=/dev/zero of=/dev/buse0 bs=64k count=64 oflag=direct status=none 2>/dev/null &
writer=$!
sleep 1
kill -0 "$writer" || fail "a write did not wait for a daemon"
timeout 30 bash -c "echo 0 >$CONFIG/0/power" || fail "power off hangs without a daemon"
wait "$writer" && fail "the write succeeded without a daemon"
is_gone 0 || fail "the disk stayed"
echo "power off without a daemon"

# Again with the power: what waits fails at once, and later goes on.
echo fail >"$CONFIG/0/on_death"
power 0 1
start_daemon 0
kill_daemon
await 10 state_is 0 failing
dd if=/dev/zero of=/dev/buse0 bs=4k count=1 oflag=direct status=none 2>/dev/null &&
    fail "a write succeeded without a daemon"
start_daemon 0
dd if=/dev/zero of=/dev/buse0 bs=4k count=1 oflag=direct,sync status=none
# A policy that is set while requests wait holds for them.
echo wait >"$CONFIG/0/on_death"
kill_daemon
dd if=/dev/buse0 of=/dev/null bs=4k count=1 iflag=direct status=none 2>/dev/null &
reader=$!
sleep 0.5
kill -0 "$reader" || fail "a read did not wait"
echo 200 >"$CONFIG/0/death_timeout_ms"
wait "$reader" && fail "the read succeeded without a daemon"
start_daemon 0
dd if=/dev/buse0 of=/dev/null bs=4k count=1 iflag=direct status=none
stop 0
echo "policies"

for round in $(seq "$rounds"); do
    configure 0 size=$((16 << 20)) hw_queues=2 write_chunk_size=65536 write_shm_size=262144
    power 0 1
    start_daemon 0 2000
    fio --name=load --filename=/dev/buse0 --rw=randrw --bs=4k --direct=1 --ioengine=libaio \
        --iodepth=32 --numjobs=2 --time_based --runtime=60 >"$SCRATCH/fio" 2>&1 &
    job=$!
    await 60 is_busy
    sleep "0.$((RANDOM % 6 + 1))"
    ((round % 2)) || kill_daemon
    timeout 60 rmdir "$CONFIG/0" || fail "round $round: rmdir"
    is_gone 0 || fail "round $round: the disk stayed"
    await 120 has_ended "$job"
    ((round % 2)) && wait "$daemon"
done
echo "$rounds times rmdir under load"
