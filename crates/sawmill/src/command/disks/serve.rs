//! `sawmill serve`: opens volumes, serves them through doors, and closes them in order.
//!
//! The first SIGTERM or SIGINT stops accepting, lets requests finish, stores everything and writes
//! a checkpoint; a second one stops immediately.
//!
//! Invariant: however it ends, no accepted write is lost.
//!
//! Not here: opening (`wiring`, `opening`), the state of the process (`serving`), the steps of a
//! hand-off (`handoff`).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::Duration;

use clap::Args;
use rustix::process::{Pid, Signal, kill_process};
use serde::Serialize;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};
use signal_hook::low_level::emulate_default_handler;

use crate::admin::Admin;
use crate::admin::status::{HealthStatus, PositionsStatus, milliseconds};
use crate::command::Context;
use crate::command::door_options::{DoorOptions, NbdShareOptions};
use crate::command::opening::{OpenArguments, Tuning};
use crate::config::Paths;
use crate::daemon::{self, DoorDocument, print_event};
use crate::handoff::again::ReopenQueue;
use crate::handoff::predecessor::Predecessor;
use crate::handoff::{HandOffRequest, HandOffResult, successor};
use crate::listening::AdminOption;
use crate::plan::ServePlan;
use crate::seen;
use crate::serving::{ServeProcess, ServedVolume};
use crate::wiring;
use sawmill_console::Console;
use sawmill_console::exit::{Exit, Failure, Result};

/// Time to write what memory holds to the disk.
const LOG_TIME_MAX: Duration = Duration::from_secs(60);

/// Interval of attempts to reopen volumes that stayed closed after a hand-off was rolled back.
const RETRY_EVERY: Duration = Duration::from_millis(500);

/// Interval of health checks.
const HEALTH_EVERY: Duration = Duration::from_secs(1);

/// Interval at which a process that is ending reports what it waits for.
pub(in crate::command) const REMIND_EVERY: Duration = Duration::from_secs(5);

/// Serve volumes through doors (NBD, ublk, vhost-user, FUSE, BUSE) until SIGTERM.
///
/// Prints one line per volume and door when it is ready: an NBD URI, a device, a socket, a file.
/// Default: an NBD Unix socket (in the runtime folder). SIGTERM or SIGINT stops accepting, finishes
/// requests, stores everything and exits with 0. A second signal exits immediately with 1: no
/// accepted write is lost, but the newest ones are on this machine only. SIGUSR1 collects garbage
/// now.
#[derive(Args)]
pub(in crate::command) struct Arguments {
    /// Names in the default store, or URLs ending in the name. With --read-only also a past state:
    /// VOL@SNAPSHOT, VOL@2026-11-21T10:00:00Z, VOL@position:N.
    #[arg(value_name = "VOL", required = true)]
    volumes: Vec<String>,

    #[command(flatten)]
    opening: OpenArguments,

    #[command(flatten)]
    admin: AdminOption,

    /// Replace the process behind standard input: for `sawmill handoff` only.
    #[arg(long, hide = true)]
    take_over: bool,

    #[command(flatten)]
    doors: DoorOptions,

    #[command(flatten)]
    nbd: NbdShareOptions,

    #[command(flatten)]
    tuning: Tuning,
}

/// What `--json` prints, one object per line.
#[derive(Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
enum Event<'a> {
    Ready {
        volume: &'a str,
        /// The first of `doors`.
        uri: String,
        doors: Vec<DoorDocument>,
        epoch: u64,
        read_only: bool,
        admin: Option<String>,
        recovery: Vec<Step>,
    },
    Health {
        volume: &'a str,
        health: &'a HealthStatus,
    },
    Stopping,
    Stopped {
        volume: &'a str,
        everything_stored: bool,
        positions: PositionsStatus,
    },
}

#[derive(Serialize)]
struct Step {
    name: String,
    detail: String,
    took_ms: u64,
}

/// What the main thread receives.
pub(in crate::command) enum ServeEvent {
    Signal,
    /// SIGUSR1.
    Collect,
    /// SIGHUP, for commands that can reload something.
    Reload,
    /// Another process asks to take over.
    HandOff(HandOffRequest),
    /// All doors are closed and this volume is closed.
    Closed(usize, Result<()>),
}

