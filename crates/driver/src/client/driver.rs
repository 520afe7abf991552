//! The interface of a driver: blocking functions that worker threads call.
//!
//! An error of a function is an [`std::io::Error`]. What users of the device see of its errno
//! depends on the door (`docs/guide/doors.md`).
//!
//! Invariant: [`errno`] returns a number from 1 to 4095 whatever the error holds, because 0 means
//! success on the wire.
//!
//! Not here: the callers (`lane`, `work`).

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use rustix::io::Errno;
use sawmill_device::{Error, ErrorKind, Result};

use super::end_request::EndRequest;
use crate::batch::chunk::{ChunkEntry, entries};
use crate::options::Mode;
use crate::protocol::{Command, Control, ControlFacts, ControlKind, PacketSocket};

/// The abilities of a driver, besides reading.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Abilities {
    /// It accepts writes, discards and zeroes.
    pub write: bool,
    /// It makes writes durable when it gets a flush. Without this, they must be durable when they
    /// are answered.
    pub flush: bool,
    /// It can make a single write durable.
    pub fua: bool,
    /// It can release ranges.
    pub discard: bool,
    /// It can zero ranges without a payload.
    pub write_zeroes: bool,
    /// Requests may start and end at any byte; otherwise at multiples of the block size.
    pub any_byte: bool,
}

impl Default for Abilities {
    /// Writes and flushes, and nothing else.
    fn default() -> Self {
        let (fua, discard, write_zeroes, any_byte) = (false, false, false, false);
        Abilities { write: true, flush: true, fua, discard, write_zeroes, any_byte }
    }
}

impl Abilities {
    /// As options of the protocol: those that differ from the defaults. The host may set the
    /// others.
    pub(super) fn declare(self, facts: &mut ControlFacts, mode: Mode) {
        let is_plain = mode == Mode::Plain;
        // Only differences are declared, because a later driver must agree with the device in all
        // that it says.
        for (name, value, is_declared) in [
            ("can_discard", 1, self.discard && self.write),
            ("can_write_zeroes", 1, self.write_zeroes && self.write),
            ("read_only", 1, !self.write && is_plain),
            ("can_flush", 0, !self.flush && is_plain),
            ("can_fua", 1, self.fua && self.flush && is_plain),
            ("byte_granular", 1, self.any_byte && is_plain),
        ] {
            if is_declared {
                facts.add(name, value);
            }
        }
    }

    /// Checks that a driver can do everything that the device may ask for.
    pub(super) fn suffice(self, options: &ControlFacts) -> Result<()> {
        let missing = [
            ("read_only=0", options.get("read_only") == Some("0") && !self.write),
            ("can_discard=1", options.is_true("can_discard") && !self.discard),
            ("can_write_zeroes=1", options.is_true("can_write_zeroes") && !self.write_zeroes),
            ("byte_granular=1", options.is_true("byte_granular") && !self.any_byte),
        ];
        match missing.into_iter().find(|(_, is_missing)| *is_missing) {
            Some((option, _)) => Err(Error::new(
                ErrorKind::Invalid,
                format!("the device has {option}, but this driver cannot do that"),
            )),
            None => Ok(()),
        }
    }
}

/// A driver. It gets ranges in bytes, always inside the device, and several threads may call it at
/// the same time.
pub trait Driver: Send + Sync {
    /// Its abilities. Constant. Every driver says which: the host never calls what they leave out,
    /// and a default would leave out a `discard` that a driver has.
    fn abilities(&self) -> Abilities;

    /// Fills `into` with the bytes at `offset`: completely, holes with zeroes.
    ///
    /// # Errors
    /// The error for the reader.
    fn read(&self, offset: u64, into: &mut [u8]) -> io::Result<()>;

