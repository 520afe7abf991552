//! A file with an image: opens it without waiting for another process, and detects its format.
//!
//! Invariants: `open` returns only regular files and block devices. If name and content contradict
//! each other, no format is guessed: the user must give it.
//!
//! Not here: its headers (`inspect_image`), and the program that reads it (`image`).

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::Path;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use sawmill_console::exit::{Exit, Failure, Result};
use sawmill_format::disk_image::Format;

/// The formats as values of an option.
pub(crate) fn formats() -> impl TypedValueParser<Value = Format> {
    let value = |format: Format| PossibleValue::new(format.name()).help(described(format));
    PossibleValuesParser::new(Format::ALL.map(value))
        .try_map(|name| Format::of_qemu(&name).ok_or("no format of this name is known"))
}

const fn described(format: Format) -> &'static str {
    match format {
        Format::Raw => "The disk's bytes themselves",
        Format::Qcow2 => "QEMU",
        Format::Vmdk => "VMware",
        Format::Vhdx => "Hyper-V",
        Format::Vpc => "Virtual PC and Azure, `.vhd`",
        Format::Vdi => "VirtualBox",
    }
}

/// The format that a file name suggests.
fn of_name(path: &Path) -> Format {
    match path.extension().and_then(|ending| ending.to_str()) {
        Some("qcow2") => Format::Qcow2,
        Some("vmdk") => Format::Vmdk,
        Some("vhdx") => Format::Vhdx,
        Some("vhd" | "vpc") => Format::Vpc,
        Some("vdi") => Format::Vdi,
        _ => Format::Raw,
    }
}

/// The format of a source: the given one, otherwise the one of its name, which its content must
/// not contradict.
pub(crate) fn format_of_source(format: Option<Format>, path: &Path) -> Result<Format> {
    if let Some(format) = format {
        return Ok(format);
    }
    let mut head = [0; 512];
    let read = open(path)?.read_at(&mut head, 0);
    read.map_err(|error| Failure::io(format!("cannot read {}", path.display()), &error))?;
    let (named, found) = (of_name(path), Format::of_content(&head));
    // A VHD of fixed size begins with the disk itself: its mark is at the end.
    if named == found || (named == Format::Vpc && found == Format::Raw) {
        return Ok(named);
    }
    let text = format!(
        "{} is {} by its name and {} by its content; give --format {} or --format {}",
        path.display(),
        named.name(),
        found.name(),
        named.name(),
        found.name()
    );
    Err(Failure::usage(text))
}

/// Opens a file that may be an image. A pipe or a socket is refused, because opening one could wait
/// for another process.
pub(crate) fn open(path: &Path) -> Result<File> {
    let failed = |error| Failure::io(format!("cannot read {}", path.display()), &error);
    let nonblocking = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
    let file =
        OpenOptions::new().read(true).custom_flags(nonblocking).open(path).map_err(failed)?;
    // Of the open file: the path may lead to another one by now.
    let kind = file.metadata().map_err(failed)?.file_type();
    if kind.is_file() || kind.is_block_device() {
        return Ok(file);
    }
    let text = format!(
        "{} is neither a file nor a block device: no image can be read from it",
        path.display()
    );
    Err(Failure::new(Exit::Refused, text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_and_a_content_that_disagree_are_refused_until_the_format_is_said() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, bytes: &[u8]| {
            let path = folder.path().join(name);
            std::fs::write(&path, bytes).unwrap();
            path
        };
        assert_eq!(format_of_source(None, &write("a.raw", b"x")).unwrap(), Format::Raw);
        assert_eq!(
            format_of_source(None, &write("a.qcow2", b"QFI\xfb...")).unwrap(),
            Format::Qcow2
        );
        for (name, bytes) in [("b.img", b"QFI\xfb..."), ("b.qcow2", b"zeroes.")] {
            let path = write(name, bytes);
            let failure = format_of_source(None, &path).unwrap_err();
            assert_eq!(failure.exit(), Exit::Usage);
            assert!(failure.to_string().contains("--format qcow2"), "{failure}");
            assert_eq!(format_of_source(Some(Format::Raw), &path).unwrap(), Format::Raw);
        }
    }
}
