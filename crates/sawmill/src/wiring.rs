//! Store, cache, volumes and doors put together: the only place that knows all of them.
//!
//! Invariants: whatever was opened is closed again when a later step fails; nothing here decides what a user
//! meant (that is the commands' work) or what a number means (that is `admin`).

use std::fs::DirBuilder;
use std::io;
use std::net::TcpListener;
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process;
use std::sync::Arc;
use std::time::{Duration, Instant};

use sawmill_device::layer::Meter;
use sawmill_format::volume_record::VolumeRecord;
use sawmill_frontend::nbd::{Export, Listen, NbdOptions, NbdServer};
use sawmill_store::{Client, ObjectStore, StoreOptions};
use sawmill_volume::cache::ReadCache;
use sawmill_volume::{GcReport, OpenOptions, RealWorld, Safety, Volume, World};

use crate::admin::order::{GcAnswer, Order};
use crate::admin::status::{
    CacheStatus, DoorStatus, HealthStatus, OperationStatus, ProcessStatus, StoreStatus, VolumeStatus,
    milliseconds,
};
use crate::admin::{Admin, Door, Subject};
use crate::config::{self, Places, VolumeAddress};
use crate::control;
use crate::exit::{Exit, Failure, Result};

/// How long a command that somebody waits for tries to reach a store.
const COMMAND_PATIENCE_S: u64 = 20;

/// Default caches that are tried in turn: one per serving process of this user.
const CACHES_MAX: u32 = 16;

/// Descriptors for the doors, the store's client and what a process has anyway.
const DESCRIPTORS_OF_PROCESS: u64 = 32;
/// Descriptors for a volume's files and for its requests to the store.
const DESCRIPTORS_OF_VOLUME: u64 = 16;

/// A store for a command that somebody waits for.
pub(crate) fn open_store(url: &str) -> Result<Arc<Client>> {
    let options = StoreOptions { deadline_s: COMMAND_PATIENCE_S, ..StoreOptions::default() };
    sawmill_store::open(url, options).map_err(Failure::from)
}

/// A volume's store and record.
pub(crate) fn find(address: &VolumeAddress) -> Result<(Arc<Client>, VolumeRecord)> {
    let store = open_store(&address.store_url)?;
    let record = sawmill_volume::find(&*store, &address.name)?;
    Ok((store, record))
}

/// Makes a folder, and those above it, for the user alone.
pub(crate) fn make_folder(path: &Path) -> Result<()> {
    let made = DirBuilder::new().recursive(true).mode(0o700).create(path);
    made.map_err(|error| Failure::io(format!("cannot make the folder {}", path.display()), &error))
}

/// Makes a volume's folder, and says in it of which store it is: a volume and its replica have one id.
pub(crate) fn make_volume_folder(path: &Path, store_url: &str) -> Result<()> {
    make_folder(path)?;
    let word = path.join(config::STORE_FILE);
    if word.exists() {
        return Ok(());
    }
    let written = std::fs::write(&word, store_url);
    written.map_err(|error| Failure::io(format!("cannot write {}", word.display()), &error))
}

/// The read cache to use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum CachePlan {
    /// Without one.
    None,
    /// This file or device, and no other.
    At(PathBuf),
    /// The user's cache, or the next one of its kind that no other process holds.
    Default(PathBuf),
}

/// What to serve and how.
pub(crate) struct Plan {
    pub(crate) volumes: Vec<VolumeAddress>,
    /// Where the journal of the volume with this id is to be, when not in its state folder.
    pub(crate) journal: JournalPlan,
    /// Everything else about opening a volume; its journal path is filled in per volume.
    pub(crate) options: OpenOptions,
    pub(crate) cache: CachePlan,
    pub(crate) cache_bytes: u64,
    pub(crate) nbd: NbdOptions,
    pub(crate) admin: Option<std::net::SocketAddr>,
}

/// Where journals are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum JournalPlan {
    /// In each volume's state folder.
    State,
    /// This file or device; there is one volume only.
    At(PathBuf),
    /// In this folder, named by the volumes' ids.
    Folder(PathBuf),
}

impl JournalPlan {
    /// The journal of one volume.
    pub(crate) fn path(&self, places: &Places, volume_id: &str, store_url: &str) -> Result<PathBuf> {
        match self {
            JournalPlan::State => Ok(places.volume_folder(volume_id, store_url)?.join("journal")),
            JournalPlan::At(path) => Ok(path.clone()),
            JournalPlan::Folder(folder) => Ok(folder.join(format!("{volume_id}.journal"))),
        }
    }
}