pub(in crate::command) fn run(context: &Context, arguments: &Arguments) -> Result<Exit> {
    daemon::start();
    let plan = plan(&context.paths, arguments)?;
    let (sender, receiver) = sync_channel(daemon::EVENTS_MAX);
    let started = Arc::new(AtomicBool::new(false));
    forward_signals(sender.clone(), started.clone(), Hangup::Ends)?;
    let to_main = sender.clone();
    let notifier = Box::new(move |request| to_main.send(ServeEvent::HandOff(request)).is_ok());
    let (serving, admin) = match arguments.take_over {
        true => successor::take_over(&context.paths, plan.clone(), notifier)?,
        false => wiring::serve(&context.paths, plan.clone(), notifier)?,
    };
    started.store(true, Ordering::Release);
    announce(context.console(), &serving, &admin);
    daemon::notify(sd_notify::NotifyState::Ready);
    let again = ReopenQueue::new(&plan, &serving);
    match serve_on(context.console(), &serving, &again, &admin, &receiver) {
        ServeEnd::HandedOver(done) => {
            // Everything belongs to the successor: close, store and remove nothing here.
            admin.finish_answers();
            return match done.unheard {
                false => Ok(Exit::Ok),
                // The exit code makes a service manager start another server.
                true => Err(Failure::new(Exit::Unavailable, done.lost_doors.join("; "))),
            };
        }
        // No volume may come back while all of them are being closed.
        ServeEnd::Signal => again.end(),
    }
    daemon::notify(sd_notify::NotifyState::Stopping);
    if context.json {
        print_event(&Event::Stopping);
    }
    tracing::info!(
        "stopping: finishing requests and storing everything; a second signal stops immediately"
    );
    let outcome = close(context.console(), &serving, &sender, &receiver);
    // Kept until now, so that `info` and `wait` get answers while everything is being stored.
    drop(admin);
    outcome
}

fn plan(paths: &Paths, arguments: &Arguments) -> Result<ServePlan> {
    let volumes =
        arguments.volumes.iter().map(|text| paths.resolve_cut(text)).collect::<Result<Vec<_>>>()?;
    let doors = arguments.doors.plans_or(&paths.nbd_socket()?);
    doors.iter().try_for_each(|door| door.check(volumes.len()))?;
    let plan = arguments.opening.plan(paths, &arguments.tuning, volumes)?;
    Ok(ServePlan { doors, nbd: arguments.nbd.share(), admin: arguments.admin.address, ..plan })
}

/// What SIGHUP does to a process.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(in crate::command) enum Hangup {
    /// What it does to any program: it dies, as if killed.
    Ends,
    /// The process reads its files again.
    Reloads,
}

/// Forwards signals to the main loop, from the first moment on: a user who sees a door must be able
/// to request a clean end. While the process starts, a second signal kills it; accepted writes
/// survive that.
pub(in crate::command) fn forward_signals(
    sender: SyncSender<ServeEvent>,
    started: Arc<AtomicBool>,
    hangup: Hangup,
) -> Result<()> {
    let all: Vec<_> = [SIGTERM, SIGINT, SIGUSR1]
        .into_iter()
        .chain((hangup == Hangup::Reloads).then_some(SIGHUP))
        .collect();
    let mut ends = 0;
    daemon::on_signals(&all, move |signal| {
        let event = match signal {
            SIGUSR1 => ServeEvent::Collect,
            SIGHUP => ServeEvent::Reload,
            _ => {
                ends += 1;
                if !started.load(Ordering::Acquire) {
                    if ends > 1 {
                        let _ = emulate_default_handler(signal);
                    }
                    tracing::info!(
                        "got a signal while starting: stopping once started; a second signal stops \
                         immediately"
                    );
                }
                ServeEvent::Signal
            }
        };
        sender.send(event).is_ok()
    })
}