    /// Stores `bytes` at `offset`; with `fua`, durably. Called only with [`Abilities::write`].
    ///
    /// # Errors
    /// The error for the writer. Some, all or none of the bytes may be stored then.
    fn write(&self, offset: u64, bytes: &[u8], fua: bool) -> io::Result<()> {
        let _ = (offset, bytes, fua);
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Makes everything durable that was answered before the call. Every driver says how: a default
    /// would promise to users what a driver forgot to do.
    ///
    /// # Errors
    /// It is unknown then what is durable.
    fn flush(&self) -> io::Result<()>;

    /// Releases the range; its content may be lost. Called only with [`Abilities::discard`].
    ///
    /// # Errors
    /// The error for the user.
    fn discard(&self, offset: u64, length: u64) -> io::Result<()> {
        let _ = (offset, length);
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Makes the range read as zeroes; with `keep_space` it stays allocated. Called only with
    /// [`Abilities::write_zeroes`].
    ///
    /// # Errors
    /// The error for the user.
    fn write_zeroes(&self, offset: u64, length: u64, keep_space: bool) -> io::Result<()> {
        let _ = (offset, length, keep_space);
        Err(io::ErrorKind::Unsupported.into())
    }

    /// The host has accepted this driver; commands follow.
    fn attached(&self, device: &Device) {
        let _ = device;
    }

    /// The device is available at these doors.
    fn ready(&self, doors: &[Door]) {
        let _ = doors;
    }
}

impl<D: Driver + ?Sized> Driver for Arc<D> {
    fn abilities(&self) -> Abilities {
        (**self).abilities()
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        (**self).read(offset, into)
    }

    fn write(&self, offset: u64, bytes: &[u8], fua: bool) -> io::Result<()> {
        (**self).write(offset, bytes, fua)
    }

    fn flush(&self) -> io::Result<()> {
        (**self).flush()
    }

    fn discard(&self, offset: u64, length: u64) -> io::Result<()> {
        (**self).discard(offset, length)
    }

    fn write_zeroes(&self, offset: u64, length: u64, keep_space: bool) -> io::Result<()> {
        (**self).write_zeroes(offset, length, keep_space)
    }

    fn attached(&self, device: &Device) {
        (**self).attached(device);
    }

    fn ready(&self, doors: &[Door]) {
        (**self).ready(doors);
    }
}

/// A driver that receives writes in chunks (`mode=batch`, `docs/format/write_chunk.md`).
pub trait ChunkDriver: Send + Sync {
    /// As [`Driver::abilities`]; only `discard` and `write_zeroes` apply here.
    fn abilities(&self) -> Abilities;

    /// Stores all entries of a chunk. Several threads get chunks at the same time: of two entries
    /// that overlap, the one with the higher write number is newer, whichever is stored first.
    ///
    /// # Errors
    /// The next flush reports the error to users.
    fn write(&self, chunk: &Chunk<'_>) -> io::Result<()>;

    /// As [`Driver::read`].
    ///
    /// # Errors
    /// The error for the reader.
    fn read(&self, offset: u64, into: &mut [u8]) -> io::Result<()>;

    /// Makes every chunk durable that arrived on this queue before.
    ///
    /// # Errors
    /// It is unknown then what is durable.
    fn flush(&self, queue: usize) -> io::Result<()>;

    /// As [`Driver::discard`].
    ///
    /// # Errors
    /// The error for the user.
    fn discard(&self, offset: u64, length: u64) -> io::Result<()> {
        let _ = (offset, length);
        Err(io::ErrorKind::Unsupported.into())
    }

    /// As [`Driver::write_zeroes`].
    ///
    /// # Errors
    /// The error for the user.
    fn write_zeroes(&self, offset: u64, length: u64, keep_space: bool) -> io::Result<()> {
        let _ = (offset, length, keep_space);
        Err(io::ErrorKind::Unsupported.into())
    }

    /// As [`Driver::attached`].
    fn attached(&self, device: &Device) {
        let _ = device;
    }

    /// As [`Driver::ready`].
    fn ready(&self, doors: &[Door]) {
        let _ = doors;
    }
}

/// A write chunk, in the host's memory.
pub struct Chunk<'a> {
    /// Entries, room for more of them, and their data.
    pub bytes: &'a [u8],
    /// The start of the data.
    pub metadata_bytes: usize,
    /// The queue on which it arrived.
    pub queue: usize,
    /// Its command (docs/format/write_chunk.md): `entries`, `horizon`, `floor`, and whether a
    /// former driver had it.
    pub command: &'a Command,
}

impl Chunk<'_> {
    /// Its entries with their data; an invalid entry gives `None` and ends the iteration.
    pub fn entries(&self) -> impl Iterator<Item = Option<(ChunkEntry, &[u8])>> {
        entries(self.bytes, self.metadata_bytes, usize::try_from(self.command.entries).unwrap_or(0))
    }
}

/// A place where the device is available.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Door {
    /// `nbd`, `ublk`, `fuse`, `loop`, `vhost-user`.
    pub kind: String,
    /// A path or an address of that kind.
    pub address: String,
}

