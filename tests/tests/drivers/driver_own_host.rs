//! Drivers that are their own hosts (`SAWMILL_HOST=none`): the same programs, in Rust and C, with
//! the device in their own process.
//!
//! Not here: ublk devices of such drivers (`tests/vm`), the contract (the tests of
//! `sawmill_driver`).

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};

use sawmill_tests::compiled::{self, c_example, libraries, rust_example};
use sawmill_tests::machine::{repository, skip, wait_for};
use sawmill_tests::nbd::{Client, Style};
use sawmill_tests::store;
use sawmill_tests::test_bed::TestBed;
use serde_json::Value;

const SIZE_BYTES: u64 = 16 << 20;

/// A driver that is its own host, with a door at a socket. Killed when dropped.
struct OwnHost {
    child: Child,
    name: String,
    uri: String,
}

impl OwnHost {
    fn start(bed: &TestBed, example: &dyn Fn(&str, &[&str]) -> Command) -> Self {
        Self::run(bed, own_host(bed, example))
    }

    fn run(bed: &TestBed, mut driver: Command) -> Self {
        let socket = bed.path("own.sock");
        let child = driver.env("SAWMILL_DOORS", format!("nbd=unix:{}", socket.display())).spawn();
        let mut child = child.expect("it starts");
        let name = wait_for("the device is listed with its door", || {
            assert!(child.try_wait().expect("a child").is_none(), "it has ended");
            let device = listed(bed).into_iter().next()?;
            let is_ours = device["driver_pid"].as_u64() == Some(child.id().into());
            (is_ours && !device["doors"].as_array()?.is_empty())
                .then(|| device["name"].as_str().map(str::to_owned))?
        });
        let uri = format!("nbd+unix:///{name}?socket={}", socket.display());
        OwnHost { child, name, uri }
    }

    fn connect(&self) -> Client {
        Client::connect(&self.uri, Style::Structured).expect("the door is open")
    }

    fn wait(mut self) -> ExitStatus {
        self.child.wait().expect("it ends")
    }
}

impl Drop for OwnHost {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn own_host(bed: &TestBed, example: &dyn Fn(&str, &[&str]) -> Command) -> Command {
    without_host(bed, example("ram", &["16M"]))
}

/// A driver of a file, of the device `disk`, that takes the place of another if there is one.
fn next_driver(bed: &TestBed, example: &dyn Fn(&str, &[&str]) -> Command, size: &str) -> Command {
    let mut driver =
        without_host(bed, example("file", &[&bed.path("image").to_string_lossy(), size]));
    driver.env("SAWMILL_NAME", "disk").env("SAWMILL_REPLACE", "1");
    driver
}

fn without_host(bed: &TestBed, mut driver: Command) -> Command {
    // No host can be started: the program that would be one does not exist.
    driver.env("SAWMILL", "/nonexistent").env("SAWMILL_HOST", "none");
    driver.env("XDG_STATE_HOME", bed.path("state")).env_remove("SAWMILL_DRIVER");
    driver
}

/// Runs a driver that ends with an error for this reason.
fn refused(mut driver: Command, reason: &str) {
    let refused = driver.stderr(Stdio::piped()).output().expect("it runs");
    let text = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && text.contains(reason), "{text}");
}

fn listed(bed: &TestBed) -> Vec<Value> {
    bed.sawmill(&["driver", "list", "--json"]).json().as_array().cloned().unwrap_or_default()
}

type Example = fn(&str, &[&str]) -> Command;

/// The example in the languages that this machine can build.
fn languages() -> Vec<Example> {
    let mut languages: Vec<Example> = vec![rust_example];
    match compiled::require_compiler() {
        Ok(()) => languages.push(c_example),
        Err(why) => skip(&format!("for C: {why}")),
    }
    languages
}

#[test]
fn the_same_program_is_a_disk_without_a_host_and_ends_in_order() {
    for example in languages() {
        let bed = TestBed::new(&store::folder());
        let driver = OwnHost::start(&bed, &example);
        let device = &listed(&bed)[0];
        let pid = u64::from(driver.child.id());
        assert_eq!(
            (device["host_pid"].as_u64(), device["driver_pid"].as_u64()),
            (Some(pid), Some(pid))
        );
        let clients = [driver.connect(), driver.connect()];
        for (at, client) in clients.iter().enumerate() {
            let address = at as u64 * (SIZE_BYTES / 2);
            client.write(address, &[at as u8 + 1; 70_000]).expect("writable");
            client.flush().expect("flushed");
        }
        for at in 0..2 {
            let found =
                clients[1 - at].read(at as u64 * (SIZE_BYTES / 2), 70_000).expect("readable");
            assert!(found == [at as u8 + 1; 70_000]);
        }
        let _ = bed.sawmill(&["driver", "flush", &driver.name]).ok();
        let _ = bed.sawmill(&["driver", "end", &driver.name]).ok();
        assert!(driver.wait().success());
        assert_eq!(listed(&bed), Vec::<Value>::new());
    }
}

