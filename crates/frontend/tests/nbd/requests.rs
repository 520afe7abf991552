//! Every command in every style, against a plain vector of bytes, with its errors.

use std::sync::Arc;

use proptest::collection::vec;
use proptest::prelude::*;
use sawmill_device::{BlockDevice, BlockDeviceExt, ErrorKind, Geometry, MemoryDevice};
use sawmill_sys::Lookers;

use crate::client::{
    BLOCK_STATUS, CACHE, Client, DF, FAST_ZERO, FLUSH, FUA, NO_HOLE, PAYLOAD_LEN, READ, REQ_ONE,
    STYLES, Style, TRIM, TestServer, WRITE, WRITE_ZEROES, pattern, serve, serve_with, wait_until,
};
use crate::devices::{ErrorDevice, ThreadDevice};

const EPERM: u32 = 1;
const EIO: u32 = 5;
const EINVAL: u32 = 22;
const ENOSPC: u32 = 28;
const EOVERFLOW: u32 = 75;
const ESHUTDOWN: u32 = 108;

const SIZE: u64 = 1 << 20;

fn memory() -> Arc<MemoryDevice> {
    Arc::new(MemoryDevice::new(SIZE))
}

/// A server of which so many connections may look at once.
fn serve_looking(most: usize) -> TestServer {
    serve_with(&[("disk", memory())], |options| options.lookers = Arc::new(Lookers::new(most)))
}

#[test]
fn a_client_that_asks_one_by_one_is_looked_for_if_that_is_allowed() {
    let [awake, asleep] = [1, 0].map(serve_looking);
    let mut client = awake.client(Style::Simple);
    wait_until("a look finds a request", || {
        for _ in 0..100 {
            client.write_ok(3, b"one by one");
        }
        awake.server.metrics().receives_awake > 0
    });
    // Bursts, and a client that leaves.
    let pending: Vec<_> = (0..100).map(|at| client.request(0, READ, at, 10)).collect();
    let mut answered: Vec<_> = pending.iter().map(|_| client.answer().cookie).collect();
    answered.sort_unstable();
    assert_eq!(answered, pending);
    drop(client);
    awake.wait_for_connections(0);
    let mut client = asleep.client(Style::Simple);
    for _ in 0..200 {
        client.write_ok(3, b"one by one");
    }
    assert_eq!(asleep.server.metrics().receives_awake, 0);
}

#[test]
fn no_connection_looks_for_the_rest_of_a_request() {
    let served = serve_looking(1);
    let mut client = served.client(Style::Simple);
    // A write that is refused, so that its payload is dropped, and one that is done.
    for (address, error) in [(2 * SIZE, ENOSPC), (0, 0)] {
        for byte in client.write_bytes(0, address, &[1; 500]) {
            client.send(&[byte]);
        }
        assert_eq!(client.answer().error, error);
    }
    assert_eq!(served.server.metrics().receives_awake, 0);
}

#[test]
fn every_nbd_command_has_its_effect_in_every_reply_style() {
    for style in STYLES {
        let device = memory();
        let served = serve(device.clone());
        let mut client = served.client(style);
        let data = pattern(1, 10_000);
        client.write_ok(77, &data);
        assert_eq!(client.write(FUA, SIZE - 3, b"end").error, 0);
        assert_eq!(client.read_ok(77, 10_000), data);
        assert_eq!(client.read_ok(SIZE - 4, 4), b"\0end");
        assert_eq!(client.call(0, FLUSH, 0, 0).error, 0);
        assert_eq!(client.call(0, CACHE, 0, SIZE).error, 0);
        assert_eq!(client.call(NO_HOLE | FUA, WRITE_ZEROES, 100, 50).error, 0);
        assert_eq!(client.call(FAST_ZERO, WRITE_ZEROES, 1000, 1).error, 0);
        assert_eq!(
            device.read_at(77, 123).expect("in range"),
            [&data[..23], &[0; 50], &data[73..123]].concat()
        );
        assert_eq!(device.read_at(999, 3).expect("in range"), [data[922], 0, data[924]]);
        assert_eq!(client.call(FUA, TRIM, 0, SIZE).error, 0);
        assert_eq!(device.resident_bytes(), 0, "the trim reached the device");
        let counts = served.server.metrics().requests;
        let actual = [
            counts.read,
            counts.write,
            counts.flush,
            counts.trim,
            counts.cache,
            counts.write_zeroes,
        ];
        assert_eq!(actual, [2, 2, 1, 1, 1, 2]);
    }
}

#[test]
fn a_read_that_must_not_be_split_comes_in_one_piece() {
    let served = serve(memory());
    for style in [Style::Structured, Style::Extended] {
        let answer = served.client(style).call(DF, READ, 0, SIZE);
        assert_eq!((answer.error, answer.data.len() as u64), (0, SIZE));
    }
    assert_eq!(
        served.client(Style::Simple).call(DF, READ, 0, 1).error,
        EINVAL,
        "not offered in this style"
    );
}

