//! Checks an image's own headers before any other program sees the file: an image is one file, or
//! it is refused. A layer over another file is followed only if the user allows it, and that file
//! is checked in the same way.
//!
//! Invariants: this opens only regular files and block devices, and never waits for another
//! process. No length from a header is used without a bound. What is not understood is refused,
//! because the program that reads the image later may understand it. Not here: whether the image is
//! complete (`image::check`), and the other limits on that program (`cage`).

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use super::image_file::{Format, open};
use sawmill_console::exit::{Exit, Failure, Result};

/// The most layers of one image.
const LAYERS_MAX: usize = 16;
/// The most entries of a list in a header to look at.
const ENTRIES_MAX: u32 = 2048;

/// Why an image is refused.
enum Refusal {
    /// It refers to other files or addresses; the text says which.
    Other(String),
    /// It is unreadable, or its headers are unreliable.
    Unusable(String),
}

type Look<T> = std::result::Result<T, Refusal>;

fn other<T>(what: impl Into<String>) -> Look<T> {
    Err(Refusal::Other(what.into()))
}

fn unusable<T>(what: impl Into<String>) -> Look<T> {
    Err(Refusal::Unusable(what.into()))
}

/// The file below an image.
struct Below {
    path: PathBuf,
    format: Option<String>,
}

/// Refuses an image that is not one file, or whose headers are unreliable. Opens nothing else,
/// unless layers may be followed.
pub(crate) fn inspect(path: &Path, format: Format, follow_backing: bool) -> Result<()> {
    let (mut path, mut format) = (path.to_path_buf(), format);
    for _ in 0..LAYERS_MAX {
        let below =
            Image { file: open(&path)? }.look(format).map_err(|refusal| told(&path, refusal))?;
        let Some(below) = below else { return Ok(()) };
        let below = follow(&path, &below, follow_backing)?;
        (path, format) = below;
    }
    let text =
        format!("{} is one of more than {LAYERS_MAX} layers: merge them elsewhere", path.display());
    Err(Failure::new(Exit::Refused, text))
}

/// The layer below, if it may be read and is a file of this machine.
fn follow(path: &Path, below: &Below, follow_backing: bool) -> Result<(PathBuf, Format)> {
    let (shown, name) = (path.display(), below.path.display());
    let refuse = |text: String| Err(Failure::new(Exit::Refused, text));
    let text = below.path.to_string_lossy();
    // `nbd:...`, `json:...` and the like are addresses to QEMU.
    if text.split('/').next().is_some_and(|first| first.contains(':')) {
        return refuse(format!(
            "{shown} is a layer over {name}, which is not a file: it cannot be imported"
        ));
    }
    if !follow_backing {
        return refuse(format!(
            "{shown} is a layer over {name}: importing it also reads that file; to allow that, \
             pass --follow-backing"
        ));
    }
    let Some(format) = below.format.as_deref().and_then(Format::of_qemu) else {
        return refuse(format!(
            "{shown} is a layer over {name} but does not give its format; set it in the image with \
             `qemu-img rebase -u -F FORMAT -b {name} {shown}`"
        ));
    };
    let folder = path.parent().unwrap_or(Path::new("/"));
    Ok((folder.join(&below.path), format))
}

fn told(path: &Path, refusal: Refusal) -> Failure {
    let shown = path.display();
    match refusal {
        Refusal::Other(what) => Failure::new(
            Exit::Refused,
            format!(
                "{shown} {what}: images of several files cannot be imported; convert it first, \
                 where those files may be read (`qemu-img convert -O raw`)"
            ),
        ),
        Refusal::Unusable(what) => Failure::new(
            Exit::Corrupt,
            format!(
                "{shown} is damaged, truncated, or of an unknown kind: {what}; nothing was imported"
            ),
        ),
    }
}

/// An open image.
struct Image {
    file: File,
}

impl Image {
    /// The layer below, if there is one.
    fn look(&self, format: Format) -> Look<Option<Below>> {
        match format {
            // The content belongs to the disk, whatever it looks like.
            Format::Raw => Ok(None),
            Format::Qcow2 => self.qcow2(),
            Format::Vmdk => self.vmdk().map(|()| None),
            Format::Vhdx => self.vhdx().map(|()| None),
            Format::Vpc => self.vpc().map(|()| None),
            Format::Vdi => self.vdi().map(|()| None),
        }
    }

    fn bytes<const N: usize>(&self, at: u64) -> Look<[u8; N]> {
        let mut bytes = [0; N];
        match self.file.read_exact_at(&mut bytes, at) {
            Ok(()) => Ok(bytes),
            Err(error) => unusable(format!("no header at byte {at} ({error})")),
        }
    }

