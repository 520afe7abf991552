# the five examples in Go keep every clause of the contract behind ublk, killed and replaced too
# set: full
# seconds: 2400
# needs: ublk_drv
# drivers: go
. "$VM_TESTS/scene.sh"
. "$VM_TESTS/drivers.sh"

judge "$BIN/drivers/go/%"
