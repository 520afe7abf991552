# the five examples in Python keep every clause of the contract behind ublk, killed and replaced too
# set: full
# seconds: 3600
# needs: ublk_drv
. "$VM_TESTS/scene.sh"
. "$VM_TESTS/drivers.sh"

export PYTHONPATH=$VM_TESTS/../../sdk/python
judge python3 "$PYTHONPATH/examples/%.py"
