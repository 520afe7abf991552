//! What the tests under faults share: machines with a store that fails on request, objects to
//! damage, things to wait for.
#![allow(unreachable_pub, missing_docs, reason = "the tests' own")]

use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use sawmill_device::BlockDeviceExt;
use sawmill_format::checkpoint::parse_checkpoint_key;
use sawmill_format::ids::VolumeId;
use sawmill_format::journal::{SUPERBLOCK_BYTES, Superblock};
use sawmill_format::segment::{parse_segment_key, segment_key};
use sawmill_store::{
    Blocking, Call, CallKind, Class, Fault, FaultStore, ObjectStore, StoreOptions,
};
use sawmill_volume::{CreateOptions, FlushMode, Safety, Volume, check};

use crate::rig::{MIB, Rig, pattern};

/// One write of this size fills a segment of the rig's volumes.
pub const SEGMENT: usize = 256 << 10;
/// For waits that must end; far beyond what any of them takes.
pub const WAIT_TIME_MAX: Duration = Duration::from_secs(60);

/// A machine whose store fails as its script says, over a store that others share.
pub struct Machine {
    pub rig: Rig,
    pub faults: Arc<FaultStore>,
    pub plain: Arc<dyn ObjectStore>,
}

impl Deref for Machine {
    type Target = Rig;
    fn deref(&self) -> &Rig {
        &self.rig
    }
}

impl DerefMut for Machine {
    fn deref_mut(&mut self) -> &mut Rig {
        &mut self.rig
    }
}

pub fn memory() -> Arc<dyn ObjectStore> {
    sawmill_store::open("memory:", StoreOptions::default()).unwrap()
}

impl Machine {
    /// A new volume in a new store.
    pub fn new() -> Self {
        Self::with(64 * MIB, FlushMode::Logged)
    }

    pub fn with(size_bytes: u64, flush: FlushMode) -> Self {
        let plain = memory();
        let options = CreateOptions {
            flush,
            segment_bytes: SEGMENT as u32,
            ..CreateOptions::new(size_bytes)
        };
        sawmill_volume::create(&*plain, "disk", &options).unwrap();
        Self::over(plain)
    }

    /// Another machine on a store that has the volume.
    pub fn over(plain: Arc<dyn ObjectStore>) -> Self {
        let faults = FaultStore::watching(plain.clone());
        Machine { rig: Rig::over(faults.clone()), faults, plain }
    }

    /// Another machine on the same store, which goes on without this one's journal.
    pub fn successor(&self) -> Self {
        let mut machine = Self::over(self.plain.clone());
        machine.rig.options.accept_journal_loss = true;
        machine
    }

    /// Another machine with copies of this one's memory, journal and store, as they are now, as if
    /// this one had died: its journal names its own memory.
    pub fn twin(&self) -> Self {
        let mut twin = Self::over(memory());
        let mut files: Vec<_> =
            std::fs::read_dir(self.folder.path()).unwrap().map(|e| e.unwrap().path()).collect();
        // Memory first: what it holds of later writes than the disk does is what it is for.
        files.sort_by_key(|path| path.extension().is_none_or(|extension| extension != "staging"));
        for path in files {
            std::fs::copy(&path, twin.folder.path().join(path.file_name().unwrap())).unwrap();
        }
        twin.forget_whose_memory_it_was(self.volume_id());
        twin.plain = copy_store(&*self.plain);
        twin.faults = FaultStore::watching(twin.plain.clone());
        twin.rig.store = twin.faults.clone();
        twin
    }

    /// A copied journal says where the memory of the living lies, and would be refused for that.
    fn forget_whose_memory_it_was(&self, volume_id: VolumeId) {
        let mut journal = std::fs::read(self.journal()).unwrap();
        for block in journal.chunks_mut(SUPERBLOCK_BYTES).take(2) {
            let Ok(mut superblock) = Superblock::decode(block, volume_id) else { continue };
            if let Some(memory) = &mut superblock.memory {
                memory.folder = self.folder.path().as_os_str().as_encoded_bytes().to_vec();
                block.copy_from_slice(&superblock.encode().unwrap());
            }
        }
        std::fs::write(self.journal(), journal).unwrap();
    }

    /// From now on calls that `chosen` picks meet `fault`.
    pub fn fault(&self, fault: Fault, mut chosen: impl FnMut(&Call) -> bool + Send + 'static) {
        self.faults
            .script(Box::new(move |call| if chosen(call) { fault.clone() } else { Fault::None }));
    }

    pub fn heal(&self) {
        self.faults.script(Box::new(|_| Fault::None));
    }

    /// Heals when dropped, so that a test that fails among threads ends.
    pub fn healing(&self) -> HealingStore {
        HealingStore(self.faults.clone())
    }

    pub fn volume_id(&self) -> VolumeId {
        sawmill_volume::find(&*self.plain, &self.name).unwrap().volume_id
    }

    /// Checks the stored volume; nothing may be wrong with it.
    pub fn assert_sound(&self, what: &str) {
        let record = sawmill_volume::find(&*self.plain, &self.name).unwrap();
        let report = check::check(&*self.plain, &record, &mut |_, _| ()).unwrap();
        assert_eq!(report.damage, vec![], "{what}");
    }

    /// Keys of the store, sorted.
    pub fn keys(&self, part: &str) -> Vec<String> {
        keys(&*self.plain, part)
    }

