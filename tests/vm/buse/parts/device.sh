# Devices of the BUSE module: `. "$VM_TESTS/buse/parts/device.sh"`. It is not a test itself.
#
# $BIN/drivers/buse has the module for this kernel, and the daemon. The module is removed when the
# script ends, which fails while anything of it is in use.
#
# shellcheck shell=bash
. "$VM_TESTS/scene.sh"

CONFIG=/sys/kernel/config/buse
at=${VM_BUSE:-$BIN/drivers/buse}

fail() {
    echo "$*" >&2
    exit 1
}

load() {
    modprobe configfs
    mountpoint -q /sys/kernel/config || mount -t configfs none /sys/kernel/config
    insmod "$at/buse.ko"
    trap unload_at_end EXIT
}
unload_at_end() {
    local status=$? index
    trap - EXIT
    jobs -p | xargs -r kill -9 2>/dev/null || true
    for index in "$CONFIG"/*; do
        [[ ! -d $index ]] || rmdir "$index" || status=1
    done
    await 30 rmmod buse || status=1
    exit "$status"
}

# configure INDEX NAME=VALUE...: makes a device, without power.
configure() {
    local index=$1 option
    shift
    mkdir "$CONFIG/$index"
    for option in "$@"; do
        echo "${option#*=}" >"$CONFIG/$index/${option%%=*}"
    done
}
power() { echo "$2" >"$CONFIG/$1/power"; }

# start_daemon INDEX [DELAY_US]: its process is $daemon. Waits for the disk.
start_daemon() {
    "$at/daemon" "$1" "$SCRATCH/image-$1" "${2:-0}" &
    daemon=$!
    await 60 runs_or_dead "$1"
    kill -0 "$daemon" || fail "the daemon ended"
}
runs_or_dead() { is_there "$1" || ! kill -0 "$daemon"; }
is_there() { [[ -b /dev/buse$1 && $(cat "$CONFIG/$1/state") == running ]]; }
is_gone() { [[ ! -e /dev/buse$1 ]]; }
state_is() { [[ $(cat "$CONFIG/$1/state") == "$2" ]]; }

kill_daemon() {
    kill -9 "$daemon"
    wait "$daemon" 2>/dev/null || true
}

# stop INDEX: in order, with a daemon that ends by itself.
stop() {
    udevadm settle
    power "$1" 0
    wait "$daemon" || fail "the daemon ended with $?"
    is_gone "$1" || fail "the disk stayed"
    rmdir "$CONFIG/$1"
}
has_ended() { ! kill -0 "$1" 2>/dev/null; }
