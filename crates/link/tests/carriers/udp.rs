//! UDP.

use std::collections::HashMap;
use std::io;
use std::net::{SocketAddr, TcpListener, UdpSocket};
use std::sync::Barrier;
use std::time::Duration;

use sawmill_link::carrier::{
    Burst, Carrier, Peer, Receiver, Sender, SharedAddress, TargetListener, UdpOptions, UdpReceiver,
    UdpSender, open_udp,
};
use sawmill_testkit::wait_until;

use crate::cable::{Cable, End};
use crate::packets::{
    ANSWER_TIME_MAX, all_sizes_arrive, burst_of, expect_in_order, number_of, packet,
    send_until_full, wait_for_room,
};

fn open(local: &str, segmentation: bool) -> (UdpSender, UdpReceiver) {
    let local: SocketAddr = local.parse().expect("an address");
    open_udp(&UdpOptions { segmentation, ..UdpOptions::on(local) }).expect("UDP")
}

fn peer_of(sender: &UdpSender) -> Peer {
    Peer::Udp(sender.local().expect("bound"))
}

#[test]
fn packets_of_all_sizes_arrive_over_the_loopback_with_and_without_segmentation() {
    for (local, segmentation) in [("127.0.0.1:0", true), ("127.0.0.1:0", false), ("[::1]:0", true)]
    {
        let (sender, mut own) = open(local, segmentation);
        let (far_sender, mut receiver) = open(local, segmentation);
        all_sizes_arrive(&sender, &peer_of(&far_sender), &mut receiver, &mut own);
        assert_eq!(sender.has_segmentation(), segmentation);
    }
}

#[test]
fn packets_of_all_sizes_arrive_over_a_cable_that_cuts_in_software_too() {
    let Some(cable) = Cable::of_mtu(9000) else { return };
    let (far_sender, mut receiver) = cable.at(End::B, || open("10.97.0.2:0", true));
    let to = peer_of(&far_sender);
    for software in [false, true] {
        if software {
            cable.link(End::A, &["gso_max_segs", "1"]);
        }
        cable.at(End::A, || {
            let (sender, mut own) = open("10.97.0.1:0", true);
            assert_eq!(sender.packet_bytes_max(&to), 9000 - 28);
            all_sizes_arrive(&sender, &to, &mut receiver, &mut own);
            assert!(sender.has_segmentation());
        });
    }
}

#[test]
fn the_peer_that_a_packet_comes_from_is_where_an_answer_goes_even_over_both_families() {
    let (target, mut at_target) = open("[::]:0", true);
    let Peer::Udp(bound) = peer_of(&target) else { panic!("UDP") };
    let to = Peer::Udp(SocketAddr::from(([127, 0, 0, 1], bound.port())));
    let (initiator, mut at_initiator) = open("127.0.0.1:0", true);
    assert_eq!(initiator.send(&to, &burst_of(1, &[24]), 0).expect("sent"), 1);
    let mut from = None;
    at_target
        .receive(Some(ANSWER_TIME_MAX), false, &mut |peer, _| from = Some(*peer))
        .expect("lives");
    assert_eq!(from, Some(peer_of(&initiator)));
    assert_eq!(target.send(&from.expect("it came"), &burst_of(2, &[1000]), 0).expect("sent"), 1);
    expect_in_order(&mut at_initiator, 2, 1);
}

#[test]
fn invalid_lengths_are_counted_and_what_follows_a_packet_is_cut() {
    let (far_sender, mut receiver) = open("127.0.0.1:0", true);
    let Peer::Udp(to) = peer_of(&far_sender) else { panic!("UDP") };
    let raw = UdpSocket::bind("127.0.0.1:0").expect("a socket");
    let mut too_long = packet(0, 100);
    too_long[4] = 101;
    let mut too_short = packet(0, 100);
    too_short[4] = 23;
    for bad in [&[][..], &[1, 2, 3], &packet(0, 24)[..23], &too_long, &too_short, &[0xFF; 40]] {
        raw.send_to(bad, to).expect("sent");
    }
    let mut padded = packet(7, 30);
    padded.extend([0; 16]);
    raw.send_to(&padded, to).expect("sent");
    let sum = expect_in_order(&mut receiver, 7, 1);
    assert_eq!(sum.malformed, 6);
}

