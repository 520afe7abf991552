//! A server that replaces another one; the clients must not notice.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use sawmill_device::layer::ReadOnly;
use sawmill_device::{BlockDevice, BlockDeviceExt, ErrorKind, MemoryDevice, Result};
use sawmill_frontend::nbd::{Export, Listen, NbdOptions, NbdServer};
use sawmill_frontend::{Door, DoorCounts, DoorPiece, QuietDoor, Stop, pack, passing, unpack};

use crate::client::{
    BLOCK_STATUS, Client, DISCONNECT, FLUSH, PAYLOAD_LEN, READ, STYLES, Style, TRIM, TestServer,
    WRITE, pattern, serve, serve_with, wait_until,
};
use crate::devices::ThreadDevice;

pub(crate) const SIZE: u64 = 64 << 20;
/// Longer than any test waits.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) fn memory() -> Arc<MemoryDevice> {
    Arc::new(MemoryDevice::new(SIZE))
}

pub(crate) fn export(name: &str, device: Arc<dyn BlockDevice>) -> Export {
    Export { name: name.into(), description: String::new(), device }
}

/// The pieces of a quiet server, as another process has them.
pub(crate) fn handed(quiet_door: &dyn QuietDoor) -> Vec<DoorPiece> {
    let pieces = quiet_door.hand_over().expect("a quiet door");
    let (near, far) = UnixStream::pair().expect("a pair of sockets");
    std::thread::scope(|threads| {
        threads.spawn(|| {
            let (bytes, descriptors) = pack(&pieces);
            passing::send(&near, &bytes, &descriptors).expect("it is taken");
        });
        let (bytes, descriptors) = passing::receive(&far, 1 << 30, 1 << 10).expect("it comes");
        unpack(&bytes, descriptors).expect("it is a parcel")
    })
}

pub(crate) fn options(served: &TestServer) -> NbdOptions {
    NbdOptions::new(Listen::Unix(served.path.clone()))
}

pub(crate) fn take_over(
    served: &TestServer,
    device: Arc<dyn BlockDevice>,
    pieces: Vec<DoorPiece>,
) -> Result<NbdServer> {
    NbdServer::take_over(options(served), vec![export("disk", device)], pieces)
}

/// Replaces this server, which is gone then, by another one.
pub(crate) fn replaced(served: TestServer, device: Arc<dyn BlockDevice>) -> TestServer {
    let quiet_door = served.server.quiesce(PATIENCE).expect("it becomes quiet");
    let pieces = handed(&*quiet_door);
    let server = take_over(&served, device, pieces).expect("it goes on");
    quiet_door.release();
    let TestServer { server: old, path, folder } = served;
    drop(old);
    TestServer { server, path, folder }
}

/// Waits until the server has received this many bytes of requests, in all.
fn wait_for_bytes(served: &TestServer, count: u64) {
    wait_until(&format!("{count} bytes"), || served.server.metrics().bytes_in == count);
}

fn bytes_in(served: &TestServer) -> u64 {
    served.server.metrics().bytes_in
}

#[test]
fn clients_of_every_style_go_on_after_a_hand_over() {
    let device = memory();
    let mut served = serve(device.clone());
    let mut clients: Vec<Client> = STYLES.iter().map(|style| served.client(*style)).collect();
    for round in 0..5u64 {
        for (place, client) in clients.iter_mut().enumerate() {
            let (offset, data) = (place as u64 * 4096 + round, pattern(round, 500));
            client.write_ok(offset, &data);
        }
        served = replaced(served, device.clone());
        for (place, client) in clients.iter_mut().enumerate() {
            assert_eq!(client.read_ok(place as u64 * 4096 + round, 500), pattern(round, 500));
            assert_eq!(client.call(0, FLUSH, 0, 0).error, 0);
            if client.style != Style::Simple {
                assert_eq!(client.call(0, BLOCK_STATUS, 0, 4096).error, 0);
            }
        }
    }
    assert_eq!(served.server.clients().len(), 3);
    assert!(served.server.clients().iter().all(|client| client.export.as_deref() == Some("disk")));
}

