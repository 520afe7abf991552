//! Clients that break the protocol, stop listening, die, or leave in the middle of things.

use std::io::Read;
use std::net::Shutdown;
use std::sync::Arc;
use std::time::Duration;

use sawmill_device::{BlockDeviceExt, MemoryDevice};
use sawmill_frontend::{Door, Stop};

use crate::client::{
    BLOCK_STATUS, DISCONNECT, FLUSH, PAYLOAD_LEN, READ, STYLES, Style, WRITE, pattern, serve,
    serve_with, wait_until,
};
use crate::devices::{HoldDevice, ThreadDevice};

const SIZE: u64 = 8 << 20;

fn memory() -> Arc<MemoryDevice> {
    Arc::new(MemoryDevice::new(SIZE))
}

#[test]
fn a_false_magic_closes_that_connection_and_touches_nothing_else() {
    let device = memory();
    let served = serve(device.clone());
    for (count, style) in (1..).zip(STYLES) {
        let mut bystander = served.client(style);
        let mut client = served.client(style);
        let mut bytes = client.write_bytes(0, 0, b"this one counts");
        bytes.extend(vec![0x5a; 32]);
        bytes.extend(client.write_bytes(0, 0, b"this one does not"));
        client.send(&bytes);
        assert_eq!(client.answer().error, 0, "what came before the break is answered");
        client.expect_closed();
        assert_eq!(served.server.metrics().protocol_violations, count);
        assert_eq!(bystander.read_ok(0, 17), b"this one counts\0\0");
    }
}

#[test]
fn the_header_of_another_style_is_a_violation() {
    let served = serve(memory());
    let mut client = served.client(Style::Simple);
    client.style = Style::Extended;
    client.request(0, READ, 0, 1);
    client.expect_closed();
    let mut client = served.client(Style::Extended);
    client.style = Style::Simple;
    client.request(0, READ, 0, 1);
    client.request(0, READ, 0, 1);
    client.expect_closed();
    assert_eq!(served.server.metrics().protocol_violations, 2);
}

#[test]
fn an_oversize_write_is_skipped_or_ends_the_connection() {
    let device = memory();
    let served = serve(device.clone());
    for style in STYLES {
        let mut client = served.client(style);
        let flags = if style == Style::Extended { PAYLOAD_LEN } else { 0 };
        let length = (32 << 20) + 1;
        let header = client.header(flags, WRITE, 0, length as u64);
        client.send(&header);
        client.send(&vec![1; length]);
        assert_eq!(client.answer().error, 22);
        client.write_ok(9, b"and on");
        client.request(flags, WRITE, 0, 200 << 20);
        client.expect_closed();
    }
    assert_eq!(device.read_at(0, 16).expect("in range"), b"\0\0\0\0\0\0\0\0\0and on\0");
}

#[test]
fn a_client_that_dies_inside_a_payload_writes_nothing() {
    let device = memory();
    let served = serve(device.clone());
    for style in STYLES {
        for (length, cut) in [(1000, 1), (1000, 999), (5 << 20, 0), (5 << 20, (5 << 20) - 1)] {
            let mut client = served.client(style);
            let mut bytes = client.write_bytes(0, 100, b"whole");
            let partial = client.write_bytes(0, 4096, &vec![7; length]);
            let head = partial.len() - length;
            bytes.extend(&partial[..head + cut]);
            client.send(&bytes);
            assert_eq!(client.answer().error, 0, "the write that came whole is answered");
            drop(client);
            served.wait_for_connections(0);
        }
    }
    assert_eq!(device.read_at(100, 5).expect("in range"), b"whole");
    assert_eq!(device.read_at(4096, 5 << 20).expect("in range"), vec![0; 5 << 20]);
}

#[test]
fn requests_in_flight_outlive_their_client() {
    let device = Arc::new(HoldDevice::new(SIZE));
    let served = serve(device.clone());
    let mut client = served.client(Style::Structured);
    let mut bytes = client.write_bytes(0, 50, b"left behind");
    bytes.extend(client.header(0, READ, 0, 1 << 20));
    bytes.extend(client.header(0, FLUSH, 0, 0));
    client.send(&bytes);
    wait_until("three requests at the device", || device.count() == 3);
    assert_eq!(served.server.metrics().in_flight, 3);
    drop(client);
    device.stop_holding();
    served.wait_for_connections(0);
    assert_eq!(device.inner().read_at(50, 11).expect("in range"), b"left behind");
    served.client(Style::Simple).write_ok(0, b"others come");
}

#[test]
fn disconnect_waits_for_the_replies_of_what_came_before() {
    let device = Arc::new(HoldDevice::new(SIZE));
    let served = serve(device.clone());
    for half_close in [false, true] {
        let mut client = served.client(Style::Structured);
        let read = client.request(0, READ, 5, 6);
        if half_close {
            client.stream.shutdown(Shutdown::Write).expect("open");
        } else {
            client.request(0, DISCONNECT, 0, 0);
        }
        wait_until("the read at the device", || device.count() == 1);
        device.release();
        let answer = client.answer();
        assert_eq!((answer.cookie, answer.data), (read, vec![0; 6]));
        client.expect_closed();
    }
    assert_eq!(served.server.metrics().protocol_violations, 0);
}

