//! Several receivers at one address, whose interface comes and goes.

use std::sync::Arc;
use std::time::Duration;

use sawmill_device::{BlockDeviceExt, MemoryDevice};
use sawmill_link::Unpacker;
use sawmill_link::carrier::{LinkAddress, Sender, open_ethernet, open_ethernet_in};
use sawmill_link::clock::SteadyClock;
use sawmill_link::initiator::{Initiator, InitiatorOptions, OpenMode};
use sawmill_link::session::{PreSharedKey, Security, unguessable};
use sawmill_link::target::{Target, TargetOptions};
use sawmill_link::threads::{InitiatorThreads, Listener};
use sawmill_sys::net::FrameGroup;

use crate::cable::{Cable, End};
use crate::ethernet::{receive_of_each_link, send_of_each_link};
use crate::packets::{burst_of, expect_in_order};

/// Longer than anything here takes: only a hang reaches it.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(60);

#[test]
fn receivers_that_were_replaced_take_no_frames_and_their_senders_still_send() {
    let Some(cable) = Cable::of_mtu(1500) else { return };
    let group = FrameGroup::default();
    let member = || cable.at(End::B, || open_ethernet_in(&group, "cable").expect("a member"));
    let (sender, mut far_receiver) = cable.at(End::A, || open_ethernet("cable").expect("opened"));
    let mut old_senders = Vec::new();
    for flap in 0..3 {
        let (senders, mut receivers): (Vec<_>, Vec<_>) = (0..2).map(|_| member()).unzip();
        send_of_each_link(&sender, &senders[0].own());
        let counts = receive_of_each_link(&mut receivers, 1);
        assert!(counts.iter().all(|count| *count > 0), "flap {flap}: {counts:?}");
        // Routes of links keep the senders.
        drop(receivers);
        old_senders.extend(senders);
        cable.link(End::B, &["down"]);
        cable.link(End::B, &["up"]);
        for old_sender in &old_senders {
            let sent = old_sender.send(&sender.own(), &burst_of(7, &[60]), 0).expect("sent");
            assert_eq!(sent, 1);
            expect_in_order(&mut far_receiver, 7, 1);
        }
    }
}

fn options(links: usize) -> (Arc<Target>, Arc<Initiator>) {
    let key = || Security::Key(PreSharedKey::from_bytes([9; 32]));
    let clock = Arc::new(SteadyClock);
    let target = Target::new(TargetOptions::default(), key(), clock.clone(), unguessable());
    let memory = Arc::new(MemoryDevice::new(1 << 20));
    target.add("disk", Arc::new(Unpacker::new(memory)), None).expect("the first export");
    let options = InitiatorOptions::default();
    (target, Initiator::new(options, key(), links, clock, unguessable()))
}

#[test]
fn a_target_with_two_receivers_serves_on_whenever_its_interface_was_down() {
    for links in [1, 2] {
        let Some(cable) = Cable::of_mtu(1500) else { return };
        let address: LinkAddress = "eth:cable".parse().expect("an address");
        let (target, initiator) = options(links);
        let addresses = [address.clone()];
        let _listener = cable.at(End::B, || Listener::new(target, &addresses, 2).expect("listens"));
        let addresses = vec![address; links];
        let attached =
            cable.at(End::A, || InitiatorThreads::new(initiator, &addresses).expect("threads"));
        let open = attached.initiator().request_open("disk", OpenMode::default());
        let answer = open.wait(ANSWER_TIME_MAX).expect("an answer");
        let device = attached.initiator().opened("disk", OpenMode::default(), &answer);
        let device = device.expect("a device");
        for flap in 0..8u8 {
            device.write_at(u64::from(flap), &[flap]).expect("written");
            assert_eq!(device.read_at(u64::from(flap), 1).expect("read"), [flap]);
            cable.link(End::B, &["down"]);
            // Its receivers are told of that even if it is up again when they look.
            cable.link(End::B, &["up"]);
            // A new initiator finds it, whichever receiver gets its hellos.
            let (_other_target, stranger) = options(links);
            let stranger =
                cable.at(End::A, || InitiatorThreads::new(stranger, &addresses).expect("threads"));
            let mode = OpenMode { shared: true, ..OpenMode::default() };
            let answer = stranger.initiator().request_open("disk", mode).wait(ANSWER_TIME_MAX);
            let kind = answer.expect_err("the first has it alone").kind();
            assert_eq!(kind, sawmill_device::ErrorKind::InUse, "flap {flap}, links {links}");
        }
    }
}
