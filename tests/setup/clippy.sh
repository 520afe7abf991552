#!/usr/bin/env bash
# Clippy without a single warning, on all that is built with the usual features: what `make lint`
# and `make test` share. Not here: the journal under chosen schedules, a build of its own (lint.sh).
set -euo pipefail
cd "$(dirname "$0")/../.."
exec cargo clippy --workspace --exclude sawmill-volume-small --all-targets -- -D warnings
