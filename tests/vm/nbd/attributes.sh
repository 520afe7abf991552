# The kernel's NBD client sees the size of a disk, that it has a cache, and what it can do
# set: quick
# seconds: 60
# needs: nbd
. "$VM_TESTS/scene.sh"

"$BIN/nbd_null" "$SCRATCH/sock" < <(exec sleep infinity) &
await 30 test -S "$SCRATCH/sock"
nbd-client -unix "$SCRATCH/sock" /dev/nbd0 -N memory -b 4096
trap 'nbd-client -d /dev/nbd0' EXIT
expect() {
    local value
    value=$(cat "/sys/block/nbd0/$1")
    [[ $value == "$2" ]] || { echo "$1 is $value, not $2" && return 1; }
}
expect size $((1 << 21))
expect queue/write_cache "write back"
expect queue/fua 1
expect queue/rotational 0
expect queue/logical_block_size 4096
[[ $(cat /sys/block/nbd0/queue/discard_max_bytes) -gt 0 ]]
[[ $(cat /sys/block/nbd0/queue/write_zeroes_max_bytes) -gt 0 ]]
