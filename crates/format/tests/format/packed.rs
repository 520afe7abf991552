//! Packed writes: the case behind their golden vector, what a decoder refuses, and what holds for
//! any ranges.

use proptest::collection::vec;
use proptest::prelude::*;
use sawmill_format::packed_write::{self, ENTRY_COUNT_MAX, PackedWrite, SPAN_BYTES_MAX};
use sawmill_format::{FormatError, Result};

use crate::properties::decode_all;
use crate::rules::field_of;
use crate::samples::Case;

/// Three ranges, the second of which is given as two that touch.
pub(crate) const PACKED: [(u32, &[u8]); 4] =
    [(0, b"abc"), (100, b"de"), (102, b"f"), (4096, &[7; 16])];

pub(crate) fn encode_packed(ranges: &[(u32, &[u8])]) -> Result<Vec<u8>> {
    let ranges = ranges.iter().copied();
    let mut bytes = vec![0; packed_write::encoded_bytes(ranges.clone()) as usize];
    let length = packed_write::encode(ranges, &mut bytes)?;
    assert_eq!(length, bytes.len());
    Ok(bytes)
}

pub(crate) fn packed_case() -> Case {
    let merged: [(u32, &[u8]); 3] = [(0, b"abc"), (100, b"def"), (4096, &[7; 16])];
    Case {
        name: "packed_write/v1-three-ranges",
        bytes: encode_packed(&PACKED).unwrap(),
        value: format!("{merged:?}"),
        table: packed_write::at::TABLE,
        decode: Box::new(move |bytes| Ok(PackedWrite::decode(bytes)?.entries().eq(merged))),
    }
}

#[test]
fn packed_writes_that_break_a_rule_name_the_field() {
    let change = |at: usize, value: u32| {
        let mut bytes = encode_packed(&PACKED).unwrap();
        bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
        PackedWrite::decode(&bytes).unwrap_err()
    };
    assert!(matches!(change(0, 7), FormatError::Magic { .. }));
    assert!(matches!(change(4, 2), FormatError::Version { found: 2, .. }));
    assert!(matches!(change(4, 1 | 1 << 16), FormatError::Reserved { .. }));
    assert_eq!(field_of(change(8, 0)), "entry_count");
    assert_eq!(field_of(change(8, ENTRY_COUNT_MAX + 1)), "entry_count");
    assert!(matches!(change(8, ENTRY_COUNT_MAX), FormatError::Truncated { .. }));
    assert_eq!(field_of(change(12, 23)), "data_bytes");
    assert_eq!(field_of(change(24, 3)), "offset", "it touches the first");
    assert_eq!(field_of(change(24, 2)), "offset", "it overlaps the first");
    assert_eq!(field_of(change(24, 5000)), "offset", "it is behind the third");
    assert_eq!(field_of(change(28, 0)), "length", "it is empty");
    assert_eq!(field_of(change(28, 4)), "length", "more than the data");
    assert_eq!(field_of(change(32, SPAN_BYTES_MAX - 15)), "length", "the span");
    assert_eq!(field_of(change(32, u32::MAX)), "length", "the span");

    let refusal = |ranges: &[(u32, &[u8])]| {
        packed_write::encode(ranges.iter().copied(), &mut [0; 100]).unwrap_err()
    };
    assert_eq!(field_of(refusal(&[])), "entry_count");
    assert_eq!(field_of(refusal(&[(0, b"")])), "length");
    assert_eq!(field_of(refusal(&[(9, b"a"), (0, b"b")])), "offset");
    assert_eq!(field_of(refusal(&[(SPAN_BYTES_MAX, b"a")])), "length");
}

prop_compose! {
    /// Gaps (zero: the ranges touch) and the bytes after them.
    fn ranges()(runs in vec((0u32..5000, vec(any::<u8>(), 1..300)), 1..40)) -> Vec<(u32, Vec<u8>)> {
        let mut free_from = 0;
        runs.into_iter().map(|(gap, bytes)| {
            let offset = free_from + gap.saturating_sub(1000);
            free_from = offset + bytes.len() as u32;
            (offset, bytes)
        }).collect()
    }
}

proptest! {
    #[test]
    fn packed_writes_round_trip_with_ranges_that_touch_as_one(runs in ranges()) {
        let slices: Vec<(u32, &[u8])> =
            runs.iter().map(|(offset, bytes)| (*offset, &bytes[..])).collect();
        let bytes = encode_packed(&slices).unwrap();
        let packed = PackedWrite::decode(&bytes).unwrap();
        let mut merged: Vec<(u32, Vec<u8>)> = Vec::new();
        for (offset, bytes) in &runs {
            match merged.last_mut() {
                Some((start, so_far)) if *start + so_far.len() as u32 == *offset => {
                    so_far.extend(bytes)
                }
                _ => merged.push((*offset, bytes.clone())),
            }
        }
        prop_assert!(
            packed.entries().eq(merged.iter().map(|(offset, bytes)| (*offset, &bytes[..])))
        );
        let (last, tail) = merged.last().unwrap();
        prop_assert_eq!(packed.span_bytes(), last + tail.len() as u32);
        let mut short = vec![0; bytes.len() - 1];
        prop_assert!(packed_write::encode(slices.iter().copied(), &mut short).is_err());
    }

    #[test]
    fn any_entries_decode_or_are_refused(
        entries in vec((0u32..40, 0u32..12), 0..6), wild: Option<u32>,
        data in vec(any::<u8>(), 0..40),
    ) {
        let mut bytes = Vec::new();
        bytes.extend(packed_write::MAGIC.to_le_bytes());
        bytes.extend([1, 0, 0, 0]);
        bytes.extend((entries.len() as u32).to_le_bytes());
        bytes.extend((data.len() as u32).to_le_bytes());
        for (offset, length) in &entries {
            let offset = wild.filter(|_| *length == 7).unwrap_or(*offset);
            bytes.extend([offset.to_le_bytes(), length.to_le_bytes()].concat());
        }
        bytes.extend(&data);
        decode_all(&bytes);
        if let Ok(packed) = PackedWrite::decode(&bytes) {
            let mut free_from = 0;
            for (offset, bytes) in packed.entries() {
                prop_assert!(offset >= free_from && !bytes.is_empty());
                free_from = offset + bytes.len() as u32;
            }
            prop_assert!(free_from <= packed_write::SPAN_BYTES_MAX);
        }
    }
}
