#!/usr/bin/env bash
# Formatting, clippy without a single warning, and the rules of CONTRIBUTING.md that a test can
# check.
set -euo pipefail
cd "$(dirname "$0")/../.."
cargo fmt --all --check
tests/setup/clippy.sh
cargo test --quiet -p sawmill-tests --test repository
# The messages of all commits since this one.
since=9257c0bd
if git merge-base --is-ancestor "$since" HEAD 2>/dev/null; then
    for commit in $(git rev-list --no-merges "$since"..HEAD); do
        tests/setup/hooks/commit-msg <(git log -1 --format=%B "$commit") "$commit"
    done
fi
