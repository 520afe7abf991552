#!/usr/bin/env bash
# The two-minute tour: a disk in a local folder, a file system on it, kill -9 in the middle of
# writing, and every synced byte still there. Installs what is missing (and says so), builds, and
# leaves its folder behind.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PATH:/usr/sbin:/sbin:$HOME/.cargo/bin"

step() { printf '\n==> %s\n' "$*"; }
note() { printf '    %s\n' "$*"; }

step "What this machine needs"
tests/setup/prepare.sh demo
step "Building the release binary (the first time takes minutes)"
cargo build --release --package sawmill
sawmill=$PWD/target/release/sawmill

home=$(mktemp -d /tmp/sawmill-demo.XXXXXX)
export SAWMILL_STORE=file://$home/store XDG_STATE_HOME=$home/state XDG_RUNTIME_DIR=$home
mkdir "$home/store"
size=512M

server='' fuse='' device='' has_mount=''
unmount_all() {
    if [[ -n $has_mount ]]; then umount -l "$home/mnt" 2>/dev/null || true; fi
    if [[ -n $device ]]; then losetup -d "$device" 2>/dev/null || true; fi
    if [[ -n $fuse ]]; then
        fusermount3 -u "$home/disk.img" 2>/dev/null || true
        wait "$fuse" 2>/dev/null || true
    fi
    has_mount='' device='' fuse=''
}
end() {
    unmount_all
    if [[ -n $server ]]; then kill -9 "$server" 2>/dev/null || true; fi
}
trap end EXIT

# Starts the server and waits for its ready event: one line of JSON.
serve() {
    rm -f "$home/events"
    mkfifo "$home/events"
    "$sawmill" serve disk1 --json --journal-bytes 256M --cache-bytes 256M --admin 127.0.0.1:0 \
        >"$home/events" 2>>"$home/serve.log" &
    server=$!
    exec 3<"$home/events"
    local line
    if ! read -r line <&3; then
        echo "the server did not start; the end of $home/serve.log:" >&2
        tail -n 5 "$home/serve.log" >&2
        exit 1
    fi
    uri=$(jq -r .uri <<<"$line")
    admin=$(jq -r .admin <<<"$line")
    ready_event=$line
}

