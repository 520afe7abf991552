//! The journal's path under random schedules: the next thread to run is chosen at every lock and
//! atomic and between the halves of a copy, many thousand times per claim, on the production types.
//! Built with the feature `shuttle` only (`tests/run.sh`).
//!
//! Here a wait with a timeout may end at once or never ([`sawmill_sys::sync`]), so a missed wake-up
//! becomes a deadlock, which is detected. The loop of the journal's thread is copied from
//! `threads`, because the original needs a whole volume; everything that it calls is real. Controls
//! at the end break one rule each and must be caught.
//!
//! Invariant: no plain lock (`parking_lot`) is held where a thread switch may happen: the switch
//! would end in a deadlock of the test.
//!
//! Not here: memory orders weaker than sequential consistency.

use std::cell::Cell;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use sawmill_format::ids::{PutId, VolumeId};
use sawmill_format::journal::{RING_START_BYTES, RecordOperation, Superblock};
use sawmill_sys::StagingFile;
use sawmill_sys::sync::{AtomicBool, Condvar, Mutex, switch_point};
use shuttle::rand::Rng;
use shuttle::thread;

use super::scan::{LogImage, ScanOptions, scan};
use super::superblock::SuperblockFile;
use super::writer::{JournalWriter, Step};
use super::*;
use crate::engine::RecordIntake;

const SCHEDULES: usize = 10_000;
const STAGING_BYTES: u64 = 32 << 10;
const CAPACITY_BYTES: u64 = 64 << 10;
/// Both rings wrap around soon after it.
const START: u64 = CAPACITY_BYTES - 8192;
const TAG: u64 = 7;
const SLEEP_TIME: Option<Duration> = Some(Duration::from_millis(50));

/// Tries `run` under random schedules, and under some that favor few switches.
pub(crate) fn under_schedules(run: impl Fn() + Send + Sync + 'static) {
    let run = Arc::new(run);
    let again = run.clone();
    let config = || {
        let mut config = shuttle::Config::default();
        config.stack_size = 256 << 10;
        config
    };
    let random = shuttle::scheduler::RandomScheduler::new(SCHEDULES);
    shuttle::Runner::new(random, config()).run(move || run());
    let few_switches = shuttle::scheduler::PctScheduler::new(3, SCHEDULES / 5);
    shuttle::Runner::new(few_switches, config()).run(move || again());
}

/// Whether some schedule makes `run` fail.
pub(crate) fn is_caught(run: impl Fn() + Send + Sync + 'static) -> bool {
    catch_unwind(AssertUnwindSafe(|| under_schedules(run))).is_err()
}

/// A disk whose unsynced writes can be dropped. No thread switch happens under its locks, so plain
/// ones suffice.
struct TwoLayers {
    written: parking_lot::Mutex<Vec<u8>>,
    durable: parking_lot::Mutex<Vec<u8>>,
}

impl TwoLayers {
    fn new() -> Arc<Self> {
        let blank = vec![0; (RING_START_BYTES + CAPACITY_BYTES) as usize];
        Arc::new(TwoLayers { written: blank.clone().into(), durable: blank.into() })
    }

    /// A disk with only what is durable on this one.
    fn after_power_loss(&self) -> Arc<Self> {
        let left = self.durable.lock().clone();
        Arc::new(TwoLayers { written: left.clone().into(), durable: left.into() })
    }
}

impl Disk for TwoLayers {
    fn size_bytes(&self) -> u64 {
        RING_START_BYTES + CAPACITY_BYTES
    }
    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        into.copy_from_slice(&self.written.lock()[offset as usize..][..into.len()]);
        Ok(())
    }
    fn read_now(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        self.read_at(offset, into)
    }
    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        switch_point();
        self.written.lock()[offset as usize..][..bytes.len()].copy_from_slice(bytes);
        Ok(())
    }
    fn sync(&self) -> io::Result<()> {
        // A sync may or may not cover what is written while it runs: here it does not.
        let covered = self.written.lock().clone();
        switch_point();
        *self.durable.lock() = covered;
        Ok(())
    }

    fn has_name(&self) -> bool {
        true
    }
}

