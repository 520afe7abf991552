//! The headers of other systems' disk images, as far as they show whether an image is one file.
//!
//! Foreign formats, which are only read: qcow2 (QEMU's `docs/interop/qcow2.rst`), VMDK, VHDX, VHD
//! (`vpc` to QEMU) and VDI.
//!
//! Invariants: no input makes a function here panic. Examining an image reads at most
//! [`READ_BYTES_MAX`] bytes, at most [`PIECE_BYTES_MAX`] at a time, and keeps one piece. An unknown
//! feature is refused, because the program that reads the image later may understand it. A list
//! ends here where QEMU ends it: an entry that only one of the two sees could hide a file. Text
//! from a header is shown without control characters.
//!
//! Not here: files (the binary's `transfer`), the file below an image, completeness of an image.

use std::cell::Cell;
use std::io;

/// The most bytes that are read from an image.
pub const READ_BYTES_MAX: u64 = 256 << 10;
/// The most bytes that are read at a time.
pub const PIECE_BYTES_MAX: usize = 20 * 512;
/// The longest name of the layer below.
pub const NAME_BYTES_MAX: u32 = 1023;
/// The most entries of a list in a header.
const ENTRIES_MAX: u32 = 2048;
/// The most characters of a header's text that are shown.
const SHOWN_CHARACTERS_MAX: usize = 80;
/// No header begins beyond this, so that sums of offsets do not overflow.
const OFFSET_MAX: u64 = 1 << 62;

/// How a disk lies in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
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
    /// All of them.
    pub const ALL: [Format; 6] =
        [Format::Raw, Format::Qcow2, Format::Vmdk, Format::Vhdx, Format::Vpc, Format::Vdi];

    /// QEMU's name for it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Format::Raw => "raw",
            Format::Qcow2 => "qcow2",
            Format::Vmdk => "vmdk",
            Format::Vhdx => "vhdx",
            Format::Vpc => "vpc",
            Format::Vdi => "vdi",
        }
    }

    /// The format with this QEMU name, if it is known here.
    #[must_use]
    pub fn of_qemu(name: &str) -> Option<Format> {
        Format::ALL.into_iter().find(|format| format.name() == name)
    }

    /// The format that a file's first 512 bytes claim. A `vpc` of fixed size claims nothing there.
    #[must_use]
    pub fn of_content(head: &[u8]) -> Format {
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
}

/// The bytes of an image.
pub trait Bytes {
    /// The number of bytes.
    fn length(&self) -> u64;

    /// Fills `into` with the bytes from `at` on.
    fn read(&self, at: u64, into: &mut [u8]) -> io::Result<()>;
}

/// The file that an image is a layer over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackingFile {
    /// Its name, as the image has it: 1 to [`NAME_BYTES_MAX`] bytes without control characters.
    pub name: String,
    /// QEMU's name of its format, if the image records it.
    pub format: Option<String>,
}

/// Why an image is refused.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    /// It refers to other files or addresses; the text says which.
    #[error("{0}")]
    Other(String),
    /// Its headers are unreliable.
    #[error("{0}")]
    Unusable(String),
    /// A header cannot be read.
    #[error("no header at byte {at} ({source})")]
    Unread {
        /// Where it should be.
        at: u64,
        /// Why it cannot.
        source: io::Error,
    },
}

type Inspection<T> = Result<T, Refusal>;

fn other<T>(what: impl Into<String>) -> Inspection<T> {
    Err(Refusal::Other(what.into()))
}

fn unusable<T>(what: impl Into<String>) -> Inspection<T> {
    Err(Refusal::Unusable(what.into()))
}

