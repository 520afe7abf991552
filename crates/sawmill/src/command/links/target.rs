//! `sawmill target`: exports volumes, files and disks to other machines over a link.
//!
//! Invariants: exports appear when all devices are open. A device is closed when no connection uses
//! it any more. What a volume accepted is as safe as with `serve`. Not here: who may open what, and
//! the packets (`sawmill-link`), opening volumes (`wiring`).

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::Duration;

use clap::Args;
use sawmill_device::layer::ReadOnly;
use sawmill_device::{BlockDevice, MemoryDevice, NullDevice};
use sawmill_link::Unpacker;
use sawmill_link::clock::SteadyClock;
use sawmill_link::session::{Security, unguessable};
use sawmill_link::target::{Machine, Target, TargetOptions, read_machines};
use sawmill_link::threads::Listener;
use sawmill_sys::FileLock;
use serde::Serialize;

use crate::admin::Admin;
use crate::command::Context;
use crate::command::disks::serve::{Hangup, ServeEvent, close, forward_signals};
use crate::command::opening::{OpenArguments, Tuning};
use crate::config::{Paths, VolumeAddress, check_name};
use crate::daemon::{self, print_event};
use crate::file_device::{FileAccess, FileDevice};
use crate::handoff::HandOffRequest;
use crate::link::end_report::{ConnectionReport, EndReport, ReportSource, StatusListener};
use crate::link::location::list_of;
use crate::link::remote::own_name;
use crate::link::standing::StateFile;
use crate::link::{BusyPollOption, KeyOptions, ReceiversOption, key_failed};
use crate::listening::AdminOption;
use crate::plan::{CachePlan, ServePlan};
use crate::serving::ServeProcess;
use crate::{folders, wiring};
use sawmill_console::exit::{Exit, Failure, Result};
use sawmill_console::units::{exact_size, human_size, parse_size, parse_size_u32};

/// The smallest size of a device; every size is a multiple of it.
const BLOCK_BYTES: u64 = 512;
/// Interval of checks for missed signals.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Export volumes, files and disks to other machines, which attach them with `sawmill attach`.
///
/// Prints where it listens and what it exports when it is ready. SIGTERM or SIGINT ends all
/// connections, stores everything of the volumes and exits with 0; a second signal exits
/// immediately with 1. Attached initiators wait for the next target at the same address and resume
/// with it.
#[derive(Args)]
pub(in crate::command) struct Arguments {
    /// What to export: a volume as for `serve`, device:PATH (a block device or a file), memory:SIZE
    /// or null:SIZE (for testing). EXPORT= before it sets the name of the export.
    #[arg(value_name = "NAME", required = true)]
    names: Vec<String>,

    /// Addresses to listen on, separated by commas: udp:ADDRESS[:PORT], tcp:ADDRESS[:PORT],
    /// eth:INTERFACE, xdp:INTERFACE. udp:0.0.0.0 is every address of this machine.
    #[arg(long, value_name = "ADDRESSES")]
    listen: String,

    #[command(flatten)]
    key: KeyOptions,

    /// A key for each machine, instead of one for all: a file with a line NAME KEY EXPORTS for each
    /// machine that may attach. EXPORTS are names separated by commas, NAME:ro for read-only, or *.
    /// SIGHUP reloads the file.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["key_file", "insecure"])]
    machines: Option<PathBuf>,

    /// The name that `sawmill link find` shows. Default: the name of this machine.
    #[arg(long, value_name = "NAME")]
    name: Option<String>,

    /// Requests in flight per connection, at most.
    #[arg(long, alias = "slots", default_value_t = TargetOptions::default().places_max,
          value_name = "N", value_parser = clap::value_parser!(u16).range(1..=4096))]
    places_max: u16,

    /// Bytes per request: a connection takes --places-max times this memory. Whole pages, 4K to 4M.
    #[arg(long, alias = "slot-bytes", value_name = "SIZE", value_parser = parse_place_bytes,
          default_value = exact_size(TargetOptions::default().place_bytes_max.into()))]
    place_bytes_max: u32,

    /// Concurrent connections, at most.
    #[arg(long, value_name = "N",
          default_value_t = TargetOptions::default().connections_max as u32,
          value_parser = clap::value_parser!(u32).range(1..=4096))]
    connections: u32,

    #[command(flatten)]
    receivers: ReceiversOption,

    #[command(flatten)]
    busy_poll: BusyPollOption,

    #[command(flatten)]
    opening: OpenArguments,

    #[command(flatten)]
    admin: AdminOption,

    #[command(flatten)]
    tuning: Tuning,
}

