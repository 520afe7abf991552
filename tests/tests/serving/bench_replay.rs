//! Block traces replayed on a served disk: every read verified, and a disk that loses data is found
//! out.

use std::fmt::Write;
use std::process::{Child, Stdio};

use sawmill_testkit::Dice;
use sawmill_tests::machine::{command, wait_for};
use sawmill_tests::store;
use sawmill_tests::test_bed::{CommandOutput, TestBed, field};

/// A trace of `count` requests on two disks of 8 MiB, in the CSV that people may write: of any
/// length, at any byte, overlapping.
fn trace(bed: &TestBed, count: u64) -> String {
    let mut dice = Dice::new(7);
    let mut text = String::from("time_ms,operation,device,address_bytes,length_bytes\n");
    for at in 0..count {
        let operation =
            ["write", "write", "write", "read", "read", "read", "flush", "discard", "zero"]
                [dice.below(9) as usize];
        let length = if operation == "flush" { 0 } else { 1 + dice.below(100_000) };
        let address = dice.below((8 << 20) - 100_000);
        writeln!(text, "{at},{operation},{},{address},{length}", dice.below(2)).expect("text");
    }
    let path = bed.path("trace.csv");
    std::fs::write(&path, text).expect("written");
    path.to_str().expect("paths of tests are text").to_owned()
}

fn replay(bed: &TestBed, trace: &str, uri: &str, options: &[&str]) -> CommandOutput {
    bed.sawmill(&[&["--json", "bench", "replay", trace, "--nbd", uri], options].concat())
}

fn number(document: &serde_json::Value, name: &str) -> u64 {
    let found = field(document, name).and_then(serde_json::Value::as_u64);
    found.unwrap_or_else(|| panic!("no {name} in {document:#}"))
}

#[test]
fn a_replayed_trace_is_measured_and_every_read_verified() {
    let bed = TestBed::new(&store::folder());
    bed.create("disk", "16M", &["--segment-bytes", "256K"]);
    let server = bed.serve("disk").start();
    let trace = trace(&bed, 3000);
    let report = replay(&bed, &trace, &server.uri(), &[]).json();
    assert_eq!(number(&report, "requests"), 3000, "{report:#}");
    assert_eq!(number(&report, "disk_bytes"), 16 << 20, "the disks lie one behind another");
    assert!(number(&report, "verified_bytes") > 10 << 20, "{report:#}");
    assert!(number(&report, "read_back_bytes") > 4 << 20, "{report:#}");
    assert!(number(&report, "waited_for_overlaps") > 0, "{report:#}");
    let kinds = report["kinds"].as_array().expect("a list");
    assert_eq!(kinds.len(), 5);
    assert!(
        kinds.iter().all(|kind| number(kind, "p50_us") <= number(kind, "max_us")),
        "{report:#}"
    );
    // Ten times as fast as recorded: 300 requests of a millisecond each.
    let report =
        replay(&bed, &trace, &server.uri(), &["--speed", "10", "--requests", "300"]).json();
    assert!(report["seconds"].as_f64().expect("a number") >= 0.0299, "{report:#}");
    assert_eq!(number(&report, "requests"), 300);
    assert!(report["behind_ms_max"].is_u64());
    let _ = server.stop().ok();
    let _ = bed.sawmill(&["check", "disk"]).ok();
}

/// nbdkit, on a socket; it ends when this goes.
struct Kit(Child, String);

impl Kit {
    fn start(bed: &TestBed, arguments: &[&str]) -> Self {
        let socket = bed.path("kit.sock");
        let mut kit = command("nbdkit");
        kit.args(["--foreground", "--exit-with-parent", "--unix"]).arg(&socket).args(arguments);
        let child = kit.stdin(Stdio::null()).stderr(Stdio::null()).spawn().expect("nbdkit starts");
        wait_for("nbdkit listens", || std::os::unix::net::UnixStream::connect(&socket).ok());
        Kit(child, format!("nbd+unix:///?socket={}", socket.display()))
    }
}

impl Drop for Kit {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
        let _ = std::fs::remove_file(self.1.split_once('=').expect("a socket").1);
    }
}

#[test]
fn a_disk_that_loses_data_is_found_with_the_address() {
    let bed = TestBed::new(&store::folder());
    let trace = trace(&bed, 300);
    let honest = Kit::start(&bed, &["memory", "16M"]);
    let _ = replay(&bed, &trace, &honest.1, &[]).ok();
    drop(honest);
    let forgetful = Kit::start(&bed, &["null", "16M"]);
    replay(&bed, &trace, &forgetful.1, &[]).refused(9, &["byte ", "write number"]);
    drop(forgetful);
    let failing = Kit::start(
        &bed,
        &["--filter=error", "memory", "16M", "error-pwrite=ENOSPC", "error-pwrite-rate=100%"],
    );
    replay(&bed, &trace, &failing.1, &[]).refused(10, &["Write at byte"]);
}

#[test]
fn a_replay_that_cannot_be_is_refused() {
    let bed = TestBed::new(&store::folder());
    let trace = trace(&bed, 30);
    let small = Kit::start(&bed, &["memory", "15M"]);
    replay(&bed, &trace, &small.1, &[]).refused(5, &["16777216", "sawmill create --size"]);
    drop(small);
    let fixed = Kit::start(&bed, &["--readonly", "memory", "16M"]);
    replay(&bed, &trace, &fixed.1, &[]).refused(5, &["read-only"]);
    replay(&bed, &trace, &fixed.1, &["--speed", "fast"]).refused(2, &["'fast' is not a speed"]);
    replay(&bed, "/nonexistent/trace", &fixed.1, &[]).refused(5, &["read-only"]);
    replay(&bed, &trace, "nbd://127.0.0.1:1/", &[]).refused(7, &["127.0.0.1:1"]);
}