/// The layer below an image, if there is one. Refuses an image that refers to other files in any
/// other way, or whose headers are unreliable.
pub fn layer_below(bytes: &dyn Bytes, format: Format) -> Inspection<Option<BackingFile>> {
    let image = Image { bytes, bytes_left: Cell::new(READ_BYTES_MAX) };
    match format {
        // The content belongs to the disk, whatever it looks like.
        Format::Raw => Ok(None),
        Format::Qcow2 => image.qcow2(),
        Format::Vmdk => image.vmdk().map(|()| None),
        Format::Vhdx => image.vhdx().map(|()| None),
        Format::Vpc => image.vpc().map(|()| None),
        Format::Vdi => image.vdi().map(|()| None),
    }
}

/// An image under examination.
struct Image<'a> {
    bytes: &'a dyn Bytes,
    /// How many more bytes may be read.
    bytes_left: Cell<u64>,
}

impl Image<'_> {
    fn read(&self, at: u64, into: &mut [u8]) -> Inspection<()> {
        match self.bytes_left.get().checked_sub(into.len() as u64) {
            Some(bytes_left) => self.bytes_left.set(bytes_left),
            None => return unusable(format!("its headers exceed {READ_BYTES_MAX} bytes")),
        }
        self.bytes.read(at, into).map_err(|source| Refusal::Unread { at, source })
    }

    fn array<const N: usize>(&self, at: u64) -> Inspection<[u8; N]> {
        let mut bytes = [0; N];
        self.read(at, &mut bytes).map(|()| bytes)
    }

    fn big_u32(&self, at: u64) -> Inspection<u32> {
        self.array(at).map(u32::from_be_bytes)
    }

    fn big_u64(&self, at: u64) -> Inspection<u64> {
        self.array(at).map(u64::from_be_bytes)
    }

    fn little_u32(&self, at: u64) -> Inspection<u32> {
        self.array(at).map(u32::from_le_bytes)
    }

    fn little_u64(&self, at: u64) -> Inspection<u64> {
        self.array(at).map(u64::from_le_bytes)
    }

    /// A name of `length` bytes. A name that is not text cannot be shown, nor passed on unchanged.
    fn name(&self, at: u64, length: u32) -> Inspection<String> {
        if !(1..=NAME_BYTES_MAX).contains(&length) {
            return unusable(format!(
                "a name of {length} bytes; 1 to {NAME_BYTES_MAX} are possible"
            ));
        }
        let mut bytes = vec![0; length as usize];
        self.read(at, &mut bytes)?;
        match String::from_utf8(bytes) {
            Ok(name) if !name.contains(char::is_control) => Ok(name),
            _ => unusable(format!("a name at byte {at} that is no text")),
        }
    }

    fn qcow2(&self) -> Inspection<Option<BackingFile>> {
        const DATA_FILE: u64 = 1 << 2;
        const CORRUPT: u64 = 1 << 1;
        /// Dirty, compression type, extended entries: none of these refers to another file.
        const HARMLESS: u64 = 1 | 1 << 3 | 1 << 4;
        let (magic, version) = (self.array::<4>(0)?, self.big_u32(4)?);
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
        let cluster_bits = self.big_u32(20)?;
        if !(9..=21).contains(&cluster_bits) {
            return unusable(format!(
                "clusters of 2^{cluster_bits} bytes; 2^9 to 2^21 are possible"
            ));
        }
        let first = QcowHeader { version, bytes: header_bytes, cluster_bytes: 1 << cluster_bits };
        self.qcow2_below(first)
    }

    /// Reads the rest of the first cluster: extensions, and then the name of the layer below.
    fn qcow2_below(&self, header: QcowHeader) -> Inspection<Option<BackingFile>> {
        let (name_at, name_bytes) = (self.big_u64(8)?, self.big_u32(16)?);
        let least = if header.version == 2 { 72 } else { 104 };
        if header.bytes < least || header.bytes > header.cluster_bytes {
            return unusable(format!(
                "a header of {} bytes; at least {least} and at most a cluster are possible",
                header.bytes
            ));
        }
        if name_at > u64::from(header.cluster_bytes) {
            return unusable(format!("a name at byte {name_at}, outside its first cluster"));
        }
        let end = if name_at == 0 { u64::from(header.cluster_bytes) } else { name_at };
        let format = self.qcow2_extensions(u64::from(header.bytes), end)?;
        if name_at == 0 {
            return Ok(None);
        }
        if u64::from(name_bytes) > u64::from(header.cluster_bytes) - name_at {
            return unusable(format!("a name of {name_bytes} bytes, beyond its first cluster"));
        }
        Ok(Some(BackingFile { name: self.name(name_at, name_bytes)?, format }))
    }

    /// Reads the header's extensions, which end at `end` or before. Returns the format of the layer
    /// below, if one of them has it.
    fn qcow2_extensions(&self, mut at: u64, end: u64) -> Inspection<Option<String>> {
        const HEAD_BYTES: u64 = 8;
        let mut format = None;
        for _ in 0..ENTRIES_MAX {
            if at >= end {
                return Ok(format);
            }
            let (kind, length) = (self.big_u32(at)?, self.big_u32(at + 4)?);
            at += HEAD_BYTES;
            if end.checked_sub(at).is_none_or(|room| u64::from(length) > room) {
                return unusable(format!("an extension of {length} bytes in its header"));
            }
            match kind {
                0 => return Ok(format),
                0x4441_5441 => return other("keeps its data in another file"),
                0x0537_be77 => return unusable("it is encrypted, and import takes no key"),
                0xe279_2aca => format = Some(self.name(at, length)?),
                _ => {}
            }
            at += u64::from(length).next_multiple_of(8);
        }
        unusable("its header has no end")
    }

    fn vmdk(&self) -> Inspection<()> {
        const SECTOR_BYTES: u64 = 512;
        /// The offset where QEMU looks for the description, whatever the header records, and its
        /// greatest length.
        const DESCRIPTION_AT: u64 = 0x200;
        const DESCRIPTION_BYTES: u64 = PIECE_BYTES_MAX as u64;
        let magic = self.array::<4>(0)?;
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
        let available_bytes =
            self.bytes.length().saturating_sub(DESCRIPTION_AT).min(DESCRIPTION_BYTES);
        let mut description = vec![0; available_bytes as usize];
        self.read(DESCRIPTION_AT, &mut description)?;
        described(&String::from_utf8_lossy(&description))
    }

    fn vhdx(&self) -> Inspection<()> {
        const METADATA: [u8; 16] =
            *b"\x06\xa2\x7c\x8b\x90\x47\x9a\x4b\xb8\xfe\x57\x5f\x05\x0f\x88\x6e";
        if self.array::<8>(0)? != *b"vhdxfile" {
            return unusable("it is not a VHDX image");
        }
        // There are two tables of regions; either may be the one in use.
        let mut is_found = false;
        for table in [192_u64 << 10, 256 << 10] {
            if self.array::<4>(table)? != *b"regi" {
                continue;
            }
            let count = self.little_u32(table + 8)?;
            if count > ENTRIES_MAX {
                return unusable(format!(
                    "a table of {count} regions; at most {ENTRIES_MAX} are possible"
                ));
            }
            for entry in (0..u64::from(count)).map(|number| table + 16 + 32 * number) {
                if self.array::<16>(entry)? == METADATA {
                    self.vhdx_metadata(self.little_u64(entry + 16)?)?;
                    is_found = true;
                }
            }
        }
        if is_found { Ok(()) } else { unusable("it has no metadata table") }
    }

    fn vhdx_metadata(&self, region: u64) -> Inspection<()> {
        const PARENT: [u8; 16] =
            *b"\x2d\x5f\xd3\xa8\x0b\xb3\x4d\x45\xab\xf7\xd3\xd8\x48\x34\xab\x0c";
        const PARAMETERS: [u8; 16] =
            *b"\x37\x67\xa1\xca\x36\xfa\x43\x4d\xb3\xb6\x33\xf0\xaa\x44\xe7\x6b";
        const HAS_PARENT: u32 = 1 << 1;
        if region > OFFSET_MAX || self.array::<8>(region)? != *b"metadata" {
            return unusable("its metadata table cannot be read");
        }
        let count = u16::from_le_bytes(self.array(region + 10)?);
        if u32::from(count) > ENTRIES_MAX {
            return unusable(format!(
                "a table of {count} metadata entries; at most {ENTRIES_MAX} are possible"
            ));
        }
        for entry in (0..u64::from(count)).map(|number| region + 32 + 32 * number) {
            let kind = self.array::<16>(entry)?;
            let at = region + u64::from(self.little_u32(entry + 16)?);
            let has_parent = kind == PARAMETERS && self.little_u32(at + 4)? & HAS_PARENT != 0;
            if kind == PARENT || has_parent {
                return other("is a layer over another file");
            }
        }
        Ok(())
    }

    fn vpc(&self) -> Inspection<()> {
        const FOOTER_BYTES: u64 = 512;
        // An image of fixed size has it only at its end.
        let end = self.bytes.length().saturating_sub(FOOTER_BYTES);
        let places = [0, end]
            .into_iter()
            .filter(|at| self.array(*at).is_ok_and(|magic| magic == *b"conectix"));
        let mut is_found = false;
        for footer in places {
            is_found = true;
            match self.big_u32(footer + 60)? {
                2 => {}
                3 => self.vpc_dynamic(footer)?,
                4 => return other("is a layer over another file"),
                kind => return unusable(format!("a disk of type {kind}")),
            }
        }
        if is_found {
            Ok(())
        } else {
            unusable("it has neither the header nor the footer of a VHD image")
        }
    }

    /// A disk that grows has a second header.
    fn vpc_dynamic(&self, footer: u64) -> Inspection<()> {
        let header = self.big_u64(footer + 16)?;
        if header > OFFSET_MAX || self.array(header)? != *b"cxsparse" {
            return unusable("its second header is missing");
        }
        if self.array::<16>(header + 40)? != [0; 16] {
            return other("is a layer over another file");
        }
        Ok(())
    }

    fn vdi(&self) -> Inspection<()> {
        const LINKS: [u64; 2] = [0x1a8, 0x1b8];
        if self.little_u32(0x40)? != 0xbeda_107f {
            return unusable("it is not a VDI image");
        }
        if !matches!(self.little_u32(0x4c)?, 1 | 2) {
            return other("is a layer over another file");
        }
        for link in LINKS {
            if self.array::<16>(link)? != [0; 16] {
                return other("is a layer over another file");
            }
        }
        Ok(())
    }
}

