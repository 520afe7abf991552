//! The machine stops between two instructions. What is left is the journal disk with some of its
//! unsynced blocks, and the store with some of the puts under way; every flushed write must be
//! there, and the volume must be a cut. When only the process died there is the staging memory too,
//! and then every accepted write must be there.

use std::os::unix::fs::FileExt;

use crate::faulty::{Machine, seed, segment_put};
use crate::rig::{Dice, MIB};
use sawmill_device::BlockDeviceExt;
use sawmill_format::journal::RING_START_BYTES;
use sawmill_store::Fault;
use sawmill_volume::{FlushMode, Volume};

const BLOCK: usize = 4096;
const BLOCKS: u64 = 1024;

/// Every block a write ever touched, write by write: block and stamp. The stamp is the number of
/// the write, from 1.
#[derive(Default)]
struct History {
    writes: Vec<(u64, u64)>,
    flushed: usize,
}

impl History {
    /// Writes some blocks with a stamp of their own.
    fn write(&mut self, volume: &Volume, dice: &mut Dice) {
        let blocks = 1 + if dice.below(4) == 0 { dice.below(60) } else { dice.below(4) };
        let first = dice.below(BLOCKS - blocks);
        self.writes.push((first, blocks));
        let stamp = self.writes.len() as u64;
        let bytes: Vec<u8> =
            (first..first + blocks).flat_map(|block| stamped(block, stamp)).collect();
        volume.write_at(first * BLOCK as u64, &bytes).unwrap();
    }

    fn flush(&mut self, volume: &Volume) {
        volume.flush().unwrap();
        self.flushed = self.writes.len();
    }

    /// What each block holds after the first `count` writes.
    fn after(&self, count: usize) -> Vec<u64> {
        let mut stamps = vec![0; BLOCKS as usize];
        for (index, (first, blocks)) in self.writes[..count].iter().enumerate() {
            stamps[*first as usize..(first + blocks) as usize].fill(index as u64 + 1);
        }
        stamps
    }

    /// The volume must hold exactly the first so many writes, with none of the first `least`
    /// missing.
    fn assert_cut(&self, volume: &Volume, least: usize, what: &str) -> usize {
        let bytes = volume.read_at(0, BLOCKS as usize * BLOCK).unwrap();
        let stamps: Vec<u64> = bytes
            .chunks(BLOCK)
            .enumerate()
            .map(|(block, bytes)| stamp_of(block as u64, bytes, what))
            .collect();
        let count = stamps.iter().copied().max().unwrap() as usize;
        assert!(
            count >= least,
            "{what}: {least} writes must be there, and the newest found is {count}"
        );
        if let Some(block) =
            stamps.iter().zip(self.after(count)).position(|(found, want)| *found != want)
        {
            panic!("{what}: after write {count} block {block} holds write {}", stamps[block]);
        }
        count
    }
}

fn stamped(block: u64, stamp: u64) -> Vec<u8> {
    let line = [block.to_le_bytes(), stamp.to_le_bytes()].concat();
    line.repeat(BLOCK / 16)
}

fn stamp_of(block: u64, bytes: &[u8], what: &str) -> u64 {
    if bytes.iter().all(|byte| *byte == 0) {
        return 0;
    }
    let stamp = u64::from_le_bytes(bytes[8..16].try_into().unwrap());
    assert!(
        bytes == stamped(block, stamp),
        "{what}: block {block} holds what was never written to it"
    );
    stamp
}

/// The machine after a power cut: no memory; of the blocks of the journal that changed since
/// `synced`, some. The puts under way are held while the copies are made, so the store is not of a
/// later time than the journal.
fn power_cut(machine: &Machine, synced: &[u8], dice: &mut Dice) -> Machine {
    machine.faults.script(Box::new(|_| Fault::Delay));
    let twin = machine.twin();
    machine.heal();
    machine.faults.release_all();
    twin.lose_memory();
    let now = std::fs::read(twin.journal()).unwrap();
    let ring = RING_START_BYTES as usize;
    // A superblock is written with a sync of its own: if one came since, what was written before it
    // is durable.
    if synced[..ring] == now[..ring] {
        let file = std::fs::OpenOptions::new().write(true).open(twin.journal()).unwrap();
        let keep = dice.below(5);
        for at in (ring..now.len()).step_by(BLOCK) {
            let old = &synced[at..at + BLOCK];
            if old != &now[at..at + BLOCK] && dice.below(4) >= keep {
                file.write_all_at(old, at as u64).unwrap();
            }
        }
    }
    twin
}

