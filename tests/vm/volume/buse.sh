# A volume as /dev/buseN: a file system lives on it, kills and hand-offs pause it, other doors come
# set: quick
# seconds: 400 1800
# drivers: buse
. "$VM_TESTS/buse/parts/device.sh"

rounds=${VM_KILLS:-$(quick_or_full 2 25)}
doors=(--buse --journal "$SCRATCH/journal" --journal-bytes 128M --cache-bytes 0)
"$BIN/sawmill" create disk --size "$(quick_or_full 96M 320M)"
"$BIN/sawmill" serve disk "${doors[@]}" 2>"$SCRATCH/refused" && fail "served without the module"
grep -q "load the kernel module" "$SCRATCH/refused" || fail "$(cat "$SCRATCH/refused")"
load
"$BIN/sawmill" serve disk --read-only --buse --cache-bytes 0 2>"$SCRATCH/refused" &&
    fail "read-only"
grep -q "makes no read-only disks" "$SCRATCH/refused" || fail "$(cat "$SCRATCH/refused")"
[ -z "$(ls "$CONFIG")" ] || fail "a device was left"
serve disk "${doors[@]}"
node=$(cat "$SCRATCH/serve.out")
[ -b "$node" ] || fail "no block device: $node"
[ "$(readlink -f /dev/sawmill/disk)" = "$node" ] || fail "no link to $node"

kill_and_replace() {
    for _ in $(seq "$rounds"); do
        kill_server
        serve disk "${doors[@]}"
        [ "$(cat "$SCRATCH/serve.out")" = "$node" ] || return 1
        sleep "0.$((RANDOM % 10))"
    done
    echo "$rounds kills"
}
verify_while "$node" kill_and_replace
hand_over() {
    for _ in $(seq "$rounds"); do
        "$BIN/sawmill" handoff disk --json --timeout 120s --stall-max 60s >"$SCRATCH/handoff"
        server=$(jq .pid "$SCRATCH/handoff")
        sleep "$((RANDOM % 2)).$((RANDOM % 10))"
    done
    echo "$rounds hand-offs"
}
verify_while "$node" hand_over

# Under another number, older writes would come later.
kill_server
"$BIN/sawmill" serve disk "${doors[@]/--buse/--buse=7}" 2>"$SCRATCH/refused" && fail "served"
grep -q -e "--buse=0 first" "$SCRATCH/refused" || fail "$(cat "$SCRATCH/refused")"
nbd=("${doors[@]/--buse/--nbd=unix:$SCRATCH/first.sock}")
"$BIN/sawmill" serve disk "${nbd[@]}" 2>"$SCRATCH/refused" && fail "served without it"
grep -q -e "serve it with --buse" "$SCRATCH/refused" || fail "$(cat "$SCRATCH/refused")"
# What has waited for too long fails, and completed writes are kept all the same.
head -c 256K /dev/urandom >"$SCRATCH/bytes"
dd if="$SCRATCH/bytes" of="$node" bs=64k oflag=direct status=none
echo 100 >"$CONFIG/${node#/dev/buse}/death_timeout_ms"
await 30 state_is "${node#/dev/buse}" failing
serve disk "${doors[@]}"
[ "$(cat "$SCRATCH/serve.out")" = "$node" ] || fail "another node"
echo 0 >"$CONFIG/${node#/dev/buse}/death_timeout_ms"
cmp -n 262144 "$node" "$SCRATCH/bytes" || fail "completed writes are lost"

# A server of another volume does not take it.
"$BIN/sawmill" create other --size 96M
"$BIN/sawmill" serve other --buse="${node#/dev/buse}" 2>"$SCRATCH/refused" && fail "taken"
grep -q "exists" "$SCRATCH/refused" || fail "$(cat "$SCRATCH/refused")"

# A flush hands over the open chunk.
same_bytes_beside disk "$node"

# It grows while it is used.
bytes=$(blockdev --getsize64 "$node")
"$BIN/sawmill" resize disk "$((bytes + (32 << 20)))"
[ "$(blockdev --getsize64 "$node")" = "$((bytes + (32 << 20)))" ] || fail "it has not grown"

# A second signal closes the volume at once: what the kernel has completed is in the volume, or
# waits for the next server.
ended() { ! kill -0 "$server"; }
for round in $(seq "$rounds"); do
    head -c 4M /dev/urandom >"$SCRATCH/bytes"
    kill -STOP "$server"
    dd if="$SCRATCH/bytes" of="$node" bs=64k oflag=direct status=none
    kill -TERM "$server"
    ((round % 2)) && kill -INT "$server"
    kill -CONT "$server"
    # Sometimes by the second signal, sometimes by a kill in the middle of the stop.
    sleep "0.0$((RANDOM % 9))"
    kill -KILL "$server" 2>/dev/null || true
    await 60 ended
    serve disk "${doors[@]}"
    [ "$(cat "$SCRATCH/serve.out")" = "$node" ] || fail "another node"
    cmp -n 4194304 "$node" "$SCRATCH/bytes" || fail "completed writes are lost"
done
# Somebody else switches the power off: the server still takes what is there.
dd if="$SCRATCH/bytes" of="$node" bs=64k seek=64 oflag=direct status=none
echo 0 >"$CONFIG/${node#/dev/buse}/power"
kill "$server"
await 60 ended
serve disk "${doors[@]}"
[ "$(cat "$SCRATCH/serve.out")" = "$node" ] || fail "another node"
cmp -n 4194304 --ignore-initial=4194304:0 "$node" "$SCRATCH/bytes" || fail "writes are lost"

for kind in ext4 $(quick_or_full "" "xfs btrfs"); do filesystem_life "$kind" "$node"; done
kill "$server"
await 60 test ! -e "$node"
await 60 test ! -e "$CONFIG/${node#/dev/buse}"
"$BIN/sawmill" check disk