/// One open volume and what was used to open it.
pub(crate) struct Served {
    pub(crate) address: VolumeAddress,
    shown: String,
    pub(crate) volume: Arc<Volume>,
    meter: Arc<Meter<Arc<Volume>>>,
    store: Arc<Client>,
    journal_path: Option<PathBuf>,
}

impl Served {
    /// The export's name: the volume's, with the cut that is shown.
    pub(crate) fn name(&self) -> &str {
        &self.shown
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        // Nothing to a volume that was closed in order; the others keep what was accepted in their journal.
        self.volume.close_now();
    }
}

/// The read cache with the path it is at.
struct Cache {
    path: PathBuf,
    cache: Arc<ReadCache>,
}

/// A process that serves volumes. Fields are dropped in this order: first the doors, then what is behind.
pub(crate) struct Serving {
    pub(crate) nbd: NbdServer,
    pub(crate) volumes: Vec<Served>,
    cache: Option<Cache>,
    gc_start: f64,
    started: Instant,
}

/// Opens everything in a plan. Clients are let in once all of it is open.
pub(crate) fn serve(places: &Places, plan: Plan) -> Result<(Arc<Serving>, Admin)> {
    let started = Instant::now();
    claim_descriptors(plan.volumes.len())?;
    make_folder(&places.state_folder()?)?;
    // Asked before anything is attached: a wrong address shall not cost an epoch.
    check_free(&plan.nbd.listen, "--nbd")?;
    plan.admin.map_or(Ok(()), |address| check_free(&Listen::Tcp(address), "--admin"))?;
    let cache = open_cache(&plan.cache, plan.cache_bytes)?;
    let mut volumes: Vec<Served> = Vec::new();
    for address in &plan.volumes {
        let served = open_volume(places, &plan, address, &volumes, cache.as_ref())
            .map_err(|failure| failure.of_volume(&address.name))?;
        volumes.push(served);
    }
    let nbd = start_nbd(&plan.nbd, &volumes)?;
    let gc_start = plan.options.gc.start;
    let serving = Arc::new(Serving { nbd, volumes, cache, gc_start, started });
    let admin = start_admin(places, &serving, plan.admin)?;
    Ok((serving, admin))
}

/// Takes all the descriptors the hard limit allows, and refuses when that is too few to serve: a server that
/// cannot open its store would accept writes and never store them.
fn claim_descriptors(volumes: usize) -> Result<()> {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    // Best effort: where raising is forbidden, what there is has to do.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum });
    let wanted = DESCRIPTORS_OF_PROCESS + DESCRIPTORS_OF_VOLUME * volumes as u64;
    match getrlimit(Resource::Nofile).current {
        Some(allowed) if allowed < wanted => Err(Failure::new(
            Exit::Unavailable,
            format!(
                "this process may open {allowed} files; to serve {volumes} volume(s) it takes {wanted} and \
                 one for each connection; raise the limit: ulimit -n 4096, or LimitNOFILE= in the unit"
            ),
        )),
        _ => Ok(()),
    }
}

fn open_cache(plan: &CachePlan, cache_bytes: u64) -> Result<Option<Cache>> {
    let open = |path: PathBuf| match sawmill_volume::open_cache(&path, cache_bytes) {
        Ok(cache) => Ok(Some(Cache { path, cache })),
        Err(error) => Err(Failure::from(error)),
    };
    match plan {
        CachePlan::None => Ok(None),
        CachePlan::At(path) => open(path.clone()),
        CachePlan::Default(path) => {
            for number in 0..CACHES_MAX {
                let candidate =
                    if number == 0 { path.clone() } else { path.with_extension(number.to_string()) };
                match open(candidate) {
                    Err(failure) if failure.exit() == Exit::InUse => {}
                    other => return other,
                }
            }
            tracing::warn!("all {CACHES_MAX} caches at {} are in use; serving without one", path.display());
            Ok(None)
        }
    }
}

