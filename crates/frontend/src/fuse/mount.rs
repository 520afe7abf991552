//! The mount: its folder, how it is made and removed.
//!
//! Root mounts with mount(2), others with `fusermount3`. Invariant: this thread never makes a
//! system call on a mount whose server may still come, because the call could block. Not here: what
//! is served.

use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc::sync_channel;
use std::time::Duration;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use sawmill_device::{Error, ErrorKind, Result};
use sawmill_sys::LoopDevice;

/// The type of our mounts in the kernel's list.
const KIND: &str = "fuse.sawmill";
/// Time for the server of another mount to show that it is alive.
const PROBE_TIME_MAX: Duration = Duration::from_secs(2);
/// The most symbolic links in one path, as in the kernel.
const SYMLINKS_MAX: u32 = 40;

/// A mounted file system.
pub(super) struct Mount {
    /// The path without symbolic links.
    pub(super) path: PathBuf,
    /// The minor number of its device: another mount at the same path has another number.
    minor: Option<String>,
}

/// How to mount.
pub(super) struct MountOptions<'a> {
    pub(super) name: &'a str,
    pub(super) read_only: bool,
    pub(super) allow_other: bool,
    pub(super) read_bytes_max: u32,
}

fn refusal(kind: ErrorKind, path: &Path, text: impl std::fmt::Display) -> Error {
    Error::new(kind, format!("fuse: {}: {text}", path.display()))
}

/// The system does not let us use this folder.
fn unusable(path: &Path, error: impl Into<std::io::Error>) -> Error {
    Error::caused(ErrorKind::Unavailable, format!("fuse: {}", path.display()), error.into())
}

/// One line of the kernel's list of mounts.
struct Entry {
    path: PathBuf,
    kind: String,
    /// The device's minor number.
    minor: String,
}

/// Decodes `\040` and similar escapes of the list.
fn unescaped(text: &str) -> PathBuf {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&first, behind)) = rest.split_first() {
        let octal = behind.get(..3).filter(|_| first == b'\\');
        let value =
            octal.and_then(|digits| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 8).ok());
        bytes.push(value.unwrap_or(first));
        rest = if value.is_some() { &behind[3..] } else { behind };
    }
    PathBuf::from(std::ffi::OsStr::from_bytes(&bytes))
}

fn entry(line: &str) -> Option<Entry> {
    let (place, kind) = line.split_once(" - ")?;
    let mut words = place.split(' ').skip(2);
    let (device, path) = (words.next()?, words.nth(1)?);
    let (minor, kind) = (device.split_once(':')?.1.to_owned(), kind.split(' ').next()?.to_owned());
    Some(Entry { path: unescaped(path), kind, minor })
}

/// The topmost mount at this path.
fn mounted_at(path: &Path) -> Option<Entry> {
    let list = std::fs::read_to_string("/proc/self/mountinfo").ok()?;
    list.lines().rev().filter_map(entry).find(|entry| entry.path == path)
}

/// The minor number of the device of our kind that is mounted there.
fn ours_at(path: &Path) -> Option<String> {
    mounted_at(path).filter(|found| found.kind == KIND).map(|found| found.minor)
}

/// Resolves the symbolic links in a path without asking a file system that may be mounted there:
/// reading a folder as a link fails before that.
pub(super) fn settled(path: &Path) -> std::io::Result<PathBuf> {
    let mut path = path.to_owned();
    for _ in 0..SYMLINKS_MAX {
        let Some(name) = path.file_name() else { return path.canonicalize() };
        let parent =
            path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let place = parent.canonicalize()?.join(name);
        match std::fs::read_link(&place) {
            Ok(target) => path = place.with_file_name("").join(target),
            Err(_) => return Ok(place),
        }
    }
    Err(Errno::LOOP.into())
}

/// Why the folder cannot be used; it may be missing.
fn folder_error(path: &Path, error: std::io::Error) -> Error {
    if error.kind() != std::io::ErrorKind::NotFound {
        return unusable(path, error);
    }
    let text = "no such folder: create it first, because the volume appears in it";
    refusal(ErrorKind::NotFound, path, text).with_source(error)
}

