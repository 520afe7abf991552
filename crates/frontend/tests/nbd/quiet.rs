//! A server that is held: quiet, resumed, let go, on trial, stopped.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use sawmill_device::{BlockDeviceExt, ErrorKind};
use sawmill_frontend::nbd::{Listen, NbdOptions, NbdServer};
use sawmill_frontend::{Door, QuietDoor, Stop};

use crate::client::{
    Client, FLUSH, LIST, READ, Style, TestServer, pattern, serve, serve_with, wait_until,
};
use crate::devices::HoldDevice;
use crate::hand_over::{PATIENCE, SIZE, export, handed, memory, options, replaced, take_over};

/// The wait for something that must not happen.
const NO_PATIENCE: Duration = Duration::from_millis(50);

#[test]
fn a_door_that_cannot_become_quiet_says_so_and_goes_on() {
    let device = Arc::new(HoldDevice::new(SIZE));
    let quick = memory();
    let served = serve_with(&[("disk", device.clone()), ("quick", quick)], |_| ());
    let mut stuck = served.client(Style::Simple);
    let mut client = served.raw();
    client.go("quick");
    let cookie = stuck.request(0, FLUSH, 0, 0);
    wait_until("the flush", || device.count() == 1);
    let error = served.server.quiesce(NO_PATIENCE).err().expect("the device does not answer");
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    let text = error.to_string();
    assert!(text.contains("1 requests are not answered") && text.contains("\"disk\""), "{text}");
    client.write_ok(0, b"as if nothing was");
    served.raw().go("quick");
    let another = stuck.request(0, READ, 0, 1);
    wait_until("the read behind the flush", || device.count() == 2);
    device.stop_holding();
    assert_eq!([stuck.answer().cookie, stuck.answer().cookie], [cookie, another]);
    drop(served.server.quiesce(PATIENCE).expect("now it can"));
}

#[test]
fn a_door_is_quiet_only_when_what_it_took_is_answered() {
    let device = Arc::new(HoldDevice::new(SIZE));
    let served = serve(device.clone());
    let mut client = served.client(Style::Simple);
    let cookies: Vec<u64> = (0..20).map(|at| client.request(0, READ, at * 512, 512)).collect();
    wait_until("the reads", || device.count() == 20);
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::scope(|threads| {
        threads.spawn(|| sender.send(served.server.quiesce(PATIENCE)));
        // Another client is not accepted once the door has begun to quiesce.
        wait_until("the door to begin", || {
            let stream = UnixStream::connect(&served.path).expect("there is a queue");
            stream.set_read_timeout(Some(NO_PATIENCE)).expect("a timeout");
            (&stream).read(&mut [0]).is_err()
        });
        assert!(receiver.try_recv().is_err(), "requests are in flight");
        device.stop_holding();
        drop(receiver.recv().expect("it ends").expect("it is quiet"));
    });
    let answers: Vec<u64> = cookies.iter().map(|_| client.answer().cookie).collect();
    assert_eq!(answers, cookies, "replies were sent while the door was quiet");
    let served = replaced(served, memory());
    assert_eq!(client.read_ok(0, 1), [0]);
    assert_eq!(served.server.counts().in_flight, 0);
}

#[test]
fn a_quiet_door_takes_nothing_and_goes_on_when_resumed() {
    let device = memory();
    let served = serve(device.clone());
    let mut client = served.client(Style::Structured);
    let mut idle = served.client(Style::Simple);
    client.write_ok(0, b"before");
    for round in 0..3u8 {
        drop(served.server.quiesce(PATIENCE).expect("it becomes quiet"));
        let quiet_door = served.server.quiesce(PATIENCE).expect("and stays so");
        let before = served.server.counts();
        let bytes = client.write_bytes(0, 100, &[round; 10]);
        client.send(&bytes);
        let path = served.path.clone();
        let newcomer = std::thread::spawn(move || {
            Client::hello(UnixStream::connect(path).expect("there is a queue"), 3).go("disk");
        });
        let pieces = quiet_door.hand_over().expect("a quiet door");
        assert_eq!(served.server.counts(), before, "nothing was taken");
        assert_eq!(pieces.len(), 3);
        drop(pieces);
        quiet_door.resume();
        assert_eq!(client.answer().error, 0);
        assert_eq!(idle.read_ok(100, 10), [round; 10]);
        newcomer.join().expect("it was accepted in the end");
        served.wait_for_connections(2);
    }
}

