//! `sawmill import`: copies a file, disk image, block device or NBD export into a volume. Also does
//! the work of `copy`, whose source is a volume.
//!
//! Invariant: an import resumes only if the volume has not been attached for writing since, and if
//! the source can show that it has not changed. A source that cannot show this is compared in full.
//!
//! Not here: copying (`transfer`), reading the source (`transfer::ends`, `transfer::image`).

use std::path::{Path, PathBuf};

use clap::Args;
use sawmill_device::BlockDeviceExt;
use sawmill_format::disk_image::Format;
use sawmill_format::transfer::TransferProgress;
use sawmill_format::volume_record::VolumeRecord;
use sawmill_volume::{CreateOptions, ErrorKind, inspect};
use serde::Serialize;

use crate::attach::{AttachToWrite, refuse_served};
use crate::command::Context;
use crate::command::disks::create::Shape;
use crate::config::VolumeAddress;
use crate::folders::make_volume_folder;
use crate::transfer::ends::{FileEnd, NbdEnd, VolumeEnd};
use crate::transfer::image::{self, Access, BackingFiles, ImageServer};
use crate::transfer::image_file::{format_of_source, formats};
use crate::transfer::progress::ProgressFile;
use crate::transfer::{self, Source, Start, TransferResult};
use crate::wiring;
use sawmill_console::exit::{Exit, Failure, Result};
use sawmill_console::output::{self, Bar};
use sawmill_console::units::human_size;

/// Import a file, a disk image, a block device or an NBD export into a volume.
///
/// Creates the volume if it does not exist, as large as the source. Holes and zeroes take no space.
/// Resumable: rerun to continue, if the source has not changed.
#[derive(Args)]
pub(in crate::command) struct Arguments {
    /// A raw file, a disk image (known by its file name extension, or by --format), a block device,
    /// or a URI: nbd://host/name, nbd+unix:///name?socket=/path.
    #[arg(value_name = "SOURCE")]
    source: String,

    /// Name in the default store, or a URL ending in the name.
    #[arg(value_name = "VOL")]
    volume: String,

    /// Format of the source. QEMU's tools read all formats except raw.
    #[arg(long, value_name = "FORMAT", value_parser = formats())]
    format: Option<Format>,

    /// Also read the backing file of an image.
    #[arg(long)]
    follow_backing: bool,

    #[command(flatten)]
    again: ExistingData,

    #[command(flatten)]
    shape: Shape,

    #[command(flatten)]
    attach: AttachToWrite,
}

/// What to do about existing data.
#[derive(Args, Clone, Copy)]
pub(in crate::command) struct ExistingData {
    /// Import into an existing volume; all its content is lost. It must have the size of the
    /// source.
    #[arg(long)]
    overwrite: bool,

    #[command(flatten)]
    restart: RestartOption,
}

/// What to do about an attempt that was interrupted.
#[derive(Args, Clone, Copy)]
pub(super) struct RestartOption {
    /// Start over instead of resuming an interrupted command.
    #[arg(long)]
    pub(super) restart: bool,
}

/// What `--json` prints.
#[derive(Serialize)]
struct Document<'a> {
    source: &'a str,
    volume: &'a str,
    store: &'a str,
    created: bool,
    #[serde(flatten)]
    result: TransferResult,
}

pub(in crate::command) fn run(context: &Context, arguments: &Arguments) -> Result<Exit> {
    let address = context.paths.resolve(&arguments.volume)?;
    let filling = |source: &dyn Source, far_name: String, far_state: String| {
        let what = format!("importing {}", address.name);
        let create = arguments.shape.options(source.size_bytes(), arguments.attach.fencing);
        let Arguments { attach, again, .. } = arguments;
        fill(
            context,
            &ImportJob {
                address: &address,
                source,
                far_name,
                far_state,
                create,
                attach,
                again,
                what,
            },
        )
    };
    let source = &arguments.source;
    if source.starts_with("nbd:") || source.starts_with("nbd+") {
        let end = NbdEnd::connect(source)?;
        filling(&end, source.clone(), String::new())?.report(context, source, &address)?;
        return Ok(Exit::Ok);
    }
    let path = path_of(Path::new(source))?;
    let file = FileEnd::source(&path)?;
    let name = path.display().to_string();
    let filled = match format_of_source(arguments.format, &path)? {
        Format::Raw => filling(&file, name, file.state().to_owned())?,
        format => {
            let backing_files = match arguments.follow_backing {
                true => BackingFiles::Followed,
                false => BackingFiles::Refused,
            };
            image::check(&path, format, backing_files)?;
            let (_server, end) = ImageServer::start(&path, format, Access::Read)?;
            // A layer below may change without a trace in this file, so nothing shows that it has
            // not.
            let state = if arguments.follow_backing { "" } else { file.state() };
            filling(&Image { file: &file, end }, name, state.to_owned())?
        }
    };
    filled.report(context, source, &address)?;
    Ok(Exit::Ok)
}

