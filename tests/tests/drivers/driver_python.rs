//! Drivers in Python (`sdk/python`) on the real host: the examples are disks, an exception is one
//! request's error, a driver that is killed or replaced under load loses nothing, and the guide's
//! page works as it stands.
//!
//! `SAWMILL_ROUNDS` says how often drivers are killed and replaced; 5 without it.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use sawmill_testkit::Dice;
use sawmill_tests::driven::{DrivenDevice, saying_into};
use sawmill_tests::examples::{self, SIZE_BYTES, assert_is_disk, rounds, text};
use sawmill_tests::machine::{command, repository, run, sawmill_binary, wait_for};
use sawmill_tests::test_bed::TestBed;
use sawmill_tests::{requires, store};

/// Whether there is a Python that the library is for.
fn require_python() -> Result<(), String> {
    let mut version_check = Command::new("python3");
    let new_enough =
        version_check.args(["-c", "import sys; sys.exit(sys.version_info < (3, 11))"]).status();
    match new_enough {
        Ok(status) if status.success() => Ok(()),
        Ok(_) => Err("python3 is older than 3.11".into()),
        Err(error) => Err(format!("no python3: {error}")),
    }
}

/// Python with the library.
fn python() -> Command {
    let mut python = Command::new("python3");
    python.env("PYTHONPATH", repository().join("sdk/python")).stdin(Stdio::null());
    python
}

/// A driver of ours: an example, or a program of this test.
fn driver(path: &str, arguments: &[&str]) -> Command {
    let mut python = python();
    python.arg(repository().join(path)).args(arguments);
    python
}

fn example(name: &str, arguments: &[&str]) -> Command {
    driver(&format!("sdk/python/examples/{name}.py"), arguments)
}

#[test]
fn the_library_keeps_its_own_tests() {
    requires!(require_python());
    let tests = repository().join("sdk/python/tests");
    run(python()
        .args(["-X", "dev", "-m", "unittest", "discover", "-s"])
        .arg(&tests)
        .arg("-t")
        .arg(&tests));
    run(python().args(["-m", "compileall", "-q"]).arg(repository().join("sdk/python/sawmill")));
}

#[test]
fn ram_and_file_are_disks_request_by_request_and_in_batches() {
    requires!(require_python());
    let bed = TestBed::new(&store::folder());
    examples::ram_and_file(&bed, &example);
}

#[test]
fn mirror_is_a_disk_and_reports_when_its_sides_differ() {
    requires!(require_python());
    let bed = TestBed::new(&store::folder());
    examples::mirror(&bed, &example);
}

#[test]
fn null_takes_everything_and_reads_zeroes() {
    requires!(require_python());
    let bed = TestBed::new(&store::folder());
    examples::null(&bed, &example);
}

/// A web server, killed when dropped.
struct Web(Child, String);

impl Web {
    fn start(content: &std::path::Path) -> Self {
        let mut server = driver("tests/tests/drivers/driver_python/web.py", &[text(content)]);
        let mut child = server.stdout(Stdio::piped()).spawn().expect("a web server");
        let mut port = String::new();
        let stdout = child.stdout.take().expect("a pipe was asked for");
        BufReader::new(stdout).read_line(&mut port).expect("it says its port");
        Web(child, format!("http://127.0.0.1:{}/image", port.trim()))
    }
}

