# a ublk device keeps every clause of the contract of doors
# set: full
# seconds: 900
# needs: ublk_drv
# A device that is stopped at once fails what udev reads of it.
# expects-io-errors
. "$VM_TESTS/scene.sh"

"$BIN/ublk_clauses"
looked_through
