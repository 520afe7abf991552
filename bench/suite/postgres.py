"""PostgreSQL on a folder, by an unprivileged user, as it comes: fsync, synchronous_commit and
full_page_writes are on.

Invariant: it listens only on a Unix socket in a folder of its own. Not here: whose disk the folder
is on (`disks.py`), and what is measured (`databases.py`).
"""

import contextlib
import os
import shutil
import signal
from pathlib import Path

from harness import Process, Unfit, run, wait_until

# `nobody`, on every Debian: PostgreSQL refuses to run as root.
NOBODY = 65534
SETTINGS = ("listen_addresses=", "shared_buffers=128MB", "fsync=on", "synchronous_commit=on",
            "full_page_writes=on", "autovacuum=off")


def program(name):
    """A program of the newest PostgreSQL here."""
    found = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"),
                   key=lambda path: int(path.parts[4]))
    if not found:
        raise Unfit("PostgreSQL is not installed: tests/setup/prepare.sh bench")
    return found[-1]


class Postgres:
    """A server on the database directory `data`, with its socket and its log in `folder`."""

    def __init__(self, data, folder):
        self.data, self.folder, self.process = data, folder, None

    def run(self, name, *words, **more):
        """Runs a program of PostgreSQL to its end."""
        known = {"PGHOST": str(self.folder), "PGUSER": "postgres", "PGDATABASE": "postgres",
                 "LC_ALL": "C", "PATH": os.environ["PATH"]}
        return run(program(name), *words, env=known, cwd=self.folder, user=NOBODY, group=NOBODY,
                   extra_groups=[], **more)

    def make(self):
        """A new database directory, with checksums of its pages."""
        for folder in (self.data, self.folder):
            folder.mkdir()
            os.chown(folder, NOBODY, NOBODY)
        self.run("initdb", "--pgdata", self.data, "--auth=trust", "--username=postgres",
                 "--no-locale", "--data-checksums")

    @contextlib.contextmanager
    def running(self):
        """It, once it accepts connections; stopped in order afterwards."""
        settings = [word for setting in SETTINGS for word in ("-c", setting)]
        drop = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
        with Process(*drop, program("postgres"), "-D", self.data, "-k", self.folder, *settings,
                     log=self.folder / "log", cwd="/") as self.process:
            try:
                wait_until("PostgreSQL takes connections", self.is_ready)
                yield self
            finally:
                # The fast way: it ends its clients, and writes a checkpoint.
                self.process.end(signal.SIGINT, 120)

    def is_ready(self):
        self.process.check()
        with contextlib.suppress(Unfit):
            return "accepting" in self.run("pg_isready")
        return False

    def query(self, text):
        return self.run("psql", "--no-psqlrc", "-qAt", "-v", "ON_ERROR_STOP=1", "-c", text).strip()

    def fill(self, scale):
        self.run("pgbench", "--initialize", "--quiet", f"--scale={scale}")
        self.query("vacuum analyze")

    def bench(self, seconds, *words):
        """Runs pgbench; its transactions, how long it took, and the latency of each, in order."""
        logs = self.folder / "transactions"
        logs.mkdir()
        os.chown(logs, NOBODY, NOBODY)
        try:
            self.run("pgbench", "--no-vacuum", f"--time={seconds}", "--log",
                     f"--log-prefix={logs}/log", *words, timeout=seconds + 300)
            lines = [line.split() for path in logs.iterdir()
                     for line in path.read_text().splitlines()]
        finally:
            shutil.rmtree(logs)
        return sorted(int(words[2]) for words in lines)

    def check(self):
        """Demands sound tables and indexes, and the same sums wherever pgbench added them."""
        self.run("pg_amcheck", "--heapallindexed", "--parent-check", "--install-missing",
                 "postgres")
        sums = set(self.query(
            "select (select sum(abalance) from pgbench_accounts),"
            "(select sum(tbalance) from pgbench_tellers),"
            "(select sum(bbalance) from pgbench_branches),"
            "(select sum(delta) from pgbench_history)").split("|"))
        if len(sums) != 1:
            raise Unfit(f"the sums of pgbench differ: {sums}")
        return int(self.query("select count(*) from pgbench_history"))

    def check_pages(self):
        """Demands that the checksum of every page is right, while it is not running."""
        self.run("pg_checksums", "--check", "--pgdata", self.data)