fn parse_place_bytes(text: &str) -> Result<u32, String> {
    let bytes = parse_size_u32(text)?;
    let fits = sawmill_format::link::greeting::PLACE_BYTES_RANGE.contains(&bytes)
        && bytes.is_multiple_of(4096);
    fits.then_some(bytes).ok_or_else(|| format!("'{text}' is not whole pages from 4K to 4M"))
}

/// What `--json` prints, one object per line; volumes report their end as with `serve`.
#[derive(Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
enum Event<'a> {
    Ready {
        name: &'a str,
        listen: &'a [String],
        sealed: bool,
        exports: Vec<ExportDocument>,
        /// The dashboard's address.
        admin: Option<String>,
    },
    /// The file of machines was read again, with the number of connections that this ended, or why
    /// nothing changed.
    Reloaded {
        machines: usize,
        ended: usize,
        error: Option<String>,
    },
    Stopping,
}

/// One export.
#[derive(Serialize)]
struct ExportDocument {
    name: String,
    size_bytes: u64,
    read_only: bool,
}

/// Which machines may attach.
enum Trust {
    /// Every machine that has the key or, without a key, that reaches the network.
    All(Security),
    Machines(Vec<Machine>),
}

/// One device to export.
#[derive(Clone, Debug, PartialEq, Eq)]
enum ExportSource {
    Volume(VolumeAddress),
    Device(PathBuf),
    Memory(u64),
    Null(u64),
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct ExportRequest {
    export: String,
    source: ExportSource,
}

/// An open device, until its last connection has ended.
struct ExportDevice {
    name: String,
    device: Arc<dyn BlockDevice>,
    /// Answered writes survive this process, as long as the machine runs.
    outlives_process: bool,
    /// State that survives the process, for a writable device that also survives it.
    state: Option<StateFile>,
    _lock: Option<FileLock>,
}

pub(in crate::command) fn run(context: &Context, arguments: &Arguments) -> Result<Exit> {
    daemon::start();
    let addresses = list_of(&arguments.listen)?;
    // Whatever a user can get wrong comes before the first attach, which fences a writer.
    let trust = trust(arguments)?;
    let sealed = !matches!(trust, Trust::All(Security::Insecure));
    let named = read_names(&context.paths, arguments)?;
    let plan = plan(&context.paths, arguments, &named)?;
    let (sender, receiver) = sync_channel(crate::daemon::EVENTS_MAX);
    let started = Arc::new(AtomicBool::new(false));
    forward_signals(sender.clone(), Arc::clone(&started), Hangup::Reloads)?;
    // Before the volumes: a device that is in use must not cost them an epoch.
    let others = open_others(&context.paths, &named, arguments.opening.read_only)?;
    let (serving, admin) = wiring::serve(&context.paths, plan, Box::new(refuse_hand_off))?;
    let mut devices = all(&named, others, &serving)?;
    let name = arguments.name.clone().unwrap_or_else(own_name);
    let target = target(arguments, &name, trust, &mut devices)?;
    let listening = Listener::new(target, &addresses, arguments.receivers.count());
    let listener = listening.map_err(|error| Failure::io("cannot listen", &error))?;
    let report_source = report_source(&name, listener.target());
    serving.set_link_report(Arc::clone(&report_source));
    let status_listener = StatusListener::start(&context.paths.links_folder()?, report_source)?;
    started.store(true, Ordering::Release);
    announce(
        context,
        &ReadyReport { name: &name, sealed, listener: &listener, devices: &devices, admin: &admin },
    )?;
    daemon::notify(sd_notify::NotifyState::Ready);
    wait(&serving, &receiver, || {
        let event = reload(arguments, listener.target());
        if let Some(event) = event.filter(|_| context.json) {
            print_event(&event);
        }
    });
    daemon::notify(sd_notify::NotifyState::Stopping);
    if context.json {
        print_event(&Event::Stopping);
    }
    tracing::info!(
        "stopping: ending connections and storing everything; a second signal stops immediately"
    );
    drop(status_listener);
    // Before the volumes close: initiators must not get their errors, but wait for the next target.
    drop(listener);
    let outcome = close(context.console(), &serving, &sender, &receiver);
    drop(admin);
    outcome
}

fn refuse_hand_off(request: HandOffRequest) -> bool {
    let text =
        "a target cannot be handed off: stop it and start another; attached initiators wait for it";
    // The requester may be gone.
    let _ = request.answer.send(Err(Failure::new(Exit::Refused, text)));
    true
}

fn read_names(paths: &Paths, arguments: &Arguments) -> Result<Vec<ExportRequest>> {
    let mut all: Vec<ExportRequest> = Vec::new();
    for text in &arguments.names {
        let named = read_name(paths, text)?;
        if all.iter().any(|other| other.export == named.export) {
            return Err(Failure::usage(format!(
                "two exports would have the name {}; give one of them another name: EXPORT={text}",
                named.export
            )));
        }
        all.push(named);
    }
    Ok(all)
}

fn check_export(name: &str) -> Result<()> {
    check_name(name).map_err(|error| {
        Failure::caused(Exit::Usage, "the export name before '=' is invalid", error)
    })
}

fn read_name(paths: &Paths, text: &str) -> Result<ExportRequest> {
    let (export, text) = match text.split_once('=') {
        // The URL of a volume may have a `=` in its parameters, which begins no name.
        Some((export, rest)) if !export.contains([':', '/']) => {
            check_export(export)?;
            (Some(export.to_owned()), rest)
        }
        Some((export, rest))
            if ["memory:", "null:", "device:"].iter().any(|kind| rest.starts_with(kind)) =>
        {
            return Err(check_export(export).err().unwrap_or_else(|| Failure::usage(export)));
        }
        _ => (None, text),
    };
    let size = |size: &str| match parse_size(size) {
        Ok(bytes) if bytes > 0 && bytes.is_multiple_of(BLOCK_BYTES) => Ok(bytes),
        Ok(_) => Err(Failure::usage(format!(
            "'{text}': the size must be a multiple of {BLOCK_BYTES} bytes"
        ))),
        Err(message) => Err(Failure::usage(format!("'{text}': {message}"))),
    };
    let (usual, what) = match text.split_once(':') {
        Some(("memory", bytes)) => ("memory".to_owned(), ExportSource::Memory(size(bytes)?)),
        Some(("null", bytes)) => ("null".to_owned(), ExportSource::Null(size(bytes)?)),
        Some(("device", path)) => {
            let name =
                Path::new(path).file_name().and_then(|name| name.to_str()).unwrap_or_default();
            if export.is_none() && check_name(name).is_err() {
                return Err(Failure::usage(format!(
                    "'{text}' does not end in a valid export name; write EXPORT={text}"
                )));
            }
            (name.to_owned(), ExportSource::Device(path.into()))
        }
        _ => {
            let address = paths.resolve_cut(text)?;
            (address.display_name(), ExportSource::Volume(address))
        }
    };
    Ok(ExportRequest { export: export.unwrap_or(usual), source: what })
}

fn plan(paths: &Paths, arguments: &Arguments, requests: &[ExportRequest]) -> Result<ServePlan> {
    let volumes: Vec<VolumeAddress> = requests
        .iter()
        .filter_map(|named| match &named.source {
            ExportSource::Volume(address) => Some(address.clone()),
            _ => None,
        })
        .collect();
    let without = volumes.is_empty();
    let plan = arguments.opening.plan(paths, &arguments.tuning, volumes)?;
    // Files and disks do not use it, and a cache serves one process at a time.
    let cache = if without { CachePlan::None } else { plan.cache };
    Ok(ServePlan { admin: arguments.admin.address, cache, ..plan })
}

/// Opens the devices that are not volumes.
fn open_others(
    paths: &Paths,
    requests: &[ExportRequest],
    read_only: bool,
) -> Result<Vec<ExportDevice>> {
    let mut all = Vec::new();
    for ExportRequest { export, source: what } in requests {
        let (mut lock, mut state) = (None, None);
        let device: Arc<dyn BlockDevice> = match what {
            ExportSource::Volume(_) => continue,
            ExportSource::Device(path) if path.is_dir() => {
                let text = format!("{} is a folder; name a block device or a file", path.display());
                return Err(Failure::usage(text));
            }
            ExportSource::Device(path) => {
                if !read_only {
                    // Before its state is read: the target that held it before may still write
                    // there.
                    lock = Some(self::lock(path)?);
                    let folder = paths.exports_folder()?;
                    folders::make_folder(&folder)?;
                    state = Some(StateFile::of_device(&folder, path)?);
                }
                Arc::new(FileDevice::alone(path, FileAccess::of(read_only))?)
            }
            ExportSource::Memory(bytes) => Arc::new(MemoryDevice::new(*bytes)),
            ExportSource::Null(bytes) => Arc::new(NullDevice::new(*bytes)),
        };
        let device = if read_only { Arc::new(ReadOnly::new(device)) } else { device };
        let outlives_process = matches!(what, ExportSource::Device(_));
        all.push(ExportDevice {
            name: export.clone(),
            device,
            outlives_process,
            state,
            _lock: lock,
        });
    }
    Ok(all)
}

fn lock(path: &Path) -> Result<FileLock> {
    FileLock::take(path).map_err(|error| match error.kind() {
        std::io::ErrorKind::WouldBlock => {
            let text = format!(
                "{} is in use: it is mounted, or another process serves it",
                path.display()
            );
            Failure::new(Exit::InUse, text).caused_by(error)
        }
        _ => Failure::io(format!("cannot open {}", path.display()), &error),
    })
}

fn all(
    requests: &[ExportRequest],
    mut others: Vec<ExportDevice>,
    serving: &ServeProcess,
) -> Result<Vec<ExportDevice>> {
    for ExportRequest { export, source: what } in requests {
        let ExportSource::Volume(address) = what else { continue };
        // All volumes of the plan are open, under these names.
        if let Some(served) =
            serving.volumes.iter().find(|served| served.name() == address.display_name())
        {
            let device = served.door_volume().device;
            let status = served.volume()?.status();
            let state = (!status.read_only).then(|| {
                let id = status.volume_id.to_string();
                StateFile::of_volume(&served.folder, id, status.epoch, status.epoch_before)
            });
            others.push(ExportDevice {
                name: export.clone(),
                device,
                outlives_process: true,
                state,
                _lock: None,
            });
        }
    }
    Ok(others)
}

fn trust(arguments: &Arguments) -> Result<Trust> {
    match &arguments.machines {
        Some(path) => Ok(Trust::Machines(read_machines(path).map_err(key_failed)?)),
        None => Ok(Trust::All(arguments.key.security()?)),
    }
}

/// SIGHUP: the content of the file applies from now on; if it is invalid, nothing changes.
fn reload(arguments: &Arguments, target: &Target) -> Option<Event<'static>> {
    let Some(path) = &arguments.machines else {
        tracing::warn!(
            "got SIGHUP to reload the machines, but there is no file of machines: see --machines"
        );
        return None;
    };
    // A pipe cannot be read twice, and the loop that handles signals must not wait for one.
    let read = match std::fs::metadata(path) {
        Ok(about) if !about.is_file() => Err(format!("{} is not a regular file", path.display())),
        _ => read_machines(path).map_err(|error| error.to_string()),
    };
    let machines = match read {
        Ok(machines) => machines,
        Err(error) => {
            tracing::error!(
                "cannot reload the file of machines; the same machines may attach as before: \
                {error}"
            );
            return Some(Event::Reloaded { machines: 0, ended: 0, error: Some(error) });
        }
    };
    let names: Vec<_> = machines.iter().map(|machine| machine.name.clone()).collect();
    let ended = target.set_machines(machines)?;
    tracing::info!(
        "{} machines may attach: {}; {ended} connections ended",
        names.len(),
        names.join(", ")
    );
    Some(Event::Reloaded { machines: names.len(), ended, error: None })
}

