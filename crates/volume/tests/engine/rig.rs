//! What the engine's tests share: a volume over a memory store in a temporary folder, and the life
//! of it.
#![allow(unreachable_pub, missing_docs, reason = "the tests' own")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use sawmill_device::{BlockDeviceExt, ErrorKind};
use sawmill_store::{ObjectStore, StoreOptions};
use sawmill_volume::{CreateOptions, FlushMode, OpenOptions, Volume};

pub const MIB: u64 = 1 << 20;

/// A store, a folder for the journal, and a volume's name.
pub struct Rig {
    pub store: Arc<dyn ObjectStore>,
    pub folder: tempfile::TempDir,
    pub name: String,
    pub options: OpenOptions,
    /// Memory was lost as with the power: these machines do not reboot, so the test declares the
    /// loss.
    pub knows_of_loss: AtomicBool,
}

impl Default for Rig {
    fn default() -> Self {
        Self::new()
    }
}

impl Rig {
    pub fn new() -> Self {
        Self::with(64 * MIB, FlushMode::Logged)
    }

    pub fn with(size_bytes: u64, flush: FlushMode) -> Self {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let url = format!("memory:rig-{}-{number}", std::process::id());
        let store: Arc<dyn ObjectStore> =
            sawmill_store::open(&url, StoreOptions::default()).unwrap();
        let options =
            CreateOptions { flush, segment_bytes: 256 << 10, ..CreateOptions::new(size_bytes) };
        sawmill_volume::create(&*store, "disk", &options).unwrap();
        Self::over(store)
    }

    /// A second machine on the same store.
    pub fn over(store: Arc<dyn ObjectStore>) -> Self {
        // In memory: what a disk does at a power cut is tested elsewhere, and syncs of a real one
        // take long.
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let mut options = OpenOptions::new(folder.path().join("journal"));
        options.staging_folder = folder.path().to_owned();
        options.journal_bytes = 16 * MIB;
        options.staging_bytes = 4 * MIB;
        options.segment_age_max = Duration::ZERO;
        Rig { store, folder, name: "disk".into(), options, knows_of_loss: AtomicBool::new(false) }
    }

    pub fn open(&self) -> Arc<Volume> {
        self.try_open().unwrap()
    }

    pub fn try_open(&self) -> sawmill_volume::Result<Arc<Volume>> {
        let mut options = self.options.clone();
        options.accept_memory_loss |= self.knows_of_loss.load(Ordering::SeqCst);
        let opened = Volume::open(self.store.clone(), &self.name, options);
        if opened.is_ok() {
            self.knows_of_loss.store(false, Ordering::SeqCst);
        }
        opened
    }

    pub fn refused(&self) -> (ErrorKind, String) {
        let error = self.try_open().map(drop).unwrap_err();
        (error.kind(), error.to_string())
    }

    pub fn journal(&self) -> std::path::PathBuf {
        self.options.journal_path.clone()
    }

    pub fn lose_memory(&self) {
        self.knows_of_loss.store(true, Ordering::SeqCst);
        for entry in std::fs::read_dir(self.folder.path()).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|extension| extension == "staging") {
                std::fs::remove_file(path).unwrap();
            }
        }
    }
}

/// A pattern that tells address and version.
pub fn pattern(address: u64, version: u64, length: usize) -> Vec<u8> {
    (0..length as u64).map(|at| ((address + at) / 7 + version * 31 + at * 13) as u8).collect()
}

pub use sawmill_testkit::Dice;

/// A volume and what it should hold, byte for byte.
pub struct Model {
    pub bytes: Vec<u8>,
    pub dice: Dice,
}

impl Model {
    pub fn new(size_bytes: u64, seed: u64) -> Self {
        Model { bytes: vec![0; size_bytes as usize], dice: Dice::new(seed * 2 + 1) }
    }

    /// Does one random operation on both.
    pub fn act(&mut self, volume: &Volume) {
        let size = self.bytes.len() as u64;
        let kind = self.dice.below(100);
        let length = match self.dice.below(4) {
            0 => 1 + self.dice.below(600),
            1 => 4096,
            2 => 4096 * (1 + self.dice.below(16)),
            _ => 1 + self.dice.below(200_000),
        }
        .min(size);
        let mut address = self.dice.below(size - length + 1);
        if self.dice.below(2) == 0 {
            address = address / 4096 * 4096;
        }
        let range = address as usize..(address + length) as usize;
        match kind {
            0..60 => {
                let bytes = pattern(address, self.dice.below(1000), length as usize);
                volume.write_at(address, &bytes).unwrap();
                self.bytes[range].copy_from_slice(&bytes);
            }
            60..68 => {
                volume.discard(address, length).unwrap();
                self.bytes[range].fill(0);
            }
            68..74 => {
                volume.write_zeroes(address, length).unwrap();
                self.bytes[range].fill(0);
            }
            74..78 => volume.flush().unwrap(),
            _ => self.compare(volume, address, length as usize),
        }
    }

    pub fn compare(&self, volume: &Volume, address: u64, length: usize) {
        let read = volume.read_at(address, length).unwrap();
        let want = &self.bytes[address as usize..address as usize + length];
        if let Some(at) = read.iter().zip(want).position(|(one, other)| one != other) {
            panic!("byte {} is {} and should be {}", address + at as u64, read[at], want[at]);
        }
    }

    pub fn compare_all(&self, volume: &Volume) {
        for start in (0..self.bytes.len()).step_by(1 << 20) {
            self.compare(volume, start as u64, (1 << 20).min(self.bytes.len() - start));
        }
    }
}
