# A module that is still in use fails the script, and the next one gets another guest
# needs: nbd
# fails-with: left a module in use

"$BIN/nbd_null" "$SCRATCH/sock" < <(exec sleep infinity) &
until [[ -S $SCRATCH/sock ]]; do sleep 0.05; done
nbd-client -unix "$SCRATCH/sock" /dev/nbd0 -N memory
exec 9</dev/nbd0
# Held open outside the group of the test.
setsid bash -c "echo \$BASHPID >/sys/fs/cgroup/cgroup.procs; exec sleep 600" &
sleep 1
