//! What people do with the past of a volume: snapshots, rollbacks, clones and clones of clones, deleted in
//! any order; and what each must hold, byte for byte.
//!
//! Invariants: a snapshot that was told done, and a clone, hold for ever what they held first (a clone, what
//! was written to it since), whatever becomes of the volume, its journal and its writers. Whoever clones,
//! reads a cut or deletes has a store that is well; the volume's writers have not.
//!
//! Not here: what a rollback does to the volume's own history (an operation of the oracle).

use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError};

use sawmill_device::{ErrorKind, Operation};
use sawmill_volume::limits::{STAGING_BYTES_MIN, journal_bytes_min};
use sawmill_volume::{Cut, OpenOptions, Result, Stepped, clone_in, delete_in};

use super::{NAME, Process, ROUNDS_MAX, Run, Verdict, journal_path};
use crate::client::Client;
use crate::death::Life;
use crate::disk::DiskFaults;
use crate::oracle::{Effect, payload};
use crate::store::{SimStore, StoreFaults};
use crate::world::{Shelf, SimWorld};

/// Clones and snapshots that are there at once.
const KEPT_MAX: usize = 6;

/// A snapshot or a clone, and what is in it.
struct Kept {
    name: String,
    image: Arc<[u8]>,
}

/// See the head of this file.
#[derive(Default)]
pub(super) struct Past {
    snapshots: Vec<Kept>,
    clones: Vec<Kept>,
    number: u64,
}

enum What {
    /// A snapshot of this name, with at least so many operations in it.
    Create(String, usize),
    Delete,
    /// The operation of the oracle.
    RollBack(usize),
}

/// An order under way.
pub(super) struct Ordered {
    what: What,
    answer: Receiver<Result<()>>,
    /// It was given to a writer that others had replaced.
    stray: bool,
}

impl Ordered {
    pub(super) fn is_rollback(&self) -> bool {
        matches!(self.what, What::RollBack(_))
    }
}

impl Run {
    /// Somebody does something.
    pub(super) fn act_on_the_past(&mut self, process: &mut Process) -> Verdict {
        let free = process.ordered.is_none() && !process.closing;
        match self.dice.below(9) {
            0..3 if free => self.order_snapshot(process),
            3 if free && process.replaced_at.is_none() => self.order_delete(process),
            4 if free && process.replaced_at.is_none() => return self.order_rollback(process),
            5 => return self.make_clone(),
            6 => return self.write_to_clone(),
            7 => return self.delete_clone(),
            _ => return self.read_one(),
        }
        Ok(())
    }

    fn name(&mut self, kind: &str) -> String {
        self.past.number += 1;
        format!("{kind}{}", self.past.number)
    }

    fn order_snapshot(&mut self, process: &mut Process) {
        if self.past.snapshots.len() >= KEPT_MAX {
            return;
        }
        let name = self.name("snapshot-");
        self.say("snapshot", || format!("  {name} is ordered"));
        if let Ok(answer) = process.stepped.volume().begin_snapshot(&name) {
            let what = What::Create(name, self.oracle.flush_covers());
            process.ordered = Some(Ordered { what, answer, stray: process.replaced_at.is_some() });
        }
    }

    fn order_delete(&mut self, process: &mut Process) {
        if self.past.snapshots.is_empty() {
            return;
        }
        let index = self.dice.below(self.past.snapshots.len() as u64) as usize;
        let gone = self.past.snapshots.swap_remove(index);
        self.say("delete snapshot", || format!("  the end of {} is ordered", gone.name));
        if let Ok(answer) = process.stepped.volume().begin_delete_snapshot(&gone.name) {
            process.ordered = Some(Ordered { what: What::Delete, answer, stray: false });
        }
    }

    /// The client has nothing under way, so that its order of operations is clear.
    fn order_rollback(&mut self, process: &mut Process) -> Verdict {
        if self.past.snapshots.is_empty() || process.client.waiting() > 0 {
            return Ok(());
        }
        let index = self.dice.below(self.past.snapshots.len() as u64) as usize;
        let Kept { name, image } = &self.past.snapshots[index];
        let (cut, image) = (Cut::Snapshot(name.clone()), image.clone());
        self.say("roll back", || format!("  a rollback to {cut} is ordered"));
        process.store.set_at_once(true);
        let begun = process.stepped.volume().begin_roll_back(&cut);
        process.store.set_at_once(false);
        match begun {
            Ok(answer) => {
                let operation = self.oracle.submit(0, self.settings.size_bytes, Effect::Image(image));
                let what = What::RollBack(operation);
                process.ordered = Some(Ordered { what, answer, stray: false });
                Ok(())
            }
            // Others have replaced it, and it does not know; or its store is ill.
            Err(error)
                if error.kind() != ErrorKind::NotFound || self.settings.store != StoreFaults::default() =>
            {
                self.say("not rolled back", || format!("  {error}"));
                Ok(())
            }
            Err(error) => Err(format!("a rollback to {cut} was refused: {error}")),
        }
    }

