//! vhost-user-blk: a disk for QEMU, Cloud Hypervisor and similar programs without a kernel hop. The
//! guest's requests are in memory that both processes map, and this door reads them there.
//!
//! Modules: [`options`](VhostOptions), `limits`, [`server`](VhostDoor) (the socket, one frontend at
//! a time), `frontend_state` (the setup of one frontend), `message` and `wire` (its messages, and
//! their transport), `queue` (a thread per queue, with `ticket`, one request in flight), `ring` (a
//! split virtqueue), `inflight` (what survives this process), `protocol` (virtio-blk, pure),
//! `memory` (the guest's), `hand_over`, `metrics`.
//!
//! Three parties, three degrees of trust. The device is ours. The frontend runs as the same user
//! and provides files and addresses: an invalid message ends its connection. The guest is
//! untrusted: whatever it writes into its memory, and whenever, breaks only its own queue.
//!
//! The payload of a write moves once, from the guest's memory into the device's buffer. The data of
//! a read moves twice, through a buffer: the device needs a plain slice to fill, and the guest may
//! change its memory at the same time, which no slice allows.
//!
//! The message codec is ours and not that of the crate `vhost`, which can neither announce a
//! changed configuration nor take over a connection that another process has negotiated; tests use
//! its frontend.
//!
//! Not here: packed rings (the crates in use have their descriptors but not their rings); an IOMMU.

mod frontend_state;
mod hand_over;
mod inflight;
mod limits;
mod memory;
mod message;
mod metrics;
mod options;
mod protocol;
mod queue;
mod ring;
mod server;
#[cfg(test)]
mod tests;
mod wire;

use std::error::Error;
use std::fmt;
use std::sync::Arc;

pub use options::VhostOptions;
pub use protocol::status;
pub use server::VhostDoor;

/// A violation by a frontend or a guest, or an error of the system in what they asked for. The text
/// includes the cause.
#[derive(Clone, Debug)]
struct Violation {
    text: String,
    source: Option<Arc<dyn Error + Send + Sync>>,
}

impl Violation {
    fn new(text: impl Into<String>) -> Self {
        Violation { text: text.into(), source: None }
    }

    fn caused(what: impl fmt::Display, source: impl Error + Send + Sync + 'static) -> Self {
        Violation { text: format!("{what}: {source}"), source: Some(Arc::new(source)) }
    }

    /// The same with what it is about before its text.
    fn of(self, what: impl fmt::Display) -> Self {
        Violation { text: format!("{what}: {}", self.text), ..self }
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl Error for Violation {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.source.as_ref().map(|source| &**source as _)
    }
}
