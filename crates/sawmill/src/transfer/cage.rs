//! Runs QEMU's programs, which read untrusted images: with an environment of two variables, without
//! network where the kernel allows that, and with limits on memory, files and time.
//!
//! Invariants: `run` kills a program that takes too long, and waits for it. Output beyond a limit
//! is not read. A program has the network only where the kernel cannot withhold it, and the log
//! says so.
//!
//! Not here: their tasks (`image`), and which images they never see (`inspect_image`).

use std::io;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

use sawmill_sys::Bounds;

/// Address space: QEMU reserves much more than it uses.
const MEMORY_BYTES: u64 = 8 << 30;
const FILES_MAX: u64 = 256;
/// An image of terabytes takes minutes of CPU time.
const CPU_S_MAX: u64 = 6 * 3600;
/// The longest output to read.
const ANSWER_BYTES_MAX: u64 = 16 << 20;

/// What a program may do to files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    /// Nothing.
    Read,
    /// Write them, to create an image.
    Write,
}

/// Starts a program; `fill` adds its arguments.
pub(super) fn spawn(name: &str, access: Access, fill: &dyn Fn(&mut Command)) -> io::Result<Child> {
    // A program that only reads gets a limit of no bytes for every file that it writes.
    let file_bytes = (access == Access::Read).then_some(0);
    let start = |has_network: bool| {
        let mut command = Command::new(name);
        command.env_clear().env("LANG", "C.UTF-8").stdin(Stdio::null());
        if let Some(path) = std::env::var_os("PATH") {
            command.env("PATH", path);
        }
        fill(&mut command);
        let bounds = Bounds {
            memory_bytes: MEMORY_BYTES,
            files: FILES_MAX,
            cpu_s: CPU_S_MAX,
            file_bytes,
            has_network,
        };
        sawmill_sys::restrict(&mut command, bounds).spawn()
    };
    match start(false) {
        Err(error) if sawmill_sys::is_no_network(&error) => {
            tracing::warn!(
                "{name} runs with the network of this machine: the kernel does not give it a \
                 network namespace of its own"
            );
            start(true)
        }
        started => started,
    }
}

/// Runs a program to its end. `None`: it took longer than `time_max` and was killed.
pub(super) fn run(
    name: &str,
    access: Access,
    time_max: Duration,
    fill: &dyn Fn(&mut Command),
) -> io::Result<Option<Output>> {
    let mut child = spawn(name, access, &|command| {
        fill(command);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
    })?;
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    std::thread::scope(|scope| {
        // Both at once: the program stops when either pipe is full.
        let stdout = scope.spawn(|| read(stdout));
        let stderr = scope.spawn(|| read(stderr));
        let status = end(&mut child, time_max);
        let (stdout, stderr) = (stdout.join(), stderr.join());
        let panic_error = || io::Error::other("the thread that reads the output of a program died");
        let (stdout, stderr) =
            (stdout.map_err(|_| panic_error())?, stderr.map_err(|_| panic_error())?);
        Ok(status?.map(|status| Output { status, stdout, stderr }))
    })
}

/// Reads the output of a program, up to the limit of an answer.
fn read(from: Option<impl io::Read>) -> Vec<u8> {
    let mut output = Vec::new();
    if let Some(from) = from {
        // After an error, what was read before it is the answer.
        let _ = io::Read::read_to_end(&mut io::Read::take(from, ANSWER_BYTES_MAX), &mut output);
    }
    output
}

fn end(child: &mut Child, time_max: Duration) -> io::Result<Option<ExitStatus>> {
    let deadline = Instant::now() + time_max;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if Instant::now() > deadline {
            child.kill()?;
            child.wait()?;
            return Ok(None);
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_has_no_secret_of_ours_and_is_ended_when_it_takes_too_long() {
        let minute = Duration::from_secs(60);
        let output = run("env", Access::Read, minute, &|_| ()).unwrap().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let names: Vec<&str> =
            text.lines().filter_map(|line| Some(line.split_once('=')?.0)).collect();
        assert!(names.iter().all(|name| ["PATH", "LANG"].contains(name)), "{text}");
        let outcome = run("sleep", Access::Read, Duration::ZERO, &|command| {
            command.arg("1000");
        });
        assert!(outcome.unwrap().is_none());
    }
}
