//! A volume that nobody uses costs nothing: no request to the store, no thread, and little memory
//! whatever its size.
//!
//! While it is in use, and for ten seconds more, a volume looks whether others have taken it over.
//! `SAWMILL_IDLE_S` (8 by default, past the age at which batches are sealed) is how long it is
//! watched.

use sawmill_tests::machine::wait_for;
use sawmill_tests::nbd::{Client, Style};
use sawmill_tests::on_each_store;
use sawmill_tests::server::Server;
use sawmill_tests::store::{self, StoreUnderTest};
use sawmill_tests::test_bed::{TestBed, field};
use serde_json::Value;

on_each_store!(an_idle_volume_makes_no_request_to_its_store);

/// A volume is in use for so long after its last use, and a look may take a while.
const IN_USE_MS: u64 = 13_000;

/// Requests of every kind that the server has made to its store, and its age in milliseconds.
fn requests(server: &Server) -> (u64, u64) {
    let status = server.status();
    let stores =
        field(&status, "stores").unwrap_or_else(|| panic!("no word of stores: {status:#}"));
    let calls = ["get", "put", "list", "delete"].iter().map(|&call| {
        let call = field(stores, call).and_then(|call| call["requests"].as_u64());
        call.unwrap_or_else(|| panic!("a kind of call is not counted: {stores:#}"))
    });
    let age =
        field(&status, "uptime_ms").and_then(Value::as_u64).expect("the server tells its age");
    (calls.sum(), age)
}

fn an_idle_volume_makes_no_request_to_its_store(store: &StoreUnderTest) {
    let watch_s =
        std::env::var("SAWMILL_IDLE_S").ok().and_then(|text| text.parse().ok()).unwrap_or(8_u64);
    let bed = TestBed::new(store);
    bed.create("disk", "1T", &[]);
    let server = bed.serve("disk").with(&["--admin", "127.0.0.1:0"]).start();
    let client = server.connect();
    // Never-written ranges are zeroes and cost no request either.
    let (at_start, _) = requests(&server);
    assert_eq!(client.read(1 << 39, 65536), Ok(vec![0; 65536]));
    assert!(
        requests(&server).0 <= at_start + 1,
        "reading nothing asked the store for more than one look"
    );
    client.write(0, &[1; 4096]).expect("accepted");
    let _ = bed.sawmill(&["wait", "disk", "--stored", "--timeout", "60s"]).ok();
    let (_, used) = requests(&server);
    let (before, since) = loop {
        let (now, age) = requests(&server);
        if age > used + IN_USE_MS {
            break (now, age);
        }
        std::thread::sleep(std::time::Duration::from_millis(50));
    };
    assert!(before > at_start, "the write was stored");
    // The promise is about time, so time must pass: the server's own clock says when it has.
    let after = loop {
        let (now, age) = requests(&server);
        if age > since + watch_s * 1000 {
            break now;
        }
        std::thread::sleep(std::time::Duration::from_millis(50));
    };
    assert_eq!(after, before, "an idle volume asked its store");
    let _ = server.stop().ok();
}

#[test]
fn an_idle_volume_of_one_tebibyte_takes_less_than_60_mebibytes() {
    let bed = TestBed::new(&store::folder());
    bed.create("disk", "1T", &[]);
    let options = ["--journal-bytes", "1G", "--cache-bytes", "4G"];
    let server = bed.serve("disk").with(&options).start();
    let client = server.connect();
    assert_eq!(client.read(0, 4096), Ok(vec![0; 4096]));
    let resident = server.resident_bytes();
    println!("an idle 1 TiB volume: {resident} bytes resident");
    assert!(resident < 60 << 20, "{resident} bytes resident");
}

/// However slow the disk is, 24 threads for its journals and 24 for the engines behind them
/// (`crates/volume/src/threads/loops`), a clock, and a few that were started and found no loop. It
/// would be a hundred if each loop had its own.
const VOLUME_THREADS_MAX: usize = 60;

/// The threads of a server that run volumes, whatever their names are: not those of its doors, of
/// its stores and of the process, which the number of volumes does not change.
fn volume_threads(server: &Server) -> Vec<String> {
    let fixed = ["sawmill", "signals", "admin", "sawmill-store", "nbd-accept"];
    let tasks = std::fs::read_dir(format!("/proc/{}/task", server.pid())).expect("it runs");
    let names = tasks.filter_map(|task| {
        // A thread may end meanwhile.
        let name = std::fs::read_to_string(task.ok()?.path().join("comm")).ok()?;
        Some(name.trim().to_owned())
    });
    names.filter(|name| !fixed.contains(&&**name) && !name.starts_with("nbd-")).collect()
}

#[test]
fn fifty_volumes_share_the_threads_that_run_them() {
    let bed = TestBed::new(&store::folder());
    let names: Vec<String> = (0..50).map(|number| format!("disk-{number}")).collect();
    bed.create("disk", "8M", &["--segment-bytes", "256K"]);
    let mut words = vec!["clone", "disk"];
    words.extend(names.iter().map(String::as_str));
    let made = bed.sawmill(&words);
    assert_eq!(made.ok().lines().count(), 50, "each clone is reported");
    let first = bed.serve(&names[0]).with(&["--journal-bytes", "16M"]);
    let server = names[1..].iter().fold(first, |server, name| server.and(name)).start();
    let clients: Vec<_> = (0..50)
        .map(|index| Client::connect(&server.uri_of(index), Style::Structured).expect("connects"))
        .collect();
    for round in 0..20_u64 {
        std::thread::scope(|scope| {
            for client in &clients {
                scope.spawn(move || {
                    client.write(round * 4096, &[round as u8; 4096]).expect("accepted");
                    client.flush().expect("flushed");
                });
            }
        });
        // Readers and collectors come and go.
        let threads = volume_threads(&server);
        let count = threads.iter().filter(|name| name.starts_with("volume")).count();
        assert!(count <= VOLUME_THREADS_MAX, "{count} threads: {threads:?}");
    }
    for client in &clients {
        assert_eq!(client.read(19 * 4096, 4096), Ok(vec![19; 4096]));
    }
    // At rest, one waits for work, and one for the time.
    wait_for("the threads end", || (volume_threads(&server).len() <= 2).then_some(()));
    drop(clients);
    let _ = server.stop().ok();
}
