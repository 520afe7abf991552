# The common beginning of this topic's scripts: the example server of ublk. It is not a test.
#
# shellcheck shell=bash
. "$VM_TESTS/scene.sh"

SERVER=$BIN/ublk_memory

fail() {
    echo "FAILED: $*"
    tail -n 20 server.*.err 2>/dev/null
    exit 1
}

# wait_for SECONDS COMMAND...: whether it succeeds within that time.
wait_for() { await "$@" 2>/dev/null; }

# start_server NAME OPTIONS...: returns when its devices can be opened, within READY_S.
# Sets SERVER_PID and NODES.
start_server() {
    local name=$1
    shift
    rm -f "server.$name.in" "server.$name.out"
    mkfifo "server.$name.in"
    "$SERVER" "$@" <"server.$name.in" >"server.$name.out" 2>>"server.$name.err" &
    SERVER_PID=$!
    # Keeps the server's input open; the server ends when its input does.
    exec {SERVER_INPUT}>"server.$name.in"
    wait_for "${READY_S:-60}" grep -q '^ready' "server.$name.out" ||
        fail "server $name does not get ready: $*"
    NODES=$(grep '^ready' "server.$name.out" | cut -d ' ' -f 2-)
}

# stop_server: with its devices, and waits for its end.
stop_server() {
    echo stop >&"$SERVER_INPUT"
    exec {SERVER_INPUT}>&-
    wait "$SERVER_PID" || fail "the server ended with $?"
}

# crash_server: by kill -9, without a chance to clean up.
crash_server() {
    kill -9 "$SERVER_PID"
    wait "$SERVER_PID" 2>/dev/null || true
    exec {SERVER_INPUT}>&-
}
