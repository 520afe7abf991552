//! The ends of a link, `sawmill target` and `sawmill attach`, as running processes with their
//! events.
//!
//! Readiness is an end's own event; nothing here guesses by time. An end that is dropped is killed.
//!
//! Not here: `sawmill serve` (`server`), a link without processes (`crates/link/tests`).

use std::io::{BufRead, BufReader};
use std::net::UdpSocket;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::machine::PATIENCE;
use crate::nbd::{Client, Style};
use crate::test_bed::{CommandOutput, TestBed};

/// A running end.
pub struct End {
    line: String,
    child: Child,
    events: Receiver<Value>,
    log: Arc<Mutex<String>>,
    listening: Option<JoinHandle<()>>,
    /// Its ready event.
    pub ready: Value,
}

impl End {
    /// Starts an end and waits until it is ready.
    ///
    /// # Panics
    /// When it ends before.
    #[must_use]
    pub fn start(bed: &TestBed, words: &[&str]) -> Self {
        Self::launch(&mut bed.command(&[words, &["--json"]].concat()))
    }

    /// The same with a complete command, which prints events.
    ///
    /// # Panics
    /// When it ends before it is ready.
    #[must_use]
    pub fn launch(command: &mut Command) -> Self {
        let mut child = command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the binary under test starts");
        let (sender, events) = channel();
        let stdout = child.stdout.take().expect("a pipe was asked for");
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                // The receiver may be gone, but the pipe must still be drained.
                let _ = sender.send(serde_json::from_str(&line).expect("an event is JSON"));
            }
        });
        let stderr = child.stderr.take().expect("a pipe was asked for");
        let log = Arc::<Mutex<String>>::default();
        let log_writer = log.clone();
        let listening = std::thread::spawn(move || {
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                let mut log = log_writer.lock().expect("no thread panics");
                log.push_str(&line);
                log.push('\n');
            }
        });
        let line = format!("{command:?}");
        let mut end =
            End { line, child, events, log, listening: Some(listening), ready: Value::Null };
        while end.ready.is_null() {
            match end.next_event() {
                Some(event) if event["event"] == "ready" => end.ready = event,
                Some(_) => {}
                None => panic!("it did not get ready: {:?}", end.finished()),
            }
        }
        end
    }

    /// The next event, or none when it has ended.
    ///
    /// # Panics
    /// When it is silent for too long.
    pub fn next_event(&mut self) -> Option<Value> {
        match self.events.recv_timeout(PATIENCE) {
            Ok(event) => Some(event),
            Err(RecvTimeoutError::Disconnected) => None,
            Err(RecvTimeoutError::Timeout) => panic!("`{}` was silent", self.line),
        }
    }

    /// The URI of its first door.
    ///
    /// # Panics
    /// When it has none.
    #[must_use]
    pub fn uri(&self) -> String {
        self.ready["uri"].as_str().expect("an attachment has a door").to_owned()
    }

    /// A client of its NBD door.
    ///
    /// # Panics
    /// When it cannot connect.
    #[must_use]
    pub fn connect(&self) -> Client {
        Client::connect(&self.uri(), Style::Structured).expect("the door is open")
    }

    /// Suspends the process, or resumes it.
    ///
    /// # Panics
    /// When it is not there.
    pub fn freeze(&self, frozen: bool) {
        self.signal(if frozen { Signal::STOP } else { Signal::CONT });
    }

    /// Kills it.
    ///
    /// # Panics
    /// When it is not there.
    pub fn kill(mut self) {
        self.child.kill().expect("a process of ours");
        let _ = self.child.wait();
    }

    /// Asks it to end.
    ///
    /// # Panics
    /// When it is not there.
    pub fn request_end(&self) {
        self.signal(Signal::TERM);
    }

    /// Sends it a signal.
    ///
    /// # Panics
    /// When it is not there.
    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).expect("a process of ours");
    }

    /// Asks it to end, and waits for its exit code and output.
    ///
    /// # Panics
    /// When it is not there.
    #[must_use]
    pub fn stop(self) -> CommandOutput {
        self.request_end();
        self.finished()
    }

    /// Its log so far.
    #[must_use]
    pub fn stderr(&self) -> String {
        self.log.lock().map_or_else(|poisoned| poisoned.into_inner().clone(), |log| log.clone())
    }

    /// Waits for its end.
    ///
    /// # Panics
    /// When it cannot be waited for.
    #[must_use]
    pub fn finished(mut self) -> CommandOutput {
        let status = self.child.wait().expect("a process of ours");
        self.listening.take().expect("joined once").join().expect("it only reads");
        let stderr = self.stderr();
        CommandOutput {
            line: self.line.clone(),
            code: status.code(),
            stdout: String::new(),
            stderr,
        }
    }
}

impl Drop for End {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Addresses of loopback, of these kinds, at ports that were free a moment ago, with commas between
/// them.
///
/// # Panics
/// When there are none.
#[must_use]
pub fn addresses(kinds: &[&str]) -> String {
    // Held until all are known, so that all differ.
    let free: Vec<(UdpSocket, std::net::TcpListener)> = kinds
        .iter()
        .map(|_| {
            loop {
                let tcp = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
                if let Ok(udp) = UdpSocket::bind(tcp.local_addr().expect("bound")) {
                    return (udp, tcp);
                }
            }
        })
        .collect();
    let address = |(kind, (udp, _)): (&&str, &(UdpSocket, _))| {
        format!("{kind}:{}", udp.local_addr().expect("bound"))
    };
    kinds.iter().zip(&free).map(address).collect::<Vec<_>>().join(",")
}

/// A key in the bed, and its path.
///
/// # Panics
/// When it cannot be made.
#[must_use]
pub fn key(bed: &TestBed, name: &str) -> String {
    let path = bed.path(name).display().to_string();
    let _ = bed.sawmill(&["link", "key", &path]).ok();
    path
}
