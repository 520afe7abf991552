//! Programs for `sawmill handoff --binary`: one that only pretends to be a server, and one that
//! sets something up before it becomes the real one.
//!
//! Either may pause at a point until the test has done its work there, so nothing depends on
//! timing.
//!
//! Not here: asking for a hand-off, and following the process that took over (`server`).

use std::fs::{File, Permissions};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, FileType, Mode, OFlags, mknodat};

use crate::machine::{sawmill_binary, wait_for};
use crate::test_bed::TestBed;

/// An impostor's messages until its predecessor has released its volumes and sent its doors.
pub const TAKES_ALL: &str = "send(word='hello', conversation=1, version='9.9')
send(word='prepared')
receive()
receive()
";

/// A program that runs these lines of Python. It has its socket as `s`, `send(word)` and
/// `receive()`, and `hold(name)`, which waits for the test; see [`reached`].
#[must_use]
pub fn impostor(bed: &TestBed, lines: &str) -> PathBuf {
    let folder = bed.path("");
    let text = format!(
        "#!/usr/bin/python3
import json, os, signal, socket, struct, sys
s = socket.socket(fileno=os.dup(0))
def send(**word):
    body = json.dumps(word).encode()
    s.sendall(b'SWM1' + struct.pack('<IQ', 0, len(body)) + body)
def receive():
    head, fds, *_ = socket.recv_fds(s, 16, 253)
    length = struct.unpack('<IQ', head[4:16])[1]
    body = b''
    while len(body) < length:
        body += s.recv(length - len(body))
    return body, fds
def hold(name):
    open({folder:?} + '/hold-' + name).read()
{lines}
"
    );
    script(bed, "impostor", &text)
}

/// A program that runs these lines of shell, and then execs the real server. `hold NAME` waits for
/// the test.
#[must_use]
pub fn real_after(bed: &TestBed, lines: &str) -> PathBuf {
    let (folder, real) = (bed.path(""), sawmill_binary());
    let text = format!(
        "#!/bin/sh
hold() {{ cat '{}/hold-'$1 < /dev/null; }}
{lines}
exec '{}' \"$@\"
",
        folder.display(),
        real.display()
    );
    script(bed, "after", &text)
}

fn script(bed: &TestBed, name: &str, text: &str) -> PathBuf {
    for hold in text.split("hold").skip(1).map(|rest| rest.trim_start_matches([' ', '(', '\''])) {
        let end = hold.find(|c: char| !c.is_ascii_alphanumeric()).unwrap_or(hold.len());
        let pipe = pipe(bed, &hold[..end]);
        if !pipe.exists() {
            mknodat(CWD, &pipe, FileType::Fifo, Mode::from_raw_mode(0o600), 0)
                .expect("room for a pipe");
        }
    }
    let path = bed.path(name);
    std::fs::write(&path, text).expect("room for a script");
    std::fs::set_permissions(&path, Permissions::from_mode(0o700)).expect("our own file");
    path
}

fn pipe(bed: &TestBed, name: &str) -> PathBuf {
    bed.path(&format!("hold-{name}"))
}

/// A paused program. It continues when this is dropped.
pub struct PausedProgram(File);

impl PausedProgram {
    /// Lets it continue.
    pub fn resume(self) {
        drop(self.0);
    }
}

/// Waits until a program pauses under this name.
#[must_use]
pub fn reached(bed: &TestBed, name: &str) -> PausedProgram {
    let pipe: &Path = &pipe(bed, name);
    let nobody_reads = OFlags::NONBLOCK.bits() as i32;
    PausedProgram(wait_for(&format!("a program holds still at {name}"), || {
        File::options().write(true).custom_flags(nobody_reads).open(pipe).ok()
    }))
}
