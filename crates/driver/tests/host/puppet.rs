//! A driver without logic: the test receives and sends every packet by hand.
#![expect(unreachable_pub, reason = "a module of a test program")]

use std::collections::VecDeque;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use rustix::net::sockopt::{Timeout, set_socket_timeout};
use sawmill_device::{BlockDevice, Flags, Operation, Outcome, Request};
use sawmill_driver::host::{Event, Host};
use sawmill_driver::protocol::{
    Answer, Command, CommandKind, Control, ControlFacts, ControlKind, PACKET_BYTES_MAX,
    PacketSocket,
};

/// Nothing here takes so long; a test that waits longer has failed.
pub const PATIENCE: Duration = Duration::from_secs(20);

pub fn facts(text: &str) -> ControlFacts {
    text.split_whitespace().fold(ControlFacts::default(), |facts, word| {
        let (name, value) = word.split_once('=').expect("name=value");
        facts.with(name, value)
    })
}

/// A host with a folder of its own, and its events.
pub struct Stage {
    pub host: Arc<Host>,
    pub events: Receiver<Event>,
    _folder: tempfile::TempDir,
}

impl Stage {
    pub fn new(options: &str) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let (sender, events) = channel();
        let sender = Box::new(move |event| drop(sender.send(event)));
        let host = Host::start("disk", &folder.path().join("sock"), facts(options), sender)
            .expect("it listens");
        Stage { host, events, _folder: folder }
    }

    pub fn device(&self) -> Arc<dyn BlockDevice> {
        self.host.device().expect("a driver came")
    }

    /// Waits for the next event that `select` picks, and returns its value.
    pub fn wait_for<T>(&self, select: impl Fn(&Event) -> Option<T>) -> T {
        loop {
            let event = self.events.recv_timeout(PATIENCE).expect("it is reported");
            if let Some(value) = select(&event) {
                return value;
            }
        }
    }

    /// Waits until a driver is gone. Returns whether it left in order.
    pub fn gone(&self) -> bool {
        self.wait_for(|event| match event {
            Event::Gone { in_order, .. } => Some(*in_order),
            _ => None,
        })
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        self.host.close();
    }
}

struct Lane {
    socket: PacketSocket,
    memory: File,
    commands: VecDeque<Command>,
}

pub struct Puppet {
    pub control: PacketSocket,
    pub welcome: ControlFacts,
    lanes: Vec<Lane>,
}

impl Puppet {
    /// Connects to a host. Returns the host's message if it refuses.
    pub fn connect(path: &Path, hello: &str) -> Result<Puppet, String> {
        let control = PacketSocket::connect(path).expect("a host listens");
        let hello = facts(&format!("protocol=1 {hello}"));
        control.send(&Control::new(ControlKind::Hello, hello).encode(), &[]).expect("it listens");
        let mut buffer = vec![0; PACKET_BYTES_MAX];
        let (mut welcome, mut lanes) = (None, Vec::new());
        loop {
            let packet = control.receive(&mut buffer).expect("a packet").ok_or("the host went")?;
            let mut files = packet.descriptors.into_iter();
            let message = Control::decode(packet.bytes).expect("sense");
            match message.kind {
                ControlKind::Welcome => welcome = Some(message.facts),
                ControlKind::Queue => {
                    while let (Some(socket), Some(memory)) = (files.next(), files.next()) {
                        let patience = Some(PATIENCE);
                        set_socket_timeout(&socket, Timeout::Recv, patience).expect("a socket");
                        let (socket, memory) = (PacketSocket::from(socket), File::from(memory));
                        lanes.push(Lane { socket, memory, commands: VecDeque::new() });
                    }
                }
                ControlKind::Attached => {
                    return Ok(Puppet { control, welcome: welcome.expect("before"), lanes });
                }
                ControlKind::Refused => {
                    return Err(message.facts.get("message").unwrap_or_default().to_owned());
                }
                other => panic!("{other:?} before ATTACHED"),
            }
        }
    }

    /// The next command of a lane.
    pub fn command(&mut self, lane: usize) -> Command {
        let lane = &mut self.lanes[lane];
        while lane.commands.is_empty() {
            let mut buffer = vec![0; PACKET_BYTES_MAX];
            let packet =
                lane.socket.receive(&mut buffer).expect("a packet").expect("the host is there");
            lane.commands.extend(Command::decode_all(packet.bytes).expect("sense"));
        }
        lane.commands.pop_front().expect("one came")
    }

    /// The next command, which must be of this kind.
    pub fn expect(&mut self, lane: usize, kind: CommandKind) -> Command {
        let command = self.command(lane);
        assert_eq!(command.kind, kind, "{command:?}");
        command
    }

    pub fn bytes(&self, lane: usize, command: &Command) -> Vec<u8> {
        let mut bytes = vec![0; command.length as usize];
        self.lanes[lane]
            .memory
            .read_exact_at(&mut bytes, command.offset)
            .expect("inside the memory");
        bytes
    }

    pub fn fill(&self, lane: usize, command: &Command, byte: u8) {
        let bytes = vec![byte; command.length as usize];
        self.lanes[lane].memory.write_all_at(&bytes, command.offset).expect("inside the memory");
    }

    pub fn answer(&self, lane: usize, number: u64, errno: i32) {
        self.lanes[lane]
            .socket
            .send(&Answer { number, errno }.encode(), &[])
            .expect("the host listens");
    }

    pub fn send_raw(&self, lane: usize, bytes: &[u8]) {
        self.lanes[lane].socket.send(bytes, &[]).expect("the host listens");
    }

    /// Closes one lane and nothing else.
    pub fn close(&self, lane: usize) {
        self.lanes[lane].socket.close_both_ways();
    }

    pub fn send(&self, kind: ControlKind, text: &str) {
        self.control
            .send(&Control::new(kind, facts(text)).encode(), &[])
            .expect("the host listens");
    }
}

/// The outcome of a request, once there is one.
pub struct PendingOutcome(Receiver<(Outcome, Vec<u8>)>);

impl PendingOutcome {
    pub fn wait(&self) -> (Outcome, Vec<u8>) {
        self.0.recv_timeout(PATIENCE).expect("it is answered")
    }

    pub fn is_open(&self) -> bool {
        matches!(self.0.try_recv(), Err(std::sync::mpsc::TryRecvError::Empty))
    }
}

pub fn submit(
    device: &dyn BlockDevice,
    operation: Operation,
    address: u64,
    bytes: Vec<u8>,
) -> PendingOutcome {
    submit_with(device, operation, address, bytes, Flags::default())
}

pub fn submit_with(
    device: &dyn BlockDevice,
    operation: Operation,
    address: u64,
    bytes: Vec<u8>,
    flags: Flags,
) -> PendingOutcome {
    let (sender, receiver) = channel();
    // A test that has failed no longer receives.
    let listen = move |outcome, bytes| drop(sender.send((outcome, bytes)));
    device.submit(Request::with_bytes(operation, address, flags, bytes, listen));
    PendingOutcome(receiver)
}
