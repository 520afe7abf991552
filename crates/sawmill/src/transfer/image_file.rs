//! A file with an image: opens it without waiting for another process, and detects its format.
//!
//! Not here: its headers (`inspect_image`), and the program that reads it (`image`).

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::Path;

use clap::ValueEnum;
use sawmill_console::exit::{Exit, Failure, Result};

/// The format of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// The disk's bytes themselves.
    Raw,
    /// QEMU.
    Qcow2,
    /// VMware.
    Vmdk,
    /// Hyper-V.
    Vhdx,
    /// Virtual PC and Azure, `.vhd`.
    Vpc,
    /// VirtualBox.
    Vdi,
}

impl Format {
    /// QEMU's name for it.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Format::Raw => "raw",
            Format::Qcow2 => "qcow2",
            Format::Vmdk => "vmdk",
            Format::Vhdx => "vhdx",
            Format::Vpc => "vpc",
            Format::Vdi => "vdi",
        }
    }

    /// The format with this QEMU name, if it is supported.
    pub(super) fn of_qemu(name: &str) -> Option<Format> {
        let known =
            [Format::Raw, Format::Qcow2, Format::Vmdk, Format::Vhdx, Format::Vpc, Format::Vdi];
        known.into_iter().find(|format| format.name() == name)
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

    /// The format that a file's first bytes claim.
    fn of_content(head: &[u8]) -> Format {
        let has = |at: usize, magic: &[u8]| head.get(at..at + magic.len()) == Some(magic);
        match () {
            () if has(0, b"QFI\xfb") => Format::Qcow2,
            () if has(0, b"KDMV") || has(0, b"COWD") || has(0, b"# Disk DescriptorFile") => {
                Format::Vmdk
            }
            () if has(0, b"vhdxfile") => Format::Vhdx,
            () if has(0, b"conectix") => Format::Vpc,
            () if has(0x40, &[0x7f, 0x10, 0xda, 0xbe]) => Format::Vdi,
            () => Format::Raw,
        }
    }

    /// The format of a source: the given one, otherwise the one of its name, which its content must
    /// not contradict.
    pub(crate) fn of_source(said: Option<Format>, path: &Path) -> Result<Format> {
        if let Some(said) = said {
            return Ok(said);
        }
        let mut head = [0; 512];
        let read = open(path)?.read_at(&mut head, 0);
        read.map_err(|error| Failure::io(format!("cannot read {}", path.display()), &error))?;
        let (named, found) = (Self::of_name(path), Self::of_content(&head));
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
}

/// Opens a file that may be an image. A pipe or a socket is refused, because opening one could wait
/// for another process.
pub(crate) fn open(path: &Path) -> Result<File> {
    let failed = |error| Failure::io(format!("cannot read {}", path.display()), &error);
    let nonblocking = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
    let file =
        OpenOptions::new().read(true).custom_flags(nonblocking).open(path).map_err(failed)?;
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
