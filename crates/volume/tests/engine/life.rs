//! The life of a volume: written, read, closed, killed, opened again; always the same bytes.

use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};

use crate::rig::{MIB, Model, Rig, pattern};
use sawmill_device::{
    BlockDevice, BlockDeviceExt, Exchange, Flags, Operation, Outcome, Request, conformance,
};
use sawmill_volume::{ErrorKind, FlushMode, RecoveryStep, Safety, check, open_cache};

#[test]
fn a_volume_keeps_the_contract_of_a_block_device() {
    let rigs: std::sync::Mutex<Vec<Rig>> = std::sync::Mutex::default();
    conformance::all(&|| {
        let rig = Rig::new();
        let volume: Arc<dyn BlockDevice> = rig.open();
        rigs.lock().unwrap().push(rig);
        volume
    });
}

#[test]
fn bytes_survive_a_clean_close() {
    let rig = Rig::new();
    let volume = rig.open();
    volume.write_at(5000, &pattern(5000, 1, 300_000)).unwrap();
    volume.close().unwrap();
    let volume = rig.open();
    assert_eq!(volume.read_at(5000, 300_000).unwrap(), pattern(5000, 1, 300_000));
    assert_eq!(volume.read_at(0, 5000).unwrap(), vec![0; 5000]);
    let record = sawmill_volume::find(&*rig.store, "disk").unwrap();
    let report = check::check(&*rig.store, &record, &mut |_, _| ()).unwrap();
    assert_eq!(report.damage, vec![]);
}

#[test]
fn a_volume_that_an_answer_drops_keeps_what_it_took_and_lets_its_journal_go() {
    let rig = Rig::new();
    let volume = rig.open();
    volume.write_at(4096, &pattern(4096, 1, 70_000)).unwrap();
    let ((sender, receiver), (caller, go_ahead)) = (channel(), channel::<()>());
    // Holds the volume until the caller has let go of it, and then drops it.
    let held = volume.clone();
    volume.submit(Request::bare(Operation::Flush, 0, 0, Flags::default(), move |outcome| {
        // Ends with an error, when the caller drops the other end.
        let _ = go_ahead.recv();
        drop(held);
        sender.send(outcome).unwrap();
    }));
    drop(volume);
    drop(caller);
    receiver.recv().expect("an answer, so nothing panicked").unwrap();
    // The threads that the answer did not wait for keep the journal until they have ended.
    let volume = loop {
        match rig.try_open() {
            Ok(volume) => break volume,
            // The journal first, then the memory.
            Err(error) if error.kind() == ErrorKind::InUse => {}
            Err(error) => assert_eq!(error.kind(), ErrorKind::Refused, "{error}"),
        }
        std::thread::yield_now();
    };
    assert_eq!(volume.read_at(4096, 70_000).unwrap(), pattern(4096, 1, 70_000));
}

#[test]
fn random_operations_read_back_through_every_kind_of_end() {
    for seed in 1..=6 {
        let mut rig = Rig::with(8 * MIB, FlushMode::Logged);
        rig.options.cache = Some(open_cache(&rig.folder.path().join("cache"), 4 * MIB).unwrap());
        rig.options.checkpoint_bytes = MIB * seed;
        let mut model = Model::new(8 * MIB, seed);
        for life in 0..6 {
            let volume = rig.open();
            model.compare_all(&volume);
            for _ in 0..150 {
                model.act(&volume);
            }
            match (life + seed) % 3 {
                0 => volume.close().unwrap(),
                1 => volume.close_now(),
                _ => {
                    assert!(volume.wait(Safety::Stored, None).unwrap());
                    drop(volume);
                }
            }
        }
        let volume = rig.open();
        model.compare_all(&volume);
        volume.close().unwrap();
        let record = sawmill_volume::find(&*rig.store, "disk").unwrap();
        let report = check::check(&*rig.store, &record, &mut |_, _| ()).unwrap();
        assert_eq!(report.damage, vec![], "seed {seed}");
    }
}

#[test]
fn flushed_writes_survive_the_loss_of_memory() {
    let rig = Rig::new();
    let volume = rig.open();
    volume.write_at(4096, &pattern(0, 1, 10_000)).unwrap();
    volume.flush().unwrap();
    volume.close_now();
    drop(volume);
    rig.lose_memory();
    let volume = rig.open();
    assert_eq!(volume.read_at(4096, 10_000).unwrap(), pattern(0, 1, 10_000));
}

