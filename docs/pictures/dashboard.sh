#!/usr/bin/env bash
# Makes docs/pictures/dashboard.png: the dashboard of a real server, under a real load of a few
# seconds. Needs chromium and fio beside what the build needs.
set -euo pipefail
cd "$(dirname "$0")/../.."

for program in chromium fio jq; do
    command -v "$program" >/dev/null || {
        echo "missing: $program (apt-get install $program)" >&2
        exit 1
    }
done
cargo build --release --quiet --package sawmill
sawmill=$PWD/target/release/sawmill

home=$(mktemp -d)
export SAWMILL_STORE=file://$home/store XDG_STATE_HOME=$home/state XDG_RUNTIME_DIR=$home
mkdir "$home/store"
server='' load=''
end() {
    for process in $load $server ${COPROC_PID:-}; do kill "$process" 2>/dev/null || true; done
    wait
    rm -rf "$home"
}
trap end EXIT

"$sawmill" create databases --size 20G >/dev/null
mkfifo "$home/events"
"$sawmill" serve databases --json --journal-bytes 1G --cache-bytes 1G --admin 127.0.0.1:0 \
    >"$home/events" 2>"$home/serve.log" &
server=$!
read -r ready <"$home/events"
uri=$(jq -r .uri <<<"$ready") admin=$(jq -r .admin <<<"$ready")

# A database's mix; held back, so that the picture shows a disk that keeps up.
fio --name=load --ioengine=nbd --uri="$uri" --rw=randrw --rwmixread=60 --bs=8k --iodepth=8 \
    --fsync=32 --rate_iops=1200,800 --size=2G --time_based --runtime=60 --minimal >/dev/null &
load=$!
# The page draws as time goes by, and a browser takes its picture when a page has loaded.
coproc docs/pictures/slowly.py "$admin" 25
read -r page <&"${COPROC[0]}"
chromium --headless --no-sandbox --disable-gpu --hide-scrollbars --window-size=1180,870 \
    --screenshot="$PWD/docs/pictures/dashboard.png" "$page" 2>"$home/chromium.log"
ls -l docs/pictures/dashboard.png
