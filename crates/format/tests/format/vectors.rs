//! Golden vectors: bytes of every structure, checked in and never edited, only added to.
//!
//! `cargo test -p sawmill-format -- --ignored write_vectors` writes those of new cases and leaves
//! the others.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::fs;
use std::path::Path;

use sawmill_format::journal::{RECORD_VERSION, record_at};
use sawmill_format::layout::Field;
use sawmill_format::link::{self, packet_at};
use sawmill_format::packed_write;
use sawmill_format::preamble::{Kind, MAGIC, Preamble};
use sawmill_testkit::vectors::{self, Vector, Vectors, dump_head, dump_row};

use crate::samples::{self, Case};

const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/vectors");

fn vectors() -> Vectors {
    let vector = |case: Case| Vector { name: case.name, dump: dump(&case), bytes: case.bytes };
    Vectors::new(FOLDER, samples::all().into_iter().map(vector))
}

fn vector(case: &Case) -> Vec<u8> {
    vectors::read(Path::new(FOLDER), case.name)
}

fn hex(bytes: &[u8]) -> String {
    if bytes.len() > 32 && bytes.iter().all(|&byte| byte == 0) {
        return format!("{} bytes of zero", bytes.len());
    }
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The first bytes field by field, the rest in rows of 16, and the value.
fn dump(case: &Case) -> String {
    let mut text = dump_head(case.name, case.bytes.len());
    let mut row = |offset: usize, bytes: &[u8], name: &str| {
        dump_row(&mut text, (offset, bytes.len()), name, &hex(bytes));
    };
    for field in case.table.fields {
        row(field.offset, &case.bytes[field.offset..][..field.size], field.name);
    }
    for (index, bytes) in case.bytes[case.table.size..].chunks(16).enumerate() {
        row(case.table.size + 16 * index, bytes, "");
    }
    writeln!(text, "\n{}", case.value).unwrap();
    text
}

#[test]
fn every_vector_decodes_to_its_value() {
    for case in samples::all() {
        assert_eq!((case.decode)(&vector(&case)), Ok(true), "{}", case.name);
    }
}

#[test]
fn every_value_encodes_to_its_vector() {
    vectors().assert_encoded();
}

#[test]
fn every_dump_shows_its_vector() {
    vectors().assert_dumped();
}

#[test]
fn every_file_beside_the_vectors_belongs_to_a_case() {
    vectors().assert_no_other_files();
}

/// All vectors with their names, except those of unwanted structures.
fn vectors_of(is_wanted: impl Fn(&str) -> bool) -> Vec<(String, Vec<u8>)> {
    let mut found = Vec::new();
    for folder in fs::read_dir(FOLDER).unwrap().map(Result::unwrap) {
        let structure = folder.file_name().into_string().unwrap();
        for file in fs::read_dir(folder.path()).unwrap().map(|file| file.unwrap().path()) {
            if is_wanted(&structure) && file.extension().is_some_and(|ending| ending == "bin") {
                let name = format!("{structure}/{}", file.file_stem().unwrap().display());
                found.push((name, fs::read(&file).unwrap()));
            }
        }
    }
    found
}

/// A vector is named `<structure>/v<version>-<case>`.
fn assert_named(name: &str, version: u16) {
    let expected = format!("/v{version}-");
    assert!(name.contains(&expected), "{name} has version {version} in its bytes");
}

#[test]
fn every_version_of_every_kind_has_a_vector() {
    let mut found = BTreeSet::new();
    for (name, bytes) in vectors_of(|_| true) {
        if let Ok(preamble) = Preamble::decode(&bytes) {
            assert_named(&name, preamble.version);
            found.insert((preamble.kind, preamble.version));
        }
    }
    for kind in Kind::ALL {
        for version in 1..=kind.version_max() {
            let has = found.contains(&(kind as u16, version));
            assert!(has, "no vector of version {version} of the {}", kind.name());
        }
    }
}

#[test]
fn every_version_of_what_has_one_without_a_preamble_has_a_vector() {
    let own: [(&str, Field, u16); 3] = [
        ("journal", record_at::VERSION, u16::from(RECORD_VERSION)),
        ("link_packet", packet_at::VERSION, u16::from(link::VERSION)),
        ("packed_write", packed_write::at::VERSION, packed_write::VERSION),
    ];
    for (folder, field, version_max) in own {
        let mut found = BTreeSet::new();
        let all = vectors_of(|structure| structure == folder);
        for (name, bytes) in all.iter().filter(|(_, bytes)| bytes[..4] != MAGIC) {
            let place = &bytes[field.offset..][..field.size];
            let version = place.iter().rev().fold(0, |high, byte| high << 8 | u16::from(*byte));
            assert_named(name, version);
            found.insert(version);
        }
        for version in 1..=version_max {
            assert!(found.contains(&version), "no vector of version {version} in {folder}");
        }
    }
}

#[test]
fn every_flipped_bit_of_a_vector_is_refused() {
    for case in samples::all() {
        // The connection's seal covers what crosses the link: without the seal, a flipped bit is
        // another value.
        let sealed = !case.name.starts_with("packed_write/") && !case.name.starts_with("link_");
        let mut bytes = vector(&case);
        for bit in 0..bytes.len() * 8 {
            bytes[bit / 8] ^= 1 << (bit % 8);
            let found = (case.decode)(&bytes);
            let is_detected = if sealed { found.is_err() } else { found != Ok(true) };
            assert!(is_detected, "{}: bit {bit} may be flipped", case.name);
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
    }
}

#[test]
fn every_prefix_of_a_vector_is_refused() {
    for case in samples::all() {
        let bytes = vector(&case);
        for length in 0..bytes.len() {
            let found = (case.decode)(&bytes[..length]);
            assert!(found.is_err(), "{}: {length} bytes suffice", case.name);
        }
    }
}

#[test]
#[ignore = "a tool: writes the vectors of new cases"]
fn write_vectors() {
    vectors().write_new();
}
