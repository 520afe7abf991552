# ext4, xfs and btrfs live on the kernel's NBD device: made, filled, trimmed, read back, checked
# set: quick
# seconds: 300 900
# needs: nbd
. "$VM_TESTS/scene.sh"

kinds=$(quick_or_full "ext4" "ext4 xfs btrfs")
for kind in $kinds; do
    "$BIN/sawmill" create "disk-$kind" --size "$(quick_or_full 96M 320M)"
    serve "disk-$kind" --nbd "unix:$SCRATCH/sock" --journal "$SCRATCH/journal" --journal-bytes 128M
    nbd-client -unix "$SCRATCH/sock" /dev/nbd0 -N "disk-$kind" -b 4096 -C 2
    filesystem_life "$kind" /dev/nbd0
    nbd-client -d /dev/nbd0
    kill "$server"
    wait "$server"
    "$BIN/sawmill" check "disk-$kind"
    "$BIN/sawmill" delete "disk-$kind" --yes
    rm "$SCRATCH/journal"
done