#[test]
fn a_device_that_fails_ends_its_driver_with_an_error_and_its_clients_see_the_end() {
    let bed = TestBed::new(&store::folder());
    let driver = OwnHost::start(&bed, &rust_example);
    let client = driver.connect();
    client.write(0, &[1; 4096]).expect("writable");
    let _ = bed.sawmill(&["driver", "end", "--now", &driver.name]).ok();
    assert!(!driver.wait().success());
    assert!(client.read(0, 4096).is_err());
}

#[test]
fn a_name_and_a_door_that_another_has_are_refused_and_nothing_ends() {
    let bed = TestBed::new(&store::folder());
    let driver = OwnHost::start(&bed, &rust_example);
    let mut taken = own_host(&bed, &rust_example);
    taken.env("SAWMILL_DOORS", format!("nbd=unix:{}", bed.path("own.sock").display()));
    refused(taken, "another process listens");
    let mut second = own_host(&bed, &rust_example);
    second.env(
        "SAWMILL_DRIVER",
        bed.path(&format!("state/sawmill/drivers/{}/driver.sock", driver.name)),
    );
    refused(second, "its own host");
    driver.connect().write(0, &[1; 4096]).expect("the first serves on");
    let _ = bed.sawmill(&["driver", "end", &driver.name]).ok();
    assert!(driver.wait().success());
}

/// Writes and reads in one half of the device until told to stop, then all that it has written.
fn load(client: &Client, half: u64, is_over: &AtomicBool) {
    const PLACES: u64 = 100;
    let address_of = |place: u64| half * (SIZE_BYTES / 2) + place * 65_536;
    let mut newest = [0_u8; PLACES as usize];
    for round in 1_u64.. {
        if is_over.load(Ordering::Relaxed) {
            break;
        }
        let (place, older) = (round * 97 % PLACES, round * 31 % PLACES);
        newest[place as usize] = (round % 255) as u8;
        client.write(address_of(place), &[newest[place as usize]; 30_000]).expect("writable");
        let found = client.read(address_of(older), 30_000).expect("readable");
        assert!(found == [newest[older as usize]; 30_000], "{older} in round {round}");
    }
    for (place, byte) in newest.iter().enumerate() {
        let found = client.read(address_of(place as u64), 30_000).expect("readable");
        assert!(found == [*byte; 30_000], "{place}");
    }
}

#[test]
fn a_driver_takes_the_place_of_another_and_connections_stay() {
    for example in languages() {
        let bed = TestBed::new(&store::folder());
        let mut driver = OwnHost::run(&bed, next_driver(&bed, &example, "16M"));
        let (first, second) = (driver.connect(), driver.connect());
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let stop = &is_over;
            let loads = [(&first, 0), (&second, 1)]
                .map(|(client, half)| scope.spawn(move || load(client, half, stop)));
            for generation in 2..8 {
                let next = OwnHost::run(&bed, next_driver(&bed, &example, "16M"));
                let before = std::mem::replace(&mut driver, next);
                assert!(before.wait().success(), "it has ended in order");
                assert_eq!(listed(&bed)[0]["generation"].as_u64(), Some(generation));
            }
            is_over.store(true, Ordering::Relaxed);
            loads.into_iter().for_each(|load| load.join().expect("no error"));
        });
        driver.connect().write(0, &[1; 4096]).expect("and others connect");
        let _ = bed.sawmill(&["driver", "end", "disk"]).ok();
        assert!(driver.wait().success());
    }
}

#[test]
fn a_next_driver_that_is_refused_changes_nothing() {
    let bed = TestBed::new(&store::folder());
    let driver = OwnHost::run(&bed, next_driver(&bed, &rust_example, "16M"));
    let client = driver.connect();
    client.write(0, &[7; 4096]).expect("writable");
    let is_refused = |next: Command, reason: &str| {
        refused(next, reason);
        assert!(client.read(0, 4096).expect("the first serves on") == [7; 4096]);
    };
    is_refused(next_driver(&bed, &rust_example, "32M"), "cannot change while it exists");
    let mut unknown = next_driver(&bed, &rust_example, "16M");
    unknown.env("SAWMILL_REPLACE", "yes");
    is_refused(unknown, "write 1, or leave it out");
    let mut unnamed = next_driver(&bed, &rust_example, "16M");
    unnamed.env_remove("SAWMILL_NAME");
    is_refused(unnamed, "which device?");
    let mut nobody = next_driver(&bed, &rust_example, "16M");
    nobody.env("SAWMILL_NAME", "other").env_remove("SAWMILL_DOORS");
    is_refused(nobody, "no driver serves a device of this name");
    bed.sawmill(&["driver", "replace", "disk"]).refused(7, &["SAWMILL_REPLACE=1"]);
    let _ = bed.sawmill(&["driver", "end", "disk"]).ok();
    assert!(driver.wait().success());
}

