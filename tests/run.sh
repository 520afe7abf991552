#!/usr/bin/env bash
# Everything that must hold before a change is kept: set-up, lint, build, all tests, and their
# count. Ends with one line: "N passed, N failed, N skipped". Exit code 0 only when nothing failed.
set -uo pipefail
cd "$(dirname "$0")/.."

log=$(mktemp -d)
whole_pid=
trap '[[ $whole_pid ]] && kill "$whole_pid" 2>/dev/null; rm -rf "$log"' EXIT
failed_steps=()
# Sets cpu_s to the seconds of CPU that what ran so far has used: the last line of `times` is
# "1m2.345s 0m6.789s". In a pipe it would be a process without any.
read_cpu() {
    times >"$log/times"
    cpu_s=$(awk 'END { gsub("s", ""); split($1, user, "m"); split($2, kernel, "m")
        printf "%d", 60 * (user[1] + kernel[1]) + user[2] + kernel[2] }' "$log/times")
}
step() { # step NAME COMMAND...: runs it, times it, remembers a failure, goes on
    local name=$1 from=$SECONDS outcome=done cpu_before
    shift
    read_cpu
    cpu_before=$cpu_s
    echo "== $name: $*"
    if ! "$@"; then
        failed_steps+=("$name")
        outcome=FAILED
    fi
    read_cpu
    echo "== $name: $outcome after $((SECONDS - from)) s, $((cpu_s - cpu_before)) s of CPU"
}

step set-up tests/setup/prepare.sh test
# What prepare.sh built lies here; the tests look for it on the path.
export PATH="$PWD/.prepared/bin:$PATH"
export SAWMILL_SKIP_LOG="$log/skipped"
: >"$SAWMILL_SKIP_LOG"

step format cargo fmt --all --check
step clippy tests/setup/clippy.sh
step docs docs/site/build.sh
# The libraries' own pages; the binary's comments are its help, sim and fuzz are tools.
reference() {
    local not_api=(--exclude sawmill-volume-small --exclude sawmill-sim --exclude sawmill-fuzz
        --exclude sawmill)
    RUSTDOCFLAGS="-D warnings" cargo doc --quiet --workspace --lib --no-deps "${not_api[@]}"
}
step reference reference
step build cargo build --release --package sawmill --package sawmill-frontend --bins --examples
# Drivers in Rust, and the library for those in C.
step drivers cargo build --release --package sawmill-driver --package sawmill-c \
    --lib --bins --examples
# watched FILE COMMAND...: adds what the command says to a file, and shows it. Ends with the
# command. A pipe would end with the last process that a failed test leaves behind, perhaps never.
watched() {
    local file=$1 from command shown outcome=0
    shift
    touch "$file"
    from=$(wc -c <"$file")
    "$@" >>"$file" 2>&1 &
    command=$!
    tail --bytes="+$((from + 1))" --follow --pid="$command" "$file" &
    shown=$!
    wait "$command" || outcome=$?
    wait "$shown"
    return "$outcome"
}
# A test that hangs must not take all others with it, nor their count.
runner="target.'cfg(unix)'.runner='$PWD/tests/one.sh'"
cargo_test=(cargo --config "$runner" test --no-fail-fast)
long=(timeout --kill-after=10 45m)
step test-programs cargo test --quiet --workspace --no-run
# The crates' own programs mostly compute, those of the whole (tests/tests) and the guests mostly
# wait: side by side they use both cores. Named one by one, because `--package sawmill-tests` alone
# has fewer features and would build everything again.
named=()
for program in tests/tests/*; do
    named+=(--test "$(basename "$program" .rs)")
done
touch "$log/whole"
"${long[@]}" "${cargo_test[@]}" --workspace "${named[@]}" >"$log/whole" 2>&1 &
whole_pid=$!
step crates watched "$log/crates" "${long[@]}" \
    "${cargo_test[@]}" --workspace --exclude sawmill-tests
# The journal's path under chosen schedules: the same types with other locks, so a build of its own.
step schedules watched "$log/crates" timeout --kill-after=10 10m \
    "${cargo_test[@]}" --package sawmill-volume --lib --features shuttle schedules
# What needs a kernel of its own: "ok NAME ..." or "FAILED NAME ..." for each test.
step guests watched "$log/guests" timeout --kill-after=10 20m tests/vm/run.py --quick
# Shows what ran in the background, and waits for the rest of it.
whole() {
    local outcome=0
    tail --bytes=+1 --follow --pid="$whole_pid" "$log/whole"
    wait "$whole_pid" || outcome=$?
    # Nothing to end any more: the number may be another process's now.
    whole_pid=
    return "$outcome"
}
step whole whole
cat "$log/crates" "$log/whole" >"$log/tests"

# Each test program ends with "test result: ok. 3 passed; 0 failed; 1 ignored; ...".
count() {
    awk -v word="$1;" '
        /^test result:/ { for (i = 2; i <= NF; i++) if ($i == word) sum += $(i - 1) }
        END { print sum + 0 }' "$log/tests"
}
ran=$(($(count passed) + $(grep -c '^ok ' "$log/guests"))) ignored=$(count ignored)
# A program that died has no such line: its failures are counted one by one, and each failed step
# that no failed test explains counts as one more.
failed=$(($(grep -c '^test .* FAILED$' "$log/tests") + $(grep -c '^FAILED ' "$log/guests")))
for name in "${failed_steps[@]}"; do
    if [[ $name != crates && $name != schedules && $name != guests && $name != whole ]] ||
        ((failed == 0)); then
        failed=$((failed + 1))
    fi
done
left_out=$(wc -l <"$SAWMILL_SKIP_LOG")
if ((left_out)); then
    echo "skipped, and why:"
    sed 's/^/  /' "$SAWMILL_SKIP_LOG"
fi
# The end of this output may be all that anybody keeps:
# first what the failures said, then their names.
if ((${#failed_steps[@]})); then
    echo "the programs that ran last, and their tests that took over a minute:"
    for programs in "$log/crates" "$log/whole"; do
        tac "$programs" |
            awk '/has been running for over/ { print "  " $0 } /^ +Running / { print; exit }'
    done
    grep -A 40 '^test TIME LIMIT' "$log/tests" | grep -E '^test TIME|^ +(process|[^ ]+ in )' |
        head -60
    grep -A 20 '^FAILED ' "$log/guests" | grep -v '^ok ' | head -60
    printf 'failed: %s\n' "${failed_steps[@]}"
    grep -hE '^(test .* FAILED$|FAILED )' "$log/tests" "$log/guests" | cut -c1-200 | sed 's/^/  /'
    echo "one test alone: cargo test -p PACKAGE --test PROGRAM NAME," \
        "with the SAWMILL_SEED that it printed"
fi
echo "the ten test programs that took longest: seconds, and seconds of CPU:"
awk '/^ +Running / {
        s = 0
        name = $0; sub(/^ +Running (unittests )?/, "", name); sub(/ \(.*deps\//, " (", name)
    }
    /^test result:.* finished in / { s = $NF; sub(/s$/, "", s) }
    /^test program used / { printf "  %8.1f %8.1f  %s\n", s, $4, name }' \
    "$log/tests" | sort -rn | head -10
read_cpu
echo "$SECONDS s in all, $cpu_s s of CPU"
echo "$((ran - left_out)) passed, $failed failed, $((ignored + left_out)) skipped"
((failed == 0))
