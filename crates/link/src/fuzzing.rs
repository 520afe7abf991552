//! Entry points for fuzzers of parsers that they cannot reach otherwise: a file of machines, a key
//! file, and the packet in a datagram or Ethernet frame. Not for users.
//!
//! Not here: where the bytes come from (`crates/fuzz`); parsers that packets reach, which are
//! fuzzed through a target and an initiator.

use std::path::Path;

use sawmill_sys::net::split_frame;

use crate::carrier::{self, PACKET_BYTES_MIN};
use crate::session::{KeyError, PreSharedKey};
use crate::target::{Machine, machines};

/// Parses the content of a file of machines; panics if two of them have a name or a key in common.
///
/// # Errors
/// What is wrong, with the line.
pub fn machines(bytes: &[u8]) -> Result<Vec<Machine>, KeyError> {
    let list = machines::parse(Path::new("machines"), bytes)?;
    assert!(!list.is_empty(), "a file without machines is refused");
    for (index, machine) in list.iter().enumerate() {
        let others = &list[..index];
        assert!(others.iter().all(|other| other.name != machine.name), "one line for a machine");
        assert!(others.iter().all(|other| !other.key.is_same(&machine.key)), "one key for each");
    }
    Ok(list)
}

/// The packet in a datagram or in the payload of an Ethernet frame, as a carrier passes it on;
/// panics if it is not the beginning of these bytes, with the length that it declares.
pub fn packet_in(bytes: &mut [u8]) -> Option<&mut [u8]> {
    let (start, available) = (bytes.as_ptr(), bytes.len());
    let packet = carrier::whole_packet(bytes)?;
    assert!(packet.as_ptr() == start && packet.len() <= available, "it lies in these bytes");
    assert!(packet.len() >= PACKET_BYTES_MIN, "a shorter one is refused");
    let declared =
        packet[4..8].iter().rev().fold(0, |number, byte| number << 8 | usize::from(*byte));
    assert_eq!(packet.len(), declared, "padding is removed, and nothing else");
    Some(packet)
}

/// The sender and the packet of an Ethernet frame, as a carrier passes them on.
pub fn packet_in_frame(frame: &mut [u8]) -> Option<([u8; 6], &mut [u8])> {
    let (from, payload) = split_frame(frame)?;
    Some((from, packet_in(payload)?))
}

/// Reads the key file at `path` and writes its key to the new file `again`; panics if that is not
/// read back as the same key.
///
/// # Errors
/// Why the file has no key.
pub fn key_file(path: &Path, again: &Path) -> Result<(), KeyError> {
    let key = PreSharedKey::read(path)?;
    key.write(again)?;
    assert!(PreSharedKey::read(again)?.is_same(&key), "what is written is read back");
    Ok(())
}
