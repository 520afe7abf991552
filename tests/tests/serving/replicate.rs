//! Replicas as a user has them: copied beside a server, killed and taken up, promoted, served,
//! failed back.

use sawmill_tests::follower::Follower;
use sawmill_tests::machine::wait_for;
use sawmill_tests::on_each_store;
use sawmill_tests::server::Server;
use sawmill_tests::store::StoreUnderTest;
use sawmill_tests::test_bed::{CommandOutput, TestBed, field};
use serde_json::Value;

on_each_store!(
    a_follower_is_killed_its_replica_promoted_served_and_failed_back,
    a_replica_is_read_while_it_is_copied_and_never_written,
    what_cannot_be_replicated_or_promoted_is_refused_with_a_reason,
    lag_and_counts_are_in_the_metrics_file,
);

const SIZE: usize = 4 << 20;

/// Two machines and two stores.
struct Sites {
    home: TestBed,
    remote: TestBed,
    /// The volume in the first store and in the second.
    first: String,
    second: String,
}

impl Sites {
    fn new(store: &StoreUnderTest) -> Self {
        let home = TestBed::new(store);
        let remote = home.neighbor();
        home.create("disk", "4M", &["--segment-bytes", "256K"]);
        let first = format!("{}/disk", home.store_url());
        let second = format!("{}/disk", store.fresh_url(&home.path("second")));
        Sites { home, remote, first, second }
    }

    fn copy(&self, options: &[&str]) -> CommandOutput {
        self.remote.sawmill(&[&["replicate", &self.first, &self.second], options].concat())
    }

    fn follow(&self) -> Follower {
        Follower::start(&self.remote, &self.first, &self.second)
    }

    fn lost_bytes(&self) -> u64 {
        let drill = self.remote.sawmill(&["promote", &self.second, "--dry-run", "--json"]).json();
        field(&drill, "lost_bytes").and_then(Value::as_u64).expect("the source can be asked")
    }
}

fn fill(server: &Server, from: usize, byte: u8) {
    server.connect().write(from as u64, &vec![byte; SIZE / 4]).expect("accepted");
}

fn stored(bed: &TestBed, volume: &str) {
    let _ = bed.sawmill(&["wait", volume, "--stored", "--timeout", "60s"]).ok();
}

/// The quarters of the disk; each is one byte all over.
fn quarters(server: &Server) -> Vec<u8> {
    let image = server.connect().read_all().expect("readable");
    let quarter = |bytes: &[u8]| {
        assert!(bytes.iter().all(|byte| *byte == bytes[0]), "a quarter is torn");
        bytes[0]
    };
    image.chunks(SIZE / 4).map(quarter).collect()
}

fn a_follower_is_killed_its_replica_promoted_served_and_failed_back(store: &StoreUnderTest) {
    let sites = Sites::new(store);
    let server = sites.home.serve("disk").start();
    fill(&server, 0, 1);
    stored(&sites.home, "disk");
    let _ = sites.copy(&[]).ok();
    for byte in 2..6 {
        let follower = sites.follow();
        fill(&server, (byte % 4) * (SIZE / 4), byte as u8);
        stored(&sites.home, "disk");
        drop(follower);
    }
    let follower = sites.follow();
    wait_for("the replica has all", || (sites.lost_bytes() == 0).then_some(()));
    drop(follower);
    server.kill();
    let _ = sites.remote.sawmill(&["promote", &sites.second]).ok();
    let server = sites.remote.serve(&sites.second).start();
    assert_eq!(quarters(&server), [4, 5, 2, 3]);
    fill(&server, 0, 9);
    assert_eq!(server.stop().code, Some(0));
    // The old primary's machine comes back, and what it has is overtaken.
    sites.remote.sawmill(&["replicate", &sites.second, &sites.first]).refused(5, &["--fail-back"]);
    let back = sites
        .remote
        .sawmill(&["replicate", &sites.second, &sites.first, "--fail-back", "--json"])
        .json();
    let bytes = field(&back, "bytes").and_then(Value::as_u64).expect("bytes");
    assert!(bytes < SIZE as u64, "only the delta is copied: {back}");
    let output = sites.home.serve("disk").attempt().err().expect("it is a replica now");
    output.refused(5, &["promote"]);
    let reader = sites.home.serve("disk").with(&["--read-only"]).start();
    assert_eq!(quarters(&reader), [9, 5, 2, 3]);
    assert_eq!(reader.stop().code, Some(0));
    let _ = sites.home.sawmill(&["promote", "disk"]).ok();
    sites.home.lose_state();
    let server = sites.home.serve("disk").start();
    assert_eq!(quarters(&server), [9, 5, 2, 3]);
    assert_eq!(server.stop().code, Some(0));
}

