//! The requests of the kernel on `/dev/fuse`, as bytes: pure.
//!
//! The facts are those of linux/fuse.h, protocol 7.28 to 7.45; numbers are in the machine's byte
//! order. Only requests for a file system with one file have a name here; all others are
//! [`Operation::Unknown`].
//!
//! Invariant: no byte is read before the length was checked. Not here: answers (`answer`), I/O.

/// The protocol's major version.
pub(super) const MAJOR: u32 = 7;
/// The newest minor version whose fields are known here.
pub(super) const MINOR_MAX: u32 = 40;
/// The oldest supported minor version: it reports how large requests may be.
pub(super) const MINOR_MIN: u32 = 28;

/// Bytes before the arguments of every request.
pub(super) const HEAD_BYTES: usize = 40;
/// Bytes before the payload of a write.
pub(super) const WRITE_HEAD_BYTES: usize = HEAD_BYTES + 40;
/// The flag in the number of a resent request.
pub(super) const RESENT: u64 = 1 << 63;

/// The folder's inode.
pub(super) const ROOT: u64 = 1;
/// The file's inode.
pub(super) const FILE: u64 = 2;

/// The features in INIT.
pub(super) mod init {
    pub(in super::super) const ASYNC_READ: u64 = 1 << 0;
    pub(in super::super) const BIG_WRITES: u64 = 1 << 5;
    pub(in super::super) const ASYNC_DIRECT_IO: u64 = 1 << 15;
    pub(in super::super) const PARALLEL_FOLDERS: u64 = 1 << 18;
    pub(in super::super) const MAX_PAGES: u64 = 1 << 22;
    pub(in super::super) const EXTENDED: u64 = 1 << 30;
    /// Linux 6.9: the kernel can resend what another server took and did not answer.
    pub(in super::super) const RESEND: u64 = 1 << 39;
}

/// What a SETATTR changes.
pub(super) mod change {
    pub(in super::super) const MODE: u32 = 1 << 0;
    pub(in super::super) const USER: u32 = 1 << 1;
    pub(in super::super) const GROUP: u32 = 1 << 2;
    pub(in super::super) const SIZE: u32 = 1 << 3;
}

/// Modes of FALLOCATE, as of fallocate(2).
pub(super) mod allocate {
    pub(in super::super) const KEEP_SIZE: u32 = 0x01;
    pub(in super::super) const PUNCH_HOLE: u32 = 0x02;
    pub(in super::super) const ZERO_RANGE: u32 = 0x10;
    pub(in super::super) const UNSHARE: u32 = 0x40;
}

/// The target of LSEEK, as in lseek(2).
pub(super) const SEEK_DATA: u32 = 3;
/// See [`SEEK_DATA`].
pub(super) const SEEK_HOLE: u32 = 4;

/// Why a request cannot be parsed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Malformed {
    /// Not even its number is there, so it cannot be answered.
    Head,
    /// Its arguments do not match its kind.
    Arguments {
        /// The number for the answer.
        unique: u64,
        /// Its kind.
        opcode: u32,
    },
}

/// A request. Names and payload lie in the buffer that it was read into.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Message<'a> {
    /// Its number; the answer repeats it.
    pub(super) unique: u64,
    /// The inode that it concerns.
    pub(super) node: u64,
    pub(super) operation: Operation<'a>,
}

/// What the kernel asks for, with the arguments that a file system of one file needs. An unknown
/// operation is answered with ENOSYS, after which the kernel sends no more of that kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Operation<'a> {
    Init { major: u32, minor: u32, readahead_bytes_max: u32, flags: u64 },
    Destroy,
    Lookup { name: &'a [u8] },
    Forget,
    BatchForget,
    GetAttributes,
    SetAttributes { change: u32, size_bytes: u64 },
    Open,
    Read { offset: u64, length: u32 },
    Write { offset: u64, open_flags: u32, payload: &'a [u8] },
    StatFs,
    Release,
    Fsync,
    Flush,
    OpenFolder,
    ReadFolder { offset: u64, length: u32 },
    ReleaseFolder,
    FsyncFolder,
    Access,
    Interrupt,
    Allocate { offset: u64, length: u64, mode: u32 },
    Seek { offset: u64, whence: u32 },
    Unknown { opcode: u32 },
}

/// Reads bytes from the front.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*head)
    }

    fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_ne_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.take().map(u64::from_ne_bytes)
    }

    /// Bytes up to the first NUL.
    fn name(&mut self) -> Option<&'a [u8]> {
        let end = self.0.iter().position(|byte| *byte == 0)?;
        Some(&self.0[..end])
    }
}

