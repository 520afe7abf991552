//! A database lives on a volume and comes back from its past: PostgreSQL on ext4, under load while
//! a snapshot is made, a moment passes, and a replica is promoted. Clones of both cuts, the
//! replica, the volume rolled back, and the rollback undone: each starts, recovers, holds every
//! commit acknowledged before its cut and none from after it, and is sound to the checkers of the
//! file system and of PostgreSQL. And it comes back when its disk is killed under it, with or
//! without the memory of the machine.
//!
//! Not here: cuts byte for byte (`cuts`); power loss (`verify_crash`); users who wait for the next
//! server (`database_fuse`).

use std::ops::RangeInclusive;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use sawmill_tests::bridge::Bridge;
use sawmill_tests::follower::Follower;
use sawmill_tests::machine::{command, require_mount, run, wait_for};
use sawmill_tests::on_each_store;
use sawmill_tests::postgres::{Bench, Ledger, Postgres};
use sawmill_tests::requires;
use sawmill_tests::server::Server;
use sawmill_tests::store::{self, StoreUnderTest};
use sawmill_tests::test_bed::{TestBed, field};
use serde_json::Value;

on_each_store!(a_database_comes_back_from_a_snapshot_a_moment_a_replica_and_a_rollback);

fn a_database_comes_back_from_a_snapshot_a_moment_a_replica_and_a_rollback(store: &StoreUnderTest) {
    requires!(require_mount());
    let bed = TestBed::new(store);
    bed.create("disk", "1G", &["--retention", "1h"]);
    let database = Database::make(&bed, "disk");
    let load = Load::start(&database.postgres);

    let at_snapshot = load.around(|| {
        let _ = bed.sawmill(&["snapshot", "create", "disk", "one"]).ok();
    });
    let _ = bed.sawmill(&["clone", "disk@one", "of-snapshot"]).ok();
    let mut moment = String::new();
    let at_moment = load.around(|| {
        let _ = bed.sawmill(&["wait", "disk", "--stored"]).ok();
        moment = run(command("date").args(["--utc", "+%Y-%m-%dT%H:%M:%S.%3NZ"])).trim().to_owned();
    });
    // The moment lies in the past when it is asked for, and everything was overwritten meanwhile.
    load.resume();
    let collected = bed.sawmill(&["gc", "disk", "--threshold", "1", "--json"]).json();
    assert!(field(&collected, "moved_bytes").and_then(Value::as_u64) > Some(0), "{collected}");
    let _ = bed.sawmill(&["clone", &format!("disk@{moment}"), "of-moment"]).ok();
    let neighbor = bed.neighbor();
    let (source, replica) = (format!("{}/disk", bed.store_url()), second_store(store, &bed));
    let follower = Follower::start(&neighbor, &source, &replica);
    load.resume();
    drop(follower);
    let at_promotion = load.around(|| {
        let _ = bed.sawmill(&["wait", "disk", "--stored"]).ok();
        let _ = neighbor.sawmill(&["replicate", &source, &replica]).ok();
    });
    // The primary lives, and goes on.
    let _ = neighbor.sawmill(&["promote", &replica]).ok();
    load.resume();
    let last = load.stop();
    assert!(
        at_snapshot.end() < at_moment.start() && *at_moment.end() < last,
        "each cut has its own numbers"
    );
    database.close();

    Database::judge(&bed, "of-snapshot", &at_snapshot);
    Database::judge(&bed, "of-moment", &at_moment);
    Database::judge(&neighbor, &replica, &at_promotion);

    let done = bed.sawmill(&["rollback", "disk", "--to", "one", "--json"]).json();
    Database::judge(&bed, "disk", &at_snapshot);
    let undo = done["undo"]
        .as_str()
        .and_then(|line| line.strip_prefix("sawmill "))
        .expect("how to undo it");
    let _ = bed.sawmill(&undo.split(' ').collect::<Vec<_>>()).ok();
    let database = Database::open(&bed, "disk");
    assert!(!database.postgres.has_recovered(), "the last state had been closed in order");
    database.holds(&(last..=last));
    database.close();
}

#[test]
fn a_database_whose_server_was_killed_recovers_every_commit_it_answered() {
    recovers(|_| &[]);
}

/// What PostgreSQL flushed is in the journal, without the memory of accepted writes.
#[test]
fn a_database_whose_machine_lost_its_memory_recovers_every_commit_it_answered() {
    recovers(|bed| {
        for entry in std::fs::read_dir(bed.memory()).expect("the folder in memory").flatten() {
            std::fs::remove_file(entry.path()).expect("a staging file can be removed");
        }
        &["--accept-memory-loss"]
    });
}

/// Kills the server of a database under load, loses with it what the kernel and PostgreSQL had in
/// memory and what `loss` takes, and serves the volume with the options that `loss` returns.
fn recovers(loss: impl FnOnce(&TestBed) -> &'static [&'static str]) {
    requires!(require_mount());
    let bed = TestBed::new(&store::folder());
    bed.create("disk", "1G", &[]);
    let Database { postgres, bridge, server } = Database::make(&bed, "disk");
    let load = Load::start(&postgres);
    load.resume();
    server.kill();
    let last = load.lose();
    drop((postgres, bridge));
    let options = loss(&bed);
    let database = Database::open_with(&bed, "disk", options);
    assert!(database.postgres.has_recovered(), "it was not cut off at work");
    // The commit in flight may be there, unanswered.
    database.holds(&(last..=last + 1));
    database.close();
}

/// Where the replica is to be.
fn second_store(store: &StoreUnderTest, bed: &TestBed) -> String {
    format!("{}/disk", store.fresh_url(&bed.path("second")))
}

