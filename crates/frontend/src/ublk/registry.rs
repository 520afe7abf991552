//! The ublk devices of this machine, their owners, and the removal of devices without a server.
//!
//! A device of ours has a signature in the ublk driver: a prefix and a hash of its volume's
//! identity. Other facts are in a file per device in the run folder, in lines `NAME="value"` that
//! udev can import. A living server holds the lock of that file.
//!
//! Invariants: a device without our signature, or with a living server, is never touched. The file
//! exists before the node of the device. Not here: serving.

use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Instant;

use sawmill_device::{Error, ErrorKind, Result};
use sawmill_sys::FileLock;
use sawmill_sys::ublk::{Control, DeviceState, node_path};

use super::limits::{CHECK_EVERY, LEAVE_TIME_MAX};
use super::protocol::{is_ours, signature};

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
    let device_lock = DeviceLock::wait(run_folder, id).map_err(|error| match error.kind() {
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
    remove_symlink(symlink_folder, device_info.symlink.as_deref(), id);
    control.stop(id).map_err(|error| failed(&format!("cannot stop device {id}"), error))?;
    // The file goes while the number is still taken. After the delete, the number may belong to a
    // new device, whose file this would be.
    device_lock.remove();
    control.delete(id).map_err(|error| failed(&format!("cannot delete device {id}"), error))
}

pub(super) fn facts_path(run_folder: &Path, id: u32) -> PathBuf {
    run_folder.join(id.to_string())
}

/// The facts of a device in the run folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct DeviceFacts {
    pub(super) volume: String,
    pub(super) symlink: Option<String>,
    /// A server has started to take the device over and has not finished.
    pub(super) is_recovering: bool,
}

impl DeviceFacts {
    pub(super) fn read(run_folder: &Path, id: u32) -> Option<Self> {
        Self::parse(&std::fs::read_to_string(facts_path(run_folder, id)).ok()?)
    }

    pub(super) fn parse(text: &str) -> Option<Self> {
        let value = |name: &str| {
            let line =
                text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix("=\""))?;
            plain(line.strip_suffix('"')?)
        };
        let is_recovering = value("SAWMILL_RECOVERING").is_some();
        Some(DeviceFacts {
            volume: value("SAWMILL_VOLUME")?,
            symlink: value("SAWMILL_LINK"),
            is_recovering,
        })
    }

    pub(super) fn text(&self) -> String {
        let symlink =
            self.symlink.as_ref().map(|name| format!("SAWMILL_LINK=\"{}\"\n", quoted(name)));
        let recovering = if self.is_recovering { "SAWMILL_RECOVERING=\"1\"\n" } else { "" };
        format!(
            "SAWMILL_VOLUME=\"{}\"\n{}{recovering}",
            quoted(&self.volume),
            symlink.unwrap_or_default()
        )
    }
}

/// Encodes everything that could end a quoted value, or the line, as `%XX`.
fn quoted(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        // udev imports this file (`60-sawmill.rules`): a volume's name must not add a variable
        // there.
        if (b' '..=b'~').contains(&byte) && !b"\"%\\$`".contains(&byte) {
            out.push(byte.into());
        } else {
            out.push_str(&format!("%{byte:02X}"));
        }
    }
    out
}

/// Decodes a text of [`quoted`].
fn plain(text: &str) -> Option<String> {
    let mut out = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, after @ ..] = rest {
        rest = after;
        if *first == b'%' {
            let digits = std::str::from_utf8(after.get(..2)?).ok()?;
            out.push(u8::from_str_radix(digits, 16).ok()?);
            rest = &after[2..];
        } else {
            out.push(*first);
        }
    }
    String::from_utf8(out).ok()
}

/// Whether a living server holds this file; `None` if there is no file.
pub(super) fn is_locked(path: &Path) -> Option<bool> {
    use rustix::fs::{FlockOperation, flock};
    let file = std::fs::File::open(path).ok()?;
    // Shared, so that two processes that only look do not mistake each other for the server.
    match flock(&file, FlockOperation::NonBlockingLockShared) {
        Ok(()) => Some(false),
        Err(rustix::io::Errno::WOULDBLOCK) => Some(true),
        Err(_) => None,
    }
}

