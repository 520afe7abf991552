//! Puts store, cache, volumes and doors together: the only place that knows all of them.
//!
//! Invariants: what was opened is closed again when a later step fails. Nothing here decides what a
//! user meant (the commands do) or what a number means (`admin` does).
//!
//! Not here: making a plan (`command`), what a serving process does (`serving`), attaching for one
//! command (`attach`).

use std::path::{Path, PathBuf};
use std::process;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;

use parking_lot::Mutex;
use sawmill_doors::DoorPlan;
use sawmill_doors::listening::check_free;
use sawmill_format::ids::VolumeId;
use sawmill_format::volume_record::VolumeRecord;
use sawmill_frontend::nbd::Listen;
use sawmill_store::{Client, ObjectStore, StoreOptions};
use sawmill_volume::{OpenOptions, Volume, limits};

use crate::admin::{Admin, Callbacks, ListenAddress};
use crate::config::{Paths, VolumeAddress};
use crate::control;
use crate::folders::{make_folder, make_volume_folder};
use crate::memory;
use crate::plan::{CachePlan, ServePlan};
use crate::seen;
use crate::serving::{Cache, HandOffNotifier, ServeProcess, ServedVolume};
use crate::sizes;
use sawmill_console::exit::{Exit, Failure, Result};

/// How long a command that a user waits for tries to reach a store.
const COMMAND_S_MAX: u64 = 20;

/// Default caches to try in turn: one for each serving process of this user.
const CACHES_MAX: u32 = 16;

/// Descriptors for the doors, the store's client and the process itself.
const DESCRIPTORS_OF_PROCESS: u64 = 32;
/// Descriptors for a volume's files and for its requests to the store.
const DESCRIPTORS_OF_VOLUME: u64 = 16;

/// Volumes that are being opened at the same time: each waits for its store and its disk most of
/// the time.
const OPENERS_MAX: usize = 16;

/// A store for a command that a user waits for.
pub(crate) fn open_store(url: &str) -> Result<Arc<Client>> {
    let options = StoreOptions { deadline_s: COMMAND_S_MAX, ..StoreOptions::default() };
    sawmill_store::open(url, options).map_err(Failure::from)
}

/// A volume's store and record.
pub(crate) fn find(address: &VolumeAddress) -> Result<(Arc<Client>, VolumeRecord)> {
    let store = open_store(&address.store_url)?;
    let record = sawmill_volume::find(&*store, &address.name)?;
    Ok((store, record))
}

/// Opens everything in a plan. Clients can connect once all of it is open.
pub(crate) fn serve(
    paths: &Paths,
    plan: ServePlan,
    hand_off: HandOffNotifier,
) -> Result<(Arc<ServeProcess>, Admin)> {
    let started = Instant::now();
    claim_descriptors(plan.volumes.len())?;
    make_folder(&paths.state_folder()?)?;
    // Checked before anything is attached: a wrong address must not cost an epoch.
    plan.doors.iter().try_for_each(DoorPlan::check_free)?;
    plan.admin.map_or(Ok(()), |address| check_free(&Listen::Tcp(address), "--admin"))?;
    let (volumes, cache) = open_all(paths, &plan, &mut Stores::default())?;
    let serving = ServeProcess::new(volumes, cache, &plan, started, hand_off);
    let door_volumes: Vec<_> = serving.volumes.iter().map(ServedVolume::door_volume).collect();
    serving.require_older_writes_first(&plan.doors)?;
    serving.doors.open_all(&plan.doors, &door_volumes)?;
    // After those of the options, which win where both name the same door.
    serving.open_added_doors(&plan.doors);
    let serving = Arc::new(serving);
    // Last, because its sockets tell commands that the volumes are served.
    let admin = start_admin(&serving, plan.admin.map(ListenAddress::Loopback))?;
    if plan.boot_set_bytes > 0 {
        serving.fetch_boot_sets(plan.boot_set_bytes);
    }
    Ok((serving, admin))
}

/// Opens the volumes of a plan, several at a time, and the cache in front of them.
pub(crate) fn open_all(
    paths: &Paths,
    plan: &ServePlan,
    stores: &mut Stores,
) -> Result<(Vec<ServedVolume>, Option<Cache>)> {
    // Before the volumes: a cache that cannot be opened must not cost an epoch.
    let cache = open_cache(&plan.cache, plan.cache_bytes)?;
    let opened = |address: &VolumeAddress| {
        stores.open(&address.store_url).map_err(|failure| failure.of_volume(&address.name))
    };
    let of_volumes = plan.volumes.iter().map(opened).collect::<Result<Vec<_>>>()?;
    let mut plan = plan.clone();
    if of_volumes.len() > 1 && stores.require_fencing(&plan.options)? {
        // Each volume would probe it again.
        plan.options.store_is_probed = true;
    }
    let open_one = |index: usize| {
        let (address, store) = (&plan.volumes[index], Arc::clone(&of_volumes[index]));
        open_served(paths, &plan, address, store, cache.as_ref())
            .map_err(|failure| failure.of_volume(&address.name))
    };
    let volumes = in_parallel(of_volumes.len(), &open_one)?;
    let journals = volumes.iter().filter_map(|served| served.journal_path.as_deref());
    if let Some(taken) = sizes::taken(journals, cache.as_ref().map(|cache| &*cache.path)) {
        tracing::info!("{taken}");
    }
    Ok((volumes, cache))
}

