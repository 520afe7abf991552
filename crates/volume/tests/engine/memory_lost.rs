//! Memory that outlives the process, and does not: gone with a container, in another folder,
//! damaged, of others. What was accepted is never dropped without a word.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use crate::faulty::{Machine, is_engine, root_put, write_tile};
use crate::journal_cases::time_of_the_stored_state;
use crate::rig::Rig;
use sawmill_device::{BlockDeviceExt, ErrorKind};
use sawmill_store::{CallKind, Fault, StoreErrorKind};
use sawmill_testkit::wait_until;
use sawmill_volume::{
    Disk, Disks, EntryKind, Lock, RealDisks, RealWorld, Safety, SteppedVolume, World,
};

const SECRET: &[u8] = b"accepted, and nowhere but in memory";

/// A server dies with an accepted write that only memory has.
fn killed() -> (Rig, PathBuf) {
    let rig = Rig::new();
    let volume = rig.open();
    // Three writes: after fewer, the next would be synced because a flush is expected.
    for address in [0, 4096, 16384] {
        volume.write_at(address, &[1; 4096]).unwrap();
    }
    volume.flush().unwrap();
    volume.write_at(8192, SECRET).unwrap();
    volume.close_now();
    drop(volume);
    let memory = std::fs::read_dir(rig.folder.path()).unwrap().map(|entry| entry.unwrap().path());
    let mut memory =
        memory.filter(|path| path.extension().is_some_and(|extension| extension == "staging"));
    let path = memory.next().expect("its memory");
    (rig, path)
}

fn assert_has_all(rig: &Rig) {
    let volume = rig.open();
    assert_eq!(volume.read_at(8192, SECRET.len()).unwrap(), SECRET);
    volume.close().unwrap();
}

fn refused_until_accepted(mut rig: Rig, says: &str) {
    let journal = std::fs::read(rig.journal()).unwrap();
    let (kind, text) = rig.refused();
    assert_eq!(kind, ErrorKind::Refused, "{text}");
    assert!(text.contains(says) && text.contains("--accept-memory-loss"), "{says}: {text}");
    assert_eq!(std::fs::read(rig.journal()).unwrap(), journal, "a refused attach changes nothing");
    rig.options.accept_journal_loss = true;
    assert_eq!(rig.refused().0, ErrorKind::Refused, "another loss is another flag");
    rig.options.accept_journal_loss = false;
    rig.options.accept_memory_loss = true;
    let volume = rig.open();
    assert_eq!(volume.read_at(0, 4096).unwrap(), [1; 4096], "what was flushed is there");
    volume.close().unwrap();
}

#[test]
fn memory_that_is_there_is_used() {
    assert_has_all(&killed().0);
}

#[test]
fn memory_that_is_gone_in_the_same_boot_is_missed() {
    let (rig, memory) = killed();
    std::fs::remove_file(memory).unwrap();
    refused_until_accepted(rig, "does not exist");
}

#[test]
fn the_refusal_says_how_old_the_store_is_and_what_bounds_the_loss() {
    let from = RealWorld::default().unix_ms() / 1000 * 1000;
    let (rig, memory) = killed();
    let to = RealWorld::default().unix_ms();
    std::fs::remove_file(memory).unwrap();
    let (_, text) = rig.refused();
    let at = time_of_the_stored_state(&text, "all that is stored (last ");
    assert!((from..=to).contains(&at.cast_unsigned()), "{from} <= {at} <= {to}: {text}");
    let bound = format!("at most its size, {} MiB", rig.options.staging_bytes >> 20);
    assert!(text.contains("had is not known") && text.contains(&bound), "{text}");
}

#[test]
fn memory_that_is_damaged_is_missed() {
    let (rig, memory) = killed();
    let mut bytes = std::fs::read(&memory).unwrap();
    bytes[66] ^= 1;
    std::fs::write(memory, bytes).unwrap();
    refused_until_accepted(rig, "does not match");
}

#[test]
fn memory_that_is_cut_short_is_missed() {
    let (rig, memory) = killed();
    std::fs::File::options().write(true).open(memory).unwrap().set_len(100).unwrap();
    refused_until_accepted(rig, "cut short");
}

#[test]
fn memory_that_others_may_write_is_missed() {
    use std::os::unix::fs::PermissionsExt;
    let (rig, memory) = killed();
    std::fs::set_permissions(memory, std::fs::Permissions::from_mode(0o666)).unwrap();
    refused_until_accepted(rig, "others may read or write it");
}

