//! Another size and another name for a volume, at rest and under its users.

use sawmill_tests::on_each_store;
use sawmill_tests::store::{self, StoreUnderTest};
use sawmill_tests::test_bed::{CommandOutput, TestBed, field};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

on_each_store!(
    a_volume_grows_under_its_clients_and_they_see_it_when_they_reconnect,
    a_shrunk_volume_has_lost_what_lay_beyond_for_good,
    a_served_volume_is_renamed_and_goes_on,
);

/// Options for a command that attaches, so that its staging file is in the test's folder.
fn attaching(bed: &TestBed, arguments: &[&str]) -> CommandOutput {
    let staging = bed.memory().display().to_string();
    bed.sawmill(&[arguments, &["--journal-bytes", "64M", "--staging", &staging]].concat())
}

fn size(bed: &TestBed, volume: &str) -> u64 {
    let info = bed.info(volume);
    field(&info, "size_bytes").and_then(serde_json::Value::as_u64).expect("a volume has a size")
}

fn names(bed: &TestBed) -> Vec<String> {
    let list = bed.sawmill(&["list", "--json"]).json();
    let name = |row: &serde_json::Value| row["name"].as_str().expect("a name").to_owned();
    list.as_array().expect("a list").iter().map(name).collect()
}

fn a_volume_grows_under_its_clients_and_they_see_it_when_they_reconnect(store: &StoreUnderTest) {
    let bed = TestBed::new(store);
    bed.create("disk", "64M", &[]);
    let server = bed.serve("disk").start();
    let old = server.connect();
    old.write(5000, &[1; 5000]).expect("accepted");
    let outcome = bed.sawmill(&["resize", "disk", "40G", "--json"]).json();
    assert_eq!(
        (outcome["old_size_bytes"].as_u64(), outcome["size_bytes"].as_u64()),
        (Some(64 * MIB), Some(40 * GIB))
    );
    assert_eq!(size(&bed, "disk"), 40 * GIB);
    assert!(
        old.write(64 * MIB, &[2; 512]).is_err(),
        "a connection keeps the size it was opened with"
    );
    assert_eq!(old.read(5000, 5000), Ok(vec![1; 5000]), "and goes on");
    let new = server.connect();
    assert_eq!(new.export().size_bytes, 40 * GIB);
    new.write(40 * GIB - 4096, &[3; 4096]).expect("accepted");
    new.write(5000, &[4; 100]).expect("accepted");
    assert_eq!(old.read(5000, 100), Ok(vec![4; 100]), "one disk");
    for (size, code, word) in
        [("1G", 5, "--yes-lose-data"), ("40G1", 2, "40G1"), ("65T", 2, "limit")]
    {
        bed.sawmill(&["resize", "disk", size]).refused(code, &[word]);
    }
    bed.sawmill(&["resize", "disk", "1G", "--yes-lose-data"]).refused(11, &["while it is served"]);
    server.kill();
    let server = bed.serve("disk").start();
    let client = server.connect();
    assert_eq!(client.export().size_bytes, 40 * GIB);
    assert_eq!(client.read(40 * GIB - 4096, 4096), Ok(vec![3; 4096]));
    let _ = server.stop().ok();
    let elsewhere = bed.neighbor();
    assert_eq!(size(&elsewhere, "disk"), 40 * GIB);
    let server = elsewhere.serve("disk").start();
    assert_eq!(server.connect().read(40 * GIB - 4096, 4096), Ok(vec![3; 4096]));
}

fn a_shrunk_volume_has_lost_what_lay_beyond_for_good(store: &StoreUnderTest) {
    let bed = TestBed::new(store);
    bed.create("disk", "64M", &[]);
    let server = bed.serve("disk").start();
    let client = server.connect();
    client.write(8 * MIB - 4096, &[1; 8192]).expect("accepted");
    client.write(60 * MIB, &[2; 4096]).expect("accepted");
    // Writes that are only in the journal count too.
    server.kill();
    attaching(&bed, &["resize", "disk", "8M"]).refused(5, &["--yes-lose-data"]);
    assert_eq!(size(&bed, "disk"), 64 * MIB);
    let _ = attaching(&bed, &["resize", "disk", "8M", "--yes-lose-data"]).ok();
    assert_eq!(size(&bed, "disk"), 8 * MIB);
    let _ = bed.sawmill(&["check", "disk"]).ok();
    let _ = attaching(&bed, &["resize", "disk", "64M"]).ok();
    let server = bed.serve("disk").start();
    let client = server.connect();
    let all = client.read_all().expect("read");
    assert_eq!(all[8 * MIB as usize - 4096..8 * MIB as usize], [1; 4096]);
    assert!(all[8 * MIB as usize..].iter().all(|byte| *byte == 0), "what was cut off came back");
    let _ = server.stop().ok();
}

