//! Sawmill's own binary as a device under test: its journal lies on the recorded disk, its store is
//! a folder.
//!
//! A crash leaves the journal according to the cut, and the store as it was at that time. Objects
//! are immutable, and only their names appear and disappear, so a hard link keeps each object, and
//! the set of names is recorded before every entry of the recording. Memory that outlives the
//! process is lost, as after a power failure.
//!
//! Invariant: this file depends on the binary's command line, its exit code for a refusal, and the
//! files of its folder store, and on nothing inside.
//!
//! Not here: the server's process and the recorded disk (`command_line`), where power fails
//! (`plan`, `power_cut`), the judging (`cut_check`).

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use parking_lot::Mutex;

use super::command_line::{Server, ShownDisk};
use super::{RecordedDisk, RecoveryMode, Remains, RestartResult, RunningDevice, Subject};
use crate::image::Image;
use crate::nbd::Client;
use crate::program::{self, Process};
use crate::{Error, Result};

const VOLUME: &str = "disk";
/// The binary's exit code for a refusal to continue.
const REFUSED: i32 = 5;

/// Sawmill's own binary, whose journal is the disk that loses power.
pub struct Sawmill {
    binary: PathBuf,
    volume_bytes: u64,
    flush: String,
}

impl Sawmill {
    /// The binary at `binary`, with a volume of `volume_bytes` and this mode of flush.
    #[must_use]
    pub fn new(binary: &Path, volume_bytes: u64, flush: &str) -> Self {
        Sawmill { binary: binary.to_owned(), volume_bytes, flush: flush.to_owned() }
    }

    /// A `sawmill` command in a folder of its own, with the store in that folder.
    fn command(&self, folder: &Path) -> Command {
        let mut command = Command::new(&self.binary);
        command.env("SAWMILL_STORE", format!("file://{}", folder.join("store").display()));
        // All state in the folder: the notes of the user's own volumes must not take part, and a
        // crash must find its own.
        for name in ["STATE_HOME", "DATA_HOME", "RUNTIME_DIR", "CACHE_HOME", "CONFIG_HOME"] {
            command.env(format!("XDG_{name}"), folder.join("home"));
        }
        command.env("HOME", folder.join("home"));
        // A server under test must not report itself to the service manager of the check.
        command.env_remove("NOTIFY_SOCKET").stdin(std::process::Stdio::null());
        command
    }

    fn serve(&self, folder: &Path, options: &[&str]) -> Result<Process> {
        let socket = folder.join("device.sock");
        // A socket that a dead server left.
        let _ = fs::remove_file(&socket);
        let staging = folder.join("staging");
        make_folder(&staging)?;
        let mut command = self.command(folder);
        command.args(["serve", VOLUME, "--cache-bytes", "0", "--segment-age", "200ms"]);
        command.args(["--checkpoint-bytes", "2M", "--staging-bytes", "8M"]).args(options);
        command
            .arg("--staging")
            .arg(&staging)
            .arg("--nbd")
            .arg(format!("unix:{}", socket.display()));
        Process::start(&mut command, &folder.join("device.output"))
    }
}

fn make_folder(path: &Path) -> Result<()> {
    fs::create_dir_all(path).map_err(|error| Error::io("cannot make the folder", path, error))
}

fn uri_in(folder: &Path) -> String {
    format!("nbd+unix:///{VOLUME}?socket={}", folder.join("device.sock").display())
}

/// The objects of a store, before every entry of the recording.
#[derive(Default)]
struct ObjectHistory {
    now: BTreeSet<String>,
    /// The changes, as lines: entry, `+` or `-`, key.
    changes: String,
    failed: Option<io::Error>,
}

impl ObjectHistory {
    /// Records the objects of the store before entry `number`, and links the new ones into the
    /// vault.
    fn take(&mut self, number: usize, store: &Path, vault: &Path) {
        if self.failed.is_none()
            && let Err(error) = self.try_take(number, store, vault)
        {
            // An observer cannot fail a request. The error is reported at the stop.
            self.failed = Some(error);
        }
    }

