//! What a driver is: functions that wait, called by worker threads.
//!
//! An error of a function is an [`std::io::Error`]; what it says as an errno is what users of the device see
//! where they can (`docs/format/driver.md`), else EIO. Not here: who calls (`lane`, `work`).

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use sawmill_device::{Error, ErrorKind, Result};

use crate::batch::chunk::{Record, records};
use crate::protocol::{Control, ControlKind, Facts, Order, PacketSocket};

/// What a driver can do, besides reading.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Abilities {
    /// It takes writes, discards, zeroes.
    pub write: bool,
    /// It makes writes durable when it is told; without this they are when they are answered.
    pub flush: bool,
    /// A write can be durable by itself.
    pub fua: bool,
    /// Ranges can be given up.
    pub discard: bool,
    /// Ranges can become zeroes without a payload.
    pub write_zeroes: bool,
    /// Requests may begin and end at any byte; else at multiples of the block.
    pub any_byte: bool,
}

impl Default for Abilities {
    fn default() -> Self {
        let (fua, discard, write_zeroes, any_byte) = (false, false, false, false);
        Abilities { write: true, flush: true, fua, discard, write_zeroes, any_byte }
    }
}

impl Abilities {
    /// As options of the protocol: what differs from its defaults. What a driver does not say, the host may.
    pub(super) fn declare(self, facts: &mut Facts, is_batch: bool) {
        let is_plain = !is_batch;
        for (name, value, is_told) in [
            ("can_discard", 1, self.discard && self.write),
            ("can_write_zeroes", 1, self.write_zeroes && self.write),
            ("read_only", 1, !self.write && is_plain),
            ("can_flush", 0, !self.flush && is_plain),
            ("can_fua", 1, self.fua && self.flush && is_plain),
            ("byte_granular", 1, self.any_byte && is_plain),
        ] {
            if is_told {
                facts.add(name, value);
            }
        }
    }