#[test]
fn block_status_shows_data_and_holes_in_both_widths() {
    let device = memory();
    device.write_at(64 << 10, &[1; 32 << 10]).expect("in range");
    let served = serve(device);
    for style in [Style::Structured, Style::Extended] {
        let mut client = served.client(style);
        let runs = [(64 << 10, 3), (32 << 10, 0), (SIZE - (96 << 10), 3)];
        assert_eq!(client.call(0, BLOCK_STATUS, 0, SIZE).runs, runs);
        assert_eq!(client.call(REQ_ONE, BLOCK_STATUS, 0, SIZE).runs, runs[..1]);
        assert_eq!(client.call(0, BLOCK_STATUS, (64 << 10) + 1, 10).runs, [(10, 0)]);
    }
}

#[test]
fn block_status_of_more_than_four_gibibytes_fits_in_extended_headers() {
    let size = 1 << 40;
    let served = serve(Arc::new(MemoryDevice::new(size)));
    let mut client = served.client(Style::Extended);
    assert_eq!(client.call(0, BLOCK_STATUS, 0, size).runs, [(size, 3)]);
    assert_eq!(client.call(0, WRITE_ZEROES, 0, size).error, 0);
    assert_eq!(client.call(0, TRIM, 1, size - 1).error, 0);
    assert_eq!(client.call(0, TRIM, 2, size - 1).error, EINVAL);
    assert_eq!(client.call(0, TRIM, u64::MAX, u64::MAX).error, EINVAL);
}

#[test]
fn wrong_requests_are_refused_with_the_number_of_the_protocol_and_change_nothing() {
    let device = memory();
    let served = serve(device.clone());
    for style in STYLES {
        let mut client = served.client(style);
        let over = 32 << 20 | 1;
        for (flags, command, offset, length, errno) in [
            (0, READ, SIZE, 1, EINVAL),
            (0, READ, SIZE - 1, 2, EINVAL),
            (0, READ, u64::MAX, 2, EINVAL),
            (0, READ, 0, 0, EINVAL),
            (0, READ, 0, over, EOVERFLOW),
            (REQ_ONE, READ, 0, 1, EINVAL),
            (0, TRIM, SIZE - 1, 2, EINVAL),
            (0, TRIM, 0, 0, EINVAL),
            (DF, TRIM, 0, 1, EINVAL),
            (0, WRITE_ZEROES, SIZE - 1, 2, ENOSPC),
            (1 << 9, WRITE_ZEROES, 0, 1, EINVAL),
            (0, CACHE, SIZE, 1, EINVAL),
            (NO_HOLE, FLUSH, 0, 0, EINVAL),
            (0, BLOCK_STATUS, SIZE, 1, EINVAL),
            (0, 8, 0, 0, EINVAL),
            (0, 77, 1, 2, EINVAL),
            (0, u16::MAX, 1, 2, EINVAL),
        ] {
            let answer = client.call(flags, command, offset, length);
            assert_eq!(
                answer.error, errno,
                "{style:?} {flags} {command} {offset} {length} {}",
                answer.text
            );
            assert_eq!(answer.text.is_empty(), style == Style::Simple, "the text says why");
        }
        assert_eq!(client.write(0, SIZE - 2, b"over").error, ENOSPC);
        assert_eq!(client.write(0, 0, b"").error, EINVAL);
        assert_eq!(client.write(NO_HOLE, 0, b"flag").error, EINVAL);
        assert_eq!(client.read_ok(SIZE - 2, 2), [0, 0]);
    }
    assert_eq!(device.resident_bytes(), 0);
    assert_eq!(served.server.metrics().protocol_violations, 0);
    assert_eq!(served.server.metrics().errors, 3 * 20);
}

#[test]
fn a_read_only_export_refuses_every_change() {
    let plain = memory();
    let geometry = Geometry { read_only: true, ..plain.geometry() };
    let served = serve(Arc::new(MemoryDevice::with_geometry(geometry)));
    for style in STYLES {
        let mut client = served.client(style);
        assert_eq!(client.write(0, 0, b"no").error, EPERM);
        assert_eq!(client.call(0, TRIM, 0, 1).error, EPERM);
        assert_eq!(client.call(0, WRITE_ZEROES, 0, 1).error, EPERM);
        assert_eq!(client.read_ok(0, 2), [0, 0]);
        assert_eq!(client.call(0, FLUSH, 0, 0).error, 0);
    }
}

