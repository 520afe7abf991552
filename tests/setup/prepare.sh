#!/usr/bin/env bash
# Prepares a fresh Debian 12 with rustup's Rust to run the demo, the tests or the benches.
#
#   prepare.sh demo|test|vm|stores|external|bench|fuzz   install what that needs and
#                                                        is missing, saying which
#
# Packages come from the distribution; MinIO is built from source through the Go module proxy into
# .prepared/bin (ignored by git, about three minutes, once); `stores` builds four more S3 servers
# (about ten minutes, once), `external` fetches sources of other people's test suites, `vm` (also a
# part of `test`) unpacks a newer Debian kernel for guests into .prepared/kernel and leaves /boot
# alone. Nothing of it is ever committed. Safe to run again at any time.
set -euo pipefail
cd "$(dirname "$0")/../.."

# A revision that creates objects conditionally (If-None-Match: *).
minio_version=v0.0.0-20260212201848-7aac2a2c5b7c
go_version=1.25.8 # fetched as a Go module when the machine's own Go is older than 1.25

versitygw_version=v1.8.0
gofakes3_version=v1.2.0
moto_version=5.2.1
# Lets several racers win, which the matrix must detect. A newer version may be fixed.
s3s_fs_version=0.14.1
virtme_version=1.42

# Packages for guests; tests inside a guest use the host's programs.
vm_packages=(gcc:gcc make:make qemu-system-x86_64:qemu-system-x86 busybox:busybox-static
    modprobe:kmod depmod:kmod file:file udevadm:udev nbd-client:nbd-client nbdkit:nbdkit
    mkfs.ext4:e2fsprogs mkfs.xfs:xfsprogs mkfs.btrfs:btrfs-progs fio:fio)
mode=${1:-}
case $mode in
demo) packages=(gcc:gcc make:make pkg-config:pkg-config jq:jq nbdfuse:libnbd-bin nbdcopy:libnbd-bin
    fusermount3:fuse3 mkfs.ext4:e2fsprogs losetup:mount) ;;
fuzz) packages=(gcc:gcc g++:g++) ;;
vm) packages=("${vm_packages[@]}") ;;
test | stores | external | bench) packages=(gcc:gcc make:make pkg-config:pkg-config jq:jq
    nbdfuse:libnbd-bin nbdinfo:libnbd-bin nbdcopy:libnbd-bin fusermount3:fuse3 losetup:mount
    mkfs.ext4:e2fsprogs mkfs.xfs:xfsprogs mkfs.btrfs:btrfs-progs fio:fio nbdkit:nbdkit
    qemu-img:qemu-utils qemu-nbd:qemu-utils qemu-storage-daemon:qemu-system-common ip:iproute2
    gzip:gzip zstd:zstd xz:xz-utils bzip2:bzip2) ;;
*)
    echo "usage: $0 demo|test|vm|stores|external|bench|fuzz" >&2
    exit 2
    ;;
esac
if [[ $mode == test ]]; then
    # faketime: wall clocks that jump, for one server of the torture.
    packages+=("${vm_packages[@]}" faketime:faketime)
elif [[ $mode == bench ]]; then
    packages+=(s3backer:s3backer tcmu-runner:tcmu-runner dbus-daemon:dbus tgtd:tgt)
elif [[ $mode == external ]]; then
    packages+=(dpkg-source:dpkg-dev qemu-system-x86_64:qemu-system-x86)
fi

say() { echo "prepare: $*"; }
stop() {
    echo "prepare: $*" >&2
    exit 1
}
export PATH="$PATH:/usr/sbin:/sbin:/usr/local/go/bin:$HOME/.cargo/bin"

# Rust is the only thing that is not installed here: users choose how.
command -v cargo >/dev/null ||
    stop "cargo is missing: install Rust with rustup, then run this again"