/// Parses one request: exactly the bytes of one read.
pub(super) fn parse(bytes: &[u8]) -> Result<Message<'_>, Malformed> {
    let mut reader = Reader(bytes);
    let head = (|| {
        let (length, opcode) = (reader.u32()?, reader.u32()?);
        let (unique, node) = (reader.u64()?, reader.u64()?);
        // The user of the request, and extensions: the kernel has checked permissions.
        reader.take::<16>()?;
        Some((length, opcode, unique, node))
    })();
    let (length, opcode, unique, node) = head.ok_or(Malformed::Head)?;
    let malformed = Malformed::Arguments { unique, opcode };
    // One read returns exactly one request. If the lengths differ, nothing in it can be trusted.
    if length as usize != bytes.len() {
        return Err(malformed);
    }
    let operation = operation(opcode, &mut reader).ok_or(malformed)?;
    Ok(Message { unique, node, operation })
}

fn operation<'a>(opcode: u32, from: &mut Reader<'a>) -> Option<Operation<'a>> {
    Some(match opcode {
        1 => Operation::Lookup { name: from.name()? },
        2 => Operation::Forget,
        3 => Operation::GetAttributes,
        4 => set_attributes(from)?,
        14 => Operation::Open,
        15 => {
            let (offset, length, ..) = span(from)?;
            Operation::Read { offset, length }
        }
        16 => {
            let (offset, length, open_flags) = span(from)?;
            // Both lengths are the kernel's. If they differ, no part is taken for what a user
            // wrote.
            let payload = (from.0.len() == length as usize).then_some(from.0)?;
            Operation::Write { offset, open_flags, payload }
        }
        17 => Operation::StatFs,
        18 => Operation::Release,
        20 => Operation::Fsync,
        25 => Operation::Flush,
        26 => init(from)?,
        27 => Operation::OpenFolder,
        28 => {
            let (offset, length, ..) = span(from)?;
            Operation::ReadFolder { offset, length }
        }
        29 => Operation::ReleaseFolder,
        30 => Operation::FsyncFolder,
        34 => Operation::Access,
        36 => Operation::Interrupt,
        38 => Operation::Destroy,
        42 => Operation::BatchForget,
        43 => {
            from.u64()?;
            let (offset, length, mode) = (from.u64()?, from.u64()?, from.u32()?);
            Operation::Allocate { offset, length, mode }
        }
        46 => {
            from.u64()?;
            let (offset, whence) = (from.u64()?, from.u32()?);
            Operation::Seek { offset, whence }
        }
        opcode => Operation::Unknown { opcode },
    })
}

/// The arguments that reads and writes share: offset, length and the flags of the open file.
fn span(from: &mut Reader<'_>) -> Option<(u64, u32, u32)> {
    let _handle = from.u64()?;
    let (offset, length) = (from.u64()?, from.u32()?);
    let (_flags, _lock_owner) = (from.u32()?, from.u64()?);
    let open_flags = from.u32()?;
    from.u32()?;
    Some((offset, length, open_flags))
}

fn set_attributes<'a>(from: &mut Reader<'_>) -> Option<Operation<'a>> {
    let change = from.u32()?;
    let (_padding, _handle) = (from.u32()?, from.u64()?);
    let size_bytes = from.u64()?;
    // Times, mode and owners cannot change, so they are skipped.
    from.take::<64>()?;
    Some(Operation::SetAttributes { change, size_bytes })
}

fn init<'a>(from: &mut Reader<'_>) -> Option<Operation<'a>> {
    let (major, minor) = (from.u32()?, from.u32()?);
    let (readahead_bytes_max, low) = (from.u32()?, u64::from(from.u32()?));
    // Kernels before 5.17 end here.
    let high = if low & init::EXTENDED != 0 { u64::from(from.u32()?) } else { 0 };
    Some(Operation::Init { major, minor, readahead_bytes_max, flags: low | high << 32 })
}