    fn big_u32(&self, at: u64) -> Look<u32> {
        self.bytes(at).map(u32::from_be_bytes)
    }

    fn big_u64(&self, at: u64) -> Look<u64> {
        self.bytes(at).map(u64::from_be_bytes)
    }

    fn little_u32(&self, at: u64) -> Look<u32> {
        self.bytes(at).map(u32::from_le_bytes)
    }

    fn little_u64(&self, at: u64) -> Look<u64> {
        self.bytes(at).map(u64::from_le_bytes)
    }

    /// A text of `length` bytes, at most 64 KiB.
    fn text(&self, at: u64, length: u32) -> Look<String> {
        if length > 64 << 10 {
            return unusable(format!("a text of {length} bytes"));
        }
        let mut bytes = vec![0; length as usize];
        match self.file.read_exact_at(&mut bytes, at) {
            Ok(()) => Ok(String::from_utf8_lossy(&bytes).into_owned()),
            Err(error) => unusable(format!("no text at byte {at} ({error})")),
        }
    }

    fn qcow2(&self) -> Look<Option<Below>> {
        const DATA_FILE: u64 = 1 << 2;
        const CORRUPT: u64 = 1 << 1;
        /// Dirty, compression type, extended entries: none of these refers to another file.
        const HARMLESS: u64 = 1 | 1 << 3 | 1 << 4;
        let (magic, version) = (self.bytes::<4>(0)?, self.big_u32(4)?);
        if magic != *b"QFI\xfb" || !matches!(version, 2 | 3) {
            return unusable(format!(
                "it is not a qcow2 image of version 2 or 3 (version {version})"
            ));
        }
        if self.big_u32(32)? != 0 {
            return unusable("it is encrypted, and import takes no key");
        }
        let (features, header_bytes) = match version {
            2 => (0, 72),
            _ => (self.big_u64(72)?, self.big_u32(100)?),
        };
        match features {
            bits if bits & DATA_FILE != 0 => return other("keeps its data in another file"),
            bits if bits & CORRUPT != 0 => return unusable("it is marked as damaged"),
            bits if bits & !HARMLESS != 0 => {
                return unusable(format!("unknown features {bits:#x}"));
            }
            _ => {}
        }
        let format = self.qcow2_extensions(u64::from(header_bytes))?;
        match (self.big_u64(8)?, self.big_u32(16)?) {
            (0, _) => Ok(None),
            (_, length) if length > 1023 => unusable(format!("a name of {length} bytes")),
            (at, length) => Ok(Some(Below { path: self.text(at, length)?.into(), format })),
        }
    }

    /// Reads the header's extensions. Returns the format of the layer below, if one of them has it.
    fn qcow2_extensions(&self, mut at: u64) -> Look<Option<String>> {
        let mut format = None;
        for _ in 0..ENTRIES_MAX {
            let (kind, length) = (self.big_u32(at)?, self.big_u32(at + 4)?);
            match kind {
                0 => return Ok(format),
                0x4441_5441 => return other("keeps its data in another file"),
                0x0537_be77 => return unusable("it is encrypted, and import takes no key"),
                0xe279_2aca => format = Some(self.text(at + 8, length)?),
                _ => {}
            }
            at += 8 + u64::from(length).next_multiple_of(8);
        }
        unusable("its header has no end")
    }

    fn vmdk(&self) -> Look<()> {
        const SECTOR_BYTES: u64 = 512;
        /// The place where QEMU looks for the description, whatever the header says, and its
        /// longest length.
        const DESCRIPTION_AT: u64 = 0x200;
        const DESCRIPTION_BYTES: usize = 20 * 512;
        let magic = self.bytes::<4>(0)?;
        if magic != *b"KDMV" {
            return match &magic {
                b"# Di" | b"COWD" => other("is a description of other files"),
                _ => unusable("it is not a VMDK image"),
            };
        }
        let (capacity, at, sectors) =
            (self.little_u64(12)?, self.little_u64(28)?, self.little_u64(36)?);
        // Without a capacity, QEMU opens what the description names.
        if capacity == 0 {
            return other("is a description of other files");
        }
        if at.saturating_mul(SECTOR_BYTES) != DESCRIPTION_AT || sectors == 0 {
            return unusable("its description is not where it belongs");
        }
        let mut description = vec![0; DESCRIPTION_BYTES];
        let read = self.file.read_at(&mut description, DESCRIPTION_AT).unwrap_or(0);
        let text = String::from_utf8_lossy(&description[..read]).into_owned();
        if text.contains("parentFileNameHint") {
            return other("is a layer over another file");
        }
        let value =
            |key: &str| text.lines().find_map(|line| line.trim().strip_prefix(key)).map(str::trim);
        match value("createType=").map(|kind| kind.trim_matches('"')) {
            Some("monolithicSparse" | "streamOptimized") => {}
            kind => return other(format!("is of the kind {}", kind.unwrap_or("without a name"))),
        }
        let is_extent = |line: &&str| {
            ["RW ", "RDONLY ", "NOACCESS "]
                .iter()
                .any(|access| line.trim_start().starts_with(access))
        };
        let extents: Vec<&str> = text.lines().filter(is_extent).collect();
        match extents[..] {
            [extent]
                if extent.contains(" SPARSE ")
                    && !extent.contains('/')
                    && !extent.contains(':') =>
            {
                Ok(())
            }
            _ => other("names other files than itself"),
        }
    }

