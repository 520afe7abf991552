//! Tells the binary which commit it is built from: `SAWMILL_COMMIT`, "unknown" without git.

use std::process::Command;

fn git(arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").args(arguments).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.trim().to_owned())
}

fn main() {
    // A new commit changes one of these two files.
    for name in ["HEAD", "logs/HEAD"] {
        if let Some(path) = git(&["rev-parse", "--git-path", name]) {
            println!("cargo:rerun-if-changed={path}");
        }
    }
    println!("cargo:rerun-if-changed=build.rs");
    let commit = git(&["log", "-1", "--format=%h %cs"]).unwrap_or_else(|| "unknown".to_owned());
    println!("cargo:rustc-env=SAWMILL_COMMIT={commit}");
}