fn announce(console: Console, serving: &ServeProcess, admin: &Admin) {
    let admin = admin.url();
    if let Some(url) = &admin {
        tracing::info!("dashboard at {url}");
    }
    for served in &serving.volumes {
        let doors = serving.doors.addresses(served.name());
        if !console.json {
            doors.iter().for_each(|(_, address)| daemon::print_line(address));
            continue;
        }
        let Ok(volume) = served.volume() else { continue };
        let (status, steps) = (volume.status(), volume.recovery().steps.iter());
        let doors: Vec<_> =
            doors.into_iter().map(|(kind, address)| DoorDocument { kind, address }).collect();
        print_event(&Event::Ready {
            volume: served.name(),
            uri: doors.first().map(|door| door.address.clone()).unwrap_or_default(),
            doors,
            epoch: status.epoch,
            read_only: status.read_only,
            admin: admin.clone(),
            recovery: steps
                .map(|taken| Step {
                    name: taken.step.name().to_owned(),
                    detail: taken.detail.clone(),
                    took_ms: milliseconds(taken.took),
                })
                .collect(),
        });
    }
}

/// Why serving ended.
enum ServeEnd {
    Signal,
    HandedOver(HandOffResult),
}

/// Serves until the first signal or a hand-off; logs changes of health.
fn serve_on(
    console: Console,
    serving: &Arc<ServeProcess>,
    reopen_queue: &Arc<ReopenQueue>,
    admin: &Admin,
    receiver: &Receiver<ServeEvent>,
) -> ServeEnd {
    let mut known: Vec<HealthStatus> = serving.volumes.iter().map(ServedVolume::health).collect();
    loop {
        // Users of a closed volume wait, so it is tried more often than health is looked at.
        let is_any_away = serving.away().next().is_some();
        match receiver.recv_timeout(if is_any_away { RETRY_EVERY } else { HEALTH_EVERY }) {
            Ok(ServeEvent::Collect) => serving.collect_all(),
            Ok(ServeEvent::HandOff(request)) => {
                if let Some(until) = hand_off(serving, reopen_queue, admin, receiver, &request) {
                    return until;
                }
            }
            Err(RecvTimeoutError::Timeout) if is_any_away => reopen_queue.try_all(),
            Err(RecvTimeoutError::Timeout) => {}
            _ => return ServeEnd::Signal,
        }
        serving.remember_seen();
        for (served, known) in serving.volumes.iter().zip(&mut known) {
            let now = served.health();
            if now.state == known.state {
                continue;
            }
            let reason = now.reason.as_deref().unwrap_or("all is well");
            if now.state == "serving" {
                tracing::info!(volume = served.name(), "{}: {reason}", now.state);
            } else {
                tracing::warn!(volume = served.name(), "{}: {reason}", now.state);
            }
            if console.json {
                print_event(&Event::Health { volume: served.name(), health: &now });
            }
            *known = now;
        }
    }
}

/// Hands everything over. Returns `None` if this process continues to serve.
fn hand_off(
    serving: &Arc<ServeProcess>,
    again: &Arc<ReopenQueue>,
    admin: &Admin,
    receiver: &Receiver<ServeEvent>,
    request: &HandOffRequest,
) -> Option<ServeEnd> {
    let outcome = Predecessor { serving, reopen_queue: again, admin }.hand_off(&request.hand_off);
    match &outcome {
        Ok(done) => {
            tracing::info!(
                "process {} serves now, after an interruption of {} ms",
                done.pid,
                done.stall_ms
            )
        }
        Err(failure) => tracing::error!("{failure}"),
    }
    let done = outcome.as_ref().ok().cloned();
    // The requester may be gone.
    let _ = request.answer.send(outcome);
    // If this process continues to serve, the loop handles what arrived during the attempt.
    // Otherwise it was meant for the server, so the successor gets it.
    let done = done?;
    for event in receiver.try_iter() {
        let signal = match event {
            ServeEvent::Signal => Signal::TERM,
            ServeEvent::Collect => Signal::USR1,
            // The requester learns that this process is about to exit.
            ServeEvent::Reload | ServeEvent::HandOff(_) | ServeEvent::Closed(..) => continue,
        };
        if let Some(pid) = Pid::from_raw(done.pid.cast_signed()) {
            let _ = kill_process(pid, signal);
        }
    }
    Some(ServeEnd::HandedOver(done))
}

