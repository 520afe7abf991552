# A volume as /dev/ublkbN: a file system lives on it, kills and hand-offs pause it, other doors come
# set: quick
# seconds: 300 1800
# needs: ublk_drv
. "$VM_TESTS/scene.sh"

rounds=${VM_KILLS:-$(quick_or_full 2 25)}
doors=(--ublk --journal "$SCRATCH/journal" --journal-bytes 128M --cache-bytes 0)
"$BIN/sawmill" create disk --size "$(quick_or_full 96M 320M)"
serve disk "${doors[@]}"
node=$(cat "$SCRATCH/serve.out")
[ -b "$node" ] || { echo "no block device: $node" && exit 1; }
[ "$(readlink -f /dev/sawmill/disk)" = "$node" ] || { echo "no link to $node" && exit 1; }

life() { filesystem_life "$1" "$node"; }
# The process that serves now.
current() { "$BIN/sawmill" device list --json | jq '.[0].server_pid'; }

kill_and_replace() {
    for _ in $(seq "$rounds"); do
        "$BIN/sawmill" handoff disk --timeout 120s --stall-max 60s
        sleep "$((RANDOM % 2)).$((RANDOM % 10))"
        kill -9 "$(current)"
        serve disk "${doors[@]}"
        [ "$(cat "$SCRATCH/serve.out")" = "$node" ] || return 1
        sleep "0.$((RANDOM % 10))"
    done
    echo "$rounds hand-offs and $rounds kills"
}
verify_while "$node" kill_and_replace

same_bytes_beside disk "$node"
if [[ $SET == quick ]]; then life ext4; else life ext4 && life xfs; fi

server=$(current)
kill "$server"
await 60 test ! -e "$node"
# The node goes first, the device a moment later.
no_device() { [ "$("$BIN/sawmill" device list)" = "no ublk devices" ]; }
await 60 no_device
"$BIN/sawmill" check disk
