//! `sawmill verify-crash` as its user meets it: planted faults and lying servers are found, honest
//! ones and Sawmill itself are not blamed, and every finding can be had again.
//!
//! `SAWMILL_CRASH_IMAGES` sets how many images each check looks at.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use sawmill_tests::machine::{require_mount, wait_for};
use sawmill_tests::requires;
use sawmill_tests::store;
use sawmill_tests::test_bed::{CommandOutput, TestBed};
use sawmill_verify::bridge::{FileSystemMount, LoopDevice};
use sawmill_verify::file_system::FileSystem;
use serde_json::Value;

fn images(usual: usize) -> String {
    std::env::var("SAWMILL_CRASH_IMAGES").unwrap_or_else(|_| usual.to_string())
}

fn verify(bed: &TestBed, arguments: &[&str]) -> CommandOutput {
    bed.sawmill(&[&["verify-crash", "--json"], arguments].concat())
}

/// The report of a check that ended as it should: `found` says whether anything must be found.
fn report(finished: &CommandOutput, found: bool) -> Value {
    let CommandOutput { line, stdout, stderr, .. } = finished;
    let report: Value = serde_json::from_str(stdout)
        .unwrap_or_else(|error| panic!("`{line}` printed no JSON: {error}\n{stdout}{stderr}"));
    println!("`{line}`: {} images, {} entries", report["images"], report["entries"]);
    assert_eq!(finished.code, Some(i32::from(found)), "`{line}`:\n{report:#}");
    assert_eq!(report["ok"], !found, "`{line}`:\n{report:#}");
    report
}

fn bed() -> TestBed {
    TestBed::new(&store::folder())
}

#[test]
fn every_planted_fault_is_found_and_an_honest_device_is_not_blamed() {
    let report = report(&verify(&bed(), &["--self-test", "--images", &images(150)]), false);
    let faults = report["faults"].as_array().expect("a list");
    let (healthy, planted): (Vec<&Value>, Vec<&Value>) =
        faults.iter().partition(|row| row["fault"] == "none");
    assert_eq!((healthy.len(), planted.len()), (1, 8), "{report:#}");
    assert!(planted.iter().all(|row| row["findings"].as_u64() > Some(0)), "{report:#}");
    assert_eq!(healthy[0]["findings"], 0, "{report:#}");
}

#[test]
fn honest_servers_of_other_people_are_not_blamed() {
    requires!(require_mount());
    for line in ["nbdkit -f -U {socket} file {backing}", "qemu-nbd -f raw -k {socket} {backing}"] {
        let report = report(&verify(&bed(), &["--device", line, "--images", &images(150)]), false);
        assert!(
            report["flushes"].as_u64() > Some(20),
            "the device passed no flushes on: {report:#}"
        );
    }
}

#[test]
fn a_server_that_ignores_flushes_is_found_and_the_finding_can_be_had_again() {
    requires!(require_mount());
    let bed = bed();
    let line = "qemu-nbd --cache=unsafe -f raw -k {socket} {backing}";
    let keep = bed.path("kept").display().to_string();
    let report =
        report(&verify(&bed, &["--device", line, "--images", "60", "--keep", &keep]), true);
    let finding = &report["findings"][0];
    let cut = finding["cut"].as_str().expect("a cut");
    assert!(finding["repeat"].as_str().is_some_and(|again| again.contains(cut)), "{finding:#}");
    let again = verify(&bed, &["--device", line, "--write-log", &keep, "--cut", cut]);
    let again: Value = serde_json::from_str(&again.stdout).expect("JSON");
    assert_eq!(again["found"], finding["what"]);
}

/// Takes the flushes out of a recording: that of a device which never flushed its disk.
fn forget_flushes(log: &Path) {
    let file = fs::File::options().read(true).write(true).open(log).expect("the log");
    let word = |at: u64| {
        let mut bytes = [0; 8];
        file.read_exact_at(&mut bytes, at).expect("a whole log");
        u64::from_le_bytes(bytes)
    };
    let mut at = 512;
    for _ in 0..word(16) {
        let (sectors, flags) = (word(at + 8), word(at + 16));
        file.write_all_at(&(flags & !1).to_le_bytes(), at + 16).expect("writable");
        at += 512 * (1 + if flags & 4 == 0 { sectors } else { 0 });
    }
}

