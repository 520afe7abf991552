#!/usr/bin/env bash
# Runs one test program, as cargo's runner: a test that hangs costs its own program and nobody
# else's, and what it waited for is told: each process below this one, and where in the kernel it
# sleeps.
set -uo pipefail
limit_s=${SAWMILL_TEST_LIMIT_S:-900}

below() { # below PID: that process and all it started
    local child
    echo "$1"
    for child in $(cat "/proc/$1/task/"*/children 2>/dev/null); do
        below "$child"
    done
}

tell() {
    local pid task
    echo "test TIME LIMIT of $limit_s s in $1 ... FAILED"
    for pid in $(below "$2"); do
        echo "  process $pid: $(tr '\0' ' ' <"/proc/$pid/cmdline" 2>/dev/null | cut -c1-150)"
        for task in "/proc/$pid/task/"*; do
            echo "    $(cat "$task/comm" 2>/dev/null) in $(cat "$task/wchan" 2>/dev/null)"
        done
    done
}

"$@" &
program=$!
(
    sleep "$limit_s" &
    trap 'kill $!; exit' TERM
    wait $!
    tell "$1" "$program" >&2
    for pid in $(below "$program"); do
        kill -9 "$pid" 2>/dev/null
    done
) &
watch=$!
# Background jobs of a script do not hear the interrupt key, so it is passed on.
trap 'kill $(below "$program") "$watch" 2>/dev/null; exit 130' INT TERM
wait "$program"
outcome=$?
kill "$watch" 2>/dev/null
wait "$watch" 2>/dev/null
# The last line of `times` is what the programs started here used: "1m2.345s 0m6.789s". In a
# pipe it would be a process without any.
times_file=$(mktemp)
times >"$times_file"
awk 'END { gsub("s", ""); split($1, user, "m"); split($2, kernel, "m"); printf "test program " \
    "used %.1f s of CPU\n", 60 * (user[1] + kernel[1]) + user[2] + kernel[2] }' "$times_file"
rm "$times_file"
exit "$outcome"
