#!/usr/bin/env bash
# Clippy without a single warning: what `make lint` and `make test` share.
set -euo pipefail
cd "$(dirname "$0")/../.."
cargo clippy --workspace --exclude sawmill-volume-small --all-targets -- -D warnings
# The journal under chosen schedules is a build of its own.
cargo clippy --package sawmill-volume --features shuttle --lib --tests -- -D warnings