fn target(
    arguments: &Arguments,
    name: &str,
    trust: Trust,
    devices: &mut [ExportDevice],
) -> Result<Arc<Target>> {
    let most = sawmill_format::link::greeting::NAME_BYTES_MAX;
    if name.is_empty() || name.len() > most {
        return Err(Failure::usage(format!(
            "'{name}' cannot be a target's name; use 1 to {most} bytes"
        )));
    }
    let options = TargetOptions {
        name: name.to_owned(),
        places_max: arguments.places_max,
        place_bytes_max: arguments.place_bytes_max,
        connections_max: arguments.connections as usize,
        spin_time_max: arguments.busy_poll.spin_time_max(),
        ..TargetOptions::default()
    };
    let boot = sawmill_sys::boot_id()
        .map_err(|error| Failure::io("cannot read the id of this boot", &error))?;
    let clock = Arc::new(SteadyClock);
    let target = match trust {
        Trust::All(security) => Target::new(options, security, clock, unguessable()),
        // A file without machines was refused.
        Trust::Machines(machines) => Target::for_machines(options, machines, clock, unguessable())
            .ok_or_else(|| Failure::usage("--machines lists no machine; add a line"))?,
    };
    for ExportDevice { name, device, outlives_process, state, .. } in devices {
        let device = Arc::new(Unpacker::new(Arc::clone(device)));
        match state.take() {
            Some(state) => {
                target.add_lasting(name, device, boot, state.take_up()?, Box::new(state))?
            }
            None => target.add(name, device, outlives_process.then_some(boot))?,
        }
    }
    Ok(target)
}

