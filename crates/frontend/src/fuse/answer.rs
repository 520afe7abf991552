//! The answers on `/dev/fuse`, encoded as bytes.
//!
//! The layouts are those of linux/fuse.h. Except for [`head`], every function returns a complete
//! answer; the data of a read follows its head in the same system call.
//!
//! Invariants: an answer begins with its total length in bytes and, after the errno, the number of
//! its request; a notification has the number 0. The entries of a folder never exceed the length
//! that the kernel asked for.
//!
//! Not here: requests (`protocol`), I/O (`channel`).

use super::protocol::{self, FILE, ROOT};

/// Bytes before the body of every answer.
pub(super) const HEAD_BYTES: usize = 16;

/// How long the kernel may cache the file's attributes and name; a resize invalidates them.
const VALID_S: u64 = 3600;
/// The same for the folder, which never changes: a `stat` of a mountpoint without a server does not
/// wait.
const FOLDER_VALID_S: u64 = 100 * 365 * 86400;
/// The unit of statfs; also the granularity in which a loop device discards.
const GRAIN_BYTES: u32 = 4096;

// From linux/fuse.h: how a file is opened.
const DIRECT_IO: u32 = 1 << 0;
const KEEP_CACHE: u32 = 1 << 1;
const NO_FLUSH: u32 = 1 << 5;
const PARALLEL_WRITES: u32 = 1 << 6;

// From linux/stat.h and dirent.h.
const FOLDER_MODE: u32 = 0o040_000;
const FILE_MODE: u32 = 0o100_000;
const FOLDER_ENTRY: u32 = 4;
const FILE_ENTRY: u32 = 8;

// Notifications, which answer no request.
const INVALIDATE_NODE: i32 = 2;
const RESEND: i32 = 7;

/// The facts behind the attributes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Attributes {
    pub(super) size_bytes: u64,
    /// The file's permissions.
    pub(super) mode: u32,
    pub(super) user: u32,
    pub(super) group: u32,
    /// When the server started, in seconds of Unix time.
    pub(super) time_s: u64,
}

/// The facts agreed on in the greeting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct InitParameters {
    pub(super) minor: u32,
    pub(super) flags: u64,
    pub(super) write_bytes_max: u32,
}

/// Appends bytes.
struct Writer(Vec<u8>);

impl Writer {
    fn u16(mut self, value: u16) -> Self {
        self.0.extend_from_slice(&value.to_ne_bytes());
        self
    }

    fn u32(mut self, value: u32) -> Self {
        self.0.extend_from_slice(&value.to_ne_bytes());
        self
    }

    fn u64(mut self, value: u64) -> Self {
        self.0.extend_from_slice(&value.to_ne_bytes());
        self
    }

    fn zeroes(mut self, bytes: usize) -> Self {
        self.0.resize(self.0.len() + bytes, 0);
        self
    }

    /// Writes the total length into the head.
    fn end(mut self) -> Vec<u8> {
        let length = self.0.len() as u32;
        self.0[..4].copy_from_slice(&length.to_ne_bytes());
        self.0
    }
}

fn begin(unique: u64) -> Writer {
    Writer(Vec::with_capacity(160)).zeroes(8).u64(unique)
}

/// The head of an answer with `body_bytes` after it; `errno` is zero or positive.
pub(super) fn head(unique: u64, errno: i32, body_bytes: usize) -> [u8; HEAD_BYTES] {
    let mut head = [0; HEAD_BYTES];
    head[..4].copy_from_slice(&((HEAD_BYTES + body_bytes) as u32).to_ne_bytes());
    head[4..8].copy_from_slice(&(-errno).to_ne_bytes());
    head[8..].copy_from_slice(&unique.to_ne_bytes());
    head
}

/// Agrees with the kernel. `requests_max` is the number of requests that it may have in flight.
pub(super) fn init(
    unique: u64,
    parameters: &InitParameters,
    readahead_bytes_max: u32,
    requests_max: u16,
) -> Vec<u8> {
    let pages = u16::try_from(parameters.write_bytes_max.div_ceil(4096)).unwrap_or(u16::MAX);
    begin(unique)
        .u32(protocol::MAJOR)
        .u32(parameters.minor)
        .u32(readahead_bytes_max)
        .u32(parameters.flags as u32)
        .u16(requests_max)
        // The share at which the kernel counts the file system as congested: three quarters, as in
        // its own defaults.
        .u16(requests_max / 4 * 3)
        .u32(parameters.write_bytes_max)
        // Times in whole nanoseconds.
        .u32(1)
        .u16(pages)
        .u16(0)
        .u32((parameters.flags >> 32) as u32)
        .zeroes(28)
        .end()
}

