//! A peer's bytes on a link's TCP stream.
//!
//! Invariants: the receiver passes on the packets of the stream in order, each whole, up to the
//! first invalid length, and then reports how the stream ended; whatever the pieces in which the
//! bytes arrive.
//!
//! Not here: what packets mean (`link`, `link_peer`); datagrams and frames, of which each has one
//! packet (`link`).

use std::io::{ErrorKind, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpStream};
use std::time::Duration;

use rustix::net::sockopt::set_socket_linger;
use sawmill_link::carrier::{
    PACKET_BYTES_MAX, PACKET_BYTES_MIN, Receiver, StreamListener, StreamReceiver,
};

/// A wait that ends this late is a hang.
const HANG: Duration = Duration::from_secs(60);

thread_local! {
    static LISTENER: StreamListener =
        StreamListener::open(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)), None).expect("a port");
}

/// The first byte chooses the size of the pieces; the rest is the stream.
pub(crate) fn run(bytes: &[u8]) {
    let Some((choice, stream)) = bytes.split_first() else { return };
    let piece_bytes = 1 << (choice % 16);
    // A piece is a system call at each end.
    let stream = &stream[..stream.len().min(256 * piece_bytes)];
    receive(stream, piece_bytes);
    receive(&mended(stream), piece_bytes);
}

/// A length in each header that leaves room for others.
fn mended(stream: &[u8]) -> Vec<u8> {
    let mut stream = stream.to_vec();
    let mut at = 0;
    while let Some(field) = stream.get_mut(at + 4..at + 8) {
        let length = PACKET_BYTES_MIN + usize::from(field[0]);
        field.copy_from_slice(&(length as u32).to_le_bytes());
        at += length;
    }
    stream
}

/// The packets of a stream, and how it ends.
fn expected(mut stream: &[u8]) -> (Vec<&[u8]>, ErrorKind) {
    let mut packets = Vec::new();
    while let Some(field) = stream.get(4..8) {
        let length = field.iter().rev().fold(0, |number, byte| number << 8 | usize::from(*byte));
        if !(PACKET_BYTES_MIN..=PACKET_BYTES_MAX).contains(&length) {
            return (packets, ErrorKind::InvalidData);
        }
        let Some((packet, rest)) = stream.split_at_checked(length) else { break };
        packets.push(packet);
        stream = rest;
    }
    (packets, ErrorKind::UnexpectedEof)
}

fn receive(stream: &[u8], piece_bytes: usize) {
    let (mut peer, mut receiver) = LISTENER.with(|listener| {
        let address = listener.local().expect("it has a port");
        let peer = TcpStream::connect(address).expect("it listens");
        let accepted = listener.accept(Some(HANG)).expect("it listens").expect("a peer came");
        (peer, accepted.1)
    });
    peer.set_nodelay(true).expect("a socket");
    let mut received = Received { packets: Vec::new(), end: None };
    for piece in stream.chunks(piece_bytes) {
        // The receiver may have ended the stream.
        if received.end.is_some() || peer.write_all(piece).is_err() {
            break;
        }
        received.take(&mut receiver);
    }
    let _ = peer.shutdown(Shutdown::Write);
    while received.end.is_none() {
        received.take(&mut receiver);
    }
    let (packets, end) = expected(stream);
    assert!(received.packets == packets, "the packets of the stream, in order");
    assert_eq!(received.end, Some(end));
    // With a reset, the port is free again at once. A run takes more of them than there are.
    let _ = set_socket_linger(&peer, Some(Duration::ZERO));
    drop(peer);
}

/// What a receiver has passed on, and the error that ended it.
struct Received {
    packets: Vec<Vec<u8>>,
    end: Option<ErrorKind>,
}

impl Received {
    fn take(&mut self, receiver: &mut StreamReceiver) {
        let packets = &mut self.packets;
        let outcome = receiver.receive(Some(HANG), false, &mut |_, packet| {
            packets.push(packet.to_vec());
        });
        match outcome {
            Ok(reasons) => assert!(reasons.malformed <= 1, "a stream ends at the first"),
            Err(error) => self.end = Some(error.kind()),
        }
    }
}