fn a_served_volume_is_renamed_and_goes_on(store: &StoreUnderTest) {
    let bed = TestBed::new(store);
    bed.create("disk", "16M", &[]);
    let server = bed.serve("disk").start();
    let client = server.connect();
    client.write(0, &[1; 4096]).expect("accepted");
    let _ = bed.sawmill(&["rename", "disk", "other"]).ok();
    client.write(4096, &[2; 4096]).expect("accepted");
    assert_eq!(names(&bed), ["other"]);
    let _ = bed.sawmill(&["wait", "other", "--stored", "--timeout", "60s"]).ok();
    let _ = bed.sawmill(&["resize", "other", "17M"]).ok();
    bed.sawmill(&["delete", "other", "--yes"]).refused(11, &["served"]);
    // Its journal is found under the new name, as it is kept by id.
    client.write(8192, &[3; 4096]).expect("accepted");
    server.kill();
    let server = bed.serve("other").start();
    let client = server.connect();
    for (at, byte) in [(0, 1), (4096, 2), (8192, 3)] {
        assert_eq!(client.read(at, 4096), Ok(vec![byte; 4096]), "at {at}");
    }
    let _ = server.stop().ok();
    assert!(bed.serve("disk").attempt().is_err());
}

#[test]
fn a_rename_to_a_name_that_cannot_be_is_refused() {
    let bed = TestBed::new(&store::folder());
    bed.create("disk", "16M", &[]);
    bed.create("other", "16M", &[]);
    bed.sawmill(&["rename", "disk", "other"]).refused(4, &["other"]);
    bed.sawmill(&["rename", "disk", "disk"]).refused(2, &["the name is already"]);
    bed.sawmill(&["rename", "disk", "s3://bucket/new"]).refused(2, &["s3://bucket/new"]);
    bed.sawmill(&["rename", "none", "new"]).refused(3, &["none"]);
    assert_eq!(names(&bed), ["disk", "other"]);
}

#[test]
fn two_names_of_one_volume_are_shown_kept_and_made_one() {
    let bed = TestBed::new(&store::folder());
    bed.create("disk", "16M", &[]);
    let store = bed.store_folder().expect("a folder");
    let named = store.join("names/disk");
    let record = std::fs::read(named.join("00000000000000000001")).expect("the record");
    let _ = bed.sawmill(&["rename", "disk", "other"]).ok();
    // As if the rename of an older version had died before its last step.
    std::fs::remove_dir_all(named).expect("removed");
    std::fs::create_dir_all(store.join("volumes")).expect("made");
    std::fs::write(store.join("volumes/disk"), &record[72..record.len() - 4]).expect("written");
    assert_eq!(names(&bed), ["disk", "other"]);
    bed.sawmill(&["delete", "disk", "--yes"]).refused(5, &["sawmill rename disk other"]);
    bed.sawmill(&["delete", "other", "--yes"]).refused(5, &["sawmill rename disk other"]);
    let _ = bed.sawmill(&["rename", "disk", "other"]).ok();
    assert_eq!(names(&bed), ["other"]);
    let _ = bed.sawmill(&["delete", "other", "--yes"]).ok();
    assert_eq!(names(&bed), Vec::<String>::new());
}

#[test]
fn a_volume_without_a_name_is_listed_by_its_id_and_named_again() {
    let bed = TestBed::new(&store::folder());
    bed.create("disk", "16M", &[]);
    let store = bed.store_folder().expect("a folder");
    let id =
        bed.sawmill(&["info", "disk", "--json"]).json()["id"].as_str().expect("an id").to_owned();
    std::fs::remove_dir_all(store.join("names")).expect("removed");
    assert_eq!(names(&bed), Vec::<String>::new());
    let all = bed.sawmill(&["list", "--all", "--json"]).json();
    assert_eq!(
        (all[0]["name"].as_str(), all[0]["unnamed"]["deleted"].as_bool()),
        (Some(&*id), Some(false))
    );
    bed.sawmill(&["rename", &id, "disk"]).refused(2, &["--block-size"]);
    let _ = bed.sawmill(&["rename", &id, "disk", "--block-size", "4096"]).ok();
    assert_eq!(names(&bed), ["disk"]);
    let _ = bed.sawmill(&["check", "disk"]).ok();
}