#[test]
fn memory_is_found_where_it_was_left() {
    let (mut rig, memory) = killed();
    let elsewhere = tempfile::tempdir_in("/dev/shm").unwrap();
    rig.options.staging_folder = elsewhere.path().to_owned();
    assert_has_all(&rig);
    assert!(!memory.exists(), "no attach needs it any more");
}

#[test]
fn memory_is_found_where_its_folder_is_mounted_now() {
    let (mut rig, memory) = killed();
    let elsewhere = tempfile::tempdir_in("/dev/shm").unwrap();
    std::fs::rename(&memory, elsewhere.path().join(memory.file_name().unwrap())).unwrap();
    rig.options.staging_folder = elsewhere.path().to_owned();
    assert_has_all(&rig);
}

#[test]
fn after_a_clean_end_no_memory_is_missed() {
    let rig = Rig::new();
    let volume = rig.open();
    volume.write_at(0, SECRET).unwrap();
    volume.close().unwrap();
    rig.open().close().unwrap();
}

/// A machine whose disks refuse to write superblocks, once the test asks for it.
#[derive(Clone, Default)]
struct WornDisks {
    world: Arc<RealWorld>,
    refuses: Arc<AtomicBool>,
    /// Time that has passed beside the real one.
    passed_s: Arc<AtomicU64>,
}

struct WornDisk(Arc<dyn Disk>, Arc<AtomicBool>);

impl Disk for WornDisk {
    fn size_bytes(&self) -> u64 {
        self.0.size_bytes()
    }
    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        self.0.read_at(offset, into)
    }
    fn read_now(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        self.0.read_now(offset, into)
    }
    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        if offset < 8192 && self.1.load(Ordering::SeqCst) {
            return Err(io::Error::from_raw_os_error(5));
        }
        self.0.write_at(offset, bytes)
    }
    fn sync(&self) -> io::Result<()> {
        self.0.sync()
    }
    fn has_name(&self) -> bool {
        self.0.has_name()
    }
}

impl Disks for WornDisks {
    fn lock(&self, path: &Path) -> io::Result<Lock> {
        RealDisks.lock(path)
    }
    fn lock_file(&self, path: &Path) -> io::Result<Lock> {
        RealDisks.lock_file(path)
    }
    fn entry_kind(&self, path: &Path) -> EntryKind {
        RealDisks.entry_kind(path)
    }
    fn open(&self, path: &Path) -> io::Result<Arc<dyn Disk>> {
        Ok(Arc::new(WornDisk(RealDisks.open(path)?, self.refuses.clone())))
    }
    fn make(&self, path: &Path, size_bytes: u64) -> io::Result<Arc<dyn Disk>> {
        Ok(Arc::new(WornDisk(RealDisks.make(path, size_bytes)?, self.refuses.clone())))
    }
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        RealDisks.rename(from, to)
    }
    fn remove(&self, path: &Path) -> io::Result<()> {
        RealDisks.remove(path)
    }
}

impl World for WornDisks {
    fn now(&self) -> Duration {
        self.world.now() + Duration::from_secs(self.passed_s.load(Ordering::SeqCst))
    }
    fn unix_ms(&self) -> u64 {
        self.world.unix_ms()
    }
    fn random(&self) -> sawmill_volume::Result<[u8; 16]> {
        self.world.random()
    }
    fn boot_id(&self) -> sawmill_volume::Result<[u8; 16]> {
        self.world.boot_id()
    }
    fn disks(&self) -> &dyn Disks {
        self
    }
}

/// Closes a volume while the engine means to write more checkpoints than the last one. `refuses`:
/// the disk takes no superblock at the end.
fn closed_with_checkpoints_to_come(refuses: bool) -> Machine {
    let rig = Machine::new();
    let world = WornDisks::default();
    let mut stepped =
        SteppedVolume::open(Arc::new(world.clone()), rig.store.clone(), "disk", &rig.options)
            .unwrap();
    let volume = stepped.volume().clone();
    let writing = std::thread::spawn(move || {
        (4..36).for_each(|tile| write_tile(&volume, tile, 1));
        volume.wait(Safety::Stored, None).unwrap();
        // Too little is dead to be worth a checkpoint while there is something to do.
        write_tile(&volume, 4, 2);
        volume.write_at(8192, SECRET).unwrap();
    });
    let step = |stepped: &mut SteppedVolume| {
        while stepped.step_journal_quietly() {}
        let _ = stepped.step_engine(world.now());
    };
    wait_until("much is overwritten", || {
        step(&mut stepped);
        writing.is_finished()
    });
    writing.join().unwrap();
    stepped.begin_close();
    wait_until("everything is stored", || {
        step(&mut stepped);
        stepped.is_settled()
    });
    // The engine's thread may step once more before it ends, and what it began then
    // lands.
    let roots = || rig.faults.calls().iter().filter(|call| root_put(call).is_some()).count();
    let written = roots();
    for _ in 0..100 {
        world.passed_s.fetch_add(1, Ordering::SeqCst);
        step(&mut stepped);
    }
    assert_eq!(roots(), written, "the last checkpoint is the last");
    world.refuses.store(refuses, Ordering::SeqCst);
    stepped.finish_close().unwrap();
    rig
}

