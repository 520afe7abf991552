"""What all measurements have in common; a script of `bench/` holds only what is particular to it.

`cli` options and the end of a script · `machine` facts, programs, files · `process` children that
go on · `rounds` turns, medians, ratios · `page` tables and pages · `fio` loads · `serve`, `sawmill`
disks that are served · `wires` two network namespaces · `guest` a kernel of its own. Nothing here
knows who is compared with whom.
"""

from frame import cli, fio, guest, machine, page
from frame.cli import log
from frame.machine import EXAMPLES, GIB, KIB, MIB, RELEASE, ROOT, Unfit, run, wait_until
from frame.process import PATIENCE_S, Process
from frame.rounds import Rounds, turns
from frame.sawmill import Sawmill
from frame.serve import Place, Server, difference, in_parts, listens, temporary_place
from frame.wires import MTU, Wires
