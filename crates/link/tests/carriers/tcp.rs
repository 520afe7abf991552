//! TCP.

use std::io::{ErrorKind, Write};
use std::net::TcpStream;
use std::time::Duration;

use sawmill_link::carrier::{
    PACKET_BYTES_MAX, Peer, Receiver, Sender, StreamListener, StreamReceiver, StreamSender, connect,
};

use crate::packets::{
    ANSWER_TIME_MAX, all_sizes_arrive, burst_of, expect_in_order, number_of, packet,
    send_until_full, wait_for_room,
};

type StreamHalves = (StreamSender, StreamReceiver);

fn listener() -> StreamListener {
    StreamListener::open("127.0.0.1:0".parse().expect("an address"), None).expect("a listener")
}

fn accepted(listener: &StreamListener) -> StreamHalves {
    let (sender, receiver, _) =
        listener.accept(Some(ANSWER_TIME_MAX)).expect("lives").expect("a stream");
    (sender, receiver)
}

fn pair() -> (StreamHalves, StreamHalves) {
    let listener = listener();
    let connected =
        connect(listener.local().expect("bound"), None, ANSWER_TIME_MAX).expect("connected");
    (connected, accepted(&listener))
}

/// A stream of which the test writes every byte.
fn raw() -> (TcpStream, StreamHalves) {
    let listener = listener();
    let raw = TcpStream::connect(listener.local().expect("bound")).expect("connected");
    raw.set_nodelay(true).expect("set");
    (raw, accepted(&listener))
}

#[test]
fn packets_of_all_sizes_arrive() {
    let ((sender, mut own), (_far_sender, mut receiver)) = pair();
    assert_eq!(sender.packet_bytes_max(&Peer::Stream), PACKET_BYTES_MAX);
    all_sizes_arrive(&sender, &Peer::Stream, &mut receiver, &mut own);
}

#[test]
fn a_packet_that_arrives_in_pieces_is_put_together_and_a_torn_end_is_an_error() {
    let (mut raw, (_sender, mut receiver)) = raw();
    let mut bytes = packet(0, 24);
    bytes.extend(packet(1, 5000));
    bytes.extend(packet(2, PACKET_BYTES_MAX));
    bytes.extend(packet(3, 24));
    let mut received = 0;
    // Cut in the header, the length, the body; read after each piece.
    for piece in
        [0..3, 3..7, 7..24, 24..30, 30..4000, 4000..40_000, 40_000..bytes.len()].map(|r| &bytes[r])
    {
        raw.write_all(piece).expect("written");
        let mut next = received;
        let wait = if received == 0 { Duration::ZERO } else { Duration::from_millis(1) };
        receiver
            .receive(Some(wait), false, &mut |_, bytes| {
                assert_eq!(bytes, packet(next, bytes.len()));
                next += 1;
            })
            .expect("lives");
        received = next;
    }
    expect_in_order(&mut receiver, received, 4 - received as usize);
    raw.write_all(&packet(4, 100)[..50]).expect("written");
    drop(raw);
    let error = loop {
        match receiver.receive(Some(ANSWER_TIME_MAX), false, &mut |_, _| panic!("half a packet")) {
            Ok(_) => (),
            Err(error) => break error,
        }
    };
    assert_eq!(error.kind(), ErrorKind::UnexpectedEof);
    assert!(error.to_string().contains("middle"), "{error}");
}

#[test]
fn few_bytes_behind_a_steady_flow_arrive_and_so_does_its_end() {
    const FLOW: usize = 300;
    let ((sender, _own), (_far_sender, mut receiver)) = pair();
    let mut first = 0;
    // Each flow is long enough for waits for many bytes; then so few come that only time ends one.
    for round in 0..4 {
        std::thread::scope(|scope| {
            let numbers = first..first + FLOW as u32;
            let sender = &sender;
            scope.spawn(move || {
                for number in numbers {
                    let burst = burst_of(number, &[PACKET_BYTES_MAX]);
                    while sender.send(&Peer::Stream, &burst, 0).expect("sent") == 0 {
                        std::thread::yield_now();
                    }
                }
            });
            // A receive may end with a part of a packet.
            while first < FLOW as u32 * (round + 1) {
                let received = receiver.receive(Some(ANSWER_TIME_MAX), false, &mut |_, bytes| {
                    assert_eq!(number_of(bytes), first);
                    first += 1;
                });
                received.expect("lives");
            }
        });
        // The last flow ends with the stream.
        if round < 3 {
            assert_eq!(sender.send(&Peer::Stream, &burst_of(7, &[24]), 0).expect("sent"), 1);
            expect_in_order(&mut receiver, 7, 1);
        }
    }
    drop((sender, _own));
    let outcome = receiver.receive(Some(ANSWER_TIME_MAX), false, &mut |_, _| panic!("none came"));
    assert_eq!(outcome.unwrap_err().kind(), ErrorKind::UnexpectedEof);
}

