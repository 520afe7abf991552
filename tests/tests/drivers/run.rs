//! `sawmill run` and `sawmill driver`: a device whose driver is anybody's program comes, stays, and
//! ends in order, and a wrong request is refused with what is wrong.

use std::io::{BufRead, BufReader};
use std::process::Stdio;

use rustix::process::{Pid, Signal, kill_process};
use sawmill_tests::driven::DrivenDevice;
use sawmill_tests::machine::{command, repository, require_mount, run, wait_for};
use sawmill_tests::nbd::{Client, Style};
use sawmill_tests::test_bed::TestBed;
use sawmill_tests::{requires, store};
use serde_json::Value;

const SIZE: u64 = 8 << 20;

/// The example `file`, in Python: no compiler is needed for these tests.
fn file(bed: &TestBed) -> std::process::Command {
    let mut driver = command("python3");
    driver.env("PYTHONPATH", repository().join("sdk/python"));
    driver.arg(repository().join("sdk/python/examples/file.py")).arg(bed.path("bytes"));
    driver.arg(SIZE.to_string());
    driver
}

#[test]
fn a_device_is_listed_flushed_and_ended_by_its_name() {
    let bed = TestBed::new(&store::folder());
    let driven = DrivenDevice::start(&bed, "disk", &[], &file(&bed));
    driven.connect().write(4096, &[7; 4096]).expect("accepted");
    let listed = bed.sawmill(&["--json", "driver", "list"]).json();
    let row = &listed.as_array().expect("a list")[0];
    assert_eq!((row["name"].as_str(), row["state"].as_str()), (Some("disk"), Some("running")));
    assert_eq!(
        (row["size_bytes"].as_u64(), row["doors"][0].as_str()),
        (Some(SIZE), Some(&*driven.uri))
    );
    let socket = bed.sawmill(&["driver", "socket", "disk"]).ok();
    assert_eq!(Some(socket.trim()), row["socket"].as_str());
    let _ = bed.sawmill(&["driver", "flush", "disk"]).ok();
    driven.end(&bed, "disk");
    let bytes = std::fs::read(bed.path("bytes")).expect("the driver's file");
    assert!(
        bytes[4096..8192].iter().all(|byte| *byte == 7),
        "what was written is where the driver puts it"
    );
    let outcome = bed.sawmill(&["driver", "flush", "disk"]);
    assert!(
        outcome.code == Some(3) && outcome.stderr.contains("sawmill driver list"),
        "{outcome:?}"
    );
}

#[test]
fn a_hangup_replaces_the_driver_and_a_broken_successor_leaves_the_old_one() {
    let bed = TestBed::new(&store::folder());
    let wrapper = bed.path("driver.sh");
    let driver = file(&bed);
    let line: Vec<_> = driver.get_args().map(|word| word.to_string_lossy().into_owned()).collect();
    let good = format!("#!/bin/sh\nexec python3 {}\n", line.join(" "));
    std::fs::write(&wrapper, &good).expect("written");
    let mut start = command("sh");
    start.env("PYTHONPATH", repository().join("sdk/python")).arg(&wrapper);
    let mut driven = DrivenDevice::start(&bed, "disk", &[], &start);
    let client = driven.connect();
    client.write(0, &[1; 512]).expect("accepted");
    let first = driven.driver;
    let _ = bed.sawmill(&["driver", "replace", "disk"]).ok();
    driven.wait_for_next_driver();
    assert_ne!(driven.driver, first);
    assert_eq!(client.read(0, 512).expect("the same connection"), [1; 512]);
    let mark = bed.path("broken");
    std::fs::write(&wrapper, format!("touch {}; exit 3\n", mark.display())).expect("written");
    let _ = bed.sawmill(&["driver", "replace", "disk"]).ok();
    wait_for("the broken one has run", || mark.exists().then_some(()));
    client.write(512, &[2; 512]).expect("the old one serves on");
    std::fs::write(&wrapper, &good).expect("written");
    // Also as the one that is started after a death.
    driven.kill_driver();
    assert_eq!(client.read(512, 512).expect("the same connection"), [2; 512]);
    driven.end(&bed, "disk");
}

#[test]
fn what_cannot_run_is_refused_with_what_to_do() {
    let bed = TestBed::new(&store::folder());
    let refused = |words: &[&str], code: i32, text: &str| {
        let finished = bed.sawmill(words);
        assert!(
            finished.code == Some(code) && finished.stderr.contains(text),
            "{words:?}: {finished:?}"
        );
    };
    refused(&["run"], 2, "--name");
    refused(&["run", "--name", "a/b"], 2, "a/b");
    refused(&["run", "--name", "x", "--door", "iscsi"], 2, "unknown door 'iscsi'");
    refused(&["run", "--name", "x", "--option", "size"], 2, "NAME=VALUE");
    refused(&["run", "--name", "x", "--option", "color=red", "--", "true"], 3, "color");
    refused(&["run", "--name", "x", "--", "/no/such/program"], 3, "/no/such/program");
    refused(&["run", "--name", "x", "--", "true"], 7, "before it declared the device");
    refused(&["driver", "end", "nobody"], 3, "nobody");
    let driven = DrivenDevice::start(&bed, "disk", &[], &file(&bed));
    refused(&["run", "--name", "disk", "--", "true"], 11, "disk");
    driven.end(&bed, "disk");
}

