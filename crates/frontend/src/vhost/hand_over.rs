//! The hand-over of a door: its facts and descriptors, and the way back.
//!
//! Two pieces. `listener`: the socket; no facts. `frontend`, if one is connected: everything that
//! its messages have set up, so that it need not repeat any of them. Its descriptors, in this
//! order: the connection, the memory regions, the dirty log, the in-flight region, the backend's
//! channel, then for each queue kick, call and error; only those that exist.
//!
//! Invariant: unpacking what was packed gives a frontend that continues where the other one
//! stopped. Not here: how pieces travel.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::str::FromStr;
use std::sync::Arc;

use sawmill_device::{Error, ErrorKind, Result};

use super::Violation;
use super::frontend_state::{DoorState, FrontendState, QueueDraft};
use super::inflight::Inflight;
use super::memory::{DirtyLog, Memory, RegisteredRegion};
use super::message::{Area, InflightShape, REGIONS_MAX, Region, RingAddresses};
use super::protocol::CacheMode;
use super::wire;
use crate::door::DoorPiece;
use crate::unix_socket::UnixSocket;

/// The pieces of another process.
pub(super) struct Pieces {
    pub(super) listener: OwnedFd,
    pub(super) frontend: Option<FrontendState>,
}

/// All pieces of a quiet door.
pub(super) fn pack(
    listener: &UnixSocket,
    frontend: Option<&FrontendState>,
) -> Result<Vec<DoorPiece>> {
    let failed = |error: std::io::Error| {
        Error::caused(
            ErrorKind::Unavailable,
            "vhost-user: cannot duplicate a descriptor for the hand-over",
            error,
        )
    };
    let listener = DoorPiece {
        what: "listener".into(),
        descriptors: vec![listener.socket.try_clone().map_err(failed)?],
        ..DoorPiece::default()
    };
    let mut pieces = vec![listener];
    if let Some(frontend) = frontend {
        pieces.push(pack_frontend(frontend).map_err(failed)?);
    }
    Ok(pieces)
}

fn pack_frontend(frontend: &FrontendState) -> std::io::Result<DoorPiece> {
    let mut facts = BTreeMap::new();
    // `unpack_frontend` takes the descriptors in this very order; the facts say which ones are
    // there.
    let mut descriptors = vec![frontend.socket.try_clone()?];
    let mut say = |name: String, numbers: &[u64]| {
        let words: Vec<String> = numbers.iter().map(u64::to_string).collect();
        facts.insert(name, words.join(" "));
    };
    say("features".into(), &[frontend.features]);
    say("protocol_features".into(), &[frontend.protocol_features]);
    say("status".into(), &[frontend.status]);
    say("writeback".into(), &[frontend.cache_mode.byte().into()]);
    say("regions".into(), &[frontend.memory.regions().len() as u64]);
    for (n, RegisteredRegion { region, file }) in frontend.memory.regions().iter().enumerate() {
        say(
            format!("region.{n}"),
            &[region.guest, region.size_bytes, region.user, region.file_offset],
        );
        descriptors.push(file.as_fd().try_clone_to_owned()?);
    }
    if let Some((area, log)) = &frontend.log {
        say("log".into(), &[area.size_bytes, area.offset]);
        descriptors.push(log.file().as_fd().try_clone_to_owned()?);
    }
    if let Some(inflight) = &frontend.inflight {
        let InflightShape { area, queues, queue_size } = inflight.shape();
        say("inflight".into(), &[area.size_bytes, area.offset, queues.into(), queue_size.into()]);
        descriptors.push(inflight.file()?);
    }
    if let Some(channel) = &frontend.backend_channel {
        say("backend_channel".into(), &[1]);
        descriptors.push(channel.try_clone()?);
    }
    say("queues".into(), &[frontend.drafts.len() as u64]);
    for (n, draft) in frontend.drafts.iter().enumerate() {
        // A running queue is ahead of the base that the frontend has set.
        let base = draft.running.as_ref().map_or(draft.base, |queue| queue.base());
        // 0 and 1 are the frontend's setting; 2 means that there is none.
        let enabled = draft.enabled.map_or(2, u64::from);
        say(format!("queue.{n}"), &[draft.size.into(), base.into(), enabled]);
        if let Some(at) = draft.addresses {
            let numbers = [at.flags.into(), at.descriptors, at.used, at.available, at.log];
            say(format!("queue.{n}.addresses"), &numbers);
        }
        for (name, event) in [("kick", &draft.kick), ("call", &draft.call), ("error", &draft.error)]
        {
            if let Some(event) = event {
                say(format!("queue.{n}.{name}"), &[1]);
                descriptors.push(event.try_clone()?);
            }
        }
    }
    Ok(DoorPiece { what: "frontend".into(), facts, bytes: Vec::new(), descriptors })
}

/// Parses the pieces of a door.
pub(super) fn unpack(door_state: &Arc<DoorState>, pieces: Vec<DoorPiece>) -> Result<Pieces> {
    let (mut listener, mut frontend) = (None, None);
    for piece in pieces {
        match &*piece.what {
            "listener" => listener = piece.descriptors.into_iter().next(),
            "frontend" => frontend = Some(unpack_frontend(door_state, piece).map_err(not_whole)?),
            _ => (),
        }
    }
    let missing = || not_whole(Violation::new("the listening socket is missing"));
    Ok(Pieces { listener: listener.ok_or_else(missing)?, frontend })
}

