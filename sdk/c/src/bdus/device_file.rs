//! What outlives a driver: the number of each device, and a file with the device's facts for later
//! drivers and commands.
//!
//! Invariants: a number is used once, until the machine restarts (the folder is in memory); a
//! device's file is opened while the program has its privileges, and written through that. Not
//! here: the host, which knows devices by the name `bdus-NUMBER`.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use sawmill_driver::client::query;

use super::fault::Fault;
use super::layout::{Attrs, Ops};

/// The folder of the devices' files, instead of below `/run`: for tests, and for users without
/// privileges.
const FOLDER_VARIABLE: &str = "SAWMILL_BDUS_FOLDER";

/// What a device's file says: lines `name=value`.
#[derive(Clone, Debug, Default)]
pub(super) struct DeviceFacts(Vec<(String, String)>);

/// The file of a device, open.
pub(super) struct DeviceFile(File);

fn folder() -> Result<PathBuf, Fault> {
    let user = user_id();
    let folder = match (std::env::var_os(FOLDER_VARIABLE), std::env::var_os("XDG_RUNTIME_DIR")) {
        (Some(folder), _) => PathBuf::from(folder),
        (None, _) if user == 0 => PathBuf::from("/run/sawmill-bdus"),
        (None, Some(runtime)) => PathBuf::from(runtime).join("sawmill-bdus"),
        (None, None) => PathBuf::from(format!("/tmp/sawmill-bdus-{user}")),
    };
    let outcome = DirBuilder::new().recursive(true).mode(0o700).create(&folder);
    outcome.map_err(|error| Fault::from(error).about(&folder))?;
    let is_ours = std::fs::symlink_metadata(&folder)
        .is_ok_and(|metadata| metadata.is_dir() && metadata.uid() == user);
    if !is_ours {
        let text = format!("{} is not a folder of this user", folder.display());
        return Err(Fault::new(libc::EACCES, &text));
    }
    Ok(folder)
}

/// The user with whose rights this process runs.
pub(super) fn user_id() -> u32 {
    // SAFETY: a system call without arguments that cannot fail.
    unsafe { libc::geteuid() }
}

fn open(path: &Path) -> Result<File, Fault> {
    let mut options = OpenOptions::new();
    let file = options.read(true).write(true).create(true).truncate(false).mode(0o600).open(path);
    file.map_err(|error| Fault::from(error).about(path))
}

/// The number that the next device will get.
fn next() -> Result<u64, Fault> {
    next_in(&folder()?)
}

/// Assigns a number that no device has had.
pub(super) fn number() -> Result<u64, Fault> {
    number_in(&folder()?)
}

/// The file with the number of the next device.
fn counter_path(folder: &Path) -> PathBuf {
    folder.join("next")
}

fn next_in(folder: &Path) -> Result<u64, Fault> {
    let path = counter_path(folder);
    read_counter(&mut open(&path)?, folder).map_err(|fault| fault.about(&path))
}

fn number_in(folder: &Path) -> Result<u64, Fault> {
    let path = counter_path(folder);
    advance_counter(&mut open(&path)?, folder).map_err(|fault| fault.about(&path))
}

fn read_counter(file: &mut File, folder: &Path) -> Result<u64, Fault> {
    let mut text = String::new();
    file.read_to_string(&mut text)?;
    if text.is_empty() {
        // The file was just made, or emptied: the devices' files show which numbers were used.
        return next_by_files(folder);
    }
    // Not 0 again: that number has been used.
    text.trim().parse().map_err(|_| Fault::new(libc::EIO, "damaged: it does not hold a number"))
}

/// The number after the highest one that names a device's file or its log; 0 without any.
fn next_by_files(folder: &Path) -> Result<u64, Fault> {
    let mut next = 0;
    for entry in std::fs::read_dir(folder)? {
        let name = entry?.file_name();
        let number = name.to_str().map(|name| name.strip_suffix(".log").unwrap_or(name));
        if let Some(Ok(number)) = number.map(str::parse) {
            next = after(number)?.max(next);
        }
    }
    Ok(next)
}

fn after(number: u64) -> Result<u64, Fault> {
    number.checked_add(1).ok_or_else(|| {
        Fault::new(libc::EIO, "damaged: there is no number after the last one that was used")
    })
}

/// Returns the number in the file, and leaves the one after it there.
fn advance_counter(file: &mut File, folder: &Path) -> Result<u64, Fault> {
    file.lock()?;
    let number = read_counter(file, folder)?;
    let next = after(number)?;
    file.seek(SeekFrom::Start(0))?;
    write!(file, "{next}")?;
    Ok(number)
}

impl DeviceFacts {
    pub(super) fn of(socket: &Path, ops: &Ops, attrs: &Attrs) -> Self {
        let mut facts = DeviceFacts::default();
        facts.set("socket", &socket.display().to_string());
        let operations: Vec<&str> =
            ops.named().iter().filter(|(_, is_there)| *is_there).map(|(name, _)| *name).collect();
        facts.set("ops", &operations.join(","));
        for (name, value) in attrs.named() {
            facts.set(name, &value.to_string());
        }
        facts
    }

