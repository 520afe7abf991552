//! The doors of a process: requested as text, opened, added and removed while it runs, and handed
//! over together.
//!
//! Invariants: a door is opened only for open volumes. The pieces of a door that is handed over
//! follow a piece named `door`, which has the door's plan, the volumes it serves and the number of
//! pieces.
//!
//! Modules: `kind` (what a kind of door is), one module for each kind, `plan` (the table of kinds,
//! and the requested doors: [`DoorPlan`]), [`listening`] (addresses that users write).
//!
//! Not here: the protocol of a door (`sawmill-frontend`), the options of a command that request
//! doors, doors that return after a crash although no option names them (the program).
#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::unwrap_used))]

mod buse;
mod fuse;
mod kind;
pub mod listening;
mod nbd;
mod plan;
mod ublk;
mod vhost_user;

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard, RwLock};
use sawmill_device::{BlockDevice, Error, ErrorKind, Result};
use sawmill_frontend::nbd::BudgetUse;
use sawmill_frontend::{Door, DoorCounts, DoorPiece, QuietDoor, Stop};
use sawmill_sys::FileLock;

pub use nbd::NbdShare;
pub use plan::{DoorPlan, examples, options};
pub use ublk::{UNPRIVILEGED_FOLDER, require_driver};

use kind::DoorInstance;

/// Threads that quiesce doors; each mostly waits.
const QUIESCE_THREADS_MAX: usize = 64;

/// Threads that take over doors; each may wait for a kernel or a mount holder.
const TAKE_OVER_THREADS_MAX: usize = 64;

/// Whether a device node of this identity ([`DoorVolume::identity`]) waits for its next server.
///
/// # Errors
/// It is unknown then: this is no sign that there is none.
pub fn waits(identity: &str) -> Result<bool> {
    Ok(ublk::waits(identity)? || buse::waits(identity)?)
}

/// Refuses to serve a volume without the door whose users wait for it, if the kernel has completed
/// writes of theirs that no server has taken: they would come after newer ones.
///
/// # Errors
/// `Refused`, or those of the question.
pub fn require_older_writes_first(plans: &[DoorPlan], volume: &DoorVolume) -> Result<()> {
    if volume.device.geometry().read_only
        || plans.iter().any(DoorPlan::has_completed_writes)
        || !buse::waits(&volume.identity)?
    {
        return Ok(());
    }
    let text = format!(
        "a BUSE device of {} has completed writes that no server has taken: serve it with --buse, \
         or give them up: rmdir the device in /sys/kernel/config/buse",
        volume.name
    );
    Err(Error::new(ErrorKind::Refused, text))
}

/// An open volume, as doors serve it.
#[derive(Clone)]
pub struct DoorVolume {
    /// The export's name: the volume's, with the cut that is shown.
    pub name: String,
    /// The description in clients that list exports.
    pub description: String,
    /// The device. Its `submit` does not wait.
    pub device: Arc<dyn BlockDevice>,
    /// The volume's state folder.
    pub folder: PathBuf,
    /// Distinguishes its bytes from all others on this machine: the volume in its store, and the
    /// cut.
    pub identity: String,
    /// Whether all answered requests survive the death of this server, so that users may wait for
    /// the next one.
    pub outlives_server: bool,
    /// For doors with a thread for each queue (ublk); `None`: as many as there are cores, and they
    /// use `device` too.
    pub queues: Option<DoorQueues>,
}

/// What doors with a thread for each queue use.
#[derive(Clone)]
pub struct DoorQueues {
    /// How many queues there are.
    pub count: u16,
    /// The same device, where `submit` may wait.
    pub device: Arc<dyn BlockDevice>,
}

impl DoorVolume {
    /// The device for doors with a thread for each queue.
    fn queue_device(&self) -> Arc<dyn BlockDevice> {
        self.queues.as_ref().map_or_else(|| Arc::clone(&self.device), |own| Arc::clone(&own.device))
    }

    /// The name as a file name: names of past states have a colon, which some programs reject.
    fn file_name(&self) -> String {
        self.name.replace(':', "-")
    }
}

