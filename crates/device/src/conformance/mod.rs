//! The contract as tests for any device: at least one function per clause (D1 to D11); `all` runs
//! every one.
//!
//! Each function needs a fresh device: at least [`SIZE_BYTES_MIN`] bytes, all zero, which accepts
//! requests of 8 KiB. It panics with the clause's number when the clause is broken. A read-only
//! device keeps the clauses of [`read_only`].
//!
//! Invariant: [`ALL`] has every clause function; [`READ_ONLY`] and [`NULL`] have only functions of
//! `ALL`.
//!
//! Not here: what survives a crash or a restart (the durable half of D4, D8 after a restart). A
//! device that stores data tests that itself. Nor that `submit` never blocks on I/O (D1) and that
//! `geometry` is cheap (D10): how long a device may take, a suite for all devices cannot say.

mod probe;
mod zeroes;

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering::SeqCst};
use std::sync::mpsc::channel;
use std::thread;

use sawmill_testkit::Dice;

use self::probe::{Probe, answer, probe, submit_chain, submit_last_holder};
pub use self::zeroes::{
    d9_zeroed_ranges_read_as_zeroes, d11_allocation_covers_the_range_and_holes_read_as_zeroes,
};
use crate::layer::ReadOnly;
use crate::{BlockDevice, BlockDeviceExt, ErrorKind, Flags, Operation, Request, Result};

/// The smallest device that these tests can use.
pub const SIZE_BYTES_MIN: u64 = 16 << 20;

/// What the clauses test.
pub type Device = Arc<dyn BlockDevice>;

/// One test of the contract.
#[derive(Clone, Copy)]
pub struct Clause {
    /// The name of its function, which begins with the clause's number.
    pub name: &'static str,
    /// Tests a fresh device; panics with the number and the reason when the clause is broken.
    pub test: fn(Device),
}

macro_rules! clauses {
    ($($test:ident),* $(,)?) => { &[$(Clause { name: stringify!($test), test: $test }),*] };
}

/// Every clause.
pub const ALL: &[Clause] = clauses![
    d1_every_request_is_answered_exactly_once,
    d2_no_request_is_lost,
    d2_an_answer_may_be_what_drops_the_device,
    d3_reads_return_the_newest_completed_write,
    d3_random_requests_agree_with_a_byte_vector,
    d4_flush_and_fua_complete,
    d5_any_range_is_accepted_and_its_neighbors_keep_their_bytes,
    d5_neighbors_may_write_at_the_same_time,
    d6_bad_requests_are_invalid_and_change_nothing,
    d7_a_read_only_device_refuses_changes,
    d8_overlapping_writes_end_in_one_state,
    d9_zeroed_ranges_read_as_zeroes,
    d10_geometry_is_sound_and_constant,
    d11_allocation_covers_the_range_and_holes_read_as_zeroes,
];

/// The clauses that can be tested on a read-only device of zeroes.
pub const READ_ONLY: &[Clause] = clauses![
    d1_every_request_is_answered_exactly_once,
    d2_no_request_is_lost,
    d2_an_answer_may_be_what_drops_the_device,
    d6_bad_requests_are_invalid_and_change_nothing,
    d7_a_read_only_device_refuses_changes,
    d10_geometry_is_sound_and_constant,
    d11_allocation_covers_the_range_and_holes_read_as_zeroes,
];

/// The clauses that can be tested on a device that stores nothing.
pub const NULL: &[Clause] = clauses![
    d1_every_request_is_answered_exactly_once,
    d2_no_request_is_lost,
    d2_an_answer_may_be_what_drops_the_device,
    d6_bad_requests_are_invalid_and_change_nothing,
    d10_geometry_is_sound_and_constant,
    d11_allocation_covers_the_range_and_holes_read_as_zeroes,
];

/// Runs every clause, each on a fresh device from `make`.
pub fn all(make: &dyn Fn() -> Device) {
    ALL.iter().for_each(|clause| (clause.test)(make()));
}

