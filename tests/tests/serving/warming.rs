//! Warming a cache as its users do: by hand, and by a boot set that every clone of a base fetches
//! first.
//!
//! Not here: which frames are fetched and at what cost (the engine's own tests).

use std::fs;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::Arc;

use rustix::process::{Pid, Signal, kill_process};
use sawmill_tests::machine::wait_for;
use sawmill_tests::on_each_store;
use sawmill_tests::proxy::{Fault, Proxy, Rule, Verb};
use sawmill_tests::server::Server;
use sawmill_tests::store::{StoreUnderTest, shared_minio};
use sawmill_tests::test_bed::{CommandOutput, TestBed, field};
use serde_json::Value;

on_each_store!(
    a_warmed_volume_is_read_without_its_store,
    a_clone_fetches_what_the_start_of_another_read,
    what_cannot_be_warmed_or_recorded_is_refused_with_a_reason,
);

mod code {
    pub(super) const NEGATIVE: i32 = 1;
    pub(super) const USAGE: i32 = 2;
    pub(super) const NOT_FOUND: i32 = 3;
    pub(super) const REFUSED: i32 = 5;
    pub(super) const FENCED: i32 = 6;
}

const MIB: u64 = 1 << 20;
const ADMIN: [&str; 2] = ["--admin", "127.0.0.1:0"];

fn number(document: &Value, name: &str) -> u64 {
    let value = field(document, name).and_then(Value::as_u64);
    value.unwrap_or_else(|| panic!("no {name} in {document}"))
}

/// A volume with 8 MiB, each MiB of one byte, and at rest.
fn base(store: &StoreUnderTest) -> TestBed {
    let bed = TestBed::new(store);
    bed.create("base", "64M", &["--segment-bytes", "1M"]);
    let server = bed.serve("base").start();
    let client = server.connect();
    for part in 0..8 {
        client.write(part * MIB, &vec![1 + part as u8; MIB as usize]).expect("accepted");
    }
    let _ = server.stop().ok();
    bed
}

fn clone(bed: &TestBed, name: &str) {
    let _ = bed.sawmill(&["clone", "base", name]).ok();
}

/// Whether the range is what the base has there.
fn read(server: &Server, at: u64, length: u64) {
    let bytes = server.connect().read(at, length as u32).expect("readable");
    assert!(bytes.iter().all(|byte| *byte == 1 + (at / MIB) as u8), "at {at}");
}

/// Records a start that reads 256 KiB at 3 MiB and then 64 KiB at 1 MiB.
fn record(bed: &TestBed, server: &Server, volume: &str) -> Value {
    let recording = Recording::begin(bed, volume);
    wait_for("the recording begins", || {
        read(server, 3 * MIB, 256 << 10);
        let status = server.connect().read(MIB, 64 << 10).expect("readable");
        (status.len() == 64 << 10).then_some(())
    });
    recording.end().json()
}

/// `sawmill boot-set record`, until it is told to end.
struct Recording(std::process::Child);

impl Recording {
    fn begin(bed: &TestBed, volume: &str) -> Self {
        let words = ["boot-set", "record", volume, "--for", "1h", "--json", "--log", "debug"];
        let mut command = bed.command(&words);
        let mut child =
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
        // It says when the server has begun.
        let mut first = String::new();
        let stderr = child.stderr.take().expect("a pipe");
        std::io::BufRead::read_line(&mut std::io::BufReader::new(stderr), &mut first)
            .expect("a line");
        assert!(first.contains("recording"), "{first}");
        Recording(child)
    }

    fn end(self) -> CommandOutput {
        let pid = Pid::from_raw(self.0.id().cast_signed()).expect("a process");
        kill_process(pid, Signal::INT).expect("it runs");
        let output = self.0.wait_with_output().expect("it ends");
        CommandOutput::new("sawmill boot-set record".into(), &output)
    }
}

/// What a server logs when it has fetched a boot set.
fn fetched_line(server: &Server) -> String {
    wait_for("a boot set is fetched", || {
        let log = server.stderr();
        log.lines().find(|line| line.contains("boot set: ")).map(str::to_owned)
    })
}

fn cached_bytes(server: &Server) -> u64 {
    number(&server.status()["cache"], "bytes")
}

fn reads_store(server: &Server) -> u64 {
    number(&server.status(), "reads_store")
}