/// The way to whoever has the device.
#[derive(Clone)]
pub(super) enum DeviceLink {
    /// A host in another process.
    Host(Arc<PacketSocket>),
    /// This process.
    Own(Arc<EndRequest>),
}

/// The device that a driver serves. Clones refer to the same device.
#[derive(Clone)]
pub struct Device {
    pub(super) link: DeviceLink,
    pub(super) welcome: Arc<ControlFacts>,
    pub(super) socket: PathBuf,
}

impl Device {
    /// The name of the device.
    #[must_use]
    pub fn name(&self) -> &str {
        self.welcome.get("name").unwrap_or_default()
    }

    /// The number of its drivers so far, including this one.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.welcome.parsed("generation").unwrap_or(0)
    }

    /// An option in effect.
    #[must_use]
    pub fn option(&self, name: &str) -> Option<&str> {
        self.welcome.get(name)
    }

    /// The socket where other drivers and commands reach its host.
    #[must_use]
    pub fn socket(&self) -> &std::path::Path {
        &self.socket
    }

    /// Asks the host to end the device when everything is answered.
    pub fn end(&self) {
        match &self.link {
            DeviceLink::Host(control) => {
                leave(control, ControlFacts::default().with("outcome", "ended"));
            }
            DeviceLink::Own(request) => request.ask(None),
        }
    }

    /// Asks the host to end the device immediately; requests fail.
    pub fn fail(&self, message: &str) {
        match &self.link {
            DeviceLink::Host(control) => {
                let facts = ControlFacts::default().with("outcome", "failed");
                leave(control, facts.with("message", message));
            }
            DeviceLink::Own(request) => request.ask(Some(message.to_owned())),
        }
    }
}

fn leave(control: &PacketSocket, facts: ControlFacts) {
    // A host that is gone has ended the device already.
    let _ = control.send(&Control::new(ControlKind::Leave, facts).encode(), &[]);
}

/// The errno of an error on the wire.
#[must_use]
pub fn errno(error: &io::Error) -> i32 {
    // A host takes any other number for a broken protocol and counts the driver as dead (P75).
    let errno = error.raw_os_error().filter(|errno| (1..4096).contains(errno));
    errno.unwrap_or_else(|| {
        let errno = match error.kind() {
            io::ErrorKind::PermissionDenied => Errno::ACCESS,
            io::ErrorKind::StorageFull => Errno::NOSPC,
            io::ErrorKind::QuotaExceeded => Errno::DQUOT,
            io::ErrorKind::ReadOnlyFilesystem => Errno::ROFS,
            io::ErrorKind::Unsupported => Errno::OPNOTSUPP,
            io::ErrorKind::TimedOut => Errno::TIMEDOUT,
            _ => Errno::IO,
        };
        errno.raw_os_error()
    })
}
