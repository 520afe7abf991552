//! `sawmill attach`: a device of another machine, behind doors of this one.
//!
//! Invariants: doors open after the target has described the device. At the end, doors close first,
//! then the cache is flushed, then the link ends. A fenced process exits by itself. Not here: how a
//! link works (`sawmill-link`), what is reported of it (`link::end_report`).

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use parking_lot::Mutex;
use sawmill_device::{BlockDevice, BlockDeviceExt, Error, ErrorKind, Flags, Operation, Request};
use sawmill_doors::listening::check_free;
use sawmill_doors::{DoorPlan, DoorVolume, Doors};
use sawmill_frontend::nbd::Listen;
use sawmill_link::cache::{Cache, Options, Policy};
use sawmill_link::initiator::{Initiator, InitiatorOptions, OpenMode, RemoteDevice};
use serde::Serialize;
use signal_hook::consts::{SIGINT, SIGTERM};

use crate::admin::status::{DoorStatus, ProcessStatus, milliseconds};
use crate::admin::{Admin, Callbacks, ListenAddress};
use crate::command::Context;
use crate::command::disks::serve::REMIND_EVERY;
use crate::command::door_options::{DoorOptions, NbdShareOptions};
use crate::config::check_name;
use crate::daemon::{self, DoorDocument};
use crate::folders::make_folder;
use crate::link::end_report::{
    CacheReport, ConnectionReport, EndReport, ReportSource, StatusListener,
};
use crate::link::location::LinkLocation;
use crate::link::remote::{Remote, own_name};
use crate::link::{BusyPollOption, KeyOptions};
use crate::listening::AdminOption;
use crate::program::mount_holder;
use sawmill_console::exit::{Exit, Failure, Result};
use sawmill_console::units::{exact_duration, exact_size, human_size, parse_duration, parse_size};

/// Interval of cache ticks and link status checks.
const TICK_EVERY: Duration = Duration::from_secs(1);
/// Time for doors to close when they no longer wait for requests.
const CLOSE_TIME_MAX: Duration = Duration::from_secs(10);
/// Interval of checks that the target still reserves the device for us.
const PROBE_EVERY: Duration = Duration::from_secs(5);

/// Attach a remote export (see `sawmill target`) and expose it locally.
///
/// Prints one line per door when it is ready. Default: an NBD Unix socket. While the target is
/// unreachable, requests wait for up to --timeout. SIGTERM or SIGINT closes the doors, flushes, and
/// exits with 0. A second signal exits immediately with 1; writes in the cache that were not
/// flushed are then lost. When another initiator takes over, the command exits with 6.
#[derive(Args)]
pub(in crate::command) struct Arguments {
    /// The export: link:ADDRESS[,ADDRESS...]/EXPORT. An address is udp:HOST[:PORT],
    /// tcp:HOST[:PORT], eth:INTERFACE or xdp:INTERFACE. All addresses lead to one target and are
    /// used in parallel.
    #[arg(value_name = "LINK")]
    link: String,

    #[command(flatten)]
    key: KeyOptions,

    /// Name of the device on this machine. Default: the export's name.
    #[arg(long, value_name = "NAME")]
    name: Option<String>,

    /// Attach read-only. Other initiators may read too.
    #[arg(long)]
    read_only: bool,

    /// Take over: fence the current initiators. Their requests fail from then on.
    #[arg(long)]
    take_over: bool,

    /// Allow concurrent initiators (each must pass --shared); write coordination is yours. Not with
    /// --cache: a cache does not see the writes of others.
    #[arg(long, conflicts_with_all = ["take_over", "cache"])]
    shared: bool,

    /// Fail requests after this long without contact to the target, whole seconds; 0: never.
    #[arg(long, value_name = "DURATION", value_parser = parse_duration,
          default_value = exact_duration(seconds(InitiatorOptions::default().timeout_s)))]
    timeout: Duration,

    #[command(flatten)]
    busy_poll: BusyPollOption,

    #[command(flatten)]
    admin: AdminOption,

    #[command(flatten)]
    cache: CacheOptions,

    #[command(flatten)]
    doors: DoorOptions,

    #[command(flatten)]
    nbd: NbdShareOptions,
}

