# What a request costs at each way into the kernel; bench/doors.py calls this and writes the page
# set: bench
# seconds: 7200
exec python3 "$VM_TESTS/../../bench/doors.py" --inside
