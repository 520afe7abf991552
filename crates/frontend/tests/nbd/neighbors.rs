//! Clients that take what others need: memory, handshakes, connections.

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use sawmill_device::{BlockDevice, MemoryDevice};
use sawmill_frontend::Door;
use sawmill_frontend::nbd::{Budget, NbdServer};

use crate::client::{Client, READ, Style, TestServer, WRITE, pattern, serve_with, wait_until};
use crate::devices::HoldDevice;

const SIZE: u64 = 32 << 20;

fn memory() -> Arc<dyn BlockDevice> {
    Arc::new(MemoryDevice::new(SIZE))
}

fn least() -> Budget {
    Budget::new(Budget::BYTES_MIN).expect("large enough")
}

fn served_within(budget: &Budget, linger: Duration) -> TestServer {
    serve_with(&[("disk", memory())], |options| {
        (options.budget, options.linger_time_max) = (budget.clone(), linger);
    })
}

/// A client that requests much data and reads none.
fn greedy(served: &TestServer) -> Client {
    let mut client = served.client(Style::Structured);
    let bytes: Vec<u8> = (0..8).flat_map(|_| client.header(0, READ, 0, 16 << 20)).collect();
    client.send(&bytes);
    client
}

const LINGER_TIME_LONG: Duration = Duration::from_secs(3600);
const LINGER_TIME_SHORT: Duration = Duration::from_millis(200);

#[test]
fn memory_of_clients_that_take_nothing_stays_within_the_budget_and_others_are_served() {
    let budget = least();
    let doors =
        [served_within(&budget, LINGER_TIME_LONG), served_within(&budget, LINGER_TIME_LONG)];
    let greedy: Vec<_> = (0..20).map(|at| greedy(&doors[at % 2])).collect();
    wait_until("the pool is short", || budget.in_use().waiting > 0);
    for style in [Style::Simple, Style::Structured] {
        let mut client = doors[0].client(style);
        for round in 0..200 {
            client.write_ok(4096, &pattern(round, 300 << 10));
            assert!(client.read_ok(4096, 300 << 10) == pattern(round, 300 << 10));
        }
    }
    let used = budget.in_use();
    assert!(used.bytes <= used.bytes_max, "{used:?}");
    drop(greedy);
    wait_until("all memory is free", || budget.in_use().bytes == 0 && budget.in_use().waiting == 0);
}

#[test]
fn a_client_that_keeps_memory_others_wait_for_is_disconnected() {
    let budget = least();
    let served = served_within(&budget, LINGER_TIME_SHORT);
    let mut greedy: Vec<_> = (0..6).map(|_| greedy(&served)).collect();
    let mut client = served.client(Style::Structured);
    // Longer than the guaranteed part: it must get its turn at the pool.
    let data = pattern(5, SIZE as usize);
    client.write_ok(0, &data);
    assert!(client.read_ok(0, SIZE) == data);
    assert!(served.server.metrics().connections_cut > 0);
    greedy.clear();
}

#[test]
fn a_client_that_sends_a_payload_by_drops_is_disconnected_when_others_wait() {
    let budget = least();
    let served = served_within(&budget, LINGER_TIME_SHORT);
    let slow: Vec<_> = (0..3)
        .map(|_| {
            let mut client = served.client(Style::Simple);
            let header = client.header(0, WRITE, 0, SIZE);
            client.send(&header);
            client
        })
        .collect();
    let mut client = served.client(Style::Structured);
    client.write_ok(0, &pattern(1, SIZE as usize));
    drop(slow);
}

#[test]
fn a_client_that_takes_no_replies_stays_connected_while_memory_suffices() {
    let served = served_within(&least(), Duration::from_millis(10));
    let mut idle = served.client(Style::Structured);
    let bytes: Vec<u8> = (0..4).flat_map(|_| idle.header(0, READ, 0, 8 << 20)).collect();
    idle.send(&bytes);
    wait_until("replies pile up", || served.server.metrics().bytes_out > 1 << 16);
    let mut other = served.client(Style::Simple);
    for round in 0..300 {
        other.write_ok(0, &pattern(round, 64 << 10));
    }
    (0..4).for_each(|_| assert_eq!(idle.answer().data.len(), 8 << 20));
    assert_eq!(served.server.metrics().connections_cut, 0);
}