/// The cache in this machine's memory.
#[derive(Args)]
#[command(next_help_heading = "Cache")]
struct CacheOptions {
    /// Cache the device in memory. write-back answers writes immediately and sends them to the
    /// target later; if this process dies, unflushed writes are lost, as with a disk's volatile
    /// cache. The other policies lose nothing.
    #[arg(long, value_name = "POLICY")]
    cache: Option<PolicyName>,

    /// Memory for the cache.
    #[arg(
        long, value_name = "SIZE", value_parser = parse_size, requires = "cache",
        default_value = exact_size(Options::default().cache_bytes_max),
    )]
    cache_bytes: u64,

    /// Dirty bytes to hold at most; above this, writers wait. Default: a quarter of --cache-bytes.
    #[arg(long, value_name = "SIZE", value_parser = parse_size, requires = "cache")]
    dirty_bytes: Option<u64>,

    /// Interval at which dirty bytes are written back without a flush, whole seconds.
    #[arg(long, value_name = "DURATION", value_parser = parse_duration, requires = "cache",
          default_value = exact_duration(seconds(Options::default().flush_interval_s)))]
    flush_interval: Duration,
}

#[derive(Clone, Copy, ValueEnum)]
enum PolicyName {
    #[value(name = "write-back")]
    Back,
    #[value(name = "write-through")]
    Through,
    #[value(name = "write-around")]
    Around,
}

impl CacheOptions {
    /// The options. They are checked before anything is fenced, so that an impossible cache fences
    /// nothing.
    fn options(&self) -> Result<Option<Options>> {
        let Some(policy) = self.cache else { return Ok(None) };
        let cache_bytes = self.cache_bytes;
        let dirty_bytes = self.dirty_bytes.unwrap_or(cache_bytes / 4);
        if cache_bytes < Options::CACHE_BYTES_MIN {
            let least = human_size(Options::CACHE_BYTES_MIN);
            return Err(Failure::usage(format!(
                "--cache-bytes {cache_bytes} is too little; give {least} or more"
            )));
        }
        if !(Options::DIRTY_BYTES_MIN..=cache_bytes).contains(&dirty_bytes) {
            let least = human_size(Options::DIRTY_BYTES_MIN);
            let text = format!(
                "--dirty-bytes {dirty_bytes} must be from {least} to --cache-bytes ({cache_bytes})"
            );
            return Err(Failure::usage(text));
        }
        let policy = match policy {
            PolicyName::Back => Policy::WriteBack,
            PolicyName::Through => Policy::WriteThrough,
            PolicyName::Around => Policy::WriteAround,
        };
        Ok(Some(Options {
            policy,
            cache_bytes_max: cache_bytes,
            dirty_bytes_max: dirty_bytes,
            flush_interval_s: whole_seconds(self.flush_interval),
            ..Options::default()
        }))
    }
}

fn seconds(whole: u32) -> Duration {
    Duration::from_secs(whole.into())
}

/// Rounds up: a fraction must not become 0, which means something else.
fn whole_seconds(duration: Duration) -> u32 {
    u32::try_from(duration.as_millis().div_ceil(1000)).unwrap_or(u32::MAX)
}

/// What `--json` prints, one object per line.
#[derive(Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
enum Event<'a> {
    Ready {
        name: &'a str,
        link: String,
        size_bytes: u64,
        read_only: bool,
        /// The first of `doors`.
        uri: String,
        doors: Vec<DoorDocument>,
        admin: Option<String>,
    },
    Link {
        connected: bool,
        links_open: usize,
        links: usize,
    },
    Stopping,
    Stopped {
        flushed: bool,
    },
}

/// The device as its doors see it.
#[derive(Clone)]
enum ExposedDevice {
    Plain(Arc<RemoteDevice>),
    Cached(Arc<Cache<Arc<RemoteDevice>>>),
}

impl ExposedDevice {
    fn device(&self) -> Arc<dyn BlockDevice> {
        match self {
            ExposedDevice::Plain(device) => Arc::clone(device) as Arc<dyn BlockDevice>,
            ExposedDevice::Cached(cache) => Arc::clone(cache) as Arc<dyn BlockDevice>,
        }
    }

