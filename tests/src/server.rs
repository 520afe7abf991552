//! A running `sawmill serve`: started, watched through its events, killed, stopped, frozen,
//! replaced.
//!
//! After a hand-off it is the process that took over. Its parent, the previous server, has exited,
//! and this process has asked the kernel to inherit such orphans.
//!
//! Readiness is the server's own event on its standard output; nothing here guesses by time.
//!
//! Not here: `sawmill run` (`driven`), the ends of a link (`linked`), the programs that a test
//! makes take over (`successor`).

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use rustix::process::{
    Pid, Signal, WaitOptions, getpid, kill_process, set_child_subreaper, waitpid,
};
use serde_json::Value;

use crate::machine::{self, PATIENCE, wait_for};
use crate::nbd::{Client, Style};
use crate::test_bed::{CommandOutput, TestBed};
use sawmill_testkit::Dice;

/// A server about to be started.
pub struct ServerBuilder<'a> {
    bed: &'a TestBed,
    volumes: Vec<String>,
    arguments: Vec<String>,
    listen: String,
    environment: Vec<(String, String)>,
    /// The program that starts it, with its first arguments.
    through: Vec<String>,
    /// Without an option for the place of its memory.
    default_memory: bool,
    /// Without options for the sizes of its journals and cache.
    default_sizes: bool,
}

impl<'a> ServerBuilder<'a> {
    /// Serves `volume` on a Unix socket in the test bed, with a small journal and cache.
    #[must_use]
    pub fn new(bed: &'a TestBed, volume: &str) -> Self {
        let listen = format!("unix:{}", bed.path("nbd.sock").display());
        let volumes = vec![volume.to_owned()];
        ServerBuilder {
            bed,
            volumes,
            arguments: Vec::new(),
            listen,
            environment: Vec::new(),
            through: Vec::new(),
            default_memory: false,
            default_sizes: false,
        }
    }

    /// Serves one more volume.
    #[must_use]
    pub fn and(mut self, volume: &str) -> Self {
        self.volumes.push(volume.to_owned());
        self
    }

    /// Adds options.
    #[must_use]
    pub fn with(mut self, arguments: &[&str]) -> Self {
        self.arguments.extend(arguments.iter().map(|&argument| argument.to_owned()));
        self
    }

    /// Sets a variable of its environment.
    #[must_use]
    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.environment.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Starts it through another program that execs it: that program and its first arguments.
    #[must_use]
    pub fn through(mut self, words: &[&str]) -> Self {
        self.through = words.iter().map(|&word| word.to_owned()).collect();
        self
    }

    /// Lets the server choose the place of its memory.
    #[must_use]
    pub fn with_default_memory(mut self) -> Self {
        self.default_memory = true;
        self
    }

    /// Lets the server choose the sizes of its journals and cache.
    #[must_use]
    pub fn with_default_sizes(mut self) -> Self {
        self.default_sizes = true;
        self
    }

    /// Listens elsewhere: `unix:PATH` or `tcp:ADDRESS:PORT`.
    #[must_use]
    pub fn at(mut self, listen: &str) -> Self {
        listen.clone_into(&mut self.listen);
        self
    }

    /// Starts the server and waits for every volume's ready event.
    ///
    /// # Panics
    /// When it ends before it is ready.
    #[must_use]
    pub fn start(self) -> Server {
        match self.attempt() {
            Ok(server) => server,
            Err(ended) => {
                panic!("`{}` did not get ready ({:?}):\n{}", ended.line, ended.code, ended.stderr)
            }
        }
    }

    /// Starts the server; returns its exit code and output if it ends before it is ready.
    pub fn attempt(self) -> Result<Server, CommandOutput> {
        let count = self.volumes.len();
        let mut server = self.launch();
        while server.ready.len() < count {
            match server.next_event() {
                Some(event) if event["event"] == "ready" => server.ready.push(event),
                Some(_) => {}
                None => return Err(server.finished()),
            }
        }
        Ok(server)
    }

    /// A crash in recovery: killed somewhere between the start of the process and its readiness, or
    /// just after.
    pub fn die_while_starting(self, dice: &mut Dice) {
        let server = self.launch();
        std::thread::sleep(std::time::Duration::from_micros(dice.below(60_000)));
        server.kill();
    }

