//! Which keys are legal: `[A-Za-z0-9._/-]`, at most 768 bytes, and 255 in each part.
//!
//! Invariant: no legal key leads out of the store's root, or to what the stores reserve for
//! themselves (the directory store's `.tmp`): no part is empty or starts with a dot.
//!
//! Not here: that no key may be the beginning of another (`contract`). Only two keys can break that
//! rule.

use crate::{Result, StoreError, StoreErrorKind};

/// Longest key in bytes: S3 ends at 1024 with the root's prefix in front.
const KEY_BYTES_MAX: usize = 768;
/// Longest part of a key in bytes: what a file name can hold.
const PART_BYTES_MAX: usize = 255;

/// Checks a key; every store does before a call.
///
/// `Invalid`: it is outside the alphabet, or could leave the store.
pub fn check_key(key: &str) -> Result<()> {
    match why_not(key) {
        None => Ok(()),
        Some(why) => Err(StoreError::new(StoreErrorKind::Invalid, format!("key {key:?} {why}"))),
    }
}

/// Checks a list prefix and returns it without its trailing `/`; empty means the whole store.
///
/// `Invalid`: it is neither empty nor, without that slash, a key.
pub fn check_prefix(prefix: &str) -> Result<&str> {
    let bare = prefix.strip_suffix('/').unwrap_or(prefix);
    match if prefix.is_empty() { None } else { why_not(bare) } {
        None => Ok(bare),
        Some(why) => {
            Err(StoreError::new(StoreErrorKind::Invalid, format!("list prefix {prefix:?} {why}")))
        }
    }
}

/// Whether a name found in a store can be one of our keys; others are not ours and are skipped.
pub(crate) fn is_key(name: &str) -> bool {
    why_not(name).is_none()
}

/// Why `key` is not legal; completes the sentence "key K ...".
pub(crate) fn why_not(key: &str) -> Option<String> {
    if key.len() > KEY_BYTES_MAX {
        return Some(format!("is {} bytes long: at most {KEY_BYTES_MAX} are allowed", key.len()));
    }
    for part in key.split('/') {
        if part.is_empty() {
            return Some("has an empty part: write names separated by single slashes".to_owned());
        }
        if part.len() > PART_BYTES_MAX {
            return Some(format!(
                "has a part of {} bytes: at most {PART_BYTES_MAX} are allowed",
                part.len()
            ));
        }
        // This refuses `..`, which leads out of a folder, and `.tmp`, which the directory store
        // uses.
        if part.starts_with('.') {
            return Some(format!("has the part {part:?}: parts must not start with a dot"));
        }
        if let Some(odd) = part.chars().find(|c| !(c.is_ascii_alphanumeric() || "._-".contains(*c)))
        {
            return Some(format!(
                "contains {odd:?}: only letters, digits, '.', '_', '-' and '/' are allowed"
            ));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_of_the_engine_are_legal() {
        for key in
            ["volumes/disk1", "0a1b/seg/07/00000000000000000007", "v/map/1-ff/0000", "a.b_c-D"]
        {
            assert!(check_key(key).is_ok(), "{key}");
        }
    }

    #[test]
    fn keys_that_could_leave_the_root_or_confuse_a_store_are_refused() {
        let long_part = "x".repeat(256);
        let long_key = "x/".repeat(400) + "x";
        let bad = [
            "", "/a", "a/", "a//b", "..", "a/../b", ".tmp/x", "a/.b", "a b", "a?b", "ä", "a\\b",
            "a%2e",
        ];
        for key in bad.into_iter().chain([long_part.as_str(), long_key.as_str()]) {
            assert_eq!(check_key(key).unwrap_err().kind(), StoreErrorKind::Invalid, "{key}");
        }
    }

    #[test]
    fn a_prefix_may_be_empty_or_end_with_a_slash() {
        assert_eq!(check_prefix("").unwrap(), "");
        assert_eq!(check_prefix("a/b/").unwrap(), "a/b");
        assert_eq!(check_prefix("a/b").unwrap(), "a/b");
        for prefix in ["/", "a//", "/a", "../"] {
            assert!(check_prefix(prefix).is_err(), "{prefix}");
        }
    }
}
