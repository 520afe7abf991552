//! The folder of a device in configfs, where the module keeps its attributes.
//!
//! Invariant: an error names the attribute, and says where the kernel explains it. Not here: which
//! values (`server`).

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use sawmill_device::{Error, ErrorKind, Result};

use super::{CHECK_EVERY, DOOR};

/// The folder of one device.
#[derive(Clone, Debug)]
pub(super) struct DeviceConfig {
    folder: PathBuf,
    pub(super) id: u32,
}

/// Converts an error of the system.
pub(super) fn failed(what: &str, error: io::Error) -> Error {
    let kind = match error.kind() {
        io::ErrorKind::ResourceBusy => ErrorKind::InUse,
        io::ErrorKind::AlreadyExists => ErrorKind::Exists,
        _ => ErrorKind::of_io(&error),
    };
    Error::caused(kind, format!("{DOOR}: {what}"), error)
}

/// The numbers of all devices, in order.
///
/// Errors: `Unavailable` without the module; `Denied` without the right to it.
pub(super) fn numbers(config_folder: &Path) -> Result<Vec<u32>> {
    let listed = std::fs::read_dir(config_folder).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => {
            let text = format!(
                "{DOOR}: there is no {}: load the kernel module (see `sawmill help buse-module`)",
                config_folder.display()
            );
            Error::new(ErrorKind::Unavailable, text).with_source(error)
        }
        _ => failed(&format!("cannot read {}", config_folder.display()), error),
    })?;
    let number = |name: std::ffi::OsString| name.to_str()?.parse().ok();
    let mut numbers: Vec<u32> =
        listed.flatten().filter_map(|entry| number(entry.file_name())).collect();
    numbers.sort_unstable();
    Ok(numbers)
}

impl DeviceConfig {
    /// The device with this number, which exists.
    pub(super) fn of(config_folder: &Path, id: u32) -> Self {
        DeviceConfig { folder: config_folder.join(id.to_string()), id }
    }

    /// Makes a device, without power. Errors: `Exists`.
    pub(super) fn make(config_folder: &Path, id: u32) -> Result<Self> {
        let config = DeviceConfig::of(config_folder, id);
        std::fs::create_dir(&config.folder).map_err(|error| {
            let place = config.folder.display();
            let what = match error.kind() {
                io::ErrorKind::AlreadyExists => format!(
                    "device {id} exists and is not this volume's; if nobody uses it: rmdir {place}"
                ),
                _ => format!("cannot make {place}"),
            };
            failed(&what, error)
        })?;
        Ok(config)
    }

    /// Distinguishes this device from others that have had its number.
    pub(super) fn instance(&self) -> Option<u64> {
        std::fs::metadata(&self.folder).map(|about| about.ino()).ok()
    }

    pub(super) fn set(&self, attribute: &str, value: impl ToString) -> Result<()> {
        let value = value.to_string();
        std::fs::write(self.folder.join(attribute), &value).map_err(|error| {
            let what = format!(
                "the kernel refuses {attribute}={value} of device {}; its log (dmesg) says why",
                self.id
            );
            failed(&what, error)
        })
    }

    pub(super) fn text(&self, attribute: &str) -> Result<String> {
        let text = std::fs::read_to_string(self.folder.join(attribute)).map_err(|error| {
            failed(&format!("cannot read {attribute} of device {}", self.id), error)
        })?;
        Ok(text.trim().to_owned())
    }

    pub(super) fn number(&self, attribute: &str) -> Result<u64> {
        let text = self.text(attribute)?;
        text.parse().map_err(|_| {
            let what = format!("{DOOR}: {attribute} of device {} is {text:?}", self.id);
            Error::new(ErrorKind::Unavailable, what)
        })
    }

    /// The state of the device, once it is not stopping any more; `None` if there is none.
    pub(super) fn state(&self, time_max: Duration) -> Result<Option<String>> {
        let began = Instant::now();
        loop {
            match self.text("state") {
                Ok(state) if state == "stopping" && began.elapsed() < time_max => {
                    std::thread::sleep(CHECK_EVERY);
                }
                Ok(state) => return Ok(Some(state)),
                Err(_) if !self.folder.exists() => return Ok(None),
                Err(error) => return Err(error),
            }
        }
    }

    /// Whether the device keeps what its users wait for until a server comes.
    pub(super) fn waits(&self, time_max: Duration) -> Result<bool> {
        let state = self.state(time_max)?;
        // One that waited for too long is `failing`, and keeps everything all the same.
        let is_on = state.is_some_and(|state| state != "off" && state != "stopping");
        Ok(is_on && self.text("on_death")? == "wait")
    }

    /// Removes the device, also with power. It may be gone already.
    pub(super) fn remove(&self) {
        if let Err(error) = std::fs::remove_dir(&self.folder)
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(%error, id = self.id, "buse: cannot remove a device");
        }
    }
}
