//! What a host and a driver say to each other: `docs/format/driver.md`.
//!
//! Invariant: nothing a peer sends is trusted: whatever makes no sense is an error of kind `Invalid`, and
//! what it declares takes no memory. Files: `control` (who is who), `order` (requests and answers), `packet`
//! (the socket). Not here: what follows from a packet (`host`, `client`).

mod control;
mod order;
mod packet;

pub use control::{Control, ControlKind, Facts};
pub use order::{ANSWER_BYTES, Answer, ORDER_BYTES, Order, OrderKind};
pub use packet::{PACKET_BYTES_MAX, Packet, PacketSocket};

/// The version of the protocol that this code speaks.
pub const PROTOCOL: u32 = 1;
/// Where a driver that a host started finds the host: a path.
pub const SOCKET_VARIABLE: &str = "SAWMILL_DRIVER";