#[test]
fn requests_in_flight_are_answered_once_across_hand_overs_under_load() {
    let device: Arc<dyn BlockDevice> = Arc::new(ThreadDevice::new(SIZE));
    let first = serve(device.clone());
    let clients: Vec<Client> =
        [Style::Simple, Style::Structured, Style::Extended, Style::Structured]
            .map(|style| first.client(style))
            .into();
    let done = std::sync::atomic::AtomicUsize::new(0);
    let served = std::thread::scope(|threads| {
        let mut served = first;
        for (place, mut client) in clients.into_iter().enumerate() {
            let done = &done;
            threads.spawn(move || {
                let area = place as u64 * (8 << 20);
                for round in 0..150u64 {
                    let mut cookies = std::collections::BTreeSet::new();
                    let mut bytes = Vec::new();
                    for request in 0..32 {
                        bytes.extend(client.write_bytes(
                            0,
                            area + request * 8192,
                            &pattern(round, 8192),
                        ));
                        cookies.insert(client.last_cookie());
                    }
                    client.send(&bytes);
                    for _ in 0..32 {
                        let answer = client.answer();
                        assert_eq!(answer.error, 0, "{}", answer.text);
                        assert!(cookies.remove(&answer.cookie), "answered twice, or never asked");
                    }
                    assert_eq!(client.read_ok(area + 31 * 8192, 8192), pattern(round, 8192));
                }
                done.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            });
        }
        let mut count = 0;
        while done.load(std::sync::atomic::Ordering::Relaxed) < 4 {
            served = replaced(served, device.clone());
            count += 1;
        }
        assert!(count > 3, "{count} hand-overs are no test");
        served
    });
    let counts = served.server.counts();
    assert_eq!((counts.writes, counts.reads, counts.in_flight), (4 * 150 * 32, 4 * 150, 0));
    assert_eq!(counts.connections_total, 4);
}

#[test]
fn a_request_cut_at_any_byte_goes_on_in_the_next_server() {
    let device = memory();
    let mut served = serve(device.clone());
    for style in STYLES {
        let mut client = served.client(style);
        for cut in [0, 1, 4, 27, 28, 31, 32, 33, 700, 1031] {
            let data = pattern(cut as u64, 1000);
            let bytes = client.write_bytes(0, 77, &data);
            let cut = cut.min(bytes.len() - 1);
            let before = bytes_in(&served);
            client.send(&bytes[..cut]);
            wait_for_bytes(&served, before + cut as u64);
            served = replaced(served, device.clone());
            client.send(&bytes[cut..]);
            assert_eq!(client.answer().error, 0);
            assert_eq!(device.read_at(77, 1000).expect("in range"), data);
        }
    }
}

#[test]
fn the_payload_of_a_large_write_comes_in_three_servers() {
    let device = memory();
    let mut served = serve(device.clone());
    for style in STYLES {
        let mut client = served.client(style);
        let data = pattern(9, 20 << 20);
        let bytes = client.write_bytes(0, 12345, &data);
        let mut sent_bytes = 0;
        for cut in [300_000, 7_000_001, bytes.len()] {
            let before = bytes_in(&served);
            client.send(&bytes[sent_bytes..cut]);
            if cut < bytes.len() {
                wait_for_bytes(&served, before + (cut - sent_bytes) as u64);
                served = replaced(served, device.clone());
            }
            sent_bytes = cut;
        }
        assert_eq!(client.answer().error, 0);
        assert!(device.read_at(12345, data.len()).expect("in range") == data);
        assert_eq!(client.call(0, FLUSH, 0, 0).error, 0);
    }
    assert_eq!(served.server.counts().writes, 3, "each was counted once");
}

