//! The doors of a serving process: opened, added and removed while it runs, handed over as one.
//!
//! Invariants: a door is opened for volumes that are open; what is handed over of a door is preceded by a
//! piece named `door` that says which plan it is of, what it shows and how many pieces follow.
//!
//! Modules: [`plan`] (what was asked for), `open` (each kind of door), [`added`] (what comes back after a
//! crash although no option says so). Not here: what a door speaks.

pub(crate) mod added;
mod open;
pub(crate) mod plan;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard, RwLock};
use sawmill_device::{BlockDevice, Error, ErrorKind};
use sawmill_frontend::nbd::{Budget, BudgetUse};
use sawmill_frontend::{Door, Handed};
use sawmill_sys::FileLock;

use crate::admin::status::{DoorStatus, NbdMemoryStatus};
use open::{Orphans, Workers};
use plan::DoorPlan;
use sawmill_console::exit::{Exit, Failure, Result};

/// Threads that quiet doors: each mostly waits.
const QUIETERS_MAX: usize = 64;

/// Threads that take doors over: each may wait for a kernel or a keeper.
const TAKERS_MAX: usize = 64;

/// What doors show: an open volume.
#[derive(Clone)]
pub(crate) struct Shown {
    /// The export's name: the volume's, with the cut that is shown.
    pub(crate) name: String,
    /// Shown by clients that list exports.
    pub(crate) description: String,
    pub(crate) device: Arc<dyn BlockDevice>,
    /// The volume's state folder.
    pub(crate) folder: PathBuf,
    /// What tells its bytes from all others on this machine: the volume in its store, and the cut.
    pub(crate) identity: String,
    /// Everything that was answered is there for the next server when this one dies: users may wait for it.
    pub(crate) outlives_server: bool,
}

/// One open door.
pub(crate) struct OpenDoor {
    plan: DoorPlan,
    /// Names of what it shows.
    shows: Vec<String>,
    pub(crate) door: Arc<dyn Door>,
    /// The right to a mount, where there is one: see [`open`].
    claim: Mutex<Option<FileLock>>,
}

impl OpenDoor {
    /// Its kind, and what a user opens to have this volume.
    pub(crate) fn told(&self, name: &str) -> (&'static str, String) {
        (self.door.kind(), self.door.address_of(name))
    }
}

/// All doors of a process.
#[derive(Default)]
pub(crate) struct Doors {
    open: RwLock<Vec<Arc<OpenDoor>>>,
    /// Held while doors come, go or are handed over.
    changing: Mutex<()>,
    /// They are another process's.
    gone: AtomicBool,
    /// Threads for the queues of many devices, once there are many.
    workers: Workers,
    /// Memory of all NBD servers.
    nbd_budget: Budget,
}

impl Doors {
    /// None yet.
    pub(crate) fn new(nbd_budget: Budget) -> Self {
        Doors { nbd_budget, ..Doors::default() }
    }

