//! The server itself: its socket, its exports, its clients, its end.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;

use sawmill_device::{BlockDeviceExt, ErrorKind, MemoryDevice};
use sawmill_frontend::nbd::{Client as Connected, Export, Listen, NbdOptions, NbdServer};
use sawmill_frontend::{Door, Stop};

use crate::client::{FLUSH, READ, Style, serve, serve_with, wait_until};
use crate::devices::HoldDevice;

fn memory() -> Arc<MemoryDevice> {
    Arc::new(MemoryDevice::new(1 << 20))
}

fn start(path: &Path) -> sawmill_device::Result<NbdServer> {
    NbdServer::start(NbdOptions::new(Listen::Unix(path.into())))
}

/// The kind and text of the expected error.
fn refused(result: sawmill_device::Result<NbdServer>) -> (ErrorKind, String) {
    let error = result.err().expect("the server must not start");
    (error.kind(), error.to_string())
}

#[test]
fn the_socket_is_its_owners_alone_and_goes_with_the_server() {
    let served = serve(memory());
    let mode = std::fs::metadata(&served.path).expect("it is there").permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    served.server.stop(Stop::Drained);
    assert!(!served.path.exists());
    served.server.stop(Stop::Drained);
    served.server.stop(Stop::Now);
}

#[test]
fn a_stale_socket_is_replaced_and_a_live_one_respected() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("disk.sock");
    drop(UnixListener::bind(&path).expect("a listener that leaves its socket behind"));
    let server = start(&path).expect("a stale socket is replaced");
    let (kind, text) = refused(start(&path));
    assert_eq!(kind, ErrorKind::Unavailable);
    assert!(text.contains("another server listens") && text.contains("disk.sock"), "{text}");
    UnixStream::connect(&path).expect("the first server lives on");
    drop(server);
    assert!(!path.exists());
}

#[test]
fn a_path_that_is_no_socket_or_too_long_is_refused() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = folder.path().join("notes.txt");
    std::fs::write(&file, "precious").expect("a file");
    let (kind, text) = refused(start(&file));
    assert_eq!(kind, ErrorKind::Invalid);
    assert!(text.contains("not a socket"), "{text}");
    assert_eq!(std::fs::read_to_string(&file).expect("untouched"), "precious");
    let (kind, text) = refused(start(&folder.path().join("x".repeat(200))));
    assert_eq!(kind, ErrorKind::Invalid);
    assert!(text.contains("107"), "{text}");
    let (kind, _) = refused(start(&folder.path().join("no/such/folder")));
    assert_eq!(kind, ErrorKind::Unavailable);
}

#[test]
fn another_servers_socket_at_the_path_is_not_removed() {
    let served = serve(memory());
    std::fs::remove_file(&served.path).expect("the server's socket");
    let other = UnixListener::bind(&served.path).expect("another socket at the path");
    served.server.stop(Stop::Drained);
    assert!(served.path.exists());
    drop(other);
}

#[test]
fn tcp_is_loopback_only_unless_it_is_asked_for() {
    let tcp = |ip: std::net::IpAddr, insecure_listen| {
        let options = NbdOptions::new(Listen::Tcp(SocketAddr::new(ip, 0)));
        NbdServer::start(NbdOptions { insecure_listen, ..options })
    };
    let (kind, text) = refused(tcp(Ipv4Addr::UNSPECIFIED.into(), false));
    assert_eq!(kind, ErrorKind::Invalid);
    assert!(text.contains("allow it with --insecure-listen"), "{text}");
    assert_eq!(refused(tcp(Ipv6Addr::UNSPECIFIED.into(), false)).0, ErrorKind::Invalid);
    drop(tcp(Ipv4Addr::UNSPECIFIED.into(), true).expect("asked for"));
    let server = tcp(Ipv4Addr::LOCALHOST.into(), false).expect("loopback");
    let Listen::Tcp(address) = *server.address() else { panic!("not TCP") };
    assert_ne!(address.port(), 0);
    assert_eq!(server.uri("a disk"), format!("nbd://{address}/a%20disk"));
    let stream = TcpStream::connect(address).expect("it listens");
    wait_until("the client is known", || !server.clients().is_empty());
    let peer = stream.local_addr().expect("connected").to_string();
    assert_eq!(server.clients(), [Connected { peer, export: None }]);
    let Err(error) = NbdServer::start(NbdOptions::new(Listen::Tcp(address))) else {
        panic!("taken")
    };
    assert_eq!(error.kind(), ErrorKind::Unavailable);
}

#[test]
fn uris_name_socket_and_export() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("a socket&more");
    let server = start(&path).expect("it starts");
    let display = folder.path().display();
    assert_eq!(
        server.uri("d/1?"),
        format!("nbd+unix:///d/1%3F?socket={display}/a%20socket%26more")
    );
}

