//! A driver for which the host has no threads. The test runs once more in a process of its own,
//! because the limit that keeps threads from starting is that of a process.

use std::path::Path;
use std::process::Command;
use std::sync::mpsc::channel;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use sawmill_driver::host::{Event, Host};
use sawmill_driver::protocol::{
    Control, ControlFacts, ControlKind, PACKET_BYTES_MAX, PacketSocket,
};

/// Set in the process that has the limit.
const INNER: &str = "SAWMILL_TEST_NO_THREADS";
/// The stack of each thread there. What is left of the address space when no further one fits is
/// enough for everything else.
const STACK_BYTES: u64 = 512 << 20;
/// Room for the threads of the host, and not for those of sixteen queues.
const ADDRESS_SPACE_BYTES: u64 = 10 * STACK_BYTES;

#[test]
fn a_driver_without_threads_gets_an_error_and_the_next_one_serves() {
    if std::env::var_os(INNER).is_some() {
        return refuse_the_first_and_serve_the_second();
    }
    let program = std::env::current_exe().expect("a program");
    let inner = Command::new(program)
        .env(INNER, "1")
        .env("RUST_MIN_STACK", STACK_BYTES.to_string())
        .arg("--nocapture")
        .output()
        .expect("it starts");
    let output = String::from_utf8_lossy(&inner.stderr);
    assert!(inner.status.success(), "{}: {output}", inner.status);
}

/// The packets until the host has decided, the last of which is its decision.
fn connect(path: &Path, hello: ControlFacts) -> (PacketSocket, Vec<Control>) {
    let control = PacketSocket::connect(path).expect("it listens");
    let hello = Control::new(ControlKind::Hello, hello.with("protocol", 1));
    control.send(&hello.encode(), &[]).expect("it is there");
    let (mut buffer, mut messages) = (vec![0; PACKET_BYTES_MAX], Vec::new());
    loop {
        let packet = control.receive(&mut buffer).expect("a packet").expect("it does not close");
        let message = Control::decode(packet.bytes).expect("sound");
        let is_last = matches!(message.kind, ControlKind::Attached | ControlKind::Refused);
        messages.push(message);
        if is_last {
            return (control, messages);
        }
    }
}

fn refuse_the_first_and_serve_the_second() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("sock");
    let (sender, receiver) = channel();
    let facts = ControlFacts::default().with("hw_queues", 16).with("request_bytes_max", 4096);
    let host = Host::start("disk", &path, facts, Box::new(move |event| drop(sender.send(event))))
        .expect("it listens");

    let unlimited = getrlimit(Resource::As);
    let limit = Rlimit { current: Some(ADDRESS_SPACE_BYTES), ..unlimited };
    setrlimit(Resource::As, limit).expect("a limit");
    let (control, messages) = connect(&path, ControlFacts::default().with("size", 1 << 20));
    setrlimit(Resource::As, unlimited).expect("no limit");
    let refusal = messages.last().expect("a decision");
    assert_eq!(refusal.kind, ControlKind::Refused);
    let why = refusal.facts.get("message").unwrap_or_default();
    assert!(why.contains("cannot start a thread for a driver"), "{why}");
    let mut buffer = vec![0; PACKET_BYTES_MAX];
    assert!(control.receive(&mut buffer).expect("no error").is_none(), "the connection ends");
    let end_event = receiver.recv().expect("it is reported");
    assert!(matches!(end_event, Event::Gone { in_order: false, .. }), "{end_event:?}");
    assert_eq!(host.driver(), None);

    let (_control, messages) = connect(&path, ControlFacts::default());
    assert_eq!(messages[0].facts.get("generation"), Some("1"), "the other one never served");
    assert_eq!(messages.last().map(|message| message.kind), Some(ControlKind::Attached));
    let next_event = receiver.recv().expect("it is reported");
    assert!(matches!(next_event, Event::Attached { generation: 1, .. }), "{next_event:?}");
    assert!(matches!(receiver.recv(), Ok(Event::Declared)), "the doors can be opened");
    host.close();
}
