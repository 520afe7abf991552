//! The command line as its users meet it: what each command prints, what each refusal says, and
//! that every refusal is one line with the exit code of the documented table.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use sawmill_tests::on_each_store;
use sawmill_tests::store::{self, StoreUnderTest};
use sawmill_tests::test_bed::{TestBed, field};
use serde_json::Value;

on_each_store!(
    a_volume_is_created_listed_shown_checked_and_deleted,
    deleting_a_volume_leaves_its_neighbor_whole_and_its_name_to_an_empty_disk,
    a_name_taken_is_refused_and_a_name_missing_is_not_found,
    info_shows_positions_while_served_and_at_rest,
    wait_returns_when_everything_is_stored,
    inspect_reads_segments_checkpoints_journal_and_recovery,
    check_lists_damage_and_changes_nothing,
    doctor_passes_a_store_that_keeps_the_contract,
    a_served_volume_is_not_deleted_under_its_users,
);

#[test]
fn a_reader_that_goes_away_ends_only_what_prints_and_quietly() {
    let bed = TestBed::new(&store::folder());
    bed.create("disk", "1G", &[]);
    let unread = |arguments: &[&str]| {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        let output = bed.command(arguments).stdout(writer).output().expect("it starts");
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    for arguments in
        [&["list"][..], &["info", "disk", "--json"], &["--help"], &["completions", "bash"]]
    {
        assert_eq!(unread(arguments), (Some(0), String::new()), "{arguments:?}");
    }
    // Its exit code is an answer, which nobody has read.
    let (exit, stderr) = unread(&["check", "disk"]);
    assert_eq!(exit, Some(code::UNAVAILABLE));
    assert!(stderr.contains("cannot write to standard output"), "{stderr}");
}

/// The documented table of exit codes.
mod code {
    pub(crate) const NEGATIVE: i32 = 1;
    pub(crate) const USAGE: i32 = 2;
    pub(crate) const NOT_FOUND: i32 = 3;
    pub(crate) const EXISTS: i32 = 4;
    pub(crate) const UNAVAILABLE: i32 = 7;
    pub(crate) const DENIED: i32 = 8;
    pub(crate) const IN_USE: i32 = 11;
}

/// All files below a folder, with their bytes; sockets without.
fn files(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut folders = vec![folder.to_owned()];
    let mut files = BTreeMap::new();
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).expect("a folder").flatten() {
            let (path, kind) = (entry.path(), entry.file_type().expect("an entry has a type"));
            if kind.is_dir() {
                folders.push(path);
            } else if kind.is_file() {
                let bytes = std::fs::read(&path).expect("a file can be read");
                files.insert(path, bytes);
            } else {
                files.insert(path, Vec::new());
            }
        }
    }
    files
}

fn unsigned(document: &Value, name: &str) -> u64 {
    let found = field(document, name).and_then(Value::as_u64);
    found.unwrap_or_else(|| panic!("no number {name} in {document:#}"))
}