#[test]
fn receivers_that_share_a_port_have_their_peers_dealt_out() {
    let local = SocketAddr::from(([127, 0, 0, 4], free_port()));
    let mut carriers = listen(&format!("udp:{local}"), 3).expect("listens");
    let senders: Vec<_> = (0..64).map(|_| open("127.0.0.1:0", true)).collect();
    for (number, (sender, _)) in (0..).zip(&senders) {
        assert_eq!(
            sender.send(&Peer::Udp(local), &burst_of(number, &[24, 24]), 0).expect("sent"),
            2
        );
    }
    let mut receiver_of_peer = HashMap::new();
    let mut counts = [0; 3];
    while counts.iter().sum::<usize>() < 128 {
        for (index, carrier) in carriers.iter_mut().enumerate() {
            let woken = carrier.receiver.receive(Some(Duration::ZERO), false, &mut |peer, _| {
                assert_eq!(
                    *receiver_of_peer.entry(*peer).or_insert(index),
                    index,
                    "a peer stays with one receiver"
                );
            });
            counts[index] += woken.expect("lives").packets;
        }
    }
    assert!(counts.iter().all(|count| *count > 0), "{counts:?}");
    assert_eq!(receiver_of_peer.len(), 64);
}

/// A port that no TCP socket had, and no UDP socket is likely to have.
fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").and_then(|socket| socket.local_addr()).expect("bound").port()
}

/// Listens as a target with this many receivers.
fn listen(address: &str, receivers: usize) -> io::Result<Vec<Carrier>> {
    let address = SharedAddress::new(address.parse().expect("an address"), receivers);
    address.listen().map(|listener| match listener {
        TargetListener::Packets(carriers) => carriers,
        TargetListener::Streams(_) => panic!("UDP"),
    })
}

#[test]
fn of_two_targets_that_begin_at_once_where_their_addresses_overlap_one_is_refused() {
    for pair in [
        ["udp:127.0.0.1:PORT", "udp:127.0.0.1:PORT"],
        ["udp:0.0.0.0:PORT", "udp:127.0.0.1:PORT"],
        ["udp:[::]:PORT", "udp:0.0.0.0:PORT"],
        ["udp:[::]:PORT", "udp:127.0.0.1:PORT"],
        ["udp:[::]:PORT", "udp:[::1]:PORT"],
        ["udp:0.0.0.0:PORT@lo", "udp:127.0.0.1:PORT"],
    ] {
        let port = free_port().to_string();
        let addresses = pair.map(|address| address.replace("PORT", &port));
        let mut listens_count = 0;
        for round in 0..100 {
            let start = Barrier::new(2);
            let listen_now = |address: &String| {
                start.wait();
                listen(address, 4)
            };
            let both = std::thread::scope(|scope| {
                let threads = addresses.each_ref().map(|at| scope.spawn(move || listen_now(at)));
                threads.map(|thread| thread.join().expect("no panic"))
            });
            assert!(both.iter().any(io::Result::is_err), "{addresses:?} in round {round}");
            listens_count += both.iter().filter(|one| one.is_ok()).count();
            for (address, refused) in addresses.iter().zip(both) {
                let Err(error) = refused else { continue };
                let text = error.to_string();
                assert!(text.contains(address) && text.contains("another port"), "{text}");
            }
        }
        // How often both see the other's socket, and neither listens, is a matter of cores. But one
        // alone listens, when sockets that another test's process keeps for a moment are gone.
        assert!(listens_count > 0, "{addresses:?}");
        for address in &addresses {
            wait_until("a listener that is alone", || listen(address, 4).is_ok());
        }
    }
}

#[test]
fn targets_have_the_same_port_at_addresses_that_do_not_overlap_and_in_other_namespaces() {
    let port = free_port();
    let _one = listen(&format!("udp:127.0.0.5:{port}"), 2).expect("listens");
    let _other = listen(&format!("udp:127.0.0.6:{port}"), 2).expect("another address");
    let Some(cable) = Cable::of_mtu(1500) else { return };
    let everywhere = |end| cable.at(end, || listen("udp:0.0.0.0:9700", 2));
    let _a = everywhere(End::A).expect("a namespace of its own");
    let b = everywhere(End::B).expect("a namespace of its own");
    assert!(everywhere(End::B).is_err());
    let last = b.into_iter().next_back().expect("two").sender;
    assert!(everywhere(End::B).is_err(), "a socket of the target before is open");
    drop(last);
    wait_until("the port is free again", || everywhere(End::B).is_ok());
}