#[test]
fn errors_of_the_device_reach_the_client_with_number_and_text() {
    for (kind, errno) in [
        (ErrorKind::Invalid, EINVAL),
        (ErrorKind::ReadOnly, EPERM),
        (ErrorKind::Fenced, ESHUTDOWN),
        (ErrorKind::Unavailable, EIO),
        (ErrorKind::Full, ENOSPC),
        (ErrorKind::Corrupt, EIO),
        (ErrorKind::Closed, ESHUTDOWN),
        (ErrorKind::Internal, EIO),
    ] {
        let served = serve(Arc::new(ErrorDevice::new(kind)));
        for style in STYLES {
            let mut client = served.client(style);
            for answer in [
                client.call(0, READ, 0, 4096),
                client.write(0, 0, b"data"),
                client.call(0, FLUSH, 0, 0),
            ] {
                let text = if style == Style::Simple {
                    String::new()
                } else {
                    format!("{kind:?} for a test")
                };
                assert_eq!((answer.error, answer.text, answer.data.len()), (errno, text, 0));
            }
        }
    }
}

#[test]
fn payloads_of_every_length_around_the_buffers_come_through_whole() {
    let size = 80 << 20;
    let served = serve(Arc::new(MemoryDevice::new(size)));
    for style in STYLES {
        let mut client = served.client(style);
        let buffer = 256usize << 10;
        for length in [
            1,
            4096,
            buffer - 33,
            buffer - 32,
            buffer - 28,
            buffer - 27,
            buffer,
            buffer + 1,
            5 << 20,
            (32 << 20) - 1,
            32 << 20,
        ] {
            let data = pattern(length as u64, length);
            client.write_ok(13, &data);
            assert!(client.read_ok(13, length as u64) == data, "{length} bytes, {style:?}");
        }
    }
}

#[test]
fn mixed_lengths_sent_in_one_go_come_through_in_order() {
    let lengths: Vec<usize> = (0..400u32).map(|at| (at * 7919 % 9000) as usize + 1).collect();
    let size = 4 << 20;
    for device in [
        Arc::new(MemoryDevice::new(size)) as Arc<dyn BlockDevice>,
        Arc::new(ThreadDevice::new(size)),
    ] {
        let served = serve(device);
        let mut client = served.client(Style::Extended);
        let mut offset = 0;
        let mut bytes = Vec::new();
        let mut written = Vec::new();
        for &length in &lengths {
            let data = pattern(offset, length);
            bytes.extend(client.write_bytes(0, offset, &data));
            written.push((offset, data));
            offset += length as u64;
        }
        let mut sender = client.stream.try_clone().expect("a second handle");
        let sending = std::thread::spawn(move || std::io::Write::write_all(&mut sender, &bytes));
        for _ in &written {
            assert_eq!(client.answer().error, 0);
        }
        sending.join().expect("no panic").expect("all taken");
        for (offset, data) in written {
            assert!(client.read_ok(offset, data.len() as u64) == data, "the write at {offset}");
        }
    }
}

#[test]
fn requests_that_arrive_byte_by_byte_are_carried_out() {
    let served = serve(memory());
    let mut client = served.client(Style::Structured);
    let mut bytes = client.write_bytes(0, 3, b"slowly");
    bytes.extend(client.header(0, READ, 3, 6));
    for byte in bytes {
        client.send(&[byte]);
    }
    assert_eq!(client.answer().error, 0);
    assert_eq!(client.answer().data, b"slowly");
}

/// Writes on one connection without waiting: either order may win (D8), but every byte is from one
/// of the writes, and the outcome does not change later.
#[test]
fn pipelined_overlapping_writes_end_in_one_state() {
    let served = serve(Arc::new(ThreadDevice::new(SIZE)));
    let mut client = served.client(Style::Structured);
    for round in 0..20u64 {
        let mut bytes = Vec::new();
        for number in 0..64u8 {
            let offset = (u64::from(number) * 37 + round * 11) % 200;
            bytes.extend(client.write_bytes(0, offset, &[number + 1; 100]));
        }
        client.send(&bytes);
        let mut cookies: Vec<u64> = (0..64)
            .map(|_| client.answer())
            .map(|answer| {
                assert_eq!(answer.error, 0);
                answer.cookie
            })
            .collect();
        cookies.sort_unstable();
        cookies.dedup();
        assert_eq!(cookies.len(), 64, "every write is answered exactly once");
        let data = client.read_ok(0, 300);
        for (at, byte) in data.iter().enumerate().filter(|(_, byte)| **byte > 0) {
            let offsets = (0..=round).map(|round| (u64::from(byte - 1) * 37 + round * 11) % 200);
            let covers =
                offsets.into_iter().any(|offset| (offset..offset + 100).contains(&(at as u64)));
            assert!(covers, "byte {at} is {byte}, which no write put there");
        }
        assert_eq!(client.read_ok(0, 300), data);
    }
}