fn path_of(path: &Path) -> Result<PathBuf> {
    let found = path.canonicalize();
    found.map_err(|error| Failure::io(format!("cannot read {}", path.display()), &error))
}

/// An image that is read through its server; changes are detected on its file.
struct Image<'a> {
    file: &'a FileEnd,
    end: NbdEnd,
}

impl Source for Image<'_> {
    fn size_bytes(&self) -> u64 {
        Source::size_bytes(&self.end)
    }

    fn request_bytes_max(&self) -> u64 {
        Source::request_bytes_max(&self.end)
    }

    fn read(&self, address: u64, length: usize) -> Result<Vec<u8>> {
        Source::read(&self.end, address, length)
    }

    fn allocation(&self, address: u64, length: u64) -> Result<Vec<sawmill_device::Allocation>> {
        Source::allocation(&self.end, address, length)
    }

    fn check_unchanged(&self) -> Result<()> {
        self.file.check_unchanged()
    }
}

/// A volume to fill, and its source.
pub(in crate::command) struct ImportJob<'a> {
    pub(in crate::command) address: &'a VolumeAddress,
    pub(in crate::command) source: &'a dyn Source,
    pub(in crate::command) far_name: String,
    /// Empty: nothing shows whether the source has changed.
    pub(in crate::command) far_state: String,
    /// Options of a volume that must be created. It gets the size of the source.
    pub(in crate::command) create: CreateOptions,
    pub(in crate::command) attach: &'a AttachToWrite,
    pub(in crate::command) again: &'a ExistingData,
    pub(in crate::command) what: String,
}

/// A volume that was filled.
pub(in crate::command) struct ImportResult {
    pub(in crate::command) created: bool,
    pub(in crate::command) transfer_result: TransferResult,
}

impl ImportResult {
    pub(in crate::command) fn report(
        &self,
        context: &Context,
        source: &str,
        address: &VolumeAddress,
    ) -> Result<()> {
        let ImportResult { created, transfer_result: moved } = *self;
        let (volume, store) = (address.name.as_str(), address.store_url.as_str());
        if context.json {
            return output::json(&Document { source, volume, store, created, result: moved });
        }
        let resumed = match moved.resumed_bytes {
            0 => String::new(),
            bytes => format!(", {} of it by an earlier attempt", human_size(bytes)),
        };
        let (size, written) = (human_size(moved.size_bytes), human_size(moved.written_bytes));
        output::line(&format!("{volume}: {size} from {source}{resumed}; {written} written"))
    }
}

