# BUSE: an ext4 that is filled, trimmed and read back, and grows with its disk
# set: full
# seconds: 900
# drivers: buse
. "$VM_TESTS/buse/parts/device.sh"

load
configure 0 size=$((64 << 20)) hw_queues=2 blocksize=4096 can_discard=1 can_write_zeroes=1 \
    collision_area_size=65536 write_chunk_size=524288 write_shm_size=4194304
power 0 1
start_daemon 0 500
filesystem_life ext4 /dev/buse0
stop 0

# A daemon that expects the disk to grow.
configure 0 size=$((64 << 20)) hw_queues=2
rm "$SCRATCH/image-0"*
power 0 1
DAEMON_SIZE=$((96 << 20)) start_daemon 0
mkfs.ext4 -q -F /dev/buse0
mkdir -p "$SCRATCH/mounted"
mount /dev/buse0 "$SCRATCH/mounted"
echo $((96 << 20)) >"$CONFIG/0/size"
[[ $(blockdev --getsize64 /dev/buse0) == $((96 << 20)) ]]
resize2fs /dev/buse0 2>"$SCRATCH/resize"
head -c 70M /dev/urandom >"$SCRATCH/mounted/file"
sync -f "$SCRATCH/mounted"
sha256sum "$SCRATCH/mounted/file" >"$SCRATCH/sum"
umount "$SCRATCH/mounted"
mount /dev/buse0 "$SCRATCH/mounted"
sha256sum --quiet --check "$SCRATCH/sum"
umount "$SCRATCH/mounted"
e2fsck -f -n /dev/buse0 >"$SCRATCH/fsck" 2>&1 || { cat "$SCRATCH/fsck" && exit 1; }
stop 0
echo "grown"