    fn shared(&self) -> open::Shared<'_> {
        open::Shared { workers: &self.workers, nbd_budget: &self.nbd_budget }
    }

    /// The memory of all NBD servers.
    pub(crate) fn nbd_memory(&self) -> NbdMemoryStatus {
        let BudgetUse { bytes_max, bytes, waiting } = self.nbd_budget.in_use();
        NbdMemoryStatus { bytes_max, bytes, waiting }
    }

    /// Opens what a plan asks for, for these volumes: one door for all of them, or one each.
    pub(crate) fn open_all(&self, plans: &[DoorPlan], volumes: &[Shown]) -> Result<()> {
        self.workers.share_from(volumes.len())?;
        let orphans = Orphans::default();
        for plan in plans {
            if plan.is_shared() {
                self.open_with(plan.clone(), volumes, &orphans)?;
                continue;
            }
            for volume in volumes {
                let plan = if volumes.len() > 1 { plan.of_volume(&volume.name) } else { plan.clone() };
                self.open_with(plan, std::slice::from_ref(volume), &orphans)?;
            }
        }
        Ok(())
    }

    /// Opens one door.
    pub(crate) fn open(&self, plan: DoorPlan, volumes: &[Shown]) -> Result<Arc<OpenDoor>> {
        self.open_with(plan, volumes, &Orphans::default())
    }

    fn open_with(&self, plan: DoorPlan, volumes: &[Shown], orphans: &Orphans) -> Result<Arc<OpenDoor>> {
        let _one_at_a_time = self.changing.lock();
        self.demand_ours()?;
        let opened = Arc::new(open::open(plan, volumes, &self.shared(), orphans)?);
        self.open.write().push(Arc::clone(&opened));
        Ok(opened)
    }

    /// Closes the door of this address that shows this volume: requests in flight finish, users see it end.
    /// Returns what it was opened by.
    pub(crate) fn remove(&self, volume: &str, address: &str) -> Result<DoorPlan> {
        let _one_at_a_time = self.changing.lock();
        self.demand_ours()?;
        let found = self.of(volume).into_iter().find(|open| {
            [open.door.address_of(volume), open.door.address(), open.plan.to_string()]
                .contains(&address.to_owned())
        });
        let Some(found) = found else {
            let there: Vec<_> = self.of(volume).iter().map(|open| open.door.address_of(volume)).collect();
            return Err(Failure::new(
                Exit::NotFound,
                format!("volume {volume} has no door {address}; it has: {}", there.join(", ")),
            ));
        };
        if found.shows.len() > 1 {
            return Err(Failure::usage(format!(
                "the door {} shows {} volumes; it closes when the process ends",
                found.door.address(),
                found.shows.len()
            )));
        }
        found.door.stop();
        self.open.write().retain(|open| !Arc::ptr_eq(open, &found));
        Ok(found.plan.clone())
    }

    fn demand_ours(&self) -> Result<()> {
        if !self.gone.load(Ordering::Acquire) {
            return Ok(());
        }
        Err(Failure::new(Exit::Unavailable, "the doors were handed off to another process; try again"))
    }

    /// Lets no door come or go while the answer lives.
    pub(crate) fn hold(&self, patience: Duration) -> Result<MutexGuard<'_, ()>> {
        self.changing.try_lock_for(patience).ok_or_else(|| {
            Failure::new(Exit::InUse, "a door is being opened or closed; try again when that is done")
        })
    }

    /// The doors that show a volume.
    pub(crate) fn of(&self, volume: &str) -> Vec<Arc<OpenDoor>> {
        let shows = |open: &&Arc<OpenDoor>| open.shows.iter().any(|name| name == volume);
        self.open.read().iter().filter(shows).cloned().collect()
    }

    /// All doors.
    pub(crate) fn all(&self) -> Vec<Arc<OpenDoor>> {
        self.open.read().clone()
    }

    /// What passed through them.
    pub(crate) fn status(&self) -> Vec<DoorStatus> {
        let status = |open: &Arc<OpenDoor>| {
            DoorStatus::new(open.door.kind(), open.door.address(), &open.door.counts())
        };
        self.open.read().iter().map(status).collect()
    }

    /// What users open to have this volume, with the kind of door.
    pub(crate) fn addresses(&self, volume: &str) -> Vec<(&'static str, String)> {
        self.of(volume).iter().map(|open| open.told(volume)).collect()
    }

    /// The volume has another size: users are told where their door can.
    pub(crate) fn resized(&self, volume: &str) {
        for open in self.of(volume) {
            if let Err(error) = open.door.resized() {
                tracing::warn!(volume, "{}: users do not see the new size: {error}", open.door.address());
            }
        }
    }

    /// No door takes a request, and none is in flight. All are asked at once: a slow one costs the others its
    /// own time and no more. A door that has ended is left behind. After an error some are quiet and some are
    /// not: resume them.
    pub(crate) fn quiesce(&self, patience: Duration) -> sawmill_device::Result<()> {
        let deadline = Instant::now() + patience;
        let all = self.all();
        let next = AtomicUsize::new(0);
        let failed = Mutex::new(None);
        let work = || {
            while let Some(open) = all.get(next.fetch_add(1, Ordering::Relaxed)) {
                let left = deadline.saturating_duration_since(Instant::now());
                match open.door.quiesce(left) {
                    Ok(()) => {}
                    Err(error) if error.kind() == ErrorKind::Closed => {
                        tracing::warn!("dropping a door that has ended: {error}");
                        self.open.write().retain(|other| !Arc::ptr_eq(other, open));
                    }
                    Err(error) => {
                        let text = format!("{}: {error}", open.door.address());
                        failed.lock().get_or_insert(Error::new(error.kind(), text));
                    }
                }
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..all.len().min(QUIETERS_MAX) {
                // Without another thread it takes longer.
                let _ = std::thread::Builder::new().name("quiet".into()).spawn_scoped(scope, work);
            }
            work();
        });
        failed.into_inner().map_or(Ok(()), Err)
    }

    /// All doors go on, but those that show nothing else than volumes that are `away`.
    pub(crate) fn resume_but(&self, away: &[&str]) {
        let stays = |open: &Arc<OpenDoor>| open.shows.iter().all(|name| away.contains(&name.as_str()));
        self.all().iter().filter(|open| !stays(open)).for_each(|open| open.door.resume());
    }

    /// Leaves the doors of these volumes behind, as a process that is killed does. Devices and mounts wait
    /// for the next server; connections end.
    pub(crate) fn leave(&self, away: &[&str]) {
        let _one_at_a_time = self.changing.lock();
        let is_away = |name: &String| away.contains(&name.as_str());
        for open in self.all().iter().filter(|open| open.shows.iter().any(is_away)) {
            if open.shows.iter().all(is_away) {
                open.door.let_go();
                open.claim.lock().take();
            } else {
                // It goes on for other volumes, and has requests that wait for this one.
                open.door.stop_now();
            }
            self.open.write().retain(|other| !Arc::ptr_eq(other, open));
        }
    }

    /// What another process needs to go on with all doors; they must be quiet.
    pub(crate) fn hand_over(&self) -> sawmill_device::Result<Vec<Handed>> {
        let mut all = Vec::new();
        for open in self.all() {
            let pieces = match open.door.hand_over() {
                Err(error) if error.kind() == ErrorKind::Closed => {
                    tracing::warn!("dropping a door that has ended: {error}");
                    continue;
                }
                pieces => pieces?,
            };
            all.push(
                Handed::new("door")
                    .with("plan", &open.plan)
                    .with("shows", open.shows.join("\n"))
                    .with("pieces", pieces.len()),
            );
            all.extend(pieces);
        }
        Ok(all)
    }

    /// Goes on with the doors of another process, side by side: one that is slow holds up no other. A door
    /// that cannot be had is named in the answer; the others are open.
    pub(crate) fn take_over(&self, handed: Vec<Handed>, volumes: &[Shown]) -> Vec<Error> {
        let mut failed: Vec<Error> = self.workers.share_from(volumes.len()).err().into_iter().collect();
        let mut handed = handed.into_iter();
        let mut doors = Vec::new();
        while let Some(head) = handed.next() {
            match pieces_of(&head, &mut handed) {
                Ok(pieces) => doors.push((head, pieces)),
                Err(error) => failed.push(error),
            }
        }
        failed
            .extend(self.take_over_with(doors, |(head, pieces)| self.take_over_one(&head, pieces, volumes)));
        failed
    }

    /// Opens each door by `open`, lets it go on at once, and keeps them in their order.
    fn take_over_with<T: Send>(
        &self,
        doors: Vec<T>,
        open: impl Fn(T) -> sawmill_device::Result<OpenDoor> + Sync,
    ) -> Vec<Error> {
        let threads = doors.len().min(TAKERS_MAX);
        let next = Mutex::new(doors.into_iter().enumerate());
        let taken = Mutex::new(Vec::new());
        let work = || loop {
            let Some((index, door)) = next.lock().next() else { return };
            let outcome = open(door);
            outcome.iter().for_each(|opened| opened.door.resume());
            taken.lock().push((index, outcome));
        };
        std::thread::scope(|scope| {
            for _ in 1..threads {
                // Without another thread it takes longer.
                let _ = std::thread::Builder::new().name("take-over".into()).spawn_scoped(scope, work);
            }
            work();
        });
        let mut taken = taken.into_inner();
        taken.sort_by_key(|(index, _)| *index);
        let mut failed = Vec::new();
        for (_, outcome) in taken {
            match outcome {
                Ok(opened) => self.open.write().push(Arc::new(opened)),
                Err(error) => failed.push(error),
            }
        }
        failed
    }

    /// Leaves everything that was handed over to its new owner.
    pub(crate) fn let_go(&self) {
        self.gone.store(true, Ordering::Release);
        for open in self.all() {
            open.door.let_go();
            open.claim.lock().take();
        }
    }

    /// Requests in flight finish, users see the end.
    pub(crate) fn stop(&self) {
        let _one_at_a_time = self.changing.lock();
        self.all().iter().for_each(|open| open.door.stop());
    }

    /// Ends all at once.
    pub(crate) fn stop_now(&self) {
        self.all().iter().for_each(|open| open.door.stop_now());
    }

    fn take_over_one(
        &self,
        head: &Handed,
        pieces: Vec<Handed>,
        volumes: &[Shown],
    ) -> sawmill_device::Result<OpenDoor> {
        let plan = DoorPlan::parse(head.fact("plan")?);
        let plan = plan.map_err(|failure| Error::new(ErrorKind::Invalid, failure.to_string()))?;
        let shows: Vec<&str> = head.fact("shows")?.split('\n').collect();
        let shown: Vec<Shown> =
            volumes.iter().filter(|volume| shows.contains(&volume.name.as_str())).cloned().collect();
        open::take_over(plan, &shown, pieces, &self.shared())
    }
}

/// What belongs to a door of another process.
fn pieces_of(head: &Handed, handed: &mut std::vec::IntoIter<Handed>) -> sawmill_device::Result<Vec<Handed>> {
    if head.what != "door" {
        let text = format!("hand-off: found a {} instead of a door", head.what);
        return Err(Error::new(ErrorKind::Invalid, text));
    }
    Ok(handed.take(head.parsed("pieces")?).collect())
}

#[cfg(test)]
mod tests;
