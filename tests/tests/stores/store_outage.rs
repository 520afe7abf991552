//! The store goes away for a while: writes go on into the journal, then wait; reads of cached data
//! go on; status and log report the outage; and when the store is back, no write is lost.

use std::sync::Arc;

use sawmill_testkit::Dice;
use sawmill_tests::load::{Load, Mix};
use sawmill_tests::machine::wait_for;
use sawmill_tests::nbd::{Command, PendingReply};
use sawmill_tests::server::Server;
use sawmill_tests::stamp::check_nothing_accepted_lost;
use sawmill_tests::store::{Minio, StoreUnderTest};
use sawmill_tests::test_bed::{TestBed, field};

const VOLUME_BYTES: u64 = 64 << 20;

fn unsigned(info: &serde_json::Value, name: &str) -> u64 {
    field(info, name)
        .and_then(serde_json::Value::as_u64)
        .unwrap_or_else(|| panic!("no {name} in {info:#}"))
}

/// A server of a journal of 16 MiB that has a MiB at 60 MiB in its cache, and nowhere else.
fn served_with_cached_data(bed: &TestBed) -> Server {
    let serve =
        || bed.serve("disk").with(&["--journal-bytes", "16M", "--admin", "127.0.0.1:0"]).start();
    let server = serve();
    let client = server.connect();
    client.write(60 << 20, &[0x5a; 1 << 20]).expect("accepted");
    let _ = bed.sawmill(&["wait", "disk", "--stored", "--timeout", "60s"]).ok();
    // After a restart it is read from the store, and so into the cache; what only the journal still
    // holds goes when the journal fills.
    drop(client);
    server.kill();
    let server = serve();
    let client = server.connect();
    loop {
        let before = unsigned(&server.status(), "reads_store");
        client.read(60 << 20, 1 << 20).expect("readable");
        if unsigned(&server.status(), "reads_store") == before {
            return server;
        }
    }
}

#[test]
fn writes_fill_the_journal_then_wait_and_nothing_is_lost_when_the_store_returns() {
    let minio = Arc::new(Minio::start());
    let bed = TestBed::new(&StoreUnderTest::Minio(Arc::clone(&minio)));
    bed.create("disk", "64M", &["--segment-bytes", "256K"]);
    let server = served_with_cached_data(&bed);
    let client = server.connect();

    minio.pause();
    let pending_replies: Vec<PendingReply> = (0..512_u64)
        .map(|n| {
            client.submit(&Command::Write {
                offset: n << 16,
                bytes: vec![n as u8; 64 << 10],
                fua: false,
            })
        })
        .collect();
    // Not half of it: all but what a segment or two may still be given up for.
    server.wait_for("a full journal makes writes wait", |status| {
        let why = field(status, "stall").and_then(|word| word.as_str());
        why == Some("journal_bytes") && unsigned(status, "journal_unstored_bytes") >= 12 << 20
    });
    // A person asks the same while the store is away.
    let info = bed.info("disk");
    let health = field(&info, "health").unwrap_or_else(|| panic!("no health in {info:#}"));
    assert_eq!(health["state"], "store_unavailable", "{info:#}");
    assert!(health["since_ms"].is_u64(), "it says since when: {info:#}");
    assert!(client.in_flight() > 0, "512 writes of 64 KiB do not fit into 16 MiB");
    let data =
        client.read(60 << 20, 1 << 20).expect("cached data is readable while the store is away");
    assert!(data.iter().all(|&byte| byte == 0x5a));
    let waited = bed.sawmill(&["wait", "disk", "--stored", "--timeout", "300ms"]);
    assert_eq!(waited.code, Some(1), "a bounded wait ends: {}", waited.stderr);
    wait_for("the log says that writes wait", || {
        server.stderr().contains("writes wait: the journal is full").then_some(())
    });

    minio.resume();
    for (n, pending) in pending_replies.into_iter().enumerate() {
        pending
            .wait()
            .unwrap_or_else(|failure| panic!("write {n} failed instead of waiting: {failure}"));
    }
    let _ = bed.sawmill(&["wait", "disk", "--stored", "--timeout", "60s"]).ok();
    server.wait_for("the volume is well again", |status| {
        field(status, "health").is_some_and(|health| health["state"] == "serving")
    });
    assert!(server.stderr().contains("writes continue"), "{}", server.stderr());
    server.kill();
    let elsewhere = bed.neighbor();
    let server = elsewhere.serve("disk").with(&["--accept-journal-loss"]).start();
    let image = server.connect().read_all().expect("readable");
    for (n, block) in image.chunks(64 << 10).take(512).enumerate() {
        assert!(block.iter().all(|&byte| byte == n as u8), "block {n} is lost");
    }
}

#[test]
fn a_load_goes_through_outages_of_the_store_as_if_nothing_happened() {
    let minio = Arc::new(Minio::start());
    let bed = TestBed::new(&StoreUnderTest::Minio(Arc::clone(&minio)));
    bed.create("disk", "64M", &["--segment-bytes", "256K"]);
    let server = bed.serve("disk").start();
    let clients = [server.connect(), server.connect()];
    let mut load = Load::new(VOLUME_BYTES, Dice::seeded("store_outage"), Mix::default());
    for _ in 0..3 {
        load.run(&clients, 300);
        minio.pause();
        // 64 MiB of journal hold this much, so that no request has to wait.
        load.run(&clients, 300);
        minio.resume();
    }
    let _ = bed.sawmill(&["wait", "disk", "--stored", "--timeout", "60s"]).ok();
    let image = clients[0].read_all().expect("readable");
    check_nothing_accepted_lost(&load.log, &image)
        .unwrap_or_else(|violation| panic!("{violation}"));
    let _ = server.stop().ok();
    let elsewhere = bed.neighbor();
    let server = elsewhere.serve("disk").start();
    assert!(server.connect().read_all().expect("readable") == image, "the store has another state");
}

#[test]
fn an_orderly_stop_waits_for_the_store_and_a_second_signal_does_not() {
    let minio = Arc::new(Minio::start());
    let bed = TestBed::new(&StoreUnderTest::Minio(Arc::clone(&minio)));
    bed.create("disk", "8M", &[]);
    let mut server = bed.serve("disk").start();
    server.connect().write(0, &[3; 4096]).expect("accepted");
    minio.pause();
    server.signal(rustix::process::Signal::TERM);
    let stopping = wait_for("the server says that it is stopping", || {
        let event = server.next_event().expect("the server is still there");
        (event["event"] == "stopping").then_some(event)
    });
    println!("{stopping}");
    assert!(server.is_running(), "it was to wait for the store");
    wait_for("the server says what it waits for, and what ends that", || {
        let says =
            "waiting for requests and for the store: disk; a second signal stops immediately";
        server.stderr().contains(says).then_some(())
    });
    server.signal(rustix::process::Signal::TERM);
    let ended = server.finished();
    assert_eq!(
        ended.code,
        Some(1),
        "not everything was stored, and the exit code says so: {}",
        ended.stderr
    );
    minio.resume();
    let server = bed.serve("disk").start();
    assert_eq!(server.connect().read(0, 4096), Ok(vec![3; 4096]), "an accepted write is lost");
}
