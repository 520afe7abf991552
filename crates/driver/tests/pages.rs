//! The pages of the protocol match the code: kinds, sizes, options with their defaults, the bytes
//! of an entry.

use std::collections::BTreeMap;

use sawmill_driver::DeviceOptions;
use sawmill_driver::batch::chunk::{ChunkEntry, ENTRY_BYTES};
use sawmill_driver::protocol::{
    ANSWER_BYTES, COMMAND_BYTES, CommandKind, Control, ControlFacts, ControlKind,
};

fn page(name: &str) -> String {
    let path = format!("{}/../../docs/format/{name}", env!("CARGO_MANIFEST_DIR"));
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"))
}

#[test]
fn every_kind_has_its_number_on_the_page() {
    let page = page("driver.md");
    use ControlKind::{
        Answer, Ask, Attached, Doors, Finish, Hello, Leave, Queue, Refused, Welcome,
    };
    for kind in [Hello, Welcome, Queue, Attached, Refused, Doors, Finish, Leave, Ask, Answer] {
        let row = format!("| {} | {} |", kind as u32, format!("{kind:?}").to_uppercase());
        assert!(page.contains(&row), "no row {row}");
        let bytes = Control::new(kind, ControlFacts::default().with("a", 1)).encode();
        assert_eq!(bytes, [&(kind as u32).to_le_bytes()[..], b"a=1\n"].concat());
    }
    use CommandKind::{Chunk, Discard, End, Flush, Read, Write, WriteZeroes};
    for (kind, name) in [
        (Read, "READ"),
        (Write, "WRITE"),
        (Flush, "FLUSH"),
        (Discard, "DISCARD"),
        (WriteZeroes, "WRITE_ZEROES"),
        (Chunk, "CHUNK"),
        (End, "END"),
    ] {
        assert!(page.contains(&format!("| {} | {name} |", kind as u32)), "no row of {name}");
    }
    assert!(page.contains(&format!("commands, {COMMAND_BYTES} bytes each")));
    assert!(page.contains(&format!("answers, {ANSWER_BYTES} bytes each")));
}

#[test]
fn every_option_is_on_the_page_with_its_default() {
    let page = page("driver.md");
    let mut page_defaults = BTreeMap::new();
    for row in page.lines().filter(|line| line.starts_with("| `")) {
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        let names: Vec<&str> = cells[1].split(", ").map(|name| name.trim_matches('`')).collect();
        let defaults: Vec<&str> =
            cells[2].split(", ").map(|value| value.trim_matches('`')).collect();
        for (at, name) in names.into_iter().enumerate() {
            page_defaults
                .insert(name.to_owned(), (*defaults.get(at).unwrap_or(&defaults[0])).to_owned());
        }
    }
    let batch = ControlFacts::default().with("mode", "batch");
    let modes = [
        DeviceOptions::default(),
        DeviceOptions::declared(&batch, &ControlFacts::default()).expect("sound"),
    ];
    for facts in modes.iter().map(DeviceOptions::facts) {
        for (name, value) in facts.iter() {
            // Options that depend on others, and those that this test set.
            if ["metadata_bytes", "mode"].contains(&name)
                || (name == "request_bytes_max" && facts.get("mode") == Some("batch"))
            {
                continue;
            }
            assert_eq!(page_defaults.get(name).map(String::as_str), Some(value), "{name}");
        }
    }
}

#[test]
fn an_entry_has_its_documented_bytes() {
    let entry = ChunkEntry { address: 0x1_0200, length: 1024, write_number: 0x0304 };
    let mut bytes = [0; ENTRY_BYTES];
    (bytes[0], bytes[8], bytes[16], bytes[17], bytes[24]) = (0x81, 2, 4, 3, 1);
    assert_eq!(entry.encode(), bytes);
    assert_eq!(ChunkEntry::decode(&bytes), Some(entry));
    let page = page("write_chunk.md");
    for row in [
        "| 0 | 8 | sector |",
        "| 8 | 8 | sectors |",
        "| 16 | 8 | write_number |",
        "| 24 | 8 | flag |",
    ] {
        assert!(page.contains(row), "no row {row}");
    }
}
