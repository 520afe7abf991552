"""A measurement in a guest with a kernel of its own: both sides of it.

Outside, a script of `tests/vm/bench` is booted; it calls the same measurement with `--inside`,
whose lines of JSON are what comes back. Not here: how a guest is booted (`tests/vm/run.py`).
"""

import contextlib
import json
import os
import subprocess
from pathlib import Path

from harness.machine import ROOT, Unfit
from harness.rounds import Rounds, turns


def inside(contestants, measure, ready=lambda entered: None):
    """Contestants, each (what is known of it, a context that gives a device), take turns."""
    only = json.loads(os.environ.get("VM_ONLY", "null"))
    with contextlib.ExitStack() as stack:
        entered = []
        for known, contestant in contestants:
            if only and known["name"] not in only:
                continue
            try:
                entered.append((known, stack.enter_context(contestant())))
            except (OSError, ValueError, KeyError) as error:
                print(json.dumps({**known, "absent": str(error)}), flush=True)
        ready(entered)
        for number, _, (known, device) in turns(int(os.environ["VM_ROUNDS"]), [None], entered):
            for measured in measure(device):
                print(json.dumps({**known, "round": number, **measured}), flush=True)


def boot(script, flags, **variables):
    """Boots, measures, returns the lines of the guest."""
    environment = {"VM_MEMORY": "3G", **os.environ, "VM_ROUNDS": str(flags.rounds),
                   "VM_ONLY": json.dumps(flags.only), **variables}
    done = subprocess.run([ROOT / "tests/vm/run.py", f"bench/{script}", "--keep-log"],
                          env=environment, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout)
    folder = next(line.rpartition(" ")[2] for line in done.stdout.splitlines()
                  if "all output is in" in line)
    if done.returncode:
        raise Unfit(f"the guest did not get through; see {folder}")
    lines = (Path(folder) / f"bench/{script}.log").read_text().splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


def results(lines, *cell):
    """What was measured, by round, contestant and the values of those keys."""
    found = Rounds()
    for line in lines:
        if "absent" not in line:
            found.keep(line["round"], tuple(line[key] for key in cell), line["name"], line)
    return found


def tables(table_of):
    """What a guest measures of a request, as sections of a page."""
    return ["Requests a second (more is better):", table_of("iops"),
            "Processor time for each request, of the whole guest with fio (less is better), in µs:",
            table_of("cpu_us")]


def absent(lines):
    """The contestants that took no part, as a Markdown list."""
    return "\n".join(f"- {line['name']}{' ×' * ('queues' in line)}{line.get('queues', '')}: "
                     f"{line['absent']}"
                     for line in lines if "absent" in line)