fn not_whole(violation: Violation) -> Error {
    Error::caused(ErrorKind::Invalid, "vhost-user: cannot take over the door", violation)
}

/// Takes facts and descriptors off in order.
struct Unpacker {
    facts: BTreeMap<String, String>,
    descriptors: std::vec::IntoIter<OwnedFd>,
}

impl Unpacker {
    fn optional<const N: usize>(&self, name: &str) -> Result<Option<[u64; N]>, Violation> {
        let Some(text) = self.facts.get(name) else { return Ok(None) };
        let numbers: Vec<u64> =
            text.split(' ').filter_map(|word| u64::from_str(word).ok()).collect();
        let numbers = <[u64; N]>::try_from(numbers);
        numbers.map(Some).map_err(|_| Violation::new(format!("the fact {name} is {text:?}")))
    }

    fn numbers<const N: usize>(&self, name: &str) -> Result<[u64; N], Violation> {
        self.optional(name)?.ok_or_else(|| Violation::new(format!("the fact {name} is missing")))
    }

    fn descriptor(&mut self, what: &str) -> Result<OwnedFd, Violation> {
        self.descriptors
            .next()
            .ok_or_else(|| Violation::new(format!("the descriptor of {what} is missing")))
    }

    fn event(&mut self, name: &str) -> Result<Option<Arc<OwnedFd>>, Violation> {
        match self.optional::<1>(name)? {
            Some(_) => Ok(Some(Arc::new(self.descriptor(name)?))),
            None => Ok(None),
        }
    }

    fn draft(&mut self, n: u64) -> Result<QueueDraft, Violation> {
        let [size, base, enabled] = self.numbers(&format!("queue.{n}"))?;
        let addresses = self.optional(&format!("queue.{n}.addresses"))?;
        let addresses = addresses.map(|[flags, descriptors, used, available, log]| RingAddresses {
            flags: flags as u32,
            descriptors,
            used,
            available,
            log,
        });
        Ok(QueueDraft {
            size: narrow(size)?,
            addresses,
            base: narrow(base)?,
            kick: self.event(&format!("queue.{n}.kick"))?,
            call: self.event(&format!("queue.{n}.call"))?,
            error: self.event(&format!("queue.{n}.error"))?,
            enabled: (enabled < 2).then_some(enabled == 1),
            running: None,
        })
    }
}

fn narrow(number: u64) -> Result<u16, Violation> {
    u16::try_from(number).map_err(|_| Violation::new(format!("{number} does not fit 16 bits")))
}

fn unpack_frontend(
    door_state: &Arc<DoorState>,
    piece: DoorPiece,
) -> Result<FrontendState, Violation> {
    let mut from = Unpacker { facts: piece.facts, descriptors: piece.descriptors.into_iter() };
    let socket = from.descriptor("the connection")?;
    wire::set_times(&socket).map_err(|error| Violation::caused("the connection", error))?;
    let mut frontend = FrontendState::new(door_state.clone(), Arc::new(socket));
    [frontend.features] = from.numbers("features")?;
    [frontend.protocol_features] = from.numbers("protocol_features")?;
    [frontend.status] = from.numbers("status")?;
    frontend.cache_mode = CacheMode::of((from.numbers("writeback")? == [1]).into());
    let [regions] = from.numbers("regions")?;
    let mut registered_regions = Vec::new();
    // A frontend cannot have set more, so a larger number is no frontend of this door.
    for n in 0..regions.min(REGIONS_MAX as u64) {
        let [guest, size_bytes, user, file_offset] = from.numbers(&format!("region.{n}"))?;
        let file = Arc::new(File::from(from.descriptor("a memory region")?));
        registered_regions.push(RegisteredRegion {
            region: Region { guest, size_bytes, user, file_offset },
            file,
        });
    }
    frontend.memory = Arc::new(Memory::map(registered_regions)?);
    if let Some([size_bytes, offset]) = from.optional("log")? {
        let file = from.descriptor("the dirty log")?;
        let log = DirtyLog::open(file, offset, size_bytes)?;
        frontend.log = Some((Area { size_bytes, offset }, Arc::new(log)));
    }
    if let Some([size_bytes, offset, queues, queue_size]) = from.optional("inflight")? {
        let file = from.descriptor("the in-flight region")?;
        let area = Area { size_bytes, offset };
        let shape =
            InflightShape { area, queues: narrow(queues)?, queue_size: narrow(queue_size)? };
        frontend.inflight = Some(Arc::new(Inflight::open(file, shape)?));
    }
    frontend.backend_channel = from.event("backend_channel")?;
    let [queues] = from.numbers("queues")?;
    let mut drafts = (0..queues).map(|n| from.draft(n)).collect::<Result<Vec<_>, _>>()?;
    // This server may allow fewer queues than the one before, as long as the frontend does not use
    // the rest.
    let used_count = drafts.iter().rposition(|draft| draft.size != 0).map_or(0, |last| last + 1);
    if used_count > frontend.drafts.len() {
        return Err(Violation::new(format!(
            "{used_count} queues are in use; the limit is {}",
            frontend.drafts.len()
        )));
    }
    drafts.resize_with(frontend.drafts.len(), QueueDraft::default);
    frontend.drafts = drafts;
    Ok(frontend)
}
