# A busy mount that is left behind fails the script
# fails-with: left something mounted

mkdir -p inside
mount -t tmpfs busy inside
mkfifo inside/pipe
setsid bash -c "echo \$BASHPID >/sys/fs/cgroup/cgroup.procs; cd inside; exec sleep 60" &
# It has left the group of the test, and so outlives it.
sleep 1
