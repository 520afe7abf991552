#!/usr/bin/env bash
# Fuzzes each target in turn, guided by coverage, on stable Rust.
#
#   run.sh [MINUTES [TARGET...]]     minutes in all (12), shared among the targets (all)
#
# Ends with a table of what it did. With the variable PAGE it also adds that to a page
# (docs/measurements/fuzz.md); `page.py` does both. With PAGE and no TARGET, it takes only as many
# targets as can have 15 minutes each, those that have the fewest on the page: coverage needs
# minutes in one piece, and some nights reach all.
#
# Starts from corpus/ and from what earlier runs found (target/fuzz/corpus, not kept in the
# repository). What breaks a target lies in target/fuzz/found/TARGET and ends the run with failure:
# minimize it, fix the bug, and put the input into corpus/TARGET, where every `make test` tries it
# again.
set -euo pipefail
cd "$(dirname "$0")/../.."

minutes=${1:-12}
shift || true
targets=("$@")
export FUZZ_COMMAND="make fuzz MINUTES=$minutes${*:+ TARGETS=\"$*\"}${PAGE:+ PAGE=$PAGE}"
if ((${#targets[@]} == 0)); then
    mapfile -t targets < <(ls crates/fuzz/corpus)
    if [[ ${PAGE:-} ]]; then
        at_most=$((minutes < 15 ? 1 : minutes / 15))
        mapfile -t targets < <(crates/fuzz/page.py --least "$at_most" --page "$PAGE")
    fi
fi
seconds=$((minutes * 60 / ${#targets[@]}))
folder=$PWD/target/fuzz

# The folder for the server's socket and for the remains of a killed fuzzer.
export TMPDIR=$folder/tmp
mkdir -p "$TMPDIR"
trap 'rm -rf "$TMPDIR"' EXIT
# Instrumentation for the fuzzer: every edge, and both sides of every comparison.
# With --target, build scripts do without.
passes=(-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table
    -Cllvm-args=-sanitizer-coverage-trace-compares)
host=$(rustc -vV | sed -n 's/^host: //p')
RUSTFLAGS="${passes[*]}" cargo build --release --locked --target "$host" \
    --target-dir "$folder/build" --manifest-path crates/fuzz/libfuzzer/Cargo.toml

entries() { # entries FOLDER: how many files it has
    find "$1" -type f | wc -l
}

failed=()
: >"$folder/figures"
for target in "${targets[@]}"; do
    mkdir -p "$folder/corpus/$target" "$folder/found/$target"
    known=$(entries "$folder/corpus/$target")
    broken=$(entries "$folder/found/$target")
    begin=$SECONDS broke=0
    echo "== $target: $seconds s"
    # A single input may take 5 s and the process 2 GiB; more is a finding.
    if ! SAWMILL_FUZZ_TARGET=$target "$folder/build/$host/release/sawmill-libfuzzer" \
        -max_total_time="$seconds" -timeout=5 -rss_limit_mb=2048 -max_len=16384 \
        -print_final_stats=1 -artifact_prefix="$folder/found/$target/" \
        "$folder/corpus/$target" "crates/fuzz/corpus/$target" \
        >"$folder/$target.log" 2>&1; then
        failed+=("$target") broke=1
        tail -n 30 "$folder/$target.log"
    fi
    grep -E ' cov: ' "$folder/$target.log" | tail -n 1 || true
    grep -E '^stat::(number_of_executed|average_exec|peak_rss)' "$folder/$target.log" || true
    # A target that broke may have no statistics: then use its last line of progress.
    executed=$(sed -n 's/^stat::number_of_executed_units: *//p; s/^#\([0-9]*\).*/\1/p' \
        "$folder/$target.log" | tail -n 1)
    # An input that broke the target before gets the same name again.
    crashes=$(($(entries "$folder/found/$target") - broken))
    printf '%s\t%d\t%d\t%d\t%d\n' "$target" "${executed:-0}" $((SECONDS - begin)) \
        $(($(entries "$folder/corpus/$target") - known)) \
        $((crashes > broke ? crashes : broke)) >>"$folder/figures"
done
crates/fuzz/page.py "$folder/figures" ${PAGE:+--page "$PAGE"}
if ((${#failed[@]})); then
    echo "fuzz: broken: ${failed[*]}; see target/fuzz/found"
    exit 1
fi
echo "fuzz: nothing found in $minutes minutes"
