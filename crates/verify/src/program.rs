//! External programs: finding, running, watching and ending them, and the package to install when
//! one is missing.
//!
//! Invariant: a program that was started is ended, at the latest when its [`Process`] is dropped.
//!
//! Not here: the uses of each program (`bridge`, `file_system`, `cut_check`, `subject`).

use std::fs::File;
use std::io;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::{ANSWER_TIME_MAX, Error, Result};

/// The interval of checks of a condition that has no event.
const CHECK_EVERY: Duration = Duration::from_millis(2);

/// The programs that this crate runs, and the Debian packages that contain them.
const PACKAGES: [(&str, &str); 12] = [
    ("nbdfuse", "libnbd-bin (in later releases nbdfuse)"),
    ("fusermount3", "fuse3"),
    ("losetup", "mount"),
    ("mount", "mount"),
    ("umount", "mount"),
    ("mkfs.ext4", "e2fsprogs"),
    ("e2fsck", "e2fsprogs"),
    ("mkfs.xfs", "xfsprogs"),
    ("xfs_repair", "xfsprogs"),
    ("mkfs.btrfs", "btrfs-progs"),
    ("btrfs", "btrfs-progs"),
    ("sh", "dash"),
];

/// Finds a program in the folders of `PATH`, or in those that only root's `PATH` has.
pub fn find(name: &str) -> Result<PathBuf> {
    let path = std::env::var("PATH").unwrap_or_default();
    let mut folders = path.split(':').chain(["/usr/sbin", "/sbin", "/usr/bin", "/bin"]);
    let found =
        folders.find_map(|folder| Some(Path::new(folder).join(name)).filter(|path| path.is_file()));
    found.ok_or_else(|| {
        let known = PACKAGES.iter().find(|(program, _)| *program == name);
        let package = known.map_or(name, |(_, package)| package);
        Error::Missing(format!("the program {name} is missing; install it (on Debian: {package})"))
    })
}

/// A command for a program; fails if the program is missing.
pub fn command(name: &str) -> Result<Command> {
    let mut command = Command::new(find(name)?);
    // A program that asks something must fail and not wait for an answer.
    command.stdin(Stdio::null());
    Ok(command)
}

/// The output of a program and its exit status.
#[derive(Clone, Debug)]
pub struct ProgramOutput {
    /// How it ended: by an exit code or by a signal.
    pub status: ExitStatus,
    /// Standard output, followed by standard error.
    pub output: String,
}

/// Runs a command to its end, whatever its status.
pub fn finish(command: &mut Command) -> Result<ProgramOutput> {
    let output = command.output().map_err(|error| cannot_start(command, error))?;
    let bytes = [&output.stdout[..], &output.stderr[..]].concat();
    Ok(ProgramOutput {
        status: output.status,
        output: String::from_utf8_lossy(&bytes).into_owned(),
    })
}

/// Runs a command to its end; returns its output, or an error if it failed.
pub fn run(command: &mut Command) -> Result<String> {
    let finished = finish(command)?;
    if finished.status.success() {
        return Ok(finished.output);
    }
    let line = line_of(command);
    let (status, output) = (finished.status, last_lines(&finished.output));
    Err(Error::Subject(format!("`{line}` failed ({status}): {output}")))
}

fn cannot_start(command: &Command, source: io::Error) -> Error {
    Error::Io { what: format!("cannot start `{}`", line_of(command)), source }
}

fn line_of(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
}

/// The end of a program's output, on one line.
#[must_use]
pub fn last_lines(text: &str) -> String {
    let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    lines[lines.len().saturating_sub(4)..].join("; ")
}

/// A program in the background.
#[derive(Debug)]
pub struct Process {
    child: Child,
    line: String,
    output_path: PathBuf,
    ended: Option<ExitStatus>,
}

impl Process {
    /// Starts a program; its output goes to the file `output_path`.
    pub fn start(command: &mut Command, output_path: &Path) -> Result<Self> {
        // A file and no pipe: a full pipe that nobody reads would stop the program.
        let log = File::create(output_path)
            .map_err(|error| Error::io("cannot make", output_path, error))?;
        let both = log.try_clone().map_err(|error| Error::io("cannot open", output_path, error))?;
        let child = command
            .stdout(log)
            .stderr(both)
            .spawn()
            .map_err(|error| cannot_start(command, error))?;
        Ok(Process {
            child,
            line: line_of(command),
            output_path: output_path.to_owned(),
            ended: None,
        })
    }

    /// How it ended, if it has.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        if self.ended.is_none() {
            self.ended = self.child.try_wait().ok().flatten();
        }
        self.ended
    }

    /// The end of its output.
    #[must_use]
    pub fn output(&self) -> String {
        last_lines(&std::fs::read_to_string(&self.output_path).unwrap_or_default())
    }

    /// Calls `check` repeatedly until it returns an answer; fails when the program ends first or
    /// after [`ANSWER_TIME_MAX`].
    pub fn wait_for<T>(&mut self, what: &str, mut check: impl FnMut() -> Option<T>) -> Result<T> {
        let deadline = Instant::now() + ANSWER_TIME_MAX;
        loop {
            if let Some(answer) = check() {
                return Ok(answer);
            }
            // After the question: a program may have done its part and ended.
            let ended = self.ended().map(|status| format!("ended ({status})"));
            let timed_out = (Instant::now() > deadline)
                .then(|| format!("not after {} s", ANSWER_TIME_MAX.as_secs()));
            if let Some(why) = ended.or(timed_out) {
                let (line, output) = (&self.line, self.output());
                return Err(Error::Subject(format!("{what}: `{line}` {why}: {output}")));
            }
            std::thread::sleep(CHECK_EVERY);
        }
    }

    /// Sends SIGTERM and returns the exit status; kills the program if it does not end in time.
    pub fn stop(&mut self) -> ExitStatus {
        self.signal(Signal::TERM);
        self.await_end(ANSWER_TIME_MAX)
    }

    /// Kills the program and waits until it is gone.
    pub fn kill(&mut self) -> ExitStatus {
        self.signal(Signal::KILL);
        self.await_end(ANSWER_TIME_MAX)
    }

    /// Waits for its end, and kills it after `time_max`.
    pub fn await_end(&mut self, time_max: Duration) -> ExitStatus {
        let deadline = Instant::now() + time_max;
        loop {
            if let Some(status) = self.ended() {
                return status;
            }
            if Instant::now() > deadline {
                self.signal(Signal::KILL);
                let status = self.child.wait().unwrap_or_else(|_| ExitStatus::from_raw(-1));
                self.ended = Some(status);
                return status;
            }
            std::thread::sleep(CHECK_EVERY);
        }
    }

    fn signal(&mut self, signal: Signal) {
        if self.ended().is_none()
            && let Some(pid) = Pid::from_raw(self.child.id().cast_signed())
        {
            // The process may have ended since; then there is nothing to signal.
            let _ = kill_process(pid, signal);
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if self.ended().is_none() {
            self.kill();
        }
    }
}