#[test]
fn a_full_stream_takes_none_and_what_was_taken_arrives_without_another_send() {
    let ((sender, mut own), (_far_sender, mut receiver)) = pair();
    // Not a multiple of a page: the kernel accepts the last one in part.
    let burst = burst_of(0, &[PACKET_BYTES_MAX - 321]);
    let sent_count = send_until_full(&sender, &Peer::Stream, &burst);
    assert!(sent_count > 1, "{sent_count}");
    let mut received = 0;
    std::thread::scope(|scope| {
        // The sender's receiver only waits for packets: none arrive, but the rest is sent.
        let waker = own.waker();
        let waiting = scope.spawn(move || {
            while !own.receive(None, false, &mut |_, _| panic!("no packet")).expect("lives").waker {
            }
            own
        });
        while received < sent_count {
            let woken = receiver.receive(Some(ANSWER_TIME_MAX), false, &mut |_, bytes| {
                assert_eq!(bytes, burst.packet(0));
            });
            let packets = woken.expect("lives").packets;
            received += packets;
        }
        waker.wake();
        wait_for_room(&mut waiting.join().expect("it waits"));
    });
    assert_eq!(received, sent_count);
    assert_eq!(sender.send(&Peer::Stream, &burst, 0).expect("room"), 1);
    expect_in_order(&mut receiver, 0, 1);
}

#[test]
fn an_invalid_length_is_counted_and_ends_the_stream() {
    for length in [0, 23, PACKET_BYTES_MAX as u32 + 1, u32::MAX] {
        let (mut raw, (sender, mut receiver)) = raw();
        let mut bytes = packet(0, 24);
        bytes.extend([0; 4]);
        bytes.extend(length.to_le_bytes());
        bytes.extend(packet(1, 24));
        raw.write_all(&bytes).expect("written");
        let (mut packets, mut malformed) = (0, 0);
        let error = loop {
            match receiver
                .receive(Some(ANSWER_TIME_MAX), false, &mut |_, bytes| assert_eq!(bytes.len(), 24))
            {
                Ok(woken) => {
                    (packets, malformed) = (packets + woken.packets, malformed + woken.malformed)
                }
                Err(error) => break error,
            }
        };
        assert_eq!((packets, malformed, error.kind()), (1, 1, ErrorKind::InvalidData), "{length}");
        assert!(
            sender.send(&Peer::Stream, &burst_of(0, &[24]), 0).is_err(),
            "the stream is at its end"
        );
    }
}

#[test]
fn a_peer_that_leaves_between_packets_closed_the_stream() {
    let ((sender, own), (far_sender, mut receiver)) = pair();
    assert_eq!(sender.send(&Peer::Stream, &burst_of(3, &[24]), 0).expect("sent"), 1);
    drop((sender, own));
    expect_in_order(&mut receiver, 3, 1);
    let error = receiver.receive(Some(ANSWER_TIME_MAX), false, &mut |_, _| ()).expect_err("closed");
    assert!(
        error.kind() == ErrorKind::UnexpectedEof && error.to_string().contains("closed"),
        "{error}"
    );
    assert!(far_sender.send(&Peer::Stream, &burst_of(0, &[24]), 0).is_err());
}

#[test]
fn a_listener_hands_out_streams_and_its_waker_ends_its_wait() {
    let listener = listener();
    let local = listener.local().expect("bound");
    assert!(listener.accept(Some(Duration::ZERO)).expect("lives").is_none());
    listener.waker().wake();
    assert!(listener.accept(None).expect("lives").is_none());
    let clients: Vec<_> =
        (0..3).map(|_| connect(local, None, ANSWER_TIME_MAX).expect("connected")).collect();
    for (number, (sender, _)) in (0..).zip(&clients) {
        assert_eq!(sender.send(&Peer::Stream, &burst_of(number, &[24]), 0).expect("sent"), 1);
        let (_, mut receiver) = accepted(&listener);
        expect_in_order(&mut receiver, number, 1);
    }
}

#[test]
fn no_listener_and_no_such_interface_are_errors() {
    let free = listener().local().expect("bound");
    let error = connect(free, None, ANSWER_TIME_MAX).err().expect("no process listens");
    assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
    assert!(connect(free, Some("nosuch0"), ANSWER_TIME_MAX).is_err());
    let ((sender, _own), _far_sender) = pair();
    assert!(sender.send(&Peer::Ethernet([1; 6]), &burst_of(0, &[24]), 0).is_err());
    let too_long = burst_of(0, &[PACKET_BYTES_MAX + 1]);
    assert!(sender.send(&Peer::Stream, &too_long, 0).is_err());
}
