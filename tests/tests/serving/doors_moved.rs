//! Doors in a hand-off of which one cannot go along: it is left behind or named, and the others
//! never wait for it.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::process::Command;

use sawmill_tests::machine::require_mount;
use sawmill_tests::test_bed::TestBed;
use sawmill_tests::{requires, store};
use serde_json::Value;

fn kinds(bed: &TestBed) -> Vec<String> {
    let listed = bed.sawmill(&["door", "list", "disk", "--json"]).json();
    let all = listed.as_array().expect("a list").iter();
    all.map(|door| door["kind"].as_str().unwrap_or_default().to_owned()).collect()
}

#[test]
fn a_mount_that_its_user_has_ended_is_left_behind() {
    requires!(require_mount());
    let bed = TestBed::new(&store::folder());
    bed.create("disk", "8M", &[]);
    let mut server = bed.serve("disk").start();
    let client = server.connect();
    let mount = bed.path("mount").display().to_string();
    let file = bed.sawmill(&["door", "add", "disk", "--fuse", &mount]).ok().trim().to_owned();
    let done = Command::new("umount").arg(&mount).status().expect("umount runs");
    assert!(done.success(), "the mount is unused");
    client.write(0, b"before").expect("the other door serves");
    let done = server.hand_off(&bed, "disk");
    assert_eq!(done["lost_doors"], serde_json::json!([]), "it was ended before, by its user");
    assert_eq!(kinds(&bed), ["nbd"]);
    assert_eq!(client.read(0, 6), Ok(b"before".to_vec()));
    // Its place can be used again, by the process that knew nothing of it.
    assert_eq!(bed.sawmill(&["door", "add", "disk", "--fuse", &mount]).ok().trim(), file);
    assert_eq!(&std::fs::read(&file).expect("served")[..6], b"before");
    assert_eq!(server.stop().code, Some(0));
}

#[test]
fn a_mount_that_cannot_be_taken_over_is_named_and_holds_up_no_other_door() {
    requires!(require_mount());
    let bed = TestBed::new(&store::folder());
    bed.create("disk", "8M", &[]);
    let mut server = bed.serve("disk").start();
    let client = server.connect();
    let (folder, moved) = (bed.path("folder"), bed.path("moved"));
    let mount = folder.join("mount").display().to_string();
    std::fs::create_dir(&folder).expect("a folder");
    let _ = bed.sawmill(&["door", "add", "disk", "--fuse", &mount]).ok();
    let file =
        OpenOptions::new().read(true).write(true).open(format!("{mount}/disk")).expect("served");
    file.write_all_at(b"through the file", 0).expect("accepted");
    // The mountpoint is elsewhere now: the next server does not find it.
    std::fs::rename(&folder, &moved).expect("a mount goes with the folder around it");
    let output = bed.sawmill(&["handoff", "disk", "--json"]);
    assert_eq!(output.code, Some(1), "a lost door is no success: {}", output.stderr);
    let done: Value = serde_json::from_str(&output.stdout).expect("an answer");
    server.follow(&done);
    let lost = done["lost_doors"][0].as_str().expect("one is lost");
    assert!(lost.contains("mount") && lost.contains("wait for this server"), "{lost}");
    assert_eq!(kinds(&bed), ["nbd"]);
    assert_eq!(client.read(0, 16), Ok(b"through the file".to_vec()), "the other door serves");
    // The mount holder holds the mount, so its users wait for the door to be opened again.
    let reading = std::thread::spawn(move || {
        let mut bytes = [0; 16];
        file.read_exact_at(&mut bytes, 0).map(|()| bytes)
    });
    std::fs::rename(&moved, &folder).expect("it goes back");
    let _ = bed.sawmill(&["door", "add", "disk", "--fuse", &mount]).ok();
    assert_eq!(&reading.join().expect("no panic").expect("no error"), b"through the file");
    assert_eq!(server.stop().code, Some(0));
}
