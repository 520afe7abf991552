//! The properties that every parsed descriptor, and every file about a device, must have; for
//! [`crate::fuzzing`].
//!
//! Not here: where the bytes come from, and what a request does.

use sawmill_device::Geometry;
use sawmill_device::Operation::{Read, Write};
use sawmill_sys::ublk::IoDescriptor;

use super::protocol::BlockRequest;
use crate::device_facts::DeviceFacts;

const BYTES_MAX: u32 = 1 << 20;

/// Parses a descriptor as a request of a device; panics if the result exceeds that, or the buffer.
pub(crate) fn request(descriptor: &IoDescriptor, geometry: &Geometry) {
    if let Ok(block_request) = BlockRequest::from_descriptor(descriptor, geometry, BYTES_MAX) {
        let end = block_request.address.checked_add(block_request.length).expect("no overflow");
        assert!(end <= geometry.size_bytes, "within the device");
        let moves = matches!(block_request.operation, Read | Write);
        assert!(!moves || block_request.length <= BYTES_MAX.into(), "within the buffer");
    }
}

/// Parses a text as the file about a device in the run folder, and uses it as names in such a file;
/// panics if a name is changed, or could add a variable where udev imports the file.
pub(crate) fn facts(text: &str) {
    let read = DeviceFacts::parse(text);
    let named = DeviceFacts {
        volume: text.to_owned(),
        symlink: Some(text.to_owned()),
        is_recovering: text.len() > 9,
        instance: Some(text.len() as u64),
    };
    for facts in read.into_iter().chain([named]) {
        let text = facts.text();
        assert_eq!(DeviceFacts::parse(&text), Some(facts), "what is written is read as the same");
        let is_plain = |line: &str| {
            let value = line.split_once("=\"").and_then(|(_, rest)| rest.strip_suffix('"'));
            value.is_some_and(|value| {
                value
                    .bytes()
                    .all(|byte| (b' '..=b'~').contains(&byte) && !b"\"\\$`".contains(&byte))
            })
        };
        assert!(text.lines().count() <= 4 && text.lines().all(is_plain), "{text}");
    }
}
