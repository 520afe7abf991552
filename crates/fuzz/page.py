#!/usr/bin/env python3
"""The table of one run of the fuzzer, and the page that keeps the tables of all runs.

    page.py FIGURES                    prints the table
    page.py FIGURES --page PAGE        also adds the run to PAGE, and counts the totals anew
    page.py --least N --page PAGE      names the N targets that have the fewest minutes on PAGE

FIGURES has a line for each target: its name, executions, seconds, new entries of the corpus,
crashes; the words are apart by tabs. The command that ran is in FUZZ_COMMAND. The totals come from
the tables on the page, so that a run that is merged from elsewhere counts too. Not here: what
fuzzes (run.sh).
"""

import argparse
import datetime
import os
import pathlib
import platform
import re
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[2]
BEGIN, END = "<!-- totals -->", "<!-- runs -->"
HEAD = ("target", "executions", "minutes", "new corpus entries", "crashes")
OPENING = f"""# Fuzzing

What `make fuzz` ran and found. Each run with `PAGE=` adds itself here;
[CONTRIBUTING](../../CONTRIBUTING.md#fuzzing) says how. A new corpus entry is an input that reached
code that no earlier input of that machine reached, or that reached it with fewer bytes. A crash is
an input that broke a target: a panic, a promise that did not hold, more than 5 s, or more than
2 GiB. Every crash was fixed before the next run; the commit that adds the run describes it.

{BEGIN}
{END}
"""
ROW = re.compile(r"^\| (\w+) \| [\d,]+ \| ([\d.,]+) \|", re.MULTILINE)
TOTAL = re.compile(r"^\| all \| ([\d,]+) \| ([\d.,]+) \| ([\d,]+) \| ([\d,]+) \|$", re.MULTILINE)


def table(rows):
    """The rows and their sums, in Markdown."""
    rows = [*rows, ("all", *(sum(row[column] for row in rows) for column in range(1, len(HEAD))))]
    shown = [f"| {name} | {executions:,} | {seconds / 60:.2f} | {new:,} | {crashes:,} |"
             for name, executions, seconds, new, crashes in rows]
    rule = "|---" + "|---:" * (len(HEAD) - 1) + "|"
    return "\n".join(["| " + " | ".join(HEAD) + " |", rule, *shown]) + "\n"


def figures(path):
    """The lines of a run as rows."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [(name, *map(int, rest)) for name, *rest in (line.split("\t") for line in lines)]


def git(*words):
    """The output of git, on one line."""
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def machine():
    """The machine of the run: the number of usable cores, and their model."""
    lines = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    model = (models or [platform.machine()])[0]
    cores = counted(len(os.sched_getaffinity(0)), "core")
    return f"{cores} of {model}, kernel {platform.release()}"


def counted(number, word):
    """A number of things."""
    return f"{number:,.0f} {word}" + ("" if number == 1 else "s")


def section(rows):
    """A run as a section of the page."""
    # A run changes only the page itself.
    changed = git("status", "--porcelain", "--", ".", ":!docs/measurements")
    commit = git("rev-parse", "--short=12", "HEAD") + (" and changes" if changed else "")
    command = os.environ.get("FUZZ_COMMAND", "make fuzz")
    shortest, longest = (pick(seconds for _, _, seconds, *_ in rows) for pick in (min, max))
    each = f"{shortest} s" if shortest == longest else f"{shortest} to {longest} s"
    return (f"\n## {datetime.date.today()}, {counted(len(rows), 'target')}\n\n"
            f"`{command}` at commit {commit}, on {machine()}.\n"
            f"Each target had {each} ({longest / 60:.2f} minutes).\n\n"
            f"{table(rows)}")


def add(page, rows):
    """Adds a run to the page, which is created if it does not exist."""
    text = page.read_text(encoding="utf-8") if page.exists() else OPENING
    text += section(rows)
    before, _, rest = text.partition(BEGIN)
    _, _, runs = rest.partition(END)
    totals = [[float(word.replace(",", "")) for word in found] for found in TOTAL.findall(runs)]
    executions, minutes, new, crashes = map(sum, zip(*totals, strict=True))
    shown = (f"{counted(len(totals), 'run')}, {minutes / 60:.2f} hours, {executions:,.0f} "
             f"executions, {new:,.0f} new corpus entries; crashes: {crashes:,.0f}.")
    page.write_text(f"{before}{BEGIN}\n**In all:** {shown}\n{END}{runs}", encoding="utf-8")


def least_fuzzed(page, number):
    """The names of the targets that have the fewest minutes on the page, fewest first."""
    minutes = {folder.name: 0.0 for folder in (ROOT / "crates/fuzz/corpus").iterdir()}
    text = page.read_text(encoding="utf-8") if page.exists() else ""
    for name, found in ROW.findall(text):
        if name in minutes:
            minutes[name] += float(found.replace(",", ""))
    return sorted(minutes, key=lambda name: (minutes[name], name))[:number]


def main():
    """Does what the head of this file says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("figures", type=pathlib.Path, nargs="?")
    parser.add_argument("--page", type=pathlib.Path)
    parser.add_argument("--least", type=int)
    arguments = parser.parse_args()
    if arguments.least is not None:
        print(*least_fuzzed(arguments.page, arguments.least), sep="\n")
        return
    rows = figures(arguments.figures)
    print(table(rows), end="")
    if arguments.page:
        add(arguments.page, rows)
        print(f"added to {arguments.page}")


if __name__ == "__main__":
    main()