#[test]
fn a_refused_payload_half_dropped_is_refused_by_the_next_server() {
    let device = memory();
    let mut served = serve(device.clone());
    for style in STYLES {
        let mut client = served.client(style);
        let flags = if style == Style::Extended { PAYLOAD_LEN } else { 0 };
        let length: usize = (32 << 20) + 1;
        let before = bytes_in(&served);
        let header = client.header(flags, WRITE, 0, length as u64);
        client.send(&header);
        client.send(&vec![1; 5_000_000]);
        wait_for_bytes(&served, before + 5_000_000 + header.len() as u64);
        served = replaced(served, device.clone());
        client.send(&vec![1; length - 5_000_000]);
        let answer = client.answer();
        assert_eq!((answer.error, answer.cookie), (22, client.last_cookie()));
        assert!(
            style == Style::Simple || answer.text.contains("longer than the limit"),
            "{}",
            answer.text
        );
        client.write_ok(9, b"and on");
    }
    assert_eq!(served.server.counts().errors, 3);
    assert_eq!(device.read_at(0, 16).expect("in range"), b"\0\0\0\0\0\0\0\0\0and on\0");
}

#[test]
fn a_client_that_does_not_read_its_replies_stops_no_hand_over_and_gets_all_of_them() {
    let device = memory();
    let data = pattern(3, 16 << 20);
    device.write_at(0, &data).expect("in range");
    let mut served = serve(device.clone());
    let mut bystander = served.client(Style::Simple);
    let mut client = served.client(Style::Structured);
    let cookies: Vec<u64> =
        (0..16).map(|mib| client.request(0, READ, mib << 20, 1 << 20)).collect();
    wait_until("the reads are taken", || served.server.counts().reads == 16);
    for _ in 0..3 {
        served = replaced(served, device.clone());
        bystander.write_ok(SIZE - 5, b"alive");
    }
    for (mib, cookie) in cookies.into_iter().enumerate() {
        let answer = client.answer();
        assert_eq!((answer.cookie, answer.error), (cookie, 0));
        assert!(answer.data == data[mib << 20..][..1 << 20]);
    }
    assert_eq!(client.read_ok(SIZE - 5, 5), b"alive");
}

#[test]
fn a_client_that_left_is_seen_off_by_the_next_server() {
    let device = memory();
    let served = serve(device.clone());
    let mut polite = served.client(Style::Simple);
    let rude = served.client(Style::Simple);
    let mut torn = served.client(Style::Simple);
    let quiet_door = served.server.quiesce(PATIENCE).expect("it becomes quiet");
    polite.request(0, READ, 0, 9);
    polite.request(0, DISCONNECT, 0, 0);
    rude.stream.shutdown(std::net::Shutdown::Both).expect("connected");
    torn.send(b"half a request");
    drop(torn);
    let pieces = handed(&*quiet_door);
    quiet_door.release();
    let server = take_over(&served, device, pieces).expect("it goes on");
    assert_eq!(polite.answer().data, [0; 9]);
    polite.expect_closed();
    wait_until("all have left", || server.metrics().connections == 0);
}

#[test]
fn a_client_that_says_goodbye_and_does_not_read_goes_along() {
    let device = memory();
    device.write_at(0, &pattern(5, 16 << 20)).expect("in range");
    let served = serve(device.clone());
    let mut client = served.client(Style::Simple);
    client.request(0, READ, 0, 16 << 20);
    client.request(0, DISCONNECT, 0, 0);
    wait_until("the read is taken", || served.server.counts().reads == 1);
    let served = replaced(served, device);
    assert!(client.answer().data == pattern(5, 16 << 20));
    client.expect_closed();
    served.wait_for_connections(0);
}

#[test]
fn a_connection_whose_export_is_gone_or_has_changed_is_given_up() {
    let small: Arc<dyn BlockDevice> = Arc::new(MemoryDevice::new(SIZE - 1));
    let read_only: Arc<dyn BlockDevice> = Arc::new(ReadOnly::new(MemoryDevice::new(SIZE)));
    for (name, device) in
        [("other", memory() as Arc<dyn BlockDevice>), ("disk", small), ("disk", read_only)]
    {
        let served = serve(memory());
        let mut client = served.client(Style::Structured);
        let quiet_door = served.server.quiesce(PATIENCE).expect("it becomes quiet");
        let pieces = handed(&*quiet_door);
        let server = NbdServer::take_over(options(&served), vec![export(name, device)], pieces);
        let server = server.expect("the listener goes on");
        quiet_door.release();
        client.expect_closed();
        assert_eq!(server.metrics().connections, 0);
        let mut client = served.raw();
        client.go(name);
        assert_eq!(client.read_ok(0, 3), [0; 3]);
    }
}

