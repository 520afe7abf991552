"""From figures to pages that people read: tables, charts, where a page lies, raw results beside it.

Not here: the text of a page.
"""

import datetime
import json
import re
import shlex
import sys
from pathlib import Path
from statistics import median

from harness import cli, machine
from harness.cli import log
from harness.machine import ROOT

RESULTS = ROOT / "bench/results"
RAW = RESULTS / "raw"
MEASUREMENTS = ROOT / "docs/measurements"
STAMP = r"^Measured on \d{4}-.*\n\n"


def table(head, rows, numbers=()):
    """A table of Markdown. These columns are numbers, to the right; `True`: all but the first."""
    right = range(1, len(head)) if numbers is True else numbers
    rule = ["---:" if column in right else "---" for column in range(len(head))]
    return "".join("| " + " | ".join(map(str, row)) + " |\n" for row in [head, rule, *rows])


def as_they_come(samples):
    """Reports each sample as soon as it is measured."""
    for sample in samples:
        log(json.dumps(sample))
        yield sample


def text_of(value, form=",.0f"):
    return "–" if value is None else f"{value:{form}}"


def spread(ratios):
    """The median, with the smallest and the largest."""
    if not ratios:
        return text_of(None)
    return f"{median(ratios):.2f} [{min(ratios):.2f}–{max(ratios):.2f}]"


def written_by(command, facts):
    return (f"Written by `{command}` on {facts['cores']} cores of {facts['cpu']}, "
            f"kernel {facts['kernel']}.\n")


def kept(is_kept):
    """Whether a promise is kept, as the last cell of its row."""
    return "yes" if is_kept else "**no**"


def facts():
    """When, on what code, how and where it is measured."""
    words = ["PATH" if word.startswith("/") else word for word in sys.argv[1:]]
    return {"date": datetime.date.today().isoformat(), "commit": machine.commit(),
            "command": shlex.join([f"bench/{Path(sys.argv[0]).name}", *words]),
            "machine": machine.describe(cli.work)}


def stamped(text, about, raw):
    """The text with a line below its title: these facts, and the name of its raw numbers if it has
    any."""
    where = about["machine"]
    link = f"; [raw numbers](raw/{raw}.json)" if raw else ""
    model = f" ({where['cpu_model']})" if where["cpu_model"] else ""
    line = (f"Measured on {about['date']}, on the code of {about['commit']}, "
            f"on {where['cores']} cores of {where['cpu']}{model}, {where['memory_gib']} GiB, "
            f"Linux {where['kernel']}, {where['disk']}, with `{about['command']}`{link}.\n\n")
    title, _, rest = text.partition("\n\n")
    return f"{title}\n\n{line}{re.sub(STAMP, '', rest, count=1, flags=re.MULTILINE)}"


def write(path, text, raw, name=None, before="", after=""):
    """Prints a page, and leaves it in a file where one is wanted, its raw numbers in `raw/` beside
    it.

    `raw` is every sample, or `None` if they lie elsewhere already; `name` is their file's, if it is
    not the page's. `before` and `after` are parts of the page that others wrote.
    """
    about = facts()
    name = (name or path.stem) if path and raw is not None else None
    text = before + stamped(text, about, name) + after
    print(text)
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        log(f"wrote {path}")
    if name:
        log(f"and {write_raw(name, {**about, 'raw': raw}, path.parent / 'raw')}")


def around(path, begin=None, end=None):
    """The rest of a page: the text before one mark, and the text from another mark on."""
    old = path.read_text(encoding="utf-8") if path and path.exists() else ""
    before = old.partition(begin)[0] if begin else ""
    _, mark, after = old.partition(end) if end else ("", "", "")
    return before, mark + after


def write_raw(name, document, folder):
    """Stores the raw data of a page; returns the path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(document, indent=1))
    return path


def bars(path, head, groups):
    """A chart: groups of bars, each (two lines of words, figures), as tall as their figures."""
    width, height, top = (90 * len(groups) + 60, 260,
                          max((max(figures) for _, figures in groups), default=0))
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height + 40}" '
             'font-family="sans-serif" font-size="11">']
    for group, (words, figures) in enumerate(groups):
        left, bar = 20 + 90 * group, 70 // len(figures)
        for place, figure in enumerate(figures):
            tall = figure / top * (height - 20)
            shade = 200 - 150 * place // max(1, len(figures) - 1)
            parts.append(f'<rect x="{left + place * bar}" y="{height - tall:.0f}" '
                         f'width="{bar - 2}" height="{tall:.0f}" '
                         f'fill="rgb({shade},{shade},{shade})"/>')
        parts += [f'<text x="{left}" y="{height + 16 + 14 * line}">{text}</text>'
                  for line, text in enumerate(words)]
    parts.append(f'<text x="4" y="14">{top:,.0f} {head}</text></svg>\n')
    path.write_text("\n".join(parts))
