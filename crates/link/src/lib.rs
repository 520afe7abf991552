//! The link: a block device of another machine, over several network links and cores,
//! byte-granular.
//!
//! Modules: [`carrier`] (how packets travel: UDP, TCP, raw Ethernet), [`session`] (keys, the
//! handshake, sealed packets), `halves` (one link: what is in flight, what was received),
//! `connection` (puts packets on the least loaded link), `unsent_pieces` (what a place has to
//! send), [`initiator`] (a block device), [`target`] (exports devices), [`threads`] (the receiving
//! threads), [`cache`] (the initiator's byte-granular cache, BASS), `packed_device` (many ranges as
//! one request).
//!
//! Invariants: what [`legible`] returns has no control or invisible characters, and different texts
//! stay different. The status of a link is read with one of its locks at a time.
//!
//! Not here: what the bytes of a packet mean (`sawmill_format::link`), doors, volumes, commands.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::unwrap_used))]

pub mod cache;
pub mod carrier;
pub mod clock;
mod connection;
#[doc(hidden)]
pub mod fuzzing;
mod grains;
mod halves;
pub mod initiator;
mod packed_device;
mod ready;
pub mod session;
mod source;
mod status;
mod streams;
pub mod target;
pub mod threads;
mod unsent_pieces;
mod violation;

use std::borrow::Cow;

pub use halves::receiving::ReceivingCounts;
pub use halves::sending::SendingCounts;
pub use packed_device::{PackedDevice, UNPACK_BYTES_MAX, UNPACK_SPAN_BYTES_MAX, Unpacker};
pub use status::{kind_of, status_of};

/// Makes an untrusted text safe to print: each character that moves the cursor, changes a color or
/// the direction of writing, or is invisible, becomes its number. The result is unambiguous.
#[must_use]
pub fn legible(text: &str) -> Cow<'_, str> {
    let is_plain =
        |character: char| matches!(character, '"' | '\'') || character.escape_debug().len() == 1;
    if text.chars().all(is_plain) {
        return Cow::Borrowed(text);
    }
    let mut output = String::with_capacity(text.len() + 16);
    for character in text.chars() {
        match is_plain(character) {
            true => output.push(character),
            false => output.extend(character.escape_debug()),
        }
    }
    Cow::Owned(output)
}

/// The status of one link.
#[derive(Clone, Debug, Default)]
pub struct LinkStatus {
    /// Whether it is joined and carries requests.
    pub open: bool,
    /// Whether nothing was received for several timeouts.
    pub silent: bool,
    /// How long it has been in this state.
    pub state_ms: u64,
    /// The address of its packets.
    pub peer: Option<carrier::Peer>,
    /// The longest packet, in bytes.
    pub packet_bytes: usize,
    /// Smoothed round trip time; 0: not measured yet.
    pub rtt_us: u64,
    /// Bytes that may be in flight.
    pub window_bytes: usize,
    /// What was sent and lost.
    pub sent: SendingCounts,
    /// What was received.
    pub received: ReceivingCounts,
    /// Packets that failed authentication or their checksum.
    pub refused: u64,
    /// Packets received twice.
    pub doubled: u64,
}

/// The status of a connection.
#[derive(Clone, Debug, Default)]
pub struct ConnectionStatus {
    /// Whether there is a connection.
    pub connected: bool,
    /// The id of the initiator's run: the same at both ends.
    pub instance: [u8; 16],
    /// The peer's own name.
    pub peer: String,
    /// Time since the last packet of the peer.
    pub heard_ms: u64,
    /// Places that the target granted.
    pub places: usize,
    /// Places without a command.
    pub places_free: usize,
    /// Requests in flight, including waiting ones.
    pub pending: usize,
    /// Requests that wait for a place.
    pub waiting: usize,
    /// Each link.
    pub links: Vec<LinkStatus>,
}

fn links_of<E: connection::ConnectionEnd>(
    connection: &connection::Connection<E>,
    now: u64,
) -> Vec<LinkStatus> {
    use std::sync::atomic::Ordering::Relaxed;
    let one = |link: &connection::ConnectionLink| {
        let received = link.receive_half.lock().counts;
        let output = link.output.lock();
        LinkStatus {
            state_ms: now.saturating_sub(output.state_since_ns) / clock::MS,
            peer: output.route.as_ref().map(|route| route.peer),
            received,
            open: output.open,
            silent: output.send_half.is_silent(),
            packet_bytes: output.send_half.packet_bytes,
            rtt_us: if output.send_half.is_measured() {
                output.send_half.rtt_ns() / 1000
            } else {
                0
            },
            window_bytes: output.send_half.window_bytes(),
            sent: output.send_half.counts,
            refused: link.refused.load(Relaxed),
            doubled: link.doubled.load(Relaxed),
        }
    };
    connection.links.iter().map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_strangers_text_moves_no_cursor_and_reverses_nothing() {
        for plain in ["store", "it's a \"disk\"", "Müller 日本 🙂"] {
            assert!(matches!(legible(plain), Cow::Borrowed(text) if text == plain), "{plain}");
        }
        for (text, expected_text) in [
            ("\x1b[2J", "\\u{1b}[2J"),
            ("a\r\nb\tc\0", "a\\r\\nb\\tc\\0"),
            ("\u{9b}31m", "\\u{9b}31m"),
            ("\u{202e}cba\u{2066}\u{200b}", "\\u{202e}cba\\u{2066}\\u{200b}"),
            ("a\\u{1b}", "a\\\\u{1b}"),
        ] {
            assert_eq!(legible(text), expected_text);
        }
    }
}