fn a_volume_is_created_listed_shown_checked_and_deleted(store: &StoreUnderTest) {
    let bed = TestBed::new(store);
    let document =
        bed.sawmill(&["create", "disk", "--size", "1.5G", "--flush", "stored", "--json"]).json();
    assert_eq!(unsigned(&document, "size_bytes"), 3 << 29);
    bed.create("other", "10T", &["--block-size", "512", "--segment-bytes", "16M"]);
    let listed = bed.sawmill(&["list", "--json"]).json();
    let names: Vec<&str> =
        listed.as_array().expect("a list").iter().filter_map(|v| v["name"].as_str()).collect();
    assert_eq!(names, ["disk", "other"]);
    let listed = bed.sawmill(&["list"]).ok();
    assert!(
        listed.contains("disk") && listed.contains("1.50 GiB") && listed.contains("10 TiB"),
        "{listed}"
    );
    let info = bed.info("other");
    assert_eq!((unsigned(&info, "block_bytes"), unsigned(&info, "segment_bytes")), (512, 16 << 20));
    assert!(bed.sawmill(&["info", "disk"]).ok().contains("stored"));
    let checked = bed.sawmill(&["check", "disk", "--json"]).json();
    assert_eq!(checked["ok"], true);
    let url = format!("{}/disk", bed.store_url());
    assert_eq!(unsigned(&bed.info(&url), "size_bytes"), 3 << 29);
    bed.sawmill(&["delete", "disk"]).refused(code::USAGE, &["--yes"]);
    let deleted = bed.sawmill(&["delete", "disk", "--yes", "--json"]).json();
    assert_eq!(deleted["deleted"], "disk");
    bed.sawmill(&["info", "disk"]).refused(code::NOT_FOUND, &["disk"]);
    let listed = bed.sawmill(&["list", "--store", bed.store_url(), "--json"]).json();
    assert_eq!(listed.as_array().map(Vec::len), Some(1));
}

fn deleting_a_volume_leaves_its_neighbor_whole_and_its_name_to_an_empty_disk(
    store: &StoreUnderTest,
) {
    let bed = TestBed::new(store);
    for (name, byte) in [("disk", 1), ("disk2", 2)] {
        bed.create(name, "4M", &["--segment-bytes", "256K"]);
        let server = bed.serve(name).start();
        server.connect().write(0, &vec![byte; 4 << 20]).expect("accepted");
        let _ = server.stop().ok();
    }
    let _ = bed.sawmill(&["delete", "disk", "--yes"]).ok();
    bed.create("disk", "4M", &["--segment-bytes", "256K"]);
    // Another machine has nothing but the store to go by.
    let elsewhere = bed.neighbor();
    for (name, byte) in [("disk", 0), ("disk2", 2)] {
        let server = elsewhere.serve(name).start();
        let image = server.connect().read_all().expect("readable");
        assert!(
            image.len() == 4 << 20 && image.iter().all(|found| *found == byte),
            "{name} is not {byte}s"
        );
        let _ = server.stop().ok();
    }
}

fn a_name_taken_is_refused_and_a_name_missing_is_not_found(store: &StoreUnderTest) {
    let bed = TestBed::new(store);
    bed.create("disk", "1M", &[]);
    bed.sawmill(&["create", "disk", "--size", "1M"]).refused(code::EXISTS, &["disk", "already"]);
    for words in [
        &["info", "nodisk"][..],
        &["delete", "nodisk", "--yes"],
        &["check", "nodisk"],
        &["wait", "nodisk", "--stored"],
        &["inspect", "recovery", "nodisk"],
        &["serve", "nodisk"],
    ] {
        bed.sawmill(words).refused(code::NOT_FOUND, &["nodisk"]);
    }
    // A volume that is there, but not served here: nothing to wait for.
    bed.sawmill(&["wait", "disk", "--stored"]).refused(code::NOT_FOUND, &["serve"]);
}

fn info_shows_positions_while_served_and_at_rest(store: &StoreUnderTest) {
    let bed = TestBed::new(store);
    bed.create("disk", "64M", &[]);
    let server = bed.serve("disk").start();
    let client = server.connect();
    client.write(0, &[1; 1 << 20]).expect("accepted");
    let (accepted, logged, stored) = {
        let info = bed.info("disk");
        (unsigned(&info, "accepted"), unsigned(&info, "logged"), unsigned(&info, "stored"))
    };
    assert!(
        accepted >= 1 << 20 && accepted >= logged && logged >= stored,
        "{accepted} {logged} {stored}"
    );
    client.flush().expect("flushed");
    let info = bed.info("disk");
    assert!(unsigned(&info, "logged") >= accepted, "a flush logs all that was accepted: {info:#}");
    assert_eq!(unsigned(&info, "pid"), u64::from(server.pid()), "info names the attached process");
    assert!(unsigned(&info, "epoch") >= 1);
    let _ = server.stop().ok();
    let info = bed.info("disk");
    assert_eq!(unsigned(&info, "live_bytes"), 1 << 20, "{info:#}");
    assert!(unsigned(&info, "segments") >= 1 && unsigned(&info, "extents") >= 1, "{info:#}");
}

