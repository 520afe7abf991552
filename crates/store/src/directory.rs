//! A store in a folder: one file per object, the key as its path.
//!
//! Invariants: a file appears under its key whole and durable, or not at all: it is written without
//! a name (or, where the file system cannot do that, under a name in `.tmp`), synced, and then
//! linked, which fails if the key is taken. `Created` is returned only after the folder and every
//! folder made on the way are durable too.
//!
//! A process may die between the link and the sync of the folder; the next process then sees an
//! object that a power cut could still remove. So the first put of a process syncs the whole file
//! system once.
//!
//! A root that vanished or was exchanged tells nothing about the objects. So `NotFound`, a list and
//! a put are answered only after a check of the root.
//!
//! Not here: folders left empty by deletes. They stay; removing them would race with puts.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::{BoxFuture, FutureExt};
use parking_lot::Mutex;
use rustix::fs::{AtFlags, CWD, Mode, OFlags};
use rustix::io::Errno;
use tokio::sync::Semaphore;

use crate::backend::{Backend, Body, Creation, WantedBytes, room_for};
use crate::key::is_key;
use crate::runtime::BLOCKING_THREADS_MAX;
use crate::{ObjectInfo, Result, StoreError, StoreErrorKind};

mod root;

use root::Root;

/// Folder for files that have no name yet, on the same file system as the objects.
const NAMELESS: &str = ".tmp";
/// A file in `.tmp` that is older than this was left by a process that died.
const NAMELESS_AGE_MAX: Duration = Duration::from_secs(24 * 3600);
/// Threads of one store inside file calls; a hung file system must leave some to the other stores.
const THREADS_MAX: usize = BLOCKING_THREADS_MAX * 3 / 4;
/// The unit of direct writes.
const BLOCK_BYTES: usize = 4096;
/// Smaller bodies are not worth a direct write.
const DIRECT_BYTES_MIN: usize = 128 << 10;
/// A long write fills the disk's queue, and every small one that comes meanwhile waits behind it,
/// also a journal's on the same disk.
const DIRECT_BYTES_MAX: usize = 1 << 20;
const FILE_MODE: u32 = 0o640;
const FOLDER_MODE: u32 = 0o750;

/// Objects in a folder.
pub(crate) struct Directory {
    shared: Arc<DirectoryState>,
    threads: Arc<Semaphore>,
}

struct DirectoryState {
    root: Root,
    durable: Mutex<Durable>,
}

/// How many folders are remembered as durable: each checkpoint makes one.
const FOLDERS_MAX: usize = if cfg!(test) { 8 } else { 4096 };

/// What this process has made durable.
#[derive(Default)]
struct Durable {
    /// Everything that the file system had at the first put.
    is_file_system_synced: bool,
    /// Folders whose entry in their parent, and so on up to the root, is durable. Bounded by
    /// [`FOLDERS_MAX`].
    folders: HashSet<PathBuf>,
}

impl Directory {
    /// The store in folder `root`, an absolute path. It need not exist yet.
    pub(crate) fn new(root: PathBuf) -> Self {
        let shared = Arc::new(DirectoryState::new(root));
        Directory { shared, threads: Arc::new(Semaphore::new(THREADS_MAX)) }
    }

    /// Runs a blocking call. If the caller stops waiting, the call continues and keeps its thread
    /// until it ends.
    fn run<T: Send + 'static>(
        &self,
        call: impl FnOnce(&DirectoryState) -> Result<T> + Send + 'static,
    ) -> BoxFuture<'_, Result<T>> {
        let shared = Arc::clone(&self.shared);
        let threads = Arc::clone(&self.threads);
        async move {
            let thread = threads.acquire_owned().await.map_err(lost)?;
            let task = tokio::task::spawn_blocking(move || {
                // The permit goes with the call, not with its caller: a caller that gives up does
                // not free the place of a thread that still hangs.
                let _thread = thread;
                call(&shared)
            });
            task.await.map_err(lost)?
        }
        .boxed()
    }
}

impl Backend for Directory {
    fn shows_progress(&self) -> bool {
        false
    }

    fn exposed_endpoint(&self) -> Option<&str> {
        None
    }

    fn get<'a>(&'a self, key: &'a str, part: WantedBytes) -> BoxFuture<'a, Result<Bytes>> {
        let key = key.to_owned();
        self.run(move |shared| shared.get(&key, &part))
    }

    fn create<'a>(&'a self, key: &'a str, body: Body) -> BoxFuture<'a, Result<Creation>> {
        let key = key.to_owned();
        self.run(move |shared| shared.create(&key, &body.bytes))
    }

