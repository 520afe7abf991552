# BUSE: the module's arithmetic under KUnit, where the guest's kernel has that
# set: full
# seconds: 60
# drivers: buse
. "$VM_TESTS/buse/parts/device.sh"

[[ -e $at/buse_test.ko ]] || { echo "this kernel has no KUnit" && exit 0; }
# Not cleared: the lab looks at the whole log.
insmod "$at/buse_test.ko"
rmmod buse_test
dmesg | grep -E "(^|\])[[:space:]]*(# )?(not )?ok|buse_hazard" >"$SCRATCH/said"
cat "$SCRATCH/said"
grep -q "ok 1 buse_hazard\|ok 1 - buse_hazard" "$SCRATCH/said" || fail "KUnit says no ok"
! grep -q "not ok" "$SCRATCH/said" || fail "a test failed"
