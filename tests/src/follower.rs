//! `sawmill replicate --follow` beside a test.
//!
//! Invariant: the process is killed when this is dropped, whatever it is doing.

use std::process::{Child, Stdio};

use crate::test_bed::TestBed;

/// A copier that follows a volume.
#[derive(Debug)]
pub struct Follower(Child);

impl Follower {
    /// Copies `source` to `destination` again and again, as a user of `bed`.
    #[must_use]
    pub fn start(bed: &TestBed, source: &str, destination: &str) -> Self {
        let mut command =
            bed.command(&["replicate", source, destination, "--follow", "--every", "20ms"]);
        Follower(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("it starts"))
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
