//! A PostgreSQL of our own: created in a folder, run there by an unprivileged user, queried,
//! checked, stopped.
//!
//! Invariants: it listens only on a Unix socket in a folder of its own; every process that was
//! started is gone when its owner is dropped. `fsync`, `full_page_writes` and `synchronous_commit`
//! are on, as they are by default: an answered commit was flushed.
//!
//! Not here: the content of the tables; the place of the folder (`bridge`).

use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::chown;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::machine::{run, wait_for};

/// `nobody`, on every Debian. PostgreSQL refuses to run as root.
const NOBODY: u32 = 65_534;

/// Small, so that pages are written and checkpoints made all the time instead of only logging.
const SETTINGS: [&str; 4] =
    ["listen_addresses=", "shared_buffers=8MB", "max_wal_size=64MB", "min_wal_size=32MB"];

/// A running server.
pub struct Postgres {
    postmaster: Child,
    /// The socket, and the server's log.
    folder: TempDir,
}

impl Postgres {
    /// Makes a database directory with page checksums at `data`, which must not exist.
    ///
    /// # Panics
    /// When that fails.
    pub fn make(data: &Path) {
        std::fs::create_dir(data).expect("room for a folder");
        chown(data, Some(NOBODY), Some(NOBODY)).expect("root may give a folder away");
        let options = ["--data-checksums", "--auth=trust", "--username=postgres", "--no-locale"];
        let _ = run(program("initdb").args(options).arg("--pgdata").arg(data));
    }

    /// Starts a server on a database directory and waits until it accepts connections, after any
    /// recovery.
    ///
    /// # Panics
    /// When it ends before, or takes too long.
    #[must_use]
    pub fn start(data: &Path) -> Self {
        let folder = tempfile::Builder::new().prefix("sawmill-postgres-").tempdir();
        let folder = folder.expect("a temporary folder");
        chown(folder.path(), Some(NOBODY), Some(NOBODY)).expect("root may give a folder away");
        let log = std::fs::File::create(folder.path().join("log")).expect("room for a log");
        let mut command = program("postgres");
        command.arg("-D").arg(data).arg("-k").arg(folder.path());
        for setting in SETTINGS {
            command.args(["-c", setting]);
        }
        let postmaster =
            command.stdout(Stdio::null()).stderr(log).spawn().expect("PostgreSQL starts");
        let mut server = Postgres { postmaster, folder };
        wait_for("PostgreSQL takes connections", || {
            let ended = server.postmaster.try_wait().expect("the child can be waited for");
            assert!(ended.is_none(), "PostgreSQL ended: {}", server.log());
            server.log().contains("ready to accept connections").then_some(())
        });
        server
    }

    /// Its log so far.
    #[must_use]
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }

    /// Whether it found a directory that was not shut down cleanly, and replayed its log.
    #[must_use]
    pub fn has_recovered(&self) -> bool {
        self.log().contains("automatic recovery in progress")
    }

    /// A program of PostgreSQL that connects to this server.
    #[must_use]
    pub fn client(&self, name: &str) -> Command {
        let mut command = program(name);
        command
            .env("PGHOST", self.folder.path())
            .env("PGUSER", "postgres")
            .env("PGDATABASE", "postgres");
        command
    }

    /// Runs statements as one transaction, and returns their rows, with fields separated by `|`.
    ///
    /// # Panics
    /// When one fails.
    #[must_use]
    pub fn query(&self, statements: &str) -> String {
        let options = ["--no-psqlrc", "--quiet", "--tuples-only", "--no-align"];
        let mut psql = self.client("psql");
        run(psql.args(options).args(["--set", "ON_ERROR_STOP=1", "--command", statements]))
            .trim()
            .to_owned()
    }

    /// Demands that every table and every index is intact, and that each index has every row of its
    /// table.
    ///
    /// # Panics
    /// When one is not.
    pub fn check(&self) {
        let deep = ["--heapallindexed", "--parent-check", "--install-missing"];
        let _ = run(self.client("pg_amcheck").args(deep).arg("postgres"));
    }

    /// Stops it cleanly, and demands that the checksum of every page is correct.
    ///
    /// # Panics
    /// When one is not, or it does not end well.
    pub fn stop(mut self, data: &Path) {
        let pid =
            Pid::from_raw(self.postmaster.id().cast_signed()).expect("a process has a positive id");
        kill_process(pid, Signal::INT).expect("it still runs");
        let ended = wait_for("PostgreSQL ends", || {
            self.postmaster.try_wait().expect("the child can be waited for")
        });
        assert!(ended.success(), "PostgreSQL ended with {ended}: {}", self.log());
        let _ = run(program("pg_checksums").arg("--check").arg("--pgdata").arg(data));
    }
}

impl Drop for Postgres {
    fn drop(&mut self) {
        if std::thread::panicking() {
            println!("-- PostgreSQL said:\n{}", self.log());
        }
        // Its children exit when they notice that it is gone.
        let _ = self.postmaster.kill();
        let _ = self.postmaster.wait();
    }
}

