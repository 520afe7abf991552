# BUSE: kill -9 of the daemon under fio's verification: the next gets all again, no byte differs
# set: quick
# seconds: 300 1500
# drivers: buse
. "$VM_TESTS/buse/parts/device.sh"

rounds=${VM_KILLS:-$(quick_or_full 4 40)}
load
configure 0 size=$((64 << 20)) hw_queues=2 write_chunk_size=262144 write_shm_size=2097152
power 0 1
start_daemon 0 3000
kills() {
    for round in $(seq "$rounds"); do
        sleep "0.$((RANDOM % 7 + 2))"
        kill_daemon
        state_is 0 waiting || fail "round $round: it does not wait"
        start_daemon 0 3000
    done
}
verify_while /dev/buse0 kills
stop 0
echo "$rounds kills"
