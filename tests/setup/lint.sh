#!/usr/bin/env bash
# Formatting, clippy without a single warning, and the rules of CONTRIBUTING.md that a test can check.
set -euo pipefail
cd "$(dirname "$0")/../.."
cargo fmt --all --check
cargo clippy --workspace --exclude sawmill-volume-small --all-targets -- -D warnings
cargo test --quiet -p sawmill-tests --test repository tidy
