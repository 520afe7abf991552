//! Go, for the parts of the product that are written in it. A machine without a new enough Go skips
//! these tests. Not here: C, C++ and Rust (`compiled`), what an example must do (`examples`).

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use crate::machine::{repository, run};

/// Whether this machine has a Go that is new enough for the modules.
///
/// # Errors
/// The reason why not.
pub fn require_go() -> Result<(), String> {
    let outcome =
        Command::new("go").arg("env").arg("GOVERSION").env("GOTOOLCHAIN", "local").output();
    let version = outcome.map_err(|error| format!("no go: {error}"))?.stdout;
    let version = String::from_utf8_lossy(&version).trim().to_owned();
    let minor =
        version.strip_prefix("go1.").and_then(|rest| rest.split('.').next()?.parse::<u32>().ok());
    match minor {
        Some(minor) if minor >= 23 => Ok(()),
        _ => Err(format!("go is '{version}', older than 1.23")),
    }
}

/// A command of the Go of this machine, in a folder of the repository or an absolute one.
#[must_use]
pub fn go(folder: impl AsRef<Path>) -> Command {
    let mut go = Command::new("go");
    go.current_dir(repository().join(folder)).env("GOTOOLCHAIN", "local").env("CGO_ENABLED", "0");
    go.stdin(Stdio::null());
    go
}

/// An example in Go, built once.
///
/// # Panics
/// When it does not build.
#[must_use]
pub fn go_example(name: &str, arguments: &[&str]) -> Command {
    static FOLDER: OnceLock<tempfile::TempDir> = OnceLock::new();
    let folder = FOLDER.get_or_init(|| {
        let folder = tempfile::tempdir().expect("a folder");
        run(go("sdk/go/examples").args(["build", "-o"]).arg(folder.path()).arg("./..."));
        folder
    });
    let mut command = Command::new(folder.path().join(name));
    command.args(arguments).stdin(Stdio::null());
    command
}
