//! A process that serves volumes: its state, and the requests it carries out.
//!
//! Invariants: a volume is away only from a hand-off's switch (`handoff`) until it is open again;
//! until then its requests wait and orders are refused. A volume that can never be reopened is
//! given up: its requests fail. Not here: how everything is opened (`wiring`), and what a number
//! means (`admin`).

use std::path::PathBuf;
use std::process;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, RwLock};
use sawmill_device::layer::{Gate, Meter};
use sawmill_device::{BlockDevice, Error, ErrorKind, Geometry, Request};
use sawmill_format::ids::VolumeId;
use sawmill_store::Client;
use sawmill_volume::cache::ReadCache;
use sawmill_volume::{GcReport, RealWorld, Safety, Volume, World};

use crate::admin::status::{
    CacheStatus, HealthStatus, OperationStatus, PositionsStatus, ProcessStatus, StoreStatus,
    VolumeDoor, VolumeStatus, milliseconds,
};
use crate::config::VolumeAddress;
use crate::control::protocol::{
    Changed, Collected, ControlRequest, DoorAdded, DoorRemoved, HandOff, Resized,
};
use crate::doors::added::Added;
use crate::doors::plan::DoorPlan;
use crate::doors::{Doors, Shown};
use crate::handoff::Asked;
use crate::link::told::Teller;
use crate::plan::Plan;
use crate::seen;
use sawmill_console::exit::{Exit, Failure, Result};

/// Interval at which the newest stored state is noted. If a store is restored from a backup, the
/// loss of what was stored after the last note goes unnoticed, unless the journal knows of it.
const SEEN_EVERY: Duration = Duration::from_secs(10);

/// The state of a volume in this process.
enum Held {
    Open(Arc<Volume>),
    /// It was closed for a hand-off.
    Away(Absent),
    /// It could not be reopened. It stays closed until a person fixes the cause.
    GivenUp(Absent),
}

/// A volume that this process had open.
struct Absent {
    /// The status when it was closed.
    last: VolumeStatus,
    reason: String,
}

/// One volume, and what was used to open it.
pub(crate) struct Served {
    pub(crate) address: VolumeAddress,
    pub(crate) volume_id: VolumeId,
    shown: String,
    held: RwLock<Held>,
    /// What the doors hold: it stays when the volume is closed and reopened.
    gate: Arc<Gate>,
    meter: Arc<Meter<Arc<Gate>>>,
    pub(crate) store: Arc<Client>,
    pub(crate) folder: PathBuf,
    pub(crate) journal_path: Option<PathBuf>,
    /// Doors that were added to it. Readers have none, because they share the writer's folder.
    added: Option<Added>,
    /// When this was last compared with what is stored, and the newest segment that this loop has
    /// noted.
    noted: Mutex<(Instant, Option<u64>)>,
}

impl Served {
    pub(crate) fn new(
        address: VolumeAddress,
        volume: Arc<Volume>,
        store: Arc<Client>,
        folder: PathBuf,
        journal_path: Option<PathBuf>,
    ) -> Self {
        let (volume_id, noted) = (volume.status().volume_id, Mutex::new((Instant::now(), None)));
        let gate = Arc::new(Gate::new(Arc::clone(&volume) as Arc<dyn BlockDevice>));
        let (shown, meter) = (address.shown(), Arc::new(Meter::new(Arc::clone(&gate))));
        let held = RwLock::new(Held::Open(volume));
        let added = journal_path.as_ref().map(|_| Added::of(&folder));
        Served {
            address,
            volume_id,
            shown,
            held,
            gate,
            meter,
            store,
            folder,
            journal_path,
            added,
            noted,
        }
    }

    /// The export's name: the volume's, with the cut that is served.
    pub(crate) fn name(&self) -> &str {
        &self.shown
    }

    /// The open volume. Returns `Unavailable` while it is away; the text says why.
    pub(crate) fn volume(&self) -> Result<Arc<Volume>> {
        match &*self.held.read() {
            Held::Open(volume) => Ok(Arc::clone(volume)),
            Held::Away(Absent { reason, .. }) | Held::GivenUp(Absent { reason, .. }) => {
                Err(Failure::new(Exit::Unavailable, format!("volume {}: {reason}", self.shown)))
            }
        }
    }