    fn cache_report(&self) -> Option<CacheReport> {
        match self {
            ExposedDevice::Plain(_) => None,
            ExposedDevice::Cached(cache) => Some(CacheReport::new(cache.counters())),
        }
    }
}

/// What the main thread receives.
enum AttachEvent {
    Signal,
    /// The doors are closed, and everything is flushed or the flush failed.
    Closed(Result<()>),
}

pub(in crate::command) fn run(context: &Context, arguments: &Arguments) -> Result<Exit> {
    daemon::start();
    let began = Instant::now();
    let location = LinkLocation::parse(&arguments.link)?;
    let export = location.export()?.to_owned();
    let name = name_of(arguments, &export)?;
    let folder = context.paths.links_folder()?.join(&name);
    let (sender, receiver) = sync_channel(crate::daemon::EVENTS_MAX);
    let security = arguments.key.security()?;
    let timeout_s = whole_seconds(arguments.timeout);
    let spin_time_max = arguments.busy_poll.spin_time_max();
    let options = InitiatorOptions {
        name: own_name(),
        timeout_s,
        spin_time_max,
        ..InitiatorOptions::default()
    };
    let plans = arguments.doors.plans_or(&folder.join("nbd.sock"));
    let cache = arguments.cache.options()?;
    // P91: before the open below, which may fence another initiator.
    check_addresses(&plans, arguments.admin.address)?;
    let remote = Remote::connect(&location, security, options)?;
    let Arguments { read_only, take_over, shared, .. } = *arguments;
    let device = Arc::new(remote.open(&export, OpenMode { read_only, take_over, shared })?);
    let exposed = match cache {
        Some(options) => {
            ExposedDevice::Cached(Arc::new(Cache::new(Arc::clone(&device), &options)?))
        }
        None => ExposedDevice::Plain(Arc::clone(&device)),
    };
    let doors = Arc::new(Doors::new(arguments.nbd.share(), Some(mount_holder)));
    let volume = DoorVolume {
        name: name.clone(),
        description: location.to_string(),
        device: exposed.device(),
        folder: folder.clone(),
        identity: location.to_string(),
        // A target may lose what was not flushed while no initiator is attached to learn of it.
        outlives_server: false,
        queues: None,
    };
    let to_main = sender.clone();
    daemon::on_signals(&[SIGTERM, SIGINT], move |_| to_main.send(AttachEvent::Signal).is_ok())?;
    make_folder(&folder)?;
    doors.open_all(&plans, &[volume])?;
    let report_source = report_source(&location, &remote, &exposed);
    let _status_listener =
        StatusListener::start(&context.paths.links_folder()?, Arc::clone(&report_source))?;
    let admin =
        arguments.admin.address.map(|at| admin(at, report_source, &doors, began)).transpose()?;
    let attachment =
        Attachment { json: context.json, name, location, remote, device, exposed, doors };
    attachment.announce(admin.as_ref())?;
    daemon::notify(sd_notify::NotifyState::Ready);
    let failure = attachment.handle_events(&receiver);
    daemon::notify(sd_notify::NotifyState::Stopping);
    attachment.end(failure, &sender, &receiver)
}

fn name_of(arguments: &Arguments, export: &str) -> Result<String> {
    match &arguments.name {
        Some(name) => check_name(name)
            .map(|()| name.clone())
            .map_err(|error| Failure::caused(Exit::Usage, "--name", error)),
        None => {
            let plain =
                |c: char| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '-' };
            let name: String = export.chars().map(plain).collect();
            check_name(&name).map_err(|error| {
                Failure::usage(format!(
                    "the export name '{export}' is not a valid local name; give one: --name NAME"
                ))
                .caused_by(error)
            })?;
            Ok(name)
        }
    }
}

/// Checked before anything is fenced, so that a door that cannot open fences nothing.
fn check_addresses(plans: &[DoorPlan], admin: Option<SocketAddr>) -> Result<()> {
    plans.iter().try_for_each(DoorPlan::check_free)?;
    admin.map_or(Ok(()), |address| Ok(check_free(&Listen::Tcp(address), "--admin")?))
}

