#!/usr/bin/env bash
# Formatting, clippy without a single warning, and the tidiness of the house.
set -euo pipefail
cd "$(dirname "$0")/../.."
cargo fmt --all --check
cargo clippy --workspace --exclude sawmill-volume-small --all-targets -- -D warnings
cargo test --quiet -p sawmill-tests --test house tidy