fn a_warmed_volume_is_read_without_its_store(store: &StoreUnderTest) {
    let bed = base(store);
    clone(&bed, "disk");
    let other = bed.neighbor();
    let server = other.serve("disk").with(&ADMIN).start();
    let part = other.sawmill(&["warm", "disk", "2M+1M", "1M+512K", "--json"]).json();
    assert_eq!((number(&part, "fetched_bytes"), number(&part, "present_bytes")), (3 * MIB / 2, 0));
    let small = other.sawmill(&["warm", "disk", "4M+4M", "--bytes-max", "1M", "--json"]).json();
    assert_eq!((number(&small, "fetched_bytes"), number(&small, "left_bytes")), (MIB, 3 * MIB));
    let text = other.sawmill(&["warm", "disk"]).ok();
    assert_eq!(text, "disk: 5.50 MiB fetched, 2.50 MiB already cached, 0 B left out\n");
    for at in 0..8 {
        read(&server, at * MIB, MIB);
    }
    assert_eq!(reads_store(&server), 0);
    let _ = server.stop().ok();
    // A reader beside it has a cache of its own.
    let cache = other.path("small").display().to_string();
    let small = ["--read-only", "--cache", &cache, "--cache-bytes", "4M"];
    let reader = other.serve("disk").with(&small).start();
    let all = other.sawmill(&["warm", "disk", "--json"]).json();
    let (fetched, left) = (number(&all, "fetched_bytes"), number(&all, "left_bytes"));
    assert!(left >= 4 * MIB && fetched > 0, "four of eight fit: {all}");
    assert_eq!(fetched + left + number(&all, "present_bytes"), 8 * MIB);
    let _ = reader.stop().ok();
}

fn a_clone_fetches_what_the_start_of_another_read(store: &StoreUnderTest) {
    let bed = base(store);
    clone(&bed, "first");
    let server = bed.serve("first").start();
    let recorded = record(&bed, &server, "first");
    assert_eq!((number(&recorded, "bytes"), number(&recorded, "ranges")), (320 << 10, 2));
    let _ = server.stop().ok();
    clone(&bed, "second");
    let shown = bed.sawmill(&["boot-set", "show", "second", "--json"]).json();
    assert_eq!(shown["ranges"], serde_json::json!([[3 * MIB, 256 << 10], [MIB, 64 << 10]]));
    assert_eq!(shown["kept_with"], recorded["kept_with"]);

    // Two servers at once, on machines that have nothing.
    let (one, two) = (bed.neighbor(), bed.neighbor());
    let servers = [one.serve("first").with(&ADMIN), two.serve("second").with(&ADMIN)];
    let servers = servers.map(|server| server.start());
    for server in &servers {
        assert!(fetched_line(server).contains("320 KiB fetched, 0 B already cached, 0 B left out"));
        assert_eq!(cached_bytes(server), 320 << 10);
        read(server, 3 * MIB, 256 << 10);
        read(server, MIB, 64 << 10);
        assert_eq!(reads_store(server), 0);
    }
    // A write goes over what was fetched.
    let client = servers[1].connect();
    client.write(MIB, &[77; 4096]).expect("accepted");
    assert_eq!(client.read(MIB, 4096).expect("readable"), vec![77; 4096]);
    let [first, second] = servers;
    let _ = (first.stop().ok(), second.stop().ok());

    // One server of both fetches it once; a cache that has it is not filled again.
    let server = bed.neighbor();
    let both = server.serve("first").and("second").with(&ADMIN).start();
    wait_for("both are looked at", || {
        (both.stderr().matches("boot set: ").count() == 2).then_some(())
    });
    // With what the second wrote itself.
    assert_eq!(cached_bytes(&both), 324 << 10);
    let log = both.stderr();
    assert!(log.contains("4 KiB fetched, 320 KiB already cached"), "{log}");
    let by_hand = server.sawmill(&["warm", "second", "--boot-set", "--json"]).json();
    assert!(number(&by_hand, "present_bytes") > 0 && number(&by_hand, "left_bytes") == 0);
    let _ = both.stop().ok();

    // Nothing is fetched where nobody wants it.
    let third = bed.neighbor();
    let frugal = third.serve("second").with(&ADMIN).with(&["--boot-set-bytes", "64K"]).start();
    assert!(fetched_line(&frugal).contains("64 KiB fetched"), "{}", frugal.stderr());
    assert_eq!(cached_bytes(&frugal), 64 << 10);
    let _ = frugal.stop().ok();
    let quiet = third.serve("second").with(&ADMIN).with(&["--boot-set-bytes", "0"]).start();
    read(&quiet, 7 * MIB, 4096);
    assert!(!quiet.stderr().contains("boot set"), "{}", quiet.stderr());
    let _ = quiet.stop().ok();
    let _ = bed.sawmill(&["boot-set", "delete", "first"]).ok();
    bed.sawmill(&["boot-set", "show", "second"]).refused(code::NOT_FOUND, &["no boot set"]);
    bed.sawmill(&["boot-set", "delete", "second"]).refused(code::NOT_FOUND, &["no boot set"]);
}