fn admin(
    at: SocketAddr,
    report_source: ReportSource,
    doors: &Arc<Doors>,
    began: Instant,
) -> Result<Admin> {
    let doors = Arc::downgrade(doors);
    let status = move |_: Option<&str>| ProcessStatus {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        pid: std::process::id(),
        uptime_ms: milliseconds(began.elapsed()),
        nbd_memory: doors.upgrade().map(|doors| doors.nbd_memory().into()),
        doors: doors.upgrade().map(|doors| DoorStatus::of_all(&doors)).unwrap_or_default(),
        link: Some(report_source()),
        ..ProcessStatus::default()
    };
    let no_volume = || {
        Failure::usage("an attached device is not a volume: only its target knows what is stored")
    };
    let callbacks = Callbacks {
        status: Box::new(status),
        waiter: Box::new(move |_, _, _, _| Err(no_volume())),
        carry_out: Box::new(move |_, _, _| Err(no_volume())),
    };
    Admin::start(callbacks, vec![ListenAddress::Loopback(at)])
}

fn report_source(
    location: &LinkLocation,
    remote: &Remote,
    exposed: &ExposedDevice,
) -> ReportSource {
    // Weak, so that an open status connection does not keep the link open.
    let initiator = Arc::downgrade(remote.initiator());
    let (location, exposed) = (location.clone(), exposed.clone());
    Arc::new(move || {
        let connection = |initiator: Arc<Initiator>| {
            ConnectionReport::new(&initiator.status(), &location.addresses)
        };
        EndReport {
            kind: "attach".into(),
            name: location.to_string(),
            pid: std::process::id(),
            connections: initiator.upgrade().map(connection).into_iter().collect(),
            cache: exposed.cache_report(),
        }
    })
}

/// A device that is attached.
struct Attachment {
    json: bool,
    name: String,
    location: LinkLocation,
    doors: Arc<Doors>,
    exposed: ExposedDevice,
    device: Arc<RemoteDevice>,
    remote: Remote,
}

impl Attachment {
    fn announce(&self, admin: Option<&Admin>) -> Result<()> {
        let admin = admin.and_then(Admin::url);
        if let Some(url) = &admin {
            tracing::info!("dashboard at {url}");
        }
        let addresses = self.doors.addresses(&self.name);
        if !self.json {
            return addresses
                .iter()
                .try_for_each(|(_, address)| sawmill_console::output::line(address));
        }
        let geometry = self.exposed.device().geometry();
        let doors: Vec<_> =
            addresses.into_iter().map(|(kind, address)| DoorDocument { kind, address }).collect();
        self.emit(&Event::Ready {
            name: &self.name,
            link: self.location.to_string(),
            size_bytes: geometry.size_bytes,
            read_only: geometry.read_only,
            uri: doors.first().map(|door| door.address.clone()).unwrap_or_default(),
            doors,
            admin,
        });
        Ok(())
    }

    fn emit(&self, event: &Event<'_>) {
        if self.json {
            daemon::print_event(event);
        }
    }

    /// Serves until a signal, or until there is nothing left to serve: then returns why.
    fn handle_events(&self, receiver: &Receiver<AttachEvent>) -> Option<Failure> {
        let (mut previous, mut probed_at) = (None, Instant::now());
        let probe = Probe::default();
        loop {
            match receiver.recv_timeout(TICK_EVERY) {
                Err(RecvTimeoutError::Timeout) => {}
                _ => return None,
            }
            if let ExposedDevice::Cached(cache) = &self.exposed {
                cache.tick(Instant::now());
            }
            self.log_changes(&mut previous);
            if probed_at.elapsed() >= PROBE_EVERY {
                probed_at = Instant::now();
                // An idle initiator sends nothing, and would not learn that it was fenced.
                probe.request_list_of(&self.device);
            }
            if let Some(error) = self.remote.initiator().failure().or_else(|| probe.fenced()) {
                return Some(Failure::from(error).of_volume(&self.name));
            }
        }
    }