/// The right to serve one device, or to remove it, until dropped.
pub(super) struct DeviceLock {
    path: PathBuf,
    _lock: FileLock,
}

impl DeviceLock {
    /// Takes the right. Returns `InUse` if another process has it.
    pub(super) fn take(run_folder: &Path, id: u32) -> Result<Self> {
        let path = facts_path(run_folder, id);
        let wrong = |error: io::Error| failed(&format!("cannot use {}", path.display()), error);
        std::fs::DirBuilder::new().recursive(true).mode(0o755).create(run_folder).map_err(wrong)?;
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(false).mode(0o644).open(&path).map_err(wrong)?;
        // The lock ends with the process, also with a killed one. A process id in a file would
        // outlive it.
        let lock = FileLock::take(&path).map_err(|error| match error.kind() {
            io::ErrorKind::WouldBlock => {
                Error::new(ErrorKind::InUse, format!("ublk: another process holds device {id}"))
                    .with_source(error)
            }
            _ => wrong(error),
        })?;
        Ok(DeviceLock { path, _lock: lock })
    }

    /// Takes the right as soon as it is released, by a server that is stopping or a process that
    /// only looks. Returns `InUse` if that does not happen soon.
    pub(super) fn wait(run_folder: &Path, id: u32) -> Result<Self> {
        let began = Instant::now();
        loop {
            match DeviceLock::take(run_folder, id) {
                Err(error)
                    if error.kind() == ErrorKind::InUse && began.elapsed() < LEAVE_TIME_MAX =>
                {
                    std::thread::sleep(CHECK_EVERY);
                }
                outcome => return outcome,
            }
        }
    }

    /// Writes the facts of the device.
    pub(super) fn write(&self, facts: &DeviceFacts) -> Result<()> {
        // In place, and not by a rename: the lock is on this file.
        std::fs::write(&self.path, facts.text())
            .map_err(|error| failed(&format!("cannot write {}", self.path.display()), error))
    }

    /// The device is about to be removed, and its number may be reused soon, so remove the file
    /// first.
    pub(super) fn remove(self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Makes the symbolic link to a device, if udev did not.
pub(super) fn make_symlink(symlink_folder: &Path, name: Option<&str>, id: u32) {
    let Some(name) = name else { return };
    let (symlink, node) = (symlink_folder.join(name), node_path(id));
    if std::fs::read_link(&symlink).is_ok_and(|target| points_to(&symlink, &target, &node)) {
        return;
    }
    let make = || {
        std::fs::create_dir_all(symlink_folder)?;
        match std::fs::symlink_metadata(&symlink) {
            // A symbolic link of ours to a removed device. Any other file there stays.
            Ok(there) if there.is_symlink() => std::fs::remove_file(&symlink)?,
            Ok(_) | Err(_) => (),
        }
        std::os::unix::fs::symlink(&node, &symlink)
    };
    if let Err(error) = make() {
        tracing::warn!(%error, link = %symlink.display(), "ublk: cannot create the link to the \
            device");
    }
}

/// Removes the symbolic link to a device, if it still points there.
pub(super) fn remove_symlink(symlink_folder: &Path, name: Option<&str>, id: u32) {
    let Some(name) = name else { return };
    let symlink = symlink_folder.join(name);
    if std::fs::read_link(&symlink).is_ok_and(|target| points_to(&symlink, &target, &node_path(id)))
    {
        let _ = std::fs::remove_file(&symlink);
    }
}

/// Whether a symbolic link's target is this node, absolute or, as udev writes it, relative.
fn points_to(symlink: &Path, target: &Path, node: &Path) -> bool {
    target == node
        || (target.file_name() == node.file_name()
            && symlink.starts_with("/dev")
            && target.starts_with(".."))
}
