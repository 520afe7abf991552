//! Drivers of both kinds as handlers of commands.
//!
//! Invariants: no entry of a chunk is applied unless all are valid. If the driver has no FUA, a
//! write with FUA is answered after a flush that follows it.
//!
//! Not here: threads (`work`), late writes (`resolve`).

use std::io;

use parking_lot::Mutex;
use sawmill_device::{Error, ErrorKind, Result};

use super::driver::{Abilities, Chunk, ChunkDriver, Device, Door, Driver};
use super::work::Handler;
use crate::batch::chunk::entries;
use crate::protocol::{Command, CommandKind};
use crate::resolve::{OrderBounds, Resolver};

/// A driver that receives each request by itself. In batch mode, chunks are taken apart for it.
pub(super) struct Plain<'a, D: ?Sized> {
    driver: &'a D,
    chunks: Mutex<Option<std::sync::Arc<Chunks>>>,
}

/// What taking chunks apart requires.
struct Chunks {
    metadata_bytes: usize,
    resolver: Resolver,
}

impl<'a, D: Driver + ?Sized> Plain<'a, D> {
    pub(super) fn new(driver: &'a D) -> Self {
        Plain { driver, chunks: Mutex::new(None) }
    }

    fn write(&self, command: &Command, bytes: &[u8]) -> io::Result<()> {
        let by_itself = self.driver.abilities().fua;
        self.driver.write(command.address, bytes, command.fua && by_itself)?;
        if command.fua && !by_itself { self.driver.flush() } else { Ok(()) }
    }

    fn store(&self, command: &Command, bytes: &[u8]) -> io::Result<()> {
        let chunks = self.chunks.lock().clone().ok_or_else(no_sense)?;
        let count = usize::try_from(command.entries).map_err(|_| no_sense())?;
        // All entries are read before the first is stored, so that an invalid chunk changes
        // nothing.
        if entries(bytes, chunks.metadata_bytes, count).any(|entry| entry.is_none()) {
            return Err(no_sense());
        }
        let found = entries(bytes, chunks.metadata_bytes, count).flatten();
        let bounds = OrderBounds { horizon: command.horizon, floor: command.floor };
        chunks
            .resolver
            .apply_chunk(found, bounds, |offset, data| self.driver.write(offset, data, false))
    }
}

impl<D: Driver + ?Sized> Handler for Plain<'_, D> {
    fn abilities(&self) -> Abilities {
        self.driver.abilities()
    }

    fn attached(&self, device: &Device) {
        *self.chunks.lock() = metadata_bytes(device).ok().map(|metadata_bytes| {
            let area_bytes =
                device.option("collision_area_size").and_then(|value| value.parse().ok());
            let area_bytes = area_bytes.filter(|bytes| *bytes > 0).unwrap_or(4096);
            Chunks { metadata_bytes, resolver: Resolver::new(area_bytes) }.into()
        });
        self.driver.attached(device);
    }

    fn ready(&self, doors: &[Door]) {
        self.driver.ready(doors);
    }

    fn handle(&self, _queue: usize, command: &Command, memory: &mut [u8]) -> io::Result<()> {
        match command.kind {
            CommandKind::Read => self.driver.read(command.address, memory),
            CommandKind::Write => self.write(command, memory),
            CommandKind::Flush => self.driver.flush(),
            CommandKind::Discard => self.driver.discard(command.address, command.length),
            CommandKind::WriteZeroes => {
                self.driver.write_zeroes(command.address, command.length, command.no_unmap)
            }
            CommandKind::Chunk => self.store(command, memory),
            CommandKind::End => Ok(()),
        }
    }
}

/// A driver that receives chunks.
pub(super) struct ChunkHandler<'a, D: ?Sized> {
    driver: &'a D,
    metadata_bytes: Mutex<usize>,
}

impl<'a, D: ChunkDriver + ?Sized> ChunkHandler<'a, D> {
    pub(super) fn new(driver: &'a D) -> Self {
        ChunkHandler { driver, metadata_bytes: Mutex::new(0) }
    }
}

impl<D: ChunkDriver + ?Sized> Handler for ChunkHandler<'_, D> {
    fn abilities(&self) -> Abilities {
        self.driver.abilities()
    }

    fn attached(&self, device: &Device) {
        *self.metadata_bytes.lock() = metadata_bytes(device).unwrap_or(0);
        self.driver.attached(device);
    }

    fn ready(&self, doors: &[Door]) {
        self.driver.ready(doors);
    }

    fn handle(&self, queue: usize, command: &Command, memory: &mut [u8]) -> io::Result<()> {
        match command.kind {
            CommandKind::Read => self.driver.read(command.address, memory),
            CommandKind::Flush => self.driver.flush(queue),
            CommandKind::Discard => self.driver.discard(command.address, command.length),
            CommandKind::WriteZeroes => {
                self.driver.write_zeroes(command.address, command.length, command.no_unmap)
            }
            CommandKind::Chunk => {
                let metadata_bytes = *self.metadata_bytes.lock();
                self.driver.write(&Chunk { bytes: memory, metadata_bytes, queue, command })
            }
            // In batch mode a host sends writes in chunks only.
            CommandKind::Write => Err(no_sense()),
            CommandKind::End => Ok(()),
        }
    }
}

fn metadata_bytes(device: &Device) -> Result<usize> {
    let metadata_bytes = device.option("metadata_bytes").and_then(|value| value.parse().ok());
    metadata_bytes.ok_or_else(|| {
        Error::new(ErrorKind::Invalid, "the host does not say where the data of a chunk starts")
    })
}

fn no_sense() -> io::Error {
    rustix::io::Errno::INVAL.into()
}