    fn log_changes(&self, previous: &mut Option<(bool, usize)>) {
        let status = self.remote.initiator().status();
        let open = status.links.iter().filter(|link| link.open && !link.silent).count();
        let now = (status.connected && open > 0, open);
        let links = self.location.addresses.len();
        if previous.replace(now) == Some(now) {
            return;
        }
        match now {
            (false, _) => tracing::warn!("{}: the target is unreachable; requests wait", self.name),
            (true, open) => tracing::info!("{}: {open} of {links} links carry requests", self.name),
        }
        self.emit(&Event::Link { connected: now.0, links_open: open, links });
    }

    /// Closes the doors, flushes, and ends the link; a second signal stops that immediately.
    fn end(
        self,
        failure: Option<Failure>,
        sender: &SyncSender<AttachEvent>,
        receiver: &Receiver<AttachEvent>,
    ) -> Result<Exit> {
        self.emit(&Event::Stopping);
        let (doors, exposed, sender) =
            (Arc::clone(&self.doors), self.exposed.clone(), sender.clone());
        // On a thread of its own: the main thread must get a second signal meanwhile.
        let close = move || {
            doors.stop();
            let device = exposed.device();
            let flushed = if device.geometry().read_only { Ok(()) } else { device.flush() };
            let _ = sender.send(AttachEvent::Closed(flushed.map_err(Failure::from)));
        };
        let started = std::thread::Builder::new().name("attach-close".into()).spawn(close);
        started.map_err(|error| {
            Failure::io("cannot start the thread that closes the doors", &error)
        })?;
        let outcome = loop {
            match receiver.recv_timeout(REMIND_EVERY) {
                Err(RecvTimeoutError::Timeout) => tracing::warn!(
                    "stopping: waiting for the target to answer requests and a flush; a second \
                     signal exits immediately, and unflushed writes are lost"
                ),
                outcome => break outcome,
            }
        };
        let flushed = match outcome {
            Ok(AttachEvent::Closed(flushed)) => flushed,
            Ok(AttachEvent::Signal) | Err(_) => {
                tracing::warn!("exiting immediately; unflushed writes are lost");
                // Requests that wait for the target fail now. Otherwise the process cannot exit
                // while the kernel holds one of its requests, even one of a thread that flushes a
                // device of ours.
                self.remote.initiator().close();
                self.doors.stop_now();
                let _ = receiver.recv_timeout(CLOSE_TIME_MAX);
                self.emit(&Event::Stopped { flushed: false });
                return Ok(Exit::Negative);
            }
        };
        self.emit(&Event::Stopped { flushed: flushed.is_ok() });
        match (failure, flushed) {
            (Some(failure), _) => Err(failure),
            (None, Ok(())) => Ok(Exit::Ok),
            (None, Err(failure)) => {
                let what = "the last flush failed; the writes before it may be lost";
                Err(Failure::caused(failure.exit(), format!("{}: {what}", self.name), failure))
            }
        }
    }
}

/// A check whose only relevant answer is that another initiator has the device now.
#[derive(Default)]
struct Probe(Arc<Mutex<ProbeState>>);

#[derive(Default)]
struct ProbeState {
    is_under_way: bool,
    fenced: Option<Error>,
}

impl Probe {
    fn request_list_of(&self, device: &RemoteDevice) {
        // One at a time: while the target is away, probes would pile up.
        if std::mem::replace(&mut self.0.lock().is_under_way, true) {
            return;
        }
        let state = Arc::clone(&self.0);
        device.submit(Request::bare(Operation::Prefetch, 0, 1, Flags::default(), move |outcome| {
            let mut state = state.lock();
            state.is_under_way = false;
            state.fenced = outcome.err().filter(|error| error.kind() == ErrorKind::Fenced);
        }));
    }

    fn fenced(&self) -> Option<Error> {
        self.0.lock().fenced.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_of_a_second_is_not_forever() {
        let seconds = [(0, 0), (1, 1), (1000, 1), (1001, 2), (60_000, 60)];
        for (ms, whole) in seconds {
            assert_eq!(whole_seconds(Duration::from_millis(ms)), whole);
        }
    }
}
