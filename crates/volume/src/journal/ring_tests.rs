//! The journal's ring against a list as its model: appends, flushes, stores that free its space,
//! then a process crash or a power cut; a scan finds what the list holds, record by record and byte
//! by byte.
//!
//! Positions go around the rings several times, so that seams, pads and stale laps are met.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use proptest::prelude::*;
use sawmill_format::journal::RecordHeader;
use sawmill_sys::{BLOCK_BYTES, StagingFile};

use super::scan::{LogImage, Scan, ScanOptions, scan};
use super::superblock::SuperblockFile;
use super::superblock::test_journal::{CAPACITY_BYTES, TAG, VOLUME, first_superblock};
use super::writer::{JournalWriter, Step};
use super::*;

const STAGING_BYTES: u64 = 32 << 10;

/// What is on a disk, and the blocks written since the last sync.
#[derive(Default)]
struct Layers {
    now: Vec<u8>,
    durable: Vec<u8>,
    unsynced: Vec<u64>,
    /// Writes from here on fail.
    refused_from: Option<u64>,
}

struct TornDisk(Mutex<Layers>);

impl TornDisk {
    fn holding(bytes: Vec<u8>) -> Arc<Self> {
        Arc::new(TornDisk(Mutex::new(Layers {
            durable: bytes.clone(),
            now: bytes,
            unsynced: Vec::new(),
            refused_from: None,
        })))
    }

    /// What a power cut leaves: of the unsynced blocks, those that `keeps` selects.
    fn cut(&self, mut keeps: impl FnMut() -> bool) -> Arc<Self> {
        let layers = self.0.lock();
        let mut left = layers.durable.clone();
        for block in layers.unsynced.iter().filter(|_| keeps()) {
            let range = *block as usize..(block + BLOCK_BYTES) as usize;
            left[range.clone()].copy_from_slice(&layers.now[range]);
        }
        Self::holding(left)
    }
}

impl Disk for TornDisk {
    fn size_bytes(&self) -> u64 {
        RING_START_BYTES + CAPACITY_BYTES
    }
    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        into.copy_from_slice(&self.0.lock().now[offset as usize..][..into.len()]);
        Ok(())
    }
    fn read_now(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        self.read_at(offset, into)
    }
    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let mut layers = self.0.lock();
        if layers.refused_from.is_some_and(|from| offset + bytes.len() as u64 > from) {
            return Err(io::ErrorKind::StorageFull.into());
        }
        layers.now[offset as usize..][..bytes.len()].copy_from_slice(bytes);
        let blocks = (offset..offset + bytes.len() as u64).step_by(BLOCK_BYTES as usize);
        layers.unsynced.extend(blocks);
        Ok(())
    }
    fn sync(&self) -> io::Result<()> {
        let layers = &mut *self.0.lock();
        layers.durable.clone_from(&layers.now);
        layers.unsynced.clear();
        Ok(())
    }

    fn has_name(&self) -> bool {
        true
    }
}

#[derive(Clone, Debug)]
enum Move {
    Write(u64),
    Discard(u64),
    Zero(u64),
    Flush,
    /// The journal's thread takes what is there.
    Work,
    /// Everything taken is stored.
    Store,
}

fn moves() -> impl Strategy<Value = Vec<Move>> {
    let one = prop_oneof![
        8 => prop_oneof![1u64..300, 3900u64..4200, 1u64..12_000].prop_map(Move::Write),
        1 => (1u64..1 << 40).prop_map(Move::Discard),
        1 => (1u64..1 << 40).prop_map(Move::Zero),
        3 => Just(Move::Flush),
        2 => Just(Move::Work),
        1 => Just(Move::Store),
    ];
    prop::collection::vec(one, 1..60)
}

/// What the list knows of a record.
struct ModelRecord {
    header: (u64, RecordOperation, u64, u64),
    end: u64,
    payload: Vec<u8>,
}

struct Bench {
    journal: Arc<Journal>,
    writer: JournalWriter,
    disk: Arc<TornDisk>,
    records: Vec<ModelRecord>,
    /// A flush through here was answered.
    flushed_end: Arc<Mutex<u64>>,
    /// Where the last record taken ends, and how many are not stored.
    taken_end: u64,
    taken_unstored: usize,
}

