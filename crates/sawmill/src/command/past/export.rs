//! `sawmill export`: copies a volume to a file, a disk image, or an NBD export.
//!
//! Invariant: FILE is created or replaced only when it is complete and synced; until then the data
//! is in FILE.part beside it.
//!
//! Not here: copying and its progress (`transfer`), QEMU (`transfer::image`), the cut that is read
//! (`attach`).

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use clap::Args;
use rustix::fs::{FlockOperation, RenameFlags};
use rustix::io::Errno;
use sawmill_format::disk_image::Format;
use sawmill_format::transfer::TransferProgress;
use sawmill_format::volume_record::VolumeRecord;
use serde::Serialize;

use super::import::RestartOption;
use crate::attach::{CutOption, open_cut};
use crate::command::Context;
use crate::folders::make_volume_folder;
use crate::transfer::ends::{FileEnd, NbdEnd, VolumeEnd};
use crate::transfer::image::{self, Access, ImageServer};
use crate::transfer::image_file::formats;
use crate::transfer::progress::ProgressFile;
use crate::transfer::{self, Destination, Source, Start, TransferResult};
use sawmill_console::exit::{Exit, Failure, Result};
use sawmill_console::output::{self, Bar};
use sawmill_console::units::human_size;

/// Export a volume to a file or to an NBD export.
///
/// Exports one cut. If this machine serves the volume, everything accepted so far is stored first,
/// and the export has the state at the start of the command. Otherwise it has what the store holds.
/// Holes stay holes. Resumable: rerun to continue.
#[derive(Args)]
pub(in crate::command) struct Arguments {
    /// Name in the default store, or a URL ending in the name.
    #[arg(value_name = "VOL")]
    volume: String,

    #[command(flatten)]
    destination: DestinationOptions,

    /// Format of FILE. QEMU's tools write all formats except raw.
    #[arg(
        long,
        value_name = "FORMAT",
        value_parser = formats(),
        default_value = "raw",
        conflicts_with = "to_nbd"
    )]
    format: Format,

    /// Replace FILE if it exists. Also required for a block device, whose content is lost.
    #[arg(long, conflicts_with = "to_nbd")]
    overwrite: bool,

    #[command(flatten)]
    restart: RestartOption,

    #[command(flatten)]
    cut: CutOption,
}

/// Where to export.
#[derive(Args)]
#[group(required = true, multiple = false)]
struct DestinationOptions {
    /// A file to create, or a block device.
    #[arg(long, value_name = "FILE")]
    to_file: Option<PathBuf>,

    /// An NBD export at least as large as the volume; its content is lost. nbd://host/name,
    /// nbd+unix:///name?socket=/path.
    #[arg(long, value_name = "URI")]
    to_nbd: Option<String>,
}

/// What `--json` prints.
#[derive(Serialize)]
struct Document<'a> {
    volume: &'a str,
    #[serde(rename = "target")]
    destination: &'a str,
    /// The position of the cut: the export has all writes before it.
    position: u64,
    #[serde(flatten)]
    result: TransferResult,
}

/// One export of a volume.
struct Job<'a> {
    source: VolumeEnd,
    record: VolumeRecord,
    folder: PathBuf,
    restart: bool,
    bar: &'a mut Bar,
}

pub(in crate::command) fn run(context: &Context, arguments: &Arguments) -> Result<Exit> {
    let address = context.paths.resolve(&arguments.volume)?;
    let (volume, record) = open_cut(&context.paths, &address, arguments.cut)?;
    let folder = context.paths.volume_folder(&record.volume_id.to_string(), &address.store_url)?;
    make_volume_folder(&folder, &address.store_url)?;
    let source = VolumeEnd::new(volume, &address.name);
    let position = source.position();
    let mut bar = Bar::new(format!("exporting {}", address.name));
    let job = Job { source, record, folder, restart: arguments.restart.restart, bar: &mut bar };
    let (destination, moved) = match (&arguments.destination.to_file, &arguments.destination.to_nbd)
    {
        (Some(path), _) => (path.display().to_string(), job.fill_path(path, arguments)?),
        (None, Some(uri)) => (uri.clone(), job.fill_nbd(uri)?),
        (None, None) => return Err(Failure::usage("give --to-file FILE or --to-nbd URI")),
    };
    bar.end()?;
    let document =
        Document { volume: &address.name, destination: &destination, position, result: moved };
    if context.json {
        output::json(&document)?;
    } else {
        let (size, written) = (human_size(moved.size_bytes), human_size(moved.written_bytes));
        output::line(&format!("{} ({size}) is in {destination}; {written} written", address.name))?;
    }
    Ok(Exit::Ok)
}