    fn try_take(&mut self, number: usize, store: &Path, vault: &Path) -> io::Result<()> {
        let found = loop {
            let found = steady(store)?;
            // The server may delete an object between the listing and the link. Then the listing is
            // out of date, and is made again.
            if self.link_new(&found, store, vault)? {
                break found;
            }
        };
        for key in found.difference(&self.now) {
            self.changes.push_str(&format!("{number} + {key}\n"));
        }
        for key in self.now.difference(&found) {
            self.changes.push_str(&format!("{number} - {key}\n"));
        }
        self.now = found;
        Ok(())
    }

    /// Links new objects into the vault; false when one disappeared before it was linked.
    fn link_new(&self, found: &BTreeSet<String>, store: &Path, vault: &Path) -> io::Result<bool> {
        for key in found.difference(&self.now) {
            let kept = vault.join(key);
            fs::create_dir_all(kept.parent().unwrap_or(vault))?;
            match fs::hard_link(store.join(key), &kept) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
                // An earlier pass linked it.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                linked => linked?,
            }
        }
        Ok(true)
    }
}

/// The keys of the objects in a folder store, once two listings in a row are equal: then the store
/// held exactly these at one time.
fn steady(store: &Path) -> io::Result<BTreeSet<String>> {
    let mut found = objects(store)?;
    loop {
        let again = objects(store)?;
        if again == found {
            return Ok(found);
        }
        found = again;
    }
}

/// The keys of the objects in a folder store.
fn objects(store: &Path) -> io::Result<BTreeSet<String>> {
    let (mut found, mut folders) = (BTreeSet::new(), vec![store.to_owned()]);
    while let Some(folder) = folders.pop() {
        let entries = match fs::read_dir(&folder) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            entries => entries?,
        };
        for entry in entries {
            let entry = entry?;
            if entry.file_name() == ".tmp" {
                continue;
            }
            let path = entry.path();
            match entry.file_type() {
                Ok(kind) if kind.is_dir() => folders.push(path),
                _ => {
                    let key = path.strip_prefix(store).unwrap_or(&path);
                    found.insert(key.display().to_string());
                }
            }
        }
    }
    Ok(found)
}

/// Makes the store as it was before entry `entry` from the vault.
fn restore(folder: &Path, entry: usize, store: &Path) -> Result<()> {
    let path = folder.join("objects");
    let text = fs::read_to_string(&path).map_err(|error| Error::io("cannot read", &path, error))?;
    let mut there = BTreeSet::new();
    for line in text.lines() {
        let mut words = line.splitn(3, ' ');
        let (number, sign, key) = (words.next(), words.next(), words.next().unwrap_or_default());
        if number
            .and_then(|number| number.parse::<usize>().ok())
            .is_none_or(|number| number > entry)
        {
            break;
        }
        if sign == Some("+") {
            there.insert(key)
        } else {
            there.remove(key)
        };
    }
    make_folder(store)?;
    for key in there {
        let to = store.join(key);
        make_folder(to.parent().unwrap_or(store))?;
        let from = folder.join("vault").join(key);
        fs::hard_link(&from, &to).map_err(|error| Error::io("cannot link", &from, error))?;
    }
    Ok(())
}

/// Stops a server cleanly.
fn stop(process: &mut Process) -> Result<()> {
    let status = process.stop();
    if status.success() {
        return Ok(());
    }
    Err(Error::Subject(format!("sawmill serve failed at its end ({status}): {}", process.output())))
}

/// A server while it is recorded. Fields are dropped in their order.
struct ServerRecording {
    server: Box<Server>,
    _mount: ShownDisk,
    disk: RecordedDisk,
    census: Arc<Mutex<ObjectHistory>>,
    folder: PathBuf,
    wait: Command,
}

impl RunningDevice for ServerRecording {
    fn uri(&self) -> &str {
        self.server.uri()
    }

    fn client(&mut self) -> Result<Client> {
        self.server.client()
    }

    fn settle(&mut self) -> Result<bool> {
        program::run(&mut self.wait)?;
        Ok(true)
    }

