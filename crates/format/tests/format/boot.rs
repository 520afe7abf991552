//! Boot sets: the golden vector, what is refused, and keys.

use sawmill_format::boot_set::{
    self, BootSet, RANGES_MAX, boot_set_key, boot_set_prefix, parse_boot_set_key,
};
use sawmill_format::{FormatError, crc};

use crate::samples::{Case, PUT, VOLUME, WALL_UNIX_MS};

pub(crate) fn boot_value() -> BootSet {
    BootSet {
        volume_id: VOLUME,
        put_id: PUT,
        number: 2,
        wall_unix_ms: WALL_UNIX_MS,
        ranges: vec![(0, 4096), (1 << 30, 128 << 10), (8192, 4096)],
    }
}

pub(crate) fn boot_case() -> Case {
    let value = boot_value();
    Case {
        name: "boot_set/v1-three-ranges",
        bytes: value.encode().unwrap(),
        value: format!("{value:#?}"),
        table: boot_set::at::TABLE,
        decode: Box::new(move |bytes| Ok(BootSet::decode(bytes, VOLUME, 2)? == value)),
    }
}

/// The field for which a changed set is refused, by the encoder.
fn refused(change: impl FnOnce(&mut BootSet)) -> &'static str {
    let mut set = boot_value();
    change(&mut set);
    match set.encode().unwrap_err() {
        FormatError::Field { field, .. } => field,
        other => panic!("{other}"),
    }
}

#[test]
fn a_range_that_is_empty_or_has_no_end_and_too_many_ranges_are_refused() {
    assert_eq!(refused(|set| set.ranges[1].1 = 0), "length");
    assert_eq!(refused(|set| set.ranges[1] = (u64::MAX, 1)), "length");
    assert_eq!(refused(|set| set.ranges = vec![(0, 1); RANGES_MAX + 1]), "range_count");
    assert_eq!(refused(|set| set.number = 0), "number");
    let most = BootSet { ranges: vec![(0, 1); RANGES_MAX], ..boot_value() };
    assert_eq!(most.encode().unwrap().len(), boot_set::BYTES_MAX);
}

#[test]
fn a_count_that_does_not_agree_with_the_length_is_refused() {
    let mut bytes = boot_value().encode().unwrap();
    bytes[boot_set::at::RANGE_COUNT.offset] = 4;
    let end = bytes.len() - 4;
    let sum = crc::crc32c(&bytes[..end]);
    bytes[end..].copy_from_slice(&sum.to_le_bytes());
    let found = BootSet::decode(&bytes, VOLUME, 2);
    assert!(matches!(found, Err(FormatError::Field { field: "range_count", .. })), "{found:?}");
}

#[test]
fn the_key_of_a_boot_set_says_whose_it_is_and_which() {
    let key = boot_set_key(VOLUME, 2);
    assert_eq!(parse_boot_set_key(&key), Some((VOLUME, 2)));
    assert!(key.starts_with(&boot_set_prefix(VOLUME)));
    for other in [format!("{key}0"), format!("{VOLUME}/boots/{:020}", 2), key.replace("5a", "xx")] {
        assert_eq!(parse_boot_set_key(&other), None, "{other}");
    }
}