#[test]
fn a_disk_that_has_grown_is_shown_to_old_clients_as_it_was() {
    let served = serve(memory());
    let mut client = served.client(Style::Structured);
    let served = replaced(served, Arc::new(MemoryDevice::new(2 * SIZE)));
    assert_eq!(client.call(0, READ, SIZE - 1, 2).error, 22);
    assert_eq!(client.read_ok(SIZE - 2, 2), [0; 2]);
    let mut fresh = served.client(Style::Structured);
    assert_eq!(fresh.read_ok(SIZE - 1, 2), [0; 2]);
}

#[test]
fn pieces_that_cannot_be_are_refused_by_the_name_of_the_fact() {
    let device = memory();
    let served = serve(device.clone());
    let mut client = served.client(Style::Structured);
    let quiet_door = served.server.quiesce(PATIENCE).expect("it becomes quiet");
    let refused = |what: &str, change: &dyn Fn(&mut Vec<DoorPiece>)| {
        let mut pieces = handed(&*quiet_door);
        change(&mut pieces);
        let error = take_over(&served, device.clone(), pieces).err().expect("it cannot be");
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        assert!(error.to_string().contains(what), "{what}: {error}");
    };
    let listener = ["transport", "address"];
    let connection = [
        "export",
        "peer",
        "style",
        "block_status",
        "size_bytes",
        "flags",
        "request_bytes_max",
        "unsent_bytes",
    ];
    let facts = listener.map(|name| (0, name)).into_iter().chain(connection.map(|name| (1, name)));
    for (piece, name) in facts {
        refused(&format!("no fact {name:?}"), &|pieces| drop(pieces[piece].facts.remove(name)));
        if !["address", "export", "peer"].contains(&name) {
            refused(&format!("the fact {name:?}"), &|pieces| {
                pieces[piece].facts.insert(name.into(), "18446744073709551616".into());
            });
        }
    }
    for name in ["refused_bytes", "inode", "reads"] {
        refused(&format!("{name:?}"), &|pieces| {
            let piece = usize::from(name == "refused_bytes");
            pieces[piece].facts.insert(name.into(), "many".into());
            pieces[piece].facts.insert("refused_errno".into(), "5".into());
        });
    }
    refused("the listener is missing", &|pieces| drop(pieces.remove(0)));
    refused("unknown piece \"queue\"", &|pieces| pieces[1].what = "queue".into());
    refused("second or unknown piece \"listener\"", &|pieces| pieces[1].what = "listener".into());
    refused("exactly one descriptor", &|pieces| drop(pieces[1].descriptors.pop()));
    refused("not a stream socket", &|pieces| {
        pieces[1].descriptors = vec![std::fs::File::open("/dev/null").expect("it is there").into()];
    });
    refused("does not listen", &|pieces| {
        let (near, _far) = UnixStream::pair().expect("a pair of sockets");
        pieces[0].descriptors = vec![near.as_fd().try_clone_to_owned().expect("a duplicate")];
    });
    refused("allow it with --insecure-listen", &|pieces| {
        pieces[0].facts.insert("transport".into(), "tcp".into());
        pieces[0].facts.insert("address".into(), "192.0.2.1:10809".into());
    });
    quiet_door.resume();
    client.write_ok(0, b"nothing has happened");
}

#[test]
fn facts_of_a_later_version_are_no_obstacle() {
    let device = memory();
    let served = serve(device.clone());
    let mut client = served.client(Style::Simple);
    let quiet_door = served.server.quiesce(PATIENCE).expect("it becomes quiet");
    let pieces =
        handed(&*quiet_door).into_iter().map(|piece| piece.with("of a later version", "yes"));
    let server = take_over(&served, device, pieces.collect()).expect("it goes on");
    quiet_door.release();
    client.write_ok(0, b"on");
    server.stop(Stop::Drained);
}

