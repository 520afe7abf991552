//! Orders about the past of a volume: snapshots, retention and rollbacks; and what each cut must
//! hold, byte for byte. Also larger disks, which are ordered in the same way.
//!
//! Invariants: a snapshot that was reported done always holds its first content; every moment since
//! retention was reported done can be read, and is a prefix with everything stored by then and
//! nothing submitted later. Both hold whatever happens to the volume, its journal and its writers.
//! Readers of a cut use a fault-free store; the volume's writers do not.
//!
//! Not here: clones (`clones`); what a rollback does to the volume's own history (an operation of
//! the oracle).

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, TryRecvError};

use sawmill_device::{BlockDevice, ErrorKind};
use sawmill_volume::{Cut, OpenOptions, Result, SteppedVolume, World};

use super::{MACHINES, NAME, Process, SeedRun, Verdict, journal_path};
use crate::client::Client;
use crate::death::Life;
use crate::disk::DiskFaults;
use crate::oracle::{Effect, Loss};
use crate::store::{SimStore, StoreFaults};
use crate::world::{MachineMedia, SimWorld};

/// Clones and snapshots that exist at the same time.
pub(super) const STATES_KEPT_MAX: usize = 6;
/// Retention windows: one longer than any world lasts, and one short enough for moments to expire.
const LONG_S: u64 = 1 << 20;
const SHORT_S: u64 = 20;

/// A snapshot or a clone, and its content.
pub(super) struct SavedImage {
    pub(super) name: String,
    pub(super) image: Arc<[u8]>,
}

/// A cut and its content.
pub(super) type CutImage = (Cut, Arc<[u8]>);

/// A moment that a rollback can reach, and how many operations it may hold.
struct Moment {
    unix_ms: u64,
    least: usize,
    most: usize,
}

/// What each snapshot, clone and moment of the volume must hold.
#[derive(Default)]
pub(super) struct Past {
    snapshots: Vec<SavedImage>,
    pub(super) clones: Vec<SavedImage>,
    number: u64,
    /// The retention that was reported done and not changed by a later order.
    retention_s: u64,
    moments: Vec<Moment>,
    /// A wall clock was wrong: a time noted from now on may mean more than one moment.
    clocks_lied: bool,
}

impl Past {
    /// The volume's history was cut to `count` operations.
    pub(super) fn cut_to(&mut self, count: usize) {
        for moment in &mut self.moments {
            moment.most = moment.most.min(count);
        }
    }
}

enum OrderKind {
    /// A snapshot with this name, with at least this number of operations.
    Create(String, usize),
    Delete,
    Retain(u64),
    /// A larger disk, with this number of bytes.
    Grow(u64),
    /// The rollback's operation in the oracle, and the moment it goes to, if it is one.
    RollBack(usize, Option<u64>),
}

/// An order in flight.
pub(super) struct PendingOrder {
    kind: OrderKind,
    answer: Receiver<Result<()>>,
    /// It was given to a writer that had been replaced.
    stray: bool,
}

impl PendingOrder {
    pub(super) fn is_rollback(&self) -> bool {
        matches!(self.kind, OrderKind::RollBack(..))
    }
}

impl SeedRun {
    /// Orders a snapshot, a deletion, a rollback, a retention or a growth, reads a past state, or
    /// works on clones.
    pub(super) fn act_on_the_past(&mut self, process: &mut Process) -> Verdict {
        let free = process.order.is_none() && !process.closing;
        let is_first = free && process.replaced_at.is_none();
        // In fourteenths; what cannot be ordered now leaves its share to the clones.
        match self.dice.below(14) {
            0..3 if free => self.order_snapshot(process),
            3 if is_first => self.order_delete(process),
            4 if is_first => return self.order_rollback(process),
            5 if is_first => self.order_retention(process),
            6 if free => self.order_growth(process),
            7..9 => self.note_moment(),
            9 => return self.read_moment().map(drop),
            10 => return self.read_one(),
            _ => return self.act_on_clones(),
        }
        Ok(())
    }

    pub(super) fn name(&mut self, kind: &str) -> String {
        self.past.number += 1;
        format!("{kind}{}", self.past.number)
    }

