# kill -9 of the server under load is a pause for the kernel's NBD device: no error, no byte lost
# set: quick
# seconds: 240 1800
# needs: nbd
. "$VM_TESTS/scene.sh"

rounds=${VM_KILLS:-$(quick_or_full 2 50)}
doors=(--nbd "unix:$SCRATCH/sock" --journal "$SCRATCH/journal" --journal-bytes 128M)
"$BIN/sawmill" create disk --size 64M
serve disk "${doors[@]}"
python3 "$VM_TESTS/nbd/attach.py" "$SCRATCH/sock" disk 0 --connections 2 --timeout 5 \
    >"$SCRATCH/attach" &
attach=$!
await 30 grep -q attached "$SCRATCH/attach"

kill_again_and_again() {
    for round in $(seq "$rounds"); do
        sleep "$((RANDOM % 3)).$((RANDOM % 10))"
        kill_server
        serve disk "${doors[@]}"
        await 60 test "$(grep -c again "$SCRATCH/attach")" -ge "$((2 * round))"
    done
    echo "killed $rounds times"
}
verify_while /dev/nbd0 kill_again_and_again

kill "$attach"
wait "$attach"
kill "$server"
wait "$server"
"$BIN/sawmill" check disk