fn what_cannot_be_warmed_or_recorded_is_refused_with_a_reason(store: &StoreUnderTest) {
    let bed = base(store);
    for words in [&["warm", "base"][..], &["boot-set", "record", "base", "--for", "0s"]] {
        bed.sawmill(words).refused(code::NOT_FOUND, &["is not served on this machine"]);
    }
    bed.sawmill(&["warm", "nothing"]).refused(code::NOT_FOUND, &["nothing"]);
    bed.sawmill(&["warm", "base", "4K"]).refused(code::USAGE, &["OFFSET+LENGTH"]);
    bed.sawmill(&["boot-set", "show", "base"]).refused(code::NOT_FOUND, &["boot-set record base"]);

    let bare = bed.serve("base").with(&["--cache-bytes", "0"]).start();
    bed.sawmill(&["warm", "base"]).refused(code::REFUSED, &["without a read cache"]);
    let _ = bare.stop().ok();

    let server = bed.serve("base").start();
    bed.sawmill(&["warm", "base", "60M+8M"]).refused(code::USAGE, &["beyond the end"]);
    bed.sawmill(&["warm", "base", "--boot-set"]).refused(code::NOT_FOUND, &["no boot set"]);
    bed.sawmill(&["boot-set", "record", "base", "--for", "0s"])
        .refused(code::NEGATIVE, &["nothing was read from the store or cache of base"]);
    let recording = Recording::begin(&bed, "base");
    read(&server, MIB, 4096);
    // Fenced by a server elsewhere: it warms nothing more, and what it saw becomes no boot set.
    let other = bed.neighbor();
    let next = other.serve("base").with(&["--accept-journal-loss"]).start();
    wait_for("it learns that it was fenced", || {
        let refused = bed.sawmill(&["warm", "base"]);
        (refused.code == Some(code::FENCED)).then_some(())
    });
    let ended = recording.end();
    assert_eq!(ended.code, Some(code::FENCED), "{ended:?}");
    bed.sawmill(&["boot-set", "show", "base"]).refused(code::NOT_FOUND, &["no boot set"]);
    let _ = next.stop().ok();
    server.kill();

    let reader = other.serve("base").with(&["--read-only"]).start();
    other
        .sawmill(&["boot-set", "record", "base", "--for", "0s"])
        .refused(code::REFUSED, &["read-only"]);
    let _ = reader.stop().ok();
}

/// A base whose boot set was recorded on a clone, and the set's file.
fn recorded() -> (TestBed, PathBuf) {
    let bed = base(&StoreUnderTest::Folder);
    clone(&bed, "first");
    let server = bed.serve("first").start();
    let recorded = record(&bed, &server, "first");
    let _ = server.stop().ok();
    let id = recorded["kept_with"].as_str().expect("it was kept");
    let folder = bed.store_folder().expect("a folder").join(id).join("boot");
    let file = fs::read_dir(folder).expect("a set").flatten().next().expect("a set").path();
    (bed, file)
}

#[test]
fn a_set_of_many_short_ranges_fetches_no_more_frames_than_its_bound() {
    let bed = base(&StoreUnderTest::Folder);
    clone(&bed, "first");
    let server = bed.serve("first").start();
    let recording = Recording::begin(&bed, "first");
    for frame in 0..16 {
        let at = frame * 2 * (64 << 10);
        assert_eq!(server.connect().read(at, 512).expect("readable").len(), 512);
    }
    assert!(number(&recording.end().json(), "bytes") <= 128 << 10);
    let _ = server.stop().ok();
    let other = bed.neighbor();
    let frugal = other.serve("first").with(&ADMIN).with(&["--boot-set-bytes", "128K"]).start();
    assert!(fetched_line(&frugal).contains("128 KiB fetched"), "{}", frugal.stderr());
    assert_eq!(cached_bytes(&frugal), 128 << 10);
    let _ = frugal.stop().ok();
}