    fn list<'a>(&'a self, prefix: &'a str) -> BoxFuture<'a, Result<Vec<ObjectInfo>>> {
        let prefix = prefix.to_owned();
        self.run(move |shared| shared.list(&prefix))
    }

    fn delete<'a>(&'a self, keys: &'a [String]) -> BoxFuture<'a, Result<()>> {
        let keys = keys.to_owned();
        self.run(move |shared| shared.delete(&keys))
    }
}

impl DirectoryState {
    fn new(root: PathBuf) -> Self {
        DirectoryState { root: Root::new(root), durable: Mutex::default() }
    }

    fn get(&self, key: &str, part: &WantedBytes) -> Result<Bytes> {
        // Before the look-up: if the root vanishes in between, the check below finds that out (S4).
        self.root.remember()?;
        let path = self.root.path().join(key);
        let absent = || StoreError::new(StoreErrorKind::NotFound, "no such object");
        // There may be a pipe here; waiting for its writer could take forever.
        let silence_limits = (OFlags::NONBLOCK | OFlags::NOCTTY).bits().cast_signed();
        let file = match File::options().read(true).custom_flags(silence_limits).open(&path) {
            Ok(file) => file,
            Err(error) if is_absent(&error) => {
                self.root.check()?;
                return Err(absent());
            }
            Err(error) => return Err(failure("open", &path, error)),
        };
        let about = file.metadata().map_err(|error| failure("look at", &path, error))?;
        // A folder is the beginning of other keys, never an object.
        if about.is_dir() {
            self.root.check()?;
            return Err(absent());
        }
        if !about.is_file() {
            let text = format!("{} is a pipe or a device, not a file: remove it", path.display());
            return Err(StoreError::new(StoreErrorKind::Damaged, text));
        }
        let range = part.cut(about.len())?;
        let length = (range.end - range.start) as usize;
        let mut bytes = room_for(length)?;
        while bytes.len() < length {
            let at = range.start + bytes.len() as u64;
            match rustix::io::pread(&file, rustix::buffer::spare_capacity(&mut bytes), at) {
                Ok(0) => {
                    let text = format!(
                        "file {} ends before its size: somebody changes it",
                        path.display()
                    );
                    return Err(StoreError::new(StoreErrorKind::Broken, text));
                }
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(failure("read", &path, error.into())),
            }
        }
        // The allocator may have given more room than asked for, and the file may have grown.
        bytes.truncate(length);
        Ok(Bytes::from(bytes))
    }

    fn create(&self, key: &str, body: &[u8]) -> Result<Creation> {
        // A root that was unmounted must not be made again in the file system below it.
        self.root.check()?;
        let path = self.root.path().join(key);
        let folder = path.parent().unwrap_or(self.root.path()).to_owned();
        let outcome = match self.create_in(&folder, &path, body) {
            // Another process removed the folder since we last used it.
            Err(error) if error.kind() == ErrorKind::NotFound => {
                self.root.check()?;
                self.durable.lock().folders.clear();
                self.create_in(&folder, &path, body)
            }
            other => other,
        };
        // The root may have vanished meanwhile, and the object with it.
        self.root.check()?;
        match outcome.map_err(|error| failure("create", &path, error))? {
            // To the link, a folder in the way looks like an object.
            Creation::Exists if path.is_dir() => {
                let text = format!(
                    "{} is a folder: no key may be the beginning of another",
                    path.display()
                );
                Err(StoreError::new(StoreErrorKind::Invalid, text))
            }
            creation => Ok(creation),
        }
    }

