# BUSE: what the module answers to every kind of call, right and wrong
# set: quick
# seconds: 300 600
# drivers: buse
# expects-io-errors
. "$VM_TESTS/buse/parts/device.sh"

load
timeout 250 python3 "$VM_TESTS/buse/parts/interface.py"
