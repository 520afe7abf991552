//! A simulated local disk: writes are volatile until a sync; a power cut keeps, loses or tears each
//! unsynced write individually, sector by sector, in any order.
//!
//! Invariants: data that a completed sync covered is never lost, unless the disk lies (`lie_odds`);
//! the death of a process loses nothing. A failed sync loses the data that it covered: immediately,
//! or at the next power cut while reads return it until then (as Linux page caches do).

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use parking_lot::Mutex;
use sawmill_volume::Disk;

use crate::death::Life;
use crate::trace::Trace;
use crate::world::MachineMedia;
use sawmill_testkit::Dice;

/// The unit that a torn write keeps or loses as a whole.
pub const SECTOR_BYTES: usize = 512;
const PAGE_BYTES: usize = 4096;

type Page = Box<[u8; PAGE_BYTES]>;

/// How the next operations of a disk fail.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskFaults {
    /// One write in so many fails; 0: none.
    pub write_odds: u64,
    /// One sync in so many fails and loses the data that it covered; 0: none.
    pub sync_odds: u64,
    /// One read in so many fails; 0: none.
    pub read_odds: u64,
    /// One new disk in so many finds no space; 0: none.
    pub make_odds: u64,
    /// Of the writes that fail, one in so many is done in part; 0: none.
    pub short_odds: u64,
    /// Of the writes that fail, one in so many found no space, on a disk that shares its space; 0:
    /// none.
    pub full_odds: u64,
    /// One sync in so many reports success and does nothing; 0: none.
    pub lie_odds: u64,
}

#[derive(Default)]
struct Content {
    size_bytes: u64,
    /// The content that reads see.
    now: BTreeMap<u64, Page>,
    /// The state at the last sync of pages changed since; `None`: absent.
    synced: BTreeMap<u64, Option<Page>>,
    /// Pages that a failed sync gave up, as they are on the medium: only another write saves them.
    given_up: BTreeMap<u64, Option<Page>>,
    /// Unsynced writes, in order.
    unsynced: Vec<(u64, Vec<u8>)>,
    /// A failed sync dropped data that reads had returned.
    has_dropped: bool,
    /// A sync reported success for data that it did not sync.
    has_lied: bool,
}

impl Content {
    fn read(&self, offset: u64, into: &mut [u8]) {
        let mut done = 0;
        while done < into.len() {
            let at = offset + done as u64;
            let (page, start) = (at / PAGE_BYTES as u64, (at % PAGE_BYTES as u64) as usize);
            let length = (PAGE_BYTES - start).min(into.len() - done);
            let part = &mut into[done..done + length];
            match self.now.get(&page) {
                Some(bytes) => part.copy_from_slice(&bytes[start..start + length]),
                None => part.fill(0),
            }
            done += length;
        }
    }

    fn write(&mut self, offset: u64, bytes: &[u8]) {
        let mut done = 0;
        while done < bytes.len() {
            let at = offset + done as u64;
            let (page, start) = (at / PAGE_BYTES as u64, (at % PAGE_BYTES as u64) as usize);
            let length = (PAGE_BYTES - start).min(bytes.len() - done);
            let old = self.now.get(&page).cloned();
            self.synced.entry(page).or_insert(old);
            let into = self.now.entry(page).or_insert_with(|| Box::new([0; PAGE_BYTES]));
            into[start..start + length].copy_from_slice(&bytes[done..done + length]);
            done += length;
        }
    }

    fn sync(&mut self) {
        for page in std::mem::take(&mut self.synced).keys() {
            self.given_up.remove(page);
        }
        self.unsynced.clear();
        self.has_lied = false;
    }

    fn fail_sync(&mut self, at_once: bool) {
        if at_once {
            self.forget();
            return;
        }
        for (page, old) in std::mem::take(&mut self.synced) {
            self.given_up.entry(page).or_insert(old);
        }
        self.unsynced.clear();
    }

    /// Returns to the content of the medium.
    fn forget(&mut self) -> Vec<(u64, Vec<u8>)> {
        let synced = std::mem::take(&mut self.synced);
        for (page, old) in synced.into_iter().chain(std::mem::take(&mut self.given_up)) {
            match old {
                Some(bytes) => self.now.insert(page, bytes),
                None => self.now.remove(&page),
            };
        }
        std::mem::take(&mut self.unsynced)
    }
}