#[test]
fn sawmill_survives_with_its_journal_kept_lost_stale_and_elsewhere() {
    requires!(require_mount());
    for flush in ["logged", "stored"] {
        let bed = bed();
        let keep = bed.path("kept");
        let at = keep.display().to_string();
        let count = images(60);
        let arguments = ["--sawmill", "--flush", flush, "--images", &count];
        let outcome = report(&verify(&bed, &[&arguments[..], &["--keep", &at]].concat()), false);
        for mode in ["kept", "lost", "stale", "elsewhere"] {
            assert!(outcome["ways"][mode].as_u64() > Some(3), "{outcome:#}");
        }
        // The check of this check: had the journal not been flushed, that would have been found.
        if flush == "logged" {
            forget_flushes(&keep.join("log"));
            let _ = report(&verify(&bed, &[&arguments[..], &["--write-log", &at]].concat()), true);
        }
    }
}

fn keeps_file_systems(kind: &str) {
    requires!(require_mount());
    let count = images(12);
    let arguments = ["--sawmill", "--workload", kind, "--files", "40", "--images", &count];
    let _ = report(&verify(&bed(), &arguments), false);
}

#[test]
fn ext4_on_sawmill_survives_power_loss() {
    keeps_file_systems("ext4");
}

#[test]
fn xfs_on_sawmill_survives_power_loss() {
    keeps_file_systems("xfs");
}

#[test]
fn btrfs_on_sawmill_survives_power_loss() {
    keeps_file_systems("btrfs");
}

#[test]
fn a_disk_is_overwritten_only_when_overwrite_is_given() {
    requires!(require_mount());
    let bed = bed();
    let disk = bed.path("disk");
    fs::File::create(&disk).and_then(|file| file.set_len(512 << 20)).expect("a sparse file");
    let path = disk.display().to_string();
    let arguments =
        ["--target", path.as_str(), "--workload", "ext4", "--files", "20", "--images", "8"];
    let refused = bed.sawmill(&[&["verify-crash"], &arguments[..]].concat());
    refused.refused(5, &["--overwrite", &path]);
    let _ = report(&verify(&bed, &[&arguments[..], &["--overwrite"]].concat()), false);
}

#[test]
fn a_wrong_request_says_what_is_missing() {
    let bed = bed();
    let refused = |arguments: &[&str], words: &[&str]| {
        bed.sawmill(&[&["verify-crash"], arguments].concat()).refused(2, words);
    };
    refused(&[], &["--device", "--self-test"]);
    refused(&["--device", "nbdkit -f file {backing}"], &["{socket}"]);
    refused(&["--sawmill", "--workload", "zfs"], &["zfs", "btrfs"]);
    let crash = ["--target", "/dev/null", "--overwrite", "--crash", "true"];
    refused(&[&crash[..], &["--workload", "ext4"]].concat(), &["--crash", "--workload"]);
    refused(&["--sawmill", "--check", "e2fsck"], &["e2fsck", "{image}"]);
    let zeroes = bed.path("zeroes");
    fs::write(&zeroes, [0; 4096]).expect("a file");
    refused(
        &["--write-log", &zeroes.display().to_string(), "--check", "ext4"],
        &["write log", "magic"],
    );
}

/// What a check said, and how it ended.
fn document(finished: &CommandOutput) -> Value {
    let CommandOutput { line, stdout, stderr, .. } = finished;
    serde_json::from_str(stdout)
        .unwrap_or_else(|error| panic!("`{line}` printed no JSON: {error}\n{stdout}{stderr}"))
}

/// Whoever waits for a server that does not come would wait forever, and the test with it.
struct UnmountGuard(PathBuf);

impl Drop for UnmountGuard {
    fn drop(&mut self) {
        let _ = Command::new("umount").args(["-f", "-l"]).arg(&self.0).output();
    }
}

/// `verify-crash --crash` on a loop device of a volume: each crash is a kill and another `serve`,
/// with `between` done in between.
fn crashed_on_a_loop_device(options: &[&str], between: impl Fn(&TestBed)) -> CommandOutput {
    let bed = bed();
    bed.create("disk", "8M", &[]);
    let unmounted = UnmountGuard(bed.path("mount"));
    let mount = unmounted.0.display().to_string();
    let serve =
        || bed.serve("disk").with(&["--fuse", &mount, "--loop", "--accept-journal-loss"]).start();
    let mut server = serve();
    let doors = bed.sawmill(&["door", "list", "disk", "--json"]).json();
    let mut addresses =
        doors.as_array().expect("a list").iter().filter_map(|door| door["address"].as_str());
    let node = addresses.find(|address| address.starts_with("/dev/loop")).expect("a loop device");
    // The command asks this test to do it, and waits until it is done.
    let (wanted, done) = (bed.path("crash.wanted"), bed.path("crash.done"));
    let crash = format!(
        "touch '{0}'; until [ ! -e '{0}' -a -e '{1}' ]; do cd '{2}' || exit; sleep 0.01; done; rm \
        '{1}'",
        wanted.display(),
        done.display(),
        bed.path("").display()
    );
    let words =
        ["verify-crash", "--json", "--target", node, "--overwrite", "--trim", "--rule", "prefix"];
    let words = [&words[..], &["--crash", &crash], options].concat();
    let mut command = bed.command(&words);
    let mut check =
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
    let mut ended = || check.try_wait().expect("it is ours").is_some();
    while !ended() {
        let what = "a crash is wanted, or the check ends";
        wait_for(what, || (wanted.exists() || ended()).then_some(()));
        if fs::remove_file(&wanted).is_ok() {
            server.kill();
            between(&bed);
            server = serve();
            fs::write(&done, "").expect("room for a file");
        }
    }
    let output = check.wait_with_output().expect("it has ended");
    assert_eq!(server.stop().code, Some(0));
    CommandOutput::new(format!("sawmill {}", words.join(" ")), &output)
}