    /// Closes the volume as if the process had died: what was accepted is in its journal, and
    /// another process can open it when the last reference to the result is dropped. New requests
    /// wait.
    pub(crate) fn close_as_it_is(
        &self,
        patience: Duration,
    ) -> sawmill_device::Result<Option<Arc<Volume>>> {
        self.gate.shut(patience)?;
        // Memory may not outlive this process, so answered writes go to the disk first.
        if let Err(error) = self.log_all(patience) {
            self.gate.open();
            return Err(error);
        }
        let mut held = self.held.write();
        let (closed, last) = match &mut *held {
            Held::Open(volume) => (Some(Arc::clone(volume)), volume_status(volume)),
            Held::Away(absent) | Held::GivenUp(absent) => (None, std::mem::take(&mut absent.last)),
        };
        let reason = "it is being handed off to another process; try again".to_owned();
        *held = Held::Away(Absent { last, reason });
        drop(held);
        let Some(volume) = closed else { return Ok(None) };
        volume.close_now();
        self.gate.replace(Arc::new(Away(self.gate.geometry())))?;
        Ok(Some(volume))
    }

    /// Returns when everything accepted so far is logged.
    pub(crate) fn log_all(&self, patience: Duration) -> sawmill_device::Result<()> {
        let Held::Open(volume) = &*self.held.read() else { return Ok(()) };
        // A volume that has failed has nothing more to log, and reports that to its users.
        match volume.wait(Safety::Logged, Some(patience)) {
            Ok(false) => {
                let text =
                    format!("the journal of {} accepted no writes for {patience:?}", self.name());
                Err(Error::new(ErrorKind::Unavailable, text))
            }
            _ => Ok(()),
        }
    }

    /// Puts the reopened volume back: its doors resume.
    pub(crate) fn put_back(&self, volume: Arc<Volume>) -> sawmill_device::Result<()> {
        self.gate.replace(Arc::clone(&volume) as Arc<dyn BlockDevice>)?;
        *self.held.write() = Held::Open(volume);
        self.gate.open();
        Ok(())
    }

    /// The volume cannot be reopened now: its users wait.
    pub(crate) fn keep_away(&self, why: &Failure) {
        if let Held::Away(absent) = &mut *self.held.write() {
            absent.reason = format!("a hand-off was rolled back; reopen failed, retrying: {why}");
        }
    }

    /// The volume will not be reopened in this process: its users get errors instead of waiting.
    pub(crate) fn give_up(&self, why: &Failure) {
        let mut held = self.held.write();
        if let Held::Away(absent) = &mut *held {
            let reason = format!(
                "a hand-off was rolled back and reopen failed; accepted writes are in its journal; \
                 fix the cause and retry the hand-off, or restart the server: {why}"
            );
            *held = Held::GivenUp(Absent { last: std::mem::take(&mut absent.last), reason });
        }
        drop(held);
        self.gate.open();
    }

    pub(crate) fn is_away(&self) -> bool {
        matches!(*self.held.read(), Held::Away(_))
    }

    /// The newest status of the volume, open or not.
    fn known(&self) -> VolumeStatus {
        match &*self.held.read() {
            Held::Open(volume) => volume_status(volume),
            Held::Away(absent) | Held::GivenUp(absent) => {
                VolumeStatus { health: closed(absent.reason.clone()), ..absent.last.clone() }
            }
        }
    }

    /// The volume as doors serve it.
    pub(crate) fn as_shown(&self) -> Shown {
        Shown {
            name: self.shown.clone(),
            description: format!("{} on {}", self.shown, self.store.name()),
            device: Arc::clone(&self.meter) as Arc<dyn BlockDevice>,
            folder: self.folder.clone(),
            identity: match (self.folder.file_name(), &self.address.cut) {
                (Some(name), None) => name.to_string_lossy().into_owned(),
                (Some(name), Some((cut, _))) => format!("{}@{cut}", name.to_string_lossy()),
                (None, _) => self.shown.clone(),
            },
            outlives_server: true,
        }
    }

    pub(crate) fn health(&self) -> HealthStatus {
        self.known().health
    }

    pub(crate) fn positions(&self) -> PositionsStatus {
        self.known().positions
    }

    /// Notes what the store has, now and then. A fenced process knows less than the one that fenced
    /// it, so it notes nothing.
    fn note_seen(&self) {
        let mut noted = self.noted.lock();
        if self.journal_path.is_none() || noted.0.elapsed() < SEEN_EVERY {
            return;
        }
        let Ok(volume) = self.volume() else { return };
        noted.0 = Instant::now();
        if noted.1 != Some(volume.status().stored_sequence) && self.health().state == "serving" {
            noted.1 = seen::note(&self.folder, &volume);
        }
    }
}