/// A program of the newest PostgreSQL here, as the unprivileged user.
fn program(name: &str) -> Command {
    let versions = std::fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
    let versions = versions.filter(|entry| entry.path().join("bin").join(name).is_file());
    let newest =
        versions.max_by_key(|entry| entry.file_name().to_string_lossy().parse::<u32>().ok());
    let folder: PathBuf = newest.expect("no PostgreSQL: run tests/setup/prepare.sh test").path();
    let mut command = Command::new(folder.join("bin").join(name));
    command.current_dir("/").env("LC_ALL", "C").stdin(Stdio::null()).uid(NOBODY).gid(NOBODY);
    command
}

/// A client that commits the numbers 1, 2, 3 ... one after another, and knows which were
/// acknowledged.
pub struct Ledger {
    acknowledged: Arc<AtomicU64>,
    enough: Arc<AtomicBool>,
    /// Whether every commit was answered.
    client: Option<JoinHandle<bool>>,
}

impl Ledger {
    /// Starts the client; `statements` inserts a number, within one transaction.
    #[must_use]
    pub fn start(postgres: &Postgres, statements: fn(u64) -> String) -> Self {
        let mut psql = postgres.client("psql");
        psql.args(["--no-psqlrc", "--quiet", "--set", "ON_ERROR_STOP=1"]);
        let mut psql =
            psql.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("psql starts");
        let mut orders = psql.stdin.take().expect("a pipe was asked for");
        let answers = BufReader::new(psql.stdout.take().expect("a pipe was asked for"));
        let (acknowledged, enough) = (Arc::<AtomicU64>::default(), Arc::<AtomicBool>::default());
        let (newest_commit, end_flag) = (Arc::clone(&acknowledged), Arc::clone(&enough));
        let client = std::thread::spawn(move || {
            let mut answers = answers.lines().map_while(Result::ok);
            let mut are_answered = true;
            for number in 1_u64.. {
                if end_flag.load(Ordering::SeqCst) {
                    break;
                }
                // The line comes back once the commit is acknowledged, and never after an error.
                let order = format!("begin; {} commit;\n\\echo {number}\n", statements(number));
                let is_sent = orders.write_all(order.as_bytes()).is_ok();
                if !is_sent || answers.next() != Some(number.to_string()) {
                    are_answered = false;
                    break;
                }
                newest_commit.store(number, Ordering::SeqCst);
            }
            drop(orders);
            let _ = psql.wait();
            are_answered
        });
        Ledger { acknowledged, enough, client: Some(client) }
    }

    /// The newest number that was acknowledged; all before it were too.
    #[must_use]
    pub fn acknowledged(&self) -> u64 {
        self.acknowledged.load(Ordering::SeqCst)
    }

    /// Waits for `count` further numbers.
    ///
    /// # Panics
    /// When the client has met an error.
    pub fn resume(&self, count: u64) {
        let target_number = self.acknowledged() + count;
        wait_for("more numbers are committed", || {
            let is_enough = self.acknowledged() >= target_number;
            assert!(is_enough || !self.has_ended(), "psql commits what it gets");
            is_enough.then_some(())
        });
    }

    fn has_ended(&self) -> bool {
        self.client.as_ref().is_some_and(JoinHandle::is_finished)
    }

    /// Ends after the number in flight; returns the last one.
    ///
    /// # Panics
    /// When the client met an error.
    #[must_use]
    pub fn stop(mut self) -> u64 {
        self.enough.store(true, Ordering::SeqCst);
        let ended = self.client.take().map(JoinHandle::join).transpose().expect("no panic");
        assert_eq!(ended, Some(true), "every commit was answered");
        self.acknowledged()
    }

    /// Ends with the database's disk, which has failed; returns the last number that was answered.
    ///
    /// # Panics
    /// When the client met no error.
    #[must_use]
    pub fn lose(mut self) -> u64 {
        let ended = self.client.take().map(JoinHandle::join).transpose().expect("no panic");
        assert_eq!(ended, Some(false), "the disk is gone, and commits are answered");
        self.acknowledged()
    }
}

impl Drop for Ledger {
    fn drop(&mut self) {
        // A client that was not stopped ends with its server.
        self.enough.store(true, Ordering::SeqCst);
    }
}

/// pgbench at work, until it is stopped or dropped.
pub struct Bench(Child);

impl Bench {
    /// Starts it with two clients on tables that `pgbench --initialize` made.
    #[must_use]
    pub fn start(postgres: &Postgres) -> Self {
        let mut pgbench = postgres.client("pgbench");
        pgbench.args(["--client=2", "--time=3600", "--no-vacuum"]).stdout(Stdio::null());
        Bench(pgbench.spawn().expect("pgbench starts"))
    }

    /// Stops it.
    ///
    /// # Panics
    /// When it had ended by itself: something failed.
    pub fn stop(mut self) {
        let ended = self.0.try_wait().expect("the child can be waited for");
        assert!(ended.is_none(), "pgbench gave up: {ended:?}");
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