fn wait_returns_when_everything_is_stored(store: &StoreUnderTest) {
    let bed = TestBed::new(store);
    bed.create("disk", "64M", &[]);
    let server = bed.serve("disk").start();
    let client = server.connect();
    client.write(0, &[1; 1 << 20]).expect("accepted");
    let _ = bed.sawmill(&["wait", "disk", "--logged", "--timeout", "60s"]).ok();
    let info = bed.info("disk");
    assert!(unsigned(&info, "logged") >= 1 << 20, "{info:#}");
    let waited = bed.sawmill(&["wait", "disk", "--stored", "--timeout", "30s", "--json"]).json();
    assert_eq!(waited["reached"], true);
    let info = bed.info("disk");
    assert!(unsigned(&info, "stored") >= 1 << 20, "{info:#}");
    server.kill();
    // What `wait --stored` promised survives the loss of the machine.
    let elsewhere = bed.neighbor();
    let server = elsewhere.serve("disk").with(&["--accept-journal-loss"]).start();
    assert_eq!(server.connect().read(0, 1 << 20), Ok(vec![1; 1 << 20]));
}

fn inspect_reads_segments_checkpoints_journal_and_recovery(store: &StoreUnderTest) {
    let bed = TestBed::new(store);
    bed.create("disk", "64M", &["--segment-bytes", "256K"]);
    let server = bed.serve("disk").start();
    server.connect().write(0, &[1; 1 << 20]).expect("accepted");
    let _ = server.stop().ok();
    let journal = bed.journals().pop().expect("a journal in the state folder");
    let journal = journal.display().to_string();
    let before = std::fs::read(&journal).expect("readable");
    for words in [
        &["inspect", "checkpoint", "disk", "--json"][..],
        &["inspect", "recovery", "disk", "--json"],
        &["inspect", "journal", &journal, "--json"],
        &["inspect", "segment", "disk", "1", "--json"],
    ] {
        let document = bed.sawmill(words).json();
        assert!(document.is_object() || document.is_array(), "{document}");
    }
    assert!(std::fs::read(&journal).expect("readable") == before, "looking changed the journal");
    bed.sawmill(&["inspect", "segment", "disk", "999999"]).refused(code::NOT_FOUND, &["999999"]);
}

fn check_lists_damage_and_changes_nothing(store: &StoreUnderTest) {
    let bed = TestBed::new(store);
    bed.create("disk", "64M", &["--segment-bytes", "256K"]);
    let server = bed.serve("disk").start();
    server.connect().write(0, &[0x77; 1 << 20]).expect("accepted");
    let _ = server.stop().ok();
    let _ = bed.sawmill(&["check", "disk"]).ok();
    let Some(folder) = bed.store_folder() else {
        return; // Bits are flipped in a folder only; a MinIO has checksums of its own.
    };
    let victim = biggest_file(folder);
    let mut bytes = std::fs::read(&victim).expect("an object");
    let middle = bytes.len() / 2;
    bytes[middle] ^= 0x10;
    std::fs::write(&victim, &bytes).expect("an object can be damaged");
    let checked = bed.sawmill(&["check", "disk", "--json"]);
    assert_eq!(checked.code, Some(code::NEGATIVE), "{}{}", checked.stdout, checked.stderr);
    let report: Value = serde_json::from_str(&checked.stdout).expect("JSON also with damage");
    let object = report["damage"][0]["object"].as_str().expect("the damaged object is named");
    assert!(victim.to_string_lossy().ends_with(object), "{object} is not {}", victim.display());
    assert!(std::fs::read(&victim).expect("still there") == bytes, "check changed the object");
    // A read of the damaged range fails; it never returns the wrong bytes. The rest is readable.
    bed.lose_state();
    let server = bed.serve("disk").start();
    let client = server.connect();
    let answers: Vec<_> = (0..16_u64).map(|n| client.read(n << 16, 1 << 16)).collect();
    assert!(answers.iter().any(Result::is_err), "damage was served");
    assert!(
        answers.iter().flatten().flatten().all(|&byte| byte == 0x77),
        "wrong bytes were served"
    );
    assert!(
        answers.iter().filter(|answer| answer.is_ok()).count() >= 11,
        "one frame or segment is damaged"
    );
}

