#!/usr/bin/env bash
# Stands in for qemu-nbd before a suite that starts its servers itself: serves a disk of the size of
# the file that it is given, from Sawmill or, for comparison, the file itself from nbdkit.
#
#   EXTERNAL_SERVER=sawmill|nbdkit EXTERNAL_PLACE=FOLDER \
#       as_qemu_nbd.sh --pid-file=PATH -k SOCKET [-r] FILE
#
# With --fork it returns once the server listens. Other options of qemu-nbd are read over. What the
# server says goes to FOLDER/log: suites compare every word on their own outputs. The export is
# called `disk`; without a name there is only this one to be meant.
set -euo pipefail

pid_file='' socket='' file='' read_only=() forks=0
while (($#)); do
    case $1 in
    --pid-file=*) pid_file=${1#*=} ;;
    -k)
        socket=$2
        shift
        ;;
    -r) read_only=(--read-only) ;;
    --fork) forks=1 ;;
    -b | -p | -f | -e | -x | -B) shift ;;
    -*) ;;
    *) file=$1 ;;
    esac
    shift
done
exec 2>>"$EXTERNAL_PLACE/log"
if [[ -z $socket || ! -f $file ]]; then
    echo "as_qemu_nbd: a socket and a file are needed, not '$socket' and '$file'" >&2
    exit 1
fi
# Suites leave the sockets of servers that they killed.
rm -f "$socket"

if [[ $EXTERNAL_SERVER == nbdkit ]]; then
    serve=(nbdkit --foreground --unix "$socket" ${read_only:+-r} file "$file")
else
    size=$(stat --format=%s "$file")
    # No suite here needs what a file holds; one that did would see zeroes, so stop rather. (QEMU
    # allocates the first block of an empty file.)
    if (($(stat --format=%b "$file") > 8)); then
        echo "as_qemu_nbd: $file holds data, which is not brought into the disk" >&2
        exit 1
    fi
    place=$(mktemp -d "$EXTERNAL_PLACE/disk-XXXXXX")
    export HOME=$place XDG_STATE_HOME=$place/state XDG_RUNTIME_DIR=$place/run
    export XDG_CACHE_HOME=$place/cache
    export SAWMILL_STORE=file://$place/store
    # Nobody else can reach this store; asking whether it keeps writers apart would only take time.
    "$SAWMILL_BINARY" create disk --size "$size" --block-size 512 --no-fencing >&2
    serve=("$SAWMILL_BINARY" serve disk --no-fencing --nbd "unix:$socket" --journal-bytes 64M
        --cache-bytes 0 --staging "$EXTERNAL_PLACE" "${read_only[@]}")
fi
if ((!forks)); then
    echo $$ >"$pid_file"
    exec "${serve[@]}" >&2
fi
"${serve[@]}" >&2 &
echo $! >"$pid_file"
while [[ ! -S $socket ]]; do
    kill -0 $! || exit 1
    sleep 0.02
done
