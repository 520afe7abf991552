//! The ublk devices of this machine, their owners, and the removal of devices without a server.
//!
//! A device of ours has a signature in the ublk driver: a prefix and a hash of its volume's
//! identity. Other facts are in a file (`device_facts`).
//!
//! Invariants: a device without our signature, or with a living server, is never touched. The file
//! exists before the node of the device. Not here: serving.

use std::io;
use std::path::{Path, PathBuf};

use sawmill_device::{Error, ErrorKind, Result};
use sawmill_sys::ublk::{Control, DeviceState, node_path};

use super::DOOR;
use super::protocol::{is_ours, signature};
use crate::device_facts::{DeviceFacts, DeviceLock, facts_path, is_locked, remove_symlink};

/// Where the kernel lists the character devices of ublk.
const CLASS_FOLDER: &str = "/sys/class/ublk-char";

/// A ublk device of this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// The number in `/dev/ublkbN`.
    pub id: u32,
    /// Its state in the kernel.
    pub state: DeviceState,
    /// Its current or last server process.
    pub server_pid: Option<u32>,
    /// Whether a living process serves it.
    pub is_alive: bool,
    /// Whether this program made it; other devices are shown, and not touched.
    pub is_ours: bool,
    /// The identity of the volume it was made for, if the run folder has it.
    pub volume: Option<String>,
    /// The name of its symbolic link, if the run folder has it.
    pub symlink: Option<String>,
    /// Its size.
    pub size_bytes: u64,
    signature: u64,
}

impl DeviceInfo {
    /// Whether the device was made for the volume with this identity; certain even without the run
    /// folder.
    #[must_use]
    pub fn is_for(&self, volume: &str) -> bool {
        self.signature == signature(volume)
    }

    /// Whether no process serves it or is about to: it waits for a server, or is the remains of
    /// one.
    #[must_use]
    pub fn is_orphan(&self) -> bool {
        self.is_ours && !self.is_alive
    }

    /// The block device.
    #[must_use]
    pub fn node(&self) -> PathBuf {
        node_path(self.id)
    }
}

/// Opens the driver's control node, or says what to do.
pub(super) fn control() -> Result<Control> {
    Control::open().map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => Error::new(
            ErrorKind::Unavailable,
            "ublk: there is no /dev/ublk-control: load the module (modprobe ublk_drv), \
             Linux 6.5 or later",
        )
        .with_source(error),
        io::ErrorKind::PermissionDenied => Error::new(
            ErrorKind::Denied,
            "ublk: permission denied for /dev/ublk-control: run as root, or let udev \
             give it to this user",
        )
        .with_source(error),
        _ => failed("cannot open /dev/ublk-control", error),
    })
}

/// Converts an error of the system.
pub(super) fn failed(what: &str, error: io::Error) -> Error {
    let kind = match error.kind() {
        // Of a lock, and of the driver.
        io::ErrorKind::WouldBlock => ErrorKind::InUse,
        _ => ErrorKind::of_io(&error),
    };
    Error::caused(kind, format!("ublk: {what}"), error)
}

/// All ublk devices of this machine, including those of other programs, by number. A device that
/// vanishes during this is omitted. Returns `Unavailable` if the kernel has no ublk, `Denied`
/// without permission.
pub fn devices(run_folder: &Path) -> Result<Vec<DeviceInfo>> {
    let mut control = control()?;
    let listed = match std::fs::read_dir(CLASS_FOLDER) {
        Ok(listed) => listed,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(failed(&format!("cannot read {CLASS_FOLDER}"), error)),
    };
    let number = |name: std::ffi::OsString| name.to_str()?.strip_prefix("ublkc")?.parse().ok();
    let mut ids: Vec<u32> =
        listed.flatten().filter_map(|entry| number(entry.file_name())).collect();
    ids.sort_unstable();
    let mut devices = Vec::new();
    for id in ids {
        match device(&mut control, run_folder, id) {
            Ok(device) => devices.push(device),
            // Gone between the list and the question.
            Err(error) if error.kind() == ErrorKind::NotFound => (),
            Err(error) => return Err(error),
        }
    }
    Ok(devices)
}

