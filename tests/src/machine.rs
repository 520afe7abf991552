//! This machine: its abilities, running programs on it, and waiting for a condition with a
//! deadline.
//!
//! A missing program is a failure, not a skip: the set-up installs it. A test is skipped, with its
//! reason, and counted only for lack of what no set-up can provide (root, FUSE, loop devices).
//!
//! Not here: commands of `sawmill` with a store and a state folder (`test_bed`).

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

/// Time for any expected event; after it the test fails.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// The root of the repository.
#[must_use]
pub fn repository() -> PathBuf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    folder.parent().expect("the tests lie one folder below the repository's root").to_owned()
}

/// The binary under test: `SAWMILL_BINARY`, else the release build.
#[must_use]
pub fn sawmill_binary() -> PathBuf {
    let built = std::env::var_os("CARGO_TARGET_DIR")
        .map_or_else(|| repository().join("target"), PathBuf::from);
    let path = std::env::var_os("SAWMILL_BINARY")
        .map_or_else(|| built.join("release/sawmill"), PathBuf::from);
    assert!(
        path.is_file(),
        "{} is missing: run `cargo build --release -p sawmill` first",
        path.display()
    );
    path
}

/// Finds a program on the path, in root's own folders, or among the programs that the set-up built.
#[must_use]
pub fn program(name: &str) -> PathBuf {
    let path = std::env::var("PATH").unwrap_or_default();
    let prepared = repository().join(".prepared/bin").display().to_string();
    format!("{prepared}:{path}:/usr/sbin:/sbin:/usr/bin")
        .split(':')
        .map(|folder| Path::new(folder).join(name))
        .find(|candidate| candidate.is_file())
        .unwrap_or_else(|| panic!("{name} is missing: run tests/setup/prepare.sh test"))
}

/// A command for a program that the set-up installs.
#[must_use]
pub fn command(name: &str) -> Command {
    let mut command = Command::new(program(name));
    command.stdin(Stdio::null());
    command
}

/// Runs a command to its end and demands success; returns its standard output.
///
/// # Panics
/// When the command cannot be started or fails; the text names it and shows its output.
pub fn run(command: &mut Command) -> String {
    let output =
        command.output().unwrap_or_else(|error| panic!("{command:?} did not start: {error}"));
    assert!(
        output.status.success(),
        "{command:?} failed: {}\n{}",
        output.status,
        output_text(&output)
    );
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Starts a command and kills it after this long, whatever it is doing.
///
/// # Panics
/// When it cannot be started.
pub fn kill_after(mut command: Command, time: Duration) {
    let started = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn();
    let mut child = started.unwrap_or_else(|error| panic!("{command:?} did not start: {error}"));
    std::thread::sleep(time);
    // It may have exited.
    let _ = child.kill();
    child.wait().expect("a child can be waited for");
}

/// Both outputs of a program.
#[must_use]
pub fn output_text(output: &Output) -> String {
    format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )
}

pub use sawmill_testkit::{skip, wait_for};

/// Whether file systems can be mounted here through FUSE and a loop device.
pub fn require_mount() -> Result<(), String> {
    if !rustix::process::geteuid().is_root() {
        return Err("mounting needs root".to_owned());
    }
    for device in ["/dev/fuse", "/dev/loop-control"] {
        let opened = std::fs::OpenOptions::new().read(true).write(true).open(device);
        opened.map_err(|error| format!("mounting needs {device}: {error}"))?;
    }
    Ok(())
}
