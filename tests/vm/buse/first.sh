# BUSE: disks of several shapes hold what fio writes, and what they hold stays after power off
# set: quick
# seconds: 300 900
# drivers: buse
. "$VM_TESTS/buse/parts/device.sh"

verify() {
    fio --name=verify --filename="/dev/buse$1" --rw=randrw --bsrange="$2" --size=24M --direct=1 \
        --ioengine=libaio --iodepth=16 --verify=crc32c --verify_fatal=1 --fsync=64 \
        --randrepeat=0 >"$SCRATCH/fio" 2>&1 || { cat "$SCRATCH/fio" && exit 1; }
}

# life INDEX RANGE NAME=VALUE...: a device from mkdir to rmdir.
life() {
    local index=$1 range=$2 blocks
    shift 2
    configure "$index" size=$((32 << 20)) "$@"
    power "$index" 1
    is_gone "$index" || fail "the disk is there before its daemon"
    start_daemon "$index" 2000
    verify "$index" "$range"
    # Chunks that are open when the power goes off reach the image as well.
    dd if=/dev/urandom of="$SCRATCH/bytes" bs=64k count=16 status=none
    dd if="$SCRATCH/bytes" of="/dev/buse$index" bs=64k seek=300 oflag=direct status=none
    stop "$index"
    blocks=$(dd if="$SCRATCH/image-$index" bs=64k skip=300 count=16 status=none | sha256sum)
    [[ $blocks == "$(sha256sum <"$SCRATCH/bytes")" ]] || fail "the image has other bytes: $*"
    rm "$SCRATCH/image-$index"*
    echo "held: $*"
}

load
life 0 4k-64k hw_queues=2
life 0 512-16k write_chunk_size=65536 write_shm_size=131072 collision_area_size=1536
life 1 4k-128k blocksize=4096 hw_queues=2 write_chunk_size=1048576 write_shm_size=1048576 \
    collision_area_size=65536 no_scheduler=0
life 2 512-256k hw_queues=2 read_shm_size=262144 chunk_age_ms=20 queue_depth=4
# Room for one block beside the records.
life 3 4k-32k write_chunk_size=8192 write_shm_size=16384 read_shm_size=4096