#[test]
fn a_loop_device_keeps_what_it_answered_when_its_server_is_killed() {
    requires!(require_mount());
    let finished = crashed_on_a_loop_device(&["--rounds", "6", "--requests", "300"], |_| ());
    let report = document(&finished);
    assert_eq!((finished.code, &report["ok"]), (Some(0), &Value::Bool(true)), "{report:#}");
    assert_eq!(report["rounds"], 6, "{report:#}");
    assert_eq!(report["unanswered"], 0, "users of a block device wait: {report:#}");
    assert!(report["answered"].as_u64() >= Some(1800), "{report:#}");
    assert!(report["demanded"].as_u64() > Some(1500), "{report:#}");
}

#[test]
fn a_loop_device_that_lost_what_it_answered_is_found() {
    requires!(require_mount());
    let lose = |bed: &TestBed| {
        let staged = fs::read_dir(bed.memory()).expect("the folder in memory").flatten();
        let all = bed.journals().into_iter().chain(staged.map(|entry| entry.path()));
        all.for_each(|path| fs::remove_file(path).expect("ours"));
    };
    let finished = crashed_on_a_loop_device(&["--rounds", "3", "--requests", "300"], lose);
    let report = document(&finished);
    assert_eq!((finished.code, &report["ok"]), (Some(1), &Value::Bool(false)), "{report:#}");
    assert!(report["found"].is_string() && report["round"].is_u64(), "{report:#}");
}

#[test]
fn a_device_in_use_is_not_overwritten_by_a_check() {
    use rustix::fs::{FlockOperation, flock};
    let bed = bed();
    let disk = fs::File::create(bed.path("disk")).expect("a file");
    disk.set_len(8 << 20).expect("a sparse file");
    flock(&disk, FlockOperation::NonBlockingLockExclusive).expect("it is free");
    let path = bed.path("disk").display().to_string();
    let line = ["verify-crash", "--target", &path, "--crash", "true"];
    bed.sawmill(&line).refused(5, &["--overwrite", &path]);
    bed.sawmill(&[&line[..], &["--overwrite"]].concat()).refused(11, &[&path, "unmount"]);
    requires!(require_mount());
    // A loop device takes the bytes of a file system that is mounted on it from nobody either.
    let other = bed.path("other");
    fs::File::create(&other).and_then(|file| file.set_len(8 << 20)).expect("a sparse file");
    let device = LoopDevice::new(&other).expect("a loop device");
    FileSystem::Ext4.make(device.path()).expect("made");
    let mounted = FileSystemMount::new(device.path(), &bed.path("mounted"), "").expect("mounted");
    let node = device.path().display().to_string();
    let line = ["verify-crash", "--target", &node, "--overwrite", "--crash", "true"];
    bed.sawmill(&line).refused(11, &[&node, "mounted"]);
    mounted.unmount().expect("unmounted");
}

#[test]
fn an_export_is_checked_over_new_connections_and_a_failed_crash_is_reported() {
    let bed = bed();
    bed.create("disk", "8M", &[]);
    let server = bed.serve("disk").start();
    let uri = server.uri();
    let target = ["--target", uri.as_str(), "--overwrite", "--trim", "--rounds", "2", "--crash"];
    let finished = verify(&bed, &[&target[..], &["true"]].concat());
    let report = document(&finished);
    assert_eq!((finished.code, &report["rounds"]), (Some(0), &Value::from(2)), "{report:#}");
    let line = [&["verify-crash"], &target[..], &["echo not here; false"]].concat();
    bed.sawmill(&line).refused(7, &["echo not here; false", "failed", ": not here"]);
}