/// Prepares the folder for a mount: removes what dead servers of ours left there.
fn prepared(path: &Path) -> Result<PathBuf> {
    let path = settled(path).map_err(|error| folder_error(path, error))?;
    // Mounts of several dead servers may lie on each other.
    while let Some(existing_mount) = mounted_at(&path) {
        let kind = &existing_mount.kind;
        if kind != KIND {
            let text = format!(
                "a file system of type {kind} is mounted there; unmount it or choose another folder"
            );
            return Err(refusal(ErrorKind::InUse, &path, text));
        }
        match probe(&path) {
            Some(Err(Errno::NOTCONN)) => {
                tracing::info!(
                    mountpoint = %path.display(), "fuse: removed the mount of a dead server"
                );
                // Otherwise a loop device would keep an unserved file, and could not be found by
                // name.
                for device in LoopDevice::attached_below(&path) {
                    let _ = device.detach();
                }
                unmount(&path, UnmountMode::Lazily).map_err(|error| unusable(&path, error))?;
            }
            Some(_) => {
                let text = "another server has its volume there; stop it or choose another folder";
                return Err(refusal(ErrorKind::InUse, &path, text));
            }
            None => {
                let text = "a mount there waits for its server, and a mount holder holds it: \
                            restart that server with the same socket, or remove the mount with \
                            `umount -f -l`";
                return Err(refusal(ErrorKind::InUse, &path, text));
            }
        }
    }
    let facts = std::fs::metadata(&path).map_err(|error| folder_error(&path, error))?;
    if !facts.is_dir() {
        return Err(refusal(ErrorKind::Invalid, &path, "is not a folder"));
    }
    let mut entries = std::fs::read_dir(&path).map_err(|error| unusable(&path, error))?;
    if entries.next().is_some() {
        return Err(refusal(
            ErrorKind::Invalid,
            &path,
            "is not empty: a mount would hide its content",
        ));
    }
    Ok(path)
}

/// Asks a mount's server, from a thread that may block forever; `None` if it blocks. The kernel may
/// cache attributes, but not the free space, so this asks for the latter.
fn probe(path: &Path) -> Option<Result<(), Errno>> {
    let (sender, receiver) = sync_channel(1);
    let path = path.to_owned();
    let ask = move || {
        let _ = sender.send(rustix::fs::statvfs(path).map(drop));
    };
    std::thread::Builder::new().name("fuse-probe".into()).spawn(ask).ok()?;
    receiver.recv_timeout(PROBE_TIME_MAX).ok()
}

impl Mount {
    /// Mounts, and returns the descriptor for the kernel's requests. Errors say what is wrong with
    /// the folder.
    pub(super) fn make(path: &Path, options: &MountOptions<'_>) -> Result<(Self, OwnedFd)> {
        let path = prepared(path)?;
        let root = rustix::process::geteuid().is_root();
        // Without root, mounting needs the set-user-ID helper of the distribution.
        let kernel = if root { by_root(&path, options)? } else { by_fusermount(&path, options)? };
        let mount = Mount::existing(path);
        let nonblocking = rustix::fs::fcntl_getfl(&kernel)
            .and_then(|flags| rustix::fs::fcntl_setfl(&kernel, flags | OFlags::NONBLOCK));
        match nonblocking {
            Ok(()) => Ok((mount, kernel)),
            Err(error) => {
                mount.abandon();
                Err(unusable(&mount.path, error))
            }
        }
    }

    /// The mount at this path.
    pub(super) fn existing(path: PathBuf) -> Self {
        let minor = ours_at(&path);
        Mount { path, minor }
    }

    fn is_there(&self) -> bool {
        // The user may have unmounted it and mounted something else there, which is not ours to
        // remove.
        self.minor.is_some() && self.minor == ours_at(&self.path)
    }

    /// Unmounts if it is not in use. Errors: BUSY.
    pub(super) fn unmount(&self) -> std::io::Result<()> {
        if self.is_there() { unmount(&self.path, UnmountMode::Cleanly) } else { Ok(()) }
    }

    /// Detaches the mount; its remaining users get errors instead of answers.
    pub(super) fn abandon(&self) {
        let Some(minor) = self.minor.as_ref().filter(|_| self.is_there()) else { return };
        // A lazy unmount alone leaves those that wait for an answer waiting. The abort wakes them
        // with an error.
        if std::fs::write(format!("/sys/fs/fuse/connections/{minor}/abort"), "1").is_err() {
            // If that is not possible: root may force it; a remaining BUSY does not matter.
            let _ = rustix::mount::unmount(&self.path, UnmountFlags::FORCE);
        }
        if let Err(error) = unmount(&self.path, UnmountMode::Lazily) {
            tracing::warn!(%error, mountpoint = %self.path.display(), "fuse: cannot be unmounted");
        }
    }
}