/// What the doors of a process share. A kind that shares something adds a field.
#[derive(Default)]
struct DoorResources {
    /// Threads for the queues of many devices, once there are many.
    ublk_workers: ublk::Workers,
    /// Devices that a dead server left, as the command that opens doors now found them.
    ublk_orphans: ublk::Orphans,
    nbd: NbdShare,
    mount_holder: Option<MountHolderCommand>,
}

/// Returns the command of a process that holds a FUSE mount while no server serves it.
pub type MountHolderCommand = fn() -> Result<Vec<OsString>>;

/// What a door is opened with.
struct DoorContext<'a> {
    /// The volumes that it shows.
    volumes: &'a [DoorVolume],
    /// How many volumes the process serves.
    volumes_in_process: usize,
    shared: &'a DoorResources,
}

impl DoorContext<'_> {
    /// The volume of a door that shows exactly one.
    fn only(&self) -> Result<&DoorVolume> {
        self.volumes.first().ok_or_else(|| {
            Error::new(ErrorKind::NotFound, "this process does not serve the volume of this door")
        })
    }
}

/// One open door.
pub struct OpenDoor {
    plan: DoorPlan,
    /// The names of the volumes it serves.
    shows: Vec<String>,
    door: Arc<dyn Door>,
    /// The same door, while it is quiet.
    quiet: Mutex<Option<Box<dyn QuietDoor>>>,
    /// See [`DoorInstance`].
    claim: Mutex<Option<FileLock>>,
}

impl OpenDoor {
    fn new(plan: DoorPlan, volumes: &[DoorVolume], instance: DoorInstance) -> Self {
        let shows = volumes.iter().map(|volume| volume.name.clone()).collect();
        let DoorInstance { door, quiet, claim } = instance;
        OpenDoor { plan, shows, door, quiet: Mutex::new(quiet), claim: Mutex::new(claim) }
    }

    fn quiesce(&self, patience: Duration) -> Result<()> {
        *self.quiet.lock() = Some(self.door.quiesce(patience)?);
        Ok(())
    }

    /// Resumes the door if it is quiet.
    fn resume(&self) {
        if let Some(quiet) = self.quiet.lock().take() {
            quiet.resume();
        }
    }

    fn hand_over(&self) -> Result<Vec<DoorPiece>> {
        let quiet = self.quiet.lock();
        let quiet = quiet.as_ref().ok_or_else(|| {
            Error::new(ErrorKind::Internal, format!("{} is not quiet", self.door.address()))
        })?;
        quiet.hand_over()
    }

    /// Releases the door, which is quiet, to its new owner or the next server.
    fn release(&self) {
        match self.quiet.lock().take() {
            Some(quiet) => quiet.release(),
            None => tracing::error!("cannot release {}: it is not quiet", self.door.address()),
        }
        // Last: another process may serve the door as soon as it has the claim.
        if let Some(claim) = self.claim.lock().take() {
            claim.give_up();
        }
    }

    /// The kind of the door, and the address that gives users this volume.
    pub fn address_of(&self, name: &str) -> (&'static str, String) {
        (self.door.kind(), self.door.export(name).address)
    }
}

/// All doors of a process.
#[derive(Default)]
pub struct Doors {
    open: RwLock<Vec<Arc<OpenDoor>>>,
    /// Held while doors are opened, closed or handed over.
    changing: Mutex<()>,
    /// The doors belong to another process.
    is_gone: AtomicBool,
    /// The most volumes that doors were opened for together.
    volumes: AtomicUsize,
    shared: DoorResources,
}

impl Doors {
    /// Starts without doors. Without a mount holder, a FUSE mount ends with this process.
    #[must_use]
    pub fn new(nbd: NbdShare, mount_holder: Option<MountHolderCommand>) -> Self {
        let shared = DoorResources { nbd, mount_holder, ..DoorResources::default() };
        Doors { shared, ..Doors::default() }
    }

    fn context<'a>(&'a self, volumes: &'a [DoorVolume]) -> DoorContext<'a> {
        let volumes_in_process = self.volumes.load(Ordering::Relaxed);
        DoorContext { volumes, volumes_in_process, shared: &self.shared }
    }

