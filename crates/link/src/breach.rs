//! What a peer must not do. A breach ends the connection, with its reason, and touches nothing else.

/// Why the peer cannot be trusted any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Breach(pub(crate) &'static str);
