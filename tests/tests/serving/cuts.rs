//! The past of a volume as its users meet it: snapshots, times, positions, rollbacks and clones,
//! through the real binary, served and at rest.

use std::path::{Path, PathBuf};

use sawmill_tests::machine::wait_for;
use sawmill_tests::nbd::Client;
use sawmill_tests::on_each_store;
use sawmill_tests::store::{self, StoreUnderTest};
use sawmill_tests::test_bed::{TestBed, field};
use serde_json::Value;

on_each_store!(
    a_snapshot_of_a_served_volume_is_served_beside_it,
    a_volume_at_rest_is_rolled_back_and_the_rollback_undone,
    any_stored_moment_inside_the_window_is_served_by_its_time,
    clones_go_their_own_ways_and_outlive_their_base,
    a_flattened_clone_stands_alone,
    what_cannot_be_had_is_refused_with_its_own_exit_code,
);

mod code {
    pub(crate) const NEGATIVE: i32 = 1;
    pub(crate) const USAGE: i32 = 2;
    pub(crate) const NOT_FOUND: i32 = 3;
    pub(crate) const EXISTS: i32 = 4;
    pub(crate) const REFUSED: i32 = 5;
}

const BYTES: usize = 4 << 20;

fn place_with_disk(store: &StoreUnderTest) -> TestBed {
    let bed = TestBed::new(store);
    bed.create("disk", "4M", &["--segment-bytes", "256K"]);
    bed
}

/// What is served for reading under this name.
fn read(bed: &TestBed, volume: &str) -> Vec<u8> {
    let listen = format!("unix:{}", bed.path("reader.sock").display());
    let server = bed.serve(volume).with(&["--read-only"]).at(&listen).start();
    let bytes = server.connect().read_all().expect("readable");
    let _ = server.stop().ok();
    bytes
}

/// A whole disk of one byte, written by a process of its own.
fn fill(bed: &TestBed, volume: &str, byte: u8) {
    let server = bed.serve(volume).start();
    server.connect().write(0, &vec![byte; BYTES]).expect("accepted");
    let _ = server.stop().ok();
}

fn names(listed: &Value) -> Vec<&str> {
    listed.as_array().expect("a list").iter().filter_map(|row| row["name"].as_str()).collect()
}

fn a_snapshot_of_a_served_volume_is_served_beside_it(store: &StoreUnderTest) {
    let bed = place_with_disk(store);
    let server = bed.serve("disk").with(&["--checkpoint-bytes", "1M"]).start();
    let client = server.connect();
    client.write(0, &vec![1; BYTES]).expect("accepted");
    let outcome = bed.sawmill(&["snapshot", "create", "disk", "one", "--json"]).json();
    assert_eq!((&outcome["snapshot"], &outcome["done"]), (&"one".into(), &true.into()));
    for round in 2..6 {
        client.write(0, &vec![round; BYTES]).expect("accepted");
    }
    let _ = bed.sawmill(&["wait", "disk", "--stored"]).ok();
    assert!(read(&bed, "disk@one") == vec![1; BYTES]);
    let listed = bed.sawmill(&["snapshot", "list", "disk", "--json"]).json();
    assert_eq!(names(&listed), ["one"]);
    assert!(
        field(&listed[0], "unique_bytes").and_then(Value::as_u64).expect("a number")
            >= BYTES as u64
    );
    assert!(bed.sawmill(&["snapshot", "list", "disk"]).ok().contains("one"));
    let _ = bed.sawmill(&["snapshot", "delete", "disk", "one"]).ok();
    assert!(client.read_all().expect("readable") == vec![5; BYTES]);
    let _ = server.stop().ok();
    assert!(names(&bed.sawmill(&["snapshot", "list", "disk", "--json"]).json()).is_empty());
    assert_eq!(bed.sawmill(&["check", "disk", "--json"]).json()["ok"], true);
}