    /// The memory of all NBD servers.
    pub fn nbd_memory(&self) -> BudgetUse {
        self.shared.nbd.budget.in_use()
    }

    /// Opens the doors of the plans for these volumes: one door for all of them, or one each.
    pub fn open_all(&self, plans: &[DoorPlan], volumes: &[DoorVolume]) -> Result<()> {
        // Before the first door: the number decides whether ublk devices share threads.
        self.volumes.fetch_max(volumes.len(), Ordering::Relaxed);
        self.shared.ublk_orphans.forget();
        // What the kernel has completed is older than what other doors bring.
        let (first, rest): (Vec<_>, Vec<_>) =
            plans.iter().partition(|plan| plan.has_completed_writes());
        for plan in first.into_iter().chain(rest) {
            if let [only] = volumes {
                self.open_one(plan.clone(), std::slice::from_ref(only))?;
                continue;
            }
            let of_volumes = volumes.iter().map(|volume| plan.of_volume(&volume.name));
            match of_volumes.collect::<Option<Vec<_>>>() {
                None => drop(self.open_one(plan.clone(), volumes)?),
                Some(each) => {
                    for (plan, volume) in each.into_iter().zip(volumes) {
                        self.open_one(plan, std::slice::from_ref(volume))?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Opens one door.
    pub fn open(&self, plan: DoorPlan, volumes: &[DoorVolume]) -> Result<Arc<OpenDoor>> {
        self.shared.ublk_orphans.forget();
        self.open_one(plan, volumes)
    }

    fn open_one(&self, plan: DoorPlan, volumes: &[DoorVolume]) -> Result<Arc<OpenDoor>> {
        let _changing = self.changing.lock();
        // Under the lock: a hand-off that ended while this waited has given all doors away.
        self.require_ours()?;
        let opened = plan.open(&self.context(volumes))?;
        let opened = Arc::new(OpenDoor::new(plan, volumes, opened));
        self.open.write().push(Arc::clone(&opened));
        Ok(opened)
    }

    /// Closes the door with this address that serves this volume. Requests in flight finish; then
    /// its users see it end. Returns the plan that would reopen it, as it was noted.
    pub fn remove(&self, volume: &str, address: &str) -> Result<DoorPlan> {
        let _changing = self.changing.lock();
        self.require_ours()?;
        let found = self.of(volume).into_iter().find(|open| {
            [open.door.export(volume).address, open.door.address(), open.plan.to_string()]
                .contains(&address.to_owned())
        });
        let Some(found) = found else {
            let addresses: Vec<_> =
                self.of(volume).iter().map(|open| open.door.export(volume).address).collect();
            return Err(Error::new(
                ErrorKind::NotFound,
                format!("volume {volume} has no door {address}; it has: {}", addresses.join(", ")),
            ));
        };
        if found.shows.len() > 1 {
            let text = format!(
                "the door {} shows {} volumes; it closes when the process ends",
                found.door.address(),
                found.shows.len()
            );
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        // The door's own: `address` may be the text of its plan.
        let (_, address) = found.address_of(volume);
        found.door.stop(Stop::Drained);
        self.open.write().retain(|open| !Arc::ptr_eq(open, &found));
        Ok(found.plan.reopened_at(&address))
    }

    fn require_ours(&self) -> Result<()> {
        if !self.is_gone.load(Ordering::Acquire) {
            return Ok(());
        }
        let text = "the doors were handed off to another process; try again";
        Err(Error::new(ErrorKind::Unavailable, text))
    }

    /// While the returned guard lives, no door is opened or closed.
    pub fn hold(&self, patience: Duration) -> Result<MutexGuard<'_, ()>> {
        self.changing.try_lock_for(patience).ok_or_else(|| {
            let text = "a door is being opened or closed; try again when that is done";
            Error::new(ErrorKind::InUse, text)
        })
    }

    /// The doors of a volume.
    pub fn of(&self, volume: &str) -> Vec<Arc<OpenDoor>> {
        let shows = |open: &&Arc<OpenDoor>| open.shows.iter().any(|name| name == volume);
        self.open.read().iter().filter(shows).cloned().collect()
    }

    /// All doors.
    pub fn all(&self) -> Vec<Arc<OpenDoor>> {
        self.open.read().clone()
    }

    /// The kind, the address and the counters of each door.
    pub fn counts(&self) -> Vec<(&'static str, String, DoorCounts)> {
        let counts =
            |open: &Arc<OpenDoor>| (open.door.kind(), open.door.address(), open.door.counts());
        self.open.read().iter().map(counts).collect()
    }

    /// The addresses that give users this volume, with the kind of each door.
    pub fn addresses(&self, volume: &str) -> Vec<(&'static str, String)> {
        self.of(volume).iter().map(|open| open.address_of(volume)).collect()
    }

    /// The connected users of this volume, where the kind of door knows them.
    pub fn peers(&self, volume: &str) -> Vec<String> {
        self.of(volume).iter().flat_map(|open| open.door.export(volume).peers).collect()
    }

    /// Notifies users that the volume has another size, where the kind of door can do that.
    pub fn resized(&self, volume: &str) {
        for open in self.of(volume) {
            if let Err(error) = open.door.resized() {
                tracing::warn!(
                    volume,
                    "{}: users do not see the new size: {error}",
                    open.door.address()
                );
            }
        }
    }

    /// Quiesces all doors: none accepts a request, and none has a request in flight. All doors
    /// quiesce in parallel, so a slow one delays no other. A door that has ended is dropped. After
    /// an error, some doors are quiet and some are not: resume them.
    pub fn quiesce(&self, patience: Duration) -> Result<()> {
        let deadline = Instant::now() + patience;
        let all = self.all();
        let next = AtomicUsize::new(0);
        let failed = Mutex::new(None);
        let work = || {
            while let Some(open) = all.get(next.fetch_add(1, Ordering::Relaxed)) {
                let left = deadline.saturating_duration_since(Instant::now());
                match open.quiesce(left) {
                    Ok(()) => {}
                    // Nobody uses it any more, so it must not stop the hand-off of the others.
                    Err(error) if error.kind() == ErrorKind::Closed => {
                        tracing::warn!("dropping a door that has ended: {error}");
                        self.open.write().retain(|other| !Arc::ptr_eq(other, open));
                    }
                    Err(error) => {
                        let error = Error::caused(error.kind(), open.door.address(), error);
                        failed.lock().get_or_insert(error);
                    }
                }
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..all.len().min(QUIESCE_THREADS_MAX) {
                // Without another thread it takes longer.
                let _ = std::thread::Builder::new()
                    .name("door-quiesce".into())
                    .spawn_scoped(scope, work);
            }
            work();
        });
        failed.into_inner().map_or(Ok(()), Err)
    }

    /// Resumes all doors, except those that serve only volumes in `away`.
    pub fn resume_but(&self, away: &[&str]) {
        let stays =
            |open: &Arc<OpenDoor>| open.shows.iter().all(|name| away.contains(&name.as_str()));
        self.all().iter().filter(|open| !stays(open)).for_each(|open| open.resume());
    }

    /// Leaves the doors of these volumes as a killed process does. Devices and mounts wait for the
    /// next server; connections end.
    pub fn leave(&self, away: &[&str]) {
        let _changing = self.changing.lock();
        let is_away = |name: &String| away.contains(&name.as_str());
        for open in self.all().iter().filter(|open| open.shows.iter().any(is_away)) {
            if open.shows.iter().all(is_away) {
                open.release();
            } else {
                // The door resumes for other volumes, but has requests that wait for this one.
                open.door.stop(Stop::Now);
            }
            self.open.write().retain(|other| !Arc::ptr_eq(other, open));
        }
    }

    /// What another process needs to take over all doors. They must be quiet.
    pub fn hand_over(&self) -> Result<Vec<DoorPiece>> {
        let mut all = Vec::new();
        for open in self.all() {
            let pieces = match open.hand_over() {
                Err(error) if error.kind() == ErrorKind::Closed => {
                    tracing::warn!("dropping a door that has ended: {error}");
                    continue;
                }
                pieces => pieces?,
            };
            all.push(
                DoorPiece::new("door")
                    .with("plan", &open.plan)
                    .with("shows", open.shows.join("\n"))
                    .with("pieces", pieces.len()),
            );
            all.extend(pieces);
        }
        Ok(all)
    }

    /// Takes over the doors of another process, in parallel, so that a slow one delays no other.
    /// Returns an error for each door that cannot be taken over; the others are open.
    pub fn take_over(&self, door_piece: Vec<DoorPiece>, volumes: &[DoorVolume]) -> Vec<Error> {
        self.volumes.fetch_max(volumes.len(), Ordering::Relaxed);
        let mut failed = Vec::new();
        let mut handed = door_piece.into_iter();
        let mut doors = Vec::new();
        while let Some(head) = handed.next() {
            match pieces_of(&head, &mut handed) {
                Ok(pieces) => doors.push((head, pieces)),
                Err(error) => failed.push(error),
            }
        }
        failed.extend(
            self.take_over_with(doors, |(head, pieces)| self.take_over_one(&head, pieces, volumes)),
        );
        failed
    }

    /// Opens each door with `open` and resumes it immediately. Keeps the doors in order.
    fn take_over_with<T: Send>(
        &self,
        doors: Vec<T>,
        open: impl Fn(T) -> Result<OpenDoor> + Sync,
    ) -> Vec<Error> {
        let threads = doors.len().min(TAKE_OVER_THREADS_MAX);
        let next = Mutex::new(doors.into_iter().enumerate());
        let outcomes = Mutex::new(Vec::new());
        let work = || loop {
            let Some((index, door)) = next.lock().next() else { return };
            let outcome = open(door);
            // At once: its users have waited since the old process went quiet.
            outcome.iter().for_each(OpenDoor::resume);
            outcomes.lock().push((index, outcome));
        };
        std::thread::scope(|scope| {
            for _ in 1..threads {
                // Without another thread it takes longer.
                let _ = std::thread::Builder::new()
                    .name("door-take-over".into())
                    .spawn_scoped(scope, work);
            }
            work();
        });
        let mut outcomes = outcomes.into_inner();
        outcomes.sort_by_key(|(index, _)| *index);
        let mut failed = Vec::new();
        for (_, outcome) in outcomes {
            match outcome {
                Ok(opened) => self.open.write().push(Arc::new(opened)),
                Err(error) => failed.push(error),
            }
        }
        failed
    }

    /// Releases everything that was handed over; its new owner has it.
    pub fn release(&self) {
        // First, so that a door command that waits for the lock is refused.
        self.is_gone.store(true, Ordering::Release);
        self.all().iter().for_each(|open| open.release());
    }

    /// Closes all doors: requests in flight finish, then users see the end.
    pub fn stop(&self) {
        let _changing = self.changing.lock();
        self.all().iter().for_each(|open| open.door.stop(Stop::Drained));
    }

    /// Closes all doors immediately.
    pub fn stop_now(&self) {
        // Without the lock, which `stop` holds while it drains: a second signal must not wait for
        // it.
        self.all().iter().for_each(|open| open.door.stop(Stop::Now));
    }

    fn take_over_one(
        &self,
        head: &DoorPiece,
        pieces: Vec<DoorPiece>,
        volumes: &[DoorVolume],
    ) -> Result<OpenDoor> {
        let plan = DoorPlan::parse(head.fact("plan")?)?;
        let shows: Vec<&str> = head.fact("shows")?.split('\n').collect();
        let door_volume: Vec<DoorVolume> = volumes
            .iter()
            .filter(|volume| shows.contains(&volume.name.as_str()))
            .cloned()
            .collect();
        let opened = plan.take_over(pieces, &self.context(&door_volume))?;
        Ok(OpenDoor::new(plan, &door_volume, opened))
    }
}

/// The pieces of one door of another process.
fn pieces_of(
    head: &DoorPiece,
    piece: &mut std::vec::IntoIter<DoorPiece>,
) -> Result<Vec<DoorPiece>> {
    if head.what != "door" {
        let text = format!(
            "hand-off: the other process sent a piece of kind {:?} where a door begins",
            head.what
        );
        return Err(Error::new(ErrorKind::Invalid, text));
    }
    Ok(piece.take(head.parsed("pieces")?).collect())
}

#[cfg(test)]
mod tests;
