//! Packed writes on any device.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::mpsc::{Sender, channel};

use sawmill_device::layer::{Align, Decision, Fault};
use sawmill_device::{
    BlockDevice, BlockDeviceExt, ErrorKind, Flags, Geometry, MemoryDevice, Operation, Request,
};
use sawmill_format::packed_write;
use sawmill_link::{PackedDevice, UNPACK_BYTES_MAX, Unpacker};

use crate::below::failed;

struct Payload {
    bytes: Vec<u8>,
    fills: usize,
    sender: Sender<(usize, Result<(), ErrorKind>)>,
}

impl sawmill_device::Exchange for Payload {
    fn fill(&mut self, offset: u64, into: &mut [u8]) {
        self.fills += 1;
        into.copy_from_slice(&self.bytes[offset as usize..offset as usize + into.len()]);
    }

    fn buffer(&mut self) -> &mut [u8] {
        &mut []
    }

    fn complete(self: Box<Self>, outcome: sawmill_device::Outcome) {
        self.sender.send((self.fills, outcome.map(drop).map_err(|error| error.kind()))).unwrap();
    }
}

fn packed(ranges: &[(u32, &[u8])]) -> Vec<u8> {
    let mut bytes = vec![0; packed_write::encoded_bytes(ranges.iter().copied()) as usize];
    packed_write::encode(ranges.iter().copied(), &mut bytes).unwrap();
    bytes
}

/// Returns how often the payload was requested, and the outcome.
fn write(
    device: &impl PackedDevice,
    address: u64,
    bytes: &[u8],
    fua: bool,
) -> (usize, Result<(), ErrorKind>) {
    let (sender, receiver) = channel();
    let payload = Box::new(Payload { bytes: bytes.to_vec(), fills: 0, sender });
    let flags = Flags { fua, ..Flags::default() };
    device.submit_packed(Request::new(
        Operation::Write,
        address,
        bytes.len() as u64,
        flags,
        payload,
    ));
    receiver.recv().unwrap()
}

const RANGES: [(u32, &[u8]); 3] = [(0, b"abc"), (1000, b"de"), (70_000, &[7; 9000])];

#[test]
fn each_range_is_a_write_of_its_own_with_the_fua_of_all() {
    let requests = std::sync::Mutex::new(Vec::new());
    let geometry = Geometry { request_bytes_max: 8192, ..MemoryDevice::new(1 << 20).geometry() };
    let device =
        Unpacker::new(Fault::new(MemoryDevice::with_geometry(geometry), |request: &Request| {
            requests.lock().unwrap().push((
                request.operation,
                request.address,
                request.length,
                request.flags.fua,
            ));
            Decision::Pass
        }));
    assert_eq!(write(&device, 500, &packed(&RANGES), true), (1, Ok(())));
    let expected = [(500, 3), (1500, 2), (70_500, 8192), (78_692, 808)];
    let expected = expected.map(|(address, length)| (Operation::Write, address, length, true));
    assert_eq!(
        *requests.lock().unwrap(),
        expected,
        "and nothing is read where bytes are taken as they are"
    );
    assert_eq!(device.read_at(499, 5).unwrap(), b"\0abc\0");
    assert_eq!(device.read_at(1499, 4).unwrap(), b"\0de\0");
    assert_eq!(device.read_at(70_500, 8000).unwrap(), [7; 8000]);
    assert_eq!(device.read_at(78_500, 1001).unwrap(), [vec![7; 1000], vec![0]].concat());
}

#[test]
fn the_last_answer_answers_with_the_first_error() {
    let device = Unpacker::new(Fault::new(MemoryDevice::new(1 << 20), |request: &Request| {
        if request.address == 1500 { Decision::Fail(failed()) } else { Decision::Hold }
    }));
    let (sender, receiver) = channel();
    let bytes = packed(&RANGES);
    let length = bytes.len() as u64;
    let payload = Box::new(Payload { bytes, fills: 0, sender });
    device.submit_packed(Request::new(Operation::Write, 500, length, Flags::default(), payload));
    assert_eq!(device.inner().held(), 2);
    assert!(receiver.try_recv().is_err(), "two are under way");
    device.inner().release();
    assert_eq!(receiver.try_recv().unwrap(), (1, Err(ErrorKind::Unavailable)));
}

#[test]
fn a_bad_packed_write_is_invalid_and_changes_nothing() {
    let device = Unpacker::new(MemoryDevice::new(1 << 20));
    let good = packed(&RANGES);
    let invalid = Err(ErrorKind::Invalid);
    for cut in 0..good.len().min(200) {
        assert_eq!(write(&device, 0, &good[..cut], false).1, invalid);
    }
    assert_eq!(write(&device, (1 << 20) - 79_000 + 1, &good, false).1, invalid, "past the end");
    assert_eq!(write(&device, u64::MAX - 10, &good, false).1, invalid);
    assert_eq!(
        write(&device, 0, &vec![0; UNPACK_BYTES_MAX as usize + 1], false),
        (0, invalid),
        "too long"
    );
    assert_eq!(
        write(&device, 0, &packed(&[(0, b"x"), (65 << 20, b"y")]), false).1,
        invalid,
        "span"
    );
    assert_eq!(device.inner().resident_bytes(), 0);
    assert_eq!(write(&device, (1 << 20) - 79_000, &good, false), (1, Ok(())), "just inside");
}

#[test]
fn a_read_only_device_refuses_packed_writes() {
    let geometry = Geometry { read_only: true, ..MemoryDevice::new(1 << 20).geometry() };
    let device = Unpacker::new(MemoryDevice::with_geometry(geometry));
    assert_eq!(write(&device, 0, &packed(&RANGES), false).1, Err(ErrorKind::ReadOnly));
}

#[test]
fn ranges_in_different_blocks_of_a_disk_are_mended_side_by_side_and_those_in_one_block_all_arrive()
{
    let geometry = Geometry { block_bytes: 4096, ..MemoryDevice::new(1 << 20).geometry() };
    let memory = Arc::new(MemoryDevice::with_geometry(geometry));
    memory.write_at(0, &[0xEE; 1 << 20]).unwrap();
    let holding = AtomicBool::new(true);
    let disk = Arc::new(Fault::new(memory.clone(), move |request: &Request| {
        assert!(request.address.is_multiple_of(4096) && request.length.is_multiple_of(4096));
        let read = request.operation == Operation::Read;
        if read && holding.load(SeqCst) { Decision::Hold } else { Decision::Pass }
    }));
    let device = Unpacker::new(Align::new(disk.clone(), 4096).unwrap());
    let ranges: [(u32, &[u8]); 5] = [
        (10, b"one"),
        (4096 + 5, b"two"),
        (4096 + 50, b"too"),
        (4096 + 500, b"toe"),
        (40_000, b"six"),
    ];
    let (sender, receiver) = channel();
    let bytes = packed(&ranges);
    let length = bytes.len() as u64;
    let payload = Box::new(Payload { bytes, fills: 0, sender });
    device.submit_packed(Request::new(Operation::Write, 0, length, Flags::default(), payload));
    assert_eq!(disk.held(), 3, "a read of each block is under way");
    while disk.held() > 0 {
        assert!(receiver.try_recv().is_err());
        disk.release();
    }
    assert_eq!(receiver.try_recv().unwrap(), (1, Ok(())));
    let mut expected = vec![0xEE; 1 << 20];
    ranges.iter().for_each(|(at, bytes)| {
        expected[*at as usize..*at as usize + bytes.len()].copy_from_slice(bytes)
    });
    assert!(memory.read_at(0, 1 << 20).unwrap() == expected);
}
