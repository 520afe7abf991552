//! Golden vectors: bytes of every structure, checked in and never edited, only added to.
//!
//! `cargo test -p sawmill-format -- --ignored write_vectors` writes those of new cases and leaves
//! the others.

use std::fmt::Write;
use std::fs;
use std::path::PathBuf;

use crate::samples::{self, Case};

fn path(case: &Case, ending: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("vectors")
        .join(format!("{}.{ending}", case.name))
}

fn vector(case: &Case) -> Vec<u8> {
    let path = path(case, "bin");
    fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn hex(bytes: &[u8]) -> String {
    if bytes.len() > 32 && bytes.iter().all(|&byte| byte == 0) {
        return format!("{} bytes of zero", bytes.len());
    }
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The first bytes field by field, the rest in rows of 16, and the value.
fn dump(case: &Case) -> String {
    let mut text =
        format!("{}: {} bytes\n\noffset size name and bytes\n", case.name, case.bytes.len());
    let mut row = |offset: usize, bytes: &[u8], name: &str| {
        writeln!(text, "{offset:6} {:4} {name:20} {}", bytes.len(), hex(bytes)).unwrap();
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
    for case in samples::all() {
        assert!(case.bytes == vector(&case), "{} is encoded otherwise than it was", case.name);
    }
}

#[test]
fn every_dump_shows_its_vector() {
    for case in samples::all() {
        assert_eq!(dump(&case), fs::read_to_string(path(&case, "txt")).unwrap(), "{}", case.name);
    }
}

#[test]
fn every_file_beside_the_vectors_belongs_to_a_case() {
    let known: Vec<_> =
        samples::all().iter().flat_map(|case| [path(case, "bin"), path(case, "txt")]).collect();
    for directory in fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/vectors")).unwrap() {
        for file in fs::read_dir(directory.unwrap().path()).unwrap() {
            let file = file.unwrap().path();
            assert!(known.contains(&file), "no test reads {}", file.display());
        }
    }
}

#[test]
fn every_flipped_bit_of_a_vector_is_refused() {
    for case in samples::all() {
        // What crosses the link is sealed by the connection: without that, a flipped bit is another
        // value.
        let sealed = !case.name.starts_with("packed_write/") && !case.name.starts_with("link_");
        let mut bytes = vector(&case);
        for bit in 0..bytes.len() * 8 {
            bytes[bit / 8] ^= 1 << (bit % 8);
            let found = (case.decode)(&bytes);
            let seen = if sealed { found.is_err() } else { found != Ok(true) };
            assert!(seen, "{}: bit {bit} may be flipped", case.name);
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
    for case in samples::all().iter().filter(|case| !path(case, "bin").exists()) {
        fs::create_dir_all(path(case, "bin").parent().unwrap()).unwrap();
        fs::write(path(case, "bin"), &case.bytes).unwrap();
        fs::write(path(case, "txt"), dump(case)).unwrap();
    }
}
