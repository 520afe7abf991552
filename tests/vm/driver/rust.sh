# the five examples in Rust keep every clause of the contract behind ublk, killed and replaced too
# set: full
# seconds: 2400
# needs: ublk_drv
. "$VM_TESTS/scene.sh"
. "$VM_TESTS/drivers.sh"

judge "$BIN/%"
