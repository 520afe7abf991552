//! What enters the read cache without having been read: what was written, and what garbage
//! collection has moved.
//!
//! Invariant: writers and the trim of the journal never wait for the cache.
//! Not here: what readers fetch (`read::fetch`), and which frames the cache keeps (`cache`).

pub(super) mod moved;
pub(super) mod written;
