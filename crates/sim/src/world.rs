//! A simulated machine: its disks by path, and the world as a process on it sees it (clock, chance,
//! faults). The disks outlive the process; all machines share the time.
//!
//! Invariant: making, renaming and removing a disk is an I/O like any other: a process that dies at
//! it leaves no trace of it. Not here: the bytes of a disk (`disk`), the locks (`locks`), memory
//! (real files in the folder of a machine, `run`).

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use sawmill_volume::{Disk, Disks, EntryKind, Lock, World};

use crate::death::Life;
use crate::disk::{DiskFaults, Medium, SimDisk};
use crate::locks::Locks;
use crate::trace::Trace;
use sawmill_testkit::Dice;

/// The time, which passes equally for all machines.
#[derive(Default)]
pub struct Clock {
    us: AtomicU64,
}

impl Clock {
    /// Time passes.
    pub fn pass(&self, us: u64) {
        self.us.fetch_add(us, Ordering::Relaxed);
    }

    /// The time now.
    pub fn now(&self) -> Duration {
        Duration::from_micros(self.us.load(Ordering::Relaxed))
    }
}

/// The media of a machine, by path.
#[derive(Clone, Default)]
pub struct MachineMedia {
    media: Arc<Mutex<BTreeMap<PathBuf, Arc<Medium>>>>,
    boots: Arc<AtomicU64>,
    /// `None`: every request for a lock succeeds.
    locks: Option<Arc<Locks>>,
}

impl MachineMedia {
    /// The medium with this name.
    pub fn get(&self, path: &Path) -> Option<Arc<Medium>> {
        self.media.lock().get(path).cloned()
    }

    /// Gives a name to a medium, or removes the name.
    pub fn set(&self, path: &Path, medium: Option<Arc<Medium>>) {
        let mut media = self.media.lock();
        match medium {
            Some(medium) => media.insert(path.to_owned(), medium),
            None => media.remove(path),
        };
    }

    /// The same machine with working locks.
    #[must_use]
    pub fn with_locks(self) -> Self {
        MachineMedia { locks: Some(Arc::default()), ..self }
    }

    fn locks(&self) -> Option<&Locks> {
        self.locks.as_deref()
    }

    /// A machine that has booted `times` times.
    #[must_use]
    pub fn booted(self, times: u64) -> Self {
        self.boots.store(times, Ordering::SeqCst);
        self
    }

    /// The number of boots of the machine.
    #[must_use]
    pub fn boots(&self) -> u64 {
        self.boots.load(Ordering::SeqCst)
    }

    /// The machine reboots and loses its memory.
    pub fn boot(&self) {
        self.boots.fetch_add(1, Ordering::SeqCst);
    }

    /// All media.
    pub fn all(&self) -> Vec<Arc<Medium>> {
        self.media.lock().values().cloned().collect()
    }
}

/// A machine as one process sees it.
pub struct SimWorld {
    clock: Arc<Clock>,
    media: MachineMedia,
    life: Arc<Life>,
    trace: Arc<Trace>,
    faults: DiskFaults,
    dice: Mutex<Dice>,
    /// How far the machine's wall clock is ahead, in milliseconds.
    ahead_ms: Arc<AtomicU64>,
}

impl SimWorld {
    /// The world of a new process.
    pub fn new(
        clock: Arc<Clock>,
        media: MachineMedia,
        life: Arc<Life>,
        trace: Arc<Trace>,
        faults: DiskFaults,
        dice: Dice,
    ) -> Self {
        let ahead_ms = Arc::default();
        SimWorld { clock, media, life, trace, faults, dice: Mutex::new(dice), ahead_ms }
    }

    /// The same, on a machine whose wall clock is ahead of the others' by the current value of
    /// `ahead_ms`.
    #[must_use]
    pub fn with_wall_clock(self, ahead_ms: Arc<AtomicU64>) -> Self {
        SimWorld { ahead_ms, ..self }
    }

    fn disk(&self, path: &Path, medium: Arc<Medium>) -> Arc<dyn Disk> {
        let dice = self.dice.lock().split(1);
        let (life, trace) = (self.life.clone(), self.trace.clone());
        let named = (path.to_owned(), medium);
        Arc::new(SimDisk::new(named, self.media.clone(), life, trace, self.faults, dice))
    }
}

impl World for SimWorld {
    fn now(&self) -> Duration {
        self.clock.now()
    }

    fn unix_ms(&self) -> u64 {
        let right = 1_800_000_000_000 + self.clock.now().as_millis() as u64;
        right + self.ahead_ms.load(Ordering::Relaxed)
    }

    fn random(&self) -> sawmill_volume::Result<[u8; 16]> {
        let mut dice = self.dice.lock();
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&dice.word().to_le_bytes());
        bytes[8..].copy_from_slice(&dice.word().to_le_bytes());
        Ok(bytes)
    }

    fn boot_id(&self) -> sawmill_volume::Result<[u8; 16]> {
        Ok(u128::from(1 + self.media.boots.load(Ordering::SeqCst)).to_le_bytes())
    }

    fn disks(&self) -> &dyn Disks {
        self
    }
}

impl Disks for SimWorld {
    fn lock(&self, path: &Path) -> io::Result<Lock> {
        match self.media.locks() {
            Some(locks) => locks.take_name(path.to_owned(), &self.life),
            None => Ok(Box::new(())),
        }
    }

    fn lock_file(&self, path: &Path) -> io::Result<Lock> {
        match (self.media.locks(), self.media.get(path)) {
            (Some(locks), Some(medium)) => locks.take_medium(medium, &self.life),
            _ => Ok(Box::new(())),
        }
    }

    fn entry_kind(&self, path: &Path) -> EntryKind {
        match self.media.get(path) {
            Some(medium) => EntryKind::File { size_bytes: medium.size_bytes() },
            None => EntryKind::Absent,
        }
    }

    fn open(&self, path: &Path) -> io::Result<Arc<dyn Disk>> {
        match self.media.get(path) {
            Some(medium) => Ok(self.disk(path, medium)),
            None => Err(io::ErrorKind::NotFound.into()),
        }
    }

    fn make(&self, path: &Path, size_bytes: u64) -> io::Result<Arc<dyn Disk>> {
        if !self.life.tick() {
            return Err(io::Error::other("the process is dead"));
        }
        if self.media.get(path).is_some() {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        if self.dice.lock().one_in(self.faults.make_odds) {
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.trace
            .note("disk made", [size_bytes, 0], || format!("    disk: made, {size_bytes} bytes"));
        let medium = Medium::blank(size_bytes);
        self.media.set(path, Some(medium.clone()));
        Ok(self.disk(path, medium))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        if !self.life.tick() {
            return Err(io::Error::other("the process is dead"));
        }
        let Some(medium) = self.media.get(from) else {
            return Err(io::ErrorKind::NotFound.into());
        };
        if self.media.get(to).is_some() {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        self.trace.note("disk renamed", [0, 0], || "    disk: set aside".into());
        self.media.set(from, None);
        self.media.set(to, Some(medium));
        Ok(())
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        if !self.life.tick() {
            return Err(io::Error::other("the process is dead"));
        }
        if self.media.get(path).is_none() {
            return Err(io::ErrorKind::NotFound.into());
        }
        self.trace.note("disk removed", [0, 0], || "    disk: removed".into());
        self.media.set(path, None);
        Ok(())
    }
}
