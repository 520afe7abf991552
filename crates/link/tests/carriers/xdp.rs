//! Raw Ethernet by AF_XDP.

use std::io::{BufRead, BufReader};
use std::net::UdpSocket;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use sawmill_link::carrier::{
    BROADCAST, Peer, Receiver, Sender, XdpReceiver, XdpSender, open_ethernet, open_xdp,
};
use sawmill_testkit::skip;

use crate::cable::{Cable, End};
use crate::packets::{ANSWER_TIME_MAX, all_sizes_arrive, burst_of, expect_in_order};

fn try_open(
    cable: &Cable,
    end: End,
    name: &str,
) -> Result<(XdpSender, XdpReceiver), Option<Errno>> {
    cable.at(end, || open_xdp(name)).map_err(|error| Errno::from_io_error(&error))
}

/// None, with the test counted as skipped, where this kernel has no AF_XDP.
pub(crate) fn open(cable: &Cable, end: End) -> Option<(XdpSender, XdpReceiver)> {
    match try_open(cable, end, "cable") {
        Err(Some(Errno::AFNOSUPPORT | Errno::NOSYS | Errno::OPNOTSUPP)) => {
            skip("the kernel has no AF_XDP, or none for this MTU");
            None
        }
        opened => Some(opened.expect("AF_XDP")),
    }
}

/// Repeats `what` until it succeeds: the kernel frees an interface a little after its last
/// descriptor was closed.
fn after_a_while<T>(mut what: impl FnMut() -> Result<T, String>) -> T {
    let begin = Instant::now();
    loop {
        match what() {
            Ok(done) => return done,
            Err(reason) => assert!(begin.elapsed() < ANSWER_TIME_MAX, "{reason}"),
        }
        std::thread::yield_now();
    }
}

fn wait_until_free(cable: &Cable) {
    let is_program_listed = || cable.interface_state(End::A).contains("xdp");
    after_a_while(|| if is_program_listed() { Err(cable.interface_state(End::A)) } else { Ok(()) });
    after_a_while(|| try_open(cable, End::A, "cable").map_err(|error| format!("{error:?}")));
}

#[test]
fn packets_of_all_sizes_arrive_over_every_mtu() {
    // Frames below and above two limits: where they may lie in several chunks, and where they no
    // longer fit one.
    for mtu_bytes in [1500, 3058, 3059, 3826, 3827, 9000, 16110] {
        let Some(cable) = Cable::of_mtu(mtu_bytes) else { return };
        let Some((sender, mut own)) = open(&cable, End::A) else { return };
        let Some((far_sender, mut receiver)) = open(&cable, End::B) else { return };
        let to = far_sender.own();
        assert_eq!(
            (sender.packet_bytes_max(&to), sender.interface().mtu_bytes),
            (mtu_bytes, mtu_bytes)
        );
        all_sizes_arrive(&sender, &to, &mut receiver, &mut own);
    }
}

#[test]
fn an_end_with_af_packet_understands_one_with_af_xdp() {
    let Some(cable) = Cable::of_mtu(9000) else { return };
    let Some((xdp_sender, mut xdp_receiver)) = open(&cable, End::A) else { return };
    let (plain_sender, mut plain_receiver) =
        cable.at(End::B, || open_ethernet("cable").expect("Ethernet"));
    all_sizes_arrive(&xdp_sender, &plain_sender.own(), &mut plain_receiver, &mut xdp_receiver);
    all_sizes_arrive(&plain_sender, &xdp_sender.own(), &mut xdp_receiver, &mut plain_receiver);
}

#[test]
fn a_broadcast_arrives_with_its_sender_and_frames_for_others_do_not() {
    let Some(cable) = Cable::of_mtu(1500) else { return };
    let Some((sender, mut own)) = open(&cable, End::A) else { return };
    let Some((far_sender, mut receiver)) = open(&cable, End::B) else { return };
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
    assert_eq!(far_sender.send(&from[0].0, &burst_of(4, &[60]), 0).expect("sent"), 1);
    expect_in_order(&mut own, 4, 1);
}

#[test]
fn all_other_traffic_of_the_interface_goes_where_it_always_went() {
    let Some(cable) = Cable::of_mtu(9000) else { return };
    let Some((sender, _own)) = open(&cable, End::A) else { return };
    let Some((far_sender, mut receiver)) = open(&cable, End::B) else { return };
    let udp = |end, address| cable.at(end, || UdpSocket::bind(address).expect("UDP"));
    let (a, b) = (udp(End::A, "10.97.0.1:9"), udp(End::B, "10.97.0.2:9"));
    b.set_read_timeout(Some(ANSWER_TIME_MAX)).expect("set");
    for bytes in [1, 1000, 8900] {
        assert_eq!(sender.send(&far_sender.own(), &burst_of(0, &[9000]), 0).expect("sent"), 1);
        a.send_to(&vec![7; bytes], "10.97.0.2:9").expect("sent");
        let mut room = [0; 9000];
        let (received_bytes, from) = b.recv_from(&mut room).expect("other traffic comes");
        assert_eq!(
            (&room[..received_bytes], from.to_string()),
            (&vec![7; bytes][..], "10.97.0.1:9".to_owned())
        );
        expect_in_order(&mut receiver, 0, 1);
    }
}

#[test]
fn an_interface_has_one_user_and_is_free_again_after_its_end() {
    let Some(cable) = Cable::of_mtu(1500) else { return };
    let Some(first) = open(&cable, End::A) else { return };
    assert!(cable.interface_state(End::A).contains("xdp"), "{}", cable.interface_state(End::A));
    assert_eq!(try_open(&cable, End::A, "cable").err(), Some(Some(Errno::BUSY)));
    drop(first);
    wait_until_free(&cable);
}

