#!/usr/bin/python3
"""Draws docs/pictures/rates.svg of a results page of the bench: requests per second, by workload.

    docs/pictures/chart.py bench/results/DATE.md

Each bar's length is its share of the fastest of its workload. Not here: how the numbers come about
(bench/README.md).
"""

import re
import sys
from pathlib import Path

HEADING = "## Requests per second"
# Columns of that table by their beginning, and the rows that are drawn:
# text on the page, text in the chart.
WORKLOADS = ("4 KiB random writes, qd 32", "16 KiB random writes", "4 KiB random writes, fsync",
             "4 KiB random reads, warm", "64 KiB sequential reads")
ROWS = (("raw file", "raw file: the disk's limit"),
        ("nbdkit null", "nbdkit null: the protocol's limit"),
        ("**Sawmill** on file", "Sawmill, store in a folder"),
        ("**Sawmill** on MinIO", "Sawmill, store in MinIO"),
        ("nbdkit file", "nbdkit file"), ("qemu-nbd raw, cache=none", "qemu-nbd"),
        ("s3backer", "s3backer, store in MinIO"))
OURS = "#2f6f9f"
PEERS = "#b9b4a8"
LIMITS = "#dedad0"
LEFT, BAR, ROW, WIDTH, TITLE = 250, 420, 17, 800, 30


def table(text):
    """The table behind the heading: columns, and cells by row."""
    lines = text[text.index(HEADING):].splitlines()
    lines = [line for line in lines if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    end = next((n for n, row in enumerate(rows) if n > 1 and row[0] == ""), len(rows))
    return rows[0], rows[2:end]


def number(cell):
    match = re.match(r"[\d,]+", cell)
    return int(match.group().replace(",", "")) if match else 0


def color(name):
    if name.startswith("Sawmill"):
        return OURS
    return LIMITS if "limit" in name else PEERS


def draw(columns, rows, date):
    parts, y = [], TITLE
    text = '<text x="{}" y="{}" {}>{}</text>'.format
    for workload in WORKLOADS:
        at = next(n for n, column in enumerate(columns) if column.startswith(workload))
        parts.append(text(0, y, 'font-weight="bold"', columns[at] + ", requests per second"))
        y += 8
        bars = []
        for begins, shown in ROWS:
            row = next((row for row in rows if row[0].startswith(begins)), None)
            if row and number(row[at]):
                bars.append((shown, number(row[at])))
        most = max(rate for _, rate in bars)
        for shown, rate in bars:
            length = max(1, round(BAR * rate / most))
            parts.append(text(LEFT - 8, y + 12, 'text-anchor="end"', shown))
            parts.append(f'<rect x="{LEFT}" y="{y + 2}" width="{length}" height="{ROW - 5}" '
                         f'fill="{color(shown)}"/>')
            parts.append(text(LEFT + length + 6, y + 12, 'fill="#555"', f"{rate:,}"))
            y += ROW
        y += 24
    caption = f"Measured on {date}: medians of rounds, one machine, one run."
    parts.append(text(0, y - 6, 'fill="#777"', caption))
    head = (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" width="{WIDTH}" '
            'font-family="system-ui, sans-serif" font-size="12">\n'
            f'<rect width="{WIDTH}" height="{y}" fill="#fff"/>\n')
    return head + "\n".join(parts) + "\n</svg>\n"


def main():
    page = Path(sys.argv[1])
    columns, rows = table(page.read_text())
    target = Path(__file__).resolve().parent / "rates.svg"
    target.write_text(draw(columns, rows, page.stem))
    print(target)


main()