/// One client asks for far more than it reads. Its replies may fill its own limits, but neither the
/// other clients nor the threads that complete requests may notice.
#[test]
fn a_client_that_does_not_take_its_replies_delays_no_other() {
    for device in
        [memory() as Arc<dyn sawmill_device::BlockDevice>, Arc::new(ThreadDevice::new(SIZE))]
    {
        let served = serve(device);
        let mut lazy = served.client(Style::Structured);
        let data = pattern(3, 1 << 20);
        lazy.write_ok(0, &data);
        let count = 300;
        let mut bytes = Vec::new();
        let cookies: Vec<u64> = (0..count)
            .map(|_| {
                bytes.extend(lazy.header(0, READ, 0, 1 << 20));
                u64::from_be_bytes(bytes[bytes.len() - 20..][..8].try_into().expect("eight"))
            })
            .collect();
        lazy.send(&bytes);
        wait_until("replies pile up", || served.server.metrics().bytes_out > 1 << 16);
        let mut other = served.client(Style::Simple);
        for round in 0..200 {
            other.write_ok(SIZE - 4096, &pattern(round, 4096));
            assert_eq!(other.read_ok(SIZE - 4096, 4096), pattern(round, 4096));
        }
        let mut answered: Vec<u64> = (0..count)
            .map(|_| {
                let answer = lazy.answer();
                assert!(answer.data == data);
                answer.cookie
            })
            .collect();
        answered.sort_unstable();
        assert_eq!(answered, cookies);
    }
}

#[test]
fn a_client_that_never_takes_its_last_replies_is_let_go() {
    let linger = Duration::from_millis(50);
    let served = serve_with(&[("disk", memory())], |options| options.linger_time_max = linger);
    let mut client = served.client(Style::Simple);
    client.request(0, READ, 0, SIZE);
    client.request(0, DISCONNECT, 0, 0);
    served.wait_for_connections(0);
}

#[test]
fn stop_does_not_wait_forever_for_a_client_that_takes_no_replies() {
    let linger = Duration::from_millis(50);
    let served = serve_with(&[("disk", memory())], |options| options.linger_time_max = linger);
    let mut client = served.client(Style::Structured);
    let bytes: Vec<u8> = (0..300).flat_map(|_| client.header(0, READ, 0, 1 << 20)).collect();
    client.send(&bytes);
    wait_until("replies pile up", || served.server.metrics().bytes_out > 1 << 16);
    served.server.stop(Stop::Drained);
    assert_eq!(served.server.clients(), []);
}

#[test]
fn no_more_is_taken_from_a_client_than_the_limits_allow() {
    let device = Arc::new(HoldDevice::new(SIZE));
    let served = serve(device.clone());
    let mut client = served.client(Style::Extended);
    let mut bytes = Vec::new();
    for _ in 0..3000 {
        bytes.extend(client.header(0, READ, 0, 1));
    }
    client.send(&bytes);
    wait_until("the limit of requests", || device.count() == 1024);
    device.release();
    wait_until("the next ones", || device.count() == 1024);
    device.release();
    wait_until("the rest", || device.count() == 3000 - 2048);
    device.release();
    (0..3000).for_each(|_| assert_eq!(client.answer().data, [0]));
    let mut bytes = Vec::new();
    for _ in 0..40 {
        bytes.extend(client.header(0, READ, 0, SIZE));
    }
    client.send(&bytes);
    wait_until("the limit of bytes", || device.count() == 16);
    drop(client);
    device.stop_holding();
}

#[test]
fn answers_to_block_status_count_against_the_limit() {
    let device = Arc::new(HoldDevice::new(SIZE));
    let served = serve(device.clone());
    let mut client = served.client(Style::Structured);
    let bytes: Vec<u8> = (0..500).flat_map(|_| client.header(0, BLOCK_STATUS, 0, SIZE)).collect();
    client.send(&bytes);
    wait_until("the limit", || device.count() == 128);
    device.stop_holding();
    (0..500).for_each(|_| assert_eq!(client.answer().runs, [(SIZE, 3)]));
}

#[test]
fn replies_flow_while_a_long_payload_is_on_its_way() {
    let device = Arc::new(HoldDevice::new(SIZE));
    let served = serve(device.clone());
    let mut client = served.client(Style::Structured);
    let read = client.request(0, READ, 0, 10);
    let write = client.write_bytes(0, 0, &pattern(1, 2 << 20));
    client.send(&write[..1 << 20]);
    wait_until("the read at the device", || device.count() == 1);
    device.stop_holding();
    assert_eq!(client.answer().cookie, read, "the answer does not wait for the payload");
    client.send(&write[1 << 20..]);
    assert_eq!(client.answer().error, 0);
    assert!(client.read_ok(0, 2 << 20) == pattern(1, 2 << 20));
}

#[test]
fn a_client_that_resets_its_connection_is_forgotten() {
    let served = serve(Arc::new(ThreadDevice::new(SIZE)));
    for _ in 0..50 {
        let mut client = served.client(Style::Simple);
        let bytes: Vec<u8> = (0..20).flat_map(|_| client.header(0, READ, 0, 64 << 10)).collect();
        client.send(&bytes);
        let mut some = [0; 1000];
        client.stream.read_exact(&mut some).expect("the first bytes");
        // Closing with bytes unread resets the connection.
    }
    served.wait_for_connections(0);
    assert_eq!(served.server.metrics().protocol_violations, 0);
    let mut client = served.client(Style::Simple);
    client.write_ok(0, b"alive");
}
