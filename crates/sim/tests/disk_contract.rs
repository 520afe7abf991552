//! The contract of local disks (K1 to K9 of `crates/volume/src/disk.rs`) as tests: the disks of
//! this machine and the simulated ones keep the same clauses, so the engine is tested against disks
//! that behave as real ones do.
//!
//! Invariant: each clause uses names of its own, so that all of them can run in one folder.
//!
//! Not here: K5, which only permits; a power cut of this machine (`tests/vm`); faults (`disk`).

use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use sawmill_sim::disk::{DiskFaults, Fate};
use sawmill_sim::world::{MachineMedia, SimWorld};
use sawmill_testkit::Dice;
use sawmill_volume::{Disk, Disks, EntryKind, RealDisks, World};

const SIZE_BYTES: u64 = 1 << 20;
const BLOCK_BYTES: usize = 4096;

/// The disks of a machine, and a folder to make files in.
struct DisksUnderTest<'a> {
    disks: &'a dyn Disks,
    folder: &'a Path,
    /// The machine loses its power, where a test can do that.
    cut_power: &'a dyn Fn(),
}

impl DisksUnderTest<'_> {
    fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    fn make(&self, name: &str) -> io::Result<Arc<dyn Disk>> {
        self.disks.make(&self.path(name), SIZE_BYTES)
    }

    fn open(&self, name: &str) -> io::Result<Arc<dyn Disk>> {
        self.disks.open(&self.path(name))
    }

    fn kind(&self, name: &str) -> EntryKind {
        self.disks.entry_kind(&self.path(name))
    }
}

const FILE: EntryKind = EntryKind::File { size_bytes: SIZE_BYTES };

