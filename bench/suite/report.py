"""From what `run.py` has measured to its page.

Every number of the page is in the raw document; nothing is measured here.
Not here: tables and ratios (`harness/`).
"""

from harness import GIB, MIB, Rounds
from harness.page import kept, text_of, table
from suite import opening
from suite.contest import WORKLOADS

# Promised ratios within a run: Sawmill's workload, the contestant in comparison, the minimum.
RATIOS = [
    ("randwrite-4k", "nbdkit-null", 0.7),
    ("fsync-4k", "raw", 0.6),
    ("randread-4k", "nbdkit-file", 0.5),
]
OURS = ("sawmill", "sawmill-s3")
# More columns do not fit a page.
COLUMNS_MAX = 7


class Results(Rounds):
    """The cells of a document, by round, workload and contestant."""

    def __init__(self, document):
        super().__init__(document["cells"])
        self.document, self.servers = document, document["servers"]
        self.workloads = [workload for workload in WORKLOADS
                          if workload.name in document["workloads"]]

    def by_workload(self, rows):
        """A column for each workload, in tables of a few each."""
        titles, wide = [workload.title for workload in self.workloads], COLUMNS_MAX
        return "\n".join(table(["", *titles[at:at + wide]],
                               [[row[0], *row[1 + at:1 + at + wide]] for row in rows])
                         for at in range(0, len(titles), wide))


def section(title, text):
    return f"\n## {title}\n\n{text}" if text else ""


def speed(results):
    document, servers = results.document, results.servers
    if not results.workloads or not servers:
        return ""
    rows = []
    for name, title in servers.items():
        rows.append([title, *(rate(results, name, workload.name)
                              for workload in results.workloads)])
    text = section("Requests per second: median, [slowest to fastest round] (p50 latency, µs)",
                   results.by_workload(rows))
    text += "".join(f"\n{name} did not take part: {why}\n"
                    for name, why in document["absent"].items())
    ours = [name for name in OURS if name in servers]
    pairs = [(name, base) for name in ours for base in ("raw", "nbdkit-null", "nbdkit-file")]
    pairs += [(name, f"{name}-before") for name in ours]
    rows = []
    for name, base in (pair for pair in pairs if pair[1] in servers):
        ratios = (results.ratio(name, base, workload.name, "iops")
                  for workload in results.workloads)
        rows.append([f"{servers[name]} / {servers[base]}",
                     *(text_of(ratio, ".2f") for ratio in ratios)])
    text += section("Ratios", rows and results.by_workload(rows))
    return text + spread(results) + processor(results)


def rate(results, name, workload):
    """A cell with its range, which shows what its median is worth."""
    found = results.found(name, workload, "iops")
    if not found:
        return "–"
    iops, p50_us = (results.median(name, workload, key) for key in ("iops", "p50_us"))
    return f"{iops:,.0f} [{min(found):,.0f} to {max(found):,.0f}] ({p50_us:,.0f})"


def spread(results):
    """The spread of the rounds, which a significant difference must exceed."""
    worst = []
    for workload in results.workloads:
        found = (results.found(server, workload.name, lambda cell: cell["iops"] or None)
                 for server in results.servers)
        apart = [max(each) / min(each) for each in found if each]
        worst.append(f"{workload.name} {max([1.0, *apart]):.2f}")
    return ("\nFastest round over slowest, the worst contestant of each workload: "
            f"{', '.join(worst)}.\n")


def processor(results):
    rows = []
    for name, title in results.servers.items():
        values = [results.median(name, workload.name,
                                 lambda cell: cell["more"].get("cpu_s_per_gib") or 0)
                  for workload in results.workloads]
        if any(values):
            rows.append([title, *(text_of(value or None, ".2f") for value in values)])
    explanation = ("User and system time until the server has ended, with what it puts off, "
            "without MinIO's.\n\n")
    return section("CPU seconds of the server per GiB moved",
                   rows and explanation + results.by_workload(rows))


def cost(document):
    rows = []
    for name, found in document["cost"].items():
        counted, written = found["counted_until_stored"], found["written_bytes"]
        rows.append([
            document["servers"].get(name, name), f"{found['writes']:,}",
            f"1/{found['writes'] / max(counted['puts'], 1):,.0f}",
            f"{counted['segment_bytes_stored'] / written:.4f}",
            f"{counted['put_bytes'] / written:.4f}",
            f"{found['store_bytes_after_close'] / written:.4f}",
            f"{counted['journal_written_bytes'] / written:.3f}"])
    head = ["16 KiB random writes, each block once", "writes", "PUTs per write",
            "segment bytes per byte", "bytes put per byte",
            "bytes in the store after close per byte", "journal bytes per byte"]
    return section("What writes cost at the store", rows and table(head, rows))


def store_work(results):
    rows = []
    for name in (*OURS, "s3backer"):
        for workload in results.document["workloads"]:
            cells = results.found(name, workload, lambda cell: cell)
            counted = [cell["more"].get("counted") or {} for cell in cells]
            if any(counted):
                requests = sum(cell["requests"] for cell in cells)
                puts, gets = (sum(one.get(key, 0) for one in counted) / requests
                              for key in ("puts", "gets"))
                rows.append([results.servers[name], workload, f"{requests:,}", f"{puts:.5f}",
                             f"{gets:.3f}"])
    return section("Store requests of the workloads above, per request of the client",
                   rows and table(["", "workload", "requests", "PUTs", "GETs"], rows))


