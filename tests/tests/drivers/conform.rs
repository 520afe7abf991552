//! `sawmill conform`: drivers in another language are judged, wrong ones are found out, and what
//! they are judged with (faults, a record of requests) works behind `sawmill run` too.

use std::io::{BufRead, BufReader};
use std::process::Stdio;

use rustix::process::{Pid, Signal, kill_process};
use sawmill_tests::machine::repository;
use sawmill_tests::nbd::{Client, Style};
use sawmill_tests::store;
use sawmill_tests::test_bed::{CommandOutput, TestBed};
use serde_json::Value;

fn driver() -> String {
    repository().join("tests/tests/drivers/conform/driver.py").display().to_string()
}

fn conform(bed: &TestBed, options: &[&str], words: &[&str]) -> CommandOutput {
    let driver = driver();
    bed.sawmill(&[&["--json", "conform"], options, &["--", "python3", &driver], words].concat())
}

/// The notes of the clauses with an outcome, by name.
fn with(finished: &CommandOutput, outcome: &str) -> Vec<(String, String)> {
    let document: Value = serde_json::from_str(&finished.stdout).expect("JSON");
    let rows = document["clauses"].as_array().expect("a list").iter();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    rows.filter(|row| row["outcome"] == outcome)
        .map(|row| (text(&row["clause"]), text(&row["note"])))
        .collect()
}

fn all_kept(finished: CommandOutput, clauses: usize) {
    assert_eq!(with(&finished, "FAIL"), [], "{}", finished.stderr);
    assert_eq!(finished.code, Some(0));
    assert_eq!(with(&finished, "ok").len(), clauses);
}

fn file(bed: &TestBed) -> String {
    format!("path={}", bed.path("bytes").display())
}

#[test]
fn a_driver_in_another_language_keeps_every_clause() {
    let bed = TestBed::new(&store::folder());
    let finished = conform(&bed, &[], &[&file(&bed)]);
    assert!(
        with(&finished, "ok").iter().all(|(_, note)| note.is_empty()),
        "its bytes outlive its death"
    );
    all_kept(finished, 17);
}

#[test]
fn a_driver_behind_an_nbd_door_keeps_every_clause() {
    let bed = TestBed::new(&store::folder());
    all_kept(conform(&bed, &["--door", "nbd"], &[&file(&bed)]), 17);
}

#[test]
fn a_driver_of_chunks_keeps_every_clause() {
    let bed = TestBed::new(&store::folder());
    all_kept(conform(&bed, &["--option", "mode=batch"], &["hw_queues=1", &file(&bed)]), 17);
}

#[test]
fn kinds_of_devices_are_judged_by_what_they_can_show() {
    let bed = TestBed::new(&store::folder());
    all_kept(conform(&bed, &["--kind", "null"], &[]), 9);
    all_kept(conform(&bed, &["--kind", "read-only", "--option", "read_only=1"], &[]), 10);
    let finished = conform(&bed, &["--kind", "read-only", "--clause", "d7"], &[]);
    assert!(with(&finished, "FAIL")[0].1.contains("--option read_only=1"), "{}", finished.stdout);
}

#[test]
fn bytes_lost_with_their_driver_are_reported_and_fail_no_clause() {
    let bed = TestBed::new(&store::folder());
    let finished = conform(&bed, &["--clause", "driver_killed"], &[]);
    assert!(with(&finished, "ok")[0].1.contains("its bytes went with it"), "{}", finished.stdout);
}

#[test]
fn wrong_drivers_are_found_out() {
    let bed = TestBed::new(&store::folder());
    let batch = ["--option", "mode=batch"];
    for (fault, options, clause, reason) in [
        ("forgets", &[][..], "d3_random", "differs from the model"),
        ("offset", &[], "d5_any", "did just that"),
        ("dies", &[], "d1_", "the driver ended during the clause"),
        ("fails", &[], "d3_reads", "failed"),
        ("stays", &[], "driver_ends", "still running"),
        ("silent", &["--option", "request_timeout_s=1"], "d1_", "did not answer a command"),
        ("backwards", &batch, "d3_random", "differs from the model"),
    ] {
        let options = [options, &["--clause", clause]].concat();
        let finished = conform(&bed, &options, &["hw_queues=1", fault]);
        let failed = with(&finished, "FAIL");
        assert_eq!(finished.code, Some(1), "{fault}: {}{}", finished.stdout, finished.stderr);
        assert!(failed.iter().any(|(_, note)| note.contains(reason)), "{fault}: {failed:?}");
    }
}

#[test]
fn what_cannot_be_judged_is_refused_with_the_reason() {
    let bed = TestBed::new(&store::folder());
    bed.sawmill(&["conform", "--", "/no/such/driver"]).refused(3, &["/no/such/driver"]);
    bed.sawmill(&["conform", "--", "false"]).refused(7, &["the driver ended before it connected"]);
    bed.sawmill(&["conform", "--clause", "d99", "--", "true"])
        .refused(2, &["no clause has such a name"]);
    let finished = conform(&bed, &["--clause", "d10", "--option", "size=1048576"], &[]);
    assert!(
        with(&finished, "FAIL")[0].1.contains("the tests need 16777216"),
        "{}",
        finished.stdout
    );
}

#[test]
fn a_running_driver_has_faults_and_a_record_that_replay_reads() {
    let bed = TestBed::new(&store::folder());
    let (trace, socket) = (bed.path("requests.csv"), bed.path("nbd.sock"));
    let (trace, door) = (trace.display().to_string(), format!("nbd=unix:{}", socket.display()));
    let layers = ["--trace", &trace, "--inject", "read:error=ENOSPC:range=1M-2M"];
    let driver = driver();
    let arguments = [
        &["--json", "run", "--name", "faulty", "--door", &door],
        &layers[..],
        &["--", "python3", &driver],
    ];
    let mut host =
        bed.command(&arguments.concat()).stdout(Stdio::piped()).spawn().expect("started");
    let lines = BufReader::new(host.stdout.take().expect("piped")).lines();
    let mut events =
        lines.map(|line| serde_json::from_str::<Value>(&line.expect("text")).expect("JSON"));
    let ready = events.find(|event| event["event"] == "ready").expect("ready");
    let uri = ready["doors"][0]["address"].as_str().expect("an address").to_owned();
    let client = Client::connect(&uri, Style::Extended).expect("a client");
    client.write(1 << 20, &[7; 4096]).expect("only reads fail");
    let failed = client.read((1 << 20) + 512, 512).expect_err("in the range");
    assert_eq!(failed.to_string(), "error 28");
    assert_eq!(client.read(2 << 20, 512).expect("past the range"), [0; 512]);
    drop(client);
    kill_process(Pid::from_child(&host), Signal::TERM).expect("the host runs");
    assert!(host.wait().expect("ended").success());
    assert_eq!(events.last().expect("an event")["event"], "ended");
    let text = std::fs::read_to_string(&trace).expect("a record");
    let lines: Vec<&str> = text.lines().collect();
    assert!(lines[1].contains(",write,1048576,4096,") && lines[1].ends_with(",done"), "{text}");
    assert!(lines[2].contains(",read,1049088,512,") && lines[2].ends_with(",full"), "{text}");
    let read = bed.sawmill(&["--json", "simulate", &trace, "--size", "32M"]);
    assert_eq!(read.code, Some(0), "{}", read.stderr);
}