#[test]
fn a_connection_over_tcp_goes_along_and_keeps_its_peer() {
    let address = std::net::SocketAddr::from((std::net::Ipv4Addr::LOCALHOST, 0));
    let served = serve_with(&[("disk", memory())], |options| options.listen = Listen::Tcp(address));
    let Listen::Tcp(address) = *served.server.address() else { panic!("not TCP") };
    let stream = std::net::TcpStream::connect(address).expect("it listens");
    wait_until("the client is known", || served.server.clients().len() == 1);
    let mut client = Client::hello(UnixStream::from(OwnedFd::from(stream)), 3);
    client.go("disk");
    client.write_ok(0, b"first");
    let peers = served.server.clients();
    let served = replaced(served, memory());
    assert_eq!(served.server.address(), &Listen::Tcp(address));
    client.write_ok(0, b"second");
    assert_eq!(served.server.clients(), peers);
    drop(std::net::TcpStream::connect(address).expect("it listens"));
}

#[test]
fn counts_are_those_of_every_door_and_go_on() {
    let device = memory();
    let served = serve(device.clone());
    let mut client = served.client(Style::Structured);
    client.write_ok(0, &[7; 1000]);
    client.write_ok(0, &[7; 300_000]);
    client.read_ok(0, 77);
    assert_eq!(client.call(0, FLUSH, 0, 0).error, 0);
    assert_eq!(client.call(0, TRIM, 0, 512).error, 0);
    assert_eq!(client.call(0, BLOCK_STATUS, 0, 512).error, 0);
    assert_eq!(client.call(0, READ, SIZE, 1).error, 22);
    let expected = DoorCounts {
        connections: 1,
        connections_total: 1,
        reads: 2,
        writes: 2,
        flushes: 1,
        discards: 1,
        others: 1,
        bytes_in: 301_000,
        bytes_out: 77,
        errors: 1,
        ..DoorCounts::default()
    };
    assert_eq!(served.server.counts(), expected);
    let door: &dyn Door = &served.server;
    assert_eq!((door.kind(), door.address()), ("nbd", served.path.display().to_string()));
    let served = replaced(served, device);
    assert_eq!(served.server.counts(), expected);
    client.read_ok(0, 3);
    let expected = DoorCounts { reads: 3, bytes_out: 80, ..expected };
    assert_eq!(served.server.counts(), expected);
}

#[test]
fn nbdcopy_does_not_notice_hand_overs() {
    let data = pattern(4, 8 << 20);
    let device: Arc<dyn BlockDevice> = Arc::new(ThreadDevice::new(data.len() as u64));
    let mut served = serve(device.clone());
    let file = served.folder.path().join("disk.raw");
    std::fs::write(&file, &data).expect("written");
    let uri = served.server.uri("disk");
    let mut count = 0;
    for arguments in [[file.as_os_str(), uri.as_ref()], [uri.as_ref(), "null:".as_ref()]] {
        let mut copy = std::process::Command::new("nbdcopy");
        // Small requests, so that it takes a while.
        copy.args(["--connections=1", "--request-size=4096", "--flush"]).args(arguments);
        let mut copy = copy.spawn().expect("nbdcopy of the package libnbd-bin");
        let mut ended = || copy.try_wait().expect("it is our child");
        let chosen = |served: &TestServer| {
            served.server.clients().iter().any(|client| client.export.is_some())
        };
        wait_until("the client", || ended().is_some() || chosen(&served));
        let status = loop {
            match ended() {
                Some(status) => break status,
                None => served = replaced(served, device.clone()),
            }
            count += 1;
        };
        assert!(status.success(), "{arguments:?}: {status}");
    }
    assert!(count > 1, "{count} hand-overs are no test");
    let mut client = served.client(Style::Simple);
    assert!(client.read_ok(0, data.len() as u64) == data);
    let metrics = served.server.metrics();
    assert_eq!((metrics.errors, metrics.protocol_violations), (0, 0));
}
