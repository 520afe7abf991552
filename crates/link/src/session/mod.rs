//! Who is at the other end, and packets that nobody else can read, alter or say twice.
//!
//! Modules: [`key`] (what both ends know beforehand), [`handshake`] (two messages make a connection's keys;
//! `noise` is its arithmetic), `proof` (what is said outside of connections), [`seal`] (one packet, in
//! place), [`window`] (no packet counts twice).
//!
//! Invariants: a secure end never speaks to an insecure one, nor the reverse; what a peer sends can make
//! these functions refuse, but not panic, nor allocate more than its message is long.
//!
//! Not here: the fields of a packet's header, resending, timers, which device is meant.

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

/// How the two ends of a link trust each other. Both must be told the same.
#[derive(Debug)]
pub enum Security {
    /// By a key that both have: each end proves it, packets are encrypted.
    Key(PreSharedKey),
    /// Not at all (`--insecure`): packets are in clear, and guarded against damage only.
    Insecure,
}

/// Why a packet or a message of the hand-shake was not accepted. The link lives on; the packet is dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// Fewer bytes than the parts that are always there.
    #[error("{bytes} bytes are too few: a packet has at least {least}")]
    Short {
        /// How many there are.
        bytes: usize,
        /// How many there must be.
        least: usize,
    },
    /// A sealed packet that does not open.
    #[error("the other end of this connection did not seal the packet, or the packet was altered in transit")]
    Forged,
    /// A packet or message in clear whose checksum does not fit.
    #[error("wrong checksum: the packet was damaged in transit")]
    Damaged,
    /// A packet number that no key may seal; see [`seal::PACKETS_MAX`].
    #[error("this connection has used up its packet numbers: reconnect")]
    Spent,
    /// The peer speaks in clear, this end does not.
    #[error("the peer is insecure and this end has a key: give both the same key, or both --insecure")]
    PeerInsecure,
    /// The peer has a key, this end has none.
    #[error("the peer wants a key and this end is --insecure: give both the same key, or both --insecure")]
    PeerSecure,
    /// No message of a hand-shake that this version knows.
    #[error("not a hand-shake of a known version")]
    Unknown,
    /// A first message where the second is due, or the reverse, as when a message comes back to its sender.
    #[error("a hand-shake message out of order (does the link lead back to this machine?)")]
    OutOfTurn,
    /// A message of the hand-shake that does not prove the key.
    #[error("the peer does not prove that it has the same key: compare the key files of both ends")]
    Unproven,
    /// A second message that answers another first one.
    #[error("the answer belongs to another hand-shake")]
    NotOurs,
    /// The hand-shake has been finished before.
    #[error("the hand-shake is finished already")]
    Finished,
    /// Our own message does not fit where it was to be written.
    #[error("a message of {bytes} bytes does not fit into {room}")]
    Room {
        /// How long the message would be.
        bytes: usize,
        /// How much room there was.
        room: usize,
    },
    /// The system gave no random bytes, or its cryptography failed.
    #[error("cryptography failed on this machine; check its random source")]
    Broken,
}

/// Numbers that nobody can guess, for the ids of ends and connections. A machine without randomness gives
/// none: the same number again, which the hand-shake refuses to begin with anyway.
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