/// Runs the clauses of [`READ_ONLY`], each on a fresh device from `make`.
pub fn read_only(make: &dyn Fn() -> Device) {
    assert!(make().geometry().read_only, "a device made for `read_only` is read-only");
    READ_ONLY.iter().for_each(|clause| (clause.test)(make()));
}

/// D1: every kind of request is answered once, also one submitted from within an answer.
pub fn d1_every_request_is_answered_exactly_once(device: Device) {
    let (sender, receiver) = channel();
    let mut submitted = 0;
    for round in 0..50 {
        for operation in Operation::ALL {
            let (address, length) =
                if operation == Operation::Flush { (0, 0) } else { (round * 1000, 4096) };
            device.submit(probe(operation, address, length, 4096, &sender));
            submitted += 1;
        }
    }
    for _ in 0..submitted {
        let _ = answer(&receiver, "D1");
    }
    drop(sender);
    assert!(receiver.try_recv().is_err(), "D1: more answers than requests");

    let (sender, receiver) = channel();
    let holders = Arc::strong_count(&device);
    submit_chain(Arc::clone(&device), 64, sender);
    let outcome = answer(&receiver, "D1, submitted from within an answer");
    // The chain drops its references on the device's own threads; wait for them, so that the test
    // drops the last one.
    while Arc::strong_count(&device) > holders {
        thread::yield_now();
    }
    assert!(outcome.is_ok(), "D1: a read in a chain failed: {outcome:?}");
}

/// D2: a dropped request answers itself, and a dropped device answers all submitted requests.
pub fn d2_no_request_is_lost(device: Device) {
    let (sender, receiver) = channel();
    drop(probe(Operation::Write, 0, 512, 512, &sender));
    let kind = answer(&receiver, "D2").err().map(|error| error.kind());
    assert_eq!(kind, Some(ErrorKind::Internal), "D2: a dropped request answers with Internal");

    for number in 0..64 {
        device.submit(probe(Operation::Write, number * 5000, 5000, 5000, &sender));
        device.submit(probe(Operation::Read, number * 5000, 5000, 5000, &sender));
    }
    device.submit(probe(Operation::Flush, 0, 0, 0, &sender));
    drop(device);
    for _ in 0..129 {
        let _ = answer(&receiver, "D2, the device was dropped with requests under way");
    }
}

/// D2: an answer may hold the last reference to a device, and drop it on the thread that delivers
/// the answer.
pub fn d2_an_answer_may_be_what_drops_the_device(device: Device) {
    let (sender, receiver) = channel();
    for number in 0..32 {
        device.submit(probe(Operation::Read, number * 5000, 5000, 5000, &sender));
    }
    let (dropped, wait) = channel();
    submit_last_holder(Arc::clone(&device), wait, sender);
    drop(device);
    drop(dropped);
    for _ in 0..33 {
        let _ = answer(&receiver, "D2, an answer dropped the device");
    }
}

/// D3: unwritten bytes are zero; a read concurrent with writes returns no byte older than the last
/// completed write, and none newer than the last submitted one.
pub fn d3_reads_return_the_newest_completed_write(device: Device) {
    const ROUNDS: u8 = 200;
    const READERS: usize = 3;
    let (address, length) = (3_000_001, 40_007_usize);
    let last = device.geometry().size_bytes - 5000;
    for place in [0, address, last] {
        assert!(
            is_zero(&read(&device, place, 5000)),
            "D3: a byte never written reads as zero, at {place}"
        );
    }
    let (submitted, completed) = (AtomicU8::new(0), AtomicU8::new(0));
    thread::scope(|scope| {
        for _ in 0..READERS {
            scope.spawn(|| {
                let mut newest = 0;
                while newest < ROUNDS {
                    newest = completed.load(SeqCst);
                    let bytes = read(&device, address, length);
                    let bound = submitted.load(SeqCst);
                    let wrong = bytes.iter().position(|byte| *byte < newest || *byte > bound);
                    assert_eq!(wrong, None, "D3: this byte is not from writes {newest} to {bound}");
                }
            });
        }
        for round in 1..=ROUNDS {
            submitted.store(round, SeqCst);
            write(&device, address, &vec![round; length]);
            completed.store(round, SeqCst);
        }
    });
    assert!(
        read(&device, address, length).iter().all(|byte| *byte == ROUNDS),
        "D3: the last write stays"
    );
}