# One GET from the admin server; bash speaks enough HTTP for that.
status() {
    local host=${admin#http://}
    host=${host%/}
    exec 4<>"/dev/tcp/${host%:*}/${host##*:}"
    printf 'GET /status HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n\r\n' "$host" >&4
    sed '1,/^\r$/d' <&4
    exec 4>&-
}

# The volume as a block device: nbdfuse shows it as a file, a loop device makes a disk of that.
attach() {
    : >"$home/disk.img"
    # In a shell of its own, which hides that nbdfuse aborts when the server is killed.
    bash -c 'nbdfuse "$@"; true' nbdfuse "$home/disk.img" "$uri" 2>>"$home/nbdfuse.log" &
    fuse=$!
    local tries=0
    until [[ -s $home/disk.img ]]; do
        ((++tries < 500)) && kill -0 "$fuse" || return 1
        sleep 0.01
    done
    device=$(losetup --find --show --direct-io=on "$home/disk.img") || return 1
}

step "A disk of $size in $home/store"
"$sawmill" create disk1 --size $size
serve
note "served at $uri"

can_mount() {
    [[ $(id -u) == 0 && -w /dev/fuse && -w /dev/loop-control && -z ${SAWMILL_DEMO_PLAIN:-} ]]
}

kill_in_the_middle() {
    kill -9 "$server"
    wait "$server" 2>/dev/null || true
    server=''
    exec 3<&-
    note "killed with kill -9"
}

if can_mount && attach; then
    step "An ext4 file system on it, and files, each synced"
    mkfs.ext4 -q "$device"
    mkdir "$home/mnt"
    mount "$device" "$home/mnt" && has_mount=yes
    note "$device mounted at $home/mnt"
    (
        # A file is listed once its fsync has returned: from then on it must survive.
        for n in $(seq 100000); do
            head -c $((4096 + n * 7919 % 300000)) /dev/urandom >"$home/mnt/file-$n" || exit 0
            sync "$home/mnt/file-$n" || exit 0
            (cd "$home/mnt" && sha256sum "file-$n") >>"$home/synced" || exit 0
        done
    ) 2>/dev/null &
    writer=$!
    until [[ $(wc -l 2>/dev/null <"$home/synced" || echo 0) -ge 300 ]]; do sleep 0.05; done
    before=$(status)
    step "kill -9 in the middle of writing"
    kill_in_the_middle
    wait "$writer" || true
    unmount_all
    note "$(wc -l <"$home/synced") files were synced before that"

    step "Starting again"
    serve
    jq -r '.recovery[] | "    \(.name): \(.detail) (\(.took_ms) ms)"' <<<"$ready_event"
    attach
    mount "$device" "$home/mnt" && has_mount=yes
    # The last line may be cut off, because its writer was killed; all listed files were synced.
    (cd "$home/mnt" && sha256sum --quiet --check "$home/synced")
    note "all $(wc -l <"$home/synced") synced files are there, every byte"
    umount "$home/mnt" && has_mount=''
    e2fsck -fn "$device" >"$home/e2fsck.log" 2>&1 && note "e2fsck finds the file system clean"
    unmount_all
else
    unmount_all
    step "Writing 512 MiB through an NBD client (mounting needs root, /dev/fuse and loop devices)"
    head -c $size /dev/urandom >"$home/image"
    nbdcopy --flush "$home/image" "$uri"
    note "written and flushed; writing the same once more"
    nbdcopy "$home/image" "$uri" 2>/dev/null &
    writer=$!
    goal=$(($(status | jq '.volumes[0].counters.written_bytes') + (32 << 20)))
    until [[ $(status | jq '.volumes[0].counters.written_bytes') -gt $goal ]]
    do :; done
    before=$(status)
    step "kill -9 in the middle of writing"
    kill_in_the_middle
    wait "$writer" 2>/dev/null || true

    step "Starting again"
    serve
    jq -r '.recovery[] | "    \(.name): \(.detail) (\(.took_ms) ms)"' <<<"$ready_event"
    nbdcopy "$uri" "$home/back"
    cmp "$home/image" "$home/back"
    note "all $size are there, every byte"
fi

step "Storing everything"
"$sawmill" wait disk1 --stored --timeout 60s
after=$(status)
jq -r '.volumes[0].positions
    | "    positions: accepted \(.accepted), logged \(.logged), stored \(.stored)"' <<<"$after"

step "What it cost, both lives of the server together"
jq -rn --argjson before "$before" --argjson after "$after" '
    def sum(path): [$before, $after | path] | add;
    def mib: . / 1048576 * 10 | round / 10 | "\(.) MiB";
    def calls(kind): sum(.stores[0][kind].requests);
    sum(.volumes[0].counters.written_bytes) as $written
    | sum(.volumes[0].counters.segment_bytes_stored) as $stored
    | "    written by the file system: \($written | mib) in "
      + "\(sum(.volumes[0].counters.writes)) writes, "
      + "\(sum(.volumes[0].counters.flushes)) flushes",
      "    stored: \($stored | mib) in \(sum(.volumes[0].counters.segments_stored)) segments; "
      + "write amplification "
      + "\(if $written > 0 then ($stored / $written * 1000 | round / 1000) else 0 end)",
      "    store requests: \(calls("put")) PUT, \(calls("get")) GET, \(calls("list")) LIST, "
      + "\(calls("delete")) DELETE"'

step "Where everything is"
note "objects:   $home/store"
note "journal:   $("$sawmill" info disk1 --json | jq -r '[.. | .journal_path? // empty][0]')"
note "log:       $home/serve.log"
note "door:      $uri"
note "dashboard: $admin"
if [[ -t 0 && -t 1 ]]; then
    printf '\nThe disk is still served. Look around; press Enter to end. '
    read -r _
fi

step "Stopping in order"
kill -TERM "$server"
wait "$server" && note "everything is stored; the server ended with 0"
server=''
"$sawmill" check disk1
note "The folder stays: rm -r $home"
