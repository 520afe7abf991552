//! Violations of the protocol by a peer. A breach ends the connection with its reason, and affects
//! nothing else.
//!
//! Not here: packets that do not open, which are dropped and end nothing
//! (`session::PacketRefusal`).

/// Why the peer can no longer be trusted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Breach(pub(crate) &'static str);
