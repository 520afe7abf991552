//! A running `sawmill run`: a device whose driver is another program, and that program's deaths.
//!
//! Readiness and the driver's coming and going are the host's own events; nothing here guesses by
//! time.
//!
//! Not here: `sawmill serve` (`server`), the drivers (`examples`, `compiled`, `golang`).

use std::ffi::OsStr;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::machine::{PATIENCE, command, output_text};
use crate::nbd::{Client, Style};
use crate::test_bed::TestBed;

/// The same driver with its error output in a file, so that expected errors do not look like a
/// failure of the test.
#[must_use]
pub fn saying_into(log: &Path, driver: &Command) -> Command {
    let mut shell = Command::new("sh");
    shell.args(["-c", "exec 2>>\"$0\"; exec \"$@\""]).arg(log);
    shell.arg(driver.get_program()).args(driver.get_args()).stdin(Stdio::null());
    shell.envs(driver.get_envs().filter_map(|(name, value)| Some((name, value?))));
    shell
}

/// A device with a driver. Its host is killed when dropped.
pub struct DrivenDevice {
    child: Child,
    /// Drivers that the host did not start.
    drivers: Vec<Child>,
    socket: String,
    events: Receiver<Value>,
    /// Where the device is.
    pub uri: String,
    /// Process of the driver that is attached.
    pub driver: u32,
}

impl DrivenDevice {
    /// Starts `sawmill run --name NAME ARGUMENTS -- DRIVER`, with an NBD door, and waits until it
    /// is ready.
    ///
    /// # Panics
    /// When it does not get ready.
    #[must_use]
    pub fn start(bed: &TestBed, name: &str, arguments: &[&str], driver: &Command) -> Self {
        let door = format!("nbd=unix:{}", bed.path(&format!("{name}.sock")).display());
        let mut host = bed.command(&["run", "--json", "--name", name, "--door", &door]);
        host.args(arguments).arg("--").arg(driver.get_program()).args(driver.get_args());
        let set = driver.get_envs().filter_map(|(name, value)| value.map(|value| (name, value)));
        host.envs(set.collect::<Vec<(&OsStr, &OsStr)>>());
        let mut driven = DrivenDevice::launch(&mut host);
        driven.wait_until_ready();
        driven
    }

    /// Starts `sawmill run --name NAME ARGUMENTS`, and a driver that is not its child.
    ///
    /// # Panics
    /// When it does not get ready.
    #[must_use]
    pub fn beside(bed: &TestBed, name: &str, arguments: &[&str], driver: &mut Command) -> Self {
        let door = format!("nbd=unix:{}", bed.path(&format!("{name}.sock")).display());
        let mut host = bed.command(&["run", "--json", "--name", name, "--door", &door]);
        let mut driven = DrivenDevice::launch(host.args(arguments));
        driven.attach(driver);
        driven.wait_until_ready();
        driven
    }

    fn launch(host: &mut Command) -> Self {
        let mut child = host.stdout(Stdio::piped()).spawn().expect("the binary under test starts");
        let stdout = child.stdout.take().expect("a pipe was asked for");
        let (sender, events) = channel();
        std::thread::spawn(move || {
            // A driver's own output arrives here too: only events are objects.
            let lines = BufReader::new(stdout).lines().map_while(Result::ok);
            for line in lines.filter(|line| line.starts_with('{')) {
                // The receiver may be gone, but the pipe must still be drained.
                let _ = sender.send(serde_json::from_str(&line).expect("an event is JSON"));
            }
        });
        let (drivers, socket, uri) = (Vec::new(), String::new(), String::new());
        let mut driven = DrivenDevice { child, drivers, socket, events, uri, driver: 0 };
        while driven.socket.is_empty() {
            let event = driven.next_event();
            driven.socket = event["socket"].as_str().unwrap_or_default().to_owned();
        }
        driven
    }

    fn wait_until_ready(&mut self) {
        while self.uri.is_empty() || self.driver == 0 {
            let event = self.next_event();
            if event["event"] == "ready" {
                self.uri = event["doors"][0]["address"].as_str().expect("an address").to_owned();
            }
        }
    }