def recovery(document):
    if not document["recovery"]:
        return ""
    rows, total = opening.recovery_rows(document["recovery"])
    rows = [(name, detail, f"{warm:.0f}", f"{cold:.0f}") for name, detail, warm, cold in rows]
    rows.append(("**start to ready**", "",
                 *(f"**{total[kind] * 1000:.0f}**" for kind in ("warm", "cold"))))
    return section("Recovery", (
        f"{document['recovery']['built']}; opened by the real binary, medians of {opening.OPENS}, "
        "ms. Each opening adds a fence.\n\n"
        f"{table(['step', 'found', 'page cache warm', 'cold'], rows)}"))


def footprint(document):
    found = document["memory"]
    if not found:
        return ""
    empty, rows = found["empty"], []
    for one in [empty, *found["full"]]:
        what = ["empty, idle", 0] if one is empty else [
            f"{one['extents']:,} extents of 1 to {one['pages_max']} pages",
            f"{one['opened_s']:.1f}"]
        rows.append([*what, *(f"{one[key] / MIB:.1f}" for key in ("resident_bytes", "peak_bytes"))])
    made = (f"\nThe empty one made {empty['requests']} store requests in {empty['watched_s']} s "
            "of idleness.\n")
    head = ["", "start to ready, s", "resident MiB", "at the peak"]
    return section("Memory of a served volume of 1 TiB", table(head, rows) + made)


def promises(results):
    """Rows of targets, measured values, and whether each target is reached."""
    document, rows = results.document, []

    def row(what, limit, measured, is_kept):
        rows.append([what, limit, measured, kept(is_kept)])
    for workload, base, least in RATIOS:
        for name in OURS:
            ratio = results.ratio(name, base, workload, "iops")
            if ratio is not None:
                row(f"{workload}, {name} / {base}", f"≥ {least}", f"{ratio:.2f}", ratio >= least)
    for name, found in document["cost"].items():
        puts = found["counted_until_stored"]["puts"] / found["writes"]
        row(f"PUTs per 16 KiB write, {name}", "≤ 1/256", f"1/{1 / max(puts, 1e-9):.0f}",
            puts <= 1 / 256)
        stored = found["store_bytes_after_close"] / found["written_bytes"]
        row(f"bytes stored per byte written, {name}", "≤ 1.05", f"{stored:.4f}", stored <= 1.05)
    for name in OURS:
        # Frames are larger than blocks, so most reads find theirs fetched: the second figure leaves
        # those out.
        gets, strict = (results.median(name, "cold-4k", key) for key in (
            lambda cell: cell["more"]["counted"]["gets"] / max(cell["requests"], 1),
            lambda cell: cell["more"]["counted"]["gets"]
            / max(cell["more"]["counted"]["reads_store"], 1)))
        if gets is not None:
            measured = f"{gets:.3f}; {strict:.3f} per read that no cache had"
            # The check for a fence every two seconds is a GET too, one of thousands.
            row(f"GETs per cold read, {name}", "≤ 1", measured,
                gets <= 1 and round(strict, 3) <= 1)
    if document["recovery"]:
        slowest_s = max(opening.recovery_rows(document["recovery"])[1].values())
        row("recovery", "< 5 s", f"{slowest_s:.2f} s", slowest_s < 5)
    if document["memory"]:
        empty = document["memory"]["empty"]
        size = empty["resident_bytes"] / MIB
        row("idle 1 TiB, resident", "< 60 MiB", f"{size:.1f} MiB", size < 60)
        row(f"idle {empty['watched_s']} s, store requests", "0", empty["requests"],
            empty["requests"] == 0)
        for full in document["memory"]["full"]:
            size = full["resident_bytes"] / MIB
            what = f"{full['extents']:,} extents of 1 to {full['pages_max']} pages, resident"
            row(what, "< 300 MiB", f"{size:.1f} MiB", size < 300)
    return section("Targets", rows and table(["", "target", "measured", "reached"], rows))


def page(document):
    results = Results(document)
    machine, settings = document["machine"], document["settings"]
    programs = "; ".join(filter(None, document["versions"].values()))
    before, after = document["load"]
    text = (f"# Bench of {document['date']}\n\n"
            f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, "
            f"{machine['system']}, Linux {machine['kernel']}"
            # Documents of before 2026-11-29 name no disk.
            f"{', ' + machine['disk'] if 'disk' in machine else ''}; "
            f"load average {before:.1f} before and "
            f"{after:.1f} after. {programs}.\n\n"
            f"{settings['rounds']} rounds of {settings['runtime_s']} s per cell, disks of "
            f"{settings['size_bytes'] / GIB:g} GiB; medians, ratios within a round first. How each "
            f"number comes about: `bench/README.md`. Again: `{document['command']}`.\n")
    text += promises(results) + speed(results) + cost(document) + store_work(results)
    text += recovery(document) + footprint(document)
    text += "".join(f"\n**{name} failed:** {why}\n" for name, why in document["failed"].items())
    return text + section("Candidates for the end of the journal", document["journal"])