#[test]
fn exports_need_fresh_sound_names() {
    let served = serve(memory());
    let add = |name: &str| {
        let export = Export { name: name.into(), description: String::new(), device: memory() };
        served.server.add_export(export).map_err(|error| error.kind())
    };
    assert_eq!(add("disk"), Err(ErrorKind::Invalid));
    assert_eq!(add(&"x".repeat(4097)), Err(ErrorKind::Invalid));
    assert_eq!(add("nul\0"), Err(ErrorKind::Invalid));
    assert_eq!(add(&"x".repeat(4096)), Ok(()));
    assert_eq!(
        served.server.remove_export("none").map_err(|error| error.kind()),
        Err(ErrorKind::NotFound)
    );
}

#[test]
fn one_connection_more_than_allowed_is_closed_and_the_rest_live() {
    let served = serve_with(&[("disk", memory())], |options| options.connections_max = 2);
    let mut first = served.client(Style::Simple);
    let second = served.client(Style::Simple);
    // A client has the reply to its choice before its handshake has ended.
    wait_until("both are admitted", || {
        let metrics = served.server.metrics();
        (metrics.connections, metrics.handshakes) == (2, 0)
    });
    let mut third = UnixStream::connect(&served.path).expect("the kernel accepts");
    let mut rest = Vec::new();
    std::io::Read::read_to_end(&mut third, &mut rest).expect("closed, not reset");
    assert_eq!(rest, [0; 0]);
    first.write_ok(0, b"alive");
    drop(second);
    served.wait_for_connections(1);
    served.client(Style::Simple).write_ok(0, b"room again");
    let metrics = served.server.metrics();
    assert_eq!((metrics.connections_total, metrics.connections_refused), (4, 1));
    let none = NbdOptions {
        connections_max: 0,
        ..NbdOptions::new(Listen::Unix(served.folder.path().join("x")))
    };
    assert_eq!(refused(NbdServer::start(none)).0, ErrorKind::Invalid);
}

#[test]
fn clients_and_metrics_report_the_connections_and_their_requests() {
    let served = serve(memory());
    let mut client = served.client(Style::Simple);
    client.write_ok(0, &[1; 1000]);
    client.read_ok(0, 500);
    assert_eq!(client.call(0, READ, 1 << 20, 1).error, 22);
    let peer = format!("process {} of user", std::process::id());
    let clients = served.server.clients();
    assert_eq!(clients.len(), 1);
    assert!(clients[0].peer.starts_with(&peer), "{}", clients[0].peer);
    assert_eq!(clients[0].export.as_deref(), Some("disk"));
    let before = served.server.metrics();
    assert_eq!(before.bytes_in, 3 * 28 + 1000);
    wait_until("the last send is counted", || served.server.metrics().bytes_out == 3 * 16 + 500);
    assert_eq!((before.connections, before.errors, before.requests.read), (1, 1, 2));
    drop(client);
    served.wait_for_connections(0);
    let after = served.server.metrics();
    assert_eq!(
        (after.bytes_in, after.requests, after.in_flight),
        (before.bytes_in, before.requests, 0)
    );
    assert_eq!(after.connections_total, 1);
}

#[test]
fn stop_answers_what_is_in_flight_and_takes_no_more() {
    let device = Arc::new(HoldDevice::new(1 << 20));
    let served = serve(device.clone());
    let mut busy = served.client(Style::Structured);
    let mut idle = served.client(Style::Simple);
    let mut haggling = served.raw();
    let bytes = busy.write_bytes(0, 7, b"the last write");
    busy.send(&bytes);
    wait_until("the write at the device", || device.count() == 1);
    std::thread::scope(|scope| {
        let stopping = scope.spawn(|| served.server.stop(Stop::Drained));
        idle.expect_closed();
        haggling.expect_closed();
        assert!(!stopping.is_finished(), "a request is in flight");
        device.stop_holding();
        assert_eq!(busy.answer().error, 0);
        busy.expect_closed();
    });
    assert_eq!(device.inner().read_at(7, 14).expect("in range"), b"the last write");
    assert!(UnixStream::connect(&served.path).is_err());
    assert_eq!(served.server.clients(), []);
}

#[test]
fn stop_now_does_not_wait_for_the_device() {
    let device = Arc::new(HoldDevice::new(1 << 20));
    let served = serve(device.clone());
    let mut client = served.client(Style::Structured);
    client.request(0, FLUSH, 0, 0);
    wait_until("the flush at the device", || device.count() == 1);
    served.server.stop(Stop::Now);
    client.expect_closed();
    device.stop_holding();
}

#[test]
fn a_removed_export_loses_its_clients_and_is_let_go_of() {
    let (kept, gone) = (memory(), memory());
    let served = serve_with(&[("disk", kept), ("gone", gone.clone())], |_| ());
    let mut stays = served.client(Style::Simple);
    let mut leaves = served.raw();
    leaves.go("gone");
    leaves.write_ok(0, b"answered");
    served.server.remove_export("gone").expect("it is there");
    assert_eq!(Arc::strong_count(&gone), 1, "nothing holds the device any more");
    leaves.expect_closed();
    stays.write_ok(0, b"alive");
    let export = Export { name: "gone".into(), description: String::new(), device: gone };
    served.server.add_export(export).expect("the name is free again");
}