#[test]
fn stored_flushes_survive_the_loss_of_the_machine() {
    let rig = Rig::with(64 * MIB, FlushMode::Stored);
    let volume = rig.open();
    volume.write_at(0, &pattern(0, 3, 50_000)).unwrap();
    volume.flush().unwrap();
    volume.write_at(0, &pattern(0, 4, 100)).unwrap();
    volume.close_now();
    let mut other = Rig::over(rig.store.clone());
    let (kind, text) = other.refused();
    assert_eq!(kind, sawmill_volume::ErrorKind::Refused);
    assert!(text.contains("--accept-journal-loss"), "{text}");
    other.options.accept_journal_loss = true;
    let volume = other.open();
    assert_eq!(volume.read_at(0, 50_000).unwrap(), pattern(0, 3, 50_000));
}

#[test]
fn more_is_written_than_the_journal_holds() {
    let rig = Rig::new();
    let volume = rig.open();
    let mut model = Model::new(64 * MIB, 9);
    for round in 0..3u64 {
        for block in 0..48 {
            let bytes = pattern(block, round, MIB as usize);
            volume.write_at(block * MIB, &bytes).unwrap();
            model.bytes[(block * MIB) as usize..((block + 1) * MIB) as usize]
                .copy_from_slice(&bytes);
        }
    }
    model.compare_all(&volume);
    let status = volume.status();
    assert!(status.positions.accepted > 140 * MIB);
    volume.close().unwrap();
    let volume = rig.open();
    model.compare_all(&volume);
}

#[test]
fn dead_segments_are_deleted_only_behind_the_second_checkpoint() {
    let mut rig = Rig::new();
    rig.options.checkpoint_bytes = 4 * MIB;
    let volume = rig.open();
    for round in 0..40u64 {
        volume.write_at(0, &pattern(0, round, MIB as usize)).unwrap();
        assert!(volume.wait(Safety::Stored, None).unwrap());
    }
    volume.close().unwrap();
    let status = volume.status();
    assert!(status.counters.checkpoints >= 5);
    assert!(status.counters.segments_deleted > 25, "{}", status.counters.segments_deleted);
    let volume = rig.open();
    assert_eq!(volume.read_at(0, MIB as usize).unwrap(), pattern(0, 39, MIB as usize));
}

#[test]
fn a_discard_of_the_whole_disk_is_a_handful_of_records() {
    let rig = Rig::with(2 << 40, FlushMode::Logged);
    let volume = rig.open();
    volume.write_at(1 << 40, &[7; 100]).unwrap();
    let before = volume.status().positions.accepted;
    volume.discard(0, 2 << 40).unwrap();
    assert!(volume.status().positions.accepted - before <= 200);
    assert_eq!(volume.read_at(1 << 40, 100).unwrap(), vec![0; 100]);
    volume.close().unwrap();
    let volume = rig.open();
    assert_eq!(volume.read_at(1 << 40, 100).unwrap(), vec![0; 100]);
    assert_eq!(volume.status().live_bytes, 0);
}

/// The engine once found nothing pending while the journal's thread still held the last records,
/// and declared the volume cleanly closed: the next attach passed over the journal.
#[test]
fn a_close_right_behind_the_last_write_stores_it() {
    let mut rig = Rig::new();
    rig.options.segment_age_max = std::time::Duration::from_secs(5);
    for round in 0..40u64 {
        let volume = rig.open();
        for block in 0..8 {
            volume.write_at(block * 4096, &pattern(block, round, 4096)).unwrap();
        }
        volume.close().unwrap();
        let volume = rig.open();
        for block in 0..8 {
            assert_eq!(volume.read_at(block * 4096, 4096).unwrap(), pattern(block, round, 4096));
        }
        volume.close().unwrap();
    }
}

#[test]
fn nothing_is_left_to_store_right_after_an_attach() {
    let rig = Rig::new();
    let volume = rig.open();
    volume.write_at(0, &[1; 100]).unwrap();
    volume.close().unwrap();
    let volume = rig.open();
    assert!(volume.wait(Safety::Stored, Some(std::time::Duration::from_secs(60))).unwrap());
    volume.write_at(0, &[2; 100]).unwrap();
    volume.close_now();
    let volume = rig.open();
    assert!(volume.wait(Safety::Stored, Some(std::time::Duration::from_secs(60))).unwrap());
    let positions = volume.status().positions;
    assert_eq!(positions.accepted, positions.stored);
}

