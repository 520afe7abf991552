//! Headers of foreign images that ask for too much, or that two readers could understand in two
//! ways. Headers that simply name other files are tested where files are (`crates/sawmill`).

use std::cell::Cell;
use std::io;

use sawmill_format::disk_image::{
    BackingFile, Bytes, Format, PIECE_BYTES_MAX, READ_BYTES_MAX, Refusal, layer_below,
};

/// A file of zeroes with these bytes at these places.
struct Image {
    length: u64,
    parts: Vec<(u64, Vec<u8>)>,
    read: Cell<u64>,
}

impl Image {
    fn new(length: u64, parts: &[(u64, &[u8])]) -> Self {
        let parts = parts.iter().map(|(at, bytes)| (*at, bytes.to_vec())).collect();
        Image { length, parts, read: Cell::new(0) }
    }

    fn backing_of(&self, format: Format) -> Result<Option<BackingFile>, Refusal> {
        self.read.set(0);
        let found = layer_below(self, format);
        assert!(self.read.get() <= READ_BYTES_MAX, "{} bytes were read", self.read.get());
        found
    }

    fn expect_refusal(&self, format: Format, words: &str) {
        let what = self.backing_of(format).expect_err("it is refused").to_string();
        assert!(what.contains(words), "{what}");
        assert!(!what.contains(char::is_control), "{what:?}");
    }
}

impl Bytes for Image {
    fn length(&self) -> u64 {
        self.length
    }

    fn read(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        assert!(into.len() <= PIECE_BYTES_MAX, "{} bytes at a time", into.len());
        self.read.set(self.read.get() + into.len() as u64);
        if at.checked_add(into.len() as u64).is_none_or(|end| end > self.length) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        into.fill(0);
        for (place, bytes) in &self.parts {
            for (n, byte) in bytes.iter().enumerate() {
                let inside = (place + n as u64).checked_sub(at).filter(|n| *n < into.len() as u64);
                if let Some(inside) = inside {
                    into[inside as usize] = *byte;
                }
            }
        }
        Ok(())
    }
}

const GIB: u64 = 1 << 30;

/// A qcow2 image with the name of a layer below at byte 120, where its extensions end.
fn over(name: &[u8], more: &[(u64, &[u8])]) -> Image {
    let name_bytes = (name.len() as u32).to_be_bytes();
    let head: [(u64, &[u8]); 7] = [
        (0, b"QFI\xfb\0\0\0\x03"),
        (8, &[0, 0, 0, 0, 0, 0, 0, 120]),
        (16, &name_bytes),
        (20, &[0, 0, 0, 16]),
        (100, &[0, 0, 0, 104]),
        (104, b"\xe2\x79\x2a\xca\0\0\0\x05qcow2\0\0\0"),
        (120, name),
    ];
    Image::new(GIB, &[&head, more].concat())
}

fn below(name: &str, format: &str) -> Option<BackingFile> {
    Some(BackingFile { name: name.into(), format: Some(format.into()) })
}

#[test]
fn the_list_of_extensions_ends_where_qemu_ends_it() {
    assert_eq!(over(b"base", &[]).backing_of(Format::Qcow2).unwrap(), below("base", "qcow2"));
    // Read on, the name would be an extension of 0x20202020 bytes, followed by another format.
    let far = 128 + 0x2020_2020;
    let raw: &[u8] = b"\xe2\x79\x2a\xca\0\0\0\x03raw\0\0\0\0\0";
    let image = over(b"./ab    ", &[(far, raw)]);
    assert_eq!(image.backing_of(Format::Qcow2).unwrap(), below("./ab    ", "qcow2"));
    let longer = over(b"base", &[(108, &[0, 0, 0, 9])]);
    longer.expect_refusal(Format::Qcow2, "an extension of 9 bytes");
}

#[test]
fn a_layers_name_is_passed_on_as_it_is_or_refused() {
    for name in [&b"a\xff"[..], b"a\0b", b"a\x1b[2Jb", b"a\nb"] {
        over(name, &[]).expect_refusal(Format::Qcow2, "no text");
    }
    over(b"", &[]).expect_refusal(Format::Qcow2, "a name of 0 bytes");
    over(b"base", &[(18, &[4, 0])]).expect_refusal(Format::Qcow2, "a name of 1024 bytes");
    over(b"base", &[(13, &[1])]).expect_refusal(Format::Qcow2, "outside its first cluster");
    over(b"base", &[(14, &[255, 253])]).expect_refusal(Format::Qcow2, "beyond its first cluster");
}

#[test]
fn a_qcow2_header_of_an_impossible_shape_is_refused() {
    over(b"base", &[(103, &[103])]).expect_refusal(Format::Qcow2, "a header of 103 bytes");
    over(b"base", &[(101, &[1])]).expect_refusal(Format::Qcow2, "a header of 65640 bytes");
    for bits in [8, 22, 255] {
        over(b"base", &[(23, &[bits])]).expect_refusal(Format::Qcow2, "clusters of 2^");
    }
}

/// A VHDX image with this table of regions.
fn vhdx(count: u32, entries: &[u8], more: &[(u64, &[u8])]) -> Image {
    let table = 192 << 10;
    let count = count.to_le_bytes();
    let head: [(u64, &[u8]); 4] =
        [(0, b"vhdxfile"), (table, b"regi"), (table + 8, &count), (table + 16, entries)];
    Image::new(1 << 20, &[&head, more].concat())
}

const METADATA: [u8; 16] = *b"\x06\xa2\x7c\x8b\x90\x47\x9a\x4b\xb8\xfe\x57\x5f\x05\x0f\x88\x6e";

#[test]
fn a_vhdx_image_that_repeats_its_metadata_is_not_read_forever() {
    let place = 512u64 << 10;
    let region = [&METADATA[..], &place.to_le_bytes(), &[0; 8]].concat();
    let table: &[(u64, &[u8])] = &[(place, b"metadata"), (place + 10, &2048u16.to_le_bytes())];
    assert_eq!(vhdx(1, &region, table).backing_of(Format::Vhdx).unwrap(), None);
    vhdx(2048, &region.repeat(2048), table).expect_refusal(Format::Vhdx, "its headers exceed");
}

#[test]
fn tables_that_are_longer_than_what_is_looked_at_are_refused() {
    let place = 512u64 << 10;
    let region = [&METADATA[..], &place.to_le_bytes(), &[0; 8]].concat();
    vhdx(2049, &region, &[]).expect_refusal(Format::Vhdx, "a table of 2049 regions");
    let table: &[(u64, &[u8])] = &[(place, b"metadata"), (place + 10, &2049u16.to_le_bytes())];
    vhdx(1, &region, table).expect_refusal(Format::Vhdx, "a table of 2049 metadata");
}

#[test]
fn what_a_description_says_is_shown_in_part_and_without_control_characters() {
    let text = format!("createType=\"\x1b[2J{}\"\n", "x".repeat(4000));
    let header: [(u64, &[u8]); 5] =
        [(0, b"KDMV"), (12, &[8]), (28, &[1]), (36, &[20]), (512, text.as_bytes())];
    let image = Image::new(1 << 20, &header);
    image.expect_refusal(Format::Vmdk, "is of the kind");
    let Err(Refusal::Other(what)) = image.backing_of(Format::Vmdk) else { panic!("it is refused") };
    assert!(what.len() < 200, "{what}");
}
