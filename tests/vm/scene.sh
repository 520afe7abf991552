# The common beginning of tests in a guest: `. "$VM_TESTS/scene.sh"`. It is not a test itself.
#
# shellcheck shell=bash
export SAWMILL_STORE=file://$SCRATCH/store

# quick_or_full A B: a count, A for the quick set and B for the full one.
quick_or_full() { if [[ $SET == quick ]]; then echo "$1"; else echo "$2"; fi; }

# await SECONDS COMMAND...: until it succeeds; fails, saying which, when the time is up.
await() {
    local end=$((SECONDS + $1))
    shift
    until "$@" 2>/dev/null; do
        ((SECONDS < end)) || { echo "timed out: $*" >&2 && return 1; }
        sleep 0.05
    done
}

# serve WORD...: `sawmill serve` of these words, until it reports that it is ready.
# Its process is $server.
serve() {
    : >"$SCRATCH/serve.out"
    "$BIN/sawmill" serve "$@" >"$SCRATCH/serve.out" &
    server=$!
    await 60 ready_or_dead
    grep -q . "$SCRATCH/serve.out" || { echo "the server ended" >&2 && return 1; }
}
ready_or_dead() { grep -q . "$SCRATCH/serve.out" || ! kill -0 "$server"; }

# kill_server: by kill -9, without a chance to clean up.
kill_server() {
    kill -9 "$server"
    wait "$server" 2>/dev/null || true
}

# filesystem_life KIND DEVICE: makes it, fills it to the brim,
# reads all back after a new mount, checks it.
filesystem_life() {
    local kind=$1 device=$2 at=$SCRATCH/mounted n=0 options=()
    [[ $kind == ext4 ]] && options=(-q -F) || options=(-q -f)
    "mkfs.$kind" "${options[@]}" "$device"
    mkdir -p "$at"
    mount "$device" "$at"
    head -c 4M /dev/urandom >"$SCRATCH/piece"
    while cat "$SCRATCH/piece" <(echo "$n") >"$at/file-$n" 2>/dev/null; do n=$((n + 1)); done
    rm "$at/file-$n"
    for i in $(seq 0 4 $((n - 1))); do rm "$at/file-$i"; done
    sync -f "$at"
    fstrim "$at"
    (cd "$at" && sha256sum file-*) >"$SCRATCH/sums"
    umount "$at"
    mount "$device" "$at"
    (cd "$at" && sha256sum --quiet --check "$SCRATCH/sums")
    umount "$at"
    case $kind in
    ext4) e2fsck -f -n "$device" ;;
    xfs) xfs_repair -n "$device" ;;
    btrfs) btrfs check "$device" ;;
    esac >"$SCRATCH/fsck" 2>&1 || { cat "$SCRATCH/fsck" && return 1; }
    looked_through
    echo "$kind: $n files filled it"
}

# verify_while DEVICE COMMAND...: fio writes and verifies over and over as long as the command runs,
# and both must succeed. FIO_OPTIONS may hold more for fio.
verify_while() {
    local device=$1 runs=0
    shift
    rm -f "$SCRATCH/enough"
    (
        until [[ -e $SCRATCH/enough ]]; do
            fio --name=verify --filename="$device" --rw=randwrite --bsrange=4k-64k \
                --size=32M --direct=1 --ioengine=libaio --iodepth=16 --verify=crc32c \
                --verify_fatal=1 --randrepeat=0 --fsync=64 ${FIO_OPTIONS:-} >"$SCRATCH/fio" 2>&1 ||
                { cat "$SCRATCH/fio" && exit 1; }
            runs=$((runs + 1))
        done
        echo "fio wrote and verified $runs times"
    ) &
    local fio=$!
    "$@" || { touch "$SCRATCH/enough" && return 1; }
    touch "$SCRATCH/enough"
    wait "$fio"
    looked_through
}

# same_bytes_beside VOLUME NODE: what is written to the node comes through another door, too.
same_bytes_beside() {
    local volume=$1 node=$2 uri
    uri=$("$BIN/sawmill" door add "$volume" --nbd "unix:$SCRATCH/second.sock")
    head -c 1M /dev/urandom >"$SCRATCH/bytes"
    dd if="$SCRATCH/bytes" of="$node" bs=1M oflag=direct conv=fsync status=none
    nbdcopy "$uri" "$SCRATCH/whole"
    cmp -n 1048576 "$SCRATCH/whole" "$SCRATCH/bytes"
    rm "$SCRATCH/whole"
    "$BIN/sawmill" door remove "$volume" "$uri"
}

# looked_through: until udev has probed every disk that was closed after writing. Removing a disk
# before that fails those reads, which the kernel logs as I/O errors.
looked_through() { udevadm settle; }
