//! Raw Ethernet.

use std::collections::HashMap;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::sockopt::socket_error;
use sawmill_link::carrier::{
    BROADCAST, Burst, ETHERTYPE, EthernetReceiver, EthernetSender, Peer, Receiver, Sender,
    open_ethernet, open_ethernet_in,
};
use sawmill_sys::net::{FrameGroup, FrameSocket};

use crate::cable::{Cable, End};
use crate::packets::{
    ANSWER_TIME_MAX, all_sizes_arrive, burst_of, expect_in_order, packet, send_until_full,
    wait_for_room,
};

fn open(cable: &Cable, end: End) -> (EthernetSender, EthernetReceiver) {
    cable.at(end, || open_ethernet("cable").expect("Ethernet"))
}

fn errno(error: &std::io::Error) -> Option<Errno> {
    Errno::from_io_error(error)
}

#[test]
fn packets_of_all_sizes_arrive_over_every_mtu() {
    for mtu_bytes in [1500, 9000, 16110] {
        let Some(cable) = Cable::of_mtu(mtu_bytes) else { return };
        let ((sender, mut own), (far_sender, mut receiver)) =
            (open(&cable, End::A), open(&cable, End::B));
        let to = far_sender.own();
        assert_eq!(
            (sender.packet_bytes_max(&to), sender.interface().mtu_bytes),
            (mtu_bytes, mtu_bytes)
        );
        all_sizes_arrive(&sender, &to, &mut receiver, &mut own);
    }
    let Some(cable) = Cable::of_mtu(65535) else { return };
    let ((sender, _own), (far_sender, mut receiver)) = (open(&cable, End::A), open(&cable, End::B));
    assert_eq!(
        sender.send(&far_sender.own(), &burst_of(0, &[65535, 24, 65535]), 0).expect("sent"),
        3
    );
    expect_in_order(&mut receiver, 0, 3);
}

#[test]
fn a_broadcast_arrives_with_its_sender_and_own_frames_and_those_of_others_do_not() {
    let Some(cable) = Cable::of_mtu(1500) else { return };
    let ((sender, mut own), (far_sender, mut receiver)) =
        (open(&cable, End::A), open(&cable, End::B));
    let stranger = Peer::Ethernet([2, 0, 0, 0, 0, 99]);
    for (to, number) in [(stranger, 1), (BROADCAST, 2), (far_sender.own(), 3)] {
        assert_eq!(sender.send(&to, &burst_of(number, &[60]), 0).expect("sent"), 1);
    }
    let mut from = Vec::new();
    while from.len() < 2 {
        let on_packet = &mut |peer: &Peer, bytes: &mut [u8]| from.push((*peer, bytes[0]));
        assert!(
            receiver.receive(Some(ANSWER_TIME_MAX), false, on_packet).expect("lives").packets > 0
        );
    }
    assert_eq!(from, [(sender.own(), 2), (sender.own(), 3)]);
    let answer = far_sender.send(&from[0].0, &burst_of(4, &[60]), 0).expect("sent");
    assert_eq!(answer, 1);
    // The first frame is the answer: the sender did not receive its own frames before it.
    expect_in_order(&mut own, 4, 1);
}

#[test]
fn the_padding_of_tiny_frames_is_cut_and_invalid_lengths_are_counted() {
    let Some(cable) = Cable::of_mtu(1500) else { return };
    let (far_sender, mut receiver) = open(&cable, End::B);
    let (raw, _ring) =
        cable.at(End::A, || FrameSocket::open("cable", ETHERTYPE, 1, 1 << 16).expect("raw"));
    let mut header = [0; 14];
    let Peer::Ethernet(to) = far_sender.own() else { panic!("Ethernet") };
    header[..6].copy_from_slice(&to);
    header[6..12].copy_from_slice(&raw.interface().mac);
    header[12..].copy_from_slice(&ETHERTYPE.to_be_bytes());
    // A card sends at least 60 bytes, including the header.
    let mut padded = packet(7, 24);
    padded.resize(46, 0xEE);
    let mut too_long = packet(0, 46);
    too_long[4] = 47;
    let frames = [&[0; 46][..], &[0xFF; 46], &[1, 2, 3], &too_long, &padded];
    assert_eq!(raw.send(&header, frames.into_iter()).expect("sent"), frames.len());
    assert_eq!(expect_in_order(&mut receiver, 7, 1).malformed, 4);
}

