//! The two halves of a link as one end sees it: what it sends ([`sending`]) and what it receives
//! ([`receiving`]).
//!
//! Invariants: packet numbers of a link are used once. A packet is acknowledged on the link it
//! arrived on or on any other, but always by that link's own numbers.
//!
//! Not here: what packets carry (`connection`, `initiator`, `target`), sockets (`carrier`).

pub(crate) mod receiving;
pub(crate) mod sending;

pub(crate) use receiving::ReceiveHalf;
pub(crate) use sending::{PieceKind, RouteKind, SendHalf, SentPiece, SentPieces};
