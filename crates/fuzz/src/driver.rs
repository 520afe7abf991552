//! Packets between a host and a driver, the options in them, and chunks of writes.
//!
//! Invariants: a decoded packet is the same after it is encoded again, and a packet of several
//! commands is decoded as a whole or refused. Accepted options are read again as the same. The data
//! of a chunk's records lie one after the other behind the records.
//!
//! Not here: what a host does with a packet (`driver_host`).

use std::collections::BTreeSet;

use sawmill_driver::DeviceOptions;
use sawmill_driver::batch::chunk::{FLAG_WRITE, RECORD_BYTES, Record, SECTOR_BYTES, records};
use sawmill_driver::protocol::{Answer, Command, Control, Facts};

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

fn options(facts: &Facts) {
    let none = Facts::default();
    let Ok(declared) = DeviceOptions::declared(facts, &none) else { return };
    assert!(declared.geometry().size_bytes > 0, "a device has a size");
    // Of a name that comes twice, the last value counts, and the first disagrees with it.
    let names: BTreeSet<_> = facts.iter().map(|(name, _)| name).collect();
    if names.len() < facts.iter().count() {
        return;
    }
    declared.agrees(facts, &none).expect("a driver may repeat its options");
}

/// A chunk: the first byte is the number of records, and as many records as fit are metadata.
pub(crate) fn chunk(bytes: &[u8]) {
    let Some((count, chunk)) = bytes.split_first() else { return };
    let count = usize::from(*count);
    let metadata_bytes = (count * RECORD_BYTES).min(chunk.len());
    check_chunk(chunk, metadata_bytes, count);
    // Flags and lengths such that several records have data.
    let mut mended = chunk.to_vec();
    for record in mended[..metadata_bytes].as_chunks_mut::<RECORD_BYTES>().0 {
        let sectors = u64::from(record[8] % 3);
        record[8..16].copy_from_slice(&sectors.to_le_bytes());
        record[24..].copy_from_slice(&FLAG_WRITE.to_le_bytes());
    }
    check_chunk(&mended, metadata_bytes, count);
}

fn check_chunk(chunk: &[u8], metadata_bytes: usize, count: usize) {
    let mut data_at = metadata_bytes;
    let mut has_ended = false;
    for (index, found) in records(chunk, metadata_bytes, count).enumerate() {
        assert!(!has_ended, "an invalid record is the last");
        let Some((record, data)) = found else {
            has_ended = true;
            continue;
        };
        let at = index * RECORD_BYTES;
        assert!(at + RECORD_BYTES <= metadata_bytes, "a record is no data");
        assert_eq!(record.encode(), chunk[at..at + RECORD_BYTES], "one encoding for each record");
        assert_eq!(Record::decode(&record.encode()), Some(record));
        assert!(record.address.is_multiple_of(SECTOR_BYTES));
        assert_eq!(data, &chunk[data_at..data_at + record.length as usize]);
        data_at += data.len();
    }
}
