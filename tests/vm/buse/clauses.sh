# a device of the door `--buse` keeps every clause of the contract of doors
# set: quick
# seconds: 300 900
# drivers: buse
# A device that is stopped at once fails what udev reads of it.
# expects-io-errors
. "$VM_TESTS/buse/parts/device.sh"

load
"$BIN/buse_clauses"
looked_through