#[test]
fn a_device_that_ends_with_its_driver_has_no_next_one() {
    let bed = TestBed::new(&store::folder());
    let driver = OwnHost::start(&bed, &rust_example);
    let mut next = own_host(&bed, &rust_example);
    next.env("SAWMILL_NAME", &driver.name).env("SAWMILL_REPLACE", "1");
    refused(next, "no name of its own");
    driver.connect().write(0, &[1; 4096]).expect("the first serves on");
    let _ = bed.sawmill(&["driver", "end", &driver.name]).ok();
    assert!(driver.wait().success());
}

/// A driver in C that keeps what is written in its memory until a flush.
fn buffering(bed: &TestBed) -> Command {
    let program = bed.path("buffering");
    let source = repository().join("sdk/c/tests/buffering.c");
    compiled::c(&source, &program, &["-std=c99", "-pedantic"]);
    let mut driver = Command::new(program);
    driver.arg(bed.path("image")).stdin(Stdio::null()).env("LD_LIBRARY_PATH", libraries());
    let mut driver = without_host(bed, driver);
    driver.env("SAWMILL_NAME", "disk").env("SAWMILL_REPLACE", "1");
    driver
}

#[test]
fn a_driver_is_flushed_before_another_takes_its_place() {
    if let Err(why) = compiled::require_compiler() {
        return skip(&why);
    }
    let bed = TestBed::new(&store::folder());
    let mut driver = OwnHost::run(&bed, buffering(&bed));
    let client = driver.connect();
    for round in 1..4 {
        client.write(0, &[round; 4096]).expect("writable");
        let next = OwnHost::run(&bed, buffering(&bed));
        assert!(std::mem::replace(&mut driver, next).wait().success());
        assert!(client.read(0, 4096).expect("readable") == [round; 4096], "answered and lost");
    }
    let _ = bed.sawmill(&["driver", "end", "disk"]).ok();
    assert!(driver.wait().success());
}

#[test]
fn a_driver_that_hangs_keeps_its_place_and_can_still_fail() {
    if let Err(why) = compiled::require_compiler() {
        return skip(&why);
    }
    let bed = TestBed::new(&store::folder());
    let mut first = buffering(&bed);
    first.arg("3600");
    let driver = OwnHost::run(&bed, first);
    refused(buffering(&bed), "a flush takes longer");
    driver.connect().write(0, &[1; 4096]).expect("the first serves on");
    let _ = bed.sawmill(&["driver", "end", "--now", "disk"]).ok();
}

#[test]
fn a_next_driver_that_dies_while_the_other_flushes_changes_nothing() {
    if let Err(why) = compiled::require_compiler() {
        return skip(&why);
    }
    let bed = TestBed::new(&store::folder());
    let mut first = buffering(&bed);
    first.arg("1").stdout(Stdio::piped());
    let mut driver = OwnHost::run(&bed, first);
    let flushes = BufReader::new(driver.child.stdout.take().expect("it is piped"));
    let mut flushes = flushes.lines();
    let client = driver.connect();
    client.write(0, &[1; 4096]).expect("writable");
    for _ in 0..3 {
        let mut dying = buffering(&bed).spawn().expect("it starts");
        assert_eq!(flushes.next().expect("a line").expect("of text"), "flushing");
        dying.kill().expect("it is ours");
        let _ = dying.wait().expect("it ends");
        assert!(client.read(0, 4096).expect("readable") == [1; 4096]);
    }
    client.write(0, &[2; 4096]).expect("the first serves on");
    let next = OwnHost::run(&bed, buffering(&bed));
    assert!(driver.wait().success());
    assert!(client.read(0, 4096).expect("readable") == [2; 4096]);
    let _ = bed.sawmill(&["driver", "end", "disk"]).ok();
    assert!(next.wait().success());
}

#[test]
fn a_driver_with_a_flush_does_not_follow_one_without() {
    if let Err(why) = compiled::require_compiler() {
        return skip(&why);
    }
    let bed = TestBed::new(&store::folder());
    let mut first = buffering(&bed);
    first.args(["0", "no-flush"]);
    let driver = OwnHost::run(&bed, first);
    let client = driver.connect();
    client.write(0, &[1; 4096]).expect("writable");
    refused(buffering(&bed), "can_flush=0");
    assert!(client.read(0, 4096).expect("the first serves on") == [1; 4096]);
    let _ = bed.sawmill(&["driver", "end", "disk"]).ok();
    assert!(driver.wait().success());
}