fn a_volume_at_rest_is_rolled_back_and_the_rollback_undone(store: &StoreUnderTest) {
    let bed = place_with_disk(store);
    fill(&bed, "disk", 1);
    let _ = bed.sawmill(&["snapshot", "create", "disk", "one"]).ok();
    fill(&bed, "disk", 2);
    let done = bed.sawmill(&["rollback", "disk", "--to", "one", "--json"]).json();
    assert!(read(&bed, "disk") == vec![1; BYTES]);
    let log = bed.sawmill(&["log", "disk"]).ok();
    assert!(log.contains("rollback") && log.contains("one"), "{log}");
    let before = done["before"].as_str().expect("a name");
    assert_eq!(done["undo"], format!("sawmill rollback disk --to {before}"));
    let _ = bed.sawmill(&["rollback", "disk", "--to", before]).ok();
    assert!(read(&bed, "disk") == vec![2; BYTES]);
    // The same on a volume that is served.
    let server = bed.serve("disk").start();
    let _ = bed.sawmill(&["rollback", "disk", "--to", "one"]).ok();
    assert!(server.connect().read_all().expect("readable") == vec![1; BYTES]);
    let _ = server.stop().ok();
    assert!(read(&bed, "disk") == vec![1; BYTES]);
}

fn any_stored_moment_inside_the_window_is_served_by_its_time(store: &StoreUnderTest) {
    let bed = TestBed::new(store);
    bed.create("disk", "4M", &["--segment-bytes", "256K", "--retention", "24h"]);
    let server = bed.serve("disk").with(&["--checkpoint-bytes", "1M"]).start();
    let mut moments = Vec::new();
    for byte in 1..=4 {
        server.connect().write(0, &vec![byte; BYTES]).expect("accepted");
        let _ = bed.sawmill(&["wait", "disk", "--stored"]).ok();
        let log = bed.sawmill(&["log", "disk", "--json"]).json();
        moments.push((
            log["through"].as_str().expect("a time").to_owned(),
            log["position"].clone(),
            byte,
        ));
    }
    for (time, position, byte) in &moments {
        assert!(
            read(&bed, &format!("disk@position:{position}")) == vec![*byte; BYTES],
            "{position}"
        );
        assert!(read(&bed, &format!("disk@{time}")) == vec![*byte; BYTES], "{time}");
    }
    let _ = server.stop().ok();
    let _ = bed.sawmill(&["clone", &format!("disk@{}", moments[1].0), "copy"]).ok();
    assert!(read(&bed, "copy") == vec![2; BYTES]);
    let _ = bed.sawmill(&["rollback", "disk", "--to", &moments[2].0]).ok();
    assert!(read(&bed, "disk") == vec![3; BYTES]);
    let _ = bed.sawmill(&["set", "disk", "--retention", "0"]).ok();
    assert_eq!(bed.sawmill(&["log", "disk", "--json"]).json()["retention_s"], 0);
}

fn clones_go_their_own_ways_and_outlive_their_base(store: &StoreUnderTest) {
    let bed = place_with_disk(store);
    let server = bed.serve("disk").start();
    server.connect().write(0, &vec![1; BYTES]).expect("accepted");
    // Of the present, stored or not.
    let _ = bed.sawmill(&["clone", "disk", "child"]).ok();
    server.connect().write(0, &vec![2; BYTES]).expect("accepted");
    let _ = server.stop().ok();
    assert!(read(&bed, "child") == vec![1; BYTES]);
    let _ = bed.sawmill(&["snapshot", "create", "child", "first"]).ok();
    fill(&bed, "child", 3);
    let _ = bed.sawmill(&["clone", "child@first", "grandchild"]).ok();
    let deleted = bed.sawmill(&["delete", "disk", "--yes", "--json"]).json();
    assert_eq!(deleted["needed_by"], serde_json::json!(["child", "grandchild"]));
    bed.sawmill(&["info", "disk"]).refused(code::NOT_FOUND, &["disk"]);
    // As after a delete that died before it could say so.
    let again = bed.sawmill(&["delete", "disk", "--yes", "--json"]).json();
    assert_eq!(again["needed_by"], deleted["needed_by"]);
    assert!(bed.sawmill(&["delete", "child", "--yes"]).ok().contains("grandchild"));
    assert!(read(&bed, "grandchild") == vec![1; BYTES]);
    assert_eq!(bed.sawmill(&["check", "grandchild", "--json"]).json()["ok"], true);
    // The name is free, and what is made of it is empty.
    bed.create("disk", "4M", &[]);
    assert!(read(&bed, "disk") == vec![0; BYTES]);
    let _ = bed.sawmill(&["delete", "grandchild", "--yes"]).ok();
    assert!(read(&bed, "disk") == vec![0; BYTES]);
}

