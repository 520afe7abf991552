# sawmill verify-crash on a ublk device: its server killed or replaced under requests, many times
# set: quick
# seconds: 300 1500
# needs: ublk_drv
. "$VM_TESTS/scene.sh"

rounds=${VM_KILLS:-$(quick_or_full 3 25)}
"$BIN/sawmill" create disk --size 16M
cat >crash <<'WORDS'
. "$VM_TESTS/scene.sh"
victim=$("$BIN/sawmill" device list --json | jq '.[0].server_pid')
kill -9 "$victim"
while [[ -e /proc/$victim/exe ]]; do sleep 0.01; done
serve disk --ublk --journal "$SCRATCH/journal" --journal-bytes 64M --cache-bytes 0
WORDS
serve disk --ublk --journal "$SCRATCH/journal" --journal-bytes 64M --cache-bytes 0
node=$(cat "$SCRATCH/serve.out")
verify() {
    "$BIN/sawmill" verify-crash --target "$node" --overwrite --trim --rule prefix \
        --rounds "$rounds" --requests 300 --seed "$RANDOM" "$@"
}
verify --crash "bash -euo pipefail crash"
verify --crash "$BIN/sawmill handoff disk --timeout 120s --stall-max 60s"

# Checks the check itself: foreign writes meanwhile must count as an illegal state.
spoil="dd if=/dev/urandom of=$node bs=4k count=16 oflag=direct status=none"
! verify --crash "$spoil" >found || { echo "spoilt bytes were not found" && exit 1; }
grep -q 'found *a loss' found

server=$("$BIN/sawmill" device list --json | jq '.[0].server_pid')
kill "$server"
await 60 test ! -e "$node"
"$BIN/sawmill" check disk