fn report_source(name: &str, target: &Arc<Target>) -> ReportSource {
    let (name, target) = (name.to_owned(), Arc::downgrade(target));
    Arc::new(move || {
        let status = target.upgrade().map(|target| target.status()).unwrap_or_default();
        let connections = status.iter().map(|status| ConnectionReport::new(status, &[]));
        EndReport {
            kind: "target".into(),
            name: name.clone(),
            pid: std::process::id(),
            connections: connections.collect(),
            cache: None,
        }
    })
}

/// What is printed when everything is ready.
struct ReadyReport<'a> {
    name: &'a str,
    sealed: bool,
    listener: &'a Listener,
    devices: &'a [ExportDevice],
    admin: &'a Admin,
}

fn announce(context: &Context, report: &ReadyReport<'_>) -> Result<()> {
    let ReadyReport { name, sealed, listener, devices, admin } = *report;
    let admin = admin.url();
    if let Some(url) = &admin {
        tracing::info!("dashboard at {url}");
    }
    let exports = devices.iter().map(|opened| {
        let geometry = opened.device.geometry();
        ExportDocument {
            name: opened.name.clone(),
            size_bytes: geometry.size_bytes,
            read_only: geometry.read_only,
        }
    });
    if !sealed {
        tracing::warn!(
            "without a key: anyone who can reach the network reads and writes the exports"
        );
    }
    let listen = listener.addresses();
    if context.json {
        print_event(&Event::Ready { name, listen, sealed, exports: exports.collect(), admin });
        return Ok(());
    }
    for export in exports {
        let kind = if export.read_only { ", read-only" } else { "" };
        let size = human_size(export.size_bytes);
        sawmill_console::output::line(&format!(
            "link:{}/{} ({size}{kind})",
            listen.join(","),
            export.name
        ))?;
    }
    Ok(())
}