impl Bench {
    fn new(file: StagingFile) -> Self {
        let disk = TornDisk::holding(vec![0; (RING_START_BYTES + CAPACITY_BYTES) as usize]);
        let (ring, consumer) = file.into_ring(0, &[]);
        let start = Start {
            tag: TAG,
            epoch: 1,
            capacity_bytes: CAPACITY_BYTES,
            first_lap_end: CAPACITY_BYTES,
            position: 0,
            trim: 0,
            segments_end: 0,
            stored_sequence: 0,
            unstored_records: 0,
            unstored_records_max: usize::MAX,
        };
        let journal = Arc::new(Journal::new(ring, disk.clone(), &start));
        let mut superblock = SuperblockFile::first(disk.clone(), first_superblock());
        superblock.write(|_| ()).unwrap();
        let world = Arc::new(crate::world::RealWorld::default());
        let writer = JournalWriter::new(journal.clone(), consumer, superblock, world);
        let flushed_end = Arc::default();
        Bench {
            journal,
            writer,
            disk,
            records: Vec::new(),
            flushed_end,
            taken_end: 0,
            taken_unstored: 0,
        }
    }

    /// The journal's thread, until it has nothing to do.
    fn work(&mut self) {
        loop {
            let mut take = |records: Vec<Arc<Record>>| {
                for record in records {
                    self.taken_end = record.end();
                    self.taken_unstored += usize::from(record.operation != RecordOperation::Pad);
                }
            };
            let step = self.writer.step(&mut take, &mut |wanted| wanted).unwrap();
            if step != Step::Busy {
                return;
            }
        }
    }

    fn store(&mut self) {
        self.work();
        self.journal.set_stored(1, self.taken_end, std::mem::take(&mut self.taken_unstored));
        self.journal.request_room();
        self.work();
    }

    fn append(&mut self, operation: RecordOperation, length: u64) {
        let number = self.records.len() as u64;
        let address = number * 517;
        let pattern = |at: u64| (number * 31 + at * 7 + at / 256) as u8;
        let bytes = if operation == RecordOperation::Write { length } else { 0 };
        let payload: Vec<u8> = (0..bytes).map(pattern).collect();
        loop {
            let fill = |into: &mut [u8]| into.copy_from_slice(&payload);
            match self.journal.append(operation, address, length, fill, |_| ()) {
                Ok(record) => {
                    let header = (record.position, operation, address, length);
                    self.records.push(ModelRecord { header, end: record.end(), payload });
                    return;
                }
                Err(ReserveError::Staging) => self.flush(),
                Err(_) => self.store(),
            }
        }
    }

    fn flush(&mut self) {
        let (through, flushed_end) = (self.journal.ring.next(), self.flushed_end.clone());
        let answered = Arc::new(AtomicBool::new(false));
        let callback_answered = answered.clone();
        let callback = move |outcome: Result<()>| {
            outcome.unwrap();
            let mut flushed_end = flushed_end.lock();
            *flushed_end = through.max(*flushed_end);
            callback_answered.store(true, Ordering::Relaxed);
        };
        self.journal.when_logged(through, Box::new(callback));
        self.work();
        assert!(answered.load(Ordering::Relaxed), "nothing keeps a flush waiting here");
    }

    fn run(&mut self, moves: &[Move]) {
        for step in moves {
            match *step {
                Move::Write(length) => self.append(RecordOperation::Write, length),
                Move::Discard(length) => self.append(RecordOperation::Discard, length),
                Move::Zero(length) => self.append(RecordOperation::Zero, length),
                Move::Flush => self.flush(),
                Move::Work => self.work(),
                Move::Store => self.store(),
            }
        }
    }
}

/// What recovery finds on this disk and in this memory, from where the store ends.
fn recovered(disk: Arc<TornDisk>, staging: Option<StagingFile>, from: u64) -> (Scan, LogImage) {
    let superblock = SuperblockFile::read(disk.clone(), VOLUME).unwrap().unwrap();
    let block = superblock.current();
    assert!(block.trim <= from, "nothing is given up before it is stored");
    let mut log = LogImage::new(disk, CAPACITY_BYTES, staging);
    let options = ScanOptions::of(block, from);
    (scan(&mut log, &options).unwrap(), log)
}

