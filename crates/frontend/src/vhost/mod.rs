//! vhost-user-blk: a disk for QEMU, Cloud Hypervisor and their kin without a kernel hop. The guest's
//! requests lie in memory that both processes map, and this door reads them there.
//!
//! Modules: [`options`](VhostOptions), [`server`](VhostDoor) (the socket, one frontend after the other),
//! `session` (what one frontend has set up), `message` and `wire` (what it says, and how it comes), `queue`
//! (a thread per queue), `ring` (a split virtqueue), `ticket` (one request in flight), `inflight` (what
//! survives this process), `protocol` (virtio-blk, pure), `memory` (the guest's), `handover`, `metrics`.
//!
//! Three parties, three degrees of trust. The device is ours. The frontend runs as the same user and gives
//! us files and addresses: a wrong word of its ends its connection. The guest is a stranger: whatever it
//! writes into its memory, at whatever moment, breaks its own queue at most.
//!
//! A write's payload moves once, from the guest's memory into the place the device has for it. A read's
//! data moves twice, through a buffer: the device wants a plain slice to fill, and the guest may change its
//! memory while it is filled, which no slice may see.
//!
//! Packed rings are not offered: the crates in use know their descriptors and nothing of their rings. Nor
//! is an IOMMU. The message codec is ours and not that of the crate `vhost`, which can neither announce a
//! changed configuration nor take up a connection that another process has negotiated; tests use its
//! frontend.

mod handover;
mod inflight;
mod memory;
mod message;
mod metrics;
mod options;
mod protocol;
mod queue;
mod ring;
mod server;
mod session;
#[cfg(test)]
mod tests;
mod wire;

pub use options::VhostOptions;
pub use server::VhostDoor;

/// What a frontend or a guest did wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Violation(String);

impl std::fmt::Display for Violation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}