fn biggest_file(folder: &Path) -> PathBuf {
    let lengths = files(folder).into_iter().map(|(path, bytes)| (bytes.len(), path));
    lengths.max().expect("the store has objects").1
}

#[test]
fn commands_that_only_read_change_neither_the_store_nor_the_state_folder() {
    let bed = TestBed::new(&store::folder());
    bed.create("disk", "8M", &["--segment-bytes", "256K", "--retention", "1h"]);
    let sizes = ["--journal-bytes", "16M", "--cache-bytes", "16M"];
    let server = bed.serve("disk").with(&sizes).start();
    server.connect().write(0, &[7; 1 << 20]).expect("accepted");
    let _ = bed.sawmill(&["snapshot", "create", "disk", "one"]).ok();
    // Killed, so that there is a journal to replay, which only serving may do.
    server.connect().write(4096, &[8; 4096]).expect("accepted");
    server.kill();
    let journal = bed.journals().pop().expect("a journal").display().to_string();
    let commands: [(&[&str], i32); 9] = [
        (&["info", "disk"], 0),
        (&["list"], 0),
        (&["log", "disk"], 0),
        (&["snapshot", "list", "disk"], 0),
        (&["check", "disk"], code::NEGATIVE),
        (&["inspect", "checkpoint", "disk"], 0),
        (&["inspect", "recovery", "disk"], 0),
        (&["inspect", "journal", &journal], 0),
        (&["inspect", "segment", "disk", "1"], 0),
    ];
    for damage in [false, true] {
        if damage {
            let object = biggest_file(&bed.path("store"));
            let mut bytes = std::fs::read(&object).expect("an object");
            let middle = bytes.len() / 2;
            bytes[middle] ^= 1;
            std::fs::write(&object, bytes).expect("an object can be damaged");
        }
        let before = files(&bed.path(""));
        for (words, code_with_damage) in commands {
            let output = bed.sawmill(words);
            let expected = if damage { code_with_damage } else { 0 };
            assert_eq!(output.code, Some(expected), "{words:?}: {}", output.stderr);
            let after = files(&bed.path(""));
            let changed: Vec<_> = before.keys().chain(after.keys()).collect();
            let changed: BTreeSet<_> =
                changed.into_iter().filter(|path| before.get(*path) != after.get(*path)).collect();
            assert!(changed.is_empty(), "{words:?} changed {changed:?}");
        }
    }
}

fn doctor_passes_a_store_that_keeps_the_contract(store: &StoreUnderTest) {
    let bed = TestBed::new(store);
    bed.create("disk", "1M", &[]);
    let output = bed.sawmill(&["doctor", "--json"]);
    let report: Value = serde_json::from_str(&output.stdout).expect("doctor prints JSON");
    let text = report.to_string();
    assert!(text.contains("conditional"), "the conditional create is probed: {text}");
    for says in ["a new journal gets ", "cache takes up to ", "for all volumes of one `serve`"] {
        assert!(text.contains(says), "{says}: {text}");
    }
    assert!(output.code == Some(0) || output.code == Some(code::NEGATIVE), "{}", output.stderr);
}

