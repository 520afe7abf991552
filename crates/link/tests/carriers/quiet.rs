//! Nothing is allocated while packets travel (WZBLK §2.2.7).

use sawmill_link::carrier::{
    Peer, Receiver, Sender, StreamListener, UdpOptions, connect, open_ethernet, open_udp,
};
use sawmill_sys::CountingAllocator;

use crate::cable::{Cable, End};
use crate::packets::{ANSWER_TIME_MAX, burst_of};
use crate::xdp;

fn travel(sender: &dyn Sender, to: &Peer, receiver: &mut dyn Receiver) {
    let burst = burst_of(0, &[1000, 1000, 1000, 24, 500]);
    let round = |receiver: &mut dyn Receiver| {
        let (mut sent, mut received) = (0, 0);
        while sent < burst.len() {
            sent += sender.send(to, &burst, sent).expect("sent");
        }
        while received < sent {
            let woken =
                receiver.receive(Some(ANSWER_TIME_MAX), false, &mut |_, bytes| bytes[0] = 1);
            let packets = woken.expect("lives").packets;
            assert!(packets > 0, "a packet did not come");
            received += packets;
        }
    };
    // What the thread allocates on first use is not the carrier's.
    round(receiver);
    let before = CountingAllocator::allocations_of_this_thread();
    assert!(before > 0, "the counter counts");
    for _ in 0..100 {
        round(receiver);
    }
    assert_eq!(CountingAllocator::allocations_of_this_thread(), before);
}

#[test]
fn nothing_is_allocated_while_packets_travel_over_udp() {
    for segmentation in [true, false] {
        let options =
            UdpOptions { segmentation, ..UdpOptions::on("127.0.0.1:0".parse().expect("one")) };
        let (sender, _own) = open_udp(&options).expect("UDP");
        let (far_sender, mut receiver) = open_udp(&options).expect("UDP");
        travel(&sender, &Peer::Udp(far_sender.local().expect("bound")), &mut receiver);
    }
}

#[test]
fn nothing_is_allocated_while_packets_travel_over_tcp() {
    let listener =
        StreamListener::open("127.0.0.1:0".parse().expect("one"), None).expect("a listener");
    let (sender, _own) =
        connect(listener.local().expect("bound"), None, ANSWER_TIME_MAX).expect("connected");
    let (_there, mut receiver, _) =
        listener.accept(Some(ANSWER_TIME_MAX)).expect("lives").expect("a stream");
    travel(&sender, &Peer::Stream, &mut receiver);
}

#[test]
fn nothing_is_allocated_while_packets_travel_over_ethernet() {
    let Some(cable) = Cable::of_mtu(1500) else { return };
    let (sender, _own) = cable.at(End::A, || open_ethernet("cable").expect("Ethernet"));
    let (far_sender, mut receiver) = cable.at(End::B, || open_ethernet("cable").expect("Ethernet"));
    travel(&sender, &far_sender.own(), &mut receiver);
}

#[test]
fn nothing_is_allocated_while_packets_travel_past_the_network_layer() {
    let Some(cable) = Cable::of_mtu(9000) else { return };
    let Some((sender, _own)) = xdp::open(&cable, End::A) else { return };
    let Some((far_sender, mut receiver)) = xdp::open(&cable, End::B) else { return };
    travel(&sender, &far_sender.own(), &mut receiver);
}