    pub(super) fn get(&self, name: &str) -> &str {
        let entry = self.0.iter().find(|(key, _)| key == name);
        entry.map_or("", |(_, value)| value.as_str())
    }

    pub(super) fn number(&self, name: &str) -> u64 {
        self.get(name).parse().unwrap_or(0)
    }

    pub(super) fn set(&mut self, name: &str, value: &str) {
        self.0.retain(|(key, _)| key != name);
        self.0.push((name.to_owned(), value.replace('\n', " ")));
    }

    pub(super) fn socket(&self) -> PathBuf {
        PathBuf::from(self.get("socket"))
    }

    fn read(path: &Path) -> Option<Self> {
        let text = std::fs::read_to_string(path).ok()?;
        let pairs = text.lines().filter_map(|line| line.split_once('='));
        Some(DeviceFacts(pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).collect()))
    }
}

impl DeviceFile {
    /// Opens the file of a device, which may be new.
    pub(super) fn open(number: u64) -> Result<Self, Fault> {
        Ok(DeviceFile(open(&folder()?.join(number.to_string()))?))
    }

    pub(super) fn write(&self, facts: &DeviceFacts) -> Result<(), Fault> {
        let text: String =
            facts.0.iter().map(|(name, value)| format!("{name}={value}\n")).collect();
        let mut file = &self.0;
        file.seek(SeekFrom::Start(0))?;
        file.set_len(0)?;
        file.write_all(text.as_bytes())?;
        Ok(())
    }
}

/// The path of a device's log.
pub(super) fn log_path(number: u64) -> Result<PathBuf, Fault> {
    Ok(folder()?.join(format!("{number}.log")))
}

/// The facts of a device that exists: its host answers.
pub(super) fn find(number: u64) -> Result<DeviceFacts, Fault> {
    let none = |errno, text: String| Err(Fault::new(errno, &text));
    if number >= next()? {
        return none(libc::EINVAL, format!("there never was a device with the id {number}"));
    }
    match DeviceFacts::read(&folder()?.join(number.to_string())) {
        Some(facts) if query(&facts.socket(), "status").is_ok() => Ok(facts),
        _ => none(libc::ENODEV, format!("the device with the id {number} is not there any more")),
    }
}

/// The number of the device with this path.
pub(super) fn find_by_path(path: &str) -> Result<u64, Fault> {
    let file_id = std::fs::metadata(path)
        .ok()
        .map(|metadata| (metadata.dev(), metadata.ino(), metadata.rdev()));
    for number in (0..next()?).rev() {
        let Some(facts) = DeviceFacts::read(&folder()?.join(number.to_string())) else { continue };
        let device_path = facts.get("path");
        let same_file = || {
            std::fs::metadata(device_path)
                .ok()
                .map(|metadata| (metadata.dev(), metadata.ino(), metadata.rdev()))
        };
        let is_it = device_path == path || (file_id.is_some() && same_file() == file_id);
        if is_it && !device_path.is_empty() && find(number).is_ok() {
            return Ok(number);
        }
    }
    let errno = if file_id.is_none() { libc::ENOENT } else { libc::EINVAL };
    Err(Fault::new(errno, &format!("{path} is no device with a driver")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_damaged_counter_is_an_error_and_assigns_no_number_again() {
        let folder = folder_for("damaged");
        let path = counter_path(&folder);
        assert_eq!((number_in(&folder).unwrap(), number_in(&folder).unwrap()), (0, 1));
        for damaged in ["nonsense", "1x", "-1", "\0\0", " ", "18446744073709551615"] {
            std::fs::write(&path, damaged).unwrap();
            let fault = number_in(&folder).unwrap_err();
            assert_eq!(fault.errno, libc::EIO, "{damaged:?}");
            assert!(fault.message.contains(path.to_str().unwrap()), "{}", fault.message);
            assert_eq!(std::fs::read_to_string(&path).unwrap(), damaged, "it stays as it is");
        }
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn an_emptied_counter_continues_after_the_last_device() {
        let folder = folder_for("emptied");
        let path = counter_path(&folder);
        for used in ["0", "9", "10", "10.log", "x", "+"] {
            std::fs::write(folder.join(used), "").unwrap();
        }
        assert_eq!(number_in(&folder).unwrap(), 11, "the counter is lost");
        std::fs::write(&path, "").unwrap();
        std::fs::write(folder.join("11.log"), "").unwrap();
        assert_eq!(next_in(&folder).unwrap(), 12, "the counter is emptied");
        assert_eq!((number_in(&folder).unwrap(), number_in(&folder).unwrap()), (12, 13));
        std::fs::remove_dir_all(&folder).unwrap();
    }

    fn folder_for(name: &str) -> PathBuf {
        let name = format!("sawmill-bdus-{name}-{}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&folder).unwrap();
        folder
    }
}
