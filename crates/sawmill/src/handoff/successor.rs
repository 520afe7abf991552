//! The process that takes over. See `handoff`.
//!
//! Invariants: before `Go` it opens volumes only for reading. It uses a door only after `Yours`,
//! and after the predecessor has released it or has died. It accepts no loss that its options
//! accept, because those were meant for the first start.
//!
//! Not here: the conversation's other side (`predecessor`), opening volumes and doors (`wiring`,
//! `doors`).

use std::io;
use std::net::TcpListener;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use sawmill_device::{Error, ErrorKind};
use sawmill_frontend::{DoorPiece, passing, unpack};
use sawmill_store::ObjectStore;
use sawmill_volume::{OpenOptions, Volume};

use super::{
    Message, PROTOCOL_VERSION, accepting_nothing, receive_message, send_message, unexpected,
};
use crate::admin::{Admin, ListenAddress};
use crate::config::Paths;
use crate::daemon;
use crate::plan::ServePlan;
use crate::serving::{HandOffNotifier, ServeProcess, ServedVolume};
use crate::wiring::{self, Stores};
use sawmill_console::exit::{Exit, Failure, Result};

/// The hidden option that makes a process a successor: its standard input is the socket to its
/// predecessor.
pub(crate) const OPTION: &str = "--take-over";

/// The largest parcel of doors: for each connection, at most what is in flight on it.
const PARCEL_BYTES_MAX: usize = 4 << 30;
/// The most descriptors of a parcel.
const DESCRIPTORS_MAX: usize = 1 << 16;
/// The limit for all volumes together, because for a while both processes need memory.
const PREALLOCATED_BYTES_MAX: u64 = 256 << 20;

/// Replaces the process behind standard input.
pub(crate) fn take_over(
    paths: &Paths,
    plan: ServePlan,
    notifier: HandOffNotifier,
) -> Result<(Arc<ServeProcess>, Admin)> {
    let stream = socket()?;
    let outcome = talk(paths, plan, notifier, &stream);
    if let Err(failure) = &outcome {
        // The receiver is about to kill this process anyway.
        let _ = send_message(
            &stream,
            &Message::Failed { text: failure.to_string(), exit: failure.exit().code() },
        );
    }
    outcome
}

fn socket() -> Result<UnixStream> {
    let no = |error: io::Error| {
        Failure::io("--take-over is only for a process that `sawmill handoff` starts", &error)
    };
    let stream = UnixStream::from(io::stdin().as_fd().try_clone_to_owned().map_err(no)?);
    // Fails for anything but a connected socket: a user may have typed the hidden option.
    stream.peer_addr().map_err(no)?;
    // Children inherit standard input, and one that kept the socket open would hide the death of
    // this process from the predecessor.
    let nothing = std::fs::File::open("/dev/null").map_err(no)?;
    rustix::stdio::dup2_stdin(nothing).map_err(|error| no(error.into()))?;
    Ok(stream)
}