fn a_replica_is_read_while_it_is_copied_and_never_written(store: &StoreUnderTest) {
    let sites = Sites::new(store);
    let server = sites.home.serve("disk").start();
    fill(&server, 0, 1);
    stored(&sites.home, "disk");
    let _ = sites.copy(&[]).ok();
    let reader = sites.remote.serve(&sites.second).with(&["--read-only"]).start();
    assert_eq!(quarters(&reader)[0], 1);
    for byte in 2..6 {
        fill(&server, 0, byte);
        stored(&sites.home, "disk");
        let _ = sites.copy(&[]).ok();
        assert!((1..=byte).contains(&quarters(&reader)[0]));
    }
    assert_eq!(reader.stop().code, Some(0));
    let writer =
        sites.remote.serve(&sites.second).attempt().err().expect("a replica is not written");
    writer.refused(5, &["replica", "promote"]);
    let _ = sites.remote.sawmill(&["check", &sites.second]).ok();
    assert_eq!(server.stop().code, Some(0));
}

fn what_cannot_be_replicated_or_promoted_is_refused_with_a_reason(store: &StoreUnderTest) {
    let sites = Sites::new(store);
    let again = format!("{}/copy", sites.home.store_url());
    sites.home.sawmill(&["replicate", "disk", &again]).refused(2, &["another"]);
    sites.home.sawmill(&["promote", "disk"]).refused(5, &["not a replica"]);
    let other_store = store.fresh_url(&sites.home.path("third"));
    let other = format!("{other_store}/disk");
    let _ = sites.home.sawmill(&["create", &other, "--size", "1M"]).ok();
    sites.home.sawmill(&["replicate", "disk", &other]).refused(4, &["disk"]);
    let _ = sites.copy(&[]).ok();
    let renamed = sites.second.replace("/disk", "/disk2");
    sites.home.sawmill(&["replicate", "disk", &renamed]).refused(5, &["\"disk\""]);
    let _ = sites.home.sawmill(&["clone", "disk", "copy"]).ok();
    let copy_there = sites.second.replace("/disk", "/copy");
    sites.home.sawmill(&["replicate", "copy", &copy_there]).refused(5, &["clone", "sawmill copy"]);
    let _ = sites.remote.sawmill(&["promote", &sites.second]).ok();
    sites.remote.sawmill(&["promote", &sites.second]).refused(5, &["already"]);
    sites.copy(&[]).refused(5, &["ahead"]);
}

fn lag_and_counts_are_in_the_metrics_file(store: &StoreUnderTest) {
    let sites = Sites::new(store);
    let server = sites.home.serve("disk").start();
    fill(&server, 0, 1);
    stored(&sites.home, "disk");
    let path = sites.remote.path("replica.prom");
    let file = path.to_str().expect("UTF-8");
    let round = sites.copy(&["--metrics-file", file, "--bandwidth", "1G", "--json"]).json();
    let text = std::fs::read_to_string(&path).expect("the metrics file");
    let copied = field(&round, "bytes").and_then(Value::as_u64).expect("bytes");
    let line = text
        .lines()
        .find(|line| line.starts_with("sawmill_replica_copied_bytes_total"))
        .expect("a line");
    assert!(copied > SIZE as u64 / 4 && line.ends_with(&format!(" {copied}")), "{line}: {round}");
    assert!(text.contains("sawmill_replica_behind_seconds{volume=\"disk\","), "{text}");
    fill(&server, 0, 2);
    stored(&sites.home, "disk");
    let round = sites.copy(&["--json"]).json();
    let behind = field(&round, "behind_bytes").and_then(Value::as_u64).expect("behind_bytes");
    assert!(behind >= SIZE as u64 / 4, "{round}");
    assert_eq!(server.stop().code, Some(0));
}
