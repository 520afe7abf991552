//! Discards are records, however long: a whole 2 TiB volume goes in a handful of them, and what was
//! discarded reads as zeroes, now and after a crash.

use sawmill_tests::bridge::Bridge;
use sawmill_tests::machine::{command, require_mount, run};
use sawmill_tests::nbd::{Client, Command, Extent, Style};
use sawmill_tests::on_each_store;
use sawmill_tests::requires;
use sawmill_tests::store::{self, StoreUnderTest};
use sawmill_tests::test_bed::{TestBed, field};

on_each_store!(a_discarded_volume_reads_as_zeroes_now_and_after_a_crash);

const TIB: u64 = 1 << 40;

fn count(bed: &TestBed, name: &str) -> u64 {
    let info = bed.info("disk");
    field(&info, name)
        .and_then(serde_json::Value::as_u64)
        .unwrap_or_else(|| panic!("no {name} in {info:#}"))
}

fn a_discarded_volume_reads_as_zeroes_now_and_after_a_crash(store: &StoreUnderTest) {
    let bed = TestBed::new(store);
    bed.create("disk", "2T", &["--segment-bytes", "256K"]);
    let server = bed.serve("disk").start();
    let client =
        Client::connect(&server.uri(), Style::Extended).expect("extended headers are spoken");
    for at in [0, TIB - 300, 2 * TIB - 4096] {
        client.write(at, &[1; 4096]).expect("accepted");
    }
    let _ = bed.sawmill(&["wait", "disk", "--stored", "--timeout", "60s"]).ok();
    client
        .call(&Command::Trim { offset: 0, length: 2 * TIB, fua: false })
        .expect("one request may discard everything");
    let zeroes = |client: &Client| {
        for at in [0, TIB - 300, 2 * TIB - 4096] {
            assert_eq!(client.read(at, 4096), Ok(vec![0; 4096]), "at {at}");
        }
        let answer = client
            .call(&Command::BlockStatus { offset: 0, length: 2 * TIB })
            .expect("allocation is reported");
        assert_eq!(answer.extents[0], Extent { length: 2 * TIB, flags: 3 }, "all of it is a hole");
    };
    zeroes(&client);
    client.flush().expect("flushed");
    server.kill();
    let server = bed.serve("disk").start();
    let client =
        Client::connect(&server.uri(), Style::Extended).expect("extended headers are spoken");
    zeroes(&client);
    let _ = server.stop().ok();
    let elsewhere = bed.neighbor();
    let server = elsewhere.serve("disk").start();
    let client =
        Client::connect(&server.uri(), Style::Extended).expect("extended headers are spoken");
    zeroes(&client);
    assert_eq!(count(&elsewhere, "live_bytes"), 0);
}

#[test]
fn a_discard_in_steps_of_four_gigabytes_is_a_handful_of_records() {
    let bed = TestBed::new(&store::folder());
    bed.create("disk", "2T", &[]);
    let server = bed.serve("disk").start();
    let client = server.connect();
    // What a kernel does with a full-device discard: the longest aligned requests that 32 bits can
    // say.
    let step = (1_u64 << 32) - (1 << 20);
    let pending_replies: Vec<_> = (0..2 * TIB)
        .step_by(step as usize)
        .map(|offset| {
            let length = step.min(2 * TIB - offset);
            client.submit(&Command::Trim { offset, length, fua: false })
        })
        .collect();
    let requests = pending_replies.len() as u64;
    for pending in pending_replies {
        pending.wait().expect("a discard in range");
    }
    assert_eq!(count(&bed, "discards"), requests);
    let bytes = count(&bed, "accepted");
    assert!(bytes <= requests * 4096, "{requests} discards cost {bytes} bytes of log");
    let _ = server.stop().ok();
    assert!(count(&bed, "object_bytes") < 1 << 20, "next to nothing goes to the store");
}

#[test]
fn a_file_system_on_two_tebibytes_is_made_with_a_full_discard() {
    requires!(require_mount());
    let bed = TestBed::new(&store::folder());
    bed.create("disk", "2T", &[]);
    let server = bed.serve("disk").with(&["--journal-bytes", "512M"]).start();
    let mut bridge = Bridge::new(&server.uri());
    run(command("mkfs.xfs").arg("-f").arg(bridge.device()));
    let root = bridge.mount();
    std::fs::write(root.join("file"), [5; 100_000]).expect("room for a file");
    bridge.unmount();
    drop(bridge);
    // XFS zeroes and writes its own structures; the 2 TiB themselves are no more than a few
    // records.
    let discards = count(&bed, "discards");
    assert!(discards < 10_000, "{discards} records for one discard of the device and the log");
    let written = count(&bed, "written_bytes");
    assert!(written < 64 << 20, "{written} bytes were written to make a file system");
    let _ = server.stop().ok();
}
