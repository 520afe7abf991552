//! A driver that sends anything, valid packets and invalid ones, to the host of a device.
//!
//! Invariants: a driver's bytes can end only its own connection: afterwards the next driver
//! attaches and gets what the first did not answer. Each request is answered once.
//!
//! Not here: the decoders alone (`driver`); a second driver beside the first, and honest drivers
//! that die at any moment (`crates/driver/tests`).

use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::net::sockopt::{Timeout, set_socket_timeout};
use sawmill_device::{BlockDevice, Error, ErrorKind, Flags, Operation, Request};
use sawmill_driver::host::Host;
use sawmill_driver::protocol::{
    Answer, Command, CommandKind, Control, ControlFacts, ControlKind, PACKET_BYTES_MAX,
    PacketSocket,
};

use crate::nbd::no_thread_panicked;

/// A wait that ends this late is a hang.
const HANG: Duration = Duration::from_secs(60);
/// Each piece is a packet, and each connection a thread of the host.
const PIECES_MAX: usize = 32;
/// Small, so that many of them cost little.
const DEVICE_BYTES: u64 = 64 << 10;

/// A driver without logic.
struct RawDriver {
    control: PacketSocket,
    lanes: Vec<Arc<PacketSocket>>,
}

impl RawDriver {
    /// Attaches to a host. Panics if the host refuses.
    fn attach(path: &Path, hello: ControlFacts) -> Self {
        let control = PacketSocket::connect_within(path, Some(HANG)).expect("the host listens");
        let hello = Control::new(ControlKind::Hello, hello.with("protocol", 1));
        control.send(&hello.encode(), &[]).expect("the host listens");
        let (mut buffer, mut lanes) = (vec![0; PACKET_BYTES_MAX], Vec::new());
        loop {
            let packet = control.receive(&mut buffer).expect("a packet").expect("a packet");
            let message = Control::decode(packet.bytes).expect("a host's packets can be read");
            let mut files = packet.descriptors.into_iter();
            match message.kind {
                ControlKind::Attached => return RawDriver { control, lanes },
                ControlKind::Refused => panic!("a driver is refused: {:?}", message.facts),
                _ => {
                    while let (Some(socket), Some(_memory)) = (files.next(), files.next()) {
                        for direction in [Timeout::Send, Timeout::Recv] {
                            set_socket_timeout(&socket, direction, Some(HANG)).expect("a socket");
                        }
                        lanes.push(Arc::new(PacketSocket::from(socket)));
                    }
                }
            }
        }
    }

    /// Answers every command, on a thread for each lane.
    fn serve(&self) -> Vec<JoinHandle<()>> {
        let each = self.lanes.iter().map(|lane| {
            let lane = Arc::clone(lane);
            std::thread::spawn(move || {
                let mut buffer = vec![0; PACKET_BYTES_MAX];
                while let Ok(Some(packet)) = lane.receive(&mut buffer) {
                    let commands = Command::decode_all(packet.bytes).expect("a host's commands");
                    let commands =
                        commands.iter().filter(|command| command.kind != CommandKind::End);
                    let answers =
                        commands.map(|command| Answer { number: command.number, errno: 0 });
                    let answers: Vec<u8> = answers.flat_map(|answer| answer.encode()).collect();
                    if !answers.is_empty() && lane.send(&answers, &[]).is_err() {
                        return;
                    }
                }
            })
        });
        each.collect()
    }
}

/// A control packet whose kind is the first byte; the rest is its text.
fn control_packet(bytes: &[u8]) -> Vec<u8> {
    let (kind, text) = bytes.split_first().unwrap_or((&0, &[]));
    [&u32::from(kind % 12).to_le_bytes()[..], text].concat()
}

/// Sends the pieces of an input: a byte that chooses how, the length, then the bytes. Returns the
/// connections that were opened.
fn send_pieces(path: &Path, driver: &RawDriver, input: &[u8]) -> Vec<PacketSocket> {
    let (mut rest, mut connections) = (input, Vec::new());
    for _ in 0..PIECES_MAX {
        let Some(([how, length], behind)) = rest.split_first_chunk::<2>() else { break };
        let (body, behind) = behind.split_at(usize::from(*length).min(behind.len()));
        rest = behind;
        let (first, last) = (&driver.lanes[0], &driver.lanes[driver.lanes.len() - 1]);
        let answers = || -> Vec<u8> {
            let pairs = body.as_chunks::<2>().0.iter();
            let answer = |[number, errno]: &[u8; 2]| Answer {
                number: (*number).into(),
                errno: (*errno).into(),
            };
            pairs.flat_map(|pair| answer(pair).encode()).collect()
        };
        // The host may have closed the connection, which is its answer.
        let _ = match how & 7 {
            0 => driver.control.send(body, &[]),
            1 => driver.control.send(&control_packet(body), &[]),
            2 => first.send(body, &[]),
            3 => last.send(body, &[]),
            4 => first.send(&answers(), &[]),
            5 => last.send(&answers(), &[]),
            how => {
                let Ok(connection) = PacketSocket::connect_within(path, Some(HANG)) else {
                    continue;
                };
                let packet = if how == 6 { control_packet(body) } else { body.to_vec() };
                // The host may read this HELLO after that of the next driver, and replace that one.
                if packet.first() == Some(&(ControlKind::Hello as u8)) {
                    continue;
                }
                let sent = connection.send(&packet, &[]);
                connections.push(connection);
                sent
            }
        };
    }
    connections
}

/// Submits requests. Each sends its number when it is answered.
fn submit(device: &dyn BlockDevice) -> (usize, Receiver<usize>) {
    let requests = [
        (Operation::Write, 512),
        (Operation::Read, 4096),
        (Operation::Flush, 0),
        (Operation::Write, 4096),
        (Operation::Read, 512),
    ];
    let (sender, answered) = channel();
    for (number, (operation, length)) in requests.into_iter().enumerate() {
        let sender = sender.clone();
        let on_outcome = move |_, _| {
            let _ = sender.send(number);
        };
        let bytes = vec![0xc3; length];
        device.submit(Request::with_bytes(operation, 0, Flags::default(), bytes, on_outcome));
    }
    (requests.len(), answered)
}

/// The first byte chooses the mode of the device; the rest are pieces.
pub(crate) fn run(bytes: &[u8]) {
    let Some((choice, input)) = bytes.split_first() else { return };
    no_thread_panicked();
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("driver.sock");
    let mode = if choice & 1 == 0 { "plain" } else { "batch" };
    let options = ControlFacts::default().with("mode", mode).with("size", DEVICE_BYTES);
    let host = Host::start("disk", &path, options, Box::new(|_| ())).expect("it listens");
    let first = RawDriver::attach(&path, ControlFacts::default());
    let device = host.device().expect("a driver has declared it");
    let (count, answered) = submit(&*device);
    let connections = send_pieces(&path, &first, input);
    drop((first, connections));
    // The next driver answers what the first has not.
    let next = RawDriver::attach(&path, ControlFacts::default().with("replace", 1));
    let lanes = next.serve();
    let mut is_answered = vec![false; count];
    for _ in 0..count {
        let number = answered.recv_timeout(HANG).expect("each request is answered");
        assert!(!std::mem::replace(&mut is_answered[number], true), "a request is answered twice");
    }
    host.fail(&Error::new(ErrorKind::Closed, "the input is over"));
    host.close();
    for lane in lanes {
        lane.join().expect("a driver's lane");
    }
    assert!(answered.try_recv().is_err(), "a request is answered twice");
    no_thread_panicked();
}