/// A journal with its disk, and what its thread took.
struct Bench {
    journal: Arc<Journal>,
    disk: Arc<TwoLayers>,
    staging: PathBuf,
    is_stopped: AtomicBool,
    taken_records: parking_lot::Mutex<Vec<Arc<Record>>>,
    /// Positions of records that are in the journal map.
    entered: parking_lot::Mutex<Vec<u64>>,
    _folder: tempfile::TempDir,
}

impl Bench {
    fn new() -> (Arc<Self>, JournalWriter) {
        let folder = tempfile::tempdir_in("/dev/shm").expect("a folder in memory");
        let staging = folder.path().join("staging");
        let file = StagingFile::create(&staging, STAGING_BYTES).expect("a staging file");
        let (ring, consumer) = file.into_ring(START, &[]);
        let disk = TwoLayers::new();
        let start = Start {
            tag: TAG,
            epoch: 1,
            capacity_bytes: CAPACITY_BYTES,
            first_lap_end: CAPACITY_BYTES,
            position: START,
            trim: START,
            segments_end: START,
            stored_sequence: 0,
            unstored_records: 0,
            unstored_records_max: usize::MAX,
        };
        let journal = Arc::new(Journal::new(ring, disk.clone(), &start));
        let superblock = SuperblockFile::first(disk.clone(), superblock());
        let world = Arc::new(crate::world::RealWorld::default());
        let writer = JournalWriter::new(journal.clone(), consumer, superblock, world);
        let (is_stopped, taken_records) = (AtomicBool::new(false), parking_lot::Mutex::default());
        let entered = parking_lot::Mutex::default();
        (
            Arc::new(Bench {
                journal,
                disk,
                staging,
                is_stopped,
                taken_records,
                entered,
                _folder: folder,
            }),
            writer,
        )
    }

    /// Appends a write of `bytes` bytes of `fill`, in two halves.
    fn append(&self, fill: u8, bytes: u64) -> Arc<Record> {
        let in_halves = |into: &mut [u8]| {
            let half = into.len() / 2;
            into[..half].fill(fill);
            switch_point();
            into[half..].fill(fill);
        };
        let address = u64::from(fill) << 12;
        let enter = |record: &Arc<Record>| {
            switch_point();
            self.entered.lock().push(record.position);
        };
        let appended =
            self.journal.append(RecordOperation::Write, address, bytes, in_halves, enter);
        appended.expect("there is room")
    }

    /// Sleeps until everything up to `through` is logged; `on_logged` is called with the
    /// answer.
    fn flush(&self, through: u64, on_logged: impl FnOnce() + Send + 'static) {
        let signal = Arc::new((Mutex::new(false), Condvar::default()));
        let callback_signal = signal.clone();
        let callback = move |outcome: Result<()>| {
            outcome.expect("this disk does not fail");
            on_logged();
            *callback_signal.0.lock() = true;
            callback_signal.1.notify_all();
        };
        self.journal.when_logged(through, Box::new(callback));
        let mut answered = signal.0.lock();
        while !*answered {
            signal.1.wait(&mut answered);
        }
    }

    /// Ends the journal's thread.
    fn stop(&self) {
        self.is_stopped.store(true, Ordering::SeqCst);
        self.journal.wake.notify();
    }

    /// Everything taken was whole when it was taken (`take` looked), and lies end to end from the
    /// start.
    fn check_taken(&self) -> u64 {
        let taken_records = self.taken_records.lock();
        taken_records.iter().fold(START, |end, record| {
            assert_eq!(
                record.position, end,
                "positions follow one another, none twice, none left out"
            );
            record.end()
        })
    }

    fn take(&self, records: Vec<Arc<Record>>) {
        for record in &records {
            assert!(record.is_complete(), "a record is complete before it is taken");
            let entered = record.length == 0 || self.entered.lock().contains(&record.position);
            assert!(entered, "it is in the map before it can be swept from it");
            let filled = record.filled().expect("a record is filled before it is taken");
            let mut payload = vec![0; record.payload_bytes() as usize];
            let slot = filled.slot.expect("it is in the ring");
            let given_up = self.journal.ring.read(&slot, RECORD_HEADER_BYTES as u64, &mut payload);
            assert!(given_up > 0 || record.verify(0, &payload), "its payload is in place");
        }
        self.taken_records.lock().extend(records);
    }
}

