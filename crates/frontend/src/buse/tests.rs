//! Packets and chunks, also such as no kernel should send, and a chunk applied to a device that
//! chooses the order of what is in flight.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use proptest::prelude::*;
use sawmill_device::{
    BlockDevice, BlockDeviceExt, Error, ErrorKind, Geometry, MemoryDevice, Operation, Request,
};
use sawmill_sys::{Arena, AttachedMemory, MemoryPiece};

use super::chunk::{apply, keep_worst};
use super::fuzzing;
use super::gate::{Gate, Quiet};
use super::protocol::{
    Change, ChunkLayout, READ_PACKET_BYTES, ReadPacket, WRITE_PACKET_BYTES, WritePacket,
    acknowledgement,
};
use super::service::parts;

const LAYOUT: ChunkLayout = ChunkLayout { chunk_bytes: 65536, block_bytes: 4096 };
const DATA_AT: usize = 16 * 32;

/// A record: sector, sectors, flag.
type Record = (u64, u64, u64);

/// A chunk whose data are one byte for each record.
fn chunk(records: &[(Record, u8)]) -> Vec<u8> {
    let mut bytes = vec![0xEE; LAYOUT.chunk_bytes as usize];
    let mut data_at = DATA_AT;
    for (place, ((sector, sectors, flag), byte)) in records.iter().enumerate() {
        for (field, value) in [*sector, *sectors, 1, *flag].into_iter().enumerate() {
            let at = place * 32 + field * 8;
            bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
        }
        let end = sectors.saturating_mul(512).saturating_add(data_at as u64) as usize;
        if *flag == 1
            && let Some(data) = bytes.get_mut(data_at..end)
        {
            data.fill(*byte);
            data_at = end;
        }
    }
    bytes
}

fn changes(records: &[Record], write_bytes_max: u64) -> Option<Vec<Change>> {
    let all: Vec<_> = records.iter().map(|record| (*record, 0)).collect();
    LAYOUT.changes(&chunk(&all), records.len() as u64, write_bytes_max)
}

fn change(operation: Operation, address: u64, length: u64, data_at: usize) -> Change {
    Change { operation, address, length, data_at }
}

/// The bytes as a chunk in shared memory.
fn in_memory(bytes: &[u8]) -> MemoryPiece {
    let arena = Arena::create("test", bytes.len()).unwrap();
    let file = arena.file().try_clone().unwrap();
    let memory = AttachedMemory::open(file.into(), bytes.len()).unwrap();
    let mut piece = memory.lend(0, bytes.len() as u64).unwrap();
    piece.copy_from_slice(bytes);
    piece
}

#[test]
fn every_packet_means_what_the_format_says() {
    let write = |first: u64, second: u64| {
        let mut packet = [0; WRITE_PACKET_BYTES];
        packet[..8].copy_from_slice(&first.to_le_bytes());
        packet[8..].copy_from_slice(&second.to_le_bytes());
        WritePacket::parse(&packet)
    };
    assert_eq!(write(0, 7), WritePacket::Chunk { offset: 0, records: 7 });
    assert_eq!(write(1 << 32, 1), WritePacket::Chunk { offset: 1 << 32, records: 1 });
    let token = (1 << 32) + 1;
    assert_eq!(write(token, token), WritePacket::Flush(token));
    assert_eq!(write(u64::MAX, 0), WritePacket::End);
    let read = |sector: u64, sectors: u64, offset: u64| {
        let mut packet = [0; READ_PACKET_BYTES];
        for (place, field) in [sector, sectors, offset].into_iter().enumerate() {
            packet[place * 8..place * 8 + 8].copy_from_slice(&field.to_le_bytes());
        }
        ReadPacket::parse(&packet)
    };
    let parsed = ReadPacket::Read { address: 1024, length: 512, offset: 4096 };
    assert_eq!(read(2, 1, 4096), parsed);
    assert_eq!(read(0, 0, u64::MAX), ReadPacket::End);
    let endless = ReadPacket::Read { address: u64::MAX, length: u64::MAX, offset: 4096 };
    assert_eq!(read(u64::MAX / 512, 2, 4096), endless, "no memory is as long");
    let expected = [2, 0, 0, 0, 1, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0];
    assert_eq!(acknowledgement((1 << 32) + 2, 5), expected);
}

