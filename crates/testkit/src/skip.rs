//! Skipped tests: counted with their reason, so that a green run does not hide what it left out.
//!
//! A test is skipped only for lack of what no set-up can provide: root, FUSE, a kernel's feature.
//! Not here: how they are reported (`tests/run.sh`), and what a test needs (each crate's `tests/`).

use std::io::Write;

/// Counts the running test as skipped: a line in the file that `SAWMILL_SKIP_LOG` names, and one on
/// the test's own output. The test must return afterwards. Call it on the test's own thread, whose
/// name is the test's.
pub fn skip(why: &str) {
    let test = std::thread::current().name().unwrap_or("a test").to_owned();
    println!("skipped: {test}: {why}");
    if let Some(path) = std::env::var_os("SAWMILL_SKIP_LOG") {
        let log = std::fs::OpenOptions::new().append(true).create(true).open(path);
        if let Ok(mut log) = log {
            // Without the line the test counts as passed; nothing else depends on it.
            let _ = writeln!(log, "{test}: {why}");
        }
    }
}