/// D3, D5, D9 together: a long sequence of random requests has the same effect as on a vector of
/// bytes.
pub fn d3_random_requests_agree_with_a_byte_vector(device: Device) {
    random_requests_agree_with_a_byte_vector(device, 1, 1500);
}

/// The model test with a given seed and number of steps.
pub fn random_requests_agree_with_a_byte_vector(device: Device, seed: u64, steps: u32) {
    let geometry = device.geometry();
    let mut model = vec![0_u8; geometry.size_bytes.min(SIZE_BYTES_MIN) as usize];
    let mut random = Dice::new(seed);
    for step in 0..steps {
        let longest = if random.below(8) == 0 { 300_000 } else { 9_000 };
        let length = 1 + random.below(longest.min(u64::from(geometry.request_bytes_max)));
        // Half of the steps stay within the first MiB, so that old and new ranges overlap in every
        // way.
        let room = if random.below(2) == 0 { 1 << 20 } else { model.len() as u64 };
        let address = random.below(room - length + 1);
        let range = address as usize..(address + length) as usize;
        let context = || format!("step {step} of seed {seed}, {length} bytes at {address}");
        match random.below(12) {
            0..5 => {
                let mut bytes = vec![0; length as usize];
                random.fill(&mut bytes);
                write(&device, address, &bytes);
                model[range].copy_from_slice(&bytes);
            }
            5..9 => {
                let same = read(&device, address, length as usize) == model[range];
                assert!(same, "D3: a read differs from the model, {}", context());
            }
            9 if geometry.operations.write_zeroes => {
                expect(device.write_zeroes(address, length), "D9: write-zeroes");
                model[range].fill(0);
            }
            10 if geometry.operations.discard => {
                expect(device.discard(address, length), "D9: discard");
                let now = read(&device, address, length as usize);
                let is_sound =
                    now.iter().zip(&model[range.clone()]).all(|(now, old)| *now == 0 || now == old);
                assert!(
                    is_sound,
                    "D9: discarded bytes are neither zero nor as before, {}",
                    context()
                );
                model[range].copy_from_slice(&now);
            }
            _ => expect(device.flush(), "D4: flush"),
        }
    }
    for (number, chunk) in model.chunks(250_000).enumerate() {
        let same = read(&device, number as u64 * 250_000, chunk.len()) == chunk;
        assert!(same, "D3: the end state differs from the model in chunk {number} of seed {seed}");
    }
}

/// D4: a flush completes alone, after writes and concurrently with writes; a write with FUA
/// completes and is readable.
pub fn d4_flush_and_fua_complete(device: Device) {
    expect(device.flush(), "D4: a flush of a device never written");
    thread::scope(|scope| {
        for writer in 0..3_u64 {
            let device = &device;
            scope.spawn(move || {
                for round in 0..20_u8 {
                    write(device, writer << 20, &[round + 1; 6000]);
                    expect(device.flush(), "D4: a flush beside writes");
                }
            });
        }
    });
    for writer in 0..3_u64 {
        assert_eq!(read(&device, writer << 20, 6000), [20; 6000], "D4: flushed bytes are readable");
    }
    let fua = Flags { fua: true, ..Flags::default() };
    expect(device.call(Operation::Write, 777, 5, fua, b"fua!!".to_vec()), "D4: a write with FUA");
    assert_eq!(read(&device, 776, 7), b"\x14fua!!\x14", "D4: bytes written with FUA are readable");
}