    fn stop(mut self: Box<Self>) -> Result<()> {
        stop(&mut self.server.process)?;
        let mut census = self.census.lock();
        census.take(
            self.disk.entry_count(),
            &self.folder.join("store"),
            &self.folder.join("vault"),
        );
        if let Some(error) = census.failed.take() {
            return Err(Error::io("cannot keep the objects of", &self.folder.join("store"), error));
        }
        let path = self.folder.join("objects");
        fs::write(&path, &census.changes).map_err(|error| Error::io("cannot write", &path, error))
    }
}

impl Subject for Sawmill {
    fn describe(&self) -> String {
        format!("sawmill, flush {}", self.flush)
    }

    /// Makes a volume, and a journal that is bound to it; the binary would set aside a journal file
    /// with other content.
    fn prepare(&self, disk_bytes: u64, folder: &Path) -> Result<Image> {
        make_folder(&folder.join("store"))?;
        let size = self.volume_bytes.to_string();
        let mut create = self.command(folder);
        create.args([
            "create",
            VOLUME,
            "--size",
            &size,
            "--segment-bytes",
            "256K",
            "--flush",
            &self.flush,
        ]);
        program::run(&mut create)?;
        let journal = folder.join("journal");
        let (at, size) = (journal.display().to_string(), disk_bytes.to_string());
        let process = self.serve(folder, &["--journal", &at, "--journal-bytes", &size])?;
        stop(&mut Server::connect(process, uri_in(folder))?.process)?;
        let image = Image::read_file(&journal)
            .map_err(|error| Error::io("cannot read", &journal, error))?;
        fs::remove_file(&journal).map_err(|error| Error::io("cannot remove", &journal, error))?;
        Ok(image)
    }

    fn start(&self, disk: RecordedDisk, folder: &Path) -> Result<Box<dyn RunningDevice>> {
        let census = Arc::new(Mutex::new(ObjectHistory::default()));
        let (observed, store, vault) =
            (Arc::clone(&census), folder.join("store"), folder.join("vault"));
        disk.observe(Box::new(move |number| observed.lock().take(number, &store, &vault)));
        let mount = ShownDisk::new(Arc::clone(&disk), folder)?;
        let journal = mount.path().display().to_string();
        let process = self.serve(folder, &["--journal", &journal])?;
        let server = Box::new(Server::connect(process, uri_in(folder))?);
        let mut wait = self.command(folder);
        wait.args(["wait", VOLUME, "--stored", "--timeout", "60s"]);
        Ok(Box::new(ServerRecording {
            server,
            _mount: mount,
            disk,
            census,
            folder: folder.to_owned(),
            wait,
        }))
    }

    fn revive(&self, remains: &Remains<'_>, folder: &Path) -> Result<RestartResult> {
        let place = folder.join("revived");
        match fs::remove_dir_all(&place) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(Error::io("cannot empty", &place, error));
            }
            _ => make_folder(&place)?,
        }
        restore(folder, remains.cut.entry, &place.join("store"))?;
        let journal = place.join("journal");
        let at = journal.display().to_string();
        let options = match remains.mode {
            RecoveryMode::DiskKept | RecoveryMode::DiskStale => {
                let outcome = remains.disk.write_file(&journal);
                outcome.map_err(|error| Error::io("cannot make", &journal, error))?;
                // The option is needed because this machine was not restarted, although the
                // simulated one lost power.
                vec!["--journal", &at, "--accept-memory-loss"]
            }
            RecoveryMode::DiskLost => {
                vec!["--journal", &at, "--journal-bytes", "16M", "--accept-journal-loss"]
            }
            RecoveryMode::Elsewhere => vec!["--read-only"],
        };
        let process = self.serve(&place, &options)?;
        Server::revived(process, uri_in(&place), REFUSED)
    }

    fn modes(&self) -> &[RecoveryMode] {
        // Most cuts keep the disk, because the other ways are judged by fewer facts.
        &[
            RecoveryMode::DiskKept,
            RecoveryMode::DiskLost,
            RecoveryMode::DiskKept,
            RecoveryMode::DiskStale,
            RecoveryMode::DiskKept,
            RecoveryMode::Elsewhere,
        ]
    }

    fn flushes_survive_its_disk(&self) -> bool {
        self.flush == "stored"
    }
}