/// Answers a kernel with a newer major version, which then retries with ours.
pub(super) fn init_other_major(unique: u64) -> Vec<u8> {
    begin(unique).u32(protocol::MAJOR).u32(protocol::MINOR_MAX).zeroes(16).end()
}

fn attributes(to: Writer, node: u64, facts: &Attributes) -> Writer {
    let folder = node == ROOT;
    let size_bytes = if folder { 0 } else { facts.size_bytes };
    // Users with read permission on the file may also search the folder.
    let mode = if folder {
        FOLDER_MODE | facts.mode | facts.mode >> 2 & 0o111
    } else {
        FILE_MODE | facts.mode
    };
    to.u64(node)
        .u64(size_bytes)
        .u64(size_bytes.div_ceil(512))
        .u64(facts.time_s)
        .u64(facts.time_s)
        .u64(facts.time_s)
        .zeroes(12)
        .u32(mode)
        .u32(if folder { 2 } else { 1 })
        .u32(facts.user)
        .u32(facts.group)
        .u32(0)
        .u32(GRAIN_BYTES)
        .u32(0)
}

/// The attributes of a node.
pub(super) fn attributes_of(unique: u64, node: u64, facts: &Attributes) -> Vec<u8> {
    let valid_s = if node == ROOT { FOLDER_VALID_S } else { VALID_S };
    attributes(begin(unique).u64(valid_s).zeroes(8), node, facts).end()
}

/// The entry of the file, found by its name.
pub(super) fn entry(unique: u64, facts: &Attributes) -> Vec<u8> {
    let head = begin(unique).u64(FILE).u64(0).u64(VALID_S).u64(VALID_S).zeroes(8);
    attributes(head, FILE, facts).end()
}

/// An open file: every access reaches the server, several at the same time.
pub(super) fn opened(unique: u64) -> Vec<u8> {
    // Without a page cache, other doors of the volume see a write at once. No flush at a close: a
    // process that waits in a close cannot be killed (decision 0019).
    begin(unique).u64(0).u32(DIRECT_IO | NO_FLUSH | PARALLEL_WRITES).u32(0).end()
}

/// An open folder.
pub(super) fn opened_folder(unique: u64) -> Vec<u8> {
    begin(unique).u64(0).u32(KEEP_CACHE).u32(0).end()
}

/// The number of bytes that a write stored.
pub(super) fn written(unique: u64, bytes: u32) -> Vec<u8> {
    begin(unique).u32(bytes).u32(0).end()
}

/// The result of a seek.
pub(super) fn sought(unique: u64, offset: u64) -> Vec<u8> {
    begin(unique).u64(offset).end()
}

/// The statistics of the file system: as large as the file, and full.
pub(super) fn stat_fs(unique: u64, size_bytes: u64, name_bytes_max: u32) -> Vec<u8> {
    begin(unique)
        .u64(size_bytes.div_ceil(u64::from(GRAIN_BYTES)))
        .zeroes(16)
        .u64(1)
        .u64(0)
        .u32(GRAIN_BYTES)
        .u32(name_bytes_max)
        .u32(GRAIN_BYTES)
        .zeroes(28)
        .end()
}

/// The folder's entries from `offset` on, as many as fit into `length_max` bytes.
pub(super) fn folder(unique: u64, offset: u64, length_max: u32, name: &[u8]) -> Vec<u8> {
    let entries = [
        (ROOT, FOLDER_ENTRY, &b"."[..]),
        (ROOT, FOLDER_ENTRY, &b".."[..]),
        (FILE, FILE_ENTRY, name),
    ];
    let mut to = begin(unique);
    for (n, (node, kind, name)) in (1u64..).zip(entries) {
        let padding = name.len().next_multiple_of(8) - name.len();
        let length = 24 + name.len() + padding;
        // The offset is the number of the last entry that the reader has; entry numbers begin with
        // 1, because 0 stands for the start.
        if n <= offset {
            continue;
        }
        if to.0.len() - HEAD_BYTES + length > length_max as usize {
            break;
        }
        to = to.u64(node).u64(n).u32(name.len() as u32).u32(kind);
        to.0.extend_from_slice(name);
        to = to.zeroes(padding);
    }
    to.end()
}

/// A notification that makes the kernel drop the file's cached attributes.
pub(super) fn invalidate_file() -> Vec<u8> {
    // A negative offset: attributes only.
    let mut message = begin(0).u64(FILE).u64(u64::MAX).u64(0).end();
    message[4..8].copy_from_slice(&INVALIDATE_NODE.to_ne_bytes());
    message
}

/// A notification that makes the kernel resend every request that was read and not answered.
pub(super) fn resend() -> [u8; HEAD_BYTES] {
    head(0, -RESEND, 0)
}
