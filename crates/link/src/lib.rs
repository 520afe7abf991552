//! The link: a block device of another machine, over several network links and cores, byte-granular.
//!
//! Modules: [`carrier`] (how packets travel: UDP, TCP, raw Ethernet), [`session`] (keys, the hand-shake,
//! sealed packets), `path` (one link: what is in flight, what has come), `connection` (packets of whichever
//! link is least loaded), `going` (what a slot has to send), [`initiator`] (a block device), [`target`] (what
//! shows one), [`threads`] (who receives), [`cache`] (the initiator's byte-granular cache, BASS), `packed`
//! (many ranges as one request).
//!
//! Not here: what the bytes of a packet mean (`sawmill_format::link`), doors, volumes, commands.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::unwrap_used))]

mod breach;
pub mod cache;
pub mod carrier;
pub mod clock;
mod connection;
mod going;
mod grains;
pub mod initiator;
mod packed;
mod path;
mod ready;
pub mod session;
mod source;
mod status;
mod streams;
pub mod target;
pub mod threads;

use std::borrow::Cow;

pub use packed::{PackedDevice, UNPACK_BYTES_MAX, UNPACK_SPAN_BYTES_MAX, Unpack};
pub use path::receiving::ReceivingCounts;
pub use path::sending::SendingCounts;

/// A text of somebody else's, as it may be shown: whatever would move a cursor, change a colour or the
/// direction of writing, or is not seen, stands there as its number. Its own escapes are unmistakable.
#[must_use]
pub fn legible(text: &str) -> Cow<'_, str> {
    let is_plain = |c: char| matches!(c, '"' | '\'') || c.escape_debug().len() == 1;
    if text.chars().all(is_plain) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        match is_plain(c) {
            true => shown.push(c),
            false => shown.extend(c.escape_debug()),
        }
    }
    Cow::Owned(shown)
}

/// How one link does.
#[derive(Clone, Debug, Default)]
pub struct OneLink {
    /// It is joined and carries requests.
    pub open: bool,
    /// Nothing was heard for several time-outs.
    pub silent: bool,
    /// How long it has been so.
    pub state_ms: u64,
    /// Where its packets go.
    pub peer: Option<carrier::Peer>,
    /// The longest packet, in bytes.
    pub packet_bytes: usize,
    /// Smoothed round trip time; 0: not measured yet.
    pub rtt_us: u64,
    /// Bytes that may be in flight.
    pub window_bytes: usize,
    /// What was sent, and lost.
    pub sent: SendingCounts,
    /// What came.
    pub received: ReceivingCounts,
    /// Packets that did not open.
    pub refused: u64,
    /// Packets that came twice.
    pub doubled: u64,
}

/// How a connection does.
#[derive(Clone, Debug, Default)]
pub struct LinkStatus {
    /// There is a connection.
    pub connected: bool,
    /// The run of the initiator: the same at both ends.
    pub instance: [u8; 16],
    /// What the peer calls itself.
    pub peer: String,
    /// How long nothing was heard of the peer.
    pub heard_ms: u64,
    /// Credits granted.
    pub slots: usize,
    /// Credits that nothing uses.
    pub slots_free: usize,
    /// Requests under way, waiting ones included.
    pub pending: usize,
    /// Requests that wait for a credit.
    pub waiting: usize,
    /// Each link.
    pub links: Vec<OneLink>,
}

fn links_of<R: connection::Role>(connection: &connection::Connection<R>, now: u64) -> Vec<OneLink> {
    use std::sync::atomic::Ordering::Relaxed;
    let one = |link: &connection::Link| {
        let received = link.receiving.lock().counts;
        let outgoing = link.outgoing.lock();
        OneLink {
            state_ms: now.saturating_sub(outgoing.seen_since_ns) / clock::MS,
            peer: outgoing.path.as_ref().map(|path| path.peer),
            received,
            open: outgoing.open,
            silent: outgoing.sending.is_silent(),
            packet_bytes: outgoing.sending.packet_bytes,
            rtt_us: if outgoing.sending.is_measured() { outgoing.sending.rtt_ns() / 1000 } else { 0 },
            window_bytes: outgoing.sending.window_bytes(),
            sent: outgoing.sending.counts,
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
        for (text, shown) in [
            ("\x1b[2J", "\\u{1b}[2J"),
            ("a\r\nb\tc\0", "a\\r\\nb\\tc\\0"),
            ("\u{9b}31m", "\\u{9b}31m"),
            ("\u{202e}cba\u{2066}\u{200b}", "\\u{202e}cba\\u{2066}\\u{200b}"),
            ("a\\u{1b}", "a\\\\u{1b}"),
        ] {
            assert_eq!(legible(text), shown);
        }
    }
}