    fn vhdx(&self) -> Look<()> {
        const METADATA: [u8; 16] =
            *b"\x06\xa2\x7c\x8b\x90\x47\x9a\x4b\xb8\xfe\x57\x5f\x05\x0f\x88\x6e";
        if self.bytes::<8>(0)? != *b"vhdxfile" {
            return unusable("it is not a VHDX image");
        }
        // There are two tables of regions; either may be the one in use.
        let mut found = false;
        for table in [192_u64 << 10, 256 << 10] {
            if self.bytes::<4>(table)? != *b"regi" {
                continue;
            }
            let count = self.little_u32(table + 8)?.min(ENTRIES_MAX);
            for entry in (0..u64::from(count)).map(|number| table + 16 + 32 * number) {
                if self.bytes::<16>(entry)? == METADATA {
                    self.vhdx_metadata(self.little_u64(entry + 16)?)?;
                    found = true;
                }
            }
        }
        if found { Ok(()) } else { unusable("it has no metadata table") }
    }

    fn vhdx_metadata(&self, region: u64) -> Look<()> {
        const PARENT: [u8; 16] =
            *b"\x2d\x5f\xd3\xa8\x0b\xb3\x4d\x45\xab\xf7\xd3\xd8\x48\x34\xab\x0c";
        const PARAMETERS: [u8; 16] =
            *b"\x37\x67\xa1\xca\x36\xfa\x43\x4d\xb3\xb6\x33\xf0\xaa\x44\xe7\x6b";
        const HAS_PARENT: u32 = 1 << 1;
        if region > 1 << 62 || self.bytes::<8>(region)? != *b"metadata" {
            return unusable("its metadata table cannot be read");
        }
        let count = u16::from_le_bytes(self.bytes(region + 10)?).min(ENTRIES_MAX as u16);
        for entry in (0..u64::from(count)).map(|number| region + 32 + 32 * number) {
            let kind = self.bytes::<16>(entry)?;
            let at = region + u64::from(self.little_u32(entry + 16)?);
            let has_parent = kind == PARAMETERS && self.little_u32(at + 4)? & HAS_PARENT != 0;
            if kind == PARENT || has_parent {
                return other("is a layer over another file");
            }
        }
        Ok(())
    }

    /// A disk that grows has a second header.
    fn vpc_dynamic(&self, footer: u64) -> Look<()> {
        let header = self.big_u64(footer + 16)?;
        if header > 1 << 62 || self.bytes(header)? != *b"cxsparse" {
            return unusable("its second header is missing");
        }
        if self.bytes::<16>(header + 40)? != [0; 16] {
            return other("is a layer over another file");
        }
        Ok(())
    }

    fn vpc(&self) -> Look<()> {
        const FOOTER_BYTES: u64 = 512;
        let failed = |error: std::io::Error| Refusal::Unusable(error.to_string());
        let length =
            std::io::Seek::seek(&mut &self.file, std::io::SeekFrom::End(0)).map_err(failed)?;
        // An image of fixed size has it only at its end.
        let end = length.saturating_sub(FOOTER_BYTES);
        let places = [0, end]
            .into_iter()
            .filter(|at| self.bytes(*at).is_ok_and(|magic| magic == *b"conectix"));
        let mut seen = false;
        for footer in places {
            seen = true;
            match self.big_u32(footer + 60)? {
                2 => {}
                3 => self.vpc_dynamic(footer)?,
                4 => return other("is a layer over another file"),
                kind => return unusable(format!("a disk of type {kind}")),
            }
        }
        if seen {
            Ok(())
        } else {
            unusable("it has neither the header nor the footer of a VHD image")
        }
    }

    fn vdi(&self) -> Look<()> {
        const LINKS: [u64; 2] = [0x1a8, 0x1b8];
        if self.little_u32(0x40)? != 0xbeda_107f {
            return unusable("it is not a VDI image");
        }
        if !matches!(self.little_u32(0x4c)?, 1 | 2) {
            return other("is a layer over another file");
        }
        for link in LINKS {
            if self.bytes::<16>(link)? != [0; 16] {
                return other("is a layer over another file");
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