/// The medium, which outlives processes.
#[derive(Default)]
pub struct Medium {
    content: Mutex<Content>,
}

/// The fate of one unsynced write in a power cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// All of it survives.
    Kept,
    /// Nothing of it survives.
    Lost,
    /// Sector by sector, by these dice; one sector may be garbage.
    Torn(u64),
}

impl Medium {
    /// A blank medium.
    #[must_use]
    pub fn blank(size_bytes: u64) -> Arc<Self> {
        Arc::new(Medium { content: Mutex::new(Content { size_bytes, ..Content::default() }) })
    }

    /// Its size.
    pub fn size_bytes(&self) -> u64 {
        self.content.lock().size_bytes
    }

    /// Whether a failed sync has dropped data that reads had returned, since the last call.
    pub fn has_dropped(&self) -> bool {
        std::mem::take(&mut self.content.lock().has_dropped)
    }

    /// Whether a power cut may lose data whose sync reported success.
    pub fn has_lied(&self) -> bool {
        self.content.lock().has_lied
    }

    /// The number of unsynced writes.
    pub fn unsynced(&self) -> usize {
        self.content.lock().unsynced.len()
    }

    /// A copy of the medium as it is, to be put back later: an old image.
    pub fn copy(&self) -> Arc<Medium> {
        let content = self.content.lock();
        let copy = Content {
            size_bytes: content.size_bytes,
            now: content.now.clone(),
            ..Content::default()
        };
        Arc::new(Medium { content: Mutex::new(copy) })
    }

    /// Corrupts one byte, or copies one sector over another. Returns the address.
    pub fn rot(&self, dice: &mut Dice) -> Option<u64> {
        let mut content = self.content.lock();
        let mut place = |content: &Content| {
            let count = content.now.len() as u64;
            let page = *content.now.keys().nth((count > 0).then(|| dice.below(count))? as usize)?;
            Some((
                page,
                dice.below((PAGE_BYTES / SECTOR_BYTES) as u64) as usize * SECTOR_BYTES,
                dice.word(),
            ))
        };
        let (page, start, bits) = place(&content)?;
        let (other, from, _) = place(&content)?;
        let sector: [u8; SECTOR_BYTES] =
            content.now.get(&other)?[from..from + SECTOR_BYTES].try_into().ok()?;
        let bytes = &mut content.now.get_mut(&page)?[start..start + SECTOR_BYTES];
        if bits % 4 == 0 {
            bytes.copy_from_slice(&sector);
        } else {
            bytes[bits as usize / 8 % SECTOR_BYTES] ^= 1 << (bits >> 60 & 7);
        }
        Some(page * PAGE_BYTES as u64 + start as u64)
    }

    /// Cuts the power: `fate` decides about each unsynced write, and `dice` about the order.
    pub fn cut_power(&self, dice: &mut Dice, mut fate: impl FnMut(usize) -> Fate) {
        let mut content = self.content.lock();
        let mut writes: Vec<_> = content.forget().into_iter().enumerate().collect();
        // Any order: a later write may reach the medium before an older one. A disk keeps the order
        // of writes to one sector, so only writes that do not overlap are reordered; applying them
        // in order has the same result.
        for (index, (offset, bytes)) in &mut writes {
            match fate(*index) {
                Fate::Kept => content.write(*offset, bytes),
                Fate::Lost => {}
                Fate::Torn(odds) => {
                    for (number, sector) in bytes.chunks_mut(SECTOR_BYTES).enumerate() {
                        if dice.one_in(odds) {
                            continue;
                        }
                        if dice.one_in(64) {
                            sector.fill(dice.word() as u8);
                        }
                        content.write(*offset + (number * SECTOR_BYTES) as u64, sector);
                    }
                }
            }
        }
        content.sync();
    }
}

/// A medium that one process has open.
pub struct SimDisk {
    medium: Arc<Medium>,
    /// The name it was opened by, and the machine where that name is.
    name: PathBuf,
    media: MachineMedia,
    life: Arc<Life>,
    trace: Arc<Trace>,
    faults: Mutex<(DiskFaults, Dice)>,
}

