//! Control sockets: how commands query and control the process that serves a volume.
//!
//! A serving process listens on `control.sock` (its writer) or `reader-<pid>.sock` (read-only
//! attachments) in the volume's state folder, and answers HTTP there (`admin`).
//!
//! | file | role |
//! |---|---|
//! | `protocol` | the requests, as JSON |
//! | `client` | the client: which process serves a volume, and what it answers |
//! | `http` | one request over a Unix socket |
//! | `fuzzing` | entry points for fuzzers |
//!
//! Invariant: the writer's socket sorts before those of readers by name, because the client asks in
//! that order. Not here: carrying a request out (`serving`).

mod client;
pub(crate) mod fuzzing;
mod http;
pub(crate) mod protocol;

pub(crate) use client::{
    attached, not_served, query_any, query_writer, reader_socket, served, sweep_dead_readers,
    volume_status, wait,
};

/// Name of the writer's socket in a volume's folder.
pub(crate) const WRITER_SOCKET: &str = "control.sock";