fn superblock() -> Superblock {
    Superblock {
        volume_id: VolumeId([1; 16]),
        journal_tag: TAG,
        revision: 0,
        epoch: 1,
        intent_epoch: 0,
        intent_put_id: PutId([0; 16]),
        capacity_bytes: CAPACITY_BYTES,
        trim: START,
        logged: START,
        stored_sequence: 0,
        stored_position: START,
        clean: false,
        bound_epoch: 1,
        bound_position: START,
        memory: None,
        ring_copy: None,
    }
}

/// The loop of `threads::SteppedJournal` on a thread of its own, until told to stop with nothing
/// left to do.
fn run_journal(bench: &Bench, mut writer: JournalWriter) {
    let (journal, mut is_quiet) = (&bench.journal, false);
    loop {
        let step =
            writer.step(&mut |records| bench.take(records), &mut |_| 0).expect("no fault here");
        match step {
            Step::Busy => is_quiet = false,
            Step::Waiting => {
                journal.wake.sleep(SLEEP_TIME);
            }
            _ if bench.is_stopped.load(Ordering::SeqCst) => return,
            _ if !is_quiet => {
                if journal.expects_flush() {
                    journal.wake.watch(Duration::from_micros(60));
                }
                is_quiet = !journal.wake.sleep(SLEEP_TIME);
            }
            step => {
                is_quiet = false;
                if step == Step::Unsettled {
                    writer.settle().expect("no fault here");
                }
                if journal.begin_rest() {
                    journal.wake.sleep(None);
                    journal.end_rest();
                }
            }
        }
    }
}

fn start_journal(bench: &Arc<Bench>, writer: JournalWriter) -> thread::JoinHandle<()> {
    let bench = bench.clone();
    thread::spawn(move || run_journal(&bench, writer))
}

/// The records a recovery finds: positions and first bytes of payload; and the slots it steps over.
fn recovered(disk: Arc<dyn Disk>, staging: Option<StagingFile>) -> (Vec<u64>, Vec<(u64, u64)>) {
    let mut log = LogImage::new(disk, CAPACITY_BYTES, staging);
    let options = ScanOptions {
        tag: TAG,
        from: START,
        epoch: 1,
        bound_position: START,
        mark: START,
        judged: false,
        accept_loss: false,
    };
    let scan = scan(&mut log, &options).expect("what was flushed is there");
    let records = scan.records.iter().filter_map(|scanned| scanned.record.as_ref());
    (records.map(|record| record.position).collect(), scan.voids)
}

#[test]
fn no_record_is_taken_before_it_is_filled_and_positions_are_never_reused() {
    under_schedules(|| {
        let (bench, writer) = Bench::new();
        let journal = start_journal(&bench, writer);
        let writers = [100, 5000, 3000].into_iter().enumerate().map(|(number, bytes)| {
            let bench = bench.clone();
            thread::spawn(move || {
                let records = [bytes, bytes / 3].map(|bytes| bench.append(1 + number as u8, bytes));
                assert!(records[0].end() <= records[1].position, "one after the other");
            })
        });
        writers.collect::<Vec<_>>().into_iter().for_each(|writer| writer.join().expect("a writer"));
        let end = bench.journal.ring.next();
        bench.flush(end, || ());
        bench.stop();
        journal.join().expect("the journal");
        assert!(bench.check_taken() >= end);
    });
}

#[test]
fn a_flush_covers_everything_completed_before_it_was_asked() {
    under_schedules(|| {
        let (bench, writer) = Bench::new();
        let journal = start_journal(&bench, writer);
        let accepted: Arc<parking_lot::Mutex<Vec<u64>>> = Arc::default();
        let clients = [200, 4000, 1500].into_iter().enumerate().map(|(number, bytes)| {
            let (bench, accepted) = (bench.clone(), accepted.clone());
            thread::spawn(move || {
                for turn in 0..2 {
                    let record = bench.append(1 + number as u8, bytes + turn);
                    accepted.lock().push(record.position);
                    if number == 2 && turn == 0 {
                        continue;
                    }
                    let (wanted, disk) = (accepted.lock().clone(), bench.disk.clone());
                    bench.flush(bench.journal.ring.next(), move || {
                        let (found, _) = recovered(disk.after_power_loss(), None);
                        let lost = wanted.iter().find(|position| !found.contains(position));
                        assert_eq!(
                            lost, None,
                            "accepted before the flush, and gone after a power loss"
                        );
                    });
                }
            })
        });
        clients.collect::<Vec<_>>().into_iter().for_each(|client| client.join().expect("a client"));
        bench.stop();
        journal.join().expect("the journal");
        bench.check_taken();
    });
}