impl SimDisk {
    /// Opens a medium by a name of it.
    pub fn new(
        (name, medium): (PathBuf, Arc<Medium>),
        media: MachineMedia,
        life: Arc<Life>,
        trace: Arc<Trace>,
        faults: DiskFaults,
        dice: Dice,
    ) -> Self {
        SimDisk { medium, name, media, life, trace, faults: Mutex::new((faults, dice)) }
    }

    /// The part of a failing write that is done, in whole sectors, and its error.
    fn failure(&self, length: usize) -> (usize, io::Error) {
        let mut faults = self.faults.lock();
        let DiskFaults { short_odds, full_odds, .. } = faults.0;
        let sectors = (length / SECTOR_BYTES) as u64;
        let part =
            if faults.1.one_in(short_odds) { faults.1.below(sectors + 1) as usize } else { 0 };
        let is_full = faults.1.one_in(full_odds);
        let error = if is_full {
            io::ErrorKind::StorageFull.into()
        } else {
            io::Error::from_raw_os_error(5)
        };
        (part * SECTOR_BYTES, error)
    }

    fn fails(&self, odds: impl FnOnce(DiskFaults) -> u64) -> bool {
        let mut faults = self.faults.lock();
        let odds = odds(faults.0);
        faults.1.one_in(odds)
    }
}

fn dead() -> io::Error {
    io::Error::other("the process is dead")
}

impl Disk for SimDisk {
    fn size_bytes(&self) -> u64 {
        self.medium.size_bytes()
    }

    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        if self.life.is_dead() {
            return Err(dead());
        }
        if self.fails(|faults| faults.read_odds) && !self.life.is_spared() {
            self.trace.note("disk read", [offset, into.len() as u64], || {
                format!("    disk: read {} bytes at {offset}: EIO", into.len())
            });
            return Err(io::Error::from_raw_os_error(5));
        }
        let content = self.medium.content.lock();
        if offset + into.len() as u64 > content.size_bytes {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        content.read(offset, into);
        Ok(())
    }

    fn read_now(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        self.read_at(offset, into)
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        if !self.life.tick() {
            return Err(dead());
        }
        let fails = self.fails(|faults| faults.write_odds);
        self.trace.note("disk write", [offset, bytes.len() as u64], || {
            format!(
                "    disk: write {} bytes at {offset}{}",
                bytes.len(),
                if fails { ": EIO" } else { "" }
            )
        });
        let mut content = self.medium.content.lock();
        if fails {
            let (part, error) = self.failure(bytes.len());
            if part > 0 && offset + part as u64 <= content.size_bytes {
                content.write(offset, &bytes[..part]);
                content.unsynced.push((offset, bytes[..part].to_vec()));
            }
            return Err(error);
        }
        if offset + bytes.len() as u64 > content.size_bytes {
            return Err(io::ErrorKind::StorageFull.into());
        }
        content.write(offset, bytes);
        content.unsynced.push((offset, bytes.to_vec()));
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        if !self.life.tick() {
            return Err(dead());
        }
        let fails = self.fails(|faults| faults.sync_odds);
        let at_once = fails && self.faults.lock().1.one_in(2);
        self.trace.note("disk sync", [fails.into(), at_once.into()], || match (fails, at_once) {
            (true, true) => "    disk: sync: EIO, and what was written is gone".into(),
            (true, false) => "    disk: sync: EIO".into(),
            _ => "    disk: sync".into(),
        });
        let mut content = self.medium.content.lock();
        if !fails && self.fails(|faults| faults.lie_odds) {
            // Unsynced data stays unsynced, and the disk reports success.
            content.has_lied |= !content.unsynced.is_empty();
            return Ok(());
        }
        if fails {
            // Otherwise reads still return the data, but no later sync saves it.
            content.fail_sync(at_once);
            content.has_dropped |= at_once;
            return Err(io::Error::from_raw_os_error(5));
        }
        content.sync();
        Ok(())
    }

    fn has_name(&self) -> bool {
        self.media.get(&self.name).is_some_and(|medium| Arc::ptr_eq(&medium, &self.medium))
    }
}