#[test]
fn memory_of_requests_that_outlive_their_client_is_counted_until_they_end() {
    let device = Arc::new(HoldDevice::new(SIZE));
    let budget = least();
    let served = serve_with(&[("disk", device.clone())], |options| options.budget = budget.clone());
    let mut client = served.client(Style::Simple);
    client.request(0, READ, 0, 8 << 20);
    wait_until("the read at the device", || device.count() == 1);
    // Breaking the protocol ends a connection at once.
    client.send(&[0x5a; 64]);
    client.expect_closed();
    served.wait_for_connections(0);
    assert!(budget.in_use().bytes >= 8 << 20, "{:?}", budget.in_use());
    device.stop_holding();
    wait_until("all memory is free", || budget.in_use().bytes == 0);
}

#[test]
fn an_idle_client_holds_its_own_part_and_nothing_of_the_pool() {
    let budget = least();
    let served = served_within(&budget, LINGER_TIME_LONG);
    let mut client = served.client(Style::Structured);
    let data = pattern(9, 8 << 20);
    client.write_ok(0, &data);
    assert!(client.read_ok(0, 8 << 20) == data);
    wait_until("the rest is given back", || budget.in_use().bytes == 1 << 20);
    client.write_ok(0, b"and on");
    drop(client);
    wait_until("all memory is free", || budget.in_use().bytes == 0);
}

#[test]
fn half_open_clients_lock_no_client_out() {
    let served = serve_with(&[("disk", memory())], |options| options.handshakes_max = 8);
    let mut half_open: Vec<_> =
        (0..8).map(|_| UnixStream::connect(&served.path).expect("accepted")).collect();
    for _ in 0..20 {
        served.client(Style::Simple).write_ok(0, b"served");
        half_open.push(UnixStream::connect(&served.path).expect("accepted"));
    }
    wait_until("they made room", || served.server.metrics().connections_cut >= 20);
    assert!(served.server.metrics().handshakes <= 16);
}

#[test]
fn idle_clients_of_one_peer_do_not_take_the_last_connections() {
    let served = serve_with(&[("disk", memory())], |options| options.connections_max = 16);
    let idle: Vec<_> = (0..12).map(|_| served.client(Style::Simple)).collect();
    // A client gets its answer a moment before it leaves the count of handshakes.
    let metrics = || served.server.metrics();
    wait_until("all are admitted", || metrics().connections == 12 && metrics().handshakes == 0);
    let mut one_more = UnixStream::connect(&served.path).expect("the kernel accepts");
    assert_eq!(std::io::Read::read(&mut one_more, &mut [0; 18]).expect("closed, not reset"), 0);
    assert_eq!(
        (served.server.metrics().connections, served.server.metrics().connections_refused),
        (12, 1)
    );
    drop(idle);
}

#[test]
fn a_connection_waiting_for_memory_is_handed_over_and_served_by_the_next() {
    let budget = least();
    let served = served_within(&budget, LINGER_TIME_LONG);
    let greedy: Vec<_> = (0..6).map(|_| greedy(&served)).collect();
    let mut client = served.client(Style::Structured);
    wait_until("the pool is short", || budget.in_use().waiting > 0);
    let data = pattern(7, 24 << 20);
    let bytes = client.write_bytes(0, 0, &data);
    std::thread::scope(|scope| {
        let stream = client.stream.try_clone().expect("a descriptor");
        scope.spawn(move || {
            let mut stream = stream;
            std::io::Write::write_all(&mut stream, &bytes).expect("it is taken in the end");
        });
        let quiet_door =
            served.server.quiesce(Duration::from_secs(20)).expect("nothing is in the way");
        let pieces = quiet_door.hand_over().expect("it is quiet");
        let mut options = sawmill_frontend::nbd::NbdOptions::new(served.server.address().clone());
        options.budget = Budget::default();
        let export = sawmill_frontend::nbd::Export {
            name: "disk".into(),
            description: String::new(),
            device: memory(),
        };
        let next = NbdServer::take_over(options, vec![export], pieces).expect("taken over");
        quiet_door.release();
        assert_eq!(client.answer().error, 0);
        assert!(client.read_ok(0, 24 << 20) == data);
        drop(greedy);
        drop(next);
    });
}
