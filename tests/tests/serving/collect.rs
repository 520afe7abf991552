//! Garbage collection as a user sees it: by itself, by hand on a served volume and on one at rest,
//! by signal.

use rustix::process::Signal;
use sawmill_tests::nbd::Command;
use sawmill_tests::on_each_store;
use sawmill_tests::server::Server;
use sawmill_tests::store::StoreUnderTest;
use sawmill_tests::test_bed::{TestBed, field};

on_each_store!(
    a_served_volume_gives_back_what_was_overwritten,
    a_served_volume_gives_back_what_was_discarded,
    collecting_by_hand_moves_what_a_dry_run_reported,
    a_signal_collects,
    a_volume_at_rest_is_collected_and_let_go,
    what_cannot_be_collected_is_refused_with_a_reason,
);

const SEGMENT: usize = 256 << 10;
const SEGMENTS: usize = 8;
/// A server that collects nothing by itself, and tells how it is.
const BY_HAND: [&str; 4] = ["--gc-start", "0", "--admin", "127.0.0.1:0"];

fn create(bed: &TestBed) {
    bed.create("disk", "64M", &["--segment-bytes", "256K"]);
}

fn all_stored(bed: &TestBed) {
    let _ = bed.sawmill(&["wait", "disk", "--stored", "--timeout", "60s"]).ok();
}

/// Fills segments, then overwrites the first half of each.
fn halve(bed: &TestBed, server: &Server) {
    let client = server.connect();
    for (part, first) in [(SEGMENT, 1), (SEGMENT / 2, 101)] {
        for number in 0..SEGMENTS {
            let bytes = vec![first + number as u8; part];
            client.write((number * SEGMENT) as u64, &bytes).expect("accepted");
        }
        all_stored(bed);
    }
}

fn assert_halved(server: &Server) {
    let client = server.connect();
    for number in 0..SEGMENTS {
        let bytes = client.read((number * SEGMENT) as u64, SEGMENT as u32).expect("read");
        let (new, old) = bytes.split_at(SEGMENT / 2);
        assert!(new.iter().all(|byte| *byte == 101 + number as u8), "segment {number}");
        assert!(old.iter().all(|byte| *byte == 1 + number as u8), "segment {number}");
    }
}

fn number(document: &serde_json::Value, name: &str) -> u64 {
    let value = field(document, name).and_then(serde_json::Value::as_u64);
    value.unwrap_or_else(|| panic!("no {name} in {document}"))
}

fn a_served_volume_gives_back_what_was_overwritten(store: &StoreUnderTest) {
    let bed = TestBed::new(store);
    create(&bed);
    let server = bed.serve("disk").with(&["--admin", "127.0.0.1:0"]).start();
    halve(&bed, &server);
    let status = server.wait_for("the store holds no more than live/0.70 + 5 %", |status| {
        number(status, "segment_object_bytes") as f64
            <= number(status, "live_bytes") as f64 / 0.70 * 1.05
    });
    assert!(number(&status, "segments_moved") > 0, "{status}");
    assert_halved(&server);
    let _ = server.stop().ok();
}

fn a_served_volume_gives_back_what_was_discarded(store: &StoreUnderTest) {
    let bed = TestBed::new(store);
    create(&bed);
    let server = bed.serve("disk").with(&["--admin", "127.0.0.1:0"]).start();
    let client = server.connect();
    let halves = |number: usize| ((number * SEGMENT) as u64, (SEGMENT / 2) as u64);
    for number in 0..SEGMENTS {
        client.write(halves(number).0, &vec![1 + number as u8; SEGMENT]).expect("accepted");
    }
    all_stored(&bed);
    for (offset, length) in (0..SEGMENTS).map(halves) {
        client.call(&Command::Trim { offset, length, fua: false }).expect("discarded");
    }
    all_stored(&bed);
    let live = (SEGMENTS * SEGMENT / 2) as u64;
    let status = server.wait_for("the store holds no more than live/0.70 + 5 %", |status| {
        number(status, "live_bytes") == live
            && number(status, "segment_object_bytes") as f64 <= live as f64 / 0.70 * 1.05
    });
    assert!(number(&status, "segments_moved") > 0, "{status}");
    for number in 0..SEGMENTS {
        let bytes = client.read(halves(number).0, SEGMENT as u32).expect("read");
        let (gone, kept) = bytes.split_at(SEGMENT / 2);
        assert!(gone.iter().all(|byte| *byte == 0), "segment {number}");
        assert!(kept.iter().all(|byte| *byte == 1 + number as u8), "segment {number}");
    }
    let _ = server.stop().ok();
}