    /// What was answered to orders.
    pub(super) fn hear_of_the_past(&mut self, beside: bool) -> Verdict {
        let slot = if beside { &mut self.zombie } else { &mut self.process };
        let Some(mut process) = slot.take() else { return Ok(()) };
        let heard = self.hear_order(&mut process);
        *(if beside { &mut self.zombie } else { &mut self.process }) = Some(process);
        heard
    }

    fn hear_order(&mut self, process: &mut Process) -> Verdict {
        let Some(ordered) = process.ordered.take() else { return Ok(()) };
        match ordered.answer.try_recv() {
            Err(TryRecvError::Empty) => {
                process.ordered = Some(ordered);
                Ok(())
            }
            Ok(Ok(())) if ordered.stray => Err("a replaced writer's order was told done".into()),
            Ok(Ok(())) => self.ordered_is_done(process, ordered.what),
            Ok(Err(error)) => {
                self.say("order refused", || format!("  the order was refused: {error}"));
                let excused =
                    process.replaced_at.is_some() || process.life.is_dead() || self.has_disk_faults();
                let ended = matches!(error.kind(), ErrorKind::Closed | ErrorKind::Fenced);
                if excused || ended || matches!(ordered.what, What::Delete) {
                    return Ok(());
                }
                Err(format!("an order was refused: {error}"))
            }
            Err(TryRecvError::Disconnected) => Ok(()),
        }
    }

    fn ordered_is_done(&mut self, process: &Process, what: What) -> Verdict {
        match what {
            What::RollBack(operation) if process.replaced_at.is_none() => {
                self.story.rollbacks += 1;
                self.oracle.complete(operation, false);
                self.oracle.is_stored(operation + 1);
            }
            What::Create(name, least) => {
                self.story.snapshots += 1;
                let cut = Cut::Snapshot(name.clone());
                let found = self.read_volume(NAME, Some(cut))?;
                if process.replaced_at.is_none() {
                    let count = self.oracle.check_view(least, &found)?;
                    self.say("snapshot done", || format!("  {name} holds {count} operations"));
                }
                self.past.snapshots.push(Kept { name, image: found.into() });
            }
            _ => {}
        }
        Ok(())
    }

    /// A process of somebody whose store is well and who has no journal yet.
    fn somebody(&mut self) -> (Arc<SimWorld>, Arc<SimStore>) {
        let life = Arc::new(Life::default());
        let (disk, store) = (DiskFaults::default(), StoreFaults::default());
        let dice = self.dice.split(10);
        let world =
            SimWorld::new(self.clock.clone(), Shelf::default(), life.clone(), self.trace.clone(), disk, dice);
        let dice = self.dice.split(11);
        let store = SimStore::new(self.bucket.clone(), life, self.trace.clone(), store, dice);
        (Arc::new(world), Arc::new(store))
    }

    fn read_volume(&mut self, name: &str, cut: Option<Cut>) -> std::result::Result<Vec<u8>, String> {
        let (world, store) = self.somebody();
        let shown = format!("{name} at {cut:?}");
        let options = OpenOptions { read_only: true, cut, ..OpenOptions::new(journal_path()) };
        let opened = Stepped::open(world, store, name, &options);
        let stepped = opened.map_err(|error| format!("{shown} cannot be opened: {error}"))?;
        let mut client = Client::default();
        client.read_blindly(stepped.volume(), (0, self.settings.size_bytes));
        let answer = client.blind_answer().ok_or_else(|| format!("{shown} gives no answer"))?;
        answer.map_err(|error| format!("{shown} cannot be read: {error}"))
    }

    fn judge(&mut self, name: &str, cut: Option<Cut>, image: &[u8]) -> Verdict {
        let shown = format!("{name} at {cut:?}");
        let found = self.read_volume(name, cut)?;
        match found.iter().zip(image).position(|(one, other)| one != other) {
            None => Ok(()),
            Some(at) => Err(format!("byte {at} of {shown} is {:#04x} and was {:#04x}", found[at], image[at])),
        }
    }