#[test]
fn a_door_that_is_not_quiet_is_neither_handed_over_nor_let_go() {
    let served = serve(memory());
    let mut client = served.client(Style::Simple);
    // Of two values for a door, one is stale as soon as the other has resumed it.
    let stale = || {
        let stale = served.server.quiesce(PATIENCE).expect("it becomes quiet");
        served.server.quiesce(PATIENCE).expect("it stays quiet").resume();
        stale
    };
    let refused = |quiet_door: &dyn QuietDoor| {
        let error = quiet_door.hand_over().expect_err("it is not quiet");
        assert_eq!(error.kind(), ErrorKind::Invalid);
        assert!(error.to_string().contains("not quiet"), "{error}");
    };
    let quiet_door = stale();
    refused(&*quiet_door);
    quiet_door.release();
    client.write_ok(0, b"it goes on");
    refused(&*stale());
    client.write_ok(0, b"and on");
}

#[test]
fn a_door_let_go_ends_nothing_for_clients_that_were_handed_over() {
    let device = memory();
    let served = serve(device.clone());
    let mut client = served.client(Style::Simple);
    let quiet_door = served.server.quiesce(PATIENCE).expect("it becomes quiet");
    let again = served.server.quiesce(PATIENCE).expect("it stays quiet");
    let pieces = handed(&*quiet_door);
    quiet_door.release();
    again.release();
    served.server.stop(Stop::Drained);
    assert_eq!(served.server.metrics().connections, 0);
    let TestServer { server, path, folder } = served;
    drop(server);
    assert!(path.exists(), "its socket is another's now");
    let stream = UnixStream::connect(&path).expect("a process listens");
    client.request(0, READ, 0, 5);
    let options = NbdOptions::new(Listen::Unix(path.clone()));
    let server =
        NbdServer::take_over(options, vec![export("disk", device)], pieces).expect("it goes on");
    assert_eq!(client.answer().data, [0; 5]);
    Client::hello(stream, 3).go("disk");
    server.stop(Stop::Drained);
    assert!(!path.exists(), "the next server removes it at the end");
    drop(folder);
}

/// Reads bytes until none arrive for a moment.
fn read_available(client: &mut Client, into: &mut Vec<u8>) {
    let patience = client.stream.read_timeout().expect("a socket");
    client.stream.set_read_timeout(Some(NO_PATIENCE)).expect("a timeout");
    let _ = client.stream.read_to_end(into);
    client.stream.set_read_timeout(patience).expect("a timeout");
}

#[test]
fn a_server_on_trial_leaves_everything_as_it_was() {
    let device = memory();
    device.write_at(0, &pattern(5, 16 << 20)).expect("in range");
    let served = serve(device.clone());
    let mut client = served.client(Style::Structured);
    let mut reader = served.client(Style::Simple);
    reader.request(0, READ, 0, 16 << 20);
    wait_until("the read is taken", || served.server.counts().reads == 1);
    let quiet_door = served.server.quiesce(PATIENCE).expect("it becomes quiet");
    // After all sent bytes are read there is room for the rest of the reply, which must not be
    // sent.
    let mut reply = Vec::new();
    read_available(&mut reader, &mut reply);
    assert!(!reply.is_empty() && reply.len() < 16 << 20);
    for ending in ["dropped", "stopped", "let go", "failed"] {
        let pieces = handed(&*quiet_door);
        let mut exports = vec![export("disk", device.clone())];
        if ending == "failed" {
            exports.push(export("disk", device.clone()));
        }
        let outcome = NbdServer::take_over_quiet(options(&served), exports, pieces);
        if let Ok((server, _)) = &outcome {
            drop(server.quiesce(PATIENCE).expect("it is"));
        }
        match (ending, outcome) {
            ("dropped", Ok((server, _))) => drop(server),
            ("stopped", Ok((server, _))) => server.stop(Stop::Drained),
            ("let go", Ok((_server, quiet_door))) => quiet_door.release(),
            ("failed", Err(error)) => assert_eq!(error.kind(), ErrorKind::Invalid),
            (_, outcome) => panic!("{ending}: {:?}", outcome.map(drop)),
        }
        assert!(served.path.exists());
    }
    let before = reply.len();
    read_available(&mut reader, &mut reply);
    assert_eq!(reply.len(), before, "a server on trial sends nothing");
    quiet_door.resume();
    client.write_ok(20 << 20, b"as before");
    reply.extend(reader.bytes(16 + (16 << 20) - before));
    assert!(reply[16..] == pattern(5, 16 << 20));
    drop(served.client(Style::Simple));
}