#[test]
fn an_interface_taken_down_is_an_error_and_one_put_up_opens_again() {
    let Some(cable) = Cable::of_mtu(1500) else { return };
    let (sender, mut own) = open(&cable, End::A);
    let burst = burst_of(0, &[100, 100]);
    cable.link(End::A, &["down"]);
    let error = own.receive(Some(ANSWER_TIME_MAX), false, &mut |_, _| ()).expect_err("down");
    assert_eq!(errno(&error), Some(Errno::NETDOWN));
    let error = sender.send(&BROADCAST, &burst, 0).expect_err("down");
    assert_eq!(errno(&error), Some(Errno::NETDOWN));
    let error = cable.at(End::A, || open_ethernet("cable").err().expect("still down"));
    assert_eq!(errno(&error), Some(Errno::NETDOWN));
    cable.link(End::A, &["up"]);
    let ((sender, mut own), (far_sender, mut receiver)) =
        (open(&cable, End::A), open(&cable, End::B));
    all_sizes_arrive(&sender, &far_sender.own(), &mut receiver, &mut own);
}

#[test]
fn an_interface_that_is_gone_or_never_was_or_is_no_ethernet_is_an_error() {
    let Some(cable) = Cable::of_mtu(1500) else { return };
    let (sender, mut own) = open(&cable, End::A);
    cable.link(End::A, &["name", "renamed"]);
    assert_eq!(
        sender.send(&BROADCAST, &burst_of(0, &[24]), 0).expect("its name does not matter"),
        1
    );
    let open_error = |name| cable.at(End::A, || open_ethernet(name).err().expect("refused"));
    assert_eq!(errno(&open_error("cable")), Some(Errno::NODEV));
    assert_eq!(errno(&open_error("lo")), Some(Errno::INVAL));
    // Removing one end removes the other.
    drop(cable);
    while own.receive(Some(ANSWER_TIME_MAX), false, &mut |_, _| ()).is_ok() {}
    assert!(sender.send(&BROADCAST, &burst_of(0, &[24]), 0).is_err());
}

#[test]
fn a_packet_longer_than_the_mtu_is_an_error_and_what_fits_before_it_goes() {
    let Some(cable) = Cable::of_mtu(1500) else { return };
    let ((sender, _own), (far_sender, mut receiver)) = (open(&cable, End::A), open(&cable, End::B));
    let burst = burst_of(0, &[1500, 1500, 1501, 1500]);
    assert_eq!(sender.send(&far_sender.own(), &burst, 0).expect("what fits goes"), 2);
    expect_in_order(&mut receiver, 0, 2);
    let error = sender.send(&far_sender.own(), &burst, 2).expect_err("too long");
    assert_eq!(errno(&error), Some(Errno::MSGSIZE));
    assert_eq!(sender.send(&far_sender.own(), &burst, 3).expect("the next fits"), 1);
    expect_in_order(&mut receiver, 3, 1);
    let error = sender.send(&Peer::Stream, &burst, 0).expect_err("no stream");
    assert_eq!(error.kind(), std::io::ErrorKind::InvalidInput);
}

#[test]
fn a_waker_ends_a_wait_and_reaches_a_loaded_receiver_too() {
    let Some(cable) = Cable::of_mtu(1500) else { return };
    let ((sender, _own), (far_sender, mut receiver)) = (open(&cable, End::A), open(&cable, End::B));
    let waker = receiver.waker();
    std::thread::scope(|scope| {
        scope.spawn(|| waker.wake());
        assert!(receiver.receive(None, false, &mut |_, _| ()).expect("lives").waker);
    });
    assert_eq!(sender.send(&far_sender.own(), &burst_of(0, &[24]), 0).expect("sent"), 1);
    waker.wake();
    let woken = receiver.receive(None, false, &mut |_, _| ()).expect("lives");
    assert!(woken.waker && woken.packets == 1, "{woken:?}");
}

