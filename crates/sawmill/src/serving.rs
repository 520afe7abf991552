//! A process that serves volumes: its state, and the requests it carries out.
//!
//! Invariants: a volume is away only from a hand-off's switch (`handoff`) until it is open again;
//! until then its requests wait and changes are refused. A volume that can never be reopened is
//! given up: its requests fail. Not here: one volume (`served`), how everything is opened
//! (`wiring`), and what the numbers mean (`admin`).

mod added_doors;
mod served;
mod warming;

use std::collections::HashMap;
use std::path::PathBuf;
use std::process;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use sawmill_doors::{DoorPlan, Doors};
use sawmill_volume::cache::ReadCache;
use sawmill_volume::{GcReport, LoopThreads, RealWorld, Safety, World};

use crate::admin::status::{
    CacheStatus, DoorStatus, HealthStatus, OperationStatus, ProcessStatus, StoreStatus, VolumeDoor,
    VolumeStatus, VolumeThreadsStatus, milliseconds,
};
use crate::control::protocol::{
    AddDoorReply, BegunReply, ChangeReply, CollectReply, ControlRequest, HandOff, RemoveDoorReply,
    ResizeReply,
};
use crate::handoff::HandOffRequest;
use crate::link::end_report::ReportSource;
use crate::plan::ServePlan;
use crate::program::mount_holder;
use added_doors::AddedDoors;
use sawmill_console::exit::{Exit, Failure, Result};
pub(crate) use served::ServedVolume;

/// The read cache and its path.
#[derive(Clone)]
pub(crate) struct Cache {
    pub(crate) path: PathBuf,
    pub(crate) cache: Arc<ReadCache>,
}

/// Asks the serving thread for a hand-off. Returns false if it no longer listens.
pub(crate) type HandOffNotifier = Box<dyn Fn(HandOffRequest) -> bool + Send + Sync>;

/// A process that serves volumes. Fields are dropped in this order: first the doors, then what is
/// behind them.
pub(crate) struct ServeProcess {
    pub(crate) doors: Doors,
    pub(crate) volumes: Vec<ServedVolume>,
    pub(crate) cache: Mutex<Option<Cache>>,
    /// The threads that the volumes share.
    loop_threads: Arc<LoopThreads>,
    gc_start: f64,
    started: Instant,
    hand_off: HandOffNotifier,
    /// Held for a step of warming the cache, by the URL of the store that it asks.
    warm_turns: HashMap<String, Mutex<()>>,
    /// A hand-off is in progress.
    is_handing_off: AtomicBool,
    /// Reports the status of links, if the volumes are exported over some.
    link: OnceLock<ReportSource>,
}

impl ServeProcess {
    /// Without doors yet.
    pub(crate) fn new(
        volumes: Vec<ServedVolume>,
        cache: Option<Cache>,
        plan: &ServePlan,
        started: Instant,
        hand_off: HandOffNotifier,
    ) -> Self {
        let (doors, cache) = (Doors::new(plan.nbd.clone(), Some(mount_holder)), Mutex::new(cache));
        let (loop_threads, gc_start) = (plan.options.loop_threads.clone(), plan.options.gc.start);
        let urls = volumes.iter().map(|served| served.address.store_url.clone());
        let warm_turns = urls.map(|url| (url, Mutex::default())).collect();
        let (is_handing_off, link) = (AtomicBool::new(false), OnceLock::new());
        ServeProcess {
            doors,
            volumes,
            cache,
            loop_threads,
            gc_start,
            started,
            hand_off,
            warm_turns,
            is_handing_off,
            link,
        }
    }

    /// The volumes are exported over a link too; the status includes it from now on.
    pub(crate) fn set_link_report(&self, report_source: ReportSource) {
        // A process is one end at most.
        let _ = self.link.set(report_source);
    }

    /// The status document: of the whole process, or of one volume.
    pub(crate) fn status(&self, only: Option<&str>) -> ProcessStatus {
        let selected_volumes: Vec<&ServedVolume> = self
            .volumes
            .iter()
            .filter(|served| only.is_none_or(|name| served.name() == name))
            .collect();
        let mut stores: Vec<StoreStatus> = Vec::new();
        for served in &selected_volumes {
            let url = &served.address.store_url;
            if !stores.iter().any(|store| store.url == *url) {
                stores.push(StoreStatus::new(url, &served.store.meter()));
            }
        }
        ProcessStatus {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: process::id(),
            uptime_ms: milliseconds(self.started.elapsed()),
            handing_over: selected_volumes.iter().any(|served| self.is_at_another(served)),
            volumes: selected_volumes
                .into_iter()
                // Left out, so that a client asks again (`handing_over`) and acts on no old
                // numbers.
                .filter(|served| !self.is_at_another(served))
                .map(|served| self.volume_status(served))
                .collect(),
            doors: DoorStatus::of_all(&self.doors),
            nbd_memory: Some(self.doors.nbd_memory().into()),
            volume_threads: Some(VolumeThreadsStatus::new(self.loop_threads.counts())),
            stores,
            cache: self.cache.lock().as_ref().map(Cache::status),
            link: self.link.get().map(|report_source| report_source()),
        }
    }