    /// One of all, chosen by chance: a snapshot or a clone, with its name and cut.
    fn any_kept(&mut self, clones_alone: bool) -> Option<(String, Option<Cut>, Arc<[u8]>)> {
        let snapshots = if clones_alone { 0 } else { self.past.snapshots.len() };
        let count = snapshots + self.past.clones.len();
        if count == 0 {
            return None;
        }
        let index = self.dice.below(count as u64) as usize;
        Some(match self.past.snapshots.get(index).filter(|_| index < snapshots) {
            Some(kept) => (NAME.into(), Some(Cut::Snapshot(kept.name.clone())), kept.image.clone()),
            None => {
                let kept = &self.past.clones[index - snapshots];
                (kept.name.clone(), None, kept.image.clone())
            }
        })
    }

    fn read_one(&mut self) -> Verdict {
        let Some((name, cut, image)) = self.any_kept(false) else { return Ok(()) };
        self.say("read kept", || format!("  somebody reads {name} at {cut:?}"));
        self.judge(&name, cut, &image)
    }

    fn make_clone(&mut self) -> Verdict {
        if self.past.clones.len() >= KEPT_MAX {
            return Ok(());
        }
        let Some((base, cut, image)) = self.any_kept(false) else { return Ok(()) };
        let name = self.name("clone-");
        self.say("clone", || format!("  {name} is cloned from {base} at {cut:?}"));
        let (world, store) = self.somebody();
        clone_in(&*world, &*store, &base, cut.as_ref(), &name)
            .map_err(|error| format!("{base} at {cut:?} cannot be cloned: {error}"))?;
        self.story.clones += 1;
        self.past.clones.push(Kept { name, image });
        Ok(())
    }

    fn delete_clone(&mut self) -> Verdict {
        if self.past.clones.is_empty() {
            return Ok(());
        }
        let index = self.dice.below(self.past.clones.len() as u64) as usize;
        let gone = self.past.clones.swap_remove(index);
        self.say("delete clone", || format!("  {} is deleted", gone.name));
        let (world, store) = self.somebody();
        delete_in(&*world, &*store, &gone.name)
            .map(drop)
            .map_err(|error| format!("{} cannot be deleted: {error}", gone.name))
    }

    /// Somebody attaches a clone, writes a little, and closes it.
    fn write_to_clone(&mut self) -> Verdict {
        if self.past.clones.is_empty() {
            return Ok(());
        }
        let index = self.dice.below(self.past.clones.len() as u64) as usize;
        let name = self.past.clones[index].name.clone();
        let mut image = self.past.clones[index].image.to_vec();
        self.say("write to clone", || format!("  somebody writes to {name}"));
        let (world, store) = self.somebody();
        let options = OpenOptions {
            journal_bytes: journal_bytes_min(self.settings.segment_bytes),
            staging_bytes: STAGING_BYTES_MIN,
            staging_folder: self.machines[0].staging.clone(),
            no_fencing: true,
            checkpoint_bytes: self.settings.checkpoint_bytes.min(32 << 10),
            uploads_max: 1,
            ..OpenOptions::new(journal_path())
        };
        let opened = Stepped::open(world, store, &name, &options);
        let mut stepped = opened.map_err(|error| format!("{name} cannot be attached: {error}"))?;
        let mut client = Client::default();
        for _ in 0..1 + self.dice.below(12) {
            let length = (1 + self.dice.below(12_000)).min(self.settings.size_bytes);
            let address = self.dice.below(self.settings.size_bytes - length + 1);
            self.stamp += 1;
            client.stray(stepped.volume(), Operation::Write, (address, length), self.stamp);
            image[address as usize..][..length as usize]
                .copy_from_slice(&payload(self.stamp, address, length));
            self.run_aside(&mut stepped);
        }
        stepped.begin_close();
        for _ in 0..ROUNDS_MAX {
            if stepped.is_settled() {
                break;
            }
            self.run_aside(&mut stepped);
        }
        stepped.finish_close().map_err(|error| format!("{name} cannot be closed: {error}"))?;
        let image: Arc<[u8]> = image.into();
        self.past.clones[index].image = image.clone();
        self.judge(&name, None, &image)
    }

    fn run_aside(&mut self, stepped: &mut Stepped) {
        while stepped.step_journal() {}
        stepped.step_journal_quietly();
        stepped.step_keeper(self.clock.now());
    }

    /// The last word: everything that was kept is what it was.
    pub(super) fn judge_the_past(&mut self) -> Verdict {
        let snapshots = std::mem::take(&mut self.past.snapshots);
        for Kept { name, image } in snapshots {
            self.judge(NAME, Some(Cut::Snapshot(name)), &image)?;
        }
        while let Some((name, cut, image)) = self.any_kept(true) {
            self.judge(&name, cut, &image)?;
            self.delete_clone()?;
        }
        Ok(())
    }
}