/// Calls `act` with each number below `count`, several at a time. Returns the results in order, or
/// the first failure; after a failure nothing more begins.
fn in_parallel<T: Send>(count: usize, act: &(dyn Fn(usize) -> Result<T> + Sync)) -> Result<Vec<T>> {
    let (next, has_failed) = (AtomicUsize::new(0), AtomicBool::new(false));
    let results: Vec<_> = std::iter::repeat_with(|| Mutex::new(None)).take(count).collect();
    let work = || {
        while !has_failed.load(Ordering::Relaxed) {
            // In order, so that none is left out before a failure.
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(result) = results.get(index) else { break };
            let outcome = act(index);
            has_failed.fetch_or(outcome.is_err(), Ordering::Relaxed);
            *result.lock() = Some(outcome);
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..count.min(OPENERS_MAX) {
            // Without another thread, it takes longer.
            let _ = std::thread::Builder::new().spawn_scoped(scope, work);
        }
        work();
    });
    results.into_iter().map_while(Mutex::into_inner).collect()
}

/// The stores of a process that serves, each opened once.
#[derive(Default)]
pub(crate) struct Stores(Vec<(String, Arc<Client>)>);

impl Stores {
    /// The store behind a URL.
    pub(crate) fn open(&mut self, url: &str) -> Result<Arc<Client>> {
        // One client for each store: its limits hold for all volumes together.
        if let Some((_, store)) = self.0.iter().find(|(known_url, _)| known_url == url) {
            return Ok(Arc::clone(store));
        }
        let store = sawmill_store::open(url, StoreOptions::default())?;
        self.0.push((url.to_owned(), Arc::clone(&store)));
        Ok(store)
    }

    /// Checks that all that are open can keep two writers apart. Returns whether it did: readers
    /// need no such store, and `options` may say that a user knows, or that it was done.
    pub(crate) fn require_fencing(&self, options: &OpenOptions) -> Result<bool> {
        if options.read_only || options.no_fencing || options.store_is_probed {
            return Ok(false);
        }
        for (_, store) in &self.0 {
            sawmill_volume::replicate::require_fencing(&**store)?;
        }
        Ok(true)
    }
}

/// Raises the descriptor limit to the hard limit, and refuses if that is too low to serve: a server
/// that cannot open its store would accept writes and never store them.
pub(crate) fn claim_descriptors(volumes: usize) -> Result<()> {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    // Best effort: if raising is not allowed, the current limit must do.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum });
    let needed = DESCRIPTORS_OF_PROCESS + DESCRIPTORS_OF_VOLUME * volumes as u64;
    match getrlimit(Resource::Nofile).current {
        Some(allowed) if allowed < needed => Err(Failure::new(
            Exit::Unavailable,
            format!(
                "this process may open {allowed} files; to serve {volumes} volume(s) it takes \
                 {needed} and one for each connection; raise the limit: ulimit -n 4096, or \
                 LimitNOFILE= in the unit"
            ),
        )),
        _ => Ok(()),
    }
}

pub(crate) fn open_cache(plan: &CachePlan, cache_bytes: Option<u64>) -> Result<Option<Cache>> {
    let open = |path: PathBuf| {
        let bytes = sizes::cache_of(&path, cache_bytes);
        match sawmill_volume::open_cache(&path, bytes) {
            Ok(cache) => Ok(Some(Cache { path, cache })),
            Err(error) => Err(Failure::from(error)),
        }
    };
    match plan {
        CachePlan::None => Ok(None),
        CachePlan::At(path) => open(path.clone()),
        CachePlan::Default(path) => {
            // A cache belongs to one process: another server of this user may have the first ones.
            for number in 0..CACHES_MAX {
                let candidate = if number == 0 {
                    path.clone()
                } else {
                    path.with_extension(number.to_string())
                };
                match open(candidate) {
                    Err(failure) if failure.exit() == Exit::InUse => {}
                    other => return other,
                }
            }
            // Reads are slower and nothing is lost, which is better than not to serve.
            tracing::warn!(
                "all {CACHES_MAX} caches at {} are in use; serving without one",
                path.display()
            );
            Ok(None)
        }
    }
}