#[test]
fn a_full_socket_takes_none_and_later_has_room() {
    let Some(cable) = Cable::of_mtu(9000) else { return };
    if !cable.slow_down(End::A, "80mbit", 100_000_000) {
        return;
    }
    let (far_sender, mut receiver) = cable.at(End::B, || open("10.97.0.2:0", true));
    let (sender, mut own) = cable.at(End::A, || open("10.97.0.1:0", true));
    let sent_count = send_until_full(&sender, &peer_of(&far_sender), &burst_of(0, &[8972; 7]));
    assert!(sent_count > 50, "the kernel's buffer is larger than {sent_count} packets");
    wait_for_room(&mut own);
    cable.hurry(End::A);
    let mut packet_count = 0;
    let woken = receiver.receive(Some(ANSWER_TIME_MAX), false, &mut |_, bytes| {
        number_of(bytes);
        packet_count += 1;
    });
    assert!(woken.expect("lives").packets == packet_count && packet_count > 0);
    assert!(sender.send(&peer_of(&far_sender), &burst_of(0, &[8972; 7]), 0).expect("sent") > 0);
}

#[test]
fn a_packet_that_does_not_fit_is_an_error_and_never_fragmented() {
    let Some(cable) = Cable::of_mtu(1500) else { return };
    let (far_sender, mut receiver) = cable.at(End::B, || open("10.97.0.2:0", true));
    let (sender, _own) = cable.at(End::A, || open("10.97.0.1:0", true));
    let to = peer_of(&far_sender);
    let fits = cable.at(End::A, || sender.packet_bytes_max(&to));
    assert_eq!(fits, 1472);
    for sizes in [&[fits + 1][..], &[fits + 1; 3]] {
        let error = sender.send(&to, &burst_of(0, sizes), 0).expect_err("too long");
        assert_eq!(rustix::io::Errno::from_io_error(&error), Some(rustix::io::Errno::MSGSIZE));
    }
    assert!(sender.has_segmentation(), "it was the packet, not the segmentation");
    let mixed = burst_of(0, &[fits, fits, fits + 1, fits]);
    assert_eq!(sender.send(&to, &mixed, 0).expect("what fits goes"), 2);
    expect_in_order(&mut receiver, 0, 2);
}

#[test]
fn an_interface_that_went_down_is_an_error_and_serves_again_once_it_is_back() {
    let Some(cable) = Cable::of_mtu(1500) else { return };
    let (far_sender, mut receiver) = cable.at(End::B, || open("10.97.0.2:0", true));
    let (sender, _own) = cable.at(End::A, || open("10.97.0.1:0", true));
    cable.link(End::A, &["down"]);
    assert!(sender.send(&peer_of(&far_sender), &burst_of(0, &[24]), 0).is_err());
    cable.link(End::A, &["up"]);
    assert_eq!(sender.send(&peer_of(&far_sender), &burst_of(5, &[24]), 0).expect("sent"), 1);
    expect_in_order(&mut receiver, 5, 1);
}

#[test]
fn a_socket_tied_to_an_interface_uses_no_other_and_a_wrong_name_is_an_error() {
    let options = UdpOptions::on("0.0.0.0:0".parse().expect("an address"));
    let error =
        open_udp(&UdpOptions { interface: Some("nosuch0".into()), ..options.clone() }).err();
    assert!(error.is_some(), "there is no such interface");
    let Some(cable) = Cable::of_mtu(1500) else { return };
    let (far_sender, mut receiver) = cable.at(End::B, || open("10.97.0.2:0", true));
    let tied = |name: &str| {
        let options = UdpOptions { interface: Some(name.into()), ..options.clone() };
        cable.at(End::A, || open_udp(&options).expect("UDP"))
    };
    let (over_lo, _own) = tied("lo");
    let not_there = burst_of(0, &[24]);
    let _ = over_lo.send(&peer_of(&far_sender), &not_there, 0);
    let (over_cable, _own) = tied("cable");
    assert_eq!(over_cable.send(&peer_of(&far_sender), &burst_of(9, &[24]), 0).expect("sent"), 1);
    expect_in_order(&mut receiver, 9, 1);
}

#[test]
fn a_waker_ends_a_wait_and_a_peer_of_another_carrier_is_refused() {
    let (sender, mut receiver) = open("127.0.0.1:0", true);
    let waker = receiver.waker();
    std::thread::scope(|scope| {
        scope.spawn(|| waker.wake());
        let woken = receiver.receive(None, false, &mut |_, _| ()).expect("lives");
        assert!(woken.waker && woken.packets == 0);
    });
    let error = sender.send(&Peer::Stream, &Burst::new(1, 24), 0).expect_err("no stream");
    assert_eq!(error.kind(), std::io::ErrorKind::InvalidInput);
}
