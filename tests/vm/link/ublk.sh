# A device of another machine as /dev/ublkbN: a file system lives on it, target deaths are pauses
# seconds: 1500
# needs: ublk_drv
# expects-io-errors
. "$VM_TESTS/scene.sh"

rounds=${VM_KILLS:-10}
FIO_OPTIONS=--size=4M
link=udp:127.0.0.1:9700,tcp:127.0.0.1:9700
"$BIN/sawmill" create disk --size 32M
"$BIN/sawmill" link key "$SCRATCH/key"

# begin NAME WORD...: `sawmill` of these words, until it reports that it is ready.
# Its process is $process.
begin() {
    local output=$SCRATCH/$1.out
    shift
    : >"$output"
    "$BIN/sawmill" "$@" --key-file "$SCRATCH/key" >"$output" &
    process=$!
    await 60 has_output_or_ended "$output"
    grep -q . "$output" || { echo "'$*' ended" >&2 && return 1; }
}
has_output_or_ended() { grep -q . "$1" || ! kill -0 "$process"; }
target() {
    begin target target disk --listen "$link" --journal "$SCRATCH/journal" --journal-bytes 64M \
        --cache-bytes 0
    target=$process
}
attach() {
    begin attach attach "link:$link/disk" --ublk "$@"
    initiator=$process
    node=$(cat "$SCRATCH/attach.out")
    [ -b "$node" ] || { echo "no block device: $node" && return 1; }
}
# detach: ends cleanly, which leaves no device behind.
detach() {
    kill "$initiator"
    wait "$initiator"
    await 60 test ! -e "$node"
}

kill_targets() {
    for _ in $(seq "$rounds"); do
        sleep "0.$((RANDOM % 10))"
        kill -9 "$target"
        wait "$target" 2>/dev/null || true
        # Requests wait for it, and the kernel's log would show one that failed.
        sleep "0.$((RANDOM % 5))"
        target
    done
    echo "$rounds targets killed"
}

# The number of errors in the kernel's log.
errors() { dmesg | grep -c 'I/O error' || true; }
is_waiting() { awk '{ exit !($1 + $2) }' "/sys/block/${node#/dev/}/inflight"; }

errors=$(errors)
target
attach
filesystem_life ext4 "$node"
verify_while "$node" kill_targets
detach
# A cache keeps writes that the dead target had not answered, and flushes at its end.
attach --cache write-back
verify_while "$node" kill_targets
head -c 1M /dev/urandom >"$SCRATCH/bytes"
dd if="$SCRATCH/bytes" of="$node" bs=1M oflag=direct status=none
detach
[ "$("$BIN/sawmill" device list)" = "no ublk devices" ]

[ "$(errors)" = "$errors" ] || { echo "the kernel saw errors" && exit 1; }

# Told twice to end while its target is away, it ends, and so do waiting users of the device.
attach
kill -9 "$target"
wait "$target" 2>/dev/null || true
dd if="$SCRATCH/bytes" of="$node" bs=4k count=1 oflag=direct status=none 2>/dev/null &
writer=$!
await 60 is_waiting
kill "$initiator"
sleep 1
kill "$initiator"
wait "$initiator" && echo "it reported that all was flushed" && exit 1
wait "$writer" && echo "a write that went nowhere succeeded" && exit 1
await 60 test ! -e "$node"

target
kill "$target"
wait "$target"
serve disk --read-only --cache-bytes 0 --nbd "unix:$SCRATCH/nbd.sock"
nbdcopy "nbd+unix:///disk?socket=$SCRATCH/nbd.sock" "$SCRATCH/whole"
cmp -n 1048576 "$SCRATCH/whole" "$SCRATCH/bytes"
