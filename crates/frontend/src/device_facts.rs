//! The facts of a block device whose requests this process serves, for the next server: in a file
//! per device in a run folder, in lines `NAME="value"` that udev can import. And the symbolic link
//! to the device's node.
//!
//! Invariants: a living server holds the lock of the file. A text in it never adds a line or a
//! variable. Not here: which devices the kernel has.

use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use sawmill_device::{Error, ErrorKind, Result};
use sawmill_sys::FileLock;

/// Interval of checks for conditions that the kernel does not report.
const CHECK_EVERY: Duration = Duration::from_millis(1);
/// Time for another living server to leave a device that is being taken over.
const LEAVE_TIME_MAX: Duration = Duration::from_secs(5);

pub(crate) fn facts_path(run_folder: &Path, id: u32) -> PathBuf {
    run_folder.join(id.to_string())
}

/// The facts of a device in the run folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DeviceFacts {
    pub(crate) volume: String,
    pub(crate) symlink: Option<String>,
    /// A server has started to take the device over and has not finished.
    pub(crate) is_recovering: bool,
    /// Distinguishes the device from others that have had its number, where the kernel keeps no
    /// signature of it.
    pub(crate) instance: Option<u64>,
}

impl DeviceFacts {
    pub(crate) fn read(run_folder: &Path, id: u32) -> Option<Self> {
        Self::parse(&std::fs::read_to_string(facts_path(run_folder, id)).ok()?)
    }

    pub(crate) fn parse(text: &str) -> Option<Self> {
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
            instance: value("SAWMILL_INSTANCE").and_then(|number| number.parse().ok()),
        })
    }

    pub(crate) fn text(&self) -> String {
        let symlink =
            self.symlink.as_ref().map(|name| format!("SAWMILL_LINK=\"{}\"\n", quoted(name)));
        let recovering = if self.is_recovering { "SAWMILL_RECOVERING=\"1\"\n" } else { "" };
        let instance = self.instance.map(|number| format!("SAWMILL_INSTANCE=\"{number}\"\n"));
        format!(
            "SAWMILL_VOLUME=\"{}\"\n{}{recovering}{}",
            quoted(&self.volume),
            symlink.unwrap_or_default(),
            instance.unwrap_or_default()
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
pub(crate) fn is_locked(path: &Path) -> Option<bool> {
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
pub(crate) struct DeviceLock {
    door: &'static str,
    path: PathBuf,
    _lock: FileLock,
}

fn failed(door: &str, what: &str, error: io::Error) -> Error {
    Error::caused(ErrorKind::of_io(&error), format!("{door}: {what}"), error)
}

impl DeviceLock {
    /// Takes the right to a device of this kind of door. Returns `InUse` if another process has it.
    pub(crate) fn take(door: &'static str, run_folder: &Path, id: u32) -> Result<Self> {
        let path = facts_path(run_folder, id);
        let wrong =
            |error: io::Error| failed(door, &format!("cannot use {}", path.display()), error);
        std::fs::DirBuilder::new().recursive(true).mode(0o755).create(run_folder).map_err(wrong)?;
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(false).mode(0o644).open(&path).map_err(wrong)?;
        // The lock ends with the process, also with a killed one. A process id in a file would
        // outlive it.
        let lock = FileLock::take(&path).map_err(|error| match error.kind() {
            io::ErrorKind::WouldBlock => {
                let text = format!("{door}: another process holds device {id}");
                Error::new(ErrorKind::InUse, text).with_source(error)
            }
            _ => wrong(error),
        })?;
        // The file may have been removed, and its name be another's, since it was opened.
        if !lock.has_name(&path) {
            let text = format!("{door}: another process removes device {id}");
            return Err(Error::new(ErrorKind::InUse, text));
        }
        Ok(DeviceLock { door, path, _lock: lock })
    }

    /// Takes the right as soon as it is released, by a server that is stopping or a process that
    /// only looks. Returns `InUse` if that does not happen soon.
    pub(crate) fn wait(door: &'static str, run_folder: &Path, id: u32) -> Result<Self> {
        let began = Instant::now();
        loop {
            match DeviceLock::take(door, run_folder, id) {
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
    pub(crate) fn write(&self, facts: &DeviceFacts) -> Result<()> {
        // In place, and not by a rename: the lock is on this file.
        std::fs::write(&self.path, facts.text()).map_err(|error| {
            failed(self.door, &format!("cannot write {}", self.path.display()), error)
        })
    }

    /// The device is about to be removed, and its number may be reused soon, so remove the file
    /// first.
    pub(crate) fn remove(self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Makes the symbolic link to a device's node, if udev did not.
pub(crate) fn make_symlink(symlink_folder: &Path, name: Option<&str>, node: &Path) {
    let Some(name) = name else { return };
    let symlink = symlink_folder.join(name);
    if std::fs::read_link(&symlink).is_ok_and(|target| points_to(&symlink, &target, node)) {
        return;
    }
    let make = || {
        std::fs::create_dir_all(symlink_folder)?;
        match std::fs::symlink_metadata(&symlink) {
            // A symbolic link of ours to a removed device. Any other file there stays.
            Ok(there) if there.is_symlink() => std::fs::remove_file(&symlink)?,
            Ok(_) | Err(_) => (),
        }
        std::os::unix::fs::symlink(node, &symlink)
    };
    if let Err(error) = make() {
        tracing::warn!(%error, link = %symlink.display(), "cannot create the link to the device");
    }
}

/// Removes the symbolic link to a device, if it still points there.
pub(crate) fn remove_symlink(symlink_folder: &Path, name: Option<&str>, node: &Path) {
    let Some(name) = name else { return };
    let symlink = symlink_folder.join(name);
    if std::fs::read_link(&symlink).is_ok_and(|target| points_to(&symlink, &target, node)) {
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
