"""What all measurements have in common; a script of `bench/` holds only what is particular to it.

`cli` options and the end of a script · `machine` facts, programs, files · `process` children that
go on · `rounds` turns, medians, ratios · `page` tables and pages · `fio` loads · `serve`, `sawmill`
disks that are served · `wires` two network namespaces · `guest` a kernel of its own. Nothing here
knows who is compared with whom.
"""

from harness import cli, fio, guest, machine, page
from harness.cli import log
from harness.machine import EXAMPLES, GIB, KIB, MIB, RELEASE, ROOT, Unfit, run, wait_until
from harness.process import PATIENCE_S, Process
from harness.rounds import Rounds, turns
from harness.sawmill import Sawmill
from harness.serve import Place, Server, difference, in_parts, listens, temporary_place
from harness.wires import MTU, Wires