fn closed(reason: String) -> HealthStatus {
    HealthStatus { state: "closed".into(), since_ms: None, reason: Some(reason) }
}

/// The status of an open volume.
fn volume_status(volume: &Volume) -> VolumeStatus {
    let record = volume.record();
    VolumeStatus {
        block_bytes: record.block_bytes,
        segment_bytes: record.segment_bytes,
        flush: record.flush_mode.to_string(),
        created_unix_ms: record.created_unix_ms,
        ..VolumeStatus::new(&volume.status())
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        // No effect on a volume that was closed cleanly; the others keep accepted writes in their
        // journals.
        if let Held::Open(volume) = &*self.held.read() {
            volume.close_now();
        }
    }
}

/// Stands in for a volume that another process may have. Its gate is closed until the volume is
/// given up.
struct Away(Geometry);

impl BlockDevice for Away {
    fn geometry(&self) -> Geometry {
        self.0
    }

    fn submit(&self, request: Request) {
        let text = "the volume was closed for a hand-off and could not be reopened; see the log";
        request.fail(Error::new(ErrorKind::Unavailable, text));
    }
}

/// The read cache and its path.
#[derive(Clone)]
pub(crate) struct Cache {
    pub(crate) path: PathBuf,
    pub(crate) cache: Arc<ReadCache>,
}

/// Asks the serving thread for a hand-off. Returns false if it no longer listens.
pub(crate) type HandOffBell = Box<dyn Fn(Asked) -> bool + Send + Sync>;

/// A process that serves volumes. Fields are dropped in this order: first the doors, then what is
/// behind them.
pub(crate) struct Serving {
    pub(crate) doors: Doors,
    pub(crate) volumes: Vec<Served>,
    pub(crate) cache: Mutex<Option<Cache>>,
    gc_start: f64,
    started: Instant,
    hand_off: HandOffBell,
    /// A hand-off is in progress.
    is_handing_off: AtomicBool,
    /// Reports the status of links, if the volumes are exported over some.
    link: OnceLock<Teller>,
}

impl Serving {
    /// Without doors yet.
    pub(crate) fn new(
        volumes: Vec<Served>,
        cache: Option<Cache>,
        plan: &Plan,
        started: Instant,
        hand_off: HandOffBell,
    ) -> Self {
        let (doors, cache) = (Doors::new(plan.nbd_budget.clone()), Mutex::new(cache));
        let gc_start = plan.options.gc.start;
        let (is_handing_off, link) = (AtomicBool::new(false), OnceLock::new());
        Serving { doors, volumes, cache, gc_start, started, hand_off, is_handing_off, link }
    }

    /// The volumes are exported over a link too; the status includes it from now on.
    pub(crate) fn is_end_of_link(&self, tell: Teller) {
        // A process is one end at most.
        let _ = self.link.set(tell);
    }

    /// The status document: of the whole process, or of one volume.
    pub(crate) fn status(&self, only: Option<&str>) -> ProcessStatus {
        let asked: Vec<&Served> = self
            .volumes
            .iter()
            .filter(|served| only.is_none_or(|name| served.name() == name))
            .collect();
        let mut stores: Vec<StoreStatus> = Vec::new();
        for served in &asked {
            let url = &served.address.store_url;
            if !stores.iter().any(|store| store.url == *url) {
                stores.push(StoreStatus::new(url, &served.store.meter()));
            }
        }
        ProcessStatus {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: process::id(),
            uptime_ms: milliseconds(self.started.elapsed()),
            handing_over: asked.iter().any(|served| self.is_at_another(served)),
            volumes: asked
                .into_iter()
                .filter(|served| !self.is_at_another(served))
                .map(|served| self.volume_status(served))
                .collect(),
            doors: self.doors.status(),
            nbd_memory: Some(self.doors.nbd_memory()),
            stores,
            cache: self.cache.lock().as_ref().map(Cache::status),
            link: self.link.get().map(|tell| tell()),
        }
    }

    /// Whether a volume is between two processes, or already with the next one.
    fn is_at_another(&self, served: &Served) -> bool {
        self.is_handing_off.load(Ordering::Acquire) && served.is_away()
    }

