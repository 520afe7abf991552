"""From what was measured to a page that people read."""

from statistics import median

import fio
import recovery

# Ratios promised in the same run: what of Sawmill, of what, at least.
RATIOS = [
    ("randwrite-4k", "nbdkit-null", 0.7),
    ("fsync-4k", "raw", 0.6),
    ("randread-4k", "nbdkit-file", 0.5),
]
OURS = ("sawmill", "sawmill-s3")
MIB, GIB = 2**20, 2**30


def table(head, rows):
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines) + "\n"


class Results:
    """Cells by round, workload and contestant."""

    def __init__(self, document):
        self.document = document
        self.cells = document["cells"]

    def of(self, server, workload, value):
        """One number per round, `None` where a round has none."""
        found = (rounds.get(workload, {}).get(server) for rounds in self.cells)
        return [value(cell) if cell else None for cell in found]

    def median(self, server, workload, value=lambda cell: cell["iops"]):
        numbers = [number for number in self.of(server, workload, value) if number is not None]
        return median(numbers) if numbers else None

    def ratio(self, server, workload, to):
        """The median of the ratios of each round, so that a slow minute counts for both."""
        iops = lambda cell: cell["iops"]  # noqa: E731
        pairs = zip(self.of(server, workload, iops), self.of(to, workload, iops))
        ratios = [one / other for one, other in pairs if one and other]
        return median(ratios) if ratios else None


def cell_text(results, server, workload):
    iops = results.median(server, workload)
    if iops is None:
        return "–"
    return f"{iops:,.0f} ({results.median(server, workload, lambda cell: cell['p50_us']):,.0f})"


def speed(results):
    document = results.document
    workloads = [workload for workload in fio.WORKLOADS if workload.name in document["workloads"]]
    if not workloads or not document["servers"]:
        return ""
    rows = [[title, *(cell_text(results, name, workload.name) for workload in workloads)]
            for name, title in document["servers"].items()]
    text = "## Requests per second (p50 latency, µs)\n\n"
    text += table(["", *(workload.title for workload in workloads)], rows)
    for name, why in document["absent"].items():
        text += f"\n{name} did not take part: {why}\n"
    ours = [name for name in OURS if name in document["servers"]]
    bases = [name for name in ("raw", "nbdkit-null", "nbdkit-file") if name in document["servers"]]
    pairs = [(name, base) for name in ours for base in bases]
    pairs += [(name, f"{name}-before") for name in ours if f"{name}-before" in document["servers"]]
    rows = []
    for name, base in pairs:
        ratios = (results.ratio(name, workload.name, base) for workload in workloads)
        cells = ("–" if ratio is None else f"{ratio:.2f}" for ratio in ratios)
        rows.append([f"{document['servers'][name]} / {document['servers'][base]}", *cells])
    if rows:
        text += "\n## Ratios\n\n" + table(["", *(workload.title for workload in workloads)], rows)
    return text + spread(results, workloads) + processor(results, workloads)


def spread(results, workloads):
    """How far the rounds lie apart: what a difference must exceed to mean something."""
    rows = []
    for workload in workloads:
        worst = 1.0
        for server in results.document["servers"]:
            found = [n for n in results.of(server, workload.name, lambda cell: cell["iops"]) if n]
            if found:
                worst = max(worst, max(found) / min(found))
        rows.append(f"{workload.name} {worst:.2f}")
    return "\nFastest round over slowest, the worst contestant of each workload: " + ", ".join(rows) + ".\n"


def processor(results, workloads):
    rows = []
    for name, title in results.document["servers"].items():
        values = [results.median(name, workload.name, lambda cell: cell["more"].get("cpu_s_per_gib") or 0)
                  for workload in workloads]
        if any(values):
            rows.append([title, *(f"{value:.2f}" if value else "–" for value in values)])
    if not rows:
        return ""
    return ("\n## CPU seconds of the server per GiB moved\n\n"
            "User and system time until the server has ended, with what it puts off, without MinIO's.\n\n"
            + table(["", *(workload.title for workload in workloads)], rows))


def cost(document):
    rows = []
    for name, found in document["cost"].items():
        counted, written = found["counted_until_stored"], found["written_bytes"]
        rows.append([
            document["servers"].get(name, name), f"{found['writes']:,}",
            f"1/{found['writes'] / max(counted['puts'], 1):,.0f}",
            f"{counted['segment_bytes_stored'] / written:.4f}", f"{counted['put_bytes'] / written:.4f}",
            f"{found['store_bytes_after_close'] / written:.4f}",
            f"{counted['journal_written_bytes'] / written:.3f}"])
    if not rows:
        return ""
    head = ["16 KiB random writes, each block once", "writes", "PUTs per write", "segment bytes per byte",
            "bytes put per byte", "bytes in the store after close per byte", "journal bytes per byte"]
    return "\n## What writes cost at the store\n\n" + table(head, rows)


def store_work(results):
    rows = []
    for name in (*OURS, "s3backer"):
        for workload in results.document["workloads"]:
            cells = [cell for cell in results.of(name, workload, lambda cell: cell) if cell]
            counted = [cell["more"].get("counted") or {} for cell in cells]
            if not any(counted):
                continue
            requests = sum(cell["requests"] for cell in cells)
            total = lambda key: sum(one.get(key, 0) for one in counted)  # noqa: E731
            rows.append([results.document["servers"][name], workload, f"{requests:,}",
                         f"{total('puts') / requests:.5f}", f"{total('gets') / requests:.3f}"])
    if not rows:
        return ""
    return ("\n## Store requests of the workloads above, per request of the client\n\n"
            + table(["", "workload", "requests", "PUTs", "GETs"], rows))