#[test]
fn a_slot_whose_writer_died_is_stepped_over_and_all_others_are_found() {
    under_schedules(|| {
        let (bench, writer) = Bench::new();
        let journal = start_journal(&bench, writer);
        let dying = {
            let bench = bench.clone();
            thread::spawn(move || {
                let die = |into: &mut [u8]| {
                    into[..10].fill(9);
                    switch_point();
                    resume_unwind(Box::new("dies"));
                };
                let append =
                    || bench.journal.append(RecordOperation::Write, 0, 700, die, |_| ()).is_ok();
                assert!(catch_unwind(AssertUnwindSafe(append)).is_err());
            })
        };
        let writers = [300, 5000].map(|bytes| {
            let bench = bench.clone();
            thread::spawn(move || [bytes, 40].map(|bytes| bench.append(1, bytes).position))
        });
        let mut accepted: Vec<u64> =
            writers.into_iter().flat_map(|writer| writer.join().expect("a writer")).collect();
        accepted.sort_unstable();
        dying.join().expect("it was caught");
        bench.stop();
        journal.join().expect("the journal");
        // The process dies: what it wrote to the disk and to the staging memory remains.
        bench.journal.ring.unlock();
        let staging = StagingFile::open(&bench.staging).expect("readable").expect("there");
        let (found, voids) = recovered(bench.disk.clone(), Some(staging));
        assert_eq!(found, accepted);
        assert_eq!(voids.len(), 1);
        assert_eq!(voids[0].1, 700 + RECORD_HEADER_BYTES as u64);
    });
}

/// Some threads put one item each and notify; one sleeps until it has them all.
fn receive_all_items(notify: impl Fn(&Wake) + Copy + Send + Sync + 'static) {
    const NOTIFIERS: u32 = 3;
    let wake = Arc::new(Wake::default());
    let items = Arc::new(Mutex::new(0));
    for _ in 0..NOTIFIERS {
        let (wake, items) = (wake.clone(), items.clone());
        thread::spawn(move || {
            *items.lock() += 1;
            notify(&wake);
        });
    }
    while *items.lock() < NOTIFIERS {
        match shuttle::rand::thread_rng().gen_range(0..3) {
            0 => drop(wake.sleep(SLEEP_TIME)),
            1 => wake.watch(Duration::from_micros(60)),
            _ => drop(wake.sleep(None)),
        }
    }
}

#[test]
fn a_wake_up_is_never_lost() {
    under_schedules(|| receive_all_items(Wake::notify));
}

/// An engine that only collects: as `Engine::step` does it, without a store.
fn collect(intake: &RecordIntake, wake: &Wake, count: usize) {
    let (mut pending, mut sealed) = (Vec::new(), 0);
    while sealed < count {
        pending.extend(intake.take_records());
        if pending
            .first()
            .is_some_and(|front: &Arc<Record>| front.position < intake.sealed_through_wanted())
        {
            sealed += pending.len();
            pending.clear();
        }
        intake.set_has_pending(!pending.is_empty());
        if sealed < count {
            wake.sleep(None);
        }
    }
}