    /// Sees whether a driver can do all that the device may order.
    pub(super) fn suffice(self, options: &Facts) -> Result<()> {
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

/// A driver: it is told ranges in bytes, all inside the device, and may be called by several threads at once.
pub trait Driver: Send + Sync {
    /// What it can do. Constant.
    fn abilities(&self) -> Abilities {
        Abilities::default()
    }

    /// Fills `into` with the bytes at `offset`: all of it, a hole with zeroes.
    ///
    /// # Errors
    /// What the reader is told.
    fn read(&self, offset: u64, into: &mut [u8]) -> io::Result<()>;

    /// Stores `bytes` at `offset`; with `fua`, durably.
    ///
    /// # Errors
    /// What the writer is told: then some, all or none of the bytes may be stored.
    fn write(&self, offset: u64, bytes: &[u8], fua: bool) -> io::Result<()> {
        let _ = (offset, bytes, fua);
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Makes everything durable that was answered before the call.
    ///
    /// # Errors
    /// Then nobody knows what is durable.
    fn flush(&self) -> io::Result<()> {
        Ok(())
    }

    /// The range may be forgotten.
    ///
    /// # Errors
    /// What the user is told.
    fn discard(&self, offset: u64, length: u64) -> io::Result<()> {
        let _ = (offset, length);
        Err(io::ErrorKind::Unsupported.into())
    }

    /// The range reads as zeroes from now on; with `keep_space` it stays allocated.
    ///
    /// # Errors
    /// What the user is told.
    fn write_zeroes(&self, offset: u64, length: u64, keep_space: bool) -> io::Result<()> {
        let _ = (offset, length, keep_space);
        Err(io::ErrorKind::Unsupported.into())
    }

    /// The host took this driver on; orders come now.
    fn attached(&self, device: &Device) {
        let _ = device;
    }

    /// The device can be used there.
    fn ready(&self, doors: &[Door]) {
        let _ = doors;
    }
}

/// A driver that takes writes in chunks (`mode=batch`, `docs/format/write_chunk.md`).
pub trait ChunkDriver: Send + Sync {
    /// What it can do: `discard` and `write_zeroes` mean something here.
    fn abilities(&self) -> Abilities {
        Abilities::default()
    }

    /// Stores all records of a chunk. Chunks come to several threads at once: of two records that overlap the
    /// one with the higher sequence is newer, whichever is stored first.
    ///
    /// # Errors
    /// What the next flush tells users.
    fn write(&self, chunk: &Chunk<'_>) -> io::Result<()>;

    /// As [`Driver::read`].
    ///
    /// # Errors
    /// What the reader is told.
    fn read(&self, offset: u64, into: &mut [u8]) -> io::Result<()>;

    /// Makes every chunk durable that came on this queue before.
    ///
    /// # Errors
    /// Then nobody knows what is durable.
    fn flush(&self, queue: usize) -> io::Result<()>;

    /// As [`Driver::discard`].
    ///
    /// # Errors
    /// What the user is told.
    fn discard(&self, offset: u64, length: u64) -> io::Result<()> {
        let _ = (offset, length);
        Err(io::ErrorKind::Unsupported.into())
    }

    /// As [`Driver::write_zeroes`].
    ///
    /// # Errors
    /// What the user is told.
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
    /// Records, room for more of them, and their data.
    pub bytes: &'a [u8],
    /// Where the data begins.
    pub metadata_bytes: usize,
    /// The queue it came on.
    pub queue: usize,
    /// Of docs/format/write_chunk.md: `records`, `horizon`, `floor`, and whether a former driver had it.
    pub order: &'a Order,
}

impl Chunk<'_> {
    /// Its records with their data; `None` for one that makes no sense, which ends them.
    pub fn records(&self) -> impl Iterator<Item = Option<(Record, &[u8])>> {
        records(self.bytes, self.metadata_bytes, usize::try_from(self.order.records).unwrap_or(0))
    }
}

/// Where the device can be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Door {
    /// `nbd`, `ublk`, `fuse`, `loop`, `vhost-user`.
    pub kind: String,
    /// A path or an address of that kind.
    pub address: String,
}

/// The device that a driver serves. A copy is the same.
#[derive(Clone)]
pub struct Device {
    pub(super) control: Arc<PacketSocket>,
    pub(super) welcome: Arc<Facts>,
    pub(super) socket: PathBuf,
}

impl Device {
    /// What it is called.
    #[must_use]
    pub fn name(&self) -> &str {
        self.welcome.get("name").unwrap_or_default()
    }

    /// Its drivers so far, this one included.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.welcome.parsed("generation").unwrap_or(0)
    }

    /// An option in effect.
    #[must_use]
    pub fn option(&self, name: &str) -> Option<&str> {
        self.welcome.get(name)
    }

    /// Where other drivers, and those who ask, reach its host.
    #[must_use]
    pub fn socket(&self) -> &std::path::Path {
        &self.socket
    }

    /// The device shall end when everything is answered.
    pub fn end(&self) {
        self.leave(Facts::default().with("outcome", "ended"));
    }

    /// The device shall end at once; requests fail.
    pub fn fail(&self, message: &str) {
        self.leave(Facts::default().with("outcome", "failed").with("message", message));
    }

    fn leave(&self, facts: Facts) {
        // A host that is gone has ended the device already.
        let _ = self.control.send(&Control::new(ControlKind::Leave, facts).encode(), &[]);
    }
}

/// What an error is on the wire.
#[must_use]
pub fn errno(error: &io::Error) -> i32 {
    let told = error.raw_os_error().filter(|errno| (1..4096).contains(errno));
    told.unwrap_or(match error.kind() {
        io::ErrorKind::StorageFull => 28,
        io::ErrorKind::ReadOnlyFilesystem => 30,
        io::ErrorKind::Unsupported => 95,
        io::ErrorKind::TimedOut => 110,
        _ => 5,
    })
}