/// D5: ranges around every kind of boundary, the longest request, the last byte.
pub fn d5_any_range_is_accepted_and_its_neighbors_keep_their_bytes(device: Device) {
    let geometry = device.geometry();
    let mut value = 0_u8;
    for boundary in [512_u64, 4096, 16 << 10, 64 << 10, 1 << 20] {
        for before in [0_u64, 1, 511, 513] {
            for length in [1_usize, 2, 511, 512, 513, 4095, 4096, 4097, 8193] {
                let address = boundary * 3 - before;
                let around = (address - 600, length + 1200);
                let mut expected = read(&device, around.0, around.1);
                value = value.wrapping_add(1).max(1);
                write(&device, address, &vec![value; length]);
                expected[600..600 + length].fill(value);
                let same = read(&device, around.0, around.1) == expected;
                assert!(same, "D5: a write of {length} bytes at {address} did just that");
            }
        }
    }
    let longest = geometry.request_bytes_max.min((SIZE_BYTES_MIN - 3) as u32) as usize;
    let mut bytes = vec![0; longest];
    Dice::new(5).fill(&mut bytes);
    write(&device, 1, &bytes);
    assert!(
        read(&device, 1, longest) == bytes,
        "D5: a request of {longest} bytes at 1 is accepted"
    );
    write(&device, geometry.size_bytes - 1, b"!");
    assert_eq!(read(&device, geometry.size_bytes - 1, 1), b"!", "D5: the last byte can be written");
}

/// D5 with concurrent writers: four threads own interleaved unaligned ranges; no write changes a
/// neighbor's bytes.
pub fn d5_neighbors_may_write_at_the_same_time(device: Device) {
    const OWNERS: u64 = 4;
    const RANGE_BYTES: u64 = 333;
    const RANGES: u64 = 400;
    thread::scope(|scope| {
        for owner in 0..OWNERS {
            let device = &device;
            scope.spawn(move || {
                let mut random = Dice::new(owner + 10);
                let mut model = vec![0_u8; (RANGE_BYTES * RANGES) as usize];
                for _ in 0..600 {
                    let (range, start) = (random.below(RANGES), random.below(RANGE_BYTES));
                    let length = 1 + random.below(RANGE_BYTES - start);
                    let address = (range * OWNERS + owner) * RANGE_BYTES + start;
                    let mine = (range * RANGE_BYTES + start) as usize
                        ..(range * RANGE_BYTES + start + length) as usize;
                    if random.below(3) > 0 {
                        random.fill(&mut model[mine.clone()]);
                        write(device, address, &model[mine.clone()]);
                    }
                    let same = read(device, address, length as usize) == model[mine];
                    assert!(same, "D5: a neighbor's write changed {length} bytes at {address}");
                }
            });
        }
    });
}