/// [`the_program_goes_with_a_process_that_was_killed`] starts this as another process; alone it
/// does nothing.
#[test]
#[ignore = "a part of another test"]
fn hold_until_killed() {
    let Ok(interface) = std::env::var("HOLD_INTERFACE") else { return };
    let _held = after_a_while(|| open_xdp(&interface).map_err(|error| error.to_string()));
    println!("held");
    loop {
        std::thread::park();
    }
}

#[test]
fn the_program_goes_with_a_process_that_was_killed() {
    let Some(cable) = Cable::of_mtu(1500) else { return };
    if open(&cable, End::A).is_none() {
        return;
    }
    let mut holder = cable.at(End::A, || {
        let mut command = Command::new(std::env::current_exe().expect("known"));
        command.args(["--ignored", "--exact", "--nocapture", "xdp::hold_until_killed"]);
        command.env("HOLD_INTERFACE", "cable").stdout(Stdio::piped()).spawn().expect("started")
    });
    let lines = BufReader::new(holder.stdout.take().expect("piped")).lines();
    let is_held = lines.map_while(Result::ok).any(|line| line.ends_with("held"));
    assert!(
        is_held && cable.interface_state(End::A).contains("xdp"),
        "{}",
        cable.interface_state(End::A)
    );
    holder.kill().expect("killed");
    holder.wait().expect("gone");
    wait_until_free(&cable);
}

#[test]
fn what_cannot_be_opened_is_an_error_that_says_why() {
    let Some(cable) = Cable::of_mtu(1500) else { return };
    if open(&cable, End::A).is_none() {
        return;
    }
    let error =
        |name| try_open(&cable, End::A, name).err().expect("refused").expect("the system's");
    assert_eq!((error("nosuch0"), error("lo")), (Errno::NODEV, Errno::INVAL));
    cable.link(End::A, &["down"]);
    assert_eq!(error("cable"), Errno::NETDOWN);
    cable.add_pair_of_queues(End::A, "wide", 2);
    assert_eq!(error("wide"), Errno::TOOBIG);
}

#[test]
fn an_interface_that_goes_is_an_error_and_one_that_was_down_goes_on() {
    let Some(cable) = Cable::of_mtu(1500) else { return };
    let Some((sender, mut own)) = open(&cable, End::A) else { return };
    let Some((far_sender, mut receiver)) = open(&cable, End::B) else { return };
    cable.link(End::A, &["down"]);
    let error = sender.send(&far_sender.own(), &burst_of(0, &[100]), 0).expect_err("down");
    assert_eq!(Errno::from_io_error(&error), Some(Errno::NETDOWN));
    let error = own
        .receive(Some(ANSWER_TIME_MAX), false, &mut |_, _| ())
        .expect_err("what was taken does not go");
    assert_eq!(Errno::from_io_error(&error), Some(Errno::NETDOWN));
    cable.link(End::A, &["up"]);
    own.receive(Some(Duration::ZERO), false, &mut |_, _| ()).expect("it lives again");
    expect_in_order(&mut receiver, 0, 1);
    all_sizes_arrive(&sender, &far_sender.own(), &mut receiver, &mut own);
    // A namespace lives as long as a socket is open in it. Removing one end removes the other.
    drop((cable, far_sender, receiver));
    while own.receive(Some(Duration::from_millis(1)), false, &mut |_, _| ()).is_ok() {}
    assert!(sender.send(&BROADCAST, &burst_of(0, &[24]), 0).is_err());
}

#[test]
fn a_packet_longer_than_the_mtu_is_an_error_and_what_fits_before_it_goes() {
    let Some(cable) = Cable::of_mtu(1500) else { return };
    let Some((sender, _own)) = open(&cable, End::A) else { return };
    let Some((far_sender, mut receiver)) = open(&cable, End::B) else { return };
    let burst = burst_of(0, &[1500, 1500, 1501, 1500]);
    assert_eq!(sender.send(&far_sender.own(), &burst, 0).expect("what fits goes"), 2);
    expect_in_order(&mut receiver, 0, 2);
    let error = sender.send(&far_sender.own(), &burst, 2).expect_err("too long");
    assert_eq!(Errno::from_io_error(&error), Some(Errno::MSGSIZE));
    assert_eq!(sender.send(&far_sender.own(), &burst, 3).expect("the next fits"), 1);
    expect_in_order(&mut receiver, 3, 1);
    let error = sender.send(&Peer::Stream, &burst, 0).expect_err("no stream");
    assert_eq!(error.kind(), std::io::ErrorKind::InvalidInput);
}

#[test]
fn a_waker_ends_a_wait_and_reaches_a_loaded_receiver_too() {
    let Some(cable) = Cable::of_mtu(1500) else { return };
    let Some((sender, _own)) = open(&cable, End::A) else { return };
    let Some((far_sender, mut receiver)) = open(&cable, End::B) else { return };
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
fn many_more_frames_than_there_are_chunks_pass() {
    let Some(cable) = Cable::of_mtu(9000) else { return };
    let Some((sender, mut own)) = open(&cable, End::A) else { return };
    let Some((far_sender, mut receiver)) = open(&cable, End::B) else { return };
    let burst = burst_of(0, &[9000; 40]);
    for _ in 0..200 {
        let mut sent = 0;
        while sent < burst.len() {
            sent += sender.send(&far_sender.own(), &burst, sent).expect("sent");
            own.receive(Some(Duration::ZERO), true, &mut |_, _| ()).expect("lives");
        }
        expect_in_order(&mut receiver, 0, sent);
    }
}