impl Drop for Web {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn lazy_is_a_disk_that_begins_as_its_source_and_needs_it_once() {
    requires!(require_python());
    let bed = TestBed::new(&store::folder());
    let source = bed.path("source");
    let content = Dice::seeded("lazy").bytes(SIZE_BYTES as usize);
    std::fs::write(&source, &content).expect("a source");
    let web = Web::start(&source);
    let url = web.1.clone();
    examples::lazy_of(&bed, &example, content, &url, || drop(web));
}

#[test]
fn an_exception_is_the_error_of_one_request() {
    requires!(require_python());
    let bed = TestBed::new(&store::folder());
    let log_path = bed.path("said");
    let faulty =
        saying_into(&log_path, &driver("tests/tests/drivers/driver_python/faulty.py", &[]));
    let mut device = DrivenDevice::start(&bed, "faulty", &[], &faulty);
    let client = device.connect();
    let full = client.write(4096, &[1; 512]).unwrap_err().to_string();
    let bug = client.read(8192, 512).unwrap_err().to_string();
    client.write(512, &[1; 512]).expect("accepted");
    assert_eq!(client.read(512, 512).expect("readable"), [1; 512]);
    assert!(full.contains("NoSpace") || full.contains("28"), "{full}");
    assert!(bug.contains("Io") || bug.contains('5'), "{bug}");
    let first = device.driver;
    device.replace_driver(&bed, "faulty");
    assert_ne!(device.driver, first);
    device.end(&bed, "faulty");
    let log = std::fs::read_to_string(log_path).expect("what it said");
    assert!(log.contains("Traceback") && log.contains("KeyError: 'a bug'"), "{log}");
}

/// Verifies writes on a device for as long as `disturb` disturbs its driver; gives the longest
/// stall.
fn undisturbed(
    bed: &TestBed,
    mut device: DrivenDevice,
    rounds: u64,
    mut disturb: impl FnMut(&mut DrivenDevice),
) -> Duration {
    let client = device.connect();
    let stall = examples::longest_request(bed, &mut device, rounds, |device| {
        disturb(device);
        // Requests that waited go before this one.
        let _ = client.read(0, 512).expect("readable");
    });
    device.terminate();
    stall
}

#[test]
fn a_driver_that_is_killed_under_load_is_followed_by_one_that_loses_nothing() {
    requires!(require_python());
    for options in [&[][..], &["--option", "mode=batch"]] {
        let bed = TestBed::new(&store::folder());
        let file = || example("file", &[text(&bed.path("image")), "16M"]);
        let device = DrivenDevice::beside(&bed, "disk", options, &mut file());
        let stall =
            undisturbed(&bed, device, rounds(), |device| device.kill_and_attach(&mut file()));
        println!("{} kills, {options:?}: the longest request took {stall:?}", rounds());
    }
}

#[test]
fn a_driver_that_is_killed_under_load_is_started_again() {
    requires!(require_python());
    let bed = TestBed::new(&store::folder());
    let file = example("file", &[text(&bed.path("image")), "16M"]);
    let device = DrivenDevice::start(&bed, "disk", &[], &file);
    // Each restart waits twice as long as the one before.
    let stall = undisturbed(&bed, device, 4, DrivenDevice::kill_driver);
    println!("4 kills of a supervised driver: the longest request took {stall:?}");
}

#[test]
fn a_driver_is_replaced_under_load_and_no_client_notices() {
    requires!(require_python());
    for options in [&[][..], &["--option", "mode=batch", "--option", "hw_queues=2"]] {
        let bed = TestBed::new(&store::folder());
        let file = example("file", &[text(&bed.path("image")), "16M"]);
        let device = DrivenDevice::start(&bed, "disk", options, &file);
        let stall =
            undisturbed(&bed, device, rounds(), |device| device.replace_driver(&bed, "disk"));
        println!("{} replacements, {options:?}: the longest request took {stall:?}", rounds());
    }
}

#[test]
fn coroutines_serve_a_disk_request_by_request_and_in_chunks_of_several_queues() {
    requires!(require_python());
    let bed = TestBed::new(&store::folder());
    for arguments in [&[][..], &["batch"]] {
        let coroutines = driver("tests/tests/drivers/driver_python/coroutines.py", arguments);
        let device = DrivenDevice::start(&bed, "coroutines", &[], &coroutines);
        assert_is_disk(&bed, &device);
        device.end(&bed, "coroutines");
    }
}

/// The first block of Python of the guide, with another place for its socket.
fn quick_start(socket: &str) -> String {
    let guide = repository().join("docs/guide/driver-python.md");
    let guide = std::fs::read_to_string(guide).expect("the guide");
    let (_, rest) = guide.split_once("```python\n").expect("a program in the guide");
    let (program, _) = rest.split_once("```").expect("an end of it");
    assert!(program.contains("/tmp/ram.sock"), "{program}");
    program.replace("/tmp/ram.sock", socket)
}

#[test]
fn the_program_in_the_guide_serves_a_disk_and_another_driver_takes_over() {
    requires!(require_python());
    let bed = TestBed::new(&store::folder());
    let (program, socket) = (bed.path("ram.py"), bed.path("ram.sock"));
    std::fs::write(&program, quick_start(text(&socket))).expect("a program");
    let state = bed.path("state");
    let start = |script: &str| {
        let mut driver = python();
        driver.env("SAWMILL", sawmill_binary()).env("XDG_STATE_HOME", &state);
        let _ = driver.stdout(Stdio::piped()).args(["-c", script]).arg(&program);
        driver.spawn().expect("python3 starts")
    };
    let as_it_stands = "import runpy, sys; runpy.run_path(sys.argv[1])";
    let mut first = start(as_it_stands);
    let mut uri = String::new();
    let stdout = first.stdout.take().expect("a pipe was asked for");
    BufReader::new(stdout).read_line(&mut uri).expect("it says where the disk is");
    let uri = uri.trim();
    assert_eq!(run(command("nbdinfo").args(["--size", uri])).trim(), "67108864");
    run(command("nbdcopy").arg(repository().join("README.md")).arg(uri));
    // The driver is killed: the host, which it has started, waits for the next one.
    first.kill().expect("a process of ours");
    let _ = first.wait();
    let rerun = as_it_stands
        .replace("runpy.run_path", "import sawmill; sawmill.serve = REPLACED; runpy.run_path");
    let rerun = rerun
        .replace("REPLACED", "lambda d, name, doors: print(sawmill.rerun(d, name, opened=None))");
    let second = start(&rerun);
    run(command("nbdcopy").arg(repository().join("README.md")).arg(uri));
    let third = start(&rerun);
    let replaced = second.wait_with_output().expect("it ends");
    assert_eq!(String::from_utf8_lossy(&replaced.stdout), "replaced\n");
    let pid = rustix::process::Pid::from_child(&third);
    run(command("nbdinfo").args(["--size", uri]));
    wait_for("the third driver is the one", || {
        let list = bed.sawmill(&["driver", "list", "--json"]).json();
        (list[0]["driver_pid"] == u64::from(third.id())).then_some(())
    });
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).expect("a process of ours");
    let ended = third.wait_with_output().expect("it ends");
    assert_eq!(String::from_utf8_lossy(&ended.stdout), "ended\n");
    assert!(ended.status.success(), "{}", ended.status);
    wait_for("the host has ended", || {
        let list = bed.sawmill(&["driver", "list", "--json"]).json();
        (list.as_array()?.is_empty()).then_some(())
    });
}
