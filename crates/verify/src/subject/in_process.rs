//! A device of ours, served from this process: a layer over the disk. No other program is needed.
//! Not here: what the layer does, which the caller provides (planted faults: `faulty`).

use std::path::Path;
use std::sync::Arc;

use sawmill_device::BlockDevice;
use sawmill_frontend::nbd::{Export, Listen, NbdOptions, NbdServer};
use sawmill_frontend::{Door, Stop};

use super::{RecordedDisk, RecoveryMode, Remains, RestartResult, RunningDevice, Subject};
use crate::image::Image;
use crate::nbd::{Client, Style};
use crate::{Error, Result};

/// Makes the device under test from its disk.
pub type DeviceFactory = Box<dyn Fn(Arc<dyn BlockDevice>) -> Arc<dyn BlockDevice> + Send + Sync>;

/// A device that a function makes from its disk.
pub struct InProcess {
    name: String,
    factory: DeviceFactory,
}

impl InProcess {
    /// The device that `device_factory` makes from a disk.
    #[must_use]
    pub fn new(name: &str, device_factory: DeviceFactory) -> Self {
        InProcess { name: name.to_owned(), factory: device_factory }
    }
}

struct InProcessServer {
    server: NbdServer,
    uri: String,
}

/// Serves a device on a socket in `folder`.
fn serve(device: Arc<dyn BlockDevice>, folder: &Path) -> Result<InProcessServer> {
    let socket = folder.join("device.sock");
    // A socket that a dead server left.
    let _ = std::fs::remove_file(&socket);
    let server = NbdServer::start(NbdOptions::new(Listen::Unix(socket)))?;
    server.add_export(Export { name: String::new(), description: String::new(), device })?;
    let uri = server.uri("");
    Ok(InProcessServer { server, uri })
}

impl RunningDevice for InProcessServer {
    fn uri(&self) -> &str {
        &self.uri
    }

    fn client(&mut self) -> Result<Client> {
        Client::connect(&self.uri, Style::Structured).map_err(|source| {
            let what = format!("cannot connect to {}", self.uri);
            Error::Io { what, source }
        })
    }

    fn stop(self: Box<Self>) -> Result<()> {
        self.server.stop(Stop::Drained);
        Ok(())
    }

    fn settle(&mut self) -> Result<bool> {
        Ok(false)
    }
}

impl Subject for InProcess {
    fn describe(&self) -> String {
        self.name.clone()
    }

    fn prepare(&self, disk_bytes: u64, _folder: &Path) -> Result<Image> {
        Ok(Image::new(disk_bytes))
    }

    fn start(&self, disk: RecordedDisk, folder: &Path) -> Result<Box<dyn RunningDevice>> {
        Ok(Box::new(serve((self.factory)(disk), folder)?))
    }

    fn revive(&self, remains: &Remains<'_>, folder: &Path) -> Result<RestartResult> {
        let device = (self.factory)(Arc::new(remains.disk.to_device()?));
        Ok(RestartResult::Serving(Box::new(serve(device, folder)?)))
    }

    fn modes(&self) -> &[RecoveryMode] {
        &[RecoveryMode::DiskKept]
    }

    fn flushes_survive_its_disk(&self) -> bool {
        false
    }
}