#[test]
fn a_full_socket_or_queue_takes_none_and_later_has_room() {
    // The queue first holds all that the socket may have in flight; then little, and it refuses.
    for limit_bytes in [100_000_000, 100_000] {
        let Some(cable) = Cable::of_mtu(9000) else { return };
        if !cable.slow_down(End::A, "80mbit", limit_bytes) {
            return;
        }
        let ((sender, mut own), (far_sender, mut receiver)) =
            (open(&cable, End::A), open(&cable, End::B));
        let burst = burst_of(0, &[9000]);
        let sent_count = send_until_full(&sender, &far_sender.own(), &burst);
        assert!(sent_count > 3, "{sent_count} with {limit_bytes}");
        let later_count = loop {
            wait_for_room(&mut own);
            match sender.send(&far_sender.own(), &burst, 0).expect("lives") {
                0 => (),
                later_count => break later_count,
            }
        };
        assert_eq!(later_count, 1);
        let mut received = 0;
        while received < sent_count + later_count {
            let woken = receiver.receive(Some(ANSWER_TIME_MAX), false, &mut |_, bytes| {
                assert_eq!(bytes, burst.packet(0));
            });
            let packets = woken.expect("lives").packets;
            assert!(
                packets > 0,
                "{received} of {} came with {limit_bytes}",
                sent_count + later_count
            );
            received += packets;
            if received > 5 && limit_bytes > 1_000_000 {
                // This is enough; the rest takes a while on the slow link.
                break;
            }
        }
    }
}

#[test]
fn a_receiver_that_comes_late_finds_what_the_ring_holds_and_goes_on() {
    let Some(cable) = Cable::of_mtu(9000) else { return };
    let ((sender, _own), (far_sender, mut receiver)) = (open(&cable, End::A), open(&cable, End::B));
    let burst = burst_of(0, &[9000; 100]);
    for _ in 0..20 {
        assert_eq!(sender.send(&far_sender.own(), &burst, 0).expect("sent"), 100);
    }
    let mut received = 0;
    loop {
        let woken = receiver
            .receive(Some(std::time::Duration::ZERO), false, &mut |_, _| ())
            .expect("lives");
        if woken.packets == 0 {
            break;
        }
        received += woken.packets;
    }
    assert!((500..2000).contains(&received), "the ring holds about 900, {received} came");
    assert_eq!(sender.send(&far_sender.own(), &burst, 0).expect("sent"), 100);
    expect_in_order(&mut receiver, 0, 100);
}

const CONNECTIONS: u8 = 16;
const LINKS: u8 = 4;

/// Sends a packet of each link of each connection.
pub(crate) fn send_of_each_link(sender: &EthernetSender, to: &Peer) {
    for connection in 0..CONNECTIONS {
        let mut burst = Burst::new(LINKS.into(), usize::from(LINKS) * 60);
        for link in 0..LINKS {
            let mut packet = [0; 60];
            (packet[4], packet[8], packet[23]) = (60, connection.wrapping_mul(37), link);
            assert!(burst.push(&packet));
        }
        assert_eq!(sender.send(to, &burst, 0).expect("sent"), usize::from(LINKS));
    }
}

/// Receives at all of a group what `rounds` rounds sent. Returns the packets of each, and checks
/// that none came twice and that each link stayed with one.
pub(crate) fn receive_of_each_link(
    receivers: &mut [EthernetReceiver],
    rounds: usize,
) -> Vec<usize> {
    let mut receiver_of_link = HashMap::new();
    let mut counts = vec![0; receivers.len()];
    let sent = rounds * usize::from(CONNECTIONS) * usize::from(LINKS);
    let deadline = std::time::Instant::now() + ANSWER_TIME_MAX;
    while receiver_of_link.values().any(|(_, count)| *count < rounds)
        || counts.iter().sum::<usize>() < sent
    {
        assert!(std::time::Instant::now() < deadline, "only {counts:?} of {sent} came");
        for (index, receiver) in receivers.iter_mut().enumerate() {
            let on_packet = &mut |_: &Peer, packet: &mut [u8]| {
                let link = (packet[8], packet[23]);
                let (first, count) = receiver_of_link.entry(link).or_insert((index, 0));
                assert_eq!(*first, index, "link {link:?} moved");
                *count += 1;
                assert!(*count <= rounds, "a packet of link {link:?} came twice");
            };
            let woken = receiver.receive(Some(Duration::ZERO), false, on_packet);
            counts[index] += woken.expect("lives").packets;
        }
    }
    counts
}

