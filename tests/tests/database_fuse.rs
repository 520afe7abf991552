//! A database on ext4, on a loop device, on FUSE, while its server is killed and started again, and
//! while one server hands over to the next: PostgreSQL waits, meets no error, and holds every
//! commit it answered.
//!
//! Not here: what the door does request by request (`crates/frontend/tests/fuse`); databases from
//! the past (`database`).

use std::path::PathBuf;
use std::time::{Duration, Instant};

use sawmill_tests::machine::{command, require_mount, run, wait_for};
use sawmill_tests::postgres::{Bench, Ledger, Postgres};
use sawmill_tests::requires;
use sawmill_tests::server::Server;
use sawmill_tests::store;
use sawmill_tests::test_bed::TestBed;
use tempfile::TempDir;

/// What stands in PostgreSQL's log when a disk fails it.
const COMPLAINTS: [&str; 5] = ["PANIC", "ERROR", "FATAL", "could not", "I/O error"];

/// Seconds of load for each death or hand-off: with 0, a few hundred commits.
fn load_s() -> u64 {
    std::env::var("SAWMILL_LOAD_S").ok().and_then(|text| text.parse().ok()).unwrap_or(0)
}

/// A volume served as a file with a loop device on it.
struct Disk {
    bed: TestBed,
    mountpoint: PathBuf,
}

impl Disk {
    fn new() -> Self {
        let bed = TestBed::new(&store::folder());
        bed.create("disk", "1G", &[]);
        let mountpoint = bed.path("fuse");
        std::fs::create_dir(&mountpoint).expect("room for a folder");
        Disk { bed, mountpoint }
    }

    fn serve(&self) -> Server {
        let mountpoint = self.mountpoint.to_str().expect("UTF-8");
        self.bed.serve("disk").with(&["--fuse", mountpoint, "--loop"]).start()
    }

    /// The loop device, as the server says.
    fn node(&self) -> String {
        let doors = self.bed.sawmill(&["door", "list", "disk", "--json"]).json();
        let addresses =
            doors.as_array().expect("a list").iter().filter_map(|door| door["address"].as_str());
        let mut nodes = addresses.filter(|address| address.starts_with("/dev/loop"));
        nodes.next().expect("a loop device").to_owned()
    }
}

/// Whoever waits for a server that does not come would wait forever, and the test with it.
impl Drop for Disk {
    fn drop(&mut self) {
        let _ = command("umount").args(["-f", "-l"]).arg(&self.mountpoint).output();
    }
}

/// ext4 with a database directory on this loop device; both go when it is dropped.
struct DatabaseMount(TempDir, String);

impl DatabaseMount {
    fn new(node: &str) -> Self {
        let _ = run(command("mkfs.ext4").args(["-q", "-F", node]));
        let folder =
            tempfile::Builder::new().prefix("sawmill-database-").tempdir().expect("a folder");
        let _ = run(command("mount").arg(node).arg(folder.path()));
        DatabaseMount(folder, node.to_owned())
    }

    fn data(&self) -> PathBuf {
        self.0.path().join("data")
    }
}

impl Drop for DatabaseMount {
    fn drop(&mut self) {
        let _ = command("umount").arg("-l").arg(self.0.path()).output();
        let _ = command("losetup").args(["-d", &self.1]).output();
    }
}

fn enter(number: u64) -> String {
    format!("insert into ledger values ({number}, repeat(md5('{number}'), 60));")
}

const LEDGER: &str = "create table ledger (number bigint primary key, body text);";
const LEDGER_SUMS: &str = "select count(*), max(number), \
    count(*) filter (where body = repeat(md5(number::text), 60)) from ledger";

/// Runs a database under load through three of `event`, which takes a server and gives the next.
fn survives(event: impl Fn(&Disk, Server) -> Server) {
    let disk = Disk::new();
    let mut server = disk.serve();
    let node = disk.node();
    let mounted = DatabaseMount::new(&node);
    Postgres::make(&mounted.data());
    let postgres = Postgres::start(&mounted.data());
    let _ = postgres.query(LEDGER);
    let _ = run(postgres.client("pgbench").args(["--initialize", "--scale=2", "--quiet"]));
    let (bench, ledger) = (Bench::start(&postgres), Ledger::start(&postgres, enter));
    for _ in 0..3 {
        let until = Instant::now() + Duration::from_secs(load_s());
        ledger.resume(200);
        wait_for("the load has lasted", || (Instant::now() >= until).then_some(()));
        server = event(&disk, server);
        assert_eq!(disk.node(), node, "the same loop device");
    }
    ledger.resume(200);
    bench.stop();
    let last = ledger.stop();
    assert_eq!(
        postgres.query(LEDGER_SUMS),
        format!("{last}|{last}|{last}"),
        "a commit is lost or torn"
    );
    postgres.check();
    let log = postgres.log();
    // The clients that were ended at work are no fault of the disk.
    let mut lines = log.lines().filter(|line| !line.contains("client"));
    let complaint = lines.find(|line| COMPLAINTS.iter().any(|word| line.contains(word)));
    assert_eq!(complaint, None, "PostgreSQL met an error");
    postgres.stop(&mounted.data());
    let _ = run(command("umount").arg(mounted.0.path()));
    let _ = run(command("e2fsck").args(["-fn", &node]));
    let _ = server.stop().ok();
    assert_eq!(std::fs::read_dir(&disk.mountpoint).expect("unmounted").count(), 0);
}

#[test]
fn a_database_meets_no_error_while_its_server_is_killed_and_started_again() {
    requires!(require_mount());
    survives(|disk, server| {
        server.kill();
        disk.serve()
    });
}

#[test]
fn a_database_meets_no_error_while_one_server_hands_over_to_the_next() {
    requires!(require_mount());
    survives(|disk, mut server| {
        let _ = server.hand_off(&disk.bed, "disk");
        server
    });
}
