//! The vhost-user door from outside: a guest by hand (`guest`) over a device that shows what is
//! done with it (`devices`). `requests` tests what it serves, `hostile_guest` what no guest can do
//! to it, `restart` what it survives.

#[path = "../door/conformance.rs"]
mod conformance;
mod contract;
mod devices;
mod guest;
mod hostile_guest;
mod requests;
mod restart;

use std::path::PathBuf;
use std::sync::Arc;

use sawmill_device::BlockDevice;
use sawmill_frontend::vhost::{VhostDoor, VhostOptions};

/// A folder for one socket.
struct TestFolder {
    folder: tempfile::TempDir,
}

impl TestFolder {
    fn new() -> Self {
        TestFolder { folder: tempfile::tempdir().expect("a temporary folder") }
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("door.sock")
    }

    fn options(&self) -> VhostOptions {
        VhostOptions { queues_max: 4, serial: "serial 1".into(), ..VhostOptions::new(self.path()) }
    }

    fn serve(&self, device: Arc<dyn BlockDevice>) -> VhostDoor {
        VhostDoor::start(self.options(), device).expect("the door opens")
    }
}
