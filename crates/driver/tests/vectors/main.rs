//! Golden vectors of the driver protocol: packets of each kind and a write chunk, checked in and
//! never edited, only added to. The libraries in Go and Python are tested against the same files.
//!
//! `cargo test -p sawmill-driver --test vectors -- --ignored write_vectors` writes the vectors of
//! new cases and leaves the others. Not here: the values (`samples`).

mod samples;

use std::fmt::Write;
use std::fs;
use std::path::Path;

use sawmill_driver::protocol::{Control, PROTOCOL};
use sawmill_testkit::vectors::{self, Vector, Vectors, dump_head, dump_row, hex};

use self::samples::{ANSWER_FIELDS, COMMAND_FIELDS, Case, ENTRY_FIELDS};

const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/vectors");

fn vectors() -> Vectors {
    let vector = |case: Case| Vector { name: case.name, dump: dump(&case), bytes: case.bytes };
    Vectors::new(FOLDER, samples::all().into_iter().map(vector))
}

fn vector(case: &Case) -> Vec<u8> {
    vectors::read(Path::new(FOLDER), case.name)
}

/// All bytes, field by field, and the value.
fn dump(case: &Case) -> String {
    let mut text = dump_head(case.name, case.bytes.len());
    let mut end = 0;
    for (at, name) in &case.rows {
        assert_eq!(at.start, end, "{}: no row has what is before {name}", case.name);
        end = at.end;
        dump_row(&mut text, (at.start, at.len()), name, &hex(&case.bytes[at.clone()]));
    }
    assert_eq!(end, case.bytes.len(), "{}: no row has the last bytes", case.name);
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

#[test]
fn every_version_of_the_protocol_has_vectors() {
    for version in 1..=PROTOCOL {
        for name in ["hello", "welcome"] {
            let path = format!("{FOLDER}/control/v{version}-{name}.bin");
            let bytes = fs::read(&path).unwrap_or_else(|error| panic!("{path}: {error}"));
            let packet = Control::decode(&bytes).unwrap();
            assert_eq!(packet.facts.parsed::<u32>("protocol").unwrap(), version, "{path}");
        }
    }
}

#[test]
fn a_flipped_bit_of_a_vector_is_another_value_and_one_of_its_padding_is_not() {
    for case in samples::all() {
        let mut bytes = vector(&case);
        for bit in 0..bytes.len() * 8 {
            let was = bytes[bit / 8];
            bytes[bit / 8] ^= 1 << (bit % 8);
            // The host takes a zero byte of a value for a space.
            let is_a_space = case.name.starts_with("control/") && (was, bytes[bit / 8]) == (32, 0);
            let means_nothing = case.padding.iter().any(|range| range.contains(&(bit / 8)));
            let is_the_value = (case.decode)(&bytes) == Ok(true);
            assert_eq!(is_the_value, is_a_space || means_nothing, "{}: bit {bit}", case.name);
            bytes[bit / 8] = was;
        }
    }
}

#[test]
fn no_prefix_of_a_packet_is_taken_for_the_packet() {
    for case in samples::all().iter().filter(|case| case.padding.is_empty()) {
        // The last line of a control packet may lack its end.
        let has_lines = case.bytes.ends_with(b"\n");
        for length in 0..case.bytes.len() - usize::from(has_lines) {
            let found = (case.decode)(&case.bytes[..length]);
            assert_ne!(found, Ok(true), "{}: {length} bytes suffice", case.name);
        }
    }
}

#[test]
fn every_field_of_a_dump_is_on_its_page() {
    let page = |name: &str| {
        let path = format!("{}/../../docs/format/{name}", env!("CARGO_MANIFEST_DIR"));
        fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"))
    };
    let tables = [("driver.md", &COMMAND_FIELDS[..]), ("write_chunk.md", &ENTRY_FIELDS[..])];
    for (name, fields) in tables {
        let page = page(name);
        let rows: Vec<_> = page
            .lines()
            .skip_while(|line| !line.starts_with("| offset | size |"))
            .skip(2)
            .take_while(|line| line.starts_with('|'))
            .map(|line| line.split('|').skip(1).take(3).map(str::trim).collect::<Vec<_>>())
            .collect();
        let expected: Vec<_> = fields
            .iter()
            .map(|(at, name)| vec![at.start.to_string(), at.len().to_string(), (*name).to_owned()])
            .collect();
        assert_eq!(rows, expected, "{name}");
    }
    for (at, name) in &ANSWER_FIELDS {
        let kind = if *name == "errno" { "i" } else { "u" };
        let item = format!("- `{name} {kind}{}`", at.len() * 8);
        assert!(page("driver.md").contains(&item), "no item {item}");
    }
}

#[test]
#[ignore = "a tool: writes the vectors of new cases"]
fn write_vectors() {
    vectors().write_new();
}
