//! The identity of the other end, and packets that no third party can read, alter or replay.
//!
//! Modules: [`key`] (the shared secret), [`handshake`] (two messages make a connection's keys;
//! `noise` does the cryptography), `proof` (proofs outside of connections), [`seal`] (one packet,
//! in place), [`window`] (no packet counts twice).
//!
//! Invariants: a secure end never talks to an insecure one, nor the reverse. Input from a peer can
//! make these functions return an error, but never panic, nor allocate more than the length of its
//! message.
//!
//! Not here: the fields of a packet's header, retransmission, timers, the device that is meant.

pub mod handshake;
pub mod key;
mod noise;
pub(crate) mod proof;
pub mod seal;
pub mod window;

pub use handshake::{Greeting, HANDSHAKE_BYTES, answer};
pub use key::{KeyError, PreSharedKey};
pub use seal::{HEADER_BYTES, Seals, TAIL_BYTES};
pub use window::ReplayWindow;

/// How the two ends of a connection trust each other. Both must have the same setting.
#[derive(Debug)]
pub enum Security {
    /// By a shared key: each end proves it, and packets are encrypted.
    Key(PreSharedKey),
    /// Not at all (`--insecure`): packets are in clear, and protected against damage only.
    Insecure,
}

/// Why a packet or a message of the handshake was refused. The connection continues; the packet
/// is dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PacketRefusal {
    /// Fewer bytes than header and tail have.
    #[error("{bytes} bytes are too few: a packet has at least {least}")]
    Short {
        /// The number of bytes.
        bytes: usize,
        /// The smallest valid number.
        least: usize,
    },
    /// A sealed packet that fails authentication.
    #[error(
        "the other end of this connection did not seal the packet, or the packet was altered in \
        transit"
    )]
    Forged,
    /// A packet or message in clear with a wrong checksum.
    #[error("wrong checksum: the packet was damaged in transit")]
    Damaged,
    /// A packet number that no key may seal; see [`seal::PACKETS_MAX`].
    #[error("this connection has used up its packet numbers: reconnect")]
    Spent,
    /// The peer talks in clear; this end does not.
    #[error(
        "the peer is insecure and this end has a key: give both the same key, or both --insecure"
    )]
    PeerInsecure,
    /// The peer has a key; this end has none.
    #[error(
        "the peer wants a key and this end is --insecure: give both the same key, or both \
        --insecure"
    )]
    PeerSecure,
    /// Not a message of a handshake that this version knows.
    #[error("not a handshake of a known version")]
    Unknown,
    /// A first message where the second is due, or the reverse, as when a message returns to its
    /// sender.
    #[error("a handshake message out of order (does the link lead back to this machine?)")]
    OutOfTurn,
    /// A message of the handshake that fails to prove the key.
    #[error("the peer does not prove that it has the same key: compare the key files of both ends")]
    Unproven,
    /// A second message that answers another first one.
    #[error("the answer belongs to another handshake")]
    NotOurs,
    /// The handshake is already finished.
    #[error("the handshake is finished already")]
    Finished,
    /// Our own message does not fit into its buffer.
    #[error("a message of {bytes} bytes does not fit into {room}")]
    Room {
        /// The length of the message.
        bytes: usize,
        /// The size of the buffer.
        room: usize,
    },
    /// The system gave no random bytes, or its cryptography failed.
    #[error("cryptography failed on this machine; check its random source")]
    Broken,
}

/// Unguessable numbers, for the ids of ends and connections. On a machine without randomness it
/// returns the same number each time; the handshake refuses to start there anyway.
#[must_use]
pub fn unguessable() -> Box<dyn FnMut() -> u64 + Send> {
    Box::new(|| {
        let mut bytes = [0; 8];
        match aws_lc_rs::rand::fill(&mut bytes) {
            Ok(()) => u64::from_le_bytes(bytes),
            Err(_) => 1,
        }
    })
}

/// The id of an end: two of these numbers.
pub(crate) fn instance(random: &mut dyn FnMut() -> u64) -> [u8; 16] {
    let mut instance = [0; 16];
    instance[..8].copy_from_slice(&random().to_le_bytes());
    instance[8..].copy_from_slice(&random().to_le_bytes());
    instance
}
