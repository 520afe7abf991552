# a driver in C without a host: its ublk device waits until the program starts again, and another
# takes its place under fio
# set: full
# seconds: 900
# needs: ublk_drv
# drivers: c
# expects-io-errors
. "$VM_TESTS/scene.sh"

rounds=${VM_KILLS:-20}
fail() { echo "$*" >&2 && exit 1; }
export LD_LIBRARY_PATH=$BIN/drivers/c SAWMILL=/nonexistent
export SAWMILL_HOST=none SAWMILL_NAME=own SAWMILL_DOORS=ublk

listed() { "$BIN/sawmill" driver list --json | jq -r '.[] | select(.name == "own") | '"$1"; }
facts='"\(.driver_pid) \(.host_pid) \(.doors | length)"'
serves() { [[ $(listed "$facts") == "$driver $driver 1" ]]; }
# start EXAMPLE WORD...: $driver, until its door is open.
start() {
    "$BIN/drivers/c/$1" "${@:2}" &
    driver=$!
    await 120 serves
}
crash() {
    kill -9 "$driver"
    wait "$driver" 2>/dev/null || true
}
no_device() { [[ $("$BIN/sawmill" device list) == "no ublk devices" ]]; }

echo "== killed $rounds times under fio"
start file "$SCRATCH/image" 64M
node=$(listed '.doors[0]')
[[ -b $node ]] || fail "no block device: $node"
kills() {
    local round
    for round in $(seq "$rounds"); do
        sleep "0.$((RANDOM % 9 + 1))"
        crash
        start file "$SCRATCH/image" 64M
        [[ $(listed '.doors[0]') == "$node" ]] || fail "another node in round $round"
    done
}
verify_while "$node" kills

rounds=${VM_REPLACEMENTS:-20}
echo "== replaced $rounds times under fio, and killed in between"
replace() {
    SAWMILL_REPLACE=1 "$BIN/drivers/c/file" "$SCRATCH/image" 64M &
    local next=$!
    wait "$driver" || fail "the driver before ended with $?"
    driver=$next
    await 120 serves
    [[ $(listed '.doors[0]') == "$node" ]] || fail "another node in round $1"
}
replacements() {
    local round
    for round in $(seq "$rounds"); do
        sleep "0.$((RANDOM % 9 + 1))"
        if ((round % 4 == 0)); then
            crash
            start file "$SCRATCH/image" 64M
        fi
        replace "$round"
    done
}
verify_while "$node" replacements

echo "== one process has the name"
if "$BIN/drivers/c/file" "$SCRATCH/other" 64M 2>"$SCRATCH/refused"; then
    fail "a second driver of that name served"
fi
grep -q "already exists" "$SCRATCH/refused" || fail "refused otherwise: $(cat "$SCRATCH/refused")"

echo "== with other options it is refused, and the device waits on"
crash
if "$BIN/drivers/c/file" "$SCRATCH/image" 96M 2>"$SCRATCH/refused"; then
    fail "a device of another size served"
fi
grep -q "cannot change while it exists" "$SCRATCH/refused" ||
    fail "refused otherwise: $(cat "$SCRATCH/refused")"
start file "$SCRATCH/image" 64M
[[ $(listed '.doors[0]') == "$node" ]] || fail "another node"

echo "== it waits on while the program serves another door and ends"
crash
SAWMILL_DOORS=nbd=unix:$SCRATCH/nbd.sock start file "$SCRATCH/image" 64M
"$BIN/sawmill" driver end own
wait "$driver"
start file "$SCRATCH/image" 64M
[[ $(listed '.doors[0]') == "$node" ]] || fail "another node, so its users wait in vain"

echo "== flushed, and ended in order"
"$BIN/sawmill" driver flush own
"$BIN/sawmill" driver end own
wait "$driver" || fail "the driver ended with $?"
await 60 no_device

echo "== failed at once, and gone with its record"
start file "$SCRATCH/image" 64M
"$BIN/sawmill" driver end --now own
! wait "$driver" || fail "a device that failed ended its driver well"
no_device || fail "a failed device is still there"
start file "$SCRATCH/image" 96M
"$BIN/sawmill" driver end own
wait "$driver"
await 60 no_device

echo "== without a name, a device ends with its driver, and the next one removes its remains"
unset SAWMILL_NAME
"$BIN/drivers/c/ram" 24M &
driver=$!
node() { "$BIN/sawmill" device list --json | jq -re '.[0].node'; }
await 120 node >/dev/null
node=$(node)
crash
await 60 test ! -e "$node"
export SAWMILL_NAME=own
start file "$SCRATCH/image" 64M
[[ $("$BIN/sawmill" device list --json | jq length) == 1 ]] || fail "remains stay"
"$BIN/sawmill" driver end own
wait "$driver"
await 60 no_device
