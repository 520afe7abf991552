//! The properties that every parsed FUSE request must have; for [`crate::fuzzing`].
//!
//! Not here: where the bytes come from, and what a request does.

use super::protocol::{Malformed, Operation, parse};

/// Parses bytes as a request; panics if the result lies outside of them.
pub(crate) fn request(bytes: &[u8]) {
    let number = bytes.get(8..16).and_then(|number| number.try_into().ok()).map(u64::from_ne_bytes);
    match parse(bytes) {
        Ok(message) => {
            assert_eq!(Some(message.unique), number, "it is answered by its number");
            let within = |part: &[u8]| {
                part.is_empty()
                    || bytes.as_ptr_range().contains(&part.as_ptr()) && part.len() <= bytes.len()
            };
            match message.operation {
                Operation::Write { payload, .. } => assert!(within(payload)),
                Operation::Lookup { name } => assert!(within(name) && !name.contains(&0)),
                _ => {}
            }
        }
        Err(Malformed::Arguments { unique, .. }) => assert_eq!(Some(unique), number),
        Err(Malformed::Head) => assert!(bytes.len() < 40, "the head is there"),
    }
}
