//! A target sends nothing more on a connection that it has ended, whatever happens to its devices.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Mutex};

use sawmill_device::{
    BlockDevice, Error, ErrorKind, Flags, Geometry, MemoryDevice, Operation, Outcome, Request,
};
use sawmill_link::Unpacker;
use sawmill_link::carrier::{Burst, Peer, Sender};
use sawmill_link::clock::SteadyClock;
use sawmill_link::initiator::{Initiator, InitiatorOptions, OpenMode};
use sawmill_link::session::unguessable;
use sawmill_link::target::{Arrival, Target, TargetOptions};

use crate::pair::{ANSWER_TIME_MAX, attach, free_addresses, key, listen, open};

/// One direction of a cable.
#[derive(Default)]
pub(crate) struct Cable(Mutex<VecDeque<Vec<u8>>>);

impl Sender for Cable {
    fn packet_bytes_max(&self, _to: &Peer) -> usize {
        1400
    }

    fn send(&self, _to: &Peer, burst: &Burst, from: usize) -> io::Result<usize> {
        let mut packets = self.0.lock().expect("no thread panics with it");
        packets.extend((from..burst.len()).map(|index| burst.packet(index).to_vec()));
        Ok(burst.len() - from)
    }
}

impl Cable {
    pub(crate) fn next(&self) -> Option<Vec<u8>> {
        self.0.lock().expect("no thread panics with it").pop_front()
    }
}

/// A device that answers nothing by itself.
struct HoldDevice(Geometry, Mutex<Vec<Request>>);

impl BlockDevice for HoldDevice {
    fn geometry(&self) -> Geometry {
        self.0
    }

    fn submit(&self, request: Request) {
        self.1.lock().expect("no thread panics with it").push(request);
    }
}

/// Submits a write. The result holds its outcome once it is answered.
fn write_of_ones(device: &dyn BlockDevice) -> Arc<Mutex<Option<Outcome>>> {
    let outcome_cell = Arc::new(Mutex::new(None));
    let cell = Arc::clone(&outcome_cell);
    let on_outcome =
        move |outcome, _| *cell.lock().expect("no thread panics with it") = Some(outcome);
    device.submit(Request::with_bytes(
        Operation::Write,
        0,
        Flags::default(),
        vec![1; 512],
        on_outcome,
    ));
    outcome_cell
}

#[test]
fn an_error_of_a_device_that_is_closed_behind_an_ended_connection_fails_no_request() {
    let (forward, backward) = (Arc::<Cable>::default(), Arc::<Cable>::default());
    let clock = Arc::new(SteadyClock);
    let device = Arc::new(HoldDevice(MemoryDevice::new(1 << 20).geometry(), Mutex::default()));
    let target = Target::new(TargetOptions::default(), key(), clock.clone(), unguessable());
    target.add("disk", Arc::new(Unpacker::new(device.clone())), None).expect("the first export");
    let initiator = Initiator::new(InitiatorOptions::default(), key(), 1, clock, unguessable());
    let answers: Arc<dyn Sender> = backward.clone();
    let carry = || {
        initiator.tick();
        while let Some(mut packet) = forward.next() {
            target.receive(
                Arrival { sender: &answers, waker: None, peer: &Peer::Stream },
                &mut packet,
            );
        }
        target.tick();
        while let Some(mut packet) = backward.next() {
            initiator.receive(&Peer::Stream, &mut packet);
        }
    };
    initiator.add_route(0, forward.clone(), Peer::Stream, None);
    let answer = initiator.request_open("disk", OpenMode::default());
    let open_answer = loop {
        carry();
        if let Some(open_answer) = answer.poll() {
            break open_answer.expect("it is there");
        }
    };
    let remote = initiator.opened("disk", OpenMode::default(), &open_answer).expect("a device");
    let outcome_cell = write_of_ones(&remote);
    let request = loop {
        carry();
        if let Some(request) = device.1.lock().expect("no thread panics with it").pop() {
            break request;
        }
    };
    target.close();
    // The message about the end is lost; then the device behind the connection is closed.
    while backward.next().is_some() {}
    request.fail(Error::new(ErrorKind::Closed, "the volume was closed"));
    while let Some(mut packet) = backward.next() {
        initiator.receive(&Peer::Stream, &mut packet);
    }
    assert!(
        outcome_cell.lock().expect("no thread panics with it").is_none(),
        "the next target is to be asked"
    );
}

#[test]
fn a_target_that_ends_lets_its_addresses_go_though_a_device_still_has_requests() {
    let addresses = free_addresses(&["udp", "tcp", "udp"]);
    let device = Arc::new(HoldDevice(MemoryDevice::new(1 << 20).geometry(), Mutex::default()));
    let listener = listen(Arc::clone(&device) as Arc<dyn BlockDevice>, &addresses, key());
    let attached = attach(&addresses, key(), InitiatorOptions::default());
    let remote = open(&attached);
    write_of_ones(&remote);
    let began = std::time::Instant::now();
    while device.1.lock().expect("no thread panics with it").is_empty() {
        assert!(began.elapsed() < ANSWER_TIME_MAX, "the device never has the write");
        std::thread::yield_now();
    }
    drop(listener);
    assert_eq!(device.1.lock().expect("no thread panics with it").len(), 1, "it keeps it");
    // Fails if the old target's sockets are still open.
    drop(listen(device, &addresses, key()));
}