#[test]
fn a_damaged_boot_set_is_one_line_in_the_log_and_delays_nothing() {
    let (bed, file) = recorded();
    let whole = fs::read(&file).expect("readable");
    let hostile = [&whole[..whole.len() - 1], &[0; 100], &vec![0xFF; 8 << 20][..]];
    for bytes in hostile {
        // An object of a folder may be read-only.
        fs::remove_file(&file).expect("it is there");
        fs::write(&file, bytes).expect("writable");
        let other = bed.neighbor();
        let server = other.serve("first").with(&ADMIN).start();
        read(&server, 3 * MIB, 256 << 10);
        wait_for("the set is looked at", || server.stderr().contains("is ignored").then_some(()));
        let log = server.stderr();
        assert_eq!(log.matches("is ignored").count(), 1, "{log}");
        assert!(!log.contains("already cached"), "{log}");
        let _ = server.stop().ok();
    }
    assert_eq!(
        field(&bed.sawmill(&["check", "base", "--json"]).json(), "damage"),
        Some(&Value::Array(vec![]))
    );
}

#[test]
fn a_boot_set_outlives_the_name_of_its_base_and_goes_with_the_last_clone() {
    let (bed, file) = recorded();
    clone(&bed, "second");
    let _ = bed.sawmill(&["delete", "base", "--yes"]).ok();
    let other = bed.neighbor();
    let server = other.serve("second").with(&ADMIN).start();
    assert!(fetched_line(&server).contains("320 KiB fetched"));
    read(&server, 3 * MIB, 256 << 10);
    let _ = server.stop().ok();
    assert!(file.exists());
    for name in ["first", "second"] {
        let _ = bed.sawmill(&["delete", name, "--yes"]).ok();
    }
    assert!(!file.exists());
}

#[test]
fn a_store_put_back_with_an_older_boot_set_shows_nothing_old() {
    let (bed, file) = recorded();
    let server = bed.serve("first").start();
    let older = fs::read(&file).expect("readable");
    let recording = Recording::begin(&bed, "first");
    read(&server, 5 * MIB, 4096);
    let _ = recording.end().ok();
    assert!(!file.exists(), "it was replaced");
    // Other data lies where the older set points to.
    server.connect().write(3 * MIB, &vec![99; MIB as usize]).expect("accepted");
    let _ = server.stop().ok();
    let folder = file.parent().expect("a folder");
    for entry in fs::read_dir(folder).expect("a folder").flatten() {
        fs::remove_file(entry.path()).expect("removable");
    }
    fs::write(&file, older).expect("writable");
    let other = bed.neighbor();
    let server = other.serve("first").with(&ADMIN).start();
    let _ = fetched_line(&server);
    let bytes = server.connect().read(3 * MIB, MIB as u32).expect("readable");
    assert!(bytes.iter().all(|byte| *byte == 99), "the newest data");
    let _ = server.stop().ok();
}

#[test]
fn a_store_that_refuses_boot_sets_serves_all_else() {
    let proxy: Arc<Proxy> = Proxy::before(shared_minio());
    let bed = base(&proxy.store());
    clone(&bed, "disk");
    proxy.rule(Rule::every(Verb::List, "boot", Fault::Status(403)));
    proxy.rule(Rule::every(Verb::Put, "/boot/", Fault::Status(403)));
    clone(&bed, "other");
    let server = bed.serve("disk").and("other").start();
    let refused = "a boot set was not fetched, which does no harm";
    wait_for("the log says so", || server.stderr().contains(refused).then_some(()));
    read(&server, MIB, 4096);
    let recording = Recording::begin(&bed, "disk");
    read(&server, MIB, 4096);
    assert_eq!(recording.end().code, Some(8));
    assert_eq!(server.stderr().matches(refused).count(), 1, "it is asked for no other");
    let _ = server.stop().ok();
}

#[test]
fn a_warm_that_is_interrupted_ends_and_the_server_goes_on() {
    let proxy: Arc<Proxy> = Proxy::before(shared_minio());
    let bed = base(&proxy.store());
    clone(&bed, "disk");
    let other = bed.neighbor();
    let server = other.serve("disk").with(&ADMIN).start();
    proxy.rule(Rule::every(Verb::Get, "/seg/", Fault::Held));
    let mut child =
        other.command(&["warm", "disk"]).stdout(Stdio::piped()).spawn().expect("starts");
    proxy.wait_for("held", 1);
    kill_process(Pid::from_raw(child.id().cast_signed()).expect("a process"), Signal::INT)
        .expect("it runs");
    assert!(!child.wait().expect("it ends").success());
    // Its step ends with it, though the store still keeps it waiting: others have their turn.
    let hole = other.sawmill(&["warm", "disk", "32M+1M", "--json"]).json();
    assert_eq!(number(&hole, "fetched_bytes"), 0);
    proxy.stop_faults();
    read(&server, MIB, 4096);
    assert_eq!(number(&other.sawmill(&["warm", "disk", "--json"]).json(), "left_bytes"), 0);
    let _ = server.stop().ok();
}