    fn order_snapshot(&mut self, process: &mut Process) {
        if self.past.snapshots.len() >= STATES_KEPT_MAX {
            return;
        }
        let name = self.name("snapshot-");
        self.log("snapshot", || format!("  {name} is ordered"));
        if let Ok(answer) = process.stepped.volume().begin_snapshot(&name) {
            let what = OrderKind::Create(name, self.oracle.flush_covers());
            process.order =
                Some(PendingOrder { kind: what, answer, stray: process.replaced_at.is_some() });
        }
    }

    fn order_delete(&mut self, process: &mut Process) {
        if self.past.snapshots.is_empty() {
            return;
        }
        let index = self.dice.below(self.past.snapshots.len() as u64) as usize;
        let snapshot = self.past.snapshots.swap_remove(index);
        self.log("delete snapshot", || format!("  the end of {} is ordered", snapshot.name));
        if let Ok(answer) = process.stepped.volume().begin_delete_snapshot(&snapshot.name) {
            process.order = Some(PendingOrder { kind: OrderKind::Delete, answer, stray: false });
        }
    }

    fn order_retention(&mut self, process: &mut Process) {
        let retention_s = *self.dice.pick(&[LONG_S, LONG_S, SHORT_S, SHORT_S, 1, 0]);
        self.log("retention", || format!("  retention of {retention_s} s is ordered"));
        // From the order on, the new retention may apply for good.
        self.past.retention_s = 0;
        self.past.moments.clear();
        if let Ok(answer) = process.stepped.volume().begin_set_retention(retention_s) {
            process.order =
                Some(PendingOrder { kind: OrderKind::Retain(retention_s), answer, stray: false });
        }
    }

    fn order_growth(&mut self, process: &mut Process) {
        let size_bytes =
            (self.size_bytes + 512 * (1 + self.dice.below(32))).min(self.settings.size_bytes);
        if size_bytes < process.stepped.volume().geometry().size_bytes
            || self.requested_bytes > size_bytes
        {
            return;
        }
        self.log("grow", || format!("  a disk of {size_bytes} bytes is ordered"));
        if let Ok(answer) = process.stepped.volume().begin_grow(size_bytes) {
            self.requested_bytes = size_bytes;
            let stray = process.replaced_at.is_some();
            process.order = Some(PendingOrder { kind: OrderKind::Grow(size_bytes), answer, stray });
        }
    }

    /// A machine's wall clock jumps, which must not age any moment.
    pub(super) fn jump(&mut self) {
        const HOUR_MS: u64 = 3600 * 1000;
        self.past.clocks_lied = true;
        let number = self.dice.below(MACHINES as u64) as usize;
        let ahead_ms = *self.dice.pick(&[0, 0, HOUR_MS, 40 * 24 * HOUR_MS]);
        self.log("jump", || format!("  machine {number}'s clock is {ahead_ms} ms ahead"));
        self.machines[number].ahead_ms.store(ahead_ms, Ordering::Relaxed);
    }

    /// Notes the time, as a moment to read later.
    fn note_moment(&mut self) {
        if self.past.retention_s == 0
            || self.past.clocks_lied
            || self.past.moments.len() >= STATES_KEPT_MAX
        {
            return;
        }
        // The next event happens in another millisecond.
        self.clock.pass(2_000);
        let (world, _) = self.faultless_process();
        let (least, most) = (self.oracle.bound(Loss::Journal), self.oracle.len());
        let unix_ms = world.unix_ms() - 1;
        self.log("moment", || format!("  {unix_ms} is noted: {least} to {most} operations"));
        self.past.moments.push(Moment { unix_ms, least, most });
    }

    /// Older moments may be gone.
    fn window_start_ms(&mut self) -> u64 {
        let (world, _) = self.faultless_process();
        world.unix_ms().saturating_sub(self.past.retention_s * 1000)
    }

