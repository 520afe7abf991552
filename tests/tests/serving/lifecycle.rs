//! The life of a server: ready and said so, several volumes and several doors' worth of clients, an
//! orderly end that stores everything, and a hasty one that loses nothing.

use std::os::unix::net::UnixDatagram;

use rustix::process::Signal;
use sawmill_testkit::Dice;
use sawmill_tests::load::{Load, Mix};
use sawmill_tests::nbd::{Client, Command, Style, flag, list};
use sawmill_tests::on_each_store;
use sawmill_tests::stamp::check_nothing_accepted_lost;
use sawmill_tests::store::{self, StoreUnderTest};
use sawmill_tests::test_bed::TestBed;

on_each_store!(
    an_orderly_stop_stores_everything,
    several_volumes_are_served_by_one_process,
    several_connections_see_one_disk,
    every_dialect_of_nbd_reads_and_writes_the_same_disk,
);

const VOLUME_BYTES: u64 = 8 << 20;

fn an_orderly_stop_stores_everything(store: &StoreUnderTest) {
    let bed = TestBed::new(store);
    bed.create("disk", "8M", &["--segment-bytes", "1M"]);
    let server = bed.serve("disk").start();
    let mut load = Load::new(VOLUME_BYTES, Dice::seeded("serving"), Mix::default());
    let clients = [server.connect(), server.connect()];
    load.run(&clients, 800);
    // Requests in flight at the signal are answered or cut off, but what was answered is there.
    load.drive(&clients, 200, || server.signal(Signal::TERM));
    let ended = server.finished();
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert!(ended.stdout.contains(r#""event":"stopped""#), "{}", ended.stdout);
    let left = std::fs::read_dir(bed.memory()).expect("the folder in memory").count();
    assert_eq!(left, 0, "nothing stays behind in memory after an orderly stop");
    let elsewhere = bed.neighbor();
    let server = elsewhere.serve("disk").start();
    let image = server.connect().read_all().expect("readable");
    check_nothing_accepted_lost(&load.log, &image)
        .unwrap_or_else(|violation| panic!("{violation}"));
}

fn several_volumes_are_served_by_one_process(store: &StoreUnderTest) {
    let bed = TestBed::new(store);
    for (name, size) in [("oak", "8M"), ("ash", "16M"), ("elm", "4M")] {
        bed.create(name, size, &[]);
    }
    let server = bed.serve("oak").and("ash").and("elm").start();
    let mut names = list(&server.uri()).expect("exports are listed");
    names.sort();
    assert_eq!(names, ["ash", "elm", "oak"]);
    let clients: Vec<Client> = (0..3)
        .map(|n| Client::connect(&server.uri_of(n), Style::Structured).expect("connects"))
        .collect();
    let mut sizes: Vec<u64> =
        clients.iter().map(|client| client.export().size_bytes >> 20).collect();
    sizes.sort_unstable();
    assert_eq!(sizes, [4, 8, 16]);
    for (n, client) in clients.iter().enumerate() {
        client.write(4096, &[n as u8 + 1; 512]).expect("accepted");
    }
    for (n, client) in clients.iter().enumerate() {
        assert_eq!(client.read(4096, 512), Ok(vec![n as u8 + 1; 512]), "volumes are mixed up");
    }
    let _ = server.stop().ok();
}

fn several_connections_see_one_disk(store: &StoreUnderTest) {
    let bed = TestBed::new(store);
    bed.create("disk", "8M", &["--segment-bytes", "256K"]);
    let reserved = store::ReservedAddress::new();
    let address = format!("tcp:{}", reserved.address());
    let server = bed.serve("disk").at(&address).start();
    let clients: Vec<Client> = (0..8).map(|_| server.connect()).collect();
    assert!(clients.iter().all(|client| client.export().flags & flag::CAN_MULTI_CONN != 0));
    for (n, client) in clients.iter().enumerate() {
        client.write(n as u64 * 1000, &[n as u8 + 1; 1000]).expect("accepted");
        for other in &clients {
            assert_eq!(other.read(n as u64 * 1000, 1000), Ok(vec![n as u8 + 1; 1000]));
        }
    }
    let mut load =
        Load::new(VOLUME_BYTES, Dice::seeded("serving"), Mix { depth: 64, ..Mix::default() });
    let (offset, length) = (0, VOLUME_BYTES);
    let zeroes = Command::WriteZeroes { offset, length, fua: false, no_hole: false };
    clients[0].call(&zeroes).expect("zeroed");
    load.run(&clients, 1500);
    let images: Vec<Vec<u8>> =
        clients[..2].iter().map(|client| client.read_all().expect("readable")).collect();
    assert!(images[0] == images[1], "two connections see two disks");
    check_nothing_accepted_lost(&load.log, &images[0])
        .unwrap_or_else(|violation| panic!("{violation}"));
    let _ = server.stop().ok();
}

fn every_dialect_of_nbd_reads_and_writes_the_same_disk(store: &StoreUnderTest) {
    let bed = TestBed::new(store);
    bed.create("disk", "8M", &[]);
    let server = bed.serve("disk").start();
    let dialects = [Style::Simple, Style::Structured, Style::Extended];
    let clients: Vec<Client> = dialects
        .iter()
        .map(|&dialect| {
            Client::connect(&server.uri(), dialect)
                .unwrap_or_else(|error| panic!("{dialect:?}: {error}"))
        })
        .collect();
    for (n, client) in clients.iter().enumerate() {
        client.write(n as u64 * 100_000, &[n as u8 + 1; 70_000]).expect("accepted");
        client.flush().expect("flushed");
    }
    for client in &clients {
        for n in 0..clients.len() {
            assert_eq!(client.read(n as u64 * 100_000, 70_000), Ok(vec![n as u8 + 1; 70_000]));
        }
        assert!(client.read(VOLUME_BYTES - 100, 200).is_err(), "a read past the end was answered");
        assert!(client.write(VOLUME_BYTES, &[1]).is_err(), "a write past the end was answered");
        assert_eq!(
            client.read(VOLUME_BYTES - 1, 1),
            Ok(vec![0]),
            "the connection lives on after an error"
        );
    }
    let _ = server.stop().ok();
}

#[test]
fn a_second_signal_ends_the_server_at_once_and_loses_nothing() {
    let bed = TestBed::new(&store::folder());
    bed.create("disk", "8M", &[]);
    let server = bed.serve("disk").start();
    let mut load = Load::new(VOLUME_BYTES, Dice::seeded("serving"), Mix::default());
    load.drive(&[server.connect()], 700, || {
        server.signal(Signal::INT);
        server.signal(Signal::INT);
    });
    let ended = server.finished();
    assert!(ended.code == Some(0) || ended.code == Some(1), "{:?}: {}", ended.code, ended.stderr);
    let server = bed.serve("disk").start();
    let image = server.connect().read_all().expect("readable");
    check_nothing_accepted_lost(&load.log, &image)
        .unwrap_or_else(|violation| panic!("{violation}"));
}

#[test]
fn a_socket_left_by_a_dead_server_is_no_obstacle_and_a_live_one_is() {
    let bed = TestBed::new(&store::folder());
    bed.create("disk", "8M", &[]);
    bed.create("other", "8M", &[]);
    bed.serve("disk").start().kill();
    let server = bed.serve("disk").start();
    let Err(refusal) = bed.serve("other").attempt() else {
        panic!("a socket in use was taken over");
    };
    refusal.refused(11, &["nbd.sock"]);
    server.connect().write(0, &[1; 512]).expect("the first server is not disturbed");
}

#[test]
fn the_service_manager_is_notified_of_readiness() {
    let bed = TestBed::new(&store::folder());
    bed.create("disk", "8M", &[]);
    let path = bed.path("notify");
    let socket = UnixDatagram::bind(&path).expect("a socket in the place");
    socket.set_read_timeout(Some(sawmill_tests::machine::PATIENCE)).expect("a timeout can be set");
    let listen = format!("unix:{}", bed.path("nbd.sock").display());
    let mut child = bed
        .command(&[
            "serve",
            "disk",
            "--nbd",
            &listen,
            "--journal-bytes",
            "64M",
            "--cache-bytes",
            "64M",
        ])
        .env("NOTIFY_SOCKET", &path)
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null())
        .spawn()
        .expect("the binary under test starts");
    let mut message = [0; 256];
    let outcome = socket.recv(&mut message);
    let ready =
        Client::connect(&format!("nbd+unix:///disk?socket={}", &listen[5..]), Style::Simple);
    child.kill().expect("the server runs");
    child.wait().expect("the server ends");
    let length = outcome.expect("the server notifies the service manager");
    assert!(String::from_utf8_lossy(&message[..length]).contains("READY=1"));
    assert!(ready.is_ok(), "it was notified before the door was open");
}