as_root() { if [[ $(id -u) == 0 ]]; then "$@"; else sudo "$@"; fi; }
# Exits with the name of what the user must install, if this script cannot.
can_install() {
    command -v apt-get >/dev/null || stop "not a Debian: install the likes of these by hand: $*"
    [[ $(id -u) == 0 ]] || command -v sudo >/dev/null ||
        stop "$* missing, and neither root nor sudo to install it with:
prepare: run this as root, or have somebody run: apt-get install $*"
}
# Installs packages, quietly unless something goes wrong.
install() {
    can_install "$@"
    say "installing from the distribution: $*"
    local apt=(as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq -y -o Dpkg::Use-Pty=0)
    mkdir -p .prepared
    if ! { "${apt[@]}" update && "${apt[@]}" install --no-install-recommends "$@"; } \
        >.prepared/apt.log 2>&1; then
        tail -n 20 .prepared/apt.log >&2
        stop "could not install $*"
    fi
}
# PostgreSQL's programs. Its package would make a server and start it, unless a file says
# otherwise while it installs.
install_postgresql() {
    local outcome=0 config=/etc/postgresql-common/createcluster.d/sawmill.conf
    can_install postgresql
    as_root mkdir -p "${config%/*}"
    echo 'create_main_cluster = false' | as_root tee "$config" >/dev/null
    (install postgresql) || outcome=$?
    as_root rm "$config"
    as_root rmdir --ignore-fail-on-non-empty "${config%/*}"
    return "$outcome"
}