    /// Whether a volume is between two processes, or already with the next one.
    fn is_at_another(&self, volume: &ServedVolume) -> bool {
        self.is_handing_off.load(Ordering::Acquire) && volume.is_away()
    }

    fn volume_status(&self, volume: &ServedVolume) -> VolumeStatus {
        let mut known = volume.known();
        let meter = volume.store.meter();
        if let ("serving", Some(since)) = (known.health.state.as_str(), meter.unavailable_since) {
            // The store's calls fail; the engine learns that only when their retries are used up.
            let now = RealWorld::default().unix_ms();
            known.health = HealthStatus {
                state: "store_unavailable".into(),
                since_ms: Some(now.saturating_sub(since)),
                reason: meter.last_error.map(|(_, what)| what),
            };
        }
        let clients = self.doors.peers(volume.name());
        let addresses = self.doors.addresses(volume.name());
        VolumeStatus {
            store: volume.address.store_url.clone(),
            uris: addresses.iter().map(|(_, address)| address.clone()).collect(),
            doors: addresses
                .into_iter()
                .map(|(kind, address)| VolumeDoor { kind: kind.to_owned(), address })
                .collect(),
            clients,
            journal_path: volume.journal_path.as_ref().map(|path| path.display().to_string()),
            operations: volume
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
        // After the resize is durable: clients may write beyond the old end as soon as they know.
        self.doors.resized(name);
        Ok(())
    }

    /// Volumes that another process may have, or that must still be reopened.
    pub(crate) fn away(&self) -> impl Iterator<Item = &ServedVolume> {
        self.volumes.iter().filter(|served| served.is_away())
    }

    /// Volumes that were given up, each with the reason.
    pub(crate) fn given_up(&self) -> Vec<String> {
        self.volumes.iter().filter_map(ServedVolume::given_up).collect()
    }

    /// Resumes the doors of all volumes that are not away. The others stay quiet, and their users
    /// wait.
    pub(crate) fn resume_doors(&self) {
        let away: Vec<&str> = self.away().map(ServedVolume::name).collect();
        self.doors.resume_but(&away);
    }

    /// Leaves the doors of volumes that are away as a killed process does, for the next server.
    pub(crate) fn leave_away(&self) {
        let away: Vec<&str> = self.away().map(ServedVolume::name).collect();
        if !away.is_empty() {
            self.doors.leave(&away);
        }
    }

    pub(crate) fn served(&self, name: &str) -> Result<&ServedVolume> {
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
        is_wanted: &dyn Fn() -> bool,
    ) -> Result<serde_json::Value> {
        let served = self.served(name)?;
        Ok(match request {
            ControlRequest::Past(past) => {
                let undo = past.carry_out(&*served.volume()?)?.map(|undo| undo.snapshot);
                serde_json::json!(ChangeReply { undo })
            }
            ControlRequest::Resize { size_bytes } => {
                self.resize(name, size_bytes)?;
                serde_json::json!(ResizeReply { size_bytes })
            }
            ControlRequest::CollectGarbage { threshold } => {
                let report = served.volume()?.collect_garbage(threshold)?;
                let (moved_bytes, moved_segments) = (report.moved_bytes, report.moved_segments);
                serde_json::json!(CollectReply { moved_bytes, moved_segments })
            }
            ControlRequest::AddDoor(plan) => serde_json::json!(self.add_door(served, plan)?),
            ControlRequest::RemoveDoor { address } => {
                // The file changes last: a crash in between brings back a door without users, and
                // loses none.
                let plan = self.doors.remove(name, &address)?;
                served.added_doors.as_ref().map_or(Ok(()), |added| added.forget(&plan))?;
                serde_json::json!(RemoveDoorReply { removed: address })
            }
            ControlRequest::HandOff(hand_off) => self.begin_hand_off(hand_off)?,
            ControlRequest::WarmRoom => serde_json::json!(Self::warm_room(&*served.volume()?)?),
            ControlRequest::Warm(step) => {
                serde_json::json!(self.warm_now(served, &step, is_wanted)?)
            }
            ControlRequest::BeginRecording { time_max } => {
                let recording = served.volume()?.begin_recording(time_max)?;
                serde_json::json!(BegunReply { recording })
            }
            ControlRequest::EndRecording { recording } => {
                serde_json::json!(Self::end_recording(&*served.volume()?, recording)?)
            }
        })
    }

    fn add_door(&self, volume: &ServedVolume, plan: DoorPlan) -> Result<AddDoorReply> {
        if self.is_handing_off.load(Ordering::Acquire) {
            return Err(Failure::new(
                Exit::InUse,
                "a hand-off is in progress; add the door afterwards",
            ));
        }
        // A door to a volume that is not open would only accept requests and let them wait.
        drop(volume.volume()?);
        let opened = self.doors.open(plan.clone(), &[volume.door_volume()])?;
        let (kind, address) = opened.address_of(volume.name());
        let plan = plan.reopened_at(&address);
        if let Some(Err(failure)) = volume.added_doors.as_ref().map(|added| added.remember(&plan)) {
            // Otherwise, users of a door that does not return after a crash could hang.
            self.doors.remove(volume.name(), &address)?;
            return Err(failure);
        }
        Ok(AddDoorReply { door: kind.to_owned(), address })
    }

    /// Refuses to serve a volume without a door that has older writes for it.
    pub(crate) fn require_older_writes_first(&self, of_serve: &[DoorPlan]) -> Result<()> {
        for served in &self.volumes {
            let left = served.added_doors.iter().flat_map(|added| added.left(of_serve));
            let plans: Vec<DoorPlan> = of_serve.iter().cloned().chain(left).collect();
            sawmill_doors::require_older_writes_first(&plans, &served.door_volume())?;
        }
        Ok(())
    }

    /// Opens doors that were added to a server that died. A door that cannot be opened does not
    /// keep the others from serving.
    pub(crate) fn open_added_doors(&self, of_serve: &[DoorPlan]) {
        for served in &self.volumes {
            let left = served.added_doors.iter().flat_map(|added| added.left(of_serve));
            for plan in left {
                tracing::info!(volume = served.name(), "reopening a door that was added: {plan}");
                if let Err(failure) = self.doors.open(plan.clone(), &[served.door_volume()]) {
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
        let open_volumes = self.volumes.iter().filter(|served| !served.is_away());
        open_volumes
            .filter_map(|served| served.added_doors.as_ref())
            .for_each(AddedDoors::forget_all);
    }

    /// Asks the serving thread to hand everything over, and waits for the result.
    fn begin_hand_off(&self, hand_off: HandOff) -> Result<serde_json::Value> {
        if self.is_handing_off.swap(true, Ordering::AcqRel) {
            return Err(Failure::new(Exit::InUse, "another hand-off is in progress; wait for it"));
        }
        let (answer, receiver) = sync_channel(1);
        let ending = || Failure::new(Exit::Unavailable, "the process is stopping");
        let outcome = match (self.hand_off)(HandOffRequest { hand_off, answer }) {
            true => receiver.recv().unwrap_or_else(|_| Err(ending())),
            false => Err(ending()),
        };
        // It stays set after a success: the volumes belong to another process for good.
        if outcome.is_err() {
            self.is_handing_off.store(false, Ordering::Release);
        }
        outcome.map(|done| serde_json::json!(done))
    }

    /// Call this about once per second. It remembers what the store has, for a start after a crash
    /// that may find an older store.
    pub(crate) fn remember_seen(&self) {
        self.volumes.iter().for_each(ServedVolume::remember_seen);
    }

    /// Starts to collect the garbage of all volumes, with the threshold that they use by
    /// themselves.
    pub(crate) fn collect_all(&self) {
        // A reader must not change what its writer has stored.
        for served in self.volumes.iter().filter(|served| served.journal_path.is_some()) {
            let Ok(volume) = served.volume() else { continue };
            let name = served.name().to_owned();
            let logger = Box::new(move |outcome: sawmill_volume::Result<GcReport>| match outcome {
                Ok(report) => {
                    tracing::info!(
                        volume = name,
                        "garbage collected: {} bytes moved",
                        report.moved_bytes
                    )
                }
                Err(error) => tracing::warn!(volume = name, "garbage collection failed: {error}"),
            });
            if let Err(error) = volume.request_collection(self.gc_start, logger) {
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