#[test]
fn a_client_in_its_handshake_is_no_obstacle() {
    let device = memory();
    let served = serve(device.clone());
    let mut staying = served.raw();
    let mut leaving = served.raw();
    let before = staying.option(LIST, b"");
    drop(served.server.quiesce(PATIENCE).expect("it becomes quiet"));
    assert_eq!(staying.option(LIST, b""), before, "it goes on meanwhile");
    staying.go("disk");
    let cookie = staying.request(0, READ, 0, 3);
    wait_until("it has its export", || {
        served.server.clients().iter().any(|client| client.export.is_some())
    });
    let quiet_door = served.server.quiesce(PATIENCE).expect("it is quiet");
    assert_eq!(served.server.counts().reads, 0, "its first request waits");
    let pieces = handed(&*quiet_door);
    let server = take_over(&served, device, pieces).expect("it goes on");
    quiet_door.release();
    assert_eq!(staying.answer().cookie, cookie);
    leaving.expect_closed();
    assert_eq!(server.metrics().connections, 1);
}

#[test]
fn a_client_at_any_byte_of_its_handshake_is_ended_and_may_come_again() {
    let device = memory();
    let mut served = serve(device.clone());
    let mut witness = served.client(Style::Simple);
    // The client's flags, then its choice of the export.
    let mut bytes = 3u32.to_be_bytes().to_vec();
    bytes.extend(b"IHAVEOPT");
    [7u32, 10, 4].iter().for_each(|field| bytes.extend(field.to_be_bytes()));
    bytes.extend(b"disk\0\0");
    for cut in [0, 1, 4, 5, 12, 19, 20, 23, bytes.len() - 1] {
        let mut stream = UnixStream::connect(&served.path).expect("a process listens");
        stream.read_exact(&mut [0; 18]).expect("a greeting");
        stream.write_all(&bytes[..cut]).expect("it is taken");
        served = replaced(served, device.clone());
        // Or reset, where the last bytes were on their way.
        assert_eq!(stream.read(&mut [0; 1]).unwrap_or(0), 0, "after {cut} bytes no answer comes");
        assert_eq!(served.server.clients().len(), 1, "after {cut} bytes it is no client");
        served.raw().go("disk");
        witness.write_ok(0, &[cut as u8; 10]);
        served.wait_for_connections(1);
    }
    assert_eq!(
        served.server.counts().protocol_violations,
        0,
        "to be cut short is no fault of theirs"
    );
}

#[test]
fn a_quiet_server_can_be_stopped_and_its_exports_removed() {
    let served = serve_with(&[("disk", memory()), ("other", memory())], |_| ());
    let mut client = served.client(Style::Simple);
    let mut other = served.raw();
    other.go("other");
    drop(served.server.quiesce(PATIENCE).expect("it becomes quiet"));
    served.server.remove_export("other").expect("it is there");
    other.expect_closed();
    served.server.stop(Stop::Drained);
    client.expect_closed();
    assert!(!served.path.exists());
    let error = served.server.quiesce(PATIENCE).err().expect("it is over");
    assert_eq!(error.kind(), ErrorKind::Closed);
    let served = serve(memory());
    let mut client = served.client(Style::Simple);
    drop(served.server.quiesce(PATIENCE).expect("it becomes quiet"));
    served.server.stop(Stop::Now);
    client.expect_closed();
}
