# BUSE: random calls of ports, attributes and disks: each returns, none warns, nothing is left
# set: quick
# seconds: 300 3600
# drivers: buse
# expects-io-errors
. "$VM_TESTS/buse/parts/device.sh"

calls=${VM_CALLS:-$(quick_or_full 20000 1000000)}
seed=${VM_SEED:-$RANDOM}
echo "VM_SEED=$seed VM_CALLS=$calls"
load
"$at/fuzz" "$seed" "$calls"
udevadm settle
for left in "$CONFIG"/* /dev/buse*; do
    [[ ! -e $left ]] || fail "$left is left"
done
! grep '\[buse\]' /proc/vmallocinfo || fail "memory is left"