fn collecting_by_hand_moves_what_a_dry_run_reported(store: &StoreUnderTest) {
    let bed = TestBed::new(store);
    create(&bed);
    let server = bed.serve("disk").with(&BY_HAND).start();
    halve(&bed, &server);
    let live = number(&server.status(), "live_bytes");
    let would = bed.sawmill(&["gc", "disk", "--threshold", "1", "--dry-run", "--json"]).json();
    assert_eq!(number(&would, "moved_bytes"), live);
    assert_eq!(number(&would, "garbage_bytes"), (SEGMENTS * SEGMENT / 2) as u64);
    let did = bed.sawmill(&["gc", "disk", "--threshold", "1", "--json"]).json();
    assert_eq!(number(&did, "moved_bytes"), live);
    let status = server.status();
    assert_eq!(number(&status, "segment_data_bytes"), live, "nothing but live data is left");
    assert_halved(&server);
    let text = bed.sawmill(&["gc", "disk"]).ok();
    assert!(text.contains("moved 0 B"), "{text}");
    let _ = server.stop().ok();
    let _ = bed.sawmill(&["check", "disk"]).ok();
}

fn a_signal_collects(store: &StoreUnderTest) {
    let bed = TestBed::new(store);
    create(&bed);
    let options =
        ["--gc-start", "0.6", "--gc-stop", "0.6", "--gc-rate", "1", "--admin", "127.0.0.1:0"];
    let server = bed.serve("disk").with(&options).start();
    halve(&bed, &server);
    server.signal(Signal::USR1);
    server.wait_for("garbage is collected", |status| number(status, "collections") > 0);
    assert_halved(&server);
    let _ = server.stop().ok();
}

fn a_volume_at_rest_is_collected_and_let_go(store: &StoreUnderTest) {
    let bed = TestBed::new(store);
    create(&bed);
    let server = bed.serve("disk").with(&BY_HAND).start();
    halve(&bed, &server);
    let live = number(&server.status(), "live_bytes");
    let _ = server.stop().ok();
    let staging = bed.memory().display().to_string();
    let gc = [
        "gc",
        "disk",
        "--threshold",
        "1",
        "--json",
        "--journal-bytes",
        "64M",
        "--staging",
        &staging,
    ];
    let did = bed.sawmill(&gc).json();
    assert_eq!(number(&did, "moved_bytes"), live);
    assert_eq!(number(&bed.info("disk"), "data_bytes"), live, "nothing but live data is left");
    let server = bed.serve("disk").start();
    assert_halved(&server);
    let _ = server.stop().ok();
}

fn what_cannot_be_collected_is_refused_with_a_reason(store: &StoreUnderTest) {
    let bed = TestBed::new(store);
    create(&bed);
    bed.sawmill(&["gc", "disk", "--threshold", "2"]).refused(2, &["'2' is not a share", "0.3"]);
    bed.sawmill(&["gc", "other"]).refused(3, &["other", "sawmill list"]);
    let upside_down = bed.serve("disk").with(&["--gc-start", "0.8", "--gc-stop", "0.5"]).attempt();
    let refused = upside_down.err().expect("it makes no sense");
    refused.refused(2, &["--gc-stop", "0.8", "0.5"]);
    let reader = bed.serve("disk").with(&["--read-only"]).start();
    bed.sawmill(&["gc", "disk"]).refused(11, &["read-only", "served for writing"]);
    let _ = reader.stop().ok();
}