/// The records found are the first of those known at and after `from`, byte by byte. Returns how
/// many.
fn compare(records: &[ModelRecord], from: u64, (scan, mut log): (Scan, LogImage)) -> usize {
    let expected = records.iter().filter(|known| known.header.0 >= from);
    let found: Vec<&RecordHeader> = scan
        .records
        .iter()
        .filter(|found| found.record.is_some())
        .map(|found| &found.header)
        .collect();
    for (known, found) in expected.clone().zip(&found) {
        assert_eq!(known.header, (found.position, found.operation, found.address, found.length));
        let mut payload = vec![0; known.payload.len()];
        log.read(found.position + RECORD_HEADER_BYTES as u64, &mut payload).unwrap();
        assert!(payload == known.payload, "the payload at position {}", found.position);
    }
    assert!(found.len() <= expected.count(), "nothing is found that was not written");
    found.len()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn a_scan_finds_the_list_after_the_death_of_process_or_power(
        moves in moves(), kept in any::<u64>(), share in 0u64..4,
    ) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("staging");
        let mut bench = Bench::new(StagingFile::create(&path, STAGING_BYTES).unwrap());
        bench.run(&moves);
        let Bench { journal, writer, disk, records, flushed_end, .. } = bench;
        let from = journal.segments_end();
        drop((writer, journal));
        let rest = records.iter().filter(|known| known.header.0 >= from);

        let staging = StagingFile::open(&path).unwrap();
        let survivors = compare(&records, from, recovered(disk.cut(|| true), staging, from));
        prop_assert_eq!(survivors, rest.clone().count(), "accepted survives the process");

        let mut dice = kept | 1;
        let after_cut = disk.cut(|| {
            dice ^= dice << 13;
            dice ^= dice >> 7;
            dice ^= dice << 17;
            dice % 4 < share
        });
        let survivors = compare(&records, from, recovered(after_cut, None, from));
        let logged = *flushed_end.lock();
        let promised = rest.filter(|known| known.end <= logged).count();
        prop_assert!(survivors >= promised, "logged survives the power");
    }
}

#[test]
fn an_expected_flush_finds_its_records_synced_and_a_wrong_guess_is_not_repeated() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("staging");
    let mut bench = Bench::new(StagingFile::create(&path, STAGING_BYTES).unwrap());
    let write = |bench: &mut Bench| {
        bench.append(RecordOperation::Write, 4000);
        bench.work();
        bench.journal.logged() == bench.journal.ring.next()
    };
    let syncs = |bench: &Bench| bench.journal.syncs.load(Ordering::Relaxed);
    assert!(!write(&mut bench), "nobody has flushed yet");
    bench.flush();
    for turn in 0..3 {
        assert!(write(&mut bench), "as before: one write, then a flush (turn {turn})");
        let before = syncs(&bench);
        bench.flush();
        assert_eq!(syncs(&bench), before, "the flush had nothing to wait for");
    }
    assert!(write(&mut bench));
    assert!(!write(&mut bench), "no flush came after the last one");
    bench.flush();
    for turn in 0..3 {
        assert!(!write(&mut bench), "now two writes come before a flush (turn {turn})");
        assert!(write(&mut bench));
        bench.flush();
    }
    assert!((0..8).map(|_| write(&mut bench)).skip(2).all(|synced| !synced), "a stream of writes");
}

#[test]
fn blocks_are_written_ahead_of_the_records_once_in_the_first_lap() {
    let folder = tempfile::tempdir().unwrap();
    let mut bench =
        Bench::new(StagingFile::create(&folder.path().join("s"), STAGING_BYTES).unwrap());
    let mark_rest = |bench: &Bench, from: u64| {
        bench.disk.0.lock().now[(RING_START_BYTES + from) as usize..].fill(0xEE);
    };
    let is_marked = |bench: &Bench| bench.disk.0.lock().now.ends_with(&[0xEE; 4096]);
    mark_rest(&bench, 0);
    bench.append(RecordOperation::Write, 4000);
    bench.flush();
    assert!(!is_marked(&bench), "the first sync covers the blocks of the next records");
    mark_rest(&bench, bench.journal.ring.next());
    for _ in 0..4 {
        bench.append(RecordOperation::Write, 4000);
        bench.flush();
    }
    assert!(is_marked(&bench), "once");
    while bench.journal.ring.next() < CAPACITY_BYTES + BLOCK_BYTES {
        bench.append(RecordOperation::Write, 4000);
        bench.flush();
        bench.store();
    }
    mark_rest(&bench, bench.journal.ring.next() - CAPACITY_BYTES);
    bench.append(RecordOperation::Write, 4000);
    bench.flush();
    assert!(is_marked(&bench), "in the next lap there is nothing to write ahead");
}

#[test]
fn a_flush_succeeds_where_blocks_ahead_of_it_cannot_be_written() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("staging");
    let mut bench = Bench::new(StagingFile::create(&path, STAGING_BYTES).unwrap());
    bench.append(RecordOperation::Write, 4000);
    bench.disk.0.lock().refused_from = Some(RING_START_BYTES + 4 * BLOCK_BYTES);
    bench.flush();
    bench.append(RecordOperation::Write, 4000);
    bench.flush();
}
