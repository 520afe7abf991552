//! Packets between a host and a driver, the options in them, and chunks of writes, also those of
//! the kernel (BUSE).
//!
//! Invariants: a decoded packet is the same after it is encoded again, and a packet of several
//! commands is decoded as a whole or refused. Accepted options are read again as the same. The data
//! of a chunk's entries lie one after the other behind the entries.
//!
//! Not here: what a host does with a packet (`driver_host`).

use std::collections::BTreeSet;

use sawmill_driver::DeviceOptions;
use sawmill_driver::batch::chunk::{ChunkEntry, ENTRY_BYTES, FLAG_WRITE, SECTOR_BYTES, entries};
use sawmill_driver::protocol::{Answer, Command, Control, ControlFacts};
use sawmill_frontend::fuzzing::buse_chunk;

/// The same bytes as each kind of packet.
pub(crate) fn packet(bytes: &[u8]) {
    if let Ok(control) = Control::decode(bytes) {
        let again = Control::decode(&control.encode()).expect("what was encoded can be decoded");
        assert_eq!(again, control, "what was encoded is decoded as the same");
        options(&control.facts);
    }
    if let Ok(commands) = Command::decode_all(bytes) {
        assert_eq!(
            commands.len(),
            bytes.len() / commands[0].encode().len(),
            "each command is understood"
        );
        let encoded: Vec<u8> = commands.iter().flat_map(Command::encode).collect();
        assert_eq!(Command::decode_all(&encoded).expect("it is understood"), commands);
    }
    if let Ok(answers) = Answer::decode_all(bytes) {
        let encoded: Vec<u8> = answers.iter().flat_map(Answer::encode).collect();
        assert_eq!(Answer::decode_all(&encoded).expect("it is understood"), answers);
    }
}

fn options(facts: &ControlFacts) {
    let none = ControlFacts::default();
    let Ok(declared) = DeviceOptions::declared(facts, &none) else { return };
    assert!(declared.geometry().size_bytes > 0, "a device has a size");
    // Of a name that comes twice, the last value counts, and the first disagrees with it.
    let names: BTreeSet<_> = facts.iter().map(|(name, _)| name).collect();
    if names.len() < facts.iter().count() {
        return;
    }
    declared.agrees(facts, &none).expect("a driver may repeat its options");
}

/// A chunk: the first byte is the number of entries, and as many entries as fit are metadata.
pub(crate) fn chunk(bytes: &[u8]) {
    let Some((count, chunk)) = bytes.split_first() else { return };
    let count = usize::from(*count);
    // The kernel's chunks have records of the same size.
    buse_chunk(chunk, count as u64, 1 << 20);
    buse_chunk(chunk, count as u64 % 4, 700);
    let metadata_bytes = (count * ENTRY_BYTES).min(chunk.len());
    check_chunk(chunk, metadata_bytes, count);
    // Flags and lengths such that several entries have data.
    let mut mended = chunk.to_vec();
    for entry in mended[..metadata_bytes].as_chunks_mut::<ENTRY_BYTES>().0 {
        let sectors = u64::from(entry[8] % 3);
        entry[8..16].copy_from_slice(&sectors.to_le_bytes());
        entry[24..].copy_from_slice(&FLAG_WRITE.to_le_bytes());
    }
    check_chunk(&mended, metadata_bytes, count);
}

fn check_chunk(chunk: &[u8], metadata_bytes: usize, count: usize) {
    let mut data_at = metadata_bytes;
    let mut has_ended = false;
    for (index, found) in entries(chunk, metadata_bytes, count).enumerate() {
        assert!(!has_ended, "an invalid entry is the last");
        let Some((entry, data)) = found else {
            has_ended = true;
            continue;
        };
        let at = index * ENTRY_BYTES;
        assert!(at + ENTRY_BYTES <= metadata_bytes, "an entry is no data");
        assert_eq!(entry.encode(), chunk[at..at + ENTRY_BYTES], "one encoding for each entry");
        assert_eq!(ChunkEntry::decode(&entry.encode()), Some(entry));
        assert!(entry.address.is_multiple_of(SECTOR_BYTES));
        assert_eq!(data, &chunk[data_at..data_at + entry.length as usize]);
        data_at += data.len();
    }
}