#[test]
fn receivers_of_a_group_share_the_links_and_each_link_stays_with_one() {
    let Some(cable) = Cable::of_mtu(1500) else { return };
    let (sender, _own) = open(&cable, End::A);
    let group = FrameGroup::default();
    let member = || cable.at(End::B, || open_ethernet_in(&group, "cable").expect("a member"));
    let (mut senders, mut receivers): (Vec<_>, Vec<_>) = (0..3).map(|_| member()).unzip();
    // Another target on the interface, with a group of its own, gets everything too.
    let others = FrameGroup::default();
    let other = || cable.at(End::B, || open_ethernet_in(&others, "cable").expect("a member"));
    let (_other_senders, mut other_receivers): (Vec<_>, Vec<_>) = (0..2).map(|_| other()).unzip();
    let to = senders[0].own();
    for round in 0..3 {
        (0..5).for_each(|_| send_of_each_link(&sender, &to));
        let counts = receive_of_each_link(&mut receivers, 5);
        assert!(counts.iter().all(|count| *count > 0), "round {round}: {counts:?}");
        let counts = receive_of_each_link(&mut other_receivers, 5);
        assert!(counts.iter().all(|count| *count > 0), "round {round}: {counts:?}");
        // One of them leaves and comes back, and then all of them do.
        let left = if round == 0 { 0..1 } else { 0..3 };
        senders.drain(left.clone());
        receivers.drain(left.clone());
        for _ in left {
            let (sender, receiver) = member();
            senders.push(sender);
            receivers.push(receiver);
        }
    }
}

#[test]
fn an_interface_that_goes_down_before_its_socket_joins_a_group_is_named_as_down() {
    let Some(cable) = Cable::of_mtu(1500) else { return };
    let (socket, _ring) =
        cable.at(End::B, || FrameSocket::open("cable", ETHERTYPE, 1, 1 << 16).expect("opened"));
    cable.link(End::B, &["down"]);
    match FrameGroup::default().add(&socket, &[0]) {
        Err(error) => assert_eq!(errno(&error), Some(Errno::NETDOWN), "{error}"),
        // From Linux 6.13 on, it joins, and its receiver is told.
        Ok(()) => assert_eq!(socket_error(&socket), Ok(Err(Errno::NETDOWN))),
    }
}

#[test]
fn a_group_goes_on_when_its_interface_was_down() {
    let Some(cable) = Cable::of_mtu(1500) else { return };
    let group = FrameGroup::default();
    let member = || cable.at(End::B, || open_ethernet_in(&group, "cable").expect("a member"));
    let (mut senders, mut receivers): (Vec<_>, Vec<_>) = (0..2).map(|_| member()).unzip();
    cable.link(End::B, &["down"]);
    let error = receivers[0].receive(Some(ANSWER_TIME_MAX), false, &mut |_, _| ());
    assert_eq!(errno(&error.expect_err("down")), Some(Errno::NETDOWN));
    cable.link(End::B, &["up"]);
    // The first comes back beside the second, which has not noticed.
    drop((senders.remove(0), receivers.remove(0)));
    let (new_sender, new_receiver) = member();
    senders.push(new_sender);
    receivers.push(new_receiver);
    let (sender, _own) = open(&cable, End::A);
    let to = senders[0].own();
    let _ = receivers[0].receive(Some(Duration::ZERO), false, &mut |_, _| ());
    send_of_each_link(&sender, &to);
    let counts = receive_of_each_link(&mut receivers, 1);
    assert!(counts.iter().all(|count| *count > 0), "{counts:?}");
}
