//! One link of a connection, as one end sees it: what it sends there ([`sending`]) and what it got from there
//! ([`receiving`]).
//!
//! Invariants: packet numbers of a link are used once; a packet is acknowledged on the link it came by, or on
//! any other, but always by that link's own numbers.
//!
//! Not here: what packets carry (`connection`, `initiator`, `target`), sockets (`carrier`).

pub(crate) mod receiving;
pub(crate) mod sending;

pub(crate) use receiving::Receiving;
pub(crate) use sending::{Piece, PieceKind, Pieces, Sending};