#[test]
fn records_become_changes_and_writes_that_continue_each_other_are_one() {
    use Operation::{Discard, Write, WriteZeroes};
    let found =
        changes(&[(8, 8, 1), (16, 8, 1), (0, 8, 1), (8, 2048, 3), (0, 1, 9), (1, 1, 5)], 1 << 20);
    let expected = vec![
        change(Write, 4096, 8192, DATA_AT),
        change(Write, 0, 4096, DATA_AT + 8192),
        change(Discard, 4096, 1 << 20, DATA_AT + 12288),
        change(WriteZeroes, 0, 512, DATA_AT + 12288),
        change(WriteZeroes, 512, 512, DATA_AT + 12288),
    ];
    assert_eq!(found, Some(expected));
    let found = changes(&[(0, 24, 1), (24, 8, 1)], 8192);
    let expected = vec![change(Write, 0, 8192, DATA_AT), change(Write, 8192, 8192, DATA_AT + 8192)];
    assert_eq!(found, Some(expected), "no longer than the device takes");
}

#[test]
fn a_chunk_that_makes_no_sense_is_refused_whole() {
    let fits = (LAYOUT.chunk_bytes - DATA_AT as u64) / 512;
    assert!(changes(&[(0, fits, 1)], 1 << 20).is_some());
    for records in [
        vec![(0, fits + 1, 1)],
        vec![(0, fits, 1), (0, 1, 1)],
        vec![(0, u64::MAX, 1)],
        vec![(u64::MAX / 512, 2, 3)],
        vec![(0, 8, 2)],
        vec![(0, 0, 1)],
    ] {
        assert_eq!(changes(&records, 1 << 20), None, "{records:?}");
    }
    assert_eq!(LAYOUT.changes(&chunk(&[]), 17, 1 << 20), None, "more records than places");
}

proptest! {
    #[test]
    fn whatever_a_chunk_has_its_changes_lie_inside(
        bytes in proptest::collection::vec(any::<u8>(), 512), records in 0_u64..20,
        flags in proptest::collection::vec(0_u64..10, 16), write_bytes_max in 1_u64..9000,
    ) {
        let mut chunk = vec![0; 16384];
        chunk[..512].copy_from_slice(&bytes);
        for (place, flag) in flags.iter().enumerate() {
            let record = &mut chunk[place * 32..place * 32 + 32];
            // Lengths that may fit, and flags that exist.
            record[10..16].fill(0);
            record[24..].copy_from_slice(&flag.to_le_bytes());
        }
        fuzzing::chunk(&chunk, records, write_bytes_max);
    }
}

/// Keeps requests until it has some or all are there, then answers the newest first.
struct Reversing {
    device: MemoryDevice,
    held: Mutex<Vec<Request>>,
    most: usize,
}

impl BlockDevice for Reversing {
    fn geometry(&self) -> Geometry {
        self.device.geometry()
    }

    fn submit(&self, request: Request) {
        let mut held = self.held.lock();
        held.push(request);
        if held.len() >= self.most {
            held.drain(..).rev().for_each(|request| self.device.submit(request));
        }
    }
}

#[test]
fn of_two_writes_of_a_block_the_later_one_wins_also_in_a_device_that_turns_their_order() {
    let device =
        Arc::new(Reversing { device: MemoryDevice::new(1 << 20), held: Mutex::default(), most: 3 });
    let records =
        [((0, 8, 1), 1), ((32, 8, 1), 2), ((0, 8, 1), 3), ((4, 8, 1), 4), ((64, 1, 9), 0)];
    let bytes = chunk(&records);
    let found = LAYOUT.changes(&bytes, records.len() as u64, 1 << 20).unwrap();
    let shared: Arc<dyn BlockDevice> = device.clone();
    let applying = std::thread::spawn(move || apply(&shared, in_memory(&bytes), &found).is_none());
    // It waits for an overlapping change, which this device holds until something else comes.
    while !applying.is_finished() {
        let held: Vec<Request> = device.held.lock().drain(..).rev().collect();
        held.into_iter().for_each(|request| device.device.submit(request));
        std::thread::yield_now();
    }
    assert!(applying.join().unwrap(), "nothing failed");
    let read = device.device.read_at(0, 6144).unwrap();
    assert!(read[..2048].iter().all(|byte| *byte == 3), "the third write");
    assert!(read[2048..].iter().all(|byte| *byte == 4), "the fourth");
}

