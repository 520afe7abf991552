# kill -9 under fio's verification: the next server takes the device over, no error, no byte differs
# set: quick
# seconds: 200 1500
# needs: ublk_drv
. "$VM_TESTS/ublk/parts/server.sh"

rounds=${VM_KILLS:-$(quick_or_full 3 50)}
serve() { start_server kill --file "$SCRATCH/bytes" --size 64 --queues 2 --depth 16 "$@"; }
serve
node=$NODES
id=${node#/dev/ublkb}
# More requests than the queues have tags, so that a kill finds every tag in the server's hands.
fio --name=job --filename="$node" --ioengine=libaio --direct=1 --rw=randwrite --bsrange=512-32k \
    --iodepth=64 --verify=crc32c --verify_backlog=64 --verify_fatal=1 --size=48m --io_size=1000g \
    --time_based --runtime=3600 --randseed="$RANDOM" --output=fio.log --eta=never &
fio=$!
slowest=0
for round in $(seq "$rounds"); do
    sleep "0.$((RANDOM % 7 + 1))"
    kill -0 $fio || fail "fio ended in round $round: $(tail -n 30 fio.log)"
    crash_server
    began=$(date +%s%N)
    serve --recover "$id"
    took=$((($(date +%s%N) - began) / 1000000))
    [ $took -le $slowest ] || slowest=$took
    [ "$NODES" = "$node" ] || fail "another node came back: $NODES"
done
kill -INT $fio
wait $fio && status=0 || status=$?
! grep -E 'verify failed|bad (magic|header)|io_u error|err= *[1-9]' fio.log ||
    fail "fio found a difference or an error"
grep -q 'err= 0' fio.log || fail "fio printed nothing (status $status): $(tail -n 30 fio.log)"
stop_server
grep -E '^ +(read|write):' fio.log | tail -n 2
echo "$rounds kills; the slowest recovery took $slowest ms"
