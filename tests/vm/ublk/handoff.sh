# server after server takes a ublk device over under fio's verification
# set: quick
# seconds: 200 600
# needs: ublk_drv
. "$VM_TESTS/ublk/parts/server.sh"

rounds=$(quick_or_full 3 20)
serve() { start_server handoff --file "$SCRATCH/bytes" --size 64 --queues 2 --depth 16 "$@"; }
serve
node=$NODES
fio --name=job --filename="$node" --ioengine=libaio --direct=1 --rw=randrw --bsrange=512-32k \
    --iodepth=32 --verify=crc32c --verify_backlog=64 --verify_fatal=1 --size=48m --io_size=1000g \
    --time_based --runtime=3600 --output=fio.log --eta=never &
fio=$!
for round in $(seq "$rounds"); do
    sleep "0.$((RANDOM % 9 + 1))"
    echo drain >&"$SERVER_INPUT"
    wait_for 30 grep -q '^drained' server.handoff.out ||
        fail "round $round: the device does not get quiet"
    echo leave >&"$SERVER_INPUT"
    wait_for 30 grep -q '^left' server.handoff.out || fail "round $round: the server does not leave"
    exec {SERVER_INPUT}>&-
    wait "$SERVER_PID" || fail "round $round: the server ended with $?"
    kill -0 $fio || fail "fio ended in round $round: $(tail -n 30 fio.log)"
    serve --recover "${node#/dev/ublkb}"
done
swaps_are() { [[ $(grep -c '^swapped' server.handoff.out) == "$1" ]]; }
# The same within one process, which shows how long users wait.
for round in $(seq "$rounds"); do
    sleep "0.$((RANDOM % 9 + 1))"
    echo swap >&"$SERVER_INPUT"
    wait_for 30 swaps_are "$round" || fail "swap $round does not end"
done
grep '^swapped' server.handoff.out | sort | uniq -c
kill -INT $fio
wait $fio || true
! grep -E 'verify failed|bad (magic|header)|io_u error|err= *[1-9]' fio.log ||
    fail "fio found a difference or an error"
grep -q 'err= 0' fio.log || fail "fio printed nothing: $(tail -n 30 fio.log)"
echo counts >&"$SERVER_INPUT"
wait_for 20 grep -q '^DoorCounts' server.handoff.out || fail "no counts"
grep -q 'errors: 0,.*protocol_violations: 0' server.handoff.out ||
    fail "errors: $(cat server.handoff.out)"
stop_server
grep -E '^ +(read|write):' fio.log | tail -n 2
echo "$rounds hand-offs"