#[test]
fn the_engine_receives_every_record_it_is_to_seal() {
    under_schedules(|| {
        let wake = Arc::new(Wake::default());
        let intake = Arc::new(RecordIntake::new(wake.clone()));
        let push = |intake: &RecordIntake, position| {
            let record = Record::new(position, RecordOperation::Zero, 0, 1, 80);
            intake.push_records(vec![Arc::new(record)], 1 << 20);
        };
        // In most schedules the engine has this one already, and so need not be woken for the next.
        push(&intake, 0);
        let engine = {
            let intake = intake.clone();
            thread::spawn(move || collect(&intake, &wake, 2))
        };
        let pusher = {
            let intake = intake.clone();
            thread::spawn(move || push(&intake, 80))
        };
        intake.seal_through(160);
        pusher.join().expect("the pusher");
        engine.join().expect("the engine");
    });
}

#[test]
fn an_append_wakes_a_writer_that_rests() {
    under_schedules(|| {
        let (bench, mut writer) = Bench::new();
        let appender = {
            let bench = bench.clone();
            thread::spawn(move || [300, 40].map(|bytes| bench.append(1, bytes)))
        };
        // There are no flushes: only an append ends a rest.
        while bench.taken_records.lock().len() < 2 {
            writer.step(&mut |records| bench.take(records), &mut |_| 0).expect("no fault here");
            if bench.taken_records.lock().len() < 2 {
                if bench.journal.begin_rest() {
                    bench.journal.wake.sleep(None);
                    bench.journal.end_rest();
                }
                switch_point();
            }
        }
        appender.join().expect("the appender");
    });
}

/// Appends as `Journal::append` does, but declares the record complete before its payload is there.
fn append_too_early(bench: &Bench, fill: u8, bytes: u64) {
    let journal = &bench.journal;
    let slot_bytes = RECORD_HEADER_BYTES as u64 + bytes;
    let reserved = journal.ring.reserve(slot_bytes, |position, head| {
        journal.header(RecordOperation::Write, position, slot_bytes, 0, bytes).encode_slot(head);
        let record =
            Arc::new(Record::new(position, RecordOperation::Write, 0, bytes, slot_bytes as u32));
        journal.order.lock().push_back(record.clone());
        record
    });
    let (mut slot, record) = reserved.expect("there is room");
    bench.entered.lock().push(record.position);
    record.set_complete();
    switch_point();
    slot[RECORD_HEADER_BYTES..].fill(fill);
    let (checks, _) = checks_of(0, &slot[RECORD_HEADER_BYTES..]);
    record.fill(Some(slot.publish()), checks);
    journal.nudge();
}

/// As `Journal::append`, but the writer's queue is joined after the lock that makes the order is
/// released.
fn append_out_of_order(bench: &Bench, bytes: u64) {
    let journal = &bench.journal;
    let slot_bytes = RECORD_HEADER_BYTES as u64 + bytes;
    let at = Cell::new(0);
    let reserved = journal.ring.reserve(slot_bytes, |position, _| at.set(position));
    let (slot, ()) = reserved.expect("there is room");
    let record =
        Arc::new(Record::new(at.get(), RecordOperation::Write, 0, bytes, slot_bytes as u32));
    journal.order.lock().push_back(record.clone());
    bench.entered.lock().push(record.position);
    let (checks, _) = checks_of(0, &slot[RECORD_HEADER_BYTES..]);
    record.fill(Some(slot.publish()), checks);
    record.set_complete();
    journal.nudge();
}

fn with_two_writers(append: impl Fn(&Bench) + Copy + Send + Sync + 'static) {
    let (bench, writer) = Bench::new();
    let journal = start_journal(&bench, writer);
    let writers = [(); 2].map(|()| {
        let bench = bench.clone();
        thread::spawn(move || append(&bench))
    });
    writers.into_iter().for_each(|writer| writer.join().expect("a writer"));
    bench.flush(bench.journal.ring.next(), || ());
    bench.stop();
    journal.join().expect("the journal");
    bench.check_taken();
}

#[test]
fn a_planted_publication_before_the_record_is_filled_is_caught() {
    assert!(is_caught(|| with_two_writers(|bench| append_too_early(bench, 5, 300))));
}

#[test]
fn a_planted_queue_joined_outside_the_order_is_caught() {
    assert!(is_caught(|| with_two_writers(|bench| append_out_of_order(bench, 300))));
}

#[test]
fn a_planted_notify_that_wakes_only_a_sleeper_is_caught() {
    assert!(is_caught(|| receive_all_items(Wake::notify_if_asleep)));
}
