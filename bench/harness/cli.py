"""The command line that all measurements have: options with one name and one meaning,
and how a script ends.

A script names the options that it uses, and adds its own.
Not here: the effect of the options.
"""

import argparse
import os
import shlex
import signal
import sys
import tempfile
from pathlib import Path

from harness.machine import RELEASE, Unfit

SCRIPT = Path(sys.argv[0]).name
BUILT = RELEASE / "sawmill"
SAWMILL = Path(os.environ.get("SAWMILL_BINARY", BUILT))
# Where disks go by default: with what is built, or where paths are short enough for
# control sockets.
TARGET, TEMPORARY = RELEASE.parent, Path(tempfile.gettempdir())
# The folder on the disk that is measured: `--work`, where a script has it.
work = TARGET
COMMON = {
    "rounds": ("--rounds", "how often each is measured"),
    "seconds": ("--seconds --runtime", "how long each is measured"),
    "binary": ("--binary", "the program that is measured"),
    "work": ("--work", "the folder where disks go: the disk that is measured"),
    "page": ("--page --out", "write the page there"),
}


def log(text):
    print(f"{SCRIPT}: {text}", file=sys.stderr, flush=True)


def add(parser, names, default, about=""):
    """An option. Its default says what it takes: a type, a tuple with commas, one of a list,
    yes or no."""
    how = {"default": default, "type": type(default), "help": f"{about} ({default})".strip()}
    if isinstance(default, type):
        how = {"type": default, "help": about} | ({} if names.startswith("-") else {"nargs": "+"})
    elif isinstance(default, tuple):
        how["type"] = lambda text: tuple(map(type(default[0]), text.split(",")))
    elif isinstance(default, list):
        how |= {"default": default[0], "type": str, "choices": default}
    elif default is False:
        how = {"action": "store_true", "help": about}
    parser.add_argument(*names.split(), **how)


def parse(doc, *own, only=None, only_too="", root=False, page=Path, **common):
    """The options: the common ones that are named here, with their defaults, and a script's own,
    each (names, default, words).

    `only`: the names to choose from, by kind, or a function that derives them from the parsed
    options. The result's `only` has the chosen ones in their order, all where none is named, and
    then `whole` is true.
    """
    parser = argparse.ArgumentParser(description=doc,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    common["page"] = page
    for option in [(names, common[key], about) for key, (names, about) in COMMON.items()
                   if key in common]:
        add(parser, *option)
    if only:
        parser.add_argument("--only", *only_too.split(), action="append", default=[],
                            metavar="NAME",
                            help="measure this of --list alone; repeatable, or several with commas")
        add(parser, "--list", False, "print the names that --only knows")
    for option in own:
        add(parser, *option)
    found = parser.parse_args()
    if only:
        choose(parser, found, only(found) if callable(only) else only)
    if getattr(found, "rounds", 1) < 1 or getattr(found, "seconds", 1) <= 0:
        parser.error("--rounds is at least 1, --seconds more than 0")
    global work
    work = getattr(found, "work", work)
    if getattr(found, "binary", None):
        found.binary = found.binary.resolve()
    if root and os.geteuid():
        sys.exit(f"{SCRIPT}: it makes network namespaces: run it as root")
    return found


def choose(parser, found, kinds):
    known = [name for names in kinds.values() for name in names]
    if found.list:
        print("\n".join(f"{kind}: {shlex.join(names)}" for kind, names in kinds.items()))
        sys.exit()
    names = [name for text in found.only for name in ([text] if text in known else text.split(","))]
    for name in names:
        if name not in known:
            parser.error(f"--only {name}: unknown; one of {shlex.join(known)}")
    found.whole, found.only = not names, [name for name in known if not names or name in names]


def script(main):
    """Runs the main function of a file that was called, which is the last in it.

    On SIGTERM it still undoes what it did; what cannot be done here is one line.
    """
    if main.__module__ != "__main__":
        return main
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        sys.exit(main())
    except Unfit as error:
        sys.exit(f"{SCRIPT}: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