    /// Reads the volume as it was at one of the noted moments.
    pub(super) fn read_moment(&mut self) -> std::result::Result<Option<CutImage>, String> {
        let start_ms = self.window_start_ms();
        self.past.moments.retain(|moment| moment.unix_ms >= start_ms);
        if self.past.moments.is_empty() {
            return Ok(None);
        }
        let index = self.dice.below(self.past.moments.len() as u64) as usize;
        let Moment { unix_ms, least, most } = self.past.moments[index];
        let cut = Cut::Time(unix_ms);
        let found = self.read_volume(NAME, Some(cut.clone()))?;
        let count =
            self.oracle.check_replica(least, &found).map_err(|text| format!("at {cut}: {text}"))?;
        if count > most {
            return Err(format!("{cut} shows operation {count}, which was asked for later"));
        }
        self.story.moments += 1;
        self.log("then", || format!("  at {cut} there were {count} operations"));
        Ok(Some((cut, found.into())))
    }

    /// A cut that a rollback can reach.
    fn any_cut(&mut self) -> std::result::Result<Option<CutImage>, String> {
        if self.past.snapshots.is_empty() || self.dice.one_in(3) {
            return self.read_moment();
        }
        let index = self.dice.below(self.past.snapshots.len() as u64) as usize;
        let SavedImage { name, image } = &self.past.snapshots[index];
        Ok(Some((Cut::Snapshot(name.clone()), image.clone())))
    }

    /// The client has no request in flight, so that the order of its operations is known.
    fn order_rollback(&mut self, process: &mut Process) -> Verdict {
        if process.client.waiting() > 0 {
            return Ok(());
        }
        let Some((cut, image)) = self.any_cut()? else { return Ok(()) };
        self.log("roll back", || format!("  a rollback to {cut} is ordered"));
        process.store.set_at_once(true);
        let begun = process.stepped.volume().begin_roll_back(&cut);
        process.store.set_at_once(false);
        match begun {
            Ok(answer) => {
                let operation =
                    self.oracle.submit(0, self.settings.size_bytes, Effect::Image(image));
                let moment_unix_ms = match cut {
                    Cut::Time(unix_ms) => Some(unix_ms),
                    _ => None,
                };
                let what = OrderKind::RollBack(operation, moment_unix_ms);
                process.order = Some(PendingOrder { kind: what, answer, stray: false });
                Ok(())
            }
            // The writer has been replaced without noticing, or its store fails.
            Err(error)
                if error.kind() != ErrorKind::NotFound
                    || self.settings.store != StoreFaults::default() =>
            {
                self.log("not rolled back", || format!("  {error}"));
                Ok(())
            }
            Err(error) => Err(format!("a rollback to {cut} was refused: {error}")),
        }
    }

    /// Receives the answers to orders.
    pub(super) fn receive_order_answers(&mut self, beside: bool) -> Verdict {
        let slot = if beside { &mut self.zombie } else { &mut self.process };
        let Some(mut process) = slot.take() else { return Ok(()) };
        let verdict = self.receive_order_answer(&mut process);
        *(if beside { &mut self.zombie } else { &mut self.process }) = Some(process);
        verdict
    }

    fn receive_order_answer(&mut self, process: &mut Process) -> Verdict {
        let Some(ordered) = process.order.take() else { return Ok(()) };
        match ordered.answer.try_recv() {
            Err(TryRecvError::Empty) => {
                process.order = Some(ordered);
                Ok(())
            }
            Ok(Ok(())) if ordered.stray => {
                Err("a replaced writer's order was reported as done".into())
            }
            Ok(Ok(())) => self.ordered_is_done(process, ordered.kind),
            Ok(Err(error)) => {
                self.log("order refused", || format!("  the order was refused: {error}"));
                let mut has_aged = false;
                if let (OrderKind::RollBack(operation, moment_unix_ms), ErrorKind::NotFound) =
                    (&ordered.kind, error.kind())
                {
                    // Nothing was changed, and no other request was submitted meanwhile.
                    self.oracle.take_back(*operation);
                    // It waited for a slow store until its moment had left the window.
                    has_aged =
                        moment_unix_ms.is_some_and(|unix_ms| unix_ms < self.window_start_ms());
                }
                let excused = has_aged
                    || process.replaced_at.is_some()
                    || process.life.is_dead()
                    || self.has_disk_faults();
                let has_ended = matches!(error.kind(), ErrorKind::Closed | ErrorKind::Fenced);
                if excused || has_ended || matches!(ordered.kind, OrderKind::Delete) {
                    return Ok(());
                }
                Err(format!("an order was refused: {error}"))
            }
            Err(TryRecvError::Disconnected) => Ok(()),
        }
    }

