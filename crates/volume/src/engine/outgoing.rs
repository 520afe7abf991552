//! An object of a checkpoint in flight to the store. Not here: its put (`checkpoint`), and segments
//! in flight (`upload`).

use std::time::Duration;

use bytes::Bytes;

/// A root or a map part of the checkpoint in flight, and whether it is stored.
pub(super) struct OutgoingObject {
    pub(super) key: String,
    pub(super) body: Bytes,
    pub(super) stored: bool,
    pub(super) repeat_at: Option<Duration>,
}

impl OutgoingObject {
    pub(super) fn new(key: String, body: Vec<u8>) -> Self {
        OutgoingObject { key, body: Bytes::from(body), stored: false, repeat_at: None }
    }
}
