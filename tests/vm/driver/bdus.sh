# a program for BDUS is a ublk device: numbers, flush, destroy, replaced under load, without rights
# set: full
# seconds: 900
# needs: ublk_drv
# drivers: bdus
# expects-io-errors
. "$VM_TESTS/scene.sh"

programs=$BIN/drivers/bdus
export LD_LIBRARY_PATH=$programs SAWMILL=$BIN/sawmill
image=$SCRATCH/image
starts=0

fail() { echo "$*" >&2 && exit 1; }
bdus() { "$programs/bdus" "$@"; }
has_output() { [[ -s $output ]] || ! kill -0 "$driver"; }
is_gone() { [[ ! -e $1 ]]; }
# ends_with CODE: how the driver must end.
ends_with() {
    local code=0
    wait "$driver" || code=$?
    ((code == $1)) || fail "the driver ended with $code, not $1"
}
# start WORD...: a driver in the foreground; $driver, and its facts about its device: $id, $node,
# $numbers.
start() {
    starts=$((starts + 1))
    output=$SCRATCH/output-$starts
    "$programs/ram" foreground "$@" >"$output" &
    driver=$!
    await 60 has_output
    read -r id node numbers <"$output" || fail "no device with: $*"
}

echo "== a device with numbers"
start log
[[ $node == /dev/ublkb* && -b $node ]] || fail "$node is no ublk device"
[[ $numbers == "$(cat "/sys/class/block/${node##*/}/dev")" ]] || fail "$node is not $numbers"
[[ $(blockdev --getsize64 --getss "$node" | tr '\n' ' ') == "16777216 512 " ]] ||
    fail "other attributes"
head -c 1M /dev/urandom >"$SCRATCH/data"
dd if="$SCRATCH/data" of="$node" bs=64k seek=3 conv=notrunc status=none
bdus flush "$node"
bdus logs "$id" >"$SCRATCH/logs"
grep -q '^.*flush() = 0' "$SCRATCH/logs" || fail "no flush: $(tail -n 5 "$SCRATCH/logs")"
cmp -n 1M "$SCRATCH/data" <(dd if="$node" bs=64k skip=3 iflag=direct status=none) ||
    fail "other bytes"
[[ $(bdus version --kbdus) == 0.1.2 ]] || fail "another version"

echo "== what no device carries is refused, and zeroes are not"
blkdiscard --zeroout --offset 196608 --length 65536 "$node"
cmp -n 64K /dev/zero <(dd if="$node" bs=64k skip=3 iflag=direct status=none) || fail "no zeroes"
! blkdiscard --secure "$node" 2>"$SCRATCH/refused" || fail "a secure erase succeeded"
grep -q 'not supported' "$SCRATCH/refused" || fail "refused otherwise: $(cat "$SCRATCH/refused")"
python3 -c 'import errno, fcntl, sys
try:
    fcntl.ioctl(open(sys.argv[1], "rb"), 0xBD01)
except OSError as error:
    sys.exit(error.errno != errno.ENOTTY)
sys.exit("carried")' "$node" || fail "an ioctl is not refused with ENOTTY"

echo "== destroyed, by path and by id, and gone with a driver that dies"
bdus destroy "$node"
ends_with 0
await 30 is_gone "$node"
bdus destroy "$id" || fail "destroying a missing device fails"
start
kill -9 "$driver"
ends_with 137
await 60 is_gone "$node"

echo "== not for everybody"
if setpriv --reuid 65534 --regid 65534 --clear-groups "$programs/ram" foreground \
    2>"$SCRATCH/refused"; then
    fail "an unprivileged user created a block device"
fi
grep -q 'errno 1:' "$SCRATCH/refused" || fail "refused otherwise: $(cat "$SCRATCH/refused")"

echo "== a driver without rights, whose host keeps them"
start drop
grep -q $'^Uid:\t65534\t65534\t65534\t65534' "/proc/$driver/status" || fail "it has its rights"
mkfs.ext4 -q -F "$node"
mkdir "$SCRATCH/mounted"
mount "$node" "$SCRATCH/mounted"
cp "$SCRATCH/data" "$SCRATCH/mounted/data"
umount "$SCRATCH/mounted"
e2fsck -f -n "$node"
bdus destroy "$node"
ends_with 0

echo "== a daemon"
"$programs/ram" "file=$image" >"$SCRATCH/daemon"
read -r id node numbers <"$SCRATCH/daemon"
# Held open, because the last close would make the kernel write.
exec {held}<>"$node"
dd if="$SCRATCH/data" of="$node" bs=64k conv=notrunc status=none
bdus flush "$id"
cmp -n 1M "$SCRATCH/data" "$image" || fail "a flush leaves bytes with the kernel"
dd if="$SCRATCH/data" of="$node" bs=64k seek=32 conv=notrunc status=none
bdus destroy "$id" {held}<&- &
destroying=$!
await 60 is_gone "$node"
# The kernel keeps the device's number while a process has it open.
exec {held}<&-
wait "$destroying"
cmp "$SCRATCH/data" <(dd if="$image" bs=64k skip=32 count=16 status=none) ||
    fail "destroyed too early"

echo "== replaced, and killed and followed, under load"
start recoverable "file=$image" threads=4
first=$node
followed() {
    local round old at=$id
    for round in $(seq "${VM_ROUNDS:-6}"); do
        old=$driver
        ((round % 2)) || kill -9 "$old"
        start recoverable "file=$image" threads=4 "rerun=$at"
        [[ $id == "$at" && $node == "$first" ]] || fail "round $round: $id $node"
        wait "$old" || ((round % 2 == 0)) || fail "round $round: the replaced driver failed"
    done
}
FIO_OPTIONS="--size=16M --iodepth=8" verify_while "$node" followed
bdus destroy "$first"
ends_with 0
await 30 is_gone "$first"
[[ $("$BIN/sawmill" driver list --json) == "[]" ]] || fail "a host is left"