fn a_flattened_clone_stands_alone(store: &StoreUnderTest) {
    let bed = place_with_disk(store);
    fill(&bed, "disk", 1);
    let _ = bed.sawmill(&["clone", "disk", "copy"]).ok();
    let done = bed.sawmill(&["flatten", "copy", "--json"]).json();
    assert_eq!((&done["released"], &done["copied_bytes"]), (&true.into(), &BYTES.into()));
    let deleted = bed.sawmill(&["delete", "disk", "--yes", "--json"]).json();
    assert_eq!(deleted["needed_by"], serde_json::json!([]));
    assert!(read(&bed, "copy") == vec![1; BYTES]);
    assert_eq!(bed.sawmill(&["check", "copy", "--json"]).json()["ok"], true);
}

fn what_cannot_be_had_is_refused_with_its_own_exit_code(store: &StoreUnderTest) {
    let bed = place_with_disk(store);
    fill(&bed, "disk", 1);
    let _ = bed.sawmill(&["snapshot", "create", "disk", "one"]).ok();
    bed.sawmill(&["snapshot", "create", "disk", "one"]).refused(code::EXISTS, &["one"]);
    bed.sawmill(&["snapshot", "create", "disk", "a/b"]).refused(code::USAGE, &["a/b"]);
    bed.sawmill(&["snapshot", "delete", "disk", "two"]).refused(code::NOT_FOUND, &["two"]);
    bed.sawmill(&["rollback", "disk", "--to", "two"]).refused(code::NOT_FOUND, &["two"]);
    bed.sawmill(&["serve", "disk@one"]).refused(code::USAGE, &["--read-only", "clone"]);
    bed.sawmill(&["serve", "disk@two", "--read-only"]).refused(code::NOT_FOUND, &["two"]);
    bed.sawmill(&["serve", "disk@2020-01-01T00:00:00Z", "--read-only"])
        .refused(code::NOT_FOUND, &["retention"]);
    bed.sawmill(&["serve", "disk@12:00", "--read-only"]).refused(code::USAGE, &["12:00"]);
    bed.sawmill(&["clone", "disk@two", "copy"]).refused(code::NOT_FOUND, &["two"]);
    bed.create("copy", "4M", &[]);
    bed.sawmill(&["clone", "disk", "copy"]).refused(code::EXISTS, &["copy"]);
    // Somebody else serves it: an order given here must not shut that writer out.
    let server = bed.serve("disk").start();
    server.connect().write(0, &[2; 4096]).expect("accepted");
    let elsewhere = bed.neighbor();
    elsewhere.sawmill(&["snapshot", "create", "disk", "two"]).refused(code::REFUSED, &["there"]);
    server.connect().write(0, &[3; 4096]).expect("still the writer");
    let _ = bed.sawmill(&["snapshot", "create", "disk", "two"]).ok();
    let _ = server.stop().ok();
}

/// The objects of a folder store below a folder of this name, the oldest first.
fn objects(bed: &TestBed, kind: &str) -> Vec<PathBuf> {
    let mut folders = vec![bed.store_folder().expect("a folder").to_owned()];
    let mut found = Vec::new();
    while let Some(folder) = folders.pop() {
        for path in std::fs::read_dir(&folder).expect("a folder").flatten().map(|it| it.path()) {
            if path.is_dir() {
                folders.push(path);
            } else if folder.components().any(|part| part.as_os_str() == kind) {
                found.push(path);
            }
        }
    }
    found.sort();
    found
}

/// A check of the volume finds this object damaged, and nothing else. Returns what that costs.
fn assert_damaged(bed: &TestBed, volume: &str, object: &Path) -> String {
    let checked = bed.sawmill(&["check", volume, "--json"]);
    assert_eq!(checked.code, Some(code::NEGATIVE), "{}{}", checked.stdout, checked.stderr);
    let report: Value = serde_json::from_str(&checked.stdout).expect("JSON also with damage");
    let damage = report["damage"].as_array().expect("a list");
    let name = damage[0]["object"].as_str().expect("the object is named");
    assert!(damage.len() == 1 && object.ends_with(name), "{}: {report:#}", object.display());
    damage[0]["costs"].to_string()
}

