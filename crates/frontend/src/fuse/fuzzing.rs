//! The properties that every parsed FUSE request, and every mount of another process, must have;
//! for [`crate::fuzzing`].
//!
//! Not here: where the bytes come from, and what a request does.

use std::path::Path;

use super::hand_over::MountHandOver;
use super::mount::settled;
use super::options::FuseOptions;
use super::protocol::{Malformed, Operation, parse};
use crate::DoorPiece;

/// Reads a piece as the mount of another process at this mountpoint; panics if it is another mount.
pub(crate) fn hand_over(mountpoint: &Path, file_name: &str, piece: DoorPiece) {
    let is_same = piece.facts.get("file_name").is_some_and(|name| name == file_name);
    let options = FuseOptions::new(mountpoint, file_name);
    if let Ok(taken) = MountHandOver::read(&options, piece) {
        assert_eq!(
            settled(mountpoint).ok().as_ref(),
            Some(&taken.mount.path),
            "the mount asked for"
        );
        assert!(is_same, "the file asked for");
    }
}

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
