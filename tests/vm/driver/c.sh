# the five examples in C keep every clause of the contract behind ublk, killed and replaced too
# set: full
# seconds: 2400
# needs: ublk_drv
# drivers: c
. "$VM_TESTS/scene.sh"
. "$VM_TESTS/drivers.sh"

export LD_LIBRARY_PATH=$BIN/drivers/c
judge "$BIN/drivers/c/%"