#[test]
fn eight_connections_keep_their_own_ranges() {
    for device in [memory() as Arc<dyn BlockDevice>, Arc::new(ThreadDevice::new(SIZE))] {
        let served = serve(device);
        let part = SIZE / 8;
        std::thread::scope(|scope| {
            for number in 0..8 {
                let mut client = served.client(STYLES[number as usize % 3]);
                scope.spawn(move || {
                    for round in 0..50 {
                        let length = 1 + (round * 811 % 3000) as usize;
                        let offset = number * part + round * 997 % (part - 3000);
                        let data = pattern(number << 32 | round, length);
                        client.write_ok(offset, &data);
                        assert_eq!(client.read_ok(offset, length as u64), data);
                    }
                });
            }
        });
        served.wait_for_connections(0);
        let metrics = served.server.metrics();
        assert_eq!(
            (metrics.requests.read, metrics.requests.write, metrics.in_flight),
            (400, 400, 0)
        );
    }
}

#[derive(Clone, Debug)]
enum Step {
    Write(u64, Vec<u8>),
    Zeroes(u64, u64),
    Trim(u64, u64),
    Read(u64, u64),
    Flush,
}

fn step() -> impl Strategy<Value = Step> {
    let range = (0u64..6000, 1u64..6000);
    prop_oneof![
        3 => (0u64..6000, vec(any::<u8>(), 1..6000))
            .prop_map(|(offset, data)| Step::Write(offset, data)),
        1 => range.clone().prop_map(|(offset, length)| Step::Zeroes(offset, length)),
        1 => range.clone().prop_map(|(offset, length)| Step::Trim(offset, length)),
        3 => range.prop_map(|(offset, length)| Step::Read(offset, length)),
        1 => Just(Step::Flush),
    ]
}

fn play(client: &mut Client, model: &mut [u8], step: &Step) {
    let fill = |model: &mut [u8], offset: u64, data: &[u8]| {
        model[offset as usize..offset as usize + data.len()].copy_from_slice(data);
    };
    match step {
        Step::Write(offset, data) => {
            client.write_ok(*offset, data);
            fill(model, *offset, data);
        }
        Step::Zeroes(offset, length) | Step::Trim(offset, length) => {
            let command = if matches!(step, Step::Trim(..)) { TRIM } else { WRITE_ZEROES };
            assert_eq!(client.call(0, command, *offset, *length).error, 0);
            // The memory device's discarded ranges read as zeroes.
            fill(model, *offset, &vec![0; *length as usize]);
        }
        Step::Read(offset, length) => {
            let end = (offset + length) as usize;
            assert_eq!(client.read_ok(*offset, *length), model[*offset as usize..end]);
        }
        Step::Flush => assert_eq!(client.call(0, FLUSH, 0, 0).error, 0),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(30))]

    #[test]
    fn any_sequence_of_requests_agrees_with_a_vector_of_bytes(
        steps in vec((0usize..3, step()), 1..60),
    ) {
        let served = serve(memory());
        let mut clients = STYLES.map(|style| served.client(style));
        let mut model = vec![0; 12_000];
        for (index, step) in &steps {
            play(&mut clients[*index], &mut model, step);
        }
        prop_assert_eq!(clients[0].read_ok(0, 12_000), model);
    }

    #[test]
    fn any_bytes_after_the_handshake_end_at_worst_that_connection(
        index in 0usize..3, bytes in vec(any::<u8>(), 0..400),
        headers in vec((0u16..64, 0u16..10, 0u64..99, 0u64..99), 0..5),
    ) {
        let device = memory();
        let served = serve(device);
        let mut client = served.client(STYLES[index]);
        let mut request_bytes = Vec::new();
        for (flags, command, offset, length) in headers {
            request_bytes.extend(client.header(flags, command, offset, length));
        }
        request_bytes.extend(bytes);
        // The server may close in the middle; it must only survive.
        let _ = std::io::Write::write_all(&mut client.stream, &request_bytes);
        let _ = client.stream.shutdown(std::net::Shutdown::Write);
        let _ = std::io::Read::read_to_end(&mut client.stream, &mut Vec::new());
        served.wait_for_connections(0);
        served.client(Style::Simple).write_ok(SIZE - 5, b"alive");
    }
}

#[test]
fn a_payload_no_command_asks_for_is_skipped() {
    let served = serve(memory());
    let mut client = served.client(Style::Extended);
    for command in [READ, FLUSH, TRIM, BLOCK_STATUS, 99] {
        let mut bytes = client.header(PAYLOAD_LEN, command, 0, 5000);
        bytes.extend([0xaa; 5000]);
        client.send(&bytes);
        assert_eq!(client.answer().error, EINVAL, "command {command}");
    }
    assert_eq!(client.call(0, WRITE, 0, 100).error, EINVAL, "a write that says it has no payload");
    client.write_ok(0, b"and on");
}