/// Tables of the ledger: two rows for a number, longer than a sector each, and the newest number.
const LEDGER: &str = "
    create table ledger (number bigint, half int, body text, primary key (number, half));
    alter table ledger alter body set storage plain;
    create table newest (number bigint);
    insert into newest values (0);";

fn enter(number: u64) -> String {
    format!(
        "insert into ledger
             select {number}, half, repeat(md5('{number}'), 60) from generate_series(1, 2) half;
         update newest set number = {number};"
    )
}

/// All that a ledger up to N has, and nothing else, gives `N|N|2N|2N`.
const LEDGER_SUMS: &str = "
    select (select number from newest), count(distinct number), count(*),
        count(*) filter (where body = repeat(md5(number::text), 60) and number between 1 and
            (select number from newest))
    from ledger";

/// pgbench moves the same sums everywhere in one transaction.
const BENCH_SUMS: &str = "
    select (select sum(abalance) from pgbench_accounts),
    (select sum(tbalance) from pgbench_tellers),
        (select sum(bbalance) from pgbench_branches), (select sum(delta) from pgbench_history)";

/// A database on a volume that is served and mounted. Taken down in this order.
struct Database {
    postgres: Postgres,
    bridge: Bridge,
    server: Server,
}

impl Database {
    /// A new one, with the tables of both loads.
    fn make(bed: &TestBed, volume: &str) -> Self {
        let server = bed.serve(volume).start();
        let mut bridge = Bridge::new(&server.uri());
        let _ = run(command("mkfs.ext4").args(["-q", "-F"]).arg(bridge.device()));
        Postgres::make(&mount(&mut bridge));
        let postgres = Postgres::start(&data(&bridge));
        let _ = postgres.query(LEDGER);
        let _ = run(postgres.client("pgbench").args(["--initialize", "--scale=2", "--quiet"]));
        Database { postgres, bridge, server }
    }

    /// The one that is on a volume.
    fn open(bed: &TestBed, volume: &str) -> Self {
        Self::open_with(bed, volume, &[])
    }

    /// The same, served with these options.
    fn open_with(bed: &TestBed, volume: &str, options: &[&str]) -> Self {
        let server = bed.serve(volume).with(options).start();
        let mut bridge = Bridge::new(&server.uri());
        // Mounting replays the journal of the file system, starting replays that of the database.
        let postgres = Postgres::start(&mount(&mut bridge));
        Database { postgres, bridge, server }
    }

    /// Demands that a volume that was cut off under load has a sound database with one of these
    /// `numbers` as its newest.
    fn judge(bed: &TestBed, volume: &str, numbers: &RangeInclusive<u64>) {
        let database = Database::open(bed, volume);
        assert!(database.postgres.has_recovered(), "{volume} was not cut off at work");
        database.holds(numbers);
        database.close();
    }

    fn holds(&self, numbers: &RangeInclusive<u64>) {
        let sums = self.postgres.query(LEDGER_SUMS);
        let newest: u64 =
            sums.split('|').next().and_then(|field| field.parse().ok()).expect("a number");
        let both = 2 * newest;
        assert_eq!(sums, format!("{newest}|{newest}|{both}|{both}"), "a number is lost or torn");
        assert!(numbers.contains(&newest), "the newest is {newest}, not one of {numbers:?}");
        let sums = self.postgres.query(BENCH_SUMS);
        let balances: Vec<&str> = sums.split('|').collect();
        assert!(balances.iter().all(|&sum| !sum.is_empty() && sum == balances[0]), "{sums}");
        self.postgres.check();
    }

    /// Everything in order: also the pages and the file system are sound.
    fn close(self) {
        let Database { postgres, mut bridge, server } = self;
        postgres.stop(&data(&bridge));
        bridge.unmount();
        let _ = run(command("e2fsck").arg("-fn").arg(bridge.device()));
        drop(bridge);
        let _ = server.stop().ok();
    }
}

/// The database directory of a mounted volume.
fn data(bridge: &Bridge) -> PathBuf {
    bridge.root().join("data")
}

/// Mounts a volume where everybody may go, and gives its database directory.
fn mount(bridge: &mut Bridge) -> PathBuf {
    let root = bridge.mount();
    let folder = root.parent().expect("it is mounted below a folder of the bridge");
    std::fs::set_permissions(folder, PermissionsExt::from_mode(0o711)).expect("the folder is ours");
    data(bridge)
}

/// pgbench and the ledger at work on one database.
struct Load<'a> {
    postgres: &'a Postgres,
    bench: Bench,
    ledger: Ledger,
}

impl<'a> Load<'a> {
    fn start(postgres: &'a Postgres) -> Self {
        Load { postgres, bench: Bench::start(postgres), ledger: Ledger::start(postgres, enter) }
    }

    /// Goes on until both have committed more.
    fn resume(&self) {
        let row_count =
            || self.postgres.query("select count(*) from pgbench_history").parse::<u64>().ok();
        let target_count = row_count().expect("a number") + 100;
        wait_for("pgbench commits more", || row_count().filter(|&count| count >= target_count));
        self.ledger.resume(50);
    }

    /// Cuts under load: what may be the newest number in that cut. The upper end was under way at
    /// most.
    fn around(&self, cut: impl FnOnce()) -> RangeInclusive<u64> {
        self.resume();
        let least = self.ledger.acknowledged();
        cut();
        least..=self.ledger.acknowledged() + 1
    }

    /// The last number.
    fn stop(self) -> u64 {
        self.bench.stop();
        self.ledger.stop()
    }

    /// The last number that was answered before the disk failed.
    fn lose(self) -> u64 {
        self.ledger.lose()
    }
}
