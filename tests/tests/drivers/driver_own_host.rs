//! Drivers that are their own hosts (`SAWMILL_HOST=none`): the same programs, in Rust and C, with
//! the device in their own process.
//!
//! Not here: ublk devices of such drivers (`tests/vm`), the contract (the tests of
//! `sawmill_driver`).

use std::process::{Child, Command, ExitStatus, Stdio};

use sawmill_tests::compiled::{self, c_example, rust_example};
use sawmill_tests::machine::{skip, wait_for};
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
        let socket = bed.path("own.sock");
        let mut driver = own_host(bed, example);
        let child = driver.env("SAWMILL_DOORS", format!("nbd=unix:{}", socket.display())).spawn();
        let mut child = child.expect("it starts");
        let name = wait_for("the device is listed with its door", || {
            assert!(child.try_wait().expect("a child").is_none(), "it has ended");
            let device = listed(bed).into_iter().next()?;
            (!device["doors"].as_array()?.is_empty())
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
    let mut driver = example("ram", &["16M"]);
    // No host can be started: the program that would be one does not exist.
    driver.env("SAWMILL", "/nonexistent").env("SAWMILL_HOST", "none");
    driver.env("XDG_STATE_HOME", bed.path("state")).env_remove("SAWMILL_DRIVER");
    driver
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
    let taken = own_host(&bed, &rust_example)
        .env("SAWMILL_DOORS", format!("nbd=unix:{}", bed.path("own.sock").display()))
        .stderr(Stdio::piped())
        .output()
        .expect("it runs");
    let text = String::from_utf8_lossy(&taken.stderr);
    assert!(!taken.status.success() && text.contains("another process listens"), "{text}");
    let mut second = own_host(&bed, &rust_example);
    second.env(
        "SAWMILL_DRIVER",
        bed.path(&format!("state/sawmill/drivers/{}/driver.sock", driver.name)),
    );
    let refused = second.stderr(Stdio::piped()).output().expect("it runs");
    let text = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && text.contains("its own host"), "{text}");
    driver.connect().write(0, &[1; 4096]).expect("the first serves on");
    let _ = bed.sawmill(&["driver", "end", &driver.name]).ok();
    assert!(driver.wait().success());
}