fn talk(
    paths: &Paths,
    mut plan: ServePlan,
    notifier: HandOffNotifier,
    stream: &UnixStream,
) -> Result<(Arc<ServeProcess>, Admin)> {
    let started = Instant::now();
    send_message(
        stream,
        &Message::Hello {
            conversation: PROTOCOL_VERSION,
            version: env!("CARGO_PKG_VERSION").to_owned(),
        },
    )?;
    wiring::claim_descriptors(plan.volumes.len())?;
    let mut stores = prepare(paths, &plan)?;
    // `prepare` has probed it; another probe would take time while users wait.
    plan.options.store_is_probed = true;
    plan.options = accepting_nothing(&plan.options);
    send_message(stream, &Message::Prepared)?;
    // No deadline here: a predecessor that gives up kills this process.
    match receive_message(stream, None)? {
        Message::Go => {}
        message => return Err(unexpected(&message)),
    }
    let (bytes, descriptors) = passing::receive(stream, PARCEL_BYTES_MAX, DESCRIPTORS_MAX)?;
    let mut handed = unpack(&bytes, descriptors)?;
    let listener = admin_listener(&mut handed)?;
    let (volumes, cache) = wiring::open_all(paths, &plan, &mut stores)?;
    let serving = ServeProcess::new(volumes, cache, &plan, started, notifier);
    send_message(stream, &Message::Opened)?;
    match receive_message(stream, None)? {
        Message::Yours => {}
        message => return Err(unexpected(&message)),
    }
    // Until this message, the other process may hold a door. If it died instead, it holds none
    // either.
    if let Err(failure) = receive_message(stream, None) {
        tracing::warn!("the old process ended early: {failure}");
    }
    let door_volumes: Vec<_> = serving.volumes.iter().map(ServedVolume::door_volume).collect();
    let mut lost = serving.doors.take_over(handed, &door_volumes);
    let serving = Arc::new(serving);
    let admin = match wiring::start_admin(&serving, listener.map(ListenAddress::Inherited)) {
        Ok(admin) => admin,
        // Users are served already and the volumes cannot go back, so this is one lost door.
        Err(failure) => {
            let error = Error::new(ErrorKind::Unavailable, failure.to_string());
            lost.push(error.with_source(failure));
            Admin::none()
        }
    };
    lost.iter().for_each(|error| tracing::error!("a door was lost in a hand-off: {error}"));
    let lost_doors = lost.iter().map(ToString::to_string).collect();
    // Serve users before anything else. The service manager learns of this process before the old
    // one exits.
    daemon::notify(sd_notify::NotifyState::MainPid(std::process::id()));
    if let Err(failure) = send_message(stream, &Message::Serving { lost_doors }) {
        tracing::warn!("cannot tell the old process that this one serves: {failure}");
    }
    Ok((serving, admin))
}

/// Opens the stores, checks that they can fence writers, reads every volume so that it is cached
/// later, and preallocates memory for it. Changes no volume.
fn prepare(paths: &Paths, plan: &ServePlan) -> Result<Stores> {
    let mut stores = Stores::default();
    let mut preallocated_bytes = 0;
    for address in &plan.volumes {
        let options = OpenOptions {
            read_only: true,
            cut: address.cut.as_ref().map(|(_, cut)| cut.clone()),
            ..OpenOptions::new(PathBuf::new())
        };
        let store = stores.open(&address.store_url)? as Arc<dyn ObjectStore>;
        let read = Volume::open(store, &address.name, options).map_err(Failure::from);
        let volume = read.map_err(|failure| failure.of_volume(&address.name))?;
        preallocated_bytes += plan.options.staging_bytes;
        if !plan.options.read_only && preallocated_bytes <= PREALLOCATED_BYTES_MAX {
            // Best effort: opening without it takes longer.
            let id = volume.record().volume_id.to_string();
            let journal = plan.journal.path(paths, &id, &address.store_url)?;
            let staging_folder = wiring::staging_folder(plan, Some(&journal));
            let preallocated =
                volume.preallocate(&OpenOptions { staging_folder, ..plan.options.clone() });
            preallocated.unwrap_or_else(|error| tracing::debug!("hand-off: {error}"));
        }
    }
    stores.require_fencing(&plan.options)?;
    Ok(stores)
}

/// Takes the admin server's listener out of what was handed over.
fn admin_listener(pieces: &mut Vec<DoorPiece>) -> Result<Option<TcpListener>> {
    let Some(at) = pieces.iter().position(|piece| piece.what == "admin") else { return Ok(None) };
    let descriptor = pieces.remove(at).descriptors.pop();
    let descriptor = descriptor.ok_or_else(|| {
        Failure::new(Exit::Unavailable, "the admin server was handed over without its socket")
    })?;
    Ok(Some(TcpListener::from(descriptor)))
}
