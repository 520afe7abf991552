# what must not work with ublk devices does not, with a reason
# set: quick
# seconds: 200
# needs: ublk_drv
. "$VM_TESTS/ublk/parts/server.sh"

refuses() {
    local text=$1
    shift
    ! "$SERVER" "$@" </dev/null >refused.log 2>&1 || fail "not refused: $*"
    grep -q "$text" refused.log || fail "$* is refused with: $(cat refused.log)"
}
start_server one --size 16 --id 7 --queues 1
[ "$NODES" = /dev/ublkb7 ] || fail "another number was given: $NODES"
refuses "cannot add device 7" --size 16 --id 7
refuses "served by process $SERVER_PID" delete 7
refuses "another process holds device 7" --recover 7 --size 16
refuses "there is no device 9" --recover 9
refuses "there is no device 9" delete 9
! "$SERVER" sweep | grep -q . || fail "a living server's device was swept away"
crash_server
refuses "was made for memory 0, not for memory 1" --recover 7 --first 1 --size 16
refuses "more than the volume's" --recover 7 --size 8
dd if=/dev/ublkb7 of=read bs=4k count=1 iflag=direct status=none &
reader=$!
"$SERVER" list | grep -q 'state: Quiesced.*alive: false' || wait_for 40 sh -c \
    "$SERVER list | grep -q 'state: Quiesced.*alive: false'" ||
    fail "the server's death is not seen"
kill -0 $reader || fail "a reader did not wait for the next server"
start_server one --size 16 --recover 7
wait $reader || fail "a reader got an error"
crash_server
wait_for 40 sh -c "$SERVER sweep | grep -q 'deleted 7'" || fail "the orphan is not swept away"
[ -z "$("$SERVER" list)" ] || fail "a device is left"
rm -r /run/sawmill
start_server one --size 16 --id 7
rm -r /run/sawmill
"$SERVER" list | grep -q 'is_alive: true, is_ours: true' ||
    fail "without its file a device is not known"
refuses "served by process $SERVER_PID" delete 7
stop_server

# A device that was added, and whose server has no claim yet,
# beside the file of an older one of that number.
mkdir -p /run/sawmill/ublk
touch /run/sawmill/ublk/7
exec {claim}>>/run/sawmill/ublk/7
flock "$claim"
mkfifo half.in
"$SERVER" --size 16 --id 7 <half.in >half.out 2>server.half.err &
half=$!
exec {half_input}>half.in
wait_for 5 sh -c "$SERVER list | grep -q 'id: 7'" || fail "it was not added"
kill -STOP "$half"
flock -u "$claim"
"$SERVER" list | grep -q 'id: 7, state: Dead.*alive: true' ||
    fail "taken for an orphan: $("$SERVER" list)"
! "$SERVER" sweep | grep -q . || fail "a device was swept away from under the server that makes it"
refuses "served by process $half" delete 7
kill -CONT "$half"
wait_for 60 grep -q '^ready' half.out || fail "it does not get ready"
echo stop >&"$half_input"
exec {half_input}>&-
wait "$half" || fail "the server ended with $?"
