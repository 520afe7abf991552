//! Disk images of other systems. QEMU's own programs read and write them, and serve them to us as
//! an NBD export on a private socket.
//!
//! Invariants: an image is opened in the given format, never in the one that its content claims:
//! the writer of a raw image controls its content, and could make it look like an image that refers
//! to files of this machine. QEMU sees no image before its headers were checked here
//! (`inspect_image`), and runs in a `cage`. An image is checked before it is read, because QEMU
//! reads truncated parts as zeroes.
//!
//! Not here: the limits of QEMU's programs (`cage`), the format of a source (`image_file`), copying
//! (`super`).

use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Output, Stdio};
use std::time::{Duration, Instant};

use super::cage;
pub(crate) use super::cage::Access;
use super::ends::NbdEnd;
use super::inspect_image;
pub(crate) use super::inspect_image::BackingFiles;
use sawmill_console::exit::{Exit, Failure, Result};
use sawmill_format::disk_image::Format;

/// Time for QEMU to open an image.
const START_TIME_MAX: Duration = Duration::from_secs(60);
/// Time for QEMU to check an image: it reads all metadata.
const CHECK_TIME_MAX: Duration = Duration::from_secs(3600);

/// Refuses an image that is damaged or truncated, and one that reads other files unless that is
/// allowed.
pub(crate) fn check(path: &Path, format: Format, backing_files: BackingFiles) -> Result<()> {
    let path = &whole(path)?;
    // Before QEMU sees the file, which would open whatever its headers name (P131).
    inspect_image::inspect(path, format, backing_files)?;
    let output =
        run_qemu_img(path, Access::Read, &["check", "--output=json", "-f", format.name()], &[])?;
    match output.status.code() {
        // The image is fine, or has unused clusters, or is in a format without checks.
        Some(0 | 3 | 63) => Ok(()),
        Some(2) => {
            let text = format!(
                "{} is damaged or truncated: nothing was imported; `qemu-img check {0}` says more",
                path.display()
            );
            Err(Failure::new(Exit::Corrupt, text))
        }
        _ => Err(failure_of(path, &output)),
    }
}

/// Creates an empty image.
pub(crate) fn create(path: &Path, format: Format, size_bytes: u64) -> Result<()> {
    let path = &whole(path)?;
    let size = size_bytes.to_string();
    let output =
        run_qemu_img(path, Access::Write, &["create", "-q", "-f", format.name()], &[&size])?;
    if output.status.success() { Ok(()) } else { Err(failure_of(path, &output)) }
}

/// An unambiguous path: QEMU takes `nbd:...` and the like as addresses.
fn whole(path: &Path) -> Result<PathBuf> {
    path.canonicalize()
        .or_else(|_| std::path::absolute(path))
        .map_err(|error| Failure::io(format!("cannot find {}", path.display()), &error))
}

/// Runs `qemu-img` on a file, with arguments before and after its name.
fn run_qemu_img(path: &Path, access: Access, before: &[&str], after: &[&str]) -> Result<Output> {
    let ran = cage::run("qemu-img", access, CHECK_TIME_MAX, &|program| {
        program.args(before).arg(path).args(after);
    });
    let ended = ran.map_err(|error| missing("qemu-img", &error))?;
    ended.ok_or_else(|| {
        let text = format!(
            "qemu-img took more than {} s for {}",
            CHECK_TIME_MAX.as_secs(),
            path.display()
        );
        Failure::new(Exit::Unavailable, text)
    })
}

fn missing(program: &str, error: &io::Error) -> Failure {
    if error.kind() == io::ErrorKind::NotFound {
        let text = format!(
            "{program} is not installed, but images other than raw need it: install QEMU's tools \
             (qemu-utils, qemu-img), or convert the image to raw elsewhere"
        );
        return Failure::new(Exit::NotFound, text);
    }
    Failure::io(format!("cannot run {program}"), error)
}

/// QEMU's output as an error of ours.
fn failure_of(path: &Path, output: &Output) -> Failure {
    let stderr = String::from_utf8_lossy(&output.stderr);
    let text = format!("QEMU cannot use {}: {}", path.display(), stderr.trim());
    Failure::new(Exit::Unavailable, text)
}

/// An image that `qemu-nbd` serves to us. It exits when our only connection ends, also if we are
/// killed.
pub(crate) struct ImageServer {
    child: Child,
    path: PathBuf,
    _folder: tempfile::TempDir,
}

impl ImageServer {
    /// Opens an image; the export is its disk.
    pub(crate) fn start(
        path: &Path,
        format: Format,
        access: Access,
    ) -> Result<(ImageServer, NbdEnd)> {
        let path = whole(path)?;
        let folder = tempfile::Builder::new().prefix("sawmill-").tempdir();
        let folder =
            folder.map_err(|error| Failure::io("cannot make a temporary folder", &error))?;
        let socket = folder.path().join("image.sock");
        let started = cage::spawn("qemu-nbd", access, &|program| {
            program.arg(format!("--format={}", format.name())).arg("--socket").arg(&socket);
            program.args(["--cache=writeback", "--discard=unmap"]);
            if access == Access::Read {
                program.arg("--read-only");
            }
            program.arg(&path).stdout(Stdio::null()).stderr(Stdio::piped());
        });
        let child = started.map_err(|error| missing("qemu-nbd", &error))?;
        let mut server = ImageServer { child, path, _folder: folder };
        let end = server.connect(&format!("nbd+unix:///?socket={}", socket.display()))?;
        let name = server.path.display().to_string();
        Ok((server, end.named(name)))
    }

    /// Connects once: the server exits after its first connection. It listens as soon as the image
    /// is open.
    fn connect(&mut self, uri: &str) -> Result<NbdEnd> {
        let deadline = Instant::now() + START_TIME_MAX;
        loop {
            match NbdEnd::try_connect(uri) {
                Ok(end) => return Ok(end),
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused
                    ) => {}
                Err(error) => return Err(Failure::io("cannot connect to qemu-nbd", &error)),
            }
            let ended = self.child.try_wait().map_err(|error| missing("qemu-nbd", &error))?;
            if ended.is_some() || Instant::now() > deadline {
                return Err(self.failure());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// The reason why it does not serve.
    fn failure(&mut self) -> Failure {
        // It may still be running, but it reports nothing more.
        // Kill it first: reading its stderr to the end would wait for as long as it runs.
        let _ = self.child.kill();
        let mut output = String::new();
        if let Some(stderr) = &mut self.child.stderr {
            let _ = io::Read::read_to_string(stderr, &mut output);
        }
        let text = format!("QEMU cannot open {}: {}", self.path.display(), output.trim());
        Failure::new(Exit::Unavailable, text)
    }

    /// Waits until the image is complete; the connection is closed.
    pub(crate) fn finish(mut self) -> Result<()> {
        let failed = |error: io::Error| Failure::io("cannot wait for qemu-nbd", &error);
        // QEMU may write metadata after the connection has ended, and only its status tells a
        // failure.
        let status = self.child.wait().map_err(failed)?;
        if status.success() { Ok(()) } else { Err(self.failure()) }
    }
}

impl Drop for ImageServer {
    fn drop(&mut self) {
        // It exits by itself when the connection ends; nothing needs to wait for that.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