fn a_served_volume_is_not_deleted_under_its_users(store: &StoreUnderTest) {
    let bed = TestBed::new(store);
    bed.create("disk", "1M", &[]);
    let server = bed.serve("disk").start();
    bed.sawmill(&["delete", "disk", "--yes"]).refused(code::IN_USE, &["disk", "served"]);
    // A second server of the same volume on the same machine would use the same journal.
    let socket = format!("unix:{}", bed.path("second.sock").display());
    let Err(refusal) = bed.serve("disk").at(&socket).attempt() else {
        panic!("two servers share one journal");
    };
    refusal.refused(code::IN_USE, &["disk"]);
    assert_eq!(server.connect().read(0, 512), Ok(vec![0; 512]), "the first server was disturbed");
    let _ = server.stop().ok();
    let _ = bed.sawmill(&["delete", "disk", "--yes"]).ok();
}

#[test]
fn a_delete_that_another_machine_began_ends_without_the_state_folder_here() {
    let bed = TestBed::new(&store::folder());
    bed.create("disk", "1M", &[]);
    let server = bed.serve("disk").start();
    server.connect().write(0, &[7; 4096]).expect("it is served");
    let _ = server.stop().ok();
    let states = || std::fs::read_dir(bed.path("state/sawmill")).expect("a folder").count();
    let before = states();
    let segment = biggest_file(&bed.path("store"));
    let bytes = std::fs::read(&segment).expect("a segment");
    // Another machine deletes the volume and dies before the last object is gone.
    let mut other = bed.command(&["delete", "disk", "--yes"]);
    let deleted = other.env("XDG_STATE_HOME", bed.path("elsewhere")).output();
    assert!(deleted.expect("the binary starts").status.success());
    std::fs::create_dir_all(segment.parent().expect("a folder")).expect("a folder");
    std::fs::write(&segment, bytes).expect("the segment is back");
    let output = bed.sawmill(&["delete", "disk", "--yes"]).ok();
    assert!(output.contains("(1 objects"), "{output}");
    assert_eq!(states(), before - 1, "the journal of a volume that is gone is of no use");
}

#[test]
fn create_says_what_serving_takes_on_this_machine() {
    let bed = TestBed::new(&store::folder());
    let output = bed.sawmill(&["create", "disk", "--size", "1M"]).ok();
    let state = bed.path("state").display().to_string();
    for says in ["created disk", "--journal-bytes", "--cache-bytes", "iB in ", &state, "share"] {
        assert!(output.contains(says), "{says}: {output}");
    }
    assert_eq!(output.lines().count(), 2, "{output}");
}

#[test]
fn a_wrong_command_line_is_one_line_that_says_what_to_do() {
    let bed = TestBed::new(&store::folder());
    let lines: &[(&[&str], &[&str])] = &[
        (&["create", "disk", "--size", "10G", "--color"], &["--color", "--help"]),
        (&["create", "disk"], &["--size"]),
        (&["create", "disk", "--size", "ten"], &["'ten'", "10G"]),
        (&["create", "disk", "--size", "0"], &["size"]),
        (&["create", "disk", "--size", "1000"], &["4096"]),
        (&["create", "disk", "--size", "100000T"], &["64"]),
        (&["create", "disk", "--size", "1M", "--block-size", "1000"], &["512", "4096"]),
        (&["create", "disk", "--size", "1M", "--segment-bytes", "3M"], &["power of two"]),
        (
            &["create", "disk", "--size", "1M", "--flush", "sometimes"],
            &["logged", "stored", "weak"],
        ),
        (&["create", "a/b", "--size", "1M"], &["file:///"]),
        (&["create", "ftp://host/disk", "--size", "1M"], &["ftp"]),
        (&["info", "s3:///disk"], &["s3"]),
        (&["serve"], &["VOL"]),
        (&["serve", "disk", "--nbd", "carrier:pigeon"], &["unix:", "tcp:"]),
        (&["wait", "disk", "--stored", "--timeout", "30"], &["30s"]),
        (&["explode"], &["explode"]),
    ];
    for (line, words) in lines {
        bed.sawmill(line).refused(code::USAGE, words);
    }
    assert!(!bed.path("store").join("volumes").exists(), "a refused command made something");
}

