# BDUS's own kernel module beside ublk, before drivers that do nothing; bench/bdus.py calls this
# set: bench
# seconds: 3600
# expects-io-errors
exec python3 "$VM_TESTS/../../bench/bdus.py" --inside