impl Job<'_> {
    fn size_bytes(&self) -> u64 {
        self.source.size_bytes()
    }

    fn progress(&self, far_name: &str, far_state: String) -> ProgressFile {
        let known = TransferProgress {
            volume_id: self.record.volume_id,
            size_bytes: self.size_bytes(),
            done_bytes: 0,
            epoch: 0,
            position: self.source.position(),
            far_name: far_name.to_owned(),
            far_state,
        };
        ProgressFile::of_export(&self.folder, known)
    }

    /// How far an interrupted export of this cut to this destination got.
    fn earlier(&self, file: &ProgressFile) -> Result<Option<u64>> {
        let Some(earlier) = file.earlier().filter(|_| !self.restart) else { return Ok(None) };
        let known = &file.known;
        if earlier.position != known.position || earlier.size_bytes != known.size_bytes {
            let text = format!(
                "the volume has changed since its export to {} was interrupted; pass --restart to \
                 export it as it is now",
                known.far_name
            );
            return Err(Failure::new(Exit::Refused, text));
        }
        Ok((earlier.far_state == known.far_state).then_some(earlier.done_bytes))
    }

    fn fill_nbd(self, uri: &str) -> Result<TransferResult> {
        let end = NbdEnd::connect(uri)?;
        end.require_writable()?;
        if end.size_bytes() < self.size_bytes() {
            let text = format!(
                "the volume does not fit: {uri} has {} bytes, the volume {}",
                end.size_bytes(),
                self.size_bytes()
            );
            return Err(Failure::new(Exit::Refused, text));
        }
        let mut file = self.progress(uri, String::new());
        // The other end may have changed since: data from the earlier attempt is compared, not
        // trusted.
        let compare_below = self.earlier(&file)?.unwrap_or(0);
        file.keep(compare_below)?;
        let start = Start { from: 0, compare_below, blank: false };
        let moved = self.transfer(&end, start, &mut file)?;
        file.forget()?;
        Ok(moved)
    }

    fn transfer(
        self,
        destination: &dyn Destination,
        start: Start,
        file: &mut ProgressFile,
    ) -> Result<TransferResult> {
        let moved = transfer::transfer(&self.source, destination, start, self.bar, &mut |done| {
            file.keep(done)
        })?;
        transfer::settle(destination)?;
        Ok(moved)
    }

    fn fill_path(self, path: &Path, arguments: &Arguments) -> Result<TransferResult> {
        match fs::metadata(path) {
            Ok(found) if found.file_type().is_block_device() => self.fill_device(path, arguments),
            Ok(found) if !found.is_file() => Err(Failure::usage(format!(
                "{} is neither a file nor a block device",
                path.display()
            ))),
            Ok(_) if !arguments.overwrite => {
                let text = format!(
                    "{} exists already: give another name, or pass --overwrite",
                    path.display()
                );
                Err(Failure::new(Exit::Exists, text))
            }
            _ => self.fill_file(path, arguments),
        }
    }

    fn fill_device(self, path: &Path, arguments: &Arguments) -> Result<TransferResult> {
        if !arguments.overwrite || arguments.format != Format::Raw {
            let text = format!(
                "{} is a block device, and its content would be lost; pass --overwrite, without \
                --format",
                path.display()
            );
            return Err(Failure::new(Exit::Refused, text));
        }
        let failed =
            |error: io::Error| Failure::io(format!("cannot write {}", path.display()), &error);
        let file = OpenOptions::new().read(true).write(true).open(path).map_err(failed)?;
        let end = FileEnd::new(file, path)?;
        if Source::size_bytes(&end) < self.size_bytes() {
            let text = format!(
                "{} is too small: the volume has {} bytes",
                path.display(),
                self.size_bytes()
            );
            return Err(Failure::new(Exit::Refused, text));
        }
        let mut file = self.progress(&name_of(path)?, String::new());
        let compare_below = self.earlier(&file)?.unwrap_or(0);
        file.keep(compare_below)?;
        let moved =
            self.transfer(&end, Start { from: 0, compare_below, blank: false }, &mut file)?;
        file.forget()?;
        Ok(moved)
    }

    fn fill_file(self, path: &Path, arguments: &Arguments) -> Result<TransferResult> {
        let part = Part::open(path)?;
        // With the format: another one lays the disk out differently, so old progress is useless.
        let state = format!("{}, {:?}", part.state()?, arguments.format);
        let mut file = self.progress(&name_of(path)?, state);
        let size_bytes = self.size_bytes();
        let earlier = self.earlier(&file)?;
        if earlier.is_none() && !part.is_empty()? && !self.restart {
            let text = format!(
                "{} exists and is not an interrupted export of this volume: remove it, or pass \
                --restart",
                part.path.display()
            );
            return Err(Failure::new(Exit::Exists, text));
        }
        let from = earlier.unwrap_or(0);
        if from == 0 {
            part.empty()?;
            file.keep(0)?;
            match arguments.format {
                Format::Raw => part.grow(size_bytes)?,
                format => image::create(&part.path, format, size_bytes)?,
            }
        }
        let start = Start { from, compare_below: 0, blank: true };
        let moved = match arguments.format {
            Format::Raw => {
                part.grow(size_bytes)?;
                let end = FileEnd::new(part.clone_file()?, &part.path)?;
                self.transfer(&end, start, &mut file)?
            }
            format => {
                let (server, end) = ImageServer::start(&part.path, format, Access::Write)?;
                let moved = self.transfer(&end, start, &mut file)?;
                // QEMU ends with its only connection, and `finish` waits for that.
                drop(end);
                server.finish()?;
                moved
            }
        };
        part.become_whole(path, arguments.overwrite)?;
        file.forget()?;
        Ok(moved)
    }
}