    /// Starts a driver that is not the host's child.
    ///
    /// # Panics
    /// When it does not start.
    pub fn attach(&mut self, driver: &mut Command) {
        let driver = driver.env("SAWMILL_DRIVER", &self.socket).spawn().expect("the driver starts");
        self.drivers.push(driver);
    }

    /// Kills a driver that is not the host's child, and attaches another one.
    ///
    /// # Panics
    /// When no such driver runs.
    pub fn kill_and_attach(&mut self, driver: &mut Command) {
        let mut killed = self.drivers.pop().expect("a driver");
        killed.kill().expect("a process of ours");
        let _ = killed.wait();
        while self.next_event()["state"] != "gone" {}
        self.attach(driver);
        self.wait_for_next_driver();
    }

    /// The next event.
    ///
    /// # Panics
    /// When there is none for too long, or the host has ended.
    pub fn next_event(&mut self) -> Value {
        let event = self.events.recv_timeout(PATIENCE).expect("the host goes on telling");
        if event["event"] == "driver" && event["state"] == "attached" {
            self.driver = event["pid"].as_u64().expect("a process") as u32;
        }
        event
    }

    /// Kills the driver, and waits until another one is attached.
    pub fn kill_driver(&mut self) {
        let pid = Pid::from_raw(self.driver.cast_signed()).expect("a process");
        kill_process(pid, Signal::KILL).expect("the driver is a process of ours");
        self.wait_for_next_driver();
    }

    /// Replaces the driver, and waits until the new one is attached.
    pub fn replace_driver(&mut self, bed: &TestBed, name: &str) {
        let _ = bed.sawmill(&["driver", "replace", name]).ok();
        self.wait_for_next_driver();
    }

    /// Waits until another driver is attached.
    pub fn wait_for_next_driver(&mut self) {
        let before = self.driver;
        while self.driver == before {
            let _ = self.next_event();
        }
    }

    /// A client of the device.
    ///
    /// # Panics
    /// When it cannot connect.
    #[must_use]
    pub fn connect(&self) -> Client {
        Client::connect(&self.uri, Style::Structured).expect("the door is open")
    }

    /// Ends the device cleanly, with SIGTERM.
    ///
    /// # Panics
    /// When it does not end well.
    pub fn terminate(mut self) {
        let host = Pid::from_child(&self.child);
        kill_process(host, Signal::TERM).expect("the host is a process of ours");
        let status = self.child.wait().expect("the host ends");
        assert!(status.success(), "the host ended with {status}");
    }

    /// Ends the device cleanly.
    ///
    /// # Panics
    /// When it does not end well.
    pub fn end(mut self, bed: &TestBed, name: &str) {
        let _ = bed.sawmill(&["driver", "end", name]).ok();
        let status = self.child.wait().expect("the host ends");
        assert!(status.success(), "the host ended with {status}");
    }
}

impl Drop for DrivenDevice {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
        for driver in &mut self.drivers {
            let _ = driver.kill();
            let _ = driver.wait();
        }
    }
}

/// The longest request of a fio run that writes and verifies, in nanoseconds.
///
/// # Panics
/// When fio finds an error or a wrong byte.
#[must_use]
pub fn fio_verifies(uri: &str, bed: &TestBed, arguments: &[&str]) -> u64 {
    let mut fio = command("fio");
    fio.current_dir(bed.path("")).args(["--name=driver", "--ioengine=nbd", "--output-format=json"]);
    fio.args(["--verify=crc32c", "--verify_fatal=1", "--verify_state_save=0", "--randrepeat=0"]);
    let output = fio.arg(format!("--uri={uri}")).args(arguments).output().expect("fio starts");
    assert!(output.status.success(), "{fio:?}: {}", output_text(&output));
    let text = String::from_utf8_lossy(&output.stdout);
    let json = text.find('{').map_or("", |start| &text[start..]);
    let report: Value =
        serde_json::from_str(json).unwrap_or_else(|error| panic!("{error}: {text}"));
    let job = &report["jobs"][0];
    assert_eq!(job["error"], 0, "{text}");
    ["read", "write"]
        .iter()
        .filter_map(|direction| job[direction]["lat_ns"]["max"].as_u64())
        .max()
        .unwrap_or(0)
}
