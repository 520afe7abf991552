//! Memory that outlives the process, and what ends it: a container's restart, a user's logout,
//! another command. Nothing accepted is lost without a word.

use std::sync::Arc;

use rustix::process::Signal;
use sawmill_tests::machine::wait_for;
use sawmill_tests::server::Server;
use sawmill_tests::store::{Minio, StoreUnderTest};
use sawmill_tests::test_bed::{TestBed, field};

const REFUSED: i32 = 5;
const WRITTEN: [u8; 4096] = [0xa5; 4096];

fn written(bed: &TestBed) -> Server {
    bed.create("disk", "16M", &[]);
    let server = bed.serve("disk").start();
    server.connect().write(8192, &WRITTEN).expect("accepted");
    server
}

/// What logind does at a logout, and a container's end to its /dev/shm.
fn end_memory(bed: &TestBed) {
    for entry in std::fs::read_dir(bed.memory()).expect("the folder in memory").flatten() {
        std::fs::remove_file(entry.path()).expect("removed");
    }
}

fn wait_until_written(server: &Server) {
    assert_eq!(server.connect().read(8192, 4096).expect("readable"), WRITTEN);
}

#[test]
fn memory_that_went_with_its_container_is_missed() {
    let bed = TestBed::new(&StoreUnderTest::Folder);
    let server = written(&bed);
    server.connect().flush().expect("flushed");
    server.connect().write(0, &WRITTEN).expect("accepted, not flushed");
    server.kill();
    end_memory(&bed);
    let refusal = bed.serve("disk").attempt().err().expect("refused");
    refusal.refused(REFUSED, &["memory", "--accept-memory-loss"]);
    let server = bed.serve("disk").with(&["--accept-memory-loss"]).start();
    wait_until_written(&server);
    let _ = server.stop().ok();
    let _ = bed.serve("disk").start().stop().ok();
}

#[test]
fn a_planned_hand_off_needs_no_memory_of_before() {
    let bed = TestBed::new(&StoreUnderTest::Folder);
    let mut server = written(&bed);
    end_memory(&bed);
    server.hand_off(&bed, "disk");
    wait_until_written(&server);
}

#[test]
fn a_server_killed_soon_after_sigterm_loses_nothing_with_the_memory() {
    let minio = Arc::new(Minio::start());
    let bed = TestBed::new(&StoreUnderTest::Minio(Arc::clone(&minio)));
    let server = written(&bed);
    let logged = || field(&bed.info("disk"), "logged").and_then(serde_json::Value::as_u64);
    let before = logged();
    minio.pause();
    server.signal(Signal::TERM);
    // The store is away, so it cannot end; the journal's disk is not.
    let info =
        || bed.sawmill(&["inspect", "journal", &bed.journals()[0].display().to_string(), "--json"]);
    wait_for("what was accepted is in the journal's file", || {
        let journal = info().into_ok().unwrap_or_default();
        let document: serde_json::Value = serde_json::from_str(&journal).unwrap_or_default();
        let records = field(&document, "writes").and_then(serde_json::Value::as_u64);
        (records.unwrap_or(0) > 0).then_some(())
    });
    server.kill();
    minio.resume();
    end_memory(&bed);
    let server = bed.serve("disk").with(&["--accept-memory-loss"]).start();
    wait_until_written(&server);
    assert!(before <= logged());
}

#[test]
fn a_command_at_rest_finds_the_memory_that_a_server_left() {
    let bed = TestBed::new(&StoreUnderTest::Folder);
    written(&bed).kill();
    // It has no option for the folder: the journal says where it is.
    let _ = bed.sawmill(&["snapshot", "create", "disk", "noon"]).ok();
    let server = bed.serve("disk").start();
    wait_until_written(&server);
    let _ = server.stop().ok();
    let server = bed.serve("disk@noon").with(&["--read-only"]).start();
    wait_until_written(&server);
}