/// Whether an unmount may leave open files behind.
#[derive(Clone, Copy, PartialEq, Eq)]
enum UnmountMode {
    Cleanly,
    Lazily,
}

fn unmount(path: &Path, mode: UnmountMode) -> std::io::Result<()> {
    if rustix::process::geteuid().is_root() {
        let flags =
            if mode == UnmountMode::Lazily { UnmountFlags::DETACH } else { UnmountFlags::empty() };
        return Ok(rustix::mount::unmount(path, flags | UnmountFlags::NOFOLLOW)?);
    }
    let option = if mode == UnmountMode::Lazily { "-uz" } else { "-u" };
    let output = Command::new("fusermount3").arg("-q").arg(option).arg("--").arg(path).output()?;
    if output.status.success() { Ok(()) } else { Err(Errno::BUSY.into()) }
}

fn by_root(path: &Path, options: &MountOptions<'_>) -> Result<OwnedFd> {
    let denied = |what: &str, error: Errno| {
        let text = format!(
            "{what}: {error}; check that the kernel's fuse module is loaded and that this process \
            may mount"
        );
        refusal(ErrorKind::Unavailable, path, text).with_source(error)
    };
    let kernel = rustix::fs::open("/dev/fuse", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
        .map_err(|error| denied("/dev/fuse cannot be opened", error))?;
    let (user, group) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    let (descriptor, read_max) = (kernel.as_raw_fd(), options.read_bytes_max);
    let others = if options.allow_other { ",allow_other" } else { "" };
    let data = format!(
        "fd={descriptor},rootmode=40000,user_id={user},group_id={group},\
         default_permissions,max_read={read_max}{others}\0"
    );
    let data = std::ffi::CString::from_vec_with_nul(data.into_bytes()).unwrap_or_default();
    let read_only = if options.read_only { MountFlags::RDONLY } else { MountFlags::empty() };
    // The file's content is the user's. Nothing in the folder may ever count as a device or gain
    // rights.
    let flags = MountFlags::NOSUID | MountFlags::NODEV | read_only;
    rustix::mount::mount(options.name, path, KIND, flags, data.as_c_str())
        .map_err(|error| denied("cannot be mounted", error))?;
    Ok(kernel)
}

fn by_fusermount(path: &Path, options: &MountOptions<'_>) -> Result<OwnedFd> {
    let failed = |text: String| refusal(ErrorKind::Unavailable, path, text);
    let (ours, theirs) =
        socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
            .map_err(|error| failed(error.to_string()).with_source(error))?;
    let plain = |letter: char| {
        if letter.is_ascii_alphanumeric() || "._-".contains(letter) { letter } else { '_' }
    };
    // A comma in the name would begin another option of the mount.
    let name: String = options.name.chars().map(plain).collect();
    let mut mount_flags = format!(
        "fsname={name},subtype=sawmill,nosuid,nodev,default_permissions,max_read={}",
        options.read_bytes_max
    );
    mount_flags.push_str(if options.allow_other { ",allow_other" } else { "" });
    mount_flags.push_str(if options.read_only { ",ro" } else { "" });
    let mut helper = Command::new("fusermount3");
    helper.arg("-o").arg(mount_flags).arg("--").arg(path);
    // It sends the descriptor to the socket that this names: its standard input.
    helper.env("_FUSE_COMMFD", "0").stdin(Stdio::from(theirs)).stderr(Stdio::piped());
    let output = helper
        .output()
        .map_err(|error| failed(format!("cannot run fusermount3: {error}")).with_source(error))?;
    // Close the helper's copy of the socket, so that a missing answer is an end and not a wait.
    drop(helper);
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        return Err(failed(format!("fusermount3 failed: {text}")));
    }
    let received = sawmill_sys::descriptors::receive(&ours, &mut [0; 1]);
    let mut descriptors =
        received.map_err(|error| failed(error.to_string()).with_source(error))?.descriptors;
    descriptors.pop().ok_or_else(|| failed("fusermount3 sent no descriptor".into()))
}