    /// Starts the server and does not wait for anything.
    #[must_use]
    pub fn launch(self) -> Server {
        let mut words = vec!["serve".to_owned()];
        words.extend(self.volumes);
        words.extend(["--json".to_owned(), "--nbd".to_owned(), self.listen]);
        words.extend(self.arguments);
        let staging = self.bed.memory().display().to_string();
        for (option, value) in
            [("--journal-bytes", "64M"), ("--cache-bytes", "64M"), ("--staging", staging.as_str())]
        {
            let is_default =
                if option == "--staging" { self.default_memory } else { self.default_sizes };
            if !is_default && !words.iter().any(|word| word == option) {
                words.extend([option.to_owned(), value.to_owned()]);
            }
        }
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        set_child_subreaper(Some(getpid())).expect("Linux lets a process inherit orphans");
        let mut child = through(&self.through, self.bed.command(&words))
            .envs(self.environment)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the binary under test starts");
        let (sender, events) = channel();
        let stdout = child.stdout.take().expect("a pipe was asked for");
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                // The receiver may be gone, but the pipe must still be drained.
                let _ = sender.send(line);
            }
        });
        let log = Arc::new(Mutex::new(String::new()));
        let stderr = child.stderr.take().expect("a pipe was asked for");
        let keep = Arc::clone(&log);
        let listener = std::thread::spawn(move || {
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                let mut log = keep.lock().expect("no thread panics with this lock");
                log.push_str(&line);
                log.push('\n');
            }
        });
        let line = format!("sawmill {}", words.join(" "));
        let (listener, ready) = (Some(listener), Vec::new());
        Server { line, child, successor: None, events, log, listener, ready, status: None }
    }
}

/// The same command, started through another program that execs it.
fn through(words: &[String], command: Command) -> Command {
    let Some((program, first)) = words.split_first() else { return command };
    let mut outer = Command::new(program);
    outer.args(first).arg(command.get_program()).args(command.get_args()).stdin(Stdio::null());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => outer.env(name, value),
            None => outer.env_remove(name),
        };
    }
    outer
}

/// A server that runs or has ended. It is killed when dropped.
pub struct Server {
    line: String,
    child: Child,
    /// The process that took over from the child.
    successor: Option<Pid>,
    events: Receiver<String>,
    log: Arc<Mutex<String>>,
    listener: Option<std::thread::JoinHandle<()>>,
    ready: Vec<Value>,
    /// The exit code once it has ended; none inside when a signal ended it.
    status: Option<Option<i32>>,
}

impl Server {
    /// Hands over to a new process and follows that one; returns the output of `sawmill handoff`.
    ///
    /// # Panics
    /// When it was not handed over.
    pub fn hand_off(&mut self, bed: &TestBed, volume: &str) -> Value {
        let outcome = bed.sawmill(&["handoff", volume, "--json"]).json();
        self.follow(&outcome);
        outcome
    }

    /// Follows the process that a hand-off went to, and waits for its ready event.
    ///
    /// # Panics
    /// When that process does not get ready.
    pub fn follow(&mut self, outcome: &Value) {
        let pid = outcome["pid"].as_i64().and_then(|pid| Pid::from_raw(pid as i32));
        let before = self.process();
        self.successor = Some(pid.expect("a process took over"));
        let volumes = self.ready.len();
        self.ready.clear();
        while self.ready.len() < volumes {
            let event = self.next_event().expect("the successor speaks through the same pipe");
            if event["event"] == "ready" {
                self.ready.push(event);
            }
        }
        wait_for("the process that handed over ends", || {
            let ended =
                waitpid(Some(before), WaitOptions::NOHANG).is_ok_and(|status| status.is_none());
            (!ended).then_some(())
        });
    }

    fn process(&self) -> Pid {
        self.successor
            .unwrap_or_else(|| Pid::from_raw(self.child.id().cast_signed()).expect("a process"))
    }

    /// The next event, or none when the server has ended.
    ///
    /// # Panics
    /// When it stays silent for too long, or prints a line that is not a JSON object.
    pub fn next_event(&mut self) -> Option<Value> {
        match self.events.recv_timeout(PATIENCE) {
            Ok(line) => {
                let event: Value = serde_json::from_str(&line).unwrap_or_else(|error| {
                    panic!("`{}` printed no event: {error}: {line}", self.line)
                });
                Some(event)
            }
            Err(RecvTimeoutError::Disconnected) => None,
            Err(RecvTimeoutError::Timeout) => {
                panic!(
                    "`{}` was silent for {} s:\n{}",
                    self.line,
                    PATIENCE.as_secs(),
                    self.stderr()
                )
            }
        }
    }

    /// The ready event of the first volume.
    #[must_use]
    pub fn ready(&self) -> &Value {
        self.ready.first().expect("the server was started and is ready")
    }

    /// The URI of the first volume.
    #[must_use]
    pub fn uri(&self) -> String {
        self.uri_of(0)
    }