/// The fields of a qcow2 header.
#[derive(Clone, Copy)]
struct QcowHeader {
    version: u32,
    bytes: u32,
    cluster_bytes: u32,
}

/// Checks the description in a VMDK image: it must name one extent, the image itself.
fn described(text: &str) -> Inspection<()> {
    if text.contains("parentFileNameHint") {
        return other("is a layer over another file");
    }
    let value =
        |key: &str| text.lines().find_map(|line| line.trim().strip_prefix(key)).map(str::trim);
    match value("createType=").map(|kind| kind.trim_matches('"')) {
        Some("monolithicSparse" | "streamOptimized") => {}
        Some(kind) => return other(format!("is of the kind {}", excerpt(kind))),
        None => return other("does not say of which kind it is"),
    }
    let is_extent = |line: &&str| {
        ["RW ", "RDONLY ", "NOACCESS "].iter().any(|access| line.trim_start().starts_with(access))
    };
    let extents: Vec<&str> = text.lines().filter(is_extent).collect();
    match extents[..] {
        [extent]
            if extent.contains(" SPARSE ") && !extent.contains('/') && !extent.contains(':') =>
        {
            Ok(())
        }
        _ => other("names other files than itself"),
    }
}

/// The first characters of a text, without control characters.
fn excerpt(text: &str) -> String {
    text.chars().take(SHOWN_CHARACTERS_MAX).flat_map(char::escape_debug).collect()
}
