# ext4, xfs and btrfs on a ublk device: made, filled, checked, mounted again, the same files
# set: quick
# seconds: 400
# needs: ublk_drv
. "$VM_TESTS/ublk/parts/server.sh"

start_server fs --size 320 --queues 2 --depth 32
mkdir -p mounted source
for n in $(seq 40); do
    mkdir -p source/$((n % 5))
    head -c $((n * n * 400)) /dev/urandom >source/$((n % 5))/$n
done
(cd source && find . -type f -exec sha256sum {} + | sort -k 2) >sums

try() {
    local kind=$1 check=$2
    shift 2
    modprobe "$kind" 2>/dev/null
    "$@" "$NODES" >mkfs.log 2>&1 || fail "$kind: $(cat mkfs.log)"
    mount -t "$kind" -o discard "$NODES" mounted || fail "$kind cannot be mounted"
    cp -r source/. mounted/ || fail "$kind: files cannot be copied"
    sync
    rm -r mounted/3 && cp -r source/3 mounted/
    umount mounted || fail "$kind cannot be unmounted"
    $check "$NODES" >check.log 2>&1 || fail "$kind: its check finds: $(cat check.log)"
    mount -t "$kind" "$NODES" mounted || fail "$kind cannot be mounted again"
    (cd mounted && find . -path ./lost+found -prune -o -type f -exec sha256sum {} + |
        sort -k 2) >found
    cmp sums found || fail "$kind: other files came back"
    fstrim mounted || fail "$kind: no fstrim"
    umount mounted || fail "$kind cannot be unmounted again"
    echo "$kind: done"
}
try ext4 "fsck.ext4 -fn" mkfs.ext4 -q -F
try xfs "xfs_repair -n" mkfs.xfs -q -f
try btrfs "btrfs check --readonly" mkfs.btrfs -q -f
stop_server
