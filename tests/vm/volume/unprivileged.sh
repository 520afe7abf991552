# A user without privileges serves a volume as /dev/ublkbN: it ends with its server, the bytes stay
# set: full
# seconds: 200
# needs: ublk_drv
. "$VM_TESTS/scene.sh"

# What udev would do: the control node is for everybody,
# a device's nodes are for the user who added it.
chmod 666 /dev/ublk-control
chmod 755 "$SCRATCH/.."
install -d -o 1000 -m 700 home
export XDG_STATE_HOME=$PWD/home/state XDG_RUNTIME_DIR=$PWD/home SAWMILL_STORE=file://$PWD/home/store
as_user() { setpriv --reuid 1000 --regid 1000 --clear-groups "$@"; }
sawmill() { as_user "$BIN/sawmill" "$@"; }
give_nodes() {
    # Devices come and go: a missing one is not an error.
    until [[ -e $SCRATCH/enough ]]; do
        for node in /dev/ublk[bc][0-9]*; do chown 1000 "$node" 2>/dev/null || true; done
        sleep 0.1
    done
}
give_nodes &
giver=$!
begin() {
    : >"$SCRATCH/serve.out"
    setpriv --reuid 1000 --regid 1000 --clear-groups "$BIN/sawmill" serve disk --ublk \
        --ublk-unprivileged --journal-bytes 128M --cache-bytes 0 >"$SCRATCH/serve.out" &
    server=$!
    await 60 ready_or_dead
    node=$(cat "$SCRATCH/serve.out")
    [[ -b $node ]] || { echo "no block device: $node" && return 1; }
}

sawmill create disk --size 64M
begin
head -c 3000000 /dev/urandom >bytes
dd if=bytes of="$node" bs=64k conv=fsync,notrunc status=none
! sawmill handoff disk 2>refused || { echo "it was handed over" && exit 1; }
grep -q 'ends with its server' refused || { cat refused && exit 1; }
echo 3 >/proc/sys/vm/drop_caches
cmp -n 3000000 bytes "$node"
sawmill device list --json | jq -e '.[0].server_pid != null'
kill_server
no_device() { ! [[ -e $node ]]; }
await 60 no_device
begin
cmp -n 3000000 bytes "$node"
kill "$server"
wait "$server"
touch "$SCRATCH/enough"
wait "$giver"
[ "$(sawmill device list)" = "no ublk devices" ]
