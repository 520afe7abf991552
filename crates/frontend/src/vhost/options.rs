//! The options of a vhost-user door. Not here: its fixed limits (`limits`), and the check of values
//! (`server`).

use std::path::PathBuf;

/// The options of one door.
#[derive(Clone, Debug)]
pub struct VhostOptions {
    /// The Unix socket: accessible only to its owner (mode 0600), removed at stop.
    pub socket: PathBuf,
    /// The most queues of a frontend, 1 to 256.
    pub queues_max: u16,
    /// The most entries of one queue, a power of two up to 32768.
    pub queue_size_max: u16,
    /// The serial number of the disk for the guest; at most 20 bytes of it.
    pub serial: String,
}

impl VhostOptions {
    /// The defaults for this socket: 16 queues of up to 1024 entries, no serial number.
    #[must_use]
    pub fn new(socket: PathBuf) -> Self {
        VhostOptions { socket, queues_max: 16, queue_size_max: 1024, serial: String::new() }
    }
}