/// D6: a request that is out of range, empty, too long or unsupported fails with `Invalid` and
/// changes no byte.
pub fn d6_bad_requests_are_invalid_and_change_nothing(device: Device) {
    let geometry = device.geometry();
    let size = geometry.size_bytes;
    let changes = [Operation::Write, Operation::Discard, Operation::WriteZeroes];
    let supported = |operation| match operation {
        Operation::Discard => geometry.operations.discard,
        Operation::WriteZeroes => geometry.operations.write_zeroes,
        Operation::Allocation => geometry.operations.allocation,
        _ => true,
    };
    let expect_refusal = |operation, address, length: u64| {
        let bytes = vec![0xAA; length.min(1 << 20) as usize];
        let kind =
            device.call(operation, address, length, Flags::default(), bytes).map_err(|e| e.kind());
        // A read-only device may return either kind for a change that is also out of range.
        let read_only = geometry.read_only && changes.contains(&operation);
        match kind {
            Err(ErrorKind::Invalid) => (),
            Err(ErrorKind::ReadOnly) if read_only => (),
            other => panic!(
                "D6: {operation:?} of {length} bytes at {address} was answered with {other:?}"
            ),
        }
    };
    let others = [Operation::Read, Operation::Prefetch, Operation::Allocation];
    for operation in changes.into_iter().chain(others) {
        expect_refusal(operation, 4096, 0);
        expect_refusal(operation, size, 1);
        expect_refusal(operation, size - 1, 2);
        expect_refusal(operation, size - 4096, 8192);
        expect_refusal(operation, u64::MAX, 1);
        expect_refusal(operation, u64::MAX - 10, 4096);
        expect_refusal(operation, 4096, u64::MAX - 4096);
        expect_refusal(operation, 4096, u64::MAX);
        if !supported(operation) {
            expect_refusal(operation, 0, 4096);
        }
    }
    let longest = u64::from(geometry.request_bytes_max);
    if longest < size {
        expect_refusal(Operation::Read, 0, longest + 1);
        expect_refusal(Operation::Write, 0, longest + 1);
    }
    assert!(is_zero(&read(&device, 0, 8192)), "D6: a refused request changed bytes");
    assert!(
        is_zero(&read(&device, size - 8192, 8192)),
        "D6: a refused request changed the last bytes"
    );
}

/// D7: a read-only device, or this one behind [`ReadOnly`], refuses every change and still reads.
pub fn d7_a_read_only_device_refuses_changes(device: Device) {
    let mut expected = vec![0; 4096];
    if !device.geometry().read_only {
        expected.fill(7);
        write(&device, 0, &expected);
    }
    let read_only_device: Device = if device.geometry().read_only {
        Arc::clone(&device)
    } else {
        Arc::new(ReadOnly::new(Arc::clone(&device)))
    };
    let geometry = read_only_device.geometry();
    assert!(geometry.read_only, "D7: the geometry says so");
    let kind = |result: Result<()>| result.map_err(|error| error.kind());
    assert_eq!(kind(read_only_device.write_at(100, b"x")), Err(ErrorKind::ReadOnly), "D7: a write");
    if geometry.operations.discard {
        assert_eq!(
            kind(read_only_device.discard(0, 4096)),
            Err(ErrorKind::ReadOnly),
            "D7: a discard"
        );
    }
    if geometry.operations.write_zeroes {
        assert_eq!(
            kind(read_only_device.write_zeroes(0, 4096)),
            Err(ErrorKind::ReadOnly),
            "D7: write-zeroes"
        );
    }
    expect(read_only_device.flush(), "D7: a flush of a read-only device");
    assert_eq!(read(&read_only_device, 0, 4096), expected, "D7: a refused write changes nothing");
    assert_eq!(read(&device, 0, 4096), expected, "D7: a refused write changes nothing");
}

/// D8: concurrent writes to one range; all later reads return the same bytes, each from one of the
/// writers.
pub fn d8_overlapping_writes_end_in_one_state(device: Device) {
    let base = 1_000_003_u64;
    let longest = u64::from(device.geometry().request_bytes_max.min(40_000));
    let mut random = Dice::new(8);
    for round in 0..20 {
        let (sender, receiver) = channel();
        let ranges: Vec<_> =
            (0..8).map(|_| (random.below(30_000), 1 + random.below(longest))).collect();
        let before = read(&device, base, 70_000);
        thread::scope(|scope| {
            for (writer, (start, length)) in ranges.iter().enumerate() {
                let (device, sender, fill) = (&device, sender.clone(), value(round, writer));
                scope.spawn(move || {
                    let exchange =
                        Probe { bytes: vec![fill; *length as usize], sender: Some(sender) };
                    let (operation, flags) = (Operation::Write, Flags::default());
                    device.submit(Request::new(
                        operation,
                        base + start,
                        *length,
                        flags,
                        Box::new(exchange),
                    ));
                });
            }
        });
        ranges
            .iter()
            .for_each(|_| drop(expect(answer(&receiver, "D8"), "D8: an overlapping write")));
        let whole = read(&device, base, 70_000);
        for (offset, byte) in whole.iter().enumerate() {
            let mut written = false;
            let mut from_a_writer = false;
            for (writer, (start, length)) in ranges.iter().enumerate() {
                let covers = (*start..start + length).contains(&(offset as u64));
                written |= covers;
                from_a_writer |= covers && *byte == value(round, writer);
            }
            let right = if written { from_a_writer } else { *byte == before[offset] };
            assert!(right, "D8: byte {offset} of round {round} is from no writer");
        }
        if round % 4 == 0 {
            expect(device.flush(), "D4: flush");
        }
        let pieces = (0..70).flat_map(|piece| read(&device, base + piece * 1000, 1000));
        assert!(pieces.eq(whole.iter().copied()), "D8: later readers disagree, round {round}");
    }
}

