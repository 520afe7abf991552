#!/usr/bin/env bash
# Brings a fresh Debian 12 with rustup's Rust to where the demo, the tests or the benches run.
#
#   prepare.sh demo|test|bench     install what that needs and is missing, saying which
#
# Packages come from the distribution; MinIO is built from source through the Go module proxy into
# .prepared/bin (ignored by git, about three minutes, once). Safe to run again at any time.
set -euo pipefail
cd "$(dirname "$0")/../.."

# A revision that creates objects conditionally (If-None-Match: *) and builds with Go 1.24 or later.
minio_version=v0.0.0-20260212201848-7aac2a2c5b7c
go_version=1.24.13 # fetched as a Go module when the machine's own Go is older than 1.24

mode=${1:-}
case $mode in
demo) packages=(gcc:gcc make:make pkg-config:pkg-config jq:jq nbdfuse:libnbd-bin nbdcopy:libnbd-bin
    fusermount3:fuse3 mkfs.ext4:e2fsprogs losetup:mount) ;;
test | bench) packages=(gcc:gcc make:make pkg-config:pkg-config jq:jq nbdfuse:libnbd-bin nbdinfo:libnbd-bin
    nbdcopy:libnbd-bin fusermount3:fuse3 losetup:mount mkfs.ext4:e2fsprogs mkfs.xfs:xfsprogs
    mkfs.btrfs:btrfs-progs fio:fio nbdkit:nbdkit qemu-img:qemu-utils qemu-nbd:qemu-utils
    qemu-storage-daemon:qemu-system-common) ;;
*)
    echo "usage: $0 demo|test|bench" >&2
    exit 2
    ;;
esac
if [[ $mode == bench ]]; then
    packages+=(s3backer:s3backer)
fi

say() { echo "prepare: $*"; }
stop() {
    echo "prepare: $*" >&2
    exit 1
}
export PATH="$PATH:/usr/sbin:/sbin:/usr/local/go/bin:$HOME/.cargo/bin"

# Rust is the one thing we do not install: people choose how to.
command -v cargo >/dev/null || stop "cargo is missing: install Rust with rustup, then run this again"

# Installs packages, quietly unless something goes wrong.
install() {
    command -v apt-get >/dev/null || stop "not a Debian: install the likes of these by hand: $*"
    local as_root=()
    if [[ $(id -u) != 0 ]]; then
        command -v sudo >/dev/null || stop "$* missing, and neither root nor sudo to install it with:
prepare: run this as root, or have somebody run: apt-get install $*"
        as_root=(sudo)
    fi
    say "installing from the distribution: $*"
    local apt=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq -y -o Dpkg::Use-Pty=0)
    mkdir -p .prepared
    if ! { "${apt[@]}" update && "${apt[@]}" install --no-install-recommends "$@"; } \
        >.prepared/apt.log 2>&1; then
        tail -n 20 .prepared/apt.log >&2
        stop "could not install $*"
    fi
}

missing=()
for entry in "${packages[@]}"; do
    command=${entry%%:*} package=${entry#*:}
    if ! command -v "$command" >/dev/null && [[ " ${missing[*]} " != *" $package "* ]]; then
        missing+=("$package")
    fi
done
# A C compiler is no use without the C library's headers and start files.
if ! echo 'int main(void) { return 0; }' | gcc -x c -o /dev/null - 2>/dev/null; then
    missing+=(libc6-dev)
fi
# Debian's own Python is the one that python3-libnbd is built for.
if [[ $mode != demo ]] && ! /usr/bin/python3 -c 'import nbd' 2>/dev/null; then
    missing+=(python3-libnbd)
fi
if ((${#missing[@]})); then
    install "${missing[@]}"
fi
# Later releases have nbdfuse in a package of its own.
if ! command -v nbdfuse >/dev/null; then
    install nbdfuse
fi

# The Go that builds MinIO: the machine's if it is new enough, else a pinned one that lives in the module
# cache (a Go distribution is itself a Go module, so any Go can fetch it).
new_enough() {
    "$1" version 2>/dev/null | awk '{ split(substr($3, 3), v, "."); exit !(v[1] > 1 || v[2] >= 24) }'
}
find_go() {
    if command -v go >/dev/null && GOTOOLCHAIN=local new_enough go; then
        go=go
        return
    fi
    if ! command -v go >/dev/null; then
        install golang-go
    fi
    if GOTOOLCHAIN=local new_enough go; then
        go=go
        return
    fi
    local platform module
    platform=$(go env GOOS)-$(go env GOARCH)
    module=golang.org/toolchain@v0.0.1-go$go_version.$platform
    say "fetching Go $go_version through the Go module proxy ($(go version) is too old for MinIO)"
    (cd "$(mktemp -d)" && GOTOOLCHAIN=local GOFLAGS=-mod=mod go mod download "$module")
    local root
    root=$(go env GOMODCACHE)/$module
    # Modules carry no execute bits.
    chmod -R u+w "$root/bin" "$root/pkg/tool"
    chmod +x "$root"/bin/* "$root"/pkg/tool/*/*
    go=$root/bin/go
}

if [[ $mode != demo && "$(cat .prepared/minio.version 2>/dev/null)" != "$minio_version" ]]; then
    find_go
    say "building MinIO $minio_version with $("$go" version | awk '{print $3}') (about three minutes, once)"
    mkdir -p .prepared/bin
    from=$SECONDS
    GOTOOLCHAIN=local GOFLAGS=-trimpath CGO_ENABLED=0 GOBIN=$PWD/.prepared/bin \
        nice "$go" install -ldflags='-s -w' "github.com/minio/minio@$minio_version" 2>.prepared/minio.log ||
        stop "MinIO did not build; the end of .prepared/minio.log: $(tail -n 5 .prepared/minio.log)"
    echo "$minio_version" >.prepared/minio.version
    say "built MinIO in $((SECONDS - from)) s"
fi
say "all that $mode needs is here"
