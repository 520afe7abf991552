# a driver behind ublk and loop devices keeps every clause of the contract, killed and replaced too
# set: full
# seconds: 600
# needs: ublk_drv loop
. "$VM_TESTS/scene.sh"

truncate -s 24M "$SCRATCH/a"
for door in ublk loop; do
    "$BIN/sawmill" conform --door "$door" -- "$BIN/file" "$SCRATCH/a" 24M
done