/// The absolute path of a file that need not exist.
fn name_of(path: &Path) -> Result<String> {
    let whole = std::path::absolute(path);
    let whole =
        whole.map_err(|error| Failure::io(format!("cannot find {}", path.display()), &error))?;
    Ok(whole.display().to_string())
}

/// Renames a file unless something has the new name.
fn rename_if_free(from: &Path, to: &Path) -> Result<()> {
    let cwd = rustix::fs::CWD;
    match rustix::fs::renameat_with(cwd, from, cwd, to, RenameFlags::NOREPLACE) {
        // A file system that cannot do this.
        Err(Errno::INVAL) => link_and_unlink(from, to),
        other => other.map_err(|error| cannot_rename(from, to, &error.into())),
    }
}

/// The same in two steps. A crash in between leaves both names.
fn link_and_unlink(from: &Path, to: &Path) -> Result<()> {
    let linked = fs::hard_link(from, to);
    match linked.and_then(|()| fs::remove_file(from)) {
        // A file system without links.
        Err(error)
            if matches!(error.kind(), ErrorKind::PermissionDenied | ErrorKind::Unsupported) =>
        {
            let text = format!(
                "{} is complete, but its file system cannot rename it without the danger of \
                 replacing another file; rerun with --overwrite to finish",
                from.display()
            );
            Err(Failure::caused(Exit::Refused, text, error))
        }
        done => done.map_err(|error| cannot_rename(from, to, &error)),
    }
}

/// Device and inode.
fn identity(path: &Path) -> Option<(u64, u64)> {
    fs::symlink_metadata(path).ok().map(|found| (found.dev(), found.ino()))
}

fn cannot_rename(from: &Path, to: &Path, error: &io::Error) -> Failure {
    Failure::io(format!("cannot rename {} to {}", from.display(), to.display()), error)
}