    /// Replaces an object by what `change` makes of it.
    pub fn tamper(&self, key: &str, change: impl FnOnce(&mut Vec<u8>)) {
        let mut bytes = self.object(key).to_vec();
        change(&mut bytes);
        self.remove(key);
        Blocking(&*self.plain).put(key, Bytes::from(bytes), Class::Upload).unwrap();
    }

    pub fn object(&self, key: &str) -> Bytes {
        Blocking(&*self.plain).get(key, None, Class::Read).unwrap()
    }

    pub fn remove(&self, key: &str) {
        Blocking(&*self.plain).delete(vec![key.to_owned()], Class::Upload).unwrap();
    }

    pub fn count(&self, mut chosen: impl FnMut(&Call) -> bool) -> usize {
        self.faults.calls().iter().filter(|call| chosen(call)).count()
    }

    pub fn segment_key(&self, sequence: u64) -> String {
        segment_key(self.volume_id(), sequence)
    }
}

pub struct HealingStore(Arc<FaultStore>);

impl Drop for HealingStore {
    fn drop(&mut self) {
        self.0.script(Box::new(|_| Fault::None));
        self.0.release_all();
    }
}

pub fn keys(store: &dyn ObjectStore, part: &str) -> Vec<String> {
    let listed = Blocking(store).list("", Class::Read).unwrap();
    let mut keys: Vec<_> = listed.into_iter().map(|object| object.key).collect();
    keys.retain(|key| key.contains(part));
    keys.sort();
    keys
}

/// A copy of all objects in a store of its own.
pub fn copy_store(from: &dyn ObjectStore) -> Arc<dyn ObjectStore> {
    // An object that is gone since it was listed was replaced by one that was not listed yet.
    loop {
        let copy = memory();
        let is_whole = keys(from, "").iter().all(|key| {
            let found = Blocking(from).get(key, None, Class::Read);
            found.is_ok_and(|bytes| Blocking(&*copy).put(key, bytes, Class::Upload).is_ok())
        });
        if is_whole {
            return copy;
        }
    }
}

/// The sequence of a put of a segment.
pub fn segment_put(call: &Call) -> Option<u64> {
    (call.kind == CallKind::Put)
        .then(|| parse_segment_key(call.key()))?
        .map(|(_, sequence)| sequence)
}

/// Whether a call only checks whether a fence stands where the next segment would.
pub fn is_fence_check(call: &Call) -> bool {
    call.kind == CallKind::Get
        && call.range == Some(0..48)
        && parse_segment_key(call.key()).is_some()
}

/// The sequence of a get of a segment, checks for fences excepted.
pub fn segment_get(call: &Call) -> Option<u64> {
    (call.kind == CallKind::Get && !is_fence_check(call))
        .then(|| parse_segment_key(call.key()))?
        .map(|(_, sequence)| sequence)
}

/// The number of a put of a checkpoint's root.
pub fn root_put(call: &Call) -> Option<u64> {
    (call.kind == CallKind::Put)
        .then(|| parse_checkpoint_key(call.key()))?
        .map(|(_, number)| number)
}

/// Whether a call is of the volume, and not of a probe of the store.
pub fn is_engine(call: &Call) -> bool {
    ["/seg/", "/map/", "/checkpoint/"].iter().any(|part| call.key().contains(part))
}

pub use sawmill_testkit::wait_until as until;

/// Reads `want.len()` bytes and compares.
#[track_caller]
pub fn holds(volume: &Volume, address: u64, want: &[u8]) {
    let read = volume.read_at(address, want.len()).unwrap();
    if let Some(at) = read.iter().zip(want).position(|(one, other)| one != other) {
        panic!("byte {} is {} and should be {}", address + at as u64, read[at], want[at]);
    }
}

/// Waits until everything accepted is stored.
pub fn stored(volume: &Volume) {
    assert!(volume.wait(Safety::Stored, Some(WAIT_TIME_MAX)).unwrap(), "not stored in time");
}

/// Writes a whole segment's worth at tile `tile`; the bytes tell tile and version.
pub fn write_tile(volume: &Volume, tile: u64, version: u64) {
    volume.write_at(tile * SEGMENT as u64, &tile_bytes(tile, version)).unwrap();
}

pub fn tile_bytes(tile: u64, version: u64) -> Vec<u8> {
    pattern(tile * 77, version, SEGMENT)
}

/// Which version tile `tile` holds; 0 for one that was never written. Panics on anything else.
pub fn tile_version(volume: &Volume, tile: u64, versions: u64) -> u64 {
    let bytes = volume.read_at(tile * SEGMENT as u64, SEGMENT).unwrap();
    if bytes.iter().all(|byte| *byte == 0) {
        return 0;
    }
    let begins = |version: &u64| bytes[..16] == pattern(tile * 77, *version, 16);
    let found = (1..=versions).filter(begins).find(|version| bytes == tile_bytes(tile, *version));
    found.unwrap_or_else(|| panic!("tile {tile} holds no version of it"))
}

/// A seed for a random test: new each time, or the one in `SAWMILL_TEST_SEED`. Printed, for when it
/// fails.
pub fn seed() -> u64 {
    let fresh = || {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
        now.as_nanos() as u64 % 1_000_000_007
    };
    let given = std::env::var("SAWMILL_TEST_SEED").ok().and_then(|text| text.parse().ok());
    let seed = given.unwrap_or_else(fresh);
    println!("SAWMILL_TEST_SEED={seed}");
    seed
}
