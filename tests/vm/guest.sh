#!/usr/bin/env bash
# The guest's side of the lab: runs the tests that run.py wrote into the plan, one after the other,
# and leaves each test's output, kernel log and outcome in the shared folder.
#
#   guest.sh SHARED_FOLDER
#
# Each test has its own control group, scratch folder and modules, all of which must be removable
# when it ends. Anything that cannot be ended (a process that waits in the kernel forever, a module
# still in use) fails its test and ends this guest, and run.py boots another for the rest.
#
# Not here: which tests there are, time limits of the guest as a whole (run.py).
set -uo pipefail

share=$1
groups=/sys/fs/cgroup
room=/run/lab
end_s=30 # for killed processes to be gone
# Text that a kernel log must not contain. A test that breaks its own disk declares that.
io_errors='I/O error|EXT4-fs (error|warning)|XFS .*([Cc]orrupt|error)|BTRFS (error|critical)'
io_errors+='|Aborting journal'
faults='BUG:|WARNING:|Oops|general protection|Kernel panic|blocked for more than|UBSAN|refcount'

export BIN=$room/bin SET VM_TESTS=${0%/*}
# Variables that the host passes on.
set -a
. "$share/environment"
set +a

mkdir -p "$room"
mount -t tmpfs -o size=75% lab "$room"
cp -r "$share/bin" "$BIN"
dmesg --console-level warn
ip link set lo up
# Emulation is slow, and so is a busy machine.
sysctl -qw kernel.hung_task_timeout_secs=240 kernel.panic_on_oops=1
touch "$share/ready"

# until_s SECONDS COMMAND...: whether it succeeded within that time.
until_s() {
    local end=$((SECONDS + $1))
    shift
    until "$@"; do
        ((SECONDS < end)) || return 1
        sleep 0.1
    done
}
emptied() { grep -q '^populated 0' "$groups/$1/cgroup.events"; }

# Ends a test's processes, wherever they are by now.
end_processes() {
    local group=$1 pid
    echo 1 >"$groups/$group/cgroup.kill"
    if until_s "$end_s" emptied "$group"; then
        rmdir "$groups/$group"
        return
    fi
    for pid in $(cat "$groups/$group/cgroup.procs"); do
        echo "does not die: $(tr '\0' ' ' <"/proc/$pid/cmdline") ($(cat "/proc/$pid/comm"))"
        sed 's/^/    /' /proc/"$pid"/task/*/stack 2>/dev/null
    done
    return 1
}
unmount_below() {
    local place outcome=0
    while read -r place; do
        umount "$place" || { umount -l "$place" && outcome=1; }
    done < <(awk -v at="$1" 'index($2, at) == 1 { print $2 }' /proc/mounts | tac)
    return "$outcome"
}
unload() {
    local module
    for module in "$@"; do
        # A module that releases its last users takes a moment.
        if ! until_s "$end_s" modprobe --quiet --remove "$module"; then
            echo "$module is still in use"
            return 1
        fi
    done
}

# one NAME SECONDS EXPECTS_IO_ERRORS MODULE...: writes NAME.outcome: seconds, then "ok" or why not.
one() {
    local name=$1 seconds=$2 expects=$3 from=$SECONDS outcome why=() group=lab-${1//\//-} module
    shift 3
    export SCRATCH=$room/scratch HOME=$room/scratch XDG_RUNTIME_DIR=$room/scratch
    mkdir -p "$share/${name%/*}" "$SCRATCH" "$groups/$group"
    mount -t tmpfs -o size=75% scratch "$SCRATCH"
    echo "$name" >"$share/current"
    echo "lab: begin $name" >/dev/kmsg
    {
        for module in "$@"; do
            modprobe "$module" || why+=("no module $module")
        done
        if ((!${#why[@]})); then
            (
                echo "$BASHPID" >"$groups/$group/cgroup.procs"
                cd "$SCRATCH" || exit
                exec timeout --kill-after=10 "$seconds" bash -euo pipefail "$VM_TESTS/$name.sh"
            ) </dev/null
            outcome=$?
            case $outcome in
            0) ;;
            124 | 137) why+=("still running after $seconds s") ;;
            *) why+=("ended with $outcome") ;;
            esac
        fi
        end_processes "$group" || why+=("processes do not die") ends=1
        rm -rf /dev/shm/*
        unmount_below "$SCRATCH" || why+=("left something mounted")
        unload "$@" || why+=("left a module in use") ends=1
    } >"$share/$name.log" 2>&1
    echo "lab: end $name" >/dev/kmsg
    dmesg | awk -v name="$name" '
        index($0, "lab: begin " name) { on = 1; next } index($0, "lab: end " name) { on = 0 } on' \
        >"$share/$name.dmesg"
    [[ $expects == yes ]] && forbidden=$faults || forbidden="$io_errors|$faults"
    grep -qE "$forbidden" "$share/$name.dmesg" &&
        why+=("kernel: $(grep -m 1 -E "$forbidden" "$share/$name.dmesg" | sed 's/^\[[^]]*\] //')")
    local result=ok
    ((${#why[@]})) && result=$(printf '%s; ' "${why[@]}")
    echo "$((SECONDS - from)) ${result%; }" >"$share/$name.outcome.new"
    mv "$share/$name.outcome.new" "$share/$name.outcome"
}

ends=0
while read -r -a words; do
    one "${words[@]}"
    ((ends)) && break
done <"$share/plan"
# Not through init, which would wait for processes that cannot end.
sync
echo 1 >/proc/sys/kernel/sysrq
echo o >/proc/sysrq-trigger
sleep 60
