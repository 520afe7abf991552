# Devices come and go on one server: connect, read, disconnect, many times and several at once
# set: quick
# seconds: 180 900
# needs: nbd
. "$VM_TESTS/scene.sh"

rounds=${VM_CHURN:-$(quick_or_full 2 50)}
"$BIN/nbd_null" "$SCRATCH/sock" < <(exec sleep infinity) &
server=$!
await 30 test -S "$SCRATCH/sock"
for _ in $(seq "$rounds"); do
    for n in 0 1 2 3; do
        nbd-client -unix "$SCRATCH/sock" "/dev/nbd$n" -N memory -b 4096 -C 2
    done
    for n in 0 1 2 3; do
        dd if=/dev/zero of="/dev/nbd$n" bs=64k count=4 oflag=direct status=none
    done
    looked_through
    for n in 0 1 2 3; do
        nbd-client -d "/dev/nbd$n"
    done
done >"$SCRATCH/log" 2>&1 || { tail -n 20 "$SCRATCH/log" && exit 1; }
for n in 0 1 2 3; do
    await 10 test ! -e "/sys/block/nbd$n/pid"
done
kill -0 "$server"
echo "$((rounds * 4)) devices came and went"