/// One ublk device. Errors: `NotFound`.
pub(super) fn device(control: &mut Control, run_folder: &Path, id: u32) -> Result<DeviceInfo> {
    let info = control.info(id).map_err(|error| match error.raw_os_error() {
        // The driver's errors for an unknown number.
        Some(19 | 22) => Error::new(ErrorKind::NotFound, format!("ublk: there is no device {id}"))
            .with_source(error),
        _ => failed(&format!("cannot query device {id}"), error),
    })?;
    // The file may be left from an older device with the same number; the signature in the
    // driver is certain.
    let facts = DeviceFacts::read(run_folder, id)
        .filter(|facts| signature(&facts.volume) == info.server_signature);
    let size_bytes = control.parameters(id).map_or(0, |parameters| parameters.device_sectors * 512);
    let server_pid = u32::try_from(info.server_pid).ok().filter(|pid| *pid > 0);
    let is_alive = is_alive(info.state(), server_pid, is_locked(&facts_path(run_folder, id)));
    Ok(DeviceInfo {
        id,
        state: info.state(),
        server_pid,
        is_alive,
        is_ours: is_ours(info.server_signature),
        volume: facts.as_ref().map(|facts| facts.volume.clone()),
        symlink: facts.and_then(|facts| facts.symlink),
        size_bytes,
        signature: info.server_signature,
    })
}

fn lives(pid: u32) -> bool {
    Path::new("/proc").join(pid.to_string()).exists()
}

/// Whether a living process has a device. `server_pid`: the process that the driver names.
/// `is_locked`: whether the device's file is locked, if it exists.
pub(super) fn is_alive(
    state: DeviceState,
    server_pid: Option<u32>,
    is_locked: Option<bool>,
) -> bool {
    match is_locked {
        // Another process may have this process id by now. The lock is more reliable.
        Some(true) => true,
        // Except for a device that was added just now: it has no lock yet, and the file
        // belongs to an older one. For a stopped device, the driver forgets the process.
        Some(false) => state == DeviceState::Dead && server_pid.is_some_and(lives),
        None => state != DeviceState::Quiesced && server_pid.is_some_and(lives),
    }
}

/// Removes a device without a server. Its users get errors from now on.
///
/// Errors: `NotFound`; `Refused` for a device of another program; `InUse` for one with a living
/// server.
pub fn delete(run_folder: &Path, symlink_folder: &Path, id: u32) -> Result<()> {
    let mut control = control()?;
    let device_info = device(&mut control, run_folder, id)?;
    if !device_info.is_ours {
        let text = format!("ublk: device {id} belongs to another program and was not changed");
        return Err(Error::new(ErrorKind::Refused, text));
    }
    let in_use = || {
        let server = device_info
            .server_pid
            .map_or_else(|| "a process".into(), |pid| format!("process {pid}"));
        Error::new(
            ErrorKind::InUse,
            format!("ublk: device {id} is served by {server}; stop that server first"),
        )
    };
    if device_info.is_alive {
        return Err(in_use());
    }
    // With the lock, no process takes the device over during the removal.
    let device_lock =
        DeviceLock::wait(DOOR, run_folder, id).map_err(|error| match error.kind() {
            ErrorKind::InUse => in_use().with_source(error),
            _ => error,
        })?;
    // Before the lock, it may have been replaced by another device that has no lock yet.
    let info = control.info(id).map_err(|error| failed(&format!("device {id} vanished"), error))?;
    let server_pid = u32::try_from(info.server_pid).ok();
    if info.server_signature != device_info.signature
        || is_alive(info.state(), server_pid, Some(false))
    {
        return Err(in_use());
    }
    remove_symlink(symlink_folder, device_info.symlink.as_deref(), &node_path(id));
    control.stop(id).map_err(|error| failed(&format!("cannot stop device {id}"), error))?;
    // The file goes while the number is still taken. After the delete, the number may belong to a
    // new device, whose file this would be.
    device_lock.remove();
    control.delete(id).map_err(|error| failed(&format!("cannot delete device {id}"), error))
}