/// What a hand-off prepares while users go on is what they do not wait for: memory, and a log to
/// read.
#[test]
fn an_open_that_was_prepared_takes_the_memory_and_finds_no_log_to_read() {
    use std::os::unix::fs::MetadataExt;
    let files = |rig: &Rig, kind: &str| -> Vec<u64> {
        let entries = std::fs::read_dir(rig.folder.path()).unwrap().map(Result::unwrap);
        let wanted =
            entries.filter(|entry| entry.path().extension().is_some_and(|found| found == kind));
        wanted.map(|entry| entry.metadata().unwrap().ino()).collect()
    };
    let rig = Rig::new();
    let volume = rig.open();
    let time_max = std::time::Duration::from_secs(60);
    for block in 0..200 {
        volume.write_at(block * 8192, &pattern(block, 1, 8192)).unwrap();
    }
    assert!(volume.wait(Safety::Stored, Some(time_max)).unwrap());
    assert!(volume.checkpoint(time_max));
    volume.preallocate(&rig.options).unwrap();
    let preallocated = files(&rig, "spare");
    volume.write_at(0, &pattern(0, 2, 8192)).unwrap();
    volume.close_now();

    let volume = rig.open();
    let recovery_step =
        |step| volume.recovery().steps.iter().find(|report| report.step == step).unwrap();
    assert!(
        recovery_step(RecoveryStep::RollForward).detail.starts_with("0 segments"),
        "{}",
        recovery_step(RecoveryStep::RollForward).detail
    );
    assert_eq!(
        (preallocated.len(), files(&rig, "staging")),
        (1, preallocated),
        "the preallocated memory is used"
    );
    assert!(files(&rig, "spare").is_empty());
    assert_eq!(volume.read_at(0, 8192).unwrap(), pattern(0, 2, 8192));
    assert_eq!(volume.read_at(8192, 8192).unwrap(), pattern(1, 1, 8192));

    volume.preallocate(&rig.options).unwrap();
    volume.close().unwrap();
    assert!(files(&rig, "spare").is_empty(), "a clean end leaves nothing in memory");
    assert!(!volume.checkpoint(time_max), "a volume that has ended writes none");
}

/// The far side of a request: how often each byte was taken from it, or put into it.
struct CountingExchange {
    fill_counts: Vec<u32>,
    place: Vec<u8>,
    sender: Sender<(Vec<u32>, Vec<u8>)>,
}

impl Exchange for CountingExchange {
    fn fill(&mut self, offset: u64, into: &mut [u8]) {
        into.fill(7);
        self.fill_counts[offset as usize..][..into.len()].iter_mut().for_each(|times| *times += 1);
    }

    fn buffer(&mut self) -> &mut [u8] {
        &mut self.place
    }

    fn complete(self: Box<Self>, outcome: Outcome) {
        outcome.expect("no fault here");
        self.sender.send((self.fill_counts, self.place)).expect("the test waits");
    }
}

#[test]
fn a_read_counts_where_its_bytes_lie_and_nowhere_if_there_are_none() {
    let rig = Rig::new();
    let volume = rig.open();
    let journal = || volume.status().counters.reads_journal;
    volume.read_at(0, 4096).unwrap();
    assert_eq!(journal(), 0, "it was never written");
    volume.write_at(0, &[7; 4096]).unwrap();
    volume.read_at(0, 4096).unwrap();
    assert_eq!(journal(), 1);
    volume.close().unwrap();
}

#[test]
fn a_read_from_the_journals_disk_is_counted_as_one_from_the_journal() {
    let rig = Rig::new();
    let volume = rig.open();
    volume.write_at(0, &[7; 4096]).unwrap();
    // Twice the staging memory: the first write is on the disk alone.
    for n in 1..=rig.options.staging_bytes * 2 / MIB {
        volume.write_at(n * MIB, &vec![8; MIB as usize]).unwrap();
    }
    volume.flush().unwrap();
    assert_eq!(volume.read_at(0, 4096).unwrap(), [7; 4096]);
    let counters = volume.status().counters;
    let counted = [counters.reads_journal, counters.reads_cache, counters.reads_store];
    assert_eq!(counted, [1, 0, 0], "journal, cache, store");
    volume.close().unwrap();
}

#[test]
fn each_byte_of_a_write_is_taken_from_its_door_once() {
    let rig = Rig::new();
    let volume = rig.open();
    let length = volume.geometry().request_bytes_max as usize;
    for (address, bytes) in [(0, 4096), (1, 100), (8191, 3 * 4096 + 2), (1 << 20, length)] {
        let (sender, receiver) = channel();
        let exchange = CountingExchange { fill_counts: vec![0; bytes], place: Vec::new(), sender };
        let (flags, length) = (Flags::default(), bytes as u64);
        volume.submit(Request::new(Operation::Write, address, length, flags, Box::new(exchange)));
        let (fill_counts, _) = receiver.recv().expect("an answer");
        assert!(fill_counts.iter().all(|times| *times == 1), "{bytes} bytes at {address}");
        // A read is put where the door says, and nowhere else first: the bytes are there when it is
        // answered.
        let (sender, receiver) = channel();
        let exchange = CountingExchange { fill_counts: Vec::new(), place: vec![0; bytes], sender };
        volume.submit(Request::new(Operation::Read, address, length, flags, Box::new(exchange)));
        assert_eq!(receiver.recv().expect("an answer").1, vec![7; bytes]);
    }
}