missing=()
for entry in "${packages[@]}"; do
    command=${entry%%:*} package=${entry#*:}
    if ! command -v "$command" >/dev/null && [[ " ${missing[*]} " != *" $package "* ]]; then
        missing+=("$package")
    fi
done
# What reads iSCSI for qemu-img is a module, not a program.
if [[ $mode == bench ]] && ! compgen -G '/usr/lib/*/qemu/block-iscsi.so' >/dev/null; then
    missing+=(qemu-block-extra)
fi
# What checks the object files of a kernel module needs it.
if [[ $mode == vm || $mode == test ]] && ! ldconfig -p | grep -q 'libelf\.so\.1 '; then
    missing+=(libelf1)
fi
# A C compiler also needs the C library's headers and start files.
if ! echo 'int main(void) { return 0; }' | gcc -x c -o /dev/null - 2>/dev/null; then
    missing+=(libc6-dev)
fi
# Guests start from it, so it must be statically linked.
if [[ " ${packages[*]} " == *" busybox:"* ]] && ldd "$(command -v busybox)" >/dev/null 2>&1 &&
    [[ " ${missing[*]} " != *" busybox-static "* ]]; then
    missing+=(busybox-static)
fi
# Debian's own Python is the one that python3-libnbd is built for.
if [[ $mode == test || $mode == bench ]] && ! /usr/bin/python3 -c 'import nbd' 2>/dev/null; then
    missing+=(python3-libnbd)
fi
if [[ $mode == external ]]; then
    for library in libnbd:libnbd-dev glib-2.0:libglib2.0-dev; do
        pkg-config --exists "${library%%:*}" 2>/dev/null || missing+=("${library#*:}")
    done
fi
if ((${#missing[@]})); then
    install "${missing[@]}"
fi
if [[ $mode == stores || $mode == vm || $mode == test ]] &&
    ! python3 -c 'import ensurepip' 2>/dev/null; then
    install python3-venv
fi
if [[ $mode == test || $mode == bench ]] &&
    ! compgen -G '/usr/lib/postgresql/*/bin/postgres' >/dev/null; then
    install_postgresql
fi
if [[ $mode == fuzz ]]; then
    say "all that fuzz needs is here"
    exit
fi
# Later releases have nbdfuse in a package of its own.
if [[ $mode != vm ]] && ! command -v nbdfuse >/dev/null; then
    install nbdfuse
fi

# The Go that builds them: the machine's if it is new enough, else a pinned one that lives in the
# module cache (a Go distribution is itself a Go module, so any Go can fetch it).
new_enough() {
    "$1" version 2>/dev/null |
        awk '{ split(substr($3, 3), v, "."); exit !(v[1] > 1 || v[2] >= 25) }'
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
    say "fetching Go $go_version through the Go module proxy ($(go version) is too old)"
    (cd "$(mktemp -d)" && GOTOOLCHAIN=local GOFLAGS=-mod=mod go mod download "$module")
    local root
    root=$(go env GOMODCACHE)/$module
    # Modules carry no execute bits.
    chmod -R u+w "$root/bin" "$root/pkg/tool"
    chmod +x "$root"/bin/* "$root"/pkg/tool/*/*
    go=$root/bin/go
}

# build NAME VERSION COMMAND...: runs it unless that version is there, remembers the version,
# says how long.
build() {
    local name=$1 version=$2 from=$SECONDS
    shift 2
    if [[ "$(cat ".prepared/$name.version" 2>/dev/null)" == "$version" ]]; then
        return
    fi
    say "building $name $version"
    mkdir -p .prepared/bin
    nice "$@" >".prepared/$name.log" 2>&1 ||
        stop "$name did not build; the end of .prepared/$name.log:" \
            "$(tail -n 5 ".prepared/$name.log")"
    echo "$version" >".prepared/$name.version"
    say "built $name in $((SECONDS - from)) s"
}
# go_program NAME MODULE VERSION: a command of a Go module.
go_program() {
    [[ "$(cat ".prepared/$1.version" 2>/dev/null)" == "$3" ]] || find_go
    build "$1" "$3" env GOTOOLCHAIN=local GOFLAGS=-trimpath CGO_ENABLED=0 \
        GOBIN="$PWD/.prepared/bin" "${go:-go}" install -ldflags='-s -w' "$2@$3"
}
# moto in a virtual environment of its own, whatever Python made it.
moto() {
    rm -rf .prepared/moto
    python3 -m venv .prepared/moto &&
        .prepared/moto/bin/pip --quiet install "moto[server,s3]==$moto_version"
}

if [[ $mode != demo && $mode != external && $mode != vm ]]; then
    go_program minio github.com/minio/minio "$minio_version"
fi
if [[ $mode == test ]]; then
    # Drivers in Go are tested with a Go that is new enough; the tests find it on their path.
    find_go
    mkdir -p .prepared/bin
    [[ $go == go ]] || ln -sfn "$go" .prepared/bin/go
fi
if [[ $mode == stores ]]; then
    go_program gofakes3 github.com/johannesboyne/gofakes3/cmd/gofakes3 "$gofakes3_version"
    go_program versitygw github.com/versity/versitygw/cmd/versitygw "$versitygw_version"
    export -f moto
    moto_version=$moto_version build moto "$moto_version" bash -c moto
    build s3s-fs "$s3s_fs_version" cargo install s3s-fs --version "$s3s_fs_version" --locked \
        --features binary --root .prepared
fi
machine_mirror() {
    local targets=(--format '$(SITE)' 'Created-By: Packages')
    apt-get indextargets "${targets[@]}" "Codename: $(machine_release)" | head -n 1
}
machine_release() { (. /etc/os-release && echo "$VERSION_CODENAME"); }
# own_lists TYPE SUITE: sets `apt` to options for package lists of our own, so that the machine's
# stay as they are. The mirror is the one that the machine's packages come from.
own_lists() {
    local lists=$PWD/.prepared/lists-$1-$2 mirror
    mkdir -p "$lists/partial"
    mirror=$(machine_mirror)
    # A fresh machine has no package lists yet.
    [[ $mirror ]] || as_root apt-get -qq update
    mirror=$(machine_mirror)
    [[ $mirror ]] || { echo "apt knows no mirror of this release" >&2 && return 1; }
    echo "$1 [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror $2 main" \
        >"$lists.list"
    apt=(-o "Dir::Etc::SourceList=$lists.list" -o Dir::Etc::SourceParts=-
        -o "Dir::State::Lists=$lists" -o Dir::Cache::pkgcache= -o Dir::Cache::srcpkgcache=
        -o APT::Sandbox::User="$(id -un)")
    apt-get -qq "${apt[@]}" update
}
fetch_sources() { # fetch_sources SUITE PACKAGE...: sources of Debian packages
    local apt suite=$1
    shift
    own_lists deb-src "$suite"
    (cd .prepared/external && apt-get -qq "${apt[@]}" --only-source source "$@")
}
# The programs of libnbd's and nbd's tests, without the rest of their packages.
build_clients() {
    local libnbd nbd into=$PWD/.prepared/external/bin flags
    libnbd=$(echo .prepared/external/libnbd-*/) nbd=$(echo .prepared/external/nbd-*/)
    mkdir -p "$into" .prepared/external/include
    # The results of their configure scripts.
    : >.prepared/external/include/config.h
    flags=(-O2 -w -I.prepared/external/include -D_GNU_SOURCE -D_LARGEFILE64_SOURCE
        -DSIZEOF_UNSIGNED_SHORT_INT=2 -DSIZEOF_UNSIGNED_INT=4 -DSIZEOF_UNSIGNED_LONG_INT=8)
    for program in aio-parallel synch-parallel aio-parallel-load; do
        gcc "${flags[@]}" -I"$libnbd" -I"${libnbd}common/include" -I"${libnbd}tests" \
            "${libnbd}tests/$program.c" -o "$into/$program" -lnbd -lpthread
    done
    # shellcheck disable=SC2046 # these flags are words
    gcc "${flags[@]}" -I"$nbd" $(pkg-config --cflags glib-2.0) \
        "${nbd}tests/run/nbd-tester-client.c" "${nbd}cliserv.c" \
        -o "$into/nbd-tester-client" $(pkg-config --libs glib-2.0)
}
external() {
    set -euo pipefail
    rm -rf .prepared/external
    mkdir .prepared/external
    fetch_sources bookworm qemu libnbd
    # Not every mirror still has the sources of bookworm's nbd; the tester is the same.
    fetch_sources trixie nbd
    build_clients
}
if [[ $mode == external ]]; then
    export -f external fetch_sources build_clients
    export -f own_lists machine_mirror machine_release as_root
    build external 1 bash -c external
fi
# The program that boots guests, in a virtual environment of its own.
virtme() {
    rm -rf .prepared/venv
    python3 -m venv .prepared/venv &&
        .prepared/venv/bin/pip --quiet install "virtme-ng==$virtme_version"
}
# Debian's kernel 6.12 or later with its modules, and what builds modules for it, unpacked and not
# installed.
kernel() {
    set -euo pipefail
    local apt image version headers suite=stable
    if [[ $(machine_release) == bookworm ]]; then
        suite=bookworm-backports
    fi
    own_lists deb "$suite"
    image=$(apt-cache "${apt[@]}" depends linux-image-amd64 |
        awk '/Depends: linux-image-[0-9]/ { print $2 }')
    version=${image#linux-image-}
    headers=linux-headers-$version
    rm -rf .prepared/kernel .prepared/kernel-package
    mkdir .prepared/kernel-package
    (cd .prepared/kernel-package && apt-get -qq "${apt[@]}" download "$image" "$headers" \
        "${headers%-*}-common" "linux-kbuild-${version%-*}")
    for package in .prepared/kernel-package/*.deb; do
        dpkg-deb --extract "$package" .prepared/kernel
    done
    rm -r .prepared/kernel-package
    depmod -b "$PWD/.prepared/kernel" "$version"
    # It names the folder in which the other one would be installed.
    sed -i "s:/usr/src/:\$(dir \$(lastword \$(MAKEFILE_LIST)))../:" \
        ".prepared/kernel/usr/src/$headers/Makefile"
}
if [[ ($mode == vm || $mode == test) && $(uname -m) == x86_64 ]]; then
    export -f virtme kernel own_lists machine_mirror machine_release as_root
    virtme_version=$virtme_version build virtme "$virtme_version" bash -c virtme
    build kernel 6.12-with-headers bash -c kernel
fi
say "all that $mode needs is here"
