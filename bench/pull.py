#!/usr/bin/env python3
"""A link pulled and put back under fio verify, again and again:
no error, no wrong byte, how long users wait.

Two network namespaces with --links veth pairs. `sawmill target memory:` in one, `sawmill attach
--nbd` over all links in the other, sealed; fio writes and verifies there. One link after the other
is taken down at the target's end, left down for 0.3 s, and put up again; with `--links 1` nothing
is left meanwhile. fio must end without an error. The stall is the longest that any request of fio
took. Needs root. Not here: how much a link carries (`bench/link.py`).
"""

import json
import os
import time

from harness import MIB, Process, Wires, cli, fio, page, run, temporary_place

SIZE_BYTES, DOWN_S = 32 * MIB, 0.3
HOW = """\
# A link pulled and put back under fio verify

`bench/pull.py --pulls {pulls}`: every {down_s} s a link is taken down for as long; with one link \
nothing is left meanwhile.
No error, no wrong byte. Longest request of fio, in ms.

"""


def measure(flags, carrier, links):
    """The longest request of each load, undisturbed and while links are pulled."""
    with temporary_place(flags.work) as place, Wires(links) as wires:
        folder, door, listen = place.folder, place.memory / "nbd.sock", wires.addresses(carrier)
        run(flags.binary, "link", "key", folder / "key")

        def start(end, *words):
            return wires.ready(
                end, flags.binary, *words, "--key-file", folder / "key", "--json",
                wait=Process.expect_event, log=folder / f"log{end}",
                env=os.environ | {"XDG_STATE_HOME": str(folder / f"state{end}")})

        def load(seconds=20):
            target = fio.nbd(f"nbd+unix:///{name}?socket={door}")
            return fio.verifying(target, "4k-64k", SIZE_BYTES, "20m", seconds, folder,
                                 "--verify_backlog=256")

        def pull(number):
            wires.pull([number % links], DOWN_S)
            time.sleep(DOWN_S)
        with start(0, "target", f"memory:{SIZE_BYTES}", "--listen", listen) as target, \
                start(1, "attach", f"link:{listen}/memory", "--nbd", f"unix:{door}") as attachment:
            exports = run("nbdinfo", "--list", "--json", f"nbd+unix:///?socket={door}")
            name = json.loads(exports)["exports"][0]["export-name"]
            found = {"carrier": carrier, "links": links, "undisturbed_ms": load(3).longest_ms(),
                     "pulled_ms": fio.disturbed_ms(load, pull, flags.pulls)}
            attachment.end_well()
            target.end_well()
    return found


@cli.script
def main():
    flags = cli.parse(__doc__, ("--pulls", 50), ("--links", (1, 2)),
                      only={"carriers": ["udp", "tcp", "eth"]}, only_too="--carriers",
                      binary=cli.SAWMILL, work=cli.TEMPORARY, root=True)
    found = list(page.as_they_come(
        measure(flags, carrier, links) for carrier in flags.only for links in flags.links))
    rows = [[one["carrier"], one["links"], f"{one['undisturbed_ms']:.1f}", flags.pulls,
             f"{max(one['pulled_ms']):.1f}"] for one in found]
    table = page.table(["carrier", "links", "undisturbed ms", "pulls", "longest ms"], rows)
    page.write(flags.page, HOW.format(pulls=flags.pulls, down_s=DOWN_S) + table, found)