/// Serves until the first signal that ends it.
fn wait(serving: &ServeProcess, receiver: &Receiver<ServeEvent>, reload: impl Fn()) {
    loop {
        match receiver.recv_timeout(LOOK_EVERY) {
            Ok(ServeEvent::Reload) => reload(),
            Ok(ServeEvent::Collect) => serving.collect_all(),
            Err(RecvTimeoutError::Timeout) => {}
            _ => return,
        }
        serving.remember_seen();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn paths() -> Paths {
        Paths { home: Some("/home/ada".into()), ..Paths::default() }
    }

    #[test]
    fn names_say_what_is_shown_and_under_which_name() {
        let read = |text: &str| read_name(&paths(), text).unwrap();
        assert_eq!(
            read("memory:1M"),
            ExportRequest { export: "memory".into(), source: ExportSource::Memory(1 << 20) }
        );
        assert_eq!(
            read("x=null:1T"),
            ExportRequest { export: "x".into(), source: ExportSource::Null(1 << 40) }
        );
        let disk = ExportSource::Device("/dev/sdb".into());
        assert_eq!(
            read("device:/dev/sdb"),
            ExportRequest { export: "sdb".into(), source: disk.clone() }
        );
        assert_eq!(read("db=device:/dev/sdb"), ExportRequest { export: "db".into(), source: disk });
        let volume = read("db=s3://bucket/disks/disk1");
        assert!(
            volume.export == "db"
                && matches!(volume.source, ExportSource::Volume(a) if a.name == "disk1")
        );
        assert_eq!(read("disk1").export, "disk1");
    }

    #[test]
    fn what_cannot_be_shown_is_refused_with_what_to_write() {
        for (text, word) in [
            ("memory:much", "'much'"),
            ("a b=null:1M", "'a b'"),
            ("device:/", "EXPORT="),
            ("a/b", "file:///"),
        ] {
            let message = read_name(&paths(), text).unwrap_err().to_string();
            assert!(message.contains(word), "{text}: {message}");
        }
    }
}
