//! A user of a door that is a file or a block device for its users.
//!
//! Invariant: it has the file open only during a call, because an open file delays the end of a
//! device.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;

use rustix::fs::OFlags;

use crate::conformance::{BLOCK_BYTES, DoorUser};

pub(crate) struct FileUser {
    path: PathBuf,
    writing: Option<JoinHandle<std::io::Result<()>>>,
}

impl FileUser {
    pub(crate) fn new(path: impl Into<PathBuf>) -> Self {
        FileUser { path: path.into(), writing: None }
    }
}

/// Opens it without the kernel's cache.
fn open(path: &Path) -> std::io::Result<File> {
    let flags = OFlags::DIRECT.bits().cast_signed();
    OpenOptions::new().read(true).write(true).custom_flags(flags).open(path)
}

/// Calls with a block of memory that begins where direct I/O wants it.
fn with_block<T>(byte: u8, call: impl FnOnce(&mut [u8]) -> T) -> T {
    let mut space = vec![byte; 2 * BLOCK_BYTES];
    let start = space.as_ptr().align_offset(BLOCK_BYTES);
    call(&mut space[start..][..BLOCK_BYTES])
}

impl DoorUser for FileUser {
    fn begin_write(&mut self, block: u64, byte: u8) {
        let path = self.path.clone();
        self.writing = Some(std::thread::spawn(move || {
            let file = open(&path)?;
            with_block(byte, |bytes| file.write_all_at(bytes, block * BLOCK_BYTES as u64))
        }));
    }

    fn is_answered(&self) -> bool {
        self.writing.as_ref().is_none_or(JoinHandle::is_finished)
    }

    fn finish_write(&mut self) {
        let writing = self.writing.take().expect("a write has begun");
        writing.join().expect("no panic").expect("the write succeeds");
    }

    fn read(&mut self, block: u64) -> Vec<u8> {
        let file = open(&self.path).expect("it opens");
        with_block(0xff, |bytes| {
            file.read_exact_at(bytes, block * BLOCK_BYTES as u64).expect("the read succeeds");
            bytes.to_vec()
        })
    }
}