#[test]
fn a_clean_close_is_recognized_without_the_journal() {
    let rig = closed_with_checkpoints_to_come(false);
    std::fs::remove_file(rig.journal()).unwrap();
    assert_has_all(&rig);
}

#[test]
fn memory_stays_while_the_journal_still_asks_for_it() {
    let rig = closed_with_checkpoints_to_come(true);
    let memory = std::fs::read_dir(rig.folder.path()).unwrap().map(|entry| entry.unwrap().path());
    let is_memory =
        |path: &PathBuf| path.extension().is_some_and(|extension| extension == "staging");
    assert_eq!(memory.filter(is_memory).count(), 1, "the journal still asks for it");
    // The next attach, on a disk that is well again.
    assert_has_all(&rig);
}

#[test]
fn memory_of_a_clean_end_is_not_missed_after_an_attach_that_died() {
    let rig = closed_with_checkpoints_to_come(true);
    let files = std::fs::read_dir(rig.folder.path()).unwrap().map(|entry| entry.unwrap().path());
    files
        .filter(|path| path.extension().is_some_and(|extension| extension == "staging"))
        .for_each(|path| std::fs::remove_file(path).unwrap());
    // Its fence is in the store, and it does not live to hear of that.
    rig.fault(Fault::LoseAnswer, |call| call.kind == CallKind::Put && call.key().contains("/seg/"));
    assert_eq!(rig.refused().0, ErrorKind::Unavailable);
    rig.heal();
    assert_has_all(&rig);
}

#[test]
fn an_unflushed_write_is_logged_in_time_and_with_a_limit_of_zero_never() {
    for (log_age_s, is_logged) in [(5, true), (0, false)] {
        let mut machine = Machine::new();
        machine.rig.options.log_age_max = Duration::from_secs(log_age_s);
        let world = WornDisks::default();
        let mut stepped = SteppedVolume::open(
            Arc::new(world.clone()),
            machine.store.clone(),
            "disk",
            &machine.options,
        )
        .unwrap();
        machine.fault(Fault::Fail(StoreErrorKind::Unavailable), |call| {
            call.kind == CallKind::Put && is_engine(call)
        });
        stepped.volume().write_at(8192, SECRET).unwrap();
        for _ in 0..12 {
            world.passed_s.fetch_add(1, Ordering::SeqCst);
            while stepped.step_journal() {}
            let _ = stepped.step_engine(world.now());
        }
        let status = stepped.volume().status();
        let (positions, syncs) = (status.positions, status.counters.journal_syncs);
        assert_eq!(
            positions.logged >= positions.accepted,
            is_logged,
            "{positions:?}, {syncs} syncs"
        );
        machine.heal();
    }
}

#[test]
fn what_comes_after_a_sync_that_hung_is_logged_in_time_too() {
    let mut machine = Machine::new();
    machine.rig.options.log_age_max = Duration::from_secs(5);
    let world = WornDisks::default();
    let mut stepped = SteppedVolume::open(
        Arc::new(world.clone()),
        machine.store.clone(),
        "disk",
        &machine.options,
    )
    .unwrap();
    machine.fault(Fault::Fail(StoreErrorKind::Unavailable), |call| {
        call.kind == CallKind::Put && is_engine(call)
    });
    for (seconds, is_hung) in [(60, true), (12, false), (12, false)] {
        stepped.volume().write_at(8192, SECRET).unwrap();
        for _ in 0..seconds {
            world.passed_s.fetch_add(1, Ordering::SeqCst);
            while !is_hung && stepped.step_journal() {}
            let _ = stepped.step_engine(world.now());
        }
        let positions = stepped.volume().status().positions;
        assert_eq!(positions.logged >= positions.accepted, !is_hung, "{positions:?}");
    }
    machine.heal();
}