    /// The URI of the volume whose ready event came at `index`.
    #[must_use]
    pub fn uri_of(&self, index: usize) -> String {
        let uri = self.ready[index]["uri"].as_str();
        uri.unwrap_or_else(|| panic!("a ready event without a URI: {}", self.ready[index]))
            .to_owned()
    }

    /// A connection to the first volume.
    #[must_use]
    pub fn connect(&self) -> Client {
        Client::connect(&self.uri(), Style::Structured).unwrap_or_else(|error| {
            panic!("cannot connect to {}: {error}\n{}", self.uri(), self.stderr())
        })
    }

    /// The process.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.process().as_raw_nonzero().get().cast_unsigned()
    }

    /// Its standard error so far.
    #[must_use]
    pub fn stderr(&self) -> String {
        self.log.lock().expect("no thread panics with this lock").clone()
    }

    /// Whether the process still runs.
    pub fn is_running(&mut self) -> bool {
        if self.status.is_none() {
            self.status = match self.successor {
                None => self
                    .child
                    .try_wait()
                    .expect("the child can be waited for")
                    .map(|status| status.code()),
                Some(pid) => waitpid(Some(pid), WaitOptions::NOHANG)
                    .expect("orphans of ours can be waited for")
                    .map(|(_, status)| status.exit_status()),
            };
        }
        self.status.is_none()
    }

    /// Sends a signal. The process may already be gone.
    pub fn signal(&self, signal: Signal) {
        if self.status.is_none() {
            let _ = kill_process(self.process(), signal);
        }
    }

    /// `kill -9`, and waits until the process is gone.
    pub fn kill(mut self) {
        self.end();
    }

    /// Asks for an orderly end (SIGTERM) and waits for it.
    #[must_use]
    pub fn stop(self) -> CommandOutput {
        self.signal(Signal::TERM);
        self.finished()
    }

    /// Waits for the end of the process and returns its exit code and output.
    ///
    /// # Panics
    /// When it does not end.
    #[must_use]
    pub fn finished(mut self) -> CommandOutput {
        let deadline = Instant::now() + PATIENCE;
        while self.is_running() {
            if Instant::now() > deadline {
                let line = self.line.clone();
                let log = self.stderr();
                self.end();
                panic!("`{line}` did not end:\n{log}");
            }
            std::thread::sleep(std::time::Duration::from_millis(2));
        }
        if let Some(listener) = self.listener.take() {
            let _ = listener.join();
        }
        let mut stdout = String::new();
        while let Ok(line) = self.events.recv() {
            stdout.push_str(&line);
            stdout.push('\n');
        }
        let code = self.status.flatten();
        CommandOutput { line: self.line.clone(), code, stdout, stderr: self.stderr() }
    }

    /// The status document; the server was started with `--admin 127.0.0.1:0`.
    ///
    /// # Panics
    /// When the admin server gives no complete answer.
    #[must_use]
    pub fn status(&self) -> Value {
        let admin = self.ready()["admin"].as_str().expect("the server was started with --admin");
        let body = page(admin, "status");
        serde_json::from_str(&body).unwrap_or_else(|error| panic!("no JSON ({error}): {body}"))
    }

    /// Polls the status document until `is_met` is true of it.
    pub fn wait_for(&self, what: &str, is_met: impl Fn(&Value) -> bool) -> Value {
        machine::wait_for(what, || Some(self.status()).filter(&is_met))
    }

    /// Resident memory in bytes.
    #[must_use]
    pub fn resident_bytes(&self) -> u64 {
        let path = format!("/proc/{}/status", self.pid());
        let status = std::fs::read_to_string(&path).expect("the server runs");
        let line =
            status.lines().find(|line| line.starts_with("VmRSS:")).expect("Linux reports VmRSS");
        let number = line.split_whitespace().nth(1).and_then(|word| word.parse::<u64>().ok());
        number.expect("VmRSS is a number of KiB") * 1024
    }

    fn end(&mut self) {
        if self.is_running() {
            self.signal(Signal::KILL);
            while self.is_running() {
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.end();
        if std::thread::panicking() {
            println!("-- `{}` said:\n{}", self.line, self.stderr());
        }
    }
}

/// A page of an admin server, by its name there.
///
/// # Panics
/// When there is no complete answer.
#[must_use]
pub fn page(admin: &str, name: &str) -> String {
    let host = admin.trim_start_matches("http://").trim_end_matches('/');
    let fetch = || -> std::io::Result<String> {
        let mut stream = TcpStream::connect(host)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        write!(stream, "GET /{name} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    };
    let answer = fetch().unwrap_or_else(|error| panic!("{admin} gives no answer: {error}"));
    let (_, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no HTTP: {answer}"));
    body.to_owned()
}