#[test]
fn without_restarts_the_device_fails_with_its_driver() {
    let bed = TestBed::new(&store::folder());
    let mut driven = DrivenDevice::start(&bed, "disk", &["--no-restart"], &file(&bed));
    let pid = Pid::from_raw(driven.driver.cast_signed()).expect("a process");
    kill_process(pid, Signal::KILL).expect("the driver is ours");
    let ended = wait_for("the device fails", || {
        let event = driven.next_event();
        (event["event"] == "ended").then_some(event)
    });
    assert_eq!(ended["outcome"], "failed");
    assert!(ended["message"].as_str().expect("text").contains("is not restarted"), "{ended}");
}

/// The first time a driver that gives up when the doors are open, in its own way; then the example
/// `file`.
fn gives_up_once(bed: &TestBed, how: &str) -> std::process::Command {
    let text = "import os, signal, sys
from sawmill import host_connection, wire
mark, how, driver = sys.argv[1], sys.argv[2], sys.argv[3:]
if os.path.exists(mark):
    os.execvp('python3', ['python3', *driver])
open(mark, 'w').close()
class Device:
    def read(self, offset, buffer): pass
address, options = os.environ['SAWMILL_DRIVER'], {'size': driver[-1]}
attached = host_connection.attach(address, Device(), options, replace=False)
wire.receive(attached.control)
if how == 'lingers':
    attached.close()
    signal.pause()
attached.leave()
os._exit(0)
";
    let real = file(bed);
    let mut driver = command("python3");
    driver.env("PYTHONPATH", repository().join("sdk/python"));
    driver.args(["-c", text]).arg(bed.path("mark")).arg(how).args(real.get_args());
    driver
}

#[test]
fn a_driver_that_has_left_and_stays_is_killed_and_started_again() {
    let bed = TestBed::new(&store::folder());
    let driven = DrivenDevice::start(&bed, "disk", &[], &gives_up_once(&bed, "lingers"));
    driven.connect().write(0, &[7; 512]).expect("by the next one");
    driven.end(&bed, "disk");
}

#[test]
fn a_driver_that_asks_for_the_end_and_does_not_wait_for_it_is_needed_again() {
    let bed = TestBed::new(&store::folder());
    let mut driven = DrivenDevice::start(&bed, "disk", &[], &gives_up_once(&bed, "leaves"));
    let ended = wait_for("the device ends", || {
        let event = driven.next_event();
        (event["event"] == "ended").then_some(event)
    });
    assert_eq!(ended["outcome"], "ended");
}

#[test]
fn a_second_signal_ends_a_device_whose_driver_does_not_come_back() {
    let bed = TestBed::new(&store::folder());
    let door = format!("nbd=unix:{}", bed.path("nbd.sock").display());
    let mut host = bed.command(&["run", "--name", "disk", "--door", &door, "--json"]);
    let mut host = host.stdout(Stdio::piped()).spawn().expect("it starts");
    let pid = Pid::from_raw(host.id().cast_signed()).expect("a process");
    // No driver ever came: one signal is enough.
    wait_for("it listens", || {
        bed.sawmill(&["driver", "socket", "disk"]).code.filter(|code| *code == 0)
    });
    kill_process(pid, Signal::TERM).expect("it is ours");
    assert!(host.wait().expect("it ends").success());
}

/// A library starts the host of its driver, and the two died together with `kill -9` of the driver:
/// a pipe that nobody reads any more ended the host at the next event.
#[test]
fn a_device_outlives_the_reader_of_its_events() {
    let bed = TestBed::new(&store::folder());
    let door = format!("nbd=unix:{}", bed.path("nbd.sock").display());
    let driver = repository().join("tests/tests/drivers/conform/driver.py").display().to_string();
    let words = ["--json", "run", "--name", "alone", "--door", &door, "--", "python3", &driver];
    let mut host = bed.command(&words).stdout(Stdio::piped()).spawn().expect("started");
    let mut lines = BufReader::new(host.stdout.take().expect("piped")).lines();
    let event = |line: &str| serde_json::from_str::<Value>(line).expect("JSON");
    let mut attached = 0;
    let uri = loop {
        let report = event(&lines.next().expect("more").expect("text"));
        attached = report["pid"].as_u64().map_or(attached, |pid| pid as i32);
        if report["event"] == "ready" {
            break report["doors"][0]["address"].as_str().expect("an address").to_owned();
        }
    };
    drop(lines);
    let client = Client::connect(&uri, Style::Extended).expect("a client");
    for _ in 0..2 {
        kill_process(Pid::from_raw(attached).expect("a process"), Signal::KILL).expect("killed");
        client.write(0, &[7; 512]).expect("by the next driver");
        let listed = bed.sawmill(&["--json", "driver", "list"]).json();
        attached = listed[0]["driver_pid"].as_u64().expect("a driver") as i32;
    }
    assert_eq!(host.try_wait().expect("asked"), None, "the host is there");
    kill_process(Pid::from_child(&host), Signal::TERM).expect("the host runs");
    assert!(host.wait().expect("ended").success());
}

