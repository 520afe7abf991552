//! The options of a BUSE device, and their defaults.
//!
//! Not here: the attributes that follow from the device behind it (`server`).

use std::path::PathBuf;
use std::time::Duration;

/// The options of one BUSE device.
#[derive(Clone, Debug)]
pub struct BuseOptions {
    /// The number in `/dev/buseN`; `None` takes a free one.
    pub id: Option<u32>,
    /// The identity of the volume, not only its name. A device is taken over only for the volume
    /// for which it was made. Not empty.
    pub volume: String,
    /// The name of a symbolic link to the device's node in `symlink_folder`; `None` for none.
    pub symlink: Option<String>,
    /// Whether the device waits for the next server when this one dies; otherwise its requests
    /// fail. Must be false for a device whose answered writes are lost with the server.
    pub recoverable: bool,
    /// A chunk that is not full is handed over at this age. (A flush or a read hands it over at
    /// once.)
    pub chunk_age: Duration,
    /// The module's folder in configfs.
    pub config_folder: PathBuf,
    /// The folder with the facts of each device; one folder for all servers of a machine.
    pub run_folder: PathBuf,
    /// The folder with the symbolic links to devices.
    pub symlink_folder: PathBuf,
    /// How long a takeover waits until the kernel has closed the ports of the old server.
    pub recovery_time_max: Duration,
}

impl BuseOptions {
    /// The defaults for this volume: any number, no symbolic link, chunks handed over after 100 ms,
    /// facts below `/run/sawmill/buse`, symbolic links in `/dev/sawmill`.
    #[must_use]
    pub fn new(volume: impl Into<String>) -> Self {
        BuseOptions {
            id: None,
            volume: volume.into(),
            symlink: None,
            recoverable: true,
            chunk_age: Duration::from_millis(100),
            config_folder: "/sys/kernel/config/buse".into(),
            run_folder: "/run/sawmill/buse".into(),
            symlink_folder: "/dev/sawmill".into(),
            recovery_time_max: Duration::from_secs(60),
        }
    }
}
