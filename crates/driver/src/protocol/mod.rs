//! The messages between a host and a driver: `docs/format/driver.md`.
//!
//! Invariant: input from a peer is never trusted: anything invalid is an error of kind `Invalid`,
//! and declared sizes allocate no memory. Files: `control` (introductions), `command` (requests and
//! answers), `packet` (the socket). Not here: what follows from a packet (`host`, `client`).

mod command;
mod control;
mod packet;

pub use command::{ANSWER_BYTES, Answer, COMMAND_BYTES, Command, CommandKind};
pub use control::{Control, ControlFacts, ControlKind};
pub use packet::{PACKET_BYTES_MAX, Packet, PacketSocket};

/// The version of the protocol in this code.
pub const PROTOCOL: u32 = 1;
/// The variable with the path of the host's socket, for a driver that a host started.
pub const SOCKET_VARIABLE: &str = "SAWMILL_DRIVER";
