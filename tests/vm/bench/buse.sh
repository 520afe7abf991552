# What a write costs before the BUSE module and ublk; bench/buse.py calls this and writes the page
# set: bench
# seconds: 3600
# drivers: buse
exec python3 "$VM_TESTS/../../bench/buse.py" --inside