/// Fails writes at one address.
struct Failing(MemoryDevice);

impl BlockDevice for Failing {
    fn geometry(&self) -> Geometry {
        self.0.geometry()
    }

    fn submit(&self, request: Request) {
        match request.address {
            4096 => request.fail(Error::new(ErrorKind::Full, "no room")),
            _ => self.0.submit(request),
        }
    }
}

#[test]
fn the_error_of_a_change_is_that_of_its_chunk_and_the_others_are_applied() {
    let failing = Arc::new(Failing(MemoryDevice::new(1 << 20)));
    let records = [((8, 8, 1), 1), ((64, 8, 1), 2)];
    let bytes = chunk(&records);
    let found = LAYOUT.changes(&bytes, 2, 1 << 20).unwrap();
    let shared: Arc<dyn BlockDevice> = failing.clone();
    let error = apply(&shared, in_memory(&bytes), &found).expect("one fails");
    assert_eq!(error.kind(), ErrorKind::Full);
    let read = failing.0.read_at(64 * 512, 4096).unwrap();
    assert!(read.iter().all(|byte| *byte == 2));
}

#[test]
fn a_read_has_parts_that_the_device_takes_and_that_cover_it() {
    assert_eq!(parts(8192, 4096).collect::<Vec<_>>(), [(0, 4096), (4096, 4096)]);
    assert_eq!(parts(5120, 4096).collect::<Vec<_>>(), [(0, 4096), (4096, 1024)]);
    assert_eq!(parts(512, u64::MAX).collect::<Vec<_>>(), [(0, 512)]);
    assert_eq!(parts(0, 4096).count(), 0);
}

#[test]
fn what_is_left_to_the_next_server_stays_and_nothing_is_left_once_the_power_goes_off() {
    let left = Gate::default();
    assert!(left.abandon() && left.abandon(), "each answer of a closed device is none");
    assert!(!left.pass(), "the threads end");
    assert!(!left.power_off(), "the power stays on");
    let ending = Gate::default();
    ending.finish();
    assert!(ending.power_off());
    assert!(!ending.abandon(), "nobody comes any more: errors are answers again");
    assert!(ending.pass(), "the kernel waits for the threads");
    ending.finish();
    assert!(!ending.abandon(), "and that is final");
}

#[test]
fn that_a_device_is_closed_counts_more_than_any_other_error() {
    let mut kept = None;
    for kind in [ErrorKind::Full, ErrorKind::Closed, ErrorKind::Unavailable] {
        keep_worst(&mut kept, Error::new(kind, "an error"));
        keep_worst(&mut kept, Error::new(ErrorKind::Full, "a later one"));
    }
    assert_eq!(kept.map(|error| error.kind()), Some(ErrorKind::Closed));
}

#[test]
fn a_device_that_finishes_does_not_rest_any_more() {
    let gate = Gate::default();
    gate.rest();
    gate.finish();
    gate.rest();
    assert!(gate.pass(), "a stop needs its threads");
    gate.leave();
    gate.finish();
    assert!(!gate.pass());
}

#[test]
fn a_device_is_quiet_only_when_both_threads_rest_and_all_is_answered() {
    let gate = Arc::new(Gate::default());
    gate.taken(|counts| counts.reads += 1);
    let threads: Vec<_> = (0..2)
        .map(|_| {
            let gate = Arc::clone(&gate);
            std::thread::spawn(move || {
                while gate.pass() {
                    std::thread::yield_now();
                }
                gate.ended();
            })
        })
        .collect();
    gate.rest();
    assert_eq!(gate.wait_quiet(Duration::from_millis(20)), Quiet::TooLate);
    gate.answered(0, 512);
    assert_eq!(gate.wait_quiet(Duration::MAX), Quiet::Yes);
    assert!(gate.is_quiet());
    gate.serve();
    assert!(!gate.is_quiet(), "a door that serves again is not quiet");
    gate.leave();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    assert_eq!(gate.wait_quiet(Duration::MAX), Quiet::Ended);
    let counts = gate.counts();
    assert_eq!((counts.reads, counts.bytes_out, counts.in_flight, counts.errors), (1, 512, 0, 0));
}
