# A busy mount that is left behind fails the script
# fails-with: left something mounted

mkdir -p inside
mount -t tmpfs busy inside
mkfifo inside/pipe
setsid bash -c "echo \$BASHPID >/sys/fs/cgroup/cgroup.procs; cd inside; exec sleep 60" &
# The process has left the test's group, so it outlives the test.
sleep 1
