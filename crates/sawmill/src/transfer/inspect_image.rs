//! Checks an image's own headers before any other program sees the file: an image is one file, or
//! it is refused. A layer over another file is followed only if the user allows it, and that file
//! is checked in the same way.
//!
//! Invariants: this opens only regular files and block devices, and never waits for another
//! process. Not here: what the headers say (`crates/format`), whether the image is complete
//! (`image::check`), and the other limits on that program (`cage`).

use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use sawmill_format::disk_image::{BackingFile, Bytes, Format, Refusal, layer_below};

use super::image_file::open;
use sawmill_console::exit::{Exit, Failure, Result};

/// The most layers of one image.
const LAYERS_MAX: usize = 16;

/// What to do about the file below an image that is a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BackingFiles {
    /// Refuse the image.
    Refused,
    /// Read the file below too, and the one below that.
    Followed,
}

/// Refuses an image that is not one file, or whose headers are unreliable. Opens nothing else,
/// unless layers may be followed.
pub(crate) fn inspect(path: &Path, format: Format, backing_files: BackingFiles) -> Result<()> {
    let (mut path, mut format) = (path.to_path_buf(), format);
    for _ in 0..LAYERS_MAX {
        let image = Image::open(&path)?;
        let below = layer_below(&image, format).map_err(|refusal| failure_of(&path, refusal))?;
        let Some(below) = below else { return Ok(()) };
        let below = follow(&path, &below, backing_files)?;
        (path, format) = below;
    }
    let text =
        format!("{} is one of more than {LAYERS_MAX} layers: merge them elsewhere", path.display());
    Err(Failure::new(Exit::Refused, text))
}

/// The layer below, if it may be read and is a file of this machine.
fn follow(
    path: &Path,
    backing_file: &BackingFile,
    backing_files: BackingFiles,
) -> Result<(PathBuf, Format)> {
    let (image, name) = (path.display(), &backing_file.name);
    let refuse = |text: String| Err(Failure::new(Exit::Refused, text));
    // Before the option is looked at: it allows files of this machine only (P131).
    // `nbd:...`, `json:...` and the like are addresses to QEMU.
    if name.split('/').next().is_some_and(|first| first.contains(':')) {
        return refuse(format!(
            "{image} is a layer over {name}, which is not a file: it cannot be imported"
        ));
    }
    if backing_files == BackingFiles::Refused {
        return refuse(format!(
            "{image} is a layer over {name}: importing it also reads that file; to allow that, \
             pass --follow-backing"
        ));
    }
    // Never detected: the writer of a raw file controls what its content looks like.
    let Some(format) = backing_file.format.as_deref().and_then(Format::of_qemu) else {
        return refuse(format!(
            "{image} is a layer over {name} but does not give its format; set it in the image with \
             `qemu-img rebase -u -F FORMAT -b {name} {image}`"
        ));
    };
    let folder = path.parent().unwrap_or(Path::new("/"));
    // As QEMU resolves it, so that the file that was checked is the one that is read.
    Ok((folder.join(name), format))
}

fn failure_of(path: &Path, refusal: Refusal) -> Failure {
    let image = path.display();
    let failure = match &refusal {
        Refusal::Other(what) => Failure::new(
            Exit::Refused,
            format!(
                "{image} {what}: images of several files cannot be imported; convert it first, \
                 where those files may be read (`qemu-img convert -O raw`)"
            ),
        ),
        Refusal::Unusable(_) | Refusal::Unread { .. } => Failure::new(
            Exit::Corrupt,
            format!(
                "{image} is damaged, truncated, or of an unknown kind: {refusal}; nothing was \
                 imported"
            ),
        ),
    };
    failure.caused_by(refusal)
}

/// An open image.
struct Image {
    file: File,
    length: u64,
}

impl Image {
    fn open(path: &Path) -> Result<Self> {
        let mut file = open(path)?;
        // A block device has no length but an end.
        let length = file.seek(SeekFrom::End(0));
        let length = length
            .map_err(|error| Failure::io(format!("cannot read {}", path.display()), &error))?;
        Ok(Image { file, length })
    }
}

impl Bytes for Image {
    fn length(&self) -> u64 {
        self.length
    }

    fn read(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(into, at)
    }
}

#[cfg(test)]
mod tests;