/// Copies a whole source into a volume, and stores it.
pub(in crate::command) fn fill(context: &Context, filling: &ImportJob<'_>) -> Result<ImportResult> {
    let ImportJob { address, source, again, .. } = filling;
    if source.size_bytes() == 0 {
        return Err(Failure::usage(format!(
            "{} is empty: there is nothing to import",
            filling.far_name
        )));
    }
    let store = wiring::open_store(&address.store_url)?;
    let (record, created) = match sawmill_volume::find(&*store, &address.name) {
        Ok(record) => (record, false),
        Err(error) if error.kind() == ErrorKind::NotFound => {
            // The disk has whole blocks; the padding reads as zeroes.
            let size_bytes =
                source.size_bytes().next_multiple_of(u64::from(filling.create.block_bytes));
            let options = CreateOptions { size_bytes, ..filling.create.clone() };
            (sawmill_volume::create(&*store, &address.name, &options)?, true)
        }
        Err(error) => return Err(error.into()),
    };
    let rest = inspect::at_rest(&*store, &record)?;
    // Before the volume is attached, which would fence its writer elsewhere.
    require_size(source.size_bytes(), rest.size_bytes, &record)?;
    let folder = context.paths.volume_folder(&record.volume_id.to_string(), &address.store_url)?;
    refuse_served(&folder, &address.name)?;
    make_volume_folder(&folder, &address.store_url)?;
    let known = TransferProgress {
        volume_id: record.volume_id,
        size_bytes: source.size_bytes(),
        done_bytes: 0,
        epoch: rest.epoch,
        position: 0,
        far_name: filling.far_name.clone(),
        far_state: filling.far_state.clone(),
    };
    let mut file = ProgressFile::of_import(&folder, known);
    let start = if created { fresh() } else { start_of(&file, again, &address.name)? };
    // Before the attach: if this process dies in it, the volume is known to be of an import.
    file.keep(start.from)?;
    let attached = filling.attach.open(&context.paths, address, &record)?;
    // Attaching began a new epoch. A later run resumes only if the store still has this one.
    file.known.epoch = attached.volume.status().epoch;
    file.keep(start.from)?;
    let size_bytes = attached.volume.status().size_bytes;
    // `fresh` promises a blank volume. A new one is blank; an existing one has old content.
    if start == fresh() && !created {
        let zeroed = attached.volume.write_zeroes(0, size_bytes).map_err(Failure::from);
        zeroed.map_err(|failure| failure.of_volume(&address.name))?;
    }
    let end = VolumeEnd::new(attached.volume.clone(), &address.name);
    let mut bar = Bar::new(filling.what.clone());
    let moved = transfer::transfer(*source, &end, start, &mut bar, &mut |done| file.keep(done))?;
    drop(end);
    attached.close()?;
    source.check_unchanged()?;
    // Last: until the volume is closed with everything stored, a failure must be resumable.
    file.forget()?;
    bar.end()?;
    Ok(ImportResult { created, transfer_result: moved })
}

fn fresh() -> Start {
    Start { from: 0, compare_below: 0, blank: true }
}

/// Where to start in a volume that exists.
fn start_of(file: &ProgressFile, again: &ExistingData, name: &str) -> Result<Start> {
    let known = &file.known;
    let Some(earlier) = file.earlier() else {
        if again.overwrite {
            return Ok(fresh());
        }
        let text = format!(
            "volume {name} exists already, without an interrupted import of {}: choose another \
             name, or pass --overwrite to replace its content",
            known.far_name
        );
        return Err(Failure::new(Exit::Exists, text));
    };
    let untouched = earlier.epoch == known.epoch && earlier.size_bytes == known.size_bytes;
    if !untouched && !again.overwrite {
        let text = format!(
            "volume {name} has been attached since its import was interrupted; pass --overwrite to \
             discard its content and start over"
        );
        return Err(Failure::new(Exit::Refused, text));
    }
    if again.restart.restart || !untouched {
        return Ok(fresh());
    }
    if earlier.far_state != known.far_state {
        let text = format!(
            "{} has changed since its import was interrupted (it was: {}; it is: {}); pass \
             --restart to start over",
            known.far_name, earlier.far_state, known.far_state
        );
        return Err(Failure::new(Exit::Refused, text));
    }
    if known.far_state.is_empty() {
        // Nothing shows whether the source has changed: compare everything.
        return Ok(Start { from: 0, compare_below: known.size_bytes, blank: false });
    }
    Ok(Start { from: earlier.done_bytes, compare_below: 0, blank: true })
}

fn require_size(source_bytes: u64, volume_bytes: u64, record: &VolumeRecord) -> Result<()> {
    if source_bytes.next_multiple_of(u64::from(record.block_bytes)) == volume_bytes {
        return Ok(());
    }
    let text = format!(
        "the source has {source_bytes} bytes and volume {} has {volume_bytes}: sizes must match; \
         import into a new volume, or `sawmill resize` this one first",
        record.name
    );
    Err(Failure::new(Exit::Refused, text))
}