/// FILE.part, locked.
struct Part {
    path: PathBuf,
    file: File,
}

impl Part {
    fn open(whole: &Path) -> Result<Part> {
        let mut name = whole.as_os_str().to_owned();
        name.push(".part");
        let path = PathBuf::from(name);
        let failed =
            |error: io::Error| Failure::io(format!("cannot write {}", path.display()), &error);
        let options =
            // Not truncated: it may be what an interrupted export continues.
            || OpenOptions::new().read(true).write(true).create(true).truncate(false).clone();
        // What a crash in `link_and_unlink` has left: to write there would change FILE.
        if identity(&path).is_some_and(|found| Some(found) == identity(whole)) {
            fs::remove_file(&path).map_err(failed)?;
        }
        let file = options().open(&path).map_err(failed)?;
        // Two exports to one FILE would mix their bytes in FILE.part.
        rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).map_err(|error| {
            if error != Errno::WOULDBLOCK {
                return failed(error.into());
            }
            let text = format!("another process is exporting to {}", path.display());
            Failure::new(Exit::InUse, text).caused_by(error)
        })?;
        Ok(Part { path, file })
    }

    fn failed(&self, error: &io::Error) -> Failure {
        Failure::io(format!("cannot write {}", self.path.display()), error)
    }

    /// Identifies the file: a file that replaced it is another one.
    fn state(&self) -> Result<String> {
        let found = self.file.metadata().map_err(|error| self.failed(&error))?;
        Ok(format!("file {}:{}", found.dev(), found.ino()))
    }

    fn is_empty(&self) -> Result<bool> {
        self.file.metadata().map(|found| found.len() == 0).map_err(|error| self.failed(&error))
    }

    fn empty(&self) -> Result<()> {
        self.file.set_len(0).map_err(|error| self.failed(&error))
    }

    fn grow(&self, size_bytes: u64) -> Result<()> {
        self.file.set_len(size_bytes).map_err(|error| self.failed(&error))
    }

    fn clone_file(&self) -> Result<File> {
        self.file.try_clone().map_err(|error| self.failed(&error))
    }

    /// Syncs the file and gives it its name.
    fn become_whole(self, path: &Path, overwrite: bool) -> Result<()> {
        let failed = |error: io::Error| cannot_rename(&self.path, path, &error);
        // Before the name: FILE must never be there without all its bytes, also after a power cut.
        self.file.sync_all().map_err(failed)?;
        if overwrite {
            fs::rename(&self.path, path).map_err(failed)?;
        } else {
            rename_if_free(&self.path, path)?;
        }
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
        let folder = folder.unwrap_or(Path::new("."));
        File::open(folder).and_then(|folder| folder.sync_all()).map_err(failed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_appeared_meanwhile_is_not_replaced_on_any_file_system() {
        let folder = tempfile::tempdir().unwrap();
        let (part, whole) = (folder.path().join("disk.part"), folder.path().join("disk"));
        for rename in [rename_if_free, link_and_unlink] {
            fs::write(&part, "exported").unwrap();
            fs::write(&whole, "of somebody else").unwrap();
            let failure = rename(&part, &whole).unwrap_err();
            assert_eq!(failure.exit(), Exit::Exists, "{failure}");
            assert_eq!(fs::read_to_string(&whole).unwrap(), "of somebody else");
            fs::remove_file(&whole).unwrap();
            rename(&part, &whole).unwrap();
            assert_eq!(fs::read_to_string(&whole).unwrap(), "exported");
            assert!(!part.exists());
            fs::remove_file(&whole).unwrap();
        }
    }

    #[test]
    fn a_part_that_is_the_whole_file_already_is_not_written() {
        let folder = tempfile::tempdir().unwrap();
        let whole = folder.path().join("disk");
        fs::write(&whole, "exported").unwrap();
        fs::hard_link(&whole, folder.path().join("disk.part")).unwrap();
        let part = Part::open(&whole).unwrap();
        part.grow(4096).unwrap();
        assert_eq!(fs::read_to_string(&whole).unwrap(), "exported");
    }
}
