# BUSE: the original Go library, unchanged, on our module
# set: full
# seconds: 600
# drivers: buse buse_library
. "$VM_TESTS/buse/parts/device.sh"

load
for round in 1 2; do
    "$BIN/drivers/buse_library/library" "$SCRATCH/image" 3 >"$SCRATCH/said" &
    daemon=$!
    await 60 runs_or_dead 3
    kill -0 "$daemon" || fail "round $round: the library ended"
    fio --name=verify --filename=/dev/buse3 --rw=randwrite --bsrange=4k-128k --size=24M --direct=1 \
        --ioengine=libaio --iodepth=16 --verify=crc32c --verify_fatal=1 --fsync=64 \
        --randrepeat=0 >"$SCRATCH/fio" 2>&1 || { cat "$SCRATCH/fio" && exit 1; }
    dd if=/dev/urandom of="$SCRATCH/bytes" bs=64k count=16 status=none
    dd if="$SCRATCH/bytes" of=/dev/buse3 bs=64k seek=400 oflag=direct status=none
    udevadm settle
    kill -TERM "$daemon"
    wait "$daemon" || fail "round $round: it ended with $?"
    [[ ! -e $CONFIG/3 ]] || fail "round $round: the device stayed"
    [[ $(tr '\n' ' ' <"$SCRATCH/said") == "BusePreRun BusePostRemove " ]] || fail "$(cat said)"
    held=$(dd if="$SCRATCH/image" bs=64k skip=400 count=16 status=none | sha256sum)
    [[ $held == "$(sha256sum <"$SCRATCH/bytes")" ]] || fail "round $round: other bytes"
done
echo "two lives of the library"