#[test]
fn damage_of_one_of_two_checkpoints_or_of_a_pin_is_reported_while_everything_is_served() {
    let bed = place_with_disk(&store::folder());
    fill(&bed, "disk", 1);
    let _ = bed.sawmill(&["clone", "disk", "copy"]).ok();
    fill(&bed, "disk", 2);
    let roots: Vec<_> = objects(&bed, "checkpoint");
    let disk = roots
        .iter()
        .map(|root| root.parent())
        .max_by_key(|folder| roots.iter().filter(|root| root.parent() == *folder).count());
    let of_disk: Vec<_> = roots.iter().filter(|root| Some(root.parent()) == disk).collect();
    let [older, newest] = of_disk[of_disk.len() - 2..] else { panic!("two: {roots:?}") };
    let pins = objects(&bed, "pin");
    let [pin] = &pins[..] else { panic!("one pin: {pins:?}") };
    for (volume, object) in [("disk", older), ("disk", newest), ("copy", pin)] {
        let bytes = std::fs::read(object).expect("an object");
        let mut damaged = bytes.clone();
        damaged[bytes.len() / 2] ^= 1;
        std::fs::write(object, damaged).expect("an object can be damaged");
        assert_damaged(&bed, volume, object);
        assert!(read(&bed, "disk") == vec![2; BYTES], "{}", object.display());
        assert!(read(&bed, "copy") == vec![1; BYTES], "{}", object.display());
        std::fs::write(object, bytes).expect("and mended");
    }
    let _ = bed.sawmill(&["check", "copy"]).ok();
}

/// A served volume with a retention window, where only a moment at the returned position needs the
/// returned segments, which hold ones.
fn with_a_moment(bed: &TestBed) -> (sawmill_tests::server::Server, Value, Vec<PathBuf>) {
    bed.create("disk", "4M", &["--segment-bytes", "256K", "--retention", "24h"]);
    let server = bed.serve("disk").with(&["--checkpoint-bytes", "1M"]).start();
    let before = objects(bed, "seg");
    overwrite(bed, &server.connect(), 1);
    let position = bed.sawmill(&["log", "disk", "--json"]).json()["position"].clone();
    let mut segments = objects(bed, "seg");
    segments.retain(|segment| !before.contains(segment));
    overwrite(bed, &server.connect(), 2);
    (server, position, segments)
}

fn overwrite(bed: &TestBed, client: &Client, byte: u8) {
    client.write(0, &vec![byte; BYTES]).expect("accepted");
    let _ = bed.sawmill(&["wait", "disk", "--stored"]).ok();
}

#[test]
fn a_check_names_the_moments_that_a_damaged_segment_costs() {
    let bed = TestBed::new(&store::folder());
    let (server, position, segments) = with_a_moment(&bed);
    let _ = server.stop().ok();
    std::fs::write(&segments[0], b"no segment").expect("an object can be damaged");
    let costs = assert_damaged(&bed, "disk", &segments[0]);
    assert!(costs.contains("the moments from position"), "{costs}");
    assert!(!costs.contains("the volume"), "{costs}");
    assert!(read(&bed, "disk") == vec![2; BYTES], "the present is served");
    let listen = format!("unix:{}", bed.path("reader.sock").display());
    let moment = format!("disk@position:{position}");
    let reader = bed.serve(&moment).with(&["--read-only"]).at(&listen).attempt();
    let is_served = reader.is_ok_and(|reader| reader.connect().read_all().is_ok());
    assert!(!is_served, "damage was served");
}

#[test]
fn a_reader_of_a_moment_that_left_the_window_gets_an_error_and_never_other_bytes() {
    let bed = TestBed::new(&store::folder());
    let (server, position, segments) = with_a_moment(&bed);
    let listen = format!("unix:{}", bed.path("reader.sock").display());
    let moment = format!("disk@position:{position}");
    let reader = bed.serve(&moment).with(&["--read-only"]).at(&listen).start();
    let _ = bed.sawmill(&["set", "disk", "--retention", "0"]).ok();
    wait_for("what only the moment needs is deleted", || {
        overwrite(&bed, &server.connect(), 3);
        segments.iter().any(|segment| !segment.exists()).then_some(())
    });
    let client = reader.connect();
    let answers: Vec<_> = (0..64_u64).map(|n| client.read(n << 16, 1 << 16)).collect();
    assert!(answers.iter().any(Result::is_err), "deleted data was served");
    assert!(answers.iter().flatten().flatten().all(|&byte| byte == 1), "other bytes were served");
    let _ = server.stop().ok();
}