    fn create_in(&self, folder: &Path, path: &Path, body: &[u8]) -> io::Result<Creation> {
        // Before the file: a power cut that takes the folder's entry takes a durable file with it.
        self.settle(folder)?;
        let linked = match nameless(folder) {
            Ok(file) => {
                write_durably(&file, body)?;
                link_nameless(&file, path)
            }
            Err(error) => Err(error),
        };
        let linked = match linked {
            // Also after a link that failed: some file systems make nameless files and cannot link
            // them.
            Err(error) if is_unsupported(&error) => self.link_named(path, body),
            other => other,
        };
        match linked {
            Ok(()) => sync_folder(folder).map(|()| Creation::Created),
            // An earlier attempt may have created it and died before it was durable.
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                sync_folder(folder).map(|()| Creation::Exists)
            }
            Err(error) => Err(error),
        }
    }

    /// Creates through a temporary name, for file systems without nameless files.
    fn link_named(&self, path: &Path, body: &[u8]) -> io::Result<()> {
        let folder = self.root.path().join(NAMELESS);
        make_folder(&folder)?;
        // Here, because only this way of creating leaves files behind when a process dies.
        sweep(&folder);
        let random = getrandom::u64().map_err(io::Error::other)?;
        let name = folder.join(format!("{random:016x}"));
        let file = File::options().write(true).create_new(true).mode(FILE_MODE).open(&name)?;
        let linked = write_durably(&file, body).and_then(|()| fs::hard_link(&name, path));
        // If the name stays, a later sweep removes it.
        let _ = fs::remove_file(&name);
        linked
    }

    /// Makes `folder` and those above it up to the root, durably.
    fn settle(&self, folder: &Path) -> io::Result<()> {
        if self.durable.lock().folders.contains(folder) {
            return Ok(());
        }
        match folder.parent() {
            Some(parent) if folder != self.root.path() => {
                // From the root down: the entry of a folder is worth nothing before its parent's is
                // durable.
                self.settle(parent)?;
                make_folder(folder)?;
                sync_folder(parent)?;
            }
            _ => self.root.make()?,
        }
        // The lock is held through the sync: another first put must not be answered before it has
        // ended. Gets, lists and deletes do not take it.
        let mut durable = self.durable.lock();
        if !durable.is_file_system_synced {
            rustix::fs::syncfs(File::open(folder)?)?;
            durable.is_file_system_synced = true;
        }
        if durable.folders.len() >= FOLDERS_MAX {
            // A later put that needs one of them syncs it again.
            durable.folders.clear();
        }
        durable.folders.insert(folder.to_owned());
        Ok(())
    }

    fn list(&self, prefix: &str) -> Result<Vec<ObjectInfo>> {
        self.root.remember()?;
        let root = self.root.path();
        let mut found = Vec::new();
        let mut open = vec![if prefix.is_empty() { root.to_owned() } else { root.join(prefix) }];
        while let Some(folder) = open.pop() {
            let entries = match fs::read_dir(&folder) {
                Ok(entries) => entries,
                // Nothing below the prefix yet; the check at the end tells this from a missing
                // root.
                Err(error) if is_absent(&error) => continue,
                Err(error) => return Err(failure("list", &folder, error)),
            };
            for entry in entries {
                let entry = entry.map_err(|error| failure("list", &folder, error))?;
                let path = entry.path();
                // Names that cannot be keys are not ours: `.tmp`, `lost+found`.
                let Some(key) = path.strip_prefix(root).ok().and_then(Path::to_str) else {
                    continue;
                };
                if !is_key(key) {
                    continue;
                }
                match entry.metadata() {
                    Ok(about) if about.is_dir() => open.push(path),
                    Ok(about) if about.is_file() => {
                        found.push(ObjectInfo { key: key.to_owned(), size_bytes: about.len() });
                    }
                    Ok(_) => {}
                    // It was deleted after the folder was read; S6 lets a list lag.
                    Err(error) if is_absent(&error) => {}
                    Err(error) => return Err(failure("look at", &path, error)),
                }
            }
        }
        // An unmounted root reads as an empty folder: its list would hide every volume.
        self.root.check()?;
        Ok(found)
    }

    fn delete(&self, keys: &[String]) -> Result<()> {
        self.root.check()?;
        let mut touched = HashSet::new();
        for key in keys {
            let path = self.root.path().join(key);
            match fs::remove_file(&path) {
                Ok(()) => {
                    touched.extend(path.parent().map(Path::to_owned));
                }
                Err(error) if is_absent(&error) => {}
                // A folder is not an object, so there was nothing to delete.
                Err(_) if path.is_dir() => {}
                Err(error) => return Err(failure("delete", &path, error)),
            }
        }
        self.root.check()?;
        for folder in touched {
            sync_folder(&folder).map_err(|error| failure("sync", &folder, error))?;
        }
        Ok(())
    }
}

fn make_folder(folder: &Path) -> io::Result<()> {
    match fs::DirBuilder::new().mode(FOLDER_MODE).create(folder) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists && folder.is_dir() => Ok(()),
        // An object has the name of the folder: this error becomes the advice about keys.
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Err(Errno::NOTDIR.into()),
        other => other,
    }
}

fn sync_folder(folder: &Path) -> io::Result<()> {
    match File::open(folder)?.sync_all() {
        // The file system has no such call for folders, so nothing more can be done.
        Err(error) if error.kind() == ErrorKind::InvalidInput => Ok(()),
        other => other,
    }
}

