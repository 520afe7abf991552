//! The state of one connection between its requests: the result of the handshake, the export's
//! facts as shown to the client, the unread bytes, and the reason for the end.
//!
//! Invariant: a connection keeps the size, the longest request and the flags that its client was
//! shown. [`PausedConnection::geometry_on`] refuses a device that no longer supports them, and
//! never shows more.
//!
//! Not here: the loop of requests (`connection`), and the hand-over of a session (`hand_over`).

use std::sync::Arc;

use rustix::io::Errno;
use sawmill_device::{BlockDevice, Geometry};

use super::limits::PAYLOAD_BYTES_MAX;
use super::protocol::{NbdErrno, Style, Violation, transmission};

/// The result of the handshake.
pub(super) struct Session {
    pub(super) device: Arc<dyn BlockDevice>,
    /// As shown to the client.
    pub(super) geometry: Geometry,
    pub(super) style: Style,
    /// The client chose the context `base:allocation`.
    pub(super) block_status: bool,
}

/// Why a connection ended.
#[derive(Debug)]
pub(super) enum End {
    /// The client requested the end.
    Disconnect,
    /// The client closed its side between two requests.
    Closed,
    /// The client closed its side inside a request.
    Died,
    /// The server is stopping, or the export was removed.
    Stopping,
    /// The socket failed.
    Broken(Errno),
    /// The client broke the protocol.
    Violation(Violation),
    /// The limit on connections, or on the memory reserved for them, is reached.
    Refused(&'static str),
    /// The client kept memory that other connections waited for.
    Stalled,
    /// Another process has taken the connection over.
    LetGo,
}

/// The facts of its export that a client was shown, and relies on as long as it is connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ExportFacts {
    pub(super) size_bytes: u64,
    pub(super) request_bytes_max: u32,
    /// Transmission flags.
    pub(super) flags: u16,
}

impl ExportFacts {
    pub(super) fn of(geometry: &Geometry, style: Style) -> Self {
        ExportFacts {
            size_bytes: geometry.size_bytes,
            request_bytes_max: payload_bytes_max(geometry),
            flags: transmission_flags(geometry, style),
        }
    }
}

/// The state of a paused connection: enough to resume it elsewhere, with its socket and its unsent
/// replies.
#[derive(Debug)]
pub(super) struct PausedConnection {
    pub(super) style: Style,
    pub(super) block_status: bool,
    pub(super) facts: ExportFacts,
    pub(super) backlog: InputBacklog,
}

impl PausedConnection {
    /// The geometry for its client, which relies on the facts that it was shown, on a device with
    /// the geometry `now`; or the reason why the device does not support them.
    pub(super) fn geometry_on(&self, now: &Geometry) -> Result<Geometry, String> {
        let shown = &self.facts;
        let current_facts = ExportFacts::of(now, self.style);
        if current_facts.size_bytes < shown.size_bytes {
            return Err(format!(
                "its size is {} bytes and was {}",
                current_facts.size_bytes, shown.size_bytes
            ));
        }
        if current_facts.request_bytes_max < shown.request_bytes_max {
            let (now, before) = (current_facts.request_bytes_max, shown.request_bytes_max);
            return Err(format!("its longest request is {now} bytes and was {before}"));
        }
        let was_read_only = shown.flags & transmission::READ_ONLY != 0;
        if now.read_only && !was_read_only {
            return Err("it is read-only now".into());
        }
        // READ_ONLY takes abilities away. A device that has become writable still does all that was
        // shown.
        let lost_flags = shown.flags & !transmission::READ_ONLY & !current_facts.flags;
        if lost_flags != 0 {
            return Err(format!("it no longer supports the transmission flags {lost_flags:#x}"));
        }
        if self.block_status && !now.operations.allocation {
            return Err("it no longer reports its allocation".into());
        }
        // The client keeps what it was shown, also of a device that has grown: it checks its own
        // requests against that.
        let (size_bytes, request_bytes_max) = (shown.size_bytes, shown.request_bytes_max);
        Ok(Geometry { size_bytes, request_bytes_max, read_only: was_read_only, ..*now })
    }
}

/// The refusal of a request: the errno and text that the client gets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Refusal(pub(super) NbdErrno, pub(super) String);

/// A refused request whose payload is being dropped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Drain {
    /// Bytes of payload still to come.
    pub(super) left_bytes: u64,
    pub(super) cookie: u64,
    pub(super) offset: u64,
    pub(super) refusal: Refusal,
}

/// The bytes and requests of a client that are not answered yet: all state of its connection
/// besides the result of the handshake.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct InputBacklog {
    /// Bytes that were received and not consumed; they contain a partial request from its start.
    pub(super) received: Vec<u8>,
    pub(super) draining: Option<Drain>,
}

/// The longest read or write this geometry allows through this door.
pub(super) fn payload_bytes_max(geometry: &Geometry) -> u32 {
    geometry.request_bytes_max.min(PAYLOAD_BYTES_MAX)
}

/// The abilities of the export, as the client sees them.
pub(super) fn transmission_flags(geometry: &Geometry, style: Style) -> u16 {
    let mut flags = transmission::HAS_FLAGS
        | transmission::SEND_FLUSH
        | transmission::SEND_FUA
        | transmission::SEND_CACHE;
    let writable = !geometry.read_only;
    for (holds, flag) in [
        (geometry.read_only, transmission::READ_ONLY),
        (writable && geometry.operations.discard, transmission::SEND_TRIM),
        (
            writable && geometry.operations.write_zeroes,
            transmission::SEND_WRITE_ZEROES | transmission::SEND_FAST_ZERO,
        ),
        // Promises that a flush on one connection covers writes completed on another.
        (geometry.shared_cache, transmission::CAN_MULTI_CONN),
        // "Do not fragment" has a meaning only where a reply can have several chunks.
        (style != Style::Simple, transmission::SEND_DF),
    ] {
        if holds {
            flags |= flag;
        }
    }
    flags
}