/// In batch mode what was answered is in the host's memory. A mount that waited for another host
/// would go on without it, and nobody would know.
#[test]
fn a_mount_in_batch_mode_ends_with_its_host() {
    requires!(require_mount());
    let bed = TestBed::new(&store::folder());
    let folder = bed.path("mount").display().to_string();
    let driven = DrivenDevice::start(
        &bed,
        "disk",
        &["--option", "mode=batch", "--fuse", &folder],
        &file(&bed),
    );
    let path = bed.path("mount/disk");
    std::fs::write(bed.path("block"), [7; 4096]).expect("written");
    let mut copy = command("dd");
    copy.arg(format!("if={}", bed.path("block").display())).arg(format!("of={}", path.display()));
    run(copy.args(["bs=4096", "seek=1", "conv=notrunc"]));
    assert_eq!(driven.connect().read(4096, 4096).expect("through the other door"), [7; 4096]);
    // Kills the host.
    drop(driven);
    let read = std::fs::read(&path);
    run(command("umount").arg("-l").arg(&folder));
    assert_eq!(read.expect_err("the mount is dead").raw_os_error(), Some(107), "ENOTCONN, at once");
}

/// The first driver goes on as a process after it was replaced. The second dies when it serves.
/// Later ones are the example `file`.
fn staying_predecessor(bed: &TestBed) -> std::process::Command {
    let text = "import os, sys, time
import sawmill
from sawmill import host_connection
first, second, driver = *sys.argv[1:3], sys.argv[3:]
class Device:
    def read(self, offset, buffer): pass
    def write(self, offset, data, fua): pass
    def flush(self): pass
if not os.path.exists(first):
    open(first, 'w').close()
    sawmill.serve(Device(), size=int(driver[-1]))
    while True:
        time.sleep(1)
if not os.path.exists(second):
    open(second, 'w').close()
    host_connection.attach(os.environ['SAWMILL_DRIVER'], Device(), {}, replace=False)
    os._exit(1)
os.execvp('python3', ['python3', *driver])
";
    let mut driver = command("python3");
    driver.env("PYTHONPATH", repository().join("sdk/python")).args(["-c", text]);
    driver.args(["first", "second"].map(|name| bed.path(name)));
    driver.args(file(bed).get_args());
    driver
}

/// The first driver finishes when the second, which is to replace it, has died after its HELLO.
/// Later ones are the example `file`.
fn dying_successor(bed: &TestBed) -> std::process::Command {
    let text = "import os, socket, sys, time
from sawmill import host_connection, wire
first, second, finishing, driver = *sys.argv[1:4], sys.argv[4:]
address, options = os.environ['SAWMILL_DRIVER'], {'size': driver[-1]}
class Device:
    def read(self, offset, buffer): pass
def wait_until(condition):
    while not condition():
        time.sleep(0.01)
def has_died():
    try:
        os.kill(int(open(second).read()), 0)
    except ProcessLookupError:
        return True
if not os.path.exists(first):
    open(first, 'w').close()
    attached = host_connection.attach(address, Device(), options, replace=False)
    while wire.decode(wire.receive(attached.control)[0])[0] != wire.Control.FINISH:
        pass
    open(finishing, 'w').close()
    wait_until(has_died)
    os._exit(0)
if not os.path.exists(second):
    with open(second, 'w') as file:
        file.write(str(os.getpid()))
    control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    control.connect(address)
    wire.send(control, wire.encode(wire.Control.HELLO, {'protocol': 1} | options))
    wait_until(lambda: os.path.exists(finishing))
    os._exit(1)
os.execvp('python3', ['python3', *driver])
";
    let mut driver = command("python3");
    driver.env("PYTHONPATH", repository().join("sdk/python")).args(["-c", text]);
    driver.args(["first", "second", "finishing"].map(|name| bed.path(name)));
    driver.args(file(bed).get_args());
    driver
}

#[test]
fn a_successor_that_dies_while_the_old_driver_finishes_is_started_again() {
    let bed = TestBed::new(&store::folder());
    let mut driven = DrivenDevice::start(&bed, "disk", &[], &dying_successor(&bed));
    let _ = bed.sawmill(&["driver", "replace", "disk"]).ok();
    driven.wait_for_next_driver();
    driven.connect().write(0, &[7; 512]).expect("by the next one");
    driven.end(&bed, "disk");
}

#[test]
fn a_driver_is_restarted_though_its_predecessor_goes_on_as_a_process() {
    let bed = TestBed::new(&store::folder());
    let mut driven = DrivenDevice::start(&bed, "disk", &[], &staying_predecessor(&bed));
    let _ = bed.sawmill(&["driver", "replace", "disk"]).ok();
    driven.wait_for_next_driver();
    driven.wait_for_next_driver();
    driven.connect().write(0, &[7; 512]).expect("by the third");
    driven.end(&bed, "disk");
}