#[test]
fn a_journal_that_is_too_small_is_refused_with_the_least_size() {
    let bed = TestBed::new(&store::folder());
    bed.create("disk", "1G", &[]);
    let Err(refusal) = bed.serve("disk").with(&["--journal-bytes", "1M"]).attempt() else {
        panic!("a journal of 1 MiB cannot hold segments of 8 MiB");
    };
    refusal.refused(code::USAGE, &["journal", "32"]);
    assert_eq!(bed.journals(), Vec::<std::path::PathBuf>::new(), "the refused journal was made");
}

#[test]
fn wrong_credentials_and_a_missing_bucket_say_so() {
    let bed = TestBed::new(&store::minio());
    let denied =
        bed.command(&["list"]).env("AWS_SECRET_ACCESS_KEY", "wrong").output().expect("it starts");
    sawmill_tests::test_bed::CommandOutput::new("sawmill list".into(), &denied)
        .refused(code::DENIED, &["secret key"]);
    bed.sawmill(&["list", "--store", "s3://no-such-bucket/x"])
        .refused(code::DENIED, &["no-such-bucket"]);
    let reserved = sawmill_tests::store::ReservedAddress::new();
    let nobody = reserved.address().to_string();
    let away = bed
        .command(&["list", "--log", "error"])
        .env("AWS_ENDPOINT_URL", format!("http://{nobody}"))
        .output()
        .expect("it starts");
    let away = sawmill_tests::test_bed::CommandOutput::new("sawmill list".into(), &away);
    away.refused(code::UNAVAILABLE, &[nobody.as_str()]);
}

#[test]
fn an_endpoint_beyond_this_machine_without_encryption_is_warned_of() {
    let store = store::minio();
    let bed = TestBed::new(&store);
    let run = |arguments: &[&str], host: &str| {
        let mut command = bed.command(arguments);
        for (name, value) in store.environment() {
            // The server listens here; only the address looks like another machine's.
            command.env(name, value.replace("127.0.0.1", host));
        }
        command.output().expect("it starts")
    };
    let log = |output: &std::process::Output| String::from_utf8_lossy(&output.stderr).into_owned();
    let checks = |output: &std::process::Output| {
        let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        let checks = report["machine_checks"].as_array().expect("a list").clone();
        checks.into_iter().filter(|check| check["ok"] == false).map(|check| check.to_string())
    };
    let (listed, doctor) = (run(&["list"], "0.0.0.0"), run(&["doctor", "--json"], "0.0.0.0"));
    assert!(listed.status.success(), "{}", log(&listed));
    assert!(log(&listed).contains("without encryption"), "{}", log(&listed));
    assert!(checks(&doctor).any(|check| check.contains("without encryption")));
    let (listed, doctor) = (run(&["list"], "127.0.0.1"), run(&["doctor", "--json"], "127.0.0.1"));
    assert_eq!(log(&listed), "", "on this machine nobody is on the way");
    assert!(!checks(&doctor).any(|check| check.contains("without encryption")));
}

#[test]
fn help_is_an_answer_and_names_every_command() {
    let bed = TestBed::new(&store::folder());
    let help = bed.sawmill(&["--help"]).ok();
    for command in
        ["create", "serve", "list", "info", "delete", "wait", "inspect", "check", "doctor"]
    {
        assert!(help.contains(command), "{command} is not in the help");
        assert!(bed.sawmill(&[command, "--help"]).ok().contains("Usage:"), "{command} has no help");
    }
    assert!(bed.sawmill(&["--version"]).ok().starts_with("sawmill "));
}
