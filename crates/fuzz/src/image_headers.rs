//! Headers of disk images: passes a sparse file made of the input's pieces to the check that
//! precedes any other program's read.
//!
//! Invariants: a check reads within its bounds and gives the same result each time. It returns a
//! layer's name as the image has it, and its refusal is one short line. An image that it accepts is
//! what its content claims to be.
//!
//! Not here: images as files, and what an import does with them (`crates/sawmill`).

use std::cell::Cell;
use std::io;

use sawmill_format::disk_image::{
    BackingFile, Bytes, Format, NAME_BYTES_MAX, PIECE_BYTES_MAX, READ_BYTES_MAX, Refusal,
    layer_below,
};

/// Places and lengths have 48 bits, which exceeds any file.
const PLACE_BYTES: usize = 6;
/// No refusal is longer.
const TEXT_BYTES_MAX: usize = 1024;
/// A qcow2 image names other files only in its first cluster.
const CLUSTER_BYTES_MAX: u64 = 2 << 20;

/// A file of zeroes with some bytes in it; later pieces overwrite earlier ones.
#[derive(Clone)]
struct SparseFile<'a> {
    length: u64,
    pieces: Vec<(u64, &'a [u8])>,
    read_bytes: Cell<u64>,
    read_end: Cell<u64>,
}

impl<'a> SparseFile<'a> {
    /// The length, then pieces: a place, a length of 16 bits, bytes.
    fn decode(input: &'a [u8]) -> Self {
        let mut rest = input;
        let length = place(&mut rest).unwrap_or(0);
        let mut pieces = Vec::new();
        while let Some(at) = place(&mut rest) {
            let Some((length, after)) = rest.split_first_chunk() else { break };
            let (bytes, after) =
                after.split_at(usize::from(u16::from_le_bytes(*length)).min(after.len()));
            pieces.push((at, bytes));
            rest = after;
        }
        SparseFile { length, pieces, read_bytes: Cell::new(0), read_end: Cell::new(0) }
    }