def opening(document):
    if not document["recovery"]:
        return ""
    rows, total = recovery.summary(document["recovery"])
    rows = [(name, detail, f"{warm:.0f}", f"{cold:.0f}") for name, detail, warm, cold in rows]
    rows.append(("**start to ready**", "", f"**{total['warm'] * 1000:.0f}**",
                 f"**{total['cold'] * 1000:.0f}**"))
    return (f"\n## Recovery\n\n{document['recovery']['built']}; opened by the real binary, medians of "
            f"{recovery.OPENS}, ms. Each opening adds a fence.\n\n"
            + table(["step", "found", "page cache warm", "cold"], rows))


def footprint(document):
    found = document["memory"]
    if not found:
        return ""
    empty = found["empty"]
    rows = [["empty, idle", 0, f"{empty['resident_bytes'] / MIB:.1f}", f"{empty['peak_bytes'] / MIB:.1f}"]]
    for full in found["full"]:
        rows.append([f"{full['extents']:,} extents of 1 to {full['pages_max']} pages",
                     f"{full['opened_s']:.1f}", f"{full['resident_bytes'] / MIB:.1f}",
                     f"{full['peak_bytes'] / MIB:.1f}"])
    text = "\n## Memory of a served volume of 1 TiB\n\n"
    text += table(["", "start to ready, s", "resident MiB", "at the peak"], rows)
    return text + (f"\nThe empty one made {empty['requests']} store requests in {empty['watched_s']} s "
                   f"of idleness.\n")


def gets_per_read(cell):
    return cell["more"]["counted"]["gets"] / max(cell["requests"], 1)


def gets_per_miss(cell):
    """Frames are larger than blocks, so most reads find theirs fetched already: this leaves those out."""
    counted = cell["more"]["counted"]
    return counted["gets"] / max(counted["reads_store"], 1)


def promises(results):
    """Rows of what is promised, what was measured, and whether that is kept."""
    document, rows = results.document, []

    def row(what, limit, measured, kept):
        rows.append([what, limit, measured, "yes" if kept else "**no**"])
    for workload, base, least in RATIOS:
        for name in OURS:
            ratio = results.ratio(name, workload, base)
            if ratio is not None:
                row(f"{workload}, {name} / {base}", f"≥ {least}", f"{ratio:.2f}", ratio >= least)
    for name, found in document["cost"].items():
        puts = found["counted_until_stored"]["puts"] / found["writes"]
        row(f"PUTs per 16 KiB write, {name}", "≤ 1/256", f"1/{1 / max(puts, 1e-9):.0f}", puts <= 1 / 256)
        stored = found["store_bytes_after_close"] / found["written_bytes"]
        row(f"bytes stored per byte written, {name}", "≤ 1.05", f"{stored:.4f}", stored <= 1.05)
    for name in OURS:
        gets, strict = (results.median(name, "cold-4k", value) for value in (gets_per_read, gets_per_miss))
        if gets is not None:
            measured = f"{gets:.3f}; {strict:.3f} per read that no cache had"
            row(f"GETs per cold read, {name}", "≤ 1", measured, gets <= 1 and strict <= 1)
    if document["recovery"]:
        _, total = recovery.summary(document["recovery"])
        row("recovery", "< 5 s", f"{max(total.values()):.2f} s", max(total.values()) < 5)
    if document["memory"]:
        empty = document["memory"]["empty"]
        size = empty["resident_bytes"] / MIB
        row("idle 1 TiB, resident", "< 60 MiB", f"{size:.1f} MiB", size < 60)
        row(f"idle {empty['watched_s']} s, store requests", "0", empty["requests"], empty["requests"] == 0)
        for full in document["memory"]["full"]:
            size = full["resident_bytes"] / MIB
            what = f"{full['extents']:,} extents of 1 to {full['pages_max']} pages, resident"
            row(what, "< 300 MiB", f"{size:.1f} MiB", size < 300)
    if not rows:
        return ""
    return "\n## What is promised\n\n" + table(["", "promised", "measured", "kept"], rows)


def page(document):
    results = Results(document)
    machine, settings = document["machine"], document["settings"]
    text = f"# Bench of {document['date']}\n\n"
    programs = "; ".join(filter(None, document["versions"].values()))
    before, after = document["load"]
    text += (f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, {machine['system']}, "
             f"Linux {machine['kernel']}; load average {before:.1f} before and {after:.1f} after. "
             f"{programs}.\n\n")
    text += (f"{settings['rounds']} rounds of {settings['runtime_s']} s per cell, disks of "
             f"{settings['size_bytes'] / GIB:g} GiB; medians, ratios within a round first. How each number "
             f"comes about: `bench/README.md`. Again: `{document['command']}`.\n")
    text += promises(results) + "\n" + speed(results) + cost(document) + store_work(results)
    text += opening(document) + footprint(document)
    for name, why in document["failed"].items():
        text += f"\n**{name} failed:** {why}\n"
    if document["journal"]:
        text += "\n## Candidates for the end of the journal\n\n" + document["journal"]
    return text