fn open_volume(
    places: &Places,
    plan: &Plan,
    address: &VolumeAddress,
    opened: &[Served],
    cache: Option<&Cache>,
) -> Result<Served> {
    let known = opened.iter().find(|served| served.address.store_url == address.store_url);
    let store = match known {
        Some(served) => Arc::clone(&served.store),
        None => sawmill_store::open(&address.store_url, StoreOptions::default())?,
    };
    let record = sawmill_volume::find(&*store, &address.name)?;
    let volume_id = record.volume_id.to_string();
    let folder = places.volume_folder(&volume_id, &address.store_url)?;
    make_volume_folder(&folder, &address.store_url)?;
    let journal_path = plan.journal.path(places, &volume_id, &address.store_url)?;
    let options = OpenOptions {
        journal_path: journal_path.clone(),
        cache: cache.map(|cache| Arc::clone(&cache.cache)),
        cut: address.cut.as_ref().map(|(_, cut)| cut.clone()),
        ..plan.options.clone()
    };
    let read_only = options.read_only;
    let dynamic: Arc<dyn ObjectStore> = store.clone();
    let volume = Volume::open(dynamic, &address.name, options)?;
    for step in &volume.recovery().steps {
        tracing::info!(volume = address.name, took = ?step.took, "recovery, {}: {}", step.name, step.detail);
    }
    Ok(Served {
        address: address.clone(),
        shown: address.shown(),
        meter: Arc::new(Meter::new(Arc::clone(&volume))),
        volume,
        store,
        journal_path: (!read_only).then_some(journal_path),
    })
}

fn start_nbd(options: &NbdOptions, volumes: &[Served]) -> Result<NbdServer> {
    if let Listen::Unix(path) = &options.listen
        && let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty())
    {
        make_folder(folder)?;
    }
    let nbd = NbdServer::start(options.clone())?;
    for served in volumes {
        let description = format!("{} on {}", served.name(), served.store.name());
        let device = Arc::clone(&served.meter) as Arc<dyn sawmill_device::BlockDevice>;
        nbd.add_export(Export { name: served.name().to_owned(), description, device })?;
    }
    Ok(nbd)
}

/// Fails when somebody listens where we want to. (Who comes in between is met when we listen.)
fn check_free(listen: &Listen, option: &str) -> Result<()> {
    let taken = match listen {
        Listen::Unix(path) => UnixStream::connect(path).is_ok(),
        Listen::Tcp(address) => {
            TcpListener::bind(address).is_err_and(|error| error.kind() == io::ErrorKind::AddrInUse)
        }
    };
    if !taken {
        return Ok(());
    }
    let text = format!("another process listens on {listen} already; give another address with {option}");
    Err(Failure::new(Exit::InUse, text))
}

fn start_admin(
    places: &Places,
    serving: &Arc<Serving>,
    loopback: Option<std::net::SocketAddr>,
) -> Result<Admin> {
    let mut doors: Vec<Door> = loopback.map(Door::Loopback).into_iter().collect();
    for served in &serving.volumes {
        let volume_id = served.volume.record().volume_id.to_string();
        let folder = places.volume_folder(&volume_id, &served.address.store_url)?;
        let socket = match served.journal_path {
            Some(_) => folder.join(control::WRITER_SOCKET),
            None => folder.join(control::reader_socket(process::id())),
        };
        doors.push(Door::Control { path: socket, volume: served.name().to_owned() });
    }
    // Weak, so that a forgotten connection cannot keep volumes open.
    let (told, waited, ordered) = (Arc::downgrade(serving), Arc::downgrade(serving), Arc::downgrade(serving));
    let ending = || Failure::new(Exit::Unavailable, "the process is about to end");
    let subject = Subject {
        status: Box::new(move |only| told.upgrade().map(|serving| serving.status(only)).unwrap_or_default()),
        wait: Box::new(move |name, safety, timeout| match waited.upgrade() {
            Some(serving) => serving.wait(name, safety, timeout),
            None => Err(ending()),
        }),
        order: Box::new(move |name, order| match ordered.upgrade() {
            Some(serving) => serving.carry_out(name, order),
            None => Err(ending()),
        }),
    };
    Admin::start(subject, doors)
}