#[test]
fn flushed_writes_survive_power_cuts_and_the_volume_is_a_cut() {
    let seed = seed();
    let mut lost = 0;
    for round in 0..6 {
        let mut dice = Dice::new((seed + round) * 2 + 1);
        let mut machine = Machine::with(BLOCKS * BLOCK as u64, FlushMode::Logged);
        machine.options.checkpoint_bytes = 2 * MIB;
        let slow = dice.below(3);
        machine.fault(Fault::Delay, move |call| {
            slow == 0 && segment_put(call).is_some_and(|s| s % 8 == 7)
        });
        let volume = machine.open();
        let mut history = History::default();
        for cut in 0..8 {
            for _ in 0..dice.below(200) {
                history.write(&volume, &mut dice);
                if dice.below(20) == 0 {
                    history.flush(&volume);
                }
            }
            history.flush(&volume);
            let synced = std::fs::read(machine.journal()).unwrap();
            for _ in 0..dice.below(60) {
                history.write(&volume, &mut dice);
            }
            let twin = power_cut(&machine, &synced, &mut dice);
            let what = format!("seed {seed}, round {round}, cut {cut}");
            let after = twin.open();
            let count = history.assert_cut(&after, history.flushed, &what);
            lost += history.writes.len() - count;
            // And it goes on from there: a second life, a second cut.
            let mut second = History { writes: history.writes[..count].to_vec(), flushed: count };
            for _ in 0..dice.below(40) {
                second.write(&after, &mut dice);
            }
            second.flush(&after);
            let synced = std::fs::read(twin.journal()).unwrap();
            second.write(&after, &mut dice);
            let twin = power_cut(&twin, &synced, &mut dice);
            let volume = twin.open();
            second.assert_cut(&volume, second.flushed, &format!("{what}, second cut"));
            volume.close().unwrap();
            twin.assert_sound(&what);
        }
    }
    assert!(lost > 0, "the cuts never cost an unflushed write: they cut nothing");
}

#[test]
fn every_accepted_write_survives_the_death_of_the_process() {
    let seed = seed();
    for round in 0..6 {
        let mut dice = Dice::new((seed + round) * 2 + 1);
        let mut machine = Machine::with(BLOCKS * BLOCK as u64, FlushMode::Logged);
        machine.options.checkpoint_bytes = 2 * MIB;
        let volume = machine.open();
        let mut history = History::default();
        for kill in 0..10 {
            for _ in 0..dice.below(150) {
                history.write(&volume, &mut dice);
                if dice.below(50) == 0 {
                    history.flush(&volume);
                }
            }
            machine.faults.script(Box::new(|_| Fault::Delay));
            let twin = machine.twin();
            machine.heal();
            machine.faults.release_all();
            let what = format!("seed {seed}, round {round}, kill {kill}");
            let after = twin.open();
            assert_eq!(
                history.assert_cut(&after, history.writes.len(), &what),
                history.writes.len()
            );
        }
    }
}

#[test]
fn without_the_journal_the_volume_is_a_cut_at_or_after_the_last_stored_flush() {
    let seed = seed();
    for round in 0..4 {
        let mut dice = Dice::new((seed + round) * 2 + 1);
        let mut machine = Machine::with(BLOCKS * BLOCK as u64, FlushMode::Stored);
        machine.options.checkpoint_bytes = 2 * MIB;
        let volume = machine.open();
        let mut history = History::default();
        for loss in 0..10 {
            for _ in 0..dice.below(60) {
                history.write(&volume, &mut dice);
                if dice.below(15) == 0 {
                    history.flush(&volume);
                }
            }
            // Nothing is put or deleted while the store is copied: it is a store of one moment.
            machine.faults.script(Box::new(|_| Fault::Delay));
            let successor = Machine::over(crate::faulty::copy_store(&*machine.plain)).successor();
            machine.heal();
            machine.faults.release_all();
            let what = format!("seed {seed}, round {round}, loss {loss}");
            history.assert_cut(&successor.open(), history.flushed, &what);
        }
    }
}