/// A file in `folder` without a name; gone when closed, unless linked.
fn nameless(folder: &Path) -> io::Result<File> {
    let flags = OFlags::TMPFILE | OFlags::WRONLY | OFlags::CLOEXEC;
    Ok(File::from(rustix::fs::open(folder, flags, Mode::from_raw_mode(FILE_MODE))?))
}

/// Large bodies in aligned memory bypass the page cache: copying them there is the most expensive
/// part of a put.
fn write_durably(file: &File, body: &[u8]) -> io::Result<()> {
    let whole_blocks = body.len() / BLOCK_BYTES * BLOCK_BYTES;
    let aligned = (body.as_ptr() as usize).is_multiple_of(BLOCK_BYTES);
    let mut done = 0;
    if aligned
        && whole_blocks >= DIRECT_BYTES_MIN
        && rustix::fs::fcntl_setfl(file, OFlags::DIRECT).is_ok()
    {
        // A file system may accept the flag and refuse the write: then all of it is written the
        // usual way.
        while done < whole_blocks {
            let end = whole_blocks.min(done + DIRECT_BYTES_MAX);
            if file.write_all_at(&body[done..end], done as u64).is_err() {
                break;
            }
            done = end;
        }
        // What is left is no whole block, and direct I/O refuses that.
        rustix::fs::fcntl_setfl(file, OFlags::empty())?;
    }
    file.write_all_at(&body[done..], done as u64)?;
    file.sync_all()
}

/// Gives a nameless file its name; fails if the name is taken.
fn link_nameless(file: &File, path: &Path) -> io::Result<()> {
    // The other way, AT_EMPTY_PATH, needs a privilege (CAP_DAC_READ_SEARCH).
    let itself = format!("/proc/self/fd/{}", file.as_raw_fd());
    match rustix::fs::linkat(CWD, itself, CWD, path, AtFlags::SYMLINK_FOLLOW) {
        // Without /proc there is another way to link.
        Err(Errno::NOENT) if !Path::new("/proc/self/fd").exists() => Err(Errno::OPNOTSUPP.into()),
        other => Ok(other?),
    }
}

/// Removes what dead processes left.
fn sweep(folder: &Path) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        let age = entry
            .metadata()
            .and_then(|about| about.modified())
            .ok()
            .and_then(|at| at.elapsed().ok());
        if age.is_some_and(|age| age > NAMELESS_AGE_MAX) {
            // A failure costs only space; the next sweep tries again.
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// Whether the file system reports, definitely, that no object has this path.
fn is_absent(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory)
}

/// Whether the file system lacks nameless files, or cannot link them.
fn is_unsupported(error: &io::Error) -> bool {
    let code = error.raw_os_error().map(Errno::from_raw_os_error);
    matches!(
        code,
        // ISDIR: without support for the flag, the open is one of a folder for writing.
        Some(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL | Errno::NOSYS | Errno::XDEV)
    )
}

/// What it means that a call got no thread, or that its thread did not come to its end.
fn lost(error: impl std::error::Error + Send + Sync + 'static) -> StoreError {
    StoreError::new(StoreErrorKind::Unavailable, "the store's threads have ended")
        .with_source(error)
}

/// What a failed file call means for the store's caller.
fn failure(verb: &str, path: &Path, error: io::Error) -> StoreError {
    let (kind, advice) = match error.raw_os_error().map(Errno::from_raw_os_error) {
        Some(Errno::ACCESS | Errno::PERM) => {
            (StoreErrorKind::Denied, "; check owner and mode of the folder")
        }
        Some(Errno::ROFS) => (StoreErrorKind::Denied, "; mount it for writing"),
        // Not final: the client repeats the put, and the journal keeps the writes until then.
        Some(Errno::NOSPC | Errno::DQUOT) => (StoreErrorKind::Unavailable, "; free some space"),
        Some(Errno::MFILE | Errno::NFILE) => {
            (StoreErrorKind::Unavailable, "; raise the limit on open files")
        }
        Some(Errno::NOTDIR | Errno::ISDIR) => {
            (StoreErrorKind::Invalid, "; no key may be the beginning of another")
        }
        Some(Errno::NAMETOOLONG | Errno::LOOP) => {
            (StoreErrorKind::Invalid, "; choose another root folder")
        }
        // An unknown error permits no conclusion about the object (S4).
        _ => (StoreErrorKind::Unavailable, ""),
    };
    StoreError::new(kind, format!("cannot {verb} {}: {error}{advice}", path.display()))
        .with_source(error)
}

#[cfg(test)]
mod tests;