    fn ordered_is_done(&mut self, process: &Process, kind: OrderKind) -> Verdict {
        match kind {
            OrderKind::RollBack(operation, _) if process.replaced_at.is_none() => {
                self.story.rollbacks += 1;
                self.oracle.complete(operation);
                self.oracle.note_stored(operation + 1);
            }
            OrderKind::Create(name, least) => {
                self.story.snapshots += 1;
                let cut = Cut::Snapshot(name.clone());
                let found = self.read_volume(NAME, Some(cut))?;
                if process.replaced_at.is_none() {
                    let count = self.oracle.check_view(least, &found)?;
                    self.log("snapshot done", || format!("  {name} holds {count} operations"));
                }
                self.past.snapshots.push(SavedImage { name, image: found.into() });
            }
            OrderKind::Retain(seconds) if process.replaced_at.is_none() => {
                self.past.retention_s = if seconds >= SHORT_S { seconds } else { 0 };
            }
            OrderKind::Grow(size_bytes) if process.replaced_at.is_none() => {
                self.story.growths += 1;
                self.size_bytes = size_bytes;
            }
            _ => {}
        }
        Ok(())
    }

    /// A process with a fault-free store and without a journal.
    pub(super) fn faultless_process(&mut self) -> (Arc<SimWorld>, Arc<SimStore>) {
        let life = Arc::new(Life::default());
        let (disk, store) = (DiskFaults::default(), StoreFaults::default());
        let dice = self.dice.split(10);
        let world = SimWorld::new(
            self.clock.clone(),
            MachineMedia::default(),
            life.clone(),
            self.trace.clone(),
            disk,
            dice,
        );
        let dice = self.dice.split(11);
        let store = SimStore::new(self.bucket.clone(), life, self.trace.clone(), store, dice);
        (Arc::new(world), Arc::new(store))
    }

    fn read_volume(
        &mut self,
        name: &str,
        cut: Option<Cut>,
    ) -> std::result::Result<Vec<u8>, String> {
        let (world, store) = self.faultless_process();
        let place = format!("{name} at {cut:?}");
        let options = OpenOptions { read_only: true, cut, ..OpenOptions::new(journal_path()) };
        let opened = SteppedVolume::open(world, store, name, &options);
        let stepped = opened.map_err(|error| format!("{place} cannot be opened: {error}"))?;
        let mut client = Client::default();
        client.read_whole(stepped.volume());
        let answer = client
            .padded_answer(self.settings.size_bytes)
            .ok_or_else(|| format!("{place} gives no answer"))?;
        answer.map_err(|error| format!("{place} cannot be read: {error}"))
    }

    pub(super) fn judge(&mut self, name: &str, cut: Option<Cut>, image: &[u8]) -> Verdict {
        let place = format!("{name} at {cut:?}");
        let bytes = self.read_volume(name, cut)?;
        match bytes.iter().zip(image).position(|(one, other)| one != other) {
            None => Ok(()),
            Some(at) => Err(format!(
                "byte {at} of {place} is {:#04x} and was {:#04x}",
                bytes[at], image[at]
            )),
        }
    }

    /// A snapshot or a clone, chosen by chance, with its name and cut.
    pub(super) fn any_kept(
        &mut self,
        clones_alone: bool,
    ) -> Option<(String, Option<Cut>, Arc<[u8]>)> {
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
        self.log("read kept", || format!("  somebody reads {name} at {cut:?}"));
        self.judge(&name, cut, &image)
    }

    /// The final check: everything that was kept has its first content.
    pub(super) fn judge_the_past(&mut self) -> Verdict {
        let snapshots = std::mem::take(&mut self.past.snapshots);
        for SavedImage { name, image } in snapshots {
            self.judge(NAME, Some(Cut::Snapshot(name)), &image)?;
        }
        for _ in 0..self.past.moments.len() {
            self.read_moment()?;
        }
        while let Some((name, cut, image)) = self.any_kept(true) {
            self.judge(&name, cut, &image)?;
            self.delete_clone()?;
        }
        Ok(())
    }
}
