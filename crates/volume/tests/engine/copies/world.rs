//! A primary whose writes are known one by one, and a second store.

use std::sync::Arc;

use sawmill_store::{Blocking, Class, FaultStore, ObjectStore};
use sawmill_volume::replicate::{Copier, CopyOptions, Round, VolumeAt};
use sawmill_volume::{OpenOptions, RealWorld, Result, Volume};

use crate::faulty::{Machine, keys, memory, stored, tile_version, write_tile};
use crate::rig::{MIB, Rig};

pub const SLOTS: u64 = 5;

/// A primary, the writes it had, and a second store.
pub struct Pair {
    pub primary: Machine,
    pub second: Arc<dyn ObjectStore>,
    /// Which tile each write went to; its version is its place, from 1.
    pub writes: Vec<u64>,
}

impl Pair {
    /// With small checkpoints.
    pub fn new() -> Self {
        let mut primary = Machine::new();
        primary.options.checkpoint_bytes = MIB;
        Pair { primary, second: memory(), writes: Vec::new() }
    }

    /// Writes so many segments, over and over the same tiles.
    pub fn write(&mut self, volume: &Volume, count: u64) {
        for _ in 0..count {
            self.writes.push(self.writes.len() as u64 * 3 % SLOTS);
            write_tile(volume, self.writes[self.writes.len() - 1], self.writes.len() as u64);
        }
        stored(volume);
    }

    pub fn copy(&self) -> Result<Round> {
        copy(&*self.primary.plain, &*self.second)
    }

    /// After how many writes the disk was as it is in `store`; panics if it never was.
    pub fn cut_in(&self, store: &Arc<dyn ObjectStore>) -> usize {
        let volume = open_to_read(store.clone()).unwrap();
        self.cut_of(&volume)
    }

    pub fn cut_of(&self, volume: &Volume) -> usize {
        let found: Vec<u64> =
            (0..SLOTS).map(|tile| tile_version(volume, tile, self.writes.len() as u64)).collect();
        let mut state = vec![0; SLOTS as usize];
        for (done, tile) in self.writes.iter().enumerate() {
            if state == found {
                return done;
            }
            state[*tile as usize] = done as u64 + 1;
        }
        assert_eq!(state, found, "the disk was never like that");
        self.writes.len()
    }
}

pub fn options() -> CopyOptions {
    CopyOptions { source_text: "the primary".into(), fail_back: false }
}

/// One round from one store to another.
pub fn copy(source: &dyn ObjectStore, destination: &dyn ObjectStore) -> Result<Round> {
    copy_with(source, destination, &options(), &mut |_| ())
}

pub fn copy_with(
    source: &dyn ObjectStore,
    destination: &dyn ObjectStore,
    options: &CopyOptions,
    pace: &mut dyn FnMut(u64),
) -> Result<Round> {
    let world = RealWorld::default();
    Copier::begin(
        &world,
        VolumeAt::new(source, "disk"),
        VolumeAt::new(destination, "disk"),
        options,
    )?
    .round(pace)
}

pub fn open_to_read(store: Arc<dyn ObjectStore>) -> Result<Arc<Volume>> {
    let options = OpenOptions { read_only: true, ..OpenOptions::new("") };
    Volume::open(store, "disk", options)
}

/// Another machine, over the second store.
pub fn machine_at(store: &Arc<dyn ObjectStore>) -> Rig {
    let mut rig = Rig::over(store.clone());
    rig.options.checkpoint_bytes = MIB;
    rig
}

pub fn has_name(store: &dyn ObjectStore) -> bool {
    !keys(store, "names/").is_empty()
}

/// One byte of an object rots.
pub fn damage(store: &Arc<dyn ObjectStore>, key: &str) {
    let ask = Blocking(&**store);
    let mut bytes = ask.get(key, None, Class::Read).unwrap().to_vec();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    ask.delete(vec![key.to_owned()], Class::Upload).unwrap();
    ask.put(key, bytes.into(), Class::Upload).unwrap();
}

pub fn watching(store: &Arc<dyn ObjectStore>) -> Arc<FaultStore> {
    FaultStore::watching(store.clone())
}
