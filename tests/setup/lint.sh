#!/usr/bin/env bash
# Formatting, clippy without a single warning, and the rules of CONTRIBUTING.md that
# a test can check.
set -euo pipefail
cd "$(dirname "$0")/../.."
cargo fmt --all --check
cargo clippy --workspace --exclude sawmill-volume-small --all-targets -- -D warnings
# The journal under chosen schedules needs a separate build.
cargo clippy --package sawmill-volume --features shuttle --lib --tests -- -D warnings
cargo test --quiet -p sawmill-tests --test repository
# Each commit has a title `area: what` of at most 65 characters, and a body of at least 15 words in
# lines of at most 72 columns that says why.
since=9257c0bd
if git merge-base --is-ancestor "$since" HEAD 2>/dev/null; then
    for commit in $(git rev-list --no-merges "$since"..HEAD); do
        title=$(git log -1 --format=%s "$commit") body=$(git log -1 --format=%b "$commit")
        words=$(wc -w <<<"$body")
        if [[ ! $title =~ ^[^:]+:\ .+ || ${#title} -gt 65 ]] || ((words < 15)) ||
            grep -qE '^.{73}' <<<"$body"; then
            echo "commit $commit: write 'area: what' in at most 65 characters, and a body of at" \
                "least 15 words in lines of at most 72 columns: $title" >&2
            exit 1
        fi
    done
fi