    fn volume_status(&self, served: &Served) -> VolumeStatus {
        let mut known = served.known();
        let meter = served.store.meter();
        if let ("serving", Some(since)) = (known.health.state.as_str(), meter.unavailable_since) {
            // The store's calls fail; the engine learns that only when their retries are used up.
            let now = RealWorld::default().unix_ms();
            known.health = HealthStatus {
                state: "store_unavailable".into(),
                since_ms: Some(now.saturating_sub(since)),
                reason: meter.last_error.map(|(_, what)| what),
            };
        }
        let clients = self.doors.peers(served.name());
        let addresses = self.doors.addresses(served.name());
        VolumeStatus {
            store: served.address.store_url.clone(),
            uris: addresses.iter().map(|(_, address)| address.clone()).collect(),
            doors: addresses
                .into_iter()
                .map(|(kind, address)| VolumeDoor { kind: kind.to_owned(), address })
                .collect(),
            clients,
            journal_path: served.journal_path.as_ref().map(|path| path.display().to_string()),
            operations: served
                .meter
                .snapshot()
                .operations
                .iter()
                .map(OperationStatus::new)
                .collect(),
            ..known
        }
    }

    /// Waits until everything that a volume has accepted is as safe as requested.
    pub(crate) fn wait(
        &self,
        name: &str,
        safety: Safety,
        timeout: Option<Duration>,
        is_wanted: &dyn Fn() -> bool,
    ) -> Result<bool> {
        self.served(name)?.volume()?.wait_while(safety, timeout, is_wanted).map_err(Failure::from)
    }

    /// Grows a volume while it is served. New clients see the new size; existing ones too if their
    /// door can notify them.
    fn resize(&self, name: &str, size_bytes: u64) -> Result<()> {
        let volume = self.served(name)?.volume()?;
        let current = volume.status().size_bytes;
        if size_bytes < current {
            let text = format!(
                "volume {name} has {current} bytes and is served: it cannot shrink while it is \
                 served; stop its server first"
            );
            return Err(Failure::new(Exit::InUse, text));
        }
        volume.resize(size_bytes).map_err(Failure::from)?;
        self.doors.resized(name);
        Ok(())
    }

    /// Volumes that another process may have, or that must still be reopened.
    pub(crate) fn away(&self) -> impl Iterator<Item = &Served> {
        self.volumes.iter().filter(|served| served.is_away())
    }

    /// Volumes that were given up, each with the reason.
    pub(crate) fn given_up(&self) -> Vec<String> {
        let reason = |served: &Served| match &*served.held.read() {
            Held::GivenUp(absent) => Some(format!("volume {}: {}", served.name(), absent.reason)),
            _ => None,
        };
        self.volumes.iter().filter_map(reason).collect()
    }

    /// Resumes the doors of all volumes that are not away. The others stay quiet, and their users
    /// wait.
    pub(crate) fn resume_doors(&self) {
        let away: Vec<&str> = self.away().map(Served::name).collect();
        self.doors.resume_but(&away);
    }

    /// Leaves the doors of volumes that are away as a killed process does, for the next server.
    pub(crate) fn leave_away(&self) {
        let away: Vec<&str> = self.away().map(Served::name).collect();
        if !away.is_empty() {
            self.doors.leave(&away);
        }
    }

    pub(crate) fn served(&self, name: &str) -> Result<&Served> {
        let served = self.volumes.iter().find(|served| served.name() == name);
        served.ok_or_else(|| {
            Failure::new(Exit::NotFound, format!("volume {name} is not served by this process"))
        })
    }

    /// Carries out a request; blocks until it is done.
    pub(crate) fn carry_out(
        &self,
        name: &str,
        request: ControlRequest,
    ) -> Result<serde_json::Value> {
        let served = self.served(name)?;
        Ok(match request {
            ControlRequest::Past(past) => {
                let undo = past.carry_out(&*served.volume()?)?.map(|undo| undo.snapshot);
                serde_json::json!(Changed { undo })
            }
            ControlRequest::Resize { size_bytes } => {
                self.resize(name, size_bytes)?;
                serde_json::json!(Resized { size_bytes })
            }
            ControlRequest::CollectGarbage { threshold } => {
                let report = served.volume()?.collect_garbage(threshold)?;
                let (moved_bytes, moved_segments) = (report.moved_bytes, report.moved_segments);
                serde_json::json!(Collected { moved_bytes, moved_segments })
            }
            ControlRequest::AddDoor(plan) => serde_json::json!(self.add_door(served, plan)?),
            ControlRequest::RemoveDoor { address } => {
                let plan = self.doors.remove(name, &address)?;
                served
                    .added
                    .as_ref()
                    .map_or(Ok(()), |added| added.forget(&plan.reopened_at(&address)))?;
                serde_json::json!(DoorRemoved { removed: address })
            }
            ControlRequest::HandOff(wanted) => self.order_hand_off(wanted)?,
        })
    }