    fn of(length: u64, pieces: &[(u64, &'a [u8])]) -> Self {
        SparseFile {
            length,
            pieces: pieces.to_vec(),
            read_bytes: Cell::new(0),
            read_end: Cell::new(0),
        }
    }

    fn head<const N: usize>(&self, at: u64) -> [u8; N] {
        let mut bytes = [0; N];
        self.fill(at, &mut bytes);
        bytes
    }

    fn fill(&self, at: u64, into: &mut [u8]) {
        into.fill(0);
        for (place, bytes) in &self.pieces {
            let from = (*place).max(at);
            let end = (place + bytes.len() as u64).min(at + into.len() as u64).min(self.length);
            if from < end {
                into[(from - at) as usize..(end - at) as usize]
                    .copy_from_slice(&bytes[(from - place) as usize..(end - place) as usize]);
            }
        }
    }
}

/// The next 48 bits.
fn place(rest: &mut &[u8]) -> Option<u64> {
    let (bytes, after) = rest.split_first_chunk::<PLACE_BYTES>()?;
    *rest = after;
    Some(bytes.iter().rev().fold(0, |place, byte| place << 8 | u64::from(*byte)))
}

impl Bytes for SparseFile<'_> {
    fn length(&self) -> u64 {
        self.length
    }

    fn read(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        assert!(into.len() <= PIECE_BYTES_MAX, "{} bytes at a time", into.len());
        self.read_bytes.set(self.read_bytes.get() + into.len() as u64);
        // Headers without an end must not be followed forever (P137).
        assert!(self.read_bytes.get() <= READ_BYTES_MAX, "it reads on and on");
        let end = at.checked_add(into.len() as u64).filter(|end| *end <= self.length);
        let end = end.ok_or(io::ErrorKind::UnexpectedEof)?;
        self.read_end.set(self.read_end.get().max(end));
        self.fill(at, into);
        Ok(())
    }
}

/// The first byte chooses how the image is checked.
pub(crate) fn run(bytes: &[u8]) {
    let Some((&format, rest)) = bytes.split_first() else { return };
    let format = Format::ALL[usize::from(format) % Format::ALL.len()];
    let mut image = SparseFile::decode(rest);
    check(&image, format);
    // Again with the signs of the format: a random image seldom gets past its magic.
    let signs = signs(&image, format);
    image.pieces.extend(signs.iter().map(|(at, bytes)| (*at, &bytes[..])));
    if !signs.is_empty() {
        // The signs lie beyond the end of most inputs, and an image that ends before them is
        // refused for that alone.
        image.length = image.length.max(1 << 20);
        check(&image, format);
    }
}

/// Fields that shield the rest of an image: magics, versions, numbers with few valid values.
fn signs(image: &SparseFile<'_>, format: Format) -> Vec<(u64, Vec<u8>)> {
    match format {
        Format::Raw => Vec::new(),
        Format::Qcow2 => {
            let version = if image.head(4) == [0, 0, 0, 2] { 2 } else { 3 };
            let cluster_bits = image.head::<1>(23)[0].clamp(9, 21);
            let features = image.head::<1>(79)[0] & 0b1_1111;
            let [_, _, high, low] = image.head(100);
            let header_bytes = u16::from_be_bytes([high, low]).clamp(104, 512).to_be_bytes();
            vec![
                (0, [b"QFI\xfb\0\0\0", &[version][..]].concat()),
                (20, vec![0, 0, 0, cluster_bits]),
                (32, vec![0; 4]),
                (72, vec![0, 0, 0, 0, 0, 0, 0, features]),
                (100, [&[0, 0], &header_bytes[..]].concat()),
            ]
        }
        Format::Vmdk => {
            let capacity = image.head::<1>(12)[0].max(1);
            vec![
                (0, b"KDMV".to_vec()),
                (12, vec![capacity]),
                (28, vec![1, 0, 0, 0, 0, 0, 0, 0, 20, 0, 0, 0, 0, 0, 0, 0]),
            ]
        }
        Format::Vhdx => {
            let region = 192 << 10;
            let [low, high] = image.head(region + 8);
            let entries = u16::from_le_bytes([low, high]).min(2048).to_le_bytes();
            let metadata =
                b"\x06\xa2\x7c\x8b\x90\x47\x9a\x4b\xb8\xfe\x57\x5f\x05\x0f\x88\x6e".to_vec();
            let place = u64::from_le_bytes(image.head(region + 32)) % (1 << 40);
            vec![
                (0, b"vhdxfile".to_vec()),
                (region, b"regi".to_vec()),
                (region + 8, vec![entries[0], entries[1], 0, 0]),
                (region + 16, metadata),
                (region + 32, place.to_le_bytes().to_vec()),
                (place, b"metadata".to_vec()),
            ]
        }
        Format::Vpc => vec![(0, b"conectix".to_vec()), (60, vec![0; 3])],
        Format::Vdi => vec![(0x40, vec![0x7f, 0x10, 0xda, 0xbe])],
    }
}

fn backing_of(image: &SparseFile<'_>, format: Format) -> Result<Option<BackingFile>, Refusal> {
    image.read_bytes.set(0);
    image.read_end.set(0);
    layer_below(image, format)
}

fn check(image: &SparseFile<'_>, format: Format) {
    let found = backing_of(image, format);
    let again = backing_of(image, format);
    assert_eq!(format!("{again:?}"), format!("{found:?}"), "it finds the same each time");
    match &found {
        Ok(below) => {
            check_claim(image, format);
            if let Some(below) = below {
                assert_eq!(format, Format::Qcow2, "no other layers are followed");
                check_below(image, below);
            }
        }
        Err(refusal) => {
            let what = refusal.to_string();
            assert!(!what.contains(char::is_control), "one line: {what:?}");
            assert!((1..=TEXT_BYTES_MAX).contains(&what.len()), "a short one: {what:?}");
        }
    }
    match format {
        Format::Raw => assert_eq!(image.read_bytes.get(), 0, "the content is the disk's"),
        Format::Qcow2 => assert!(image.read_end.get() <= CLUSTER_BYTES_MAX, "it is QEMU's header"),
        _ => {}
    }
}

/// An image that is accepted claims to be what it was taken for.
fn check_claim(image: &SparseFile<'_>, format: Format) {
    let claimed = Format::of_content(&image.head::<512>(0));
    match format {
        Format::Raw => {}
        // The magic may also be in a footer at the end, not at the beginning.
        Format::Vpc => {}
        Format::Vdi => assert_ne!(claimed, Format::Raw),
        _ => assert_eq!(claimed, format),
    }
}

/// A layer's name is what the image contains, and is found again in another image that contains it.
fn check_below(image: &SparseFile<'_>, file: &BackingFile) {
    let name = file.name.as_bytes();
    assert!((1..=NAME_BYTES_MAX as usize).contains(&name.len()));
    assert!(!file.name.contains(char::is_control));
    let mut stored_name = vec![0; name.len()];
    image.fill(u64::from_be_bytes(image.head(8)), &mut stored_name);
    assert_eq!(stored_name, name, "the name is passed on as it is");
    let header = qcow2(file);
    let again = backing_of(&SparseFile::of(1 << 16, &[(0, &header)]), Format::Qcow2);
    assert_eq!(again.ok().flatten().as_ref(), Some(file));
}

/// A header with this layer, laid out as QEMU does: extensions, their end, the name.
fn qcow2(file: &BackingFile) -> Vec<u8> {
    let mut header = vec![0; 104];
    header[..8].copy_from_slice(b"QFI\xfb\0\0\0\x03");
    (header[23], header[103]) = (16, 104);
    if let Some(format) = &file.format {
        header.extend(0xe279_2aca_u32.to_be_bytes());
        header.extend((format.len() as u32).to_be_bytes());
        header.extend(format.as_bytes());
        header.resize(header.len().next_multiple_of(8), 0);
    }
    header.extend([0; 8]);
    let at = header.len() as u64;
    header[8..16].copy_from_slice(&at.to_be_bytes());
    header[16..20].copy_from_slice(&(file.name.len() as u32).to_be_bytes());
    header.extend(file.name.as_bytes());
    header
}