/// Closes the doors, then all volumes at the same time; a second signal stops that immediately.
pub(in crate::command) fn close(
    console: Console,
    serving: &Arc<ServeProcess>,
    sender: &SyncSender<ServeEvent>,
    receiver: &Receiver<ServeEvent>,
) -> Result<Exit> {
    // First: their users wait for a volume that this process does not open any more, so their doors
    // could not finish.
    serving.leave_away();
    start_closing(serving, sender)?;
    let mut open: Vec<usize> = (0..serving.volumes.len()).collect();
    // The first is reported, because what fails later may follow from it.
    let mut first_failure = None;
    while !open.is_empty() {
        match receiver.recv_timeout(REMIND_EVERY) {
            Err(RecvTimeoutError::Timeout) => {
                let names: Vec<_> =
                    open.iter().map(|index| serving.volumes[*index].name()).collect();
                tracing::warn!(
                    "stopping: waiting for requests and for the store: {}; a second signal stops \
                     immediately, and unstored writes stay in the journal",
                    names.join(", ")
                );
            }
            Ok(ServeEvent::Closed(index, outcome)) => {
                open.retain(|other| *other != index);
                report_stopped(console, &serving.volumes[index], &outcome);
                if let Err(failure) = outcome {
                    first_failure.get_or_insert(failure);
                }
            }
            // Everything is being closed: there is nothing to collect or to hand over.
            Ok(ServeEvent::Collect | ServeEvent::Reload | ServeEvent::HandOff(_)) => {}
            Ok(ServeEvent::Signal) | Err(RecvTimeoutError::Disconnected) => {
                tracing::warn!("stopping immediately; unstored writes stay in the journal");
                serving.close_now();
                serving.doors.stop_now();
                serving.forget_added_doors();
                serving.save_cache();
                return Ok(Exit::Negative);
            }
        }
    }
    serving.save_cache();
    first_failure.map_or(Ok(Exit::Ok), Err)
}

/// Closes a volume. One that a failed hand-off left closed has everything it accepted in its
/// journal.
fn close_served(served_volume: &ServedVolume) -> Result<()> {
    let volume = served_volume
        .volume()
        .map_err(|failure| Failure::new(Exit::Negative, failure.to_string()).caused_by(failure));
    let closed = volume.and_then(|volume| {
        volume.close().map_err(Failure::from)?;
        seen::remember(&served_volume.folder, &volume);
        Ok(())
    });
    closed.map_err(|failure| failure.of_volume(served_volume.name()))
}

/// Lets the doors finish, then closes each volume on a thread of its own, because each may have to
/// wait.
fn start_closing(serving: &Arc<ServeProcess>, sender: &SyncSender<ServeEvent>) -> Result<()> {
    let (serving, sender) = (Arc::clone(serving), sender.clone());
    let all = move || {
        // The requester may kill this process soon, and memory may be lost with it (as in a
        // container).
        std::thread::scope(|scope| {
            for served in &serving.volumes {
                scope.spawn(|| served.log_all(LOG_TIME_MAX));
            }
        });
        serving.doors.stop();
        // Only now: until the doors are closed, a crash must bring them back (P72).
        serving.forget_added_doors();
        std::thread::scope(|scope| {
            for (index, served) in serving.volumes.iter().enumerate() {
                let sender = sender.clone();
                // After a second signal there is no listener any more.
                scope.spawn(move || {
                    drop(sender.send(ServeEvent::Closed(index, close_served(served))))
                });
            }
        });
    };
    let started = std::thread::Builder::new().name("volume-close".into()).spawn(all);
    started
        .map(drop)
        .map_err(|error| Failure::io("cannot start the thread that closes the volumes", &error))
}

fn report_stopped(console: Console, served_volume: &ServedVolume, outcome: &Result<()>) {
    let everything_stored = outcome.is_ok();
    let positions = served_volume.positions();
    if console.json {
        print_event(&Event::Stopped { volume: served_volume.name(), everything_stored, positions });
    }
    tracing::info!(volume = served_volume.name(), everything_stored, "closed");
}