    fn add_door(&self, served: &Served, plan: DoorPlan) -> Result<DoorAdded> {
        if self.is_handing_off.load(Ordering::Acquire) {
            return Err(Failure::new(
                Exit::InUse,
                "a hand-off is in progress; add the door afterwards",
            ));
        }
        // A door to a volume that is not open would only accept requests and let them wait.
        drop(served.volume()?);
        let opened = self.doors.open(plan.clone(), &[served.as_shown()])?;
        let (kind, address) = opened.told(served.name());
        let plan = plan.reopened_at(&address);
        if let Some(Err(failure)) = served.added.as_ref().map(|added| added.note(&plan)) {
            // Otherwise, users of a door that does not return after a crash could hang.
            self.doors.remove(served.name(), &address)?;
            return Err(failure);
        }
        Ok(DoorAdded { door: kind.to_owned(), address })
    }

    /// Opens doors that were added to a server that died. A door that cannot be opened does not
    /// keep the others from serving.
    pub(crate) fn open_added_doors(&self, of_serve: &[DoorPlan]) {
        for served in &self.volumes {
            let left = served.added.iter().flat_map(|added| added.left(of_serve));
            for plan in left {
                tracing::info!(volume = served.name(), "reopening a door that was added: {plan}");
                if let Err(failure) = self.doors.open(plan.clone(), &[served.as_shown()]) {
                    tracing::error!(
                        volume = served.name(),
                        "cannot reopen the door {plan}: {failure}"
                    );
                }
            }
        }
    }

    /// The doors were closed cleanly, so none of the remaining ones returns by itself.
    pub(crate) fn forget_added_doors(&self) {
        let here = self.volumes.iter().filter(|served| !served.is_away());
        here.filter_map(|served| served.added.as_ref()).for_each(Added::forget_all);
    }

    /// Asks the serving thread to hand everything over, and waits for the result.
    fn order_hand_off(&self, wanted: HandOff) -> Result<serde_json::Value> {
        if self.is_handing_off.swap(true, Ordering::AcqRel) {
            return Err(Failure::new(Exit::InUse, "another hand-off is in progress; wait for it"));
        }
        let (answer, hear) = sync_channel(1);
        let ending = || Failure::new(Exit::Unavailable, "the process is stopping");
        let outcome = match (self.hand_off)(Asked { wanted, answer }) {
            true => hear.recv().unwrap_or_else(|_| Err(ending())),
            false => Err(ending()),
        };
        if outcome.is_err() {
            self.is_handing_off.store(false, Ordering::Release);
        }
        outcome.map(|done| serde_json::json!(done))
    }

    /// Call this about once per second. It notes what the store has, for a start after a crash that
    /// may find an older store.
    pub(crate) fn note_seen(&self) {
        self.volumes.iter().for_each(Served::note_seen);
    }

    /// Starts to collect the garbage of all volumes, with the threshold that they use by
    /// themselves.
    pub(crate) fn collect_all(&self) {
        for served in self.volumes.iter().filter(|served| served.journal_path.is_some()) {
            let Ok(volume) = served.volume() else { continue };
            let name = served.name().to_owned();
            let told = Box::new(move |outcome: sawmill_volume::Result<GcReport>| match outcome {
                Ok(report) => {
                    tracing::info!(
                        volume = name,
                        "garbage collected: {} bytes moved",
                        report.moved_bytes
                    )
                }
                Err(error) => tracing::warn!(volume = name, "garbage collection failed: {error}"),
            });
            if let Err(error) = volume.order_collection(self.gc_start, told) {
                tracing::warn!(volume = served.name(), "garbage collection failed: {error}");
            }
        }
    }

    /// Stops all volumes immediately. Accepted writes are in their journals.
    pub(crate) fn close_now(&self) {
        self.volumes
            .iter()
            .filter_map(|served| served.volume().ok())
            .for_each(|volume| volume.close_now());
    }

    /// Saves the read cache's index for the next start.
    pub(crate) fn save_cache(&self) {
        if let Some(cache) = &*self.cache.lock() {
            cache.save();
        }
    }
}

impl Cache {
    fn status(&self) -> CacheStatus {
        CacheStatus::new(self.path.display().to_string(), &self.cache.stats())
    }

    fn save(&self) {
        if let Err(error) = self.cache.save_index() {
            tracing::warn!(
                "cannot save the read cache's index ({error}); the cache starts empty next time"
            );
        }
    }
}