/// D10: the geometry's values are consistent and do not change during use.
pub fn d10_geometry_is_sound_and_constant(device: Device) {
    let geometry = device.geometry();
    assert!(
        geometry.size_bytes >= SIZE_BYTES_MIN,
        "the conformance tests need {SIZE_BYTES_MIN} bytes"
    );
    assert!([512, 4096].contains(&geometry.block_bytes), "D10: block_bytes is 512 or 4096");
    assert!(geometry.request_bytes_max >= geometry.block_bytes, "D10: a block fits into a request");
    assert!(geometry.preferred_bytes > 0, "D10: the preferred size is a size");
    assert!(
        geometry.preferred_bytes <= geometry.request_bytes_max,
        "D10: the preferred size is accepted"
    );
    // The outcomes do not matter here: a read-only device refuses the write.
    let _ = device.write_at(0, &[1; 512]);
    let _ = device.read_at(0, 512);
    let _ = device.flush();
    assert_eq!(geometry, device.geometry(), "D10: the geometry is constant");
}

/// The byte that a writer of D8 writes. It differs from that of the previous round, so that an old
/// byte is not mistaken for a new one.
fn value(round: usize, writer: usize) -> u8 {
    (1 + (round % 2) * 100 + writer) as u8
}

fn expect<T>(result: Result<T>, what: &str) -> T {
    result.unwrap_or_else(|error| panic!("{what} failed: {error}"))
}

/// Reads any length, in pieces that the device accepts.
fn read(device: &Device, address: u64, length: usize) -> Vec<u8> {
    let longest = device.geometry().request_bytes_max as usize;
    let mut bytes = Vec::with_capacity(length);
    while bytes.len() < length {
        let piece = longest.min(length - bytes.len());
        bytes
            .extend(expect(device.read_at(address + bytes.len() as u64, piece), "a read in range"));
    }
    bytes
}

/// Writes any length, in pieces that the device accepts.
fn write(device: &Device, address: u64, bytes: &[u8]) {
    let longest = device.geometry().request_bytes_max as usize;
    for (number, piece) in bytes.chunks(longest).enumerate() {
        expect(device.write_at(address + (number * longest) as u64, piece), "a write in range");
    }
}

fn is_zero(bytes: &[u8]) -> bool {
    bytes.iter().all(|byte| *byte == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_clause_of_the_contract_has_a_function_with_its_number() {
        let contract = include_str!("../contract.rs");
        let numbered = contract.lines().filter_map(|line| line.strip_prefix("/// - **D"));
        let of_contract: Vec<&str> =
            numbered.filter_map(|rest| Some(rest.split_once("**")?.0)).collect();
        let of_name = |clause: &Clause| clause.name.strip_prefix('d')?.split_once('_');
        let mut tested: Vec<&str> = ALL
            .iter()
            .map(|clause| of_name(clause).expect("a name that begins with its number").0)
            .collect();
        tested.dedup();
        assert_eq!(tested, of_contract);
    }
}
