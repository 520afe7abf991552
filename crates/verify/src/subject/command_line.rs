//! Any NBD server as a device under test, given by a command line with two placeholders:
//! `{backing}`, the path of its disk, and `{socket}`, the Unix socket on which it must serve.
//!
//! While it is recorded, its disk is a file that `nbdfuse` shows; after a crash it is a plain file.
//! The server must stay in the foreground, and must serve again on the disk that a crash left,
//! which is the test.
//!
//! Invariant: a server that is recorded ends before its disk, and the disk's file before the NBD
//! server behind the file.
//!
//! Not here: Sawmill's binary (`sawmill`), which uses the server and the disk of this file.

use std::path::{Path, PathBuf};

use sawmill_frontend::nbd::{Export, Listen, NbdOptions, NbdServer};

use super::{RecordedDisk, RecoveryMode, Remains, RestartResult, RunningDevice, Subject};
use crate::bridge::NbdFile;
use crate::image::Image;
use crate::nbd::{Client, Style};
use crate::program::{self, Process};
use crate::{Error, Result};

/// An NBD server's command line.
pub struct CommandLine {
    template: String,
}

impl CommandLine {
    /// Checks that the command line has both placeholders.
    pub fn new(template: &str) -> Result<Self> {
        for hole in ["{backing}", "{socket}"] {
            if !template.contains(hole) {
                let text = format!(
                    "the command line of the device lacks {hole}: write it where the server is \
                     told its {}, as in 'nbdkit -f -U {{socket}} file {{backing}}'",
                    if hole == "{backing}" { "disk" } else { "socket" }
                );
                return Err(Error::Usage(text));
            }
        }
        Ok(CommandLine { template: template.to_owned() })
    }

    fn spawn(&self, backing: &Path, folder: &Path) -> Result<Server> {
        let socket = folder.join("device.sock");
        // A socket that a dead server left.
        let _ = std::fs::remove_file(&socket);
        let line = self
            .template
            .replace("{backing}", &quoted(backing))
            .replace("{socket}", &quoted(&socket));
        let mut command = program::command("sh")?;
        // With `exec`, signals reach the server and not a shell around it.
        command.args(["-c", &format!("exec {line}")]).current_dir(folder);
        let process = Process::start(&mut command, &folder.join("device.output"))?;
        let uri = format!("nbd+unix:///?socket={}", socket.display());
        Server::connect(process, uri)
    }
}

/// A path as one word of a shell.
fn quoted(path: &Path) -> String {
    format!("'{}'", path.display().to_string().replace('\'', "'\\''"))
}

/// A server that has accepted a first connection.
pub(super) struct Server {
    pub(super) process: Process,
    uri: String,
    first: Option<Client>,
}

impl Server {
    /// Waits until the server accepts a connection, and keeps it: some servers accept only one.
    pub(super) fn connect(mut process: Process, uri: String) -> Result<Self> {
        let ask = || Client::connect(&uri, Style::Structured).ok();
        let first = process.wait_for("the server accepts a connection", ask)?;
        Ok(Server { process, uri, first: Some(first) })
    }

    /// As [`connect`](Self::connect), for a server that is started after a crash; it may also end
    /// with the exit code `refused`.
    pub(super) fn revived(
        mut process: Process,
        uri: String,
        refused: i32,
    ) -> Result<RestartResult> {
        let ask = || Client::connect(&uri, Style::Structured).ok();
        match process.wait_for("the restarted server accepts a connection", ask) {
            Ok(first) => {
                Ok(RestartResult::Serving(Box::new(Server { process, uri, first: Some(first) })))
            }
            // Only this exit code: to refuse a disk that is too old is legal (`cut_check`), and to
            // crash is not.
            Err(_) if process.ended().is_some_and(|status| status.code() == Some(refused)) => {
                Ok(RestartResult::Refused(process.output()))
            }
            Err(error) => Err(error),
        }
    }
}

impl RunningDevice for Server {
    fn uri(&self) -> &str {
        &self.uri
    }

    fn client(&mut self) -> Result<Client> {
        if let Some(client) = self.first.take() {
            return Ok(client);
        }
        Client::connect(&self.uri, Style::Structured)
            .map_err(|source| Error::Io { what: format!("cannot connect to {}", self.uri), source })
    }

    fn stop(mut self: Box<Self>) -> Result<()> {
        self.process.stop();
        Ok(())
    }

    fn settle(&mut self) -> Result<bool> {
        Ok(false)
    }
}

/// A recording disk shown as a file.
pub(super) struct ShownDisk {
    file: NbdFile,
    // Dropped after the file: it answers its last requests.
    _server: NbdServer,
}

impl ShownDisk {
    /// Shows `disk` as `folder/backing`.
    pub(super) fn new(disk: RecordedDisk, folder: &Path) -> Result<Self> {
        let server = NbdServer::start(NbdOptions::new(Listen::Unix(folder.join("disk.sock"))))?;
        server.add_export(Export {
            name: String::new(),
            description: String::new(),
            device: disk,
        })?;
        let file = NbdFile::new(&server.uri(""), &folder.join("backing"))?;
        Ok(ShownDisk { file, _server: server })
    }

    pub(super) fn path(&self) -> PathBuf {
        self.file.path().to_owned()
    }
}

/// A server on a recording disk. Fields are dropped in their order: the server before its disk.
struct RecordedServer {
    server: Box<Server>,
    _disk: ShownDisk,
}

impl RunningDevice for RecordedServer {
    fn uri(&self) -> &str {
        self.server.uri()
    }

    fn client(&mut self) -> Result<Client> {
        self.server.client()
    }

    fn stop(self: Box<Self>) -> Result<()> {
        self.server.stop()
    }

    fn settle(&mut self) -> Result<bool> {
        Ok(false)
    }
}

impl Subject for CommandLine {
    fn describe(&self) -> String {
        self.template.clone()
    }

    fn prepare(&self, disk_bytes: u64, _folder: &Path) -> Result<Image> {
        Ok(Image::new(disk_bytes))
    }

    fn start(&self, disk: RecordedDisk, folder: &Path) -> Result<Box<dyn RunningDevice>> {
        let disk = ShownDisk::new(disk, folder)?;
        let server = Box::new(self.spawn(&disk.path(), folder)?);
        Ok(Box::new(RecordedServer { server, _disk: disk }))
    }

    fn revive(&self, remains: &Remains<'_>, folder: &Path) -> Result<RestartResult> {
        let backing = folder.join("backing");
        remains
            .disk
            .write_file(&backing)
            .map_err(|error| Error::io("cannot make", &backing, error))?;
        Ok(RestartResult::Serving(Box::new(self.spawn(&backing, folder)?)))
    }

    fn modes(&self) -> &[RecoveryMode] {
        &[RecoveryMode::DiskKept]
    }

    fn flushes_survive_its_disk(&self) -> bool {
        false
    }
}