/// One test of the contract.
struct Clause {
    name: &'static str,
    test: fn(&DisksUnderTest<'_>),
}

macro_rules! clauses {
    ($($test:ident),* $(,)?) => { &[$(Clause { name: stringify!($test), test: $test }),*] };
}

const CLAUSES: &[Clause] = clauses![
    k1_a_read_returns_the_newest_write_and_a_new_file_is_zero,
    k2_a_read_past_the_end_fails_and_the_size_stays,
    k3_read_now_returns_the_same_bytes_or_would_block,
    k4_a_write_survives_its_process_and_after_a_sync_a_power_cut,
    k6_a_disk_has_no_name_once_it_was_renamed_removed_or_replaced,
    k7_make_and_rename_take_no_name_that_is_taken,
    k8_an_absent_name_is_not_found,
    k9_a_name_and_a_file_have_one_holder_at_a_time,
];

fn error_kind<T>(outcome: io::Result<T>) -> Option<ErrorKind> {
    outcome.err().map(|error| error.kind())
}

fn read(disk: &dyn Disk, offset: u64, length: usize) -> Vec<u8> {
    let mut bytes = vec![0xee; length];
    disk.read_at(offset, &mut bytes).expect("a read inside the disk");
    bytes
}

fn k1_a_read_returns_the_newest_write_and_a_new_file_is_zero(under_test: &DisksUnderTest<'_>) {
    let disk = under_test.make("k1").unwrap();
    assert_eq!(read(&*disk, 0, SIZE_BYTES as usize), vec![0; SIZE_BYTES as usize]);
    disk.write_at(4096, &[1; 2 * BLOCK_BYTES]).unwrap();
    // In the middle of a block, and across two of them.
    disk.write_at(8000, &[2; 300]).unwrap();
    let mut expected = vec![0; BLOCK_BYTES];
    expected.extend([1; 2 * BLOCK_BYTES]);
    expected.extend([0; BLOCK_BYTES]);
    expected[8000..8300].fill(2);
    assert_eq!(read(&*disk, 0, 4 * BLOCK_BYTES), expected);
    assert_eq!(read(&*under_test.open("k1").unwrap(), 7999, 302), expected[7999..8301]);
}

fn k2_a_read_past_the_end_fails_and_the_size_stays(under_test: &DisksUnderTest<'_>) {
    let disk = under_test.make("k2").unwrap();
    disk.write_at(SIZE_BYTES - 4096, &[1; BLOCK_BYTES]).unwrap();
    let mut bytes = vec![0; 2 * BLOCK_BYTES];
    assert!(disk.read_at(SIZE_BYTES - 4096, &mut bytes).is_err());
    assert!(disk.read_now(SIZE_BYTES - 4096, &mut bytes).is_err());
    assert_eq!((disk.size_bytes(), under_test.kind("k2")), (SIZE_BYTES, FILE));
    assert_eq!(under_test.open("k2").unwrap().size_bytes(), SIZE_BYTES);
}

fn k3_read_now_returns_the_same_bytes_or_would_block(under_test: &DisksUnderTest<'_>) {
    let disk = under_test.make("k3").unwrap();
    disk.write_at(100, &[3; 200]).unwrap();
    let mut bytes = vec![0xee; 400];
    match disk.read_now(0, &mut bytes) {
        Ok(()) => assert_eq!(bytes, read(&*disk, 0, 400)),
        Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
    }
}

fn k4_a_write_survives_its_process_and_after_a_sync_a_power_cut(under_test: &DisksUnderTest<'_>) {
    let disk = under_test.make("k4").unwrap();
    disk.write_at(0, &[4; BLOCK_BYTES]).unwrap();
    drop(disk);
    let disk = under_test.open("k4").unwrap();
    assert_eq!(read(&*disk, 0, BLOCK_BYTES), [4; BLOCK_BYTES]);
    disk.sync().unwrap();
    disk.write_at(0, &[5; BLOCK_BYTES]).unwrap();
    drop(disk);
    (under_test.cut_power)();
    let found = read(&*under_test.open("k4").unwrap(), 0, BLOCK_BYTES);
    // What no sync covered is new or old, and never a state before the sync.
    assert!(found.iter().all(|byte| [4, 5].contains(byte)));
}

fn k6_a_disk_has_no_name_once_it_was_renamed_removed_or_replaced(under_test: &DisksUnderTest<'_>) {
    let disk = under_test.make("k6").unwrap();
    assert!(disk.has_name());
    under_test.disks.rename(&under_test.path("k6"), &under_test.path("k6.aside")).unwrap();
    assert!(!disk.has_name());
    let moved = under_test.open("k6.aside").unwrap();
    assert!(moved.has_name());
    under_test.disks.remove(&under_test.path("k6.aside")).unwrap();
    assert!(!moved.has_name());
    let replacement = under_test.make("k6").unwrap();
    assert_eq!((disk.has_name(), replacement.has_name()), (false, true));
}

fn k7_make_and_rename_take_no_name_that_is_taken(under_test: &DisksUnderTest<'_>) {
    for name in ["k7.one", "k7.other"] {
        under_test.make(name).unwrap().write_at(0, name.as_bytes()).unwrap();
    }
    assert_eq!(error_kind(under_test.make("k7.one")), Some(ErrorKind::AlreadyExists));
    let renamed = under_test.disks.rename(&under_test.path("k7.one"), &under_test.path("k7.other"));
    assert_eq!(error_kind(renamed), Some(ErrorKind::AlreadyExists));
    for name in ["k7.one", "k7.other"] {
        assert_eq!(read(&*under_test.open(name).unwrap(), 0, name.len()), name.as_bytes());
    }
}

fn k8_an_absent_name_is_not_found(under_test: &DisksUnderTest<'_>) {
    let absent = under_test.path("k8");
    assert_eq!(under_test.kind("k8"), EntryKind::Absent);
    assert_eq!(error_kind(under_test.open("k8")), Some(ErrorKind::NotFound));
    assert_eq!(error_kind(under_test.disks.remove(&absent)), Some(ErrorKind::NotFound));
    under_test.make("k8.other").unwrap();
    let renamed = under_test.disks.rename(&absent, &under_test.path("k8.new"));
    assert_eq!(error_kind(renamed), Some(ErrorKind::NotFound));
    under_test.disks.rename(&under_test.path("k8.other"), &absent).unwrap();
    assert_eq!((under_test.kind("k8.other"), under_test.kind("k8")), (EntryKind::Absent, FILE));
}

fn k9_a_name_and_a_file_have_one_holder_at_a_time(under_test: &DisksUnderTest<'_>) {
    let (path, other) = (under_test.path("k9"), under_test.path("k9.other"));
    let disks = under_test.disks;
    // A name can be locked before it leads anywhere; a file cannot.
    let name = disks.lock(&path).unwrap();
    assert_eq!(error_kind(disks.lock(&path)), Some(ErrorKind::WouldBlock));
    let (_one, _two) = (disks.lock_file(&path).unwrap(), disks.lock_file(&path).unwrap());
    drop(under_test.make("k9").unwrap());
    let file = disks.lock_file(&path).unwrap();
    disks.rename(&path, &other).unwrap();
    assert_eq!(error_kind(disks.lock_file(&other)), Some(ErrorKind::WouldBlock));
    drop((name, file));
    disks.lock(&path).unwrap();
    disks.lock_file(&other).unwrap();
}

#[test]
fn the_disks_of_this_machine_keep_the_contract() {
    let folder = tempfile::tempdir().unwrap();
    let under_test = DisksUnderTest { disks: &RealDisks, folder: folder.path(), cut_power: &|| {} };
    for clause in CLAUSES {
        (clause.test)(&under_test);
    }
}

#[test]
fn the_simulated_disks_keep_the_contract() {
    let media = MachineMedia::default().with_locks();
    let dice = Dice::seeded("the disks");
    let (clock, life, trace) = (Arc::default(), Arc::default(), Arc::default());
    let world = SimWorld::new(clock, media.clone(), life, trace, DiskFaults::default(), dice);
    let cut_power = || {
        for medium in media.all() {
            medium.cut_power(&mut Dice::seeded("the power"), |_| Fate::Lost);
        }
    };
    let under_test =
        DisksUnderTest { disks: world.disks(), folder: Path::new("/disks"), cut_power: &cut_power };
    for clause in CLAUSES {
        (clause.test)(&under_test);
    }
}

#[test]
fn every_clause_of_the_contract_but_a_permission_has_a_function_with_its_number() {
    let contract = include_str!("../../volume/src/disk.rs");
    let numbered = contract.lines().filter_map(|line| line.strip_prefix("/// - **K"));
    let numbers = numbered.filter_map(|rest| Some(rest.split_once("**")?.0));
    // K5 permits a disk to lose data, and asks nothing of it.
    let of_contract: Vec<&str> = numbers.filter(|number| *number != "5").collect();
    let of_name = |clause: &Clause| clause.name.strip_prefix('k')?.split_once('_');
    let tested: Vec<&str> = CLAUSES
        .iter()
        .map(|clause| of_name(clause).expect("a name that begins with its number").0)
        .collect();
    assert_eq!(tested, of_contract);
}