fn open_served(
    paths: &Paths,
    plan: &ServePlan,
    address: &VolumeAddress,
    store: Arc<Client>,
    cache: Option<&Cache>,
) -> Result<ServedVolume> {
    let record = sawmill_volume::find(&*store, &address.name)?;
    let volume_id = record.volume_id.to_string();
    let folder = paths.volume_folder(&volume_id, &address.store_url)?;
    make_volume_folder(&folder, &address.store_url)?;
    let journal_path = plan.journal.path(paths, &volume_id, &address.store_url)?;
    let least = limits::journal_bytes_min(record.segment_bytes);
    let journal_bytes = plan.journal_size.of(&journal_path, least);
    let journal_path = (!plan.options.read_only).then_some(journal_path);
    let local =
        Local { folder: &folder, journal_path: journal_path.as_deref(), journal_bytes, cache };
    let volume = open_volume(plan, address, &store, record.volume_id, &local)?;
    Ok(ServedVolume::new(address.clone(), volume, store, folder, journal_path))
}

/// The files of a volume on this machine.
pub(crate) struct Local<'a> {
    pub(crate) folder: &'a Path,
    /// `None` for a volume that is opened read-only.
    pub(crate) journal_path: Option<&'a Path>,
    /// For a new journal.
    pub(crate) journal_bytes: u64,
    pub(crate) cache: Option<&'a Cache>,
}

/// Opens a volume as planned, for the first time or again.
pub(crate) fn open_volume(
    plan: &ServePlan,
    address: &VolumeAddress,
    store: &Arc<Client>,
    volume_id: VolumeId,
    local: &Local<'_>,
) -> Result<Arc<Volume>> {
    let options = OpenOptions {
        staging_folder: staging_folder(plan, local.journal_path),
        journal_path: local.journal_path.map(Path::to_path_buf).unwrap_or_default(),
        journal_bytes: local.journal_bytes,
        cache: local.cache.map(|cache| Arc::clone(&cache.cache)),
        seen: seen::of(local.folder, volume_id),
        cut: address.cut.as_ref().map(|(_, cut)| cut.clone()),
        ..plan.options.clone()
    };
    let dynamic: Arc<dyn ObjectStore> = Arc::clone(store) as Arc<dyn ObjectStore>;
    let volume = Volume::open(dynamic, &address.name, options)?;
    // At once, so that an older store is recognized even if this process dies early (P210).
    seen::remember(local.folder, &volume);
    for taken in &volume.recovery().steps {
        tracing::info!(volume = address.name, took = ?taken.took, "recovery, {}: \
            {}", taken.step.name(), taken.detail);
    }
    Ok(volume)
}

/// The folder of the memory of the journal at this path.
pub(crate) fn staging_folder(plan: &ServePlan, journal_path: Option<&Path>) -> PathBuf {
    let configured_folder = &plan.options.staging_folder;
    match journal_path {
        Some(journal) if configured_folder.as_os_str().is_empty() => memory::folder(journal),
        _ => configured_folder.clone(),
    }
}

/// Starts the admin server: a control socket per volume, and a loopback address if requested.
pub(crate) fn start_admin(
    serving: &Arc<ServeProcess>,
    loopback: Option<ListenAddress>,
) -> Result<Admin> {
    let mut addresses: Vec<ListenAddress> = loopback.into_iter().collect();
    for served in &serving.volumes {
        // Readers' sockets have the process in their name, so no successor replaces them.
        control::sweep_dead_readers(&served.folder);
        let socket = match served.journal_path {
            Some(_) => served.folder.join(control::WRITER_SOCKET),
            None => served.folder.join(control::reader_socket(process::id())),
        };
        addresses.push(ListenAddress::Control { path: socket, volume: served.name().to_owned() });
    }
    // Weak, so that a forgotten connection cannot keep volumes open.
    let (status_serving, waiter_serving, order_serving) =
        (Arc::downgrade(serving), Arc::downgrade(serving), Arc::downgrade(serving));
    let ending = || Failure::new(Exit::Unavailable, "the process is about to end");
    let callbacks = Callbacks {
        status: Box::new(move |only| {
            status_serving.upgrade().map(|serving| serving.status(only)).unwrap_or_default()
        }),
        waiter: Box::new(move |name, safety, timeout, is_wanted| match waiter_serving.upgrade() {
            Some(serving) => serving.wait(name, safety, timeout, is_wanted),
            None => Err(ending()),
        }),
        carry_out: Box::new(move |name, request, is_wanted| match order_serving.upgrade() {
            Some(serving) => serving.carry_out(name, request, is_wanted),
            None => Err(ending()),
        }),
    };
    Admin::start(callbacks, addresses)
}