impl Serving {
    /// The status document: of everything, or of one volume.
    pub(crate) fn status(&self, only: Option<&str>) -> ProcessStatus {
        let asked: Vec<&Served> =
            self.volumes.iter().filter(|served| only.is_none_or(|name| served.name() == name)).collect();
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
            volumes: asked.into_iter().map(|served| self.volume_status(served)).collect(),
            doors: vec![DoorStatus::nbd(self.nbd.address().to_string(), &self.nbd.metrics())],
            stores,
            cache: self.cache.as_ref().map(Cache::status),
        }
    }

    fn volume_status(&self, served: &Served) -> VolumeStatus {
        let record = served.volume.record();
        let clients = self.nbd.clients();
        let connected = clients.into_iter().filter(|client| client.export.as_deref() == Some(served.name()));
        let mut known = VolumeStatus::new(&served.volume.status());
        let meter = served.store.meter();
        if let ("serving", Some(since)) = (known.health.state.as_str(), meter.unavailable_since) {
            // The store's calls fail; the engine hears of it only when their retries are used up.
            let now = RealWorld::default().unix_ms();
            known.health = HealthStatus {
                state: "store_unavailable".into(),
                since_ms: Some(now.saturating_sub(since)),
                reason: meter.last_error.map(|(_, what)| what),
            };
        }
        VolumeStatus {
            store: served.address.store_url.clone(),
            uris: vec![self.nbd.uri(served.name())],
            clients: connected.map(|client| client.peer).collect(),
            journal_path: served.journal_path.as_ref().map(|path| path.display().to_string()),
            block_bytes: record.block_bytes,
            segment_bytes: record.segment_bytes,
            flush: record.flush_mode.to_string(),
            created_unix_ms: record.created_unix_ms,
            operations: served.meter.snapshot().operations.iter().map(OperationStatus::new).collect(),
            ..known
        }
    }

    /// Waits until everything that a volume has accepted is as safe as asked.
    pub(crate) fn wait(&self, name: &str, safety: Safety, timeout: Option<Duration>) -> Result<bool> {
        self.served(name)?.volume.wait(safety, timeout).map_err(Failure::from)
    }

    /// Grows a volume under its users. Clients that connect from now on see the new size.
    fn resize(&self, name: &str, size_bytes: u64) -> Result<()> {
        let volume = &self.served(name)?.volume;
        let current = volume.status().size_bytes;
        if size_bytes < current {
            let text = format!(
                "volume {name} has {current} bytes and is served: a disk does not shrink under its users; \
                 stop serving it first"
            );
            return Err(Failure::new(Exit::InUse, text));
        }
        volume.resize(size_bytes).map_err(Failure::from)
    }

    fn served(&self, name: &str) -> Result<&Served> {
        let served = self.volumes.iter().find(|served| served.name() == name);
        served.ok_or_else(|| {
            Failure::new(Exit::NotFound, format!("volume {name} is not served by this process"))
        })
    }

    /// Carries an order out; blocks until it is.
    fn carry_out(&self, name: &str, order: Order) -> Result<serde_json::Value> {
        let volume = &self.served(name)?.volume;
        match order {
            Order::Past(past) => {
                let undo = past.carry_out(volume)?.map(|undo| undo.snapshot);
                Ok(serde_json::json!({ "undo": undo }))
            }
            Order::Resize { size_bytes } => {
                self.resize(name, size_bytes)?;
                Ok(serde_json::json!({ "size_bytes": size_bytes }))
            }
            Order::CollectGarbage { threshold } => {
                let report = volume.collect_garbage(threshold)?;
                let (moved_bytes, moved_segments) = (report.moved_bytes, report.moved_segments);
                Ok(serde_json::json!(GcAnswer { moved_bytes, moved_segments }))
            }
        }
    }

    /// Begins to collect the garbage of all volumes, with the threshold they collect at by themselves.
    pub(crate) fn collect_all(&self) {
        for served in self.volumes.iter().filter(|served| served.journal_path.is_some()) {
            let name = served.name().to_owned();
            let told = Box::new(move |outcome: sawmill_volume::Result<GcReport>| match outcome {
                Ok(report) => tracing::info!(volume = name, "collected: {} bytes moved", report.moved_bytes),
                Err(error) => tracing::warn!(volume = name, "not collected: {error}"),
            });
            if let Err(error) = served.volume.order_collection(self.gc_start, told) {
                tracing::warn!(volume = served.name(), "not collected: {error}");
            }
        }
    }

    /// Stops all volumes at once. What was accepted is in their journals.
    pub(crate) fn close_now(&self) {
        self.volumes.iter().for_each(|served| served.volume.close_now());
    }

    /// Keeps the read cache's index for the next start.
    pub(crate) fn save_cache(&self) {
        if let Some(cache) = &self.cache {
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
            tracing::warn!("the read cache's index was not saved ({error}); the cache will start empty");
        }
    }
}
