"""Drivers that tests in a guest want, built on this machine before the boot:
`drivers: c` in a test's head.

Each kind goes into a folder of its own, `$BIN/drivers/KIND`. Invariant: what this machine cannot
build is a reason to skip, in words; what it can build and does not compile is an error. Not here:
which test wants what, and what it does with it (`driver/*.sh`).
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# The folder of a Go that tests/setup/prepare.sh fetched.
PATH = f"{ROOT / '.prepared/bin'}:{os.environ['PATH']}"
EXAMPLES = ["null", "ram", "file", "mirror", "lazy"]
# The parts of BUSE that BS3 uses, which we replace.
BS3_BUSE = "github.com/asch/buse/lib/go/buse"


class Missing(Exception):
    """A requirement that this machine lacks."""


def run(*words, **more):
    subprocess.run([str(word) for word in words], check=True, **more)


def needed(path, package):
    if not path.exists():
        raise SystemExit(f"{path} is missing: cargo build --release -p {package}")
    return path


def compile_c(release, source, program, standard):
    if shutil.which("cc") is None:
        raise Missing("no cc")
    run("cc", standard, "-O2", "-Wall", "-Wextra", "-Werror", "-o", program, source,
        "-I", ROOT / "sdk/c/include", "-L", release, "-lsawmill", "-pthread")


def c(release, into):
    needed(release / "libsawmill.so", "sawmill-c")
    for name in EXAMPLES:
        compile_c(release, ROOT / f"sdk/c/examples/{name}.c", into / name, "-std=c99")
    run("strip", "-o", into / "libsawmill.so", release / "libsawmill.so")


def bdus(release, into):
    needed(release / "libsawmill.so", "sawmill-c")
    compile_c(release, ROOT / "sdk/c/tests/bdus/ram.c", into / "ram", "-std=c11")
    for name in ["libsawmill.so", "bdus"]:
        run("strip", "-o", into / name, needed(release / name, "sawmill-c"))


def with_go(folder, *words):
    go = shutil.which("go", path=PATH)
    if go is None:
        raise Missing("no go")
    output = subprocess.run([go, "env", "GOVERSION"], capture_output=True, text=True,
                           env=dict(os.environ, GOTOOLCHAIN="local"))
    version = output.stdout.strip()
    number = version.removeprefix("go").split(".")
    if len(number) < 2 or not number[1].isdigit() or (int(number[0]), int(number[1])) < (1, 23):
        raise Missing(f"go is '{version}', older than 1.23")
    run(go, *words, cwd=folder, env=dict(os.environ, GOTOOLCHAIN="local", CGO_ENABLED="0"))


def go(_release, into):
    with_go(ROOT / "sdk/go/examples", "build", "-ldflags=-s -w", "-o", into, "./...")


def bs3(_release, into):
    """The original: only from a source that the caller provides."""
    source = os.environ.get("SAWMILL_BS3")
    if not source:
        raise Missing("no source of BS3: SAWMILL_BS3 names no folder")
    if not (ROOT / ".prepared/bin/minio").exists():
        raise Missing("no MinIO: run tests/setup/prepare.sh")
    folder = into / "source"
    shutil.copytree(source, folder, copy_function=shutil.copyfile)
    with_go(folder, "mod", "edit", f"-replace={BS3_BUSE}={ROOT / 'sdk/go/buse'}")
    with_go(folder, "build", "-buildvcs=false", "-ldflags=-s -w", "-o", into / "bs3", ".")
    shutil.rmtree(folder)


def buse(_release, into):
    """The kernel module for the guest's kernel, and the programs that use it."""
    headers = os.environ.get("SAWMILL_KERNEL_HEADERS") or next(
        (ROOT / ".prepared/kernel/usr/src").glob("linux-headers-*-amd64"), None)
    if headers is None:
        raise Missing("no headers of the guest's kernel: run tests/setup/prepare.sh vm")
    variables = (Path(headers) / ".kernelvariables").read_text()
    for compiler in ["cc", "make", *re.findall(r"gcc-\d+", variables)]:
        if shutil.which(compiler) is None:
            raise Missing(f"no {compiler}")
    shutil.copytree(ROOT / "kernel/buse", into / "module")
    # Types for tracers would need another program (pahole).
    run("make", "-s", "-C", into / "module", f"KDIR={headers}", "CONFIG_DEBUG_INFO_BTF_MODULES=")
    # The second one only where the kernel has KUnit.
    for module in (into / "module").glob("*.ko"):
        shutil.move(module, into / module.name)
    shutil.rmtree(into / "module")
    for source in (ROOT / "tests/vm/buse/parts").glob("*.c"):
        run("cc", "-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-o", into / source.stem,
            source, "-pthread")


def buse_library(_release, into):
    """A program on BUSE's original Go library: only from a checkout that the caller provides."""
    checkout = os.environ.get("SAWMILL_BUSE")
    if not checkout:
        raise Missing("no source of BUSE: SAWMILL_BUSE names no folder")
    folder = into / "source"
    shutil.copytree(Path(checkout) / "lib/go/buse", folder / "buse")
    shutil.copy(ROOT / "tests/vm/buse/parts/library.go", folder)
    with_go(folder, "mod", "init", "library")
    # Its own list of requirements is not complete.
    with_go(folder / "buse", "mod", "edit", "-require=golang.org/x/sys@v0.32.0")
    with_go(folder, "mod", "edit", f"-replace={BS3_BUSE}=./buse", f"-require={BS3_BUSE}@v0.0.0")
    with_go(folder, "build", "-mod=mod", "-ldflags=-s -w", "-o", into / "library", ".")
    shutil.rmtree(folder)


BUILDERS = {"c": c, "bdus": bdus, "go": go, "bs3": bs3, "buse": buse,
            "buse_library": buse_library}


def build(kind, release, bin_folder):
    """Builds a kind into the folder; says why it cannot, or None."""
    into = bin_folder / "drivers" / kind
    into.mkdir(parents=True)
    try:
        BUILDERS[kind](release, into)
    except Missing as missing:
        return str(missing)
    return None
