//! The layer that accepts any byte range over a device of whole blocks: the contract, and what a
//! read-modify-write could lose.

use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;

use sawmill_device::layer::{Align, Decision, Fault};
use sawmill_device::{
    BlockDevice, BlockDeviceExt, Error, ErrorKind, Flags, Geometry, MemoryDevice, Operation,
    Outcome, Request, conformance,
};

const SIZE_BYTES: u64 = 16 << 20;

/// Memory that accepts whole blocks only, and executes requests late, in any order, on a thread.
struct Blocks {
    unit: u64,
    memory: Arc<MemoryDevice>,
    late: Option<Arc<RequestShuffler>>,
}

#[derive(Default)]
struct RequestShuffler {
    requests: Mutex<(Vec<Request>, bool)>,
    changed: Condvar,
}

impl Blocks {
    fn new(unit: u64, request_bytes_max: u32) -> Self {
        let full = MemoryDevice::new(SIZE_BYTES).geometry();
        let geometry = Geometry { request_bytes_max, preferred_bytes: 4096, ..full };
        let memory = Arc::new(MemoryDevice::with_geometry(geometry));
        Blocks { unit, memory, late: None }
    }

    fn late(unit: u64, request_bytes_max: u32, seed: u64) -> Self {
        let (mut device, late) =
            (Blocks::new(unit, request_bytes_max), Arc::new(RequestShuffler::default()));
        let (memory, mine) = (device.memory.clone(), late.clone());
        thread::spawn(move || mine.carry_out(&memory, seed));
        device.late = Some(late);
        device
    }
}

impl RequestShuffler {
    /// Executes the waiting requests in random order.
    fn carry_out(&self, memory: &MemoryDevice, mut random: u64) {
        loop {
            let mut requests = self.requests.lock().expect("no panic");
            while requests.0.is_empty() && !requests.1 {
                requests = self.changed.wait(requests).expect("no panic");
            }
            if requests.0.is_empty() {
                return;
            }
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let chosen = (random >> 33) as usize % requests.0.len();
            let request = requests.0.swap_remove(chosen);
            drop(requests);
            memory.submit(request);
        }
    }
}

impl Drop for Blocks {
    fn drop(&mut self) {
        if let Some(late) = &self.late {
            late.requests.lock().expect("no panic").1 = true;
            late.changed.notify_all();
        }
    }
}

impl BlockDevice for Blocks {
    fn geometry(&self) -> Geometry {
        self.memory.geometry()
    }

    fn submit(&self, request: Request) {
        if !(request.address | request.length).is_multiple_of(self.unit) {
            let text = format!("{:?} of part of a block", request.operation);
            return request.fail(Error::new(ErrorKind::Corrupt, text));
        }
        match &self.late {
            None => self.memory.submit(request),
            Some(late) => {
                late.requests.lock().expect("no panic").0.push(request);
                late.changed.notify_one();
            }
        }
    }
}

fn submit(
    device: &dyn BlockDevice,
    operation: Operation,
    address: u64,
    bytes: &[u8],
) -> Receiver<Outcome> {
    let (sender, receiver) = channel();
    let on_outcome = move |outcome, _| drop(sender.send(outcome));
    device.submit(Request::with_bytes(
        operation,
        address,
        Flags::default(),
        bytes.to_vec(),
        on_outcome,
    ));
    receiver
}

fn write(device: &dyn BlockDevice, address: u64, bytes: &[u8]) -> Receiver<Outcome> {
    submit(device, Operation::Write, address, bytes)
}

/// The layer over a device that holds every request until the test lets it go.
type HoldAlign<F> = Align<Fault<Blocks, F>>;

fn holding_device() -> HoldAlign<impl Fn(&Request) -> Decision + Send + Sync> {
    Align::new(Fault::new(Blocks::new(512, 1 << 20), |_: &Request| Decision::Hold), 512)
        .expect("sound")
}

/// Passes the held requests to the device; returns their operations, addresses and lengths.
fn release_held<F: Fn(&Request) -> Decision + Send + Sync + 'static>(
    device: &HoldAlign<F>,
) -> Vec<(Operation, u64, u64)> {
    let requests = device.inner().take_held();
    let records = requests
        .iter()
        .map(|request| (request.operation, request.address, request.length))
        .collect();
    requests.into_iter().for_each(|request| device.inner().inner().submit(request));
    records
}

fn done(outcome: &Receiver<Outcome>) {
    assert!(matches!(outcome.try_recv(), Ok(Ok(_))), "answered, with success");
}

#[test]
fn the_contract_is_kept_over_whole_blocks() {
    for unit in [512, 4096] {
        let align =
            |blocks| -> Arc<dyn BlockDevice> { Arc::new(Align::new(blocks, unit).expect("sound")) };
        conformance::all(&|| align(Blocks::new(unit.into(), 1 << 20)));
        conformance::all(&|| align(Blocks::late(unit.into(), 1 << 20, 7)));
        // Limits that split long requests into pieces; one is not a multiple of the unit.
        conformance::all(&|| align(Blocks::late(unit.into(), 8 << 10, 8)));
        conformance::all(&|| align(Blocks::late(unit.into(), (64 << 10) + 17, 9)));
    }
}

#[test]
fn random_requests_with_many_seeds_agree_with_a_byte_vector() {
    for seed in 200..208 {
        let device = Arc::new(Align::new(Blocks::late(4096, 64 << 10, seed), 4096).expect("sound"));
        conformance::random_requests_agree_with_a_byte_vector(device, seed, 800);
    }
}

#[test]
fn a_device_that_does_not_consist_of_blocks_is_refused() {
    let text = |size_bytes, request_bytes_max, unit| {
        let full = MemoryDevice::new(size_bytes).geometry();
        let device = MemoryDevice::with_geometry(Geometry { request_bytes_max, ..full });
        Align::new(device, unit).err().map(|error| error.to_string()).unwrap_or_default()
    };
    assert_eq!(text(1 << 20, 4096, 4096), "");
    assert!(text(1 << 20, 4096, 768).contains("blocks of 768 bytes"));
    assert!(text(1 << 20, 4096, 256).contains("blocks of 256 bytes"));
    assert!(text((1 << 20) + 512, 4096, 4096).contains("of 1049088 bytes"));
    assert!(text(1 << 20, 4095, 4096).contains("takes 4095 bytes"));
}

#[test]
fn whole_blocks_pass_at_once_and_beside_each_other() {
    let device = holding_device();
    let outcomes = [write(&device, 0, &[1; 1024]), write(&device, 512, &[2; 1024])];
    let read = submit(&device, Operation::Read, 512, &[0; 512]);
    assert_eq!(release_held(&device).len(), 3, "all of them are with the device at the same time");
    outcomes.iter().chain([&read]).for_each(done);
}

#[test]
fn a_whole_block_written_beside_a_part_of_it_is_not_lost() {
    for change in [Operation::Write, Operation::WriteZeroes, Operation::Discard] {
        let device = holding_device();
        let before = write(&device, 0, &[9; 1024]);
        release_held(&device);
        done(&before);
        let part = write(&device, 10, b"part");
        let whole = submit(&device, change, 0, &[7; 512]);
        assert_eq!(
            release_held(&device),
            [(Operation::Read, 0, 512)],
            "the whole block waits: {change:?}"
        );
        assert_eq!(release_held(&device), [(Operation::Write, 0, 512)]);
        done(&part);
        assert_eq!(release_held(&device), [(change, 0, 512)]);
        done(&whole);
        let value = if change == Operation::Write { 7 } else { 0 };
        assert_eq!(device.inner().inner().read_at(0, 1024).expect("whole"), {
            let mut expected = vec![value; 512];
            expected.resize(1024, 9);
            expected
        });
    }
}

#[test]
fn a_part_of_a_block_waits_for_the_whole_block_under_way() {
    let device = holding_device();
    let whole = write(&device, 512, &[7; 1024]);
    let part = write(&device, 1000, b"part");
    let other = write(&device, 3000, b"elsewhere");
    // The first change of a partial block waits for all whole blocks in flight, wherever they are.
    assert_eq!(device.waiting(), 2);
    assert_eq!(release_held(&device), [(Operation::Write, 512, 1024)]);
    done(&whole);
    assert_eq!(device.waiting(), 0);
    assert_eq!(release_held(&device), [(Operation::Read, 512, 512), (Operation::Read, 2560, 512)]);
    assert_eq!(
        release_held(&device),
        [(Operation::Write, 512, 512), (Operation::Write, 2560, 512)]
    );
    done(&other);
    done(&part);
    let bytes = device.inner().inner().read_at(512, 1024).expect("whole");
    assert_eq!(
        (&bytes[..488], &bytes[488..492], &bytes[492..]),
        (&[7; 488][..], &b"part"[..], &[7; 532][..])
    );
}

#[test]
fn neighbors_in_one_block_both_stay() {
    let device = holding_device();
    let first = write(&device, 0, b"first");
    let second = write(&device, 100, b"second");
    for _ in 0..4 {
        release_held(&device);
    }
    done(&first);
    done(&second);
    let bytes = device.inner().inner().read_at(0, 512).expect("whole");
    assert_eq!((&bytes[..5], &bytes[100..106]), (&b"first"[..], &b"second"[..]));
}

#[test]
fn zeroes_move_only_the_edges_and_a_discard_none() {
    let device = holding_device();
    let before = write(&device, 0, &[9; 4096]);
    release_held(&device);
    done(&before);
    let zeroes = submit(&device, Operation::WriteZeroes, 100, &[0; 3000]);
    assert_eq!(release_held(&device), [(Operation::Read, 0, 512), (Operation::Read, 3072, 512)]);
    let parts = [
        (Operation::Write, 0, 512),
        (Operation::WriteZeroes, 512, 2560),
        (Operation::Write, 3072, 512),
    ];
    assert_eq!(release_held(&device), parts);
    done(&zeroes);
    let mut expected = [9; 4096];
    expected[100..3100].fill(0);
    assert_eq!(device.inner().inner().read_at(0, 4096).expect("whole"), expected);
    let small = submit(&device, Operation::Discard, 3100, &[0; 900]);
    done(&small);
    let large = submit(&device, Operation::Discard, 3100, &[0; 999]);
    assert_eq!(release_held(&device), [(Operation::Discard, 3584, 512)]);
    done(&large);
}

#[test]
fn a_failed_edge_changes_nothing_and_gives_the_blocks_back() {
    let failing = |request: &Request| {
        if request.operation == Operation::Read && request.address == 1024 {
            Decision::Fail(Error::new(ErrorKind::Unavailable, "no answer"))
        } else {
            Decision::Pass
        }
    };
    let device = Align::new(Fault::new(Blocks::new(512, 1 << 20), failing), 512).expect("sound");
    let kind = |bytes: &[u8]| device.write_at(10, bytes).map_err(|error| error.kind());
    assert_eq!(kind(&[1; 1500]), Err(ErrorKind::Unavailable));
    device.write_at(0, &[2; 2048]).expect("whole blocks need no read");
    assert_eq!(kind(&[3; 1500]), Err(ErrorKind::Unavailable));
    assert_eq!(kind(&[3; 10]), Ok(()));
    assert_eq!(device.inner().inner().read_at(512, 1536).expect("whole"), [2; 1536]);
}

#[test]
fn fua_stays_with_every_write_and_no_read() {
    let wrong = Arc::new(AtomicUsize::new(0));
    let wrong_count = wrong.clone();
    let watch = move |request: &Request| {
        let changes = matches!(request.operation, Operation::Write | Operation::WriteZeroes);
        wrong_count.fetch_add(usize::from(request.flags.fua != changes), SeqCst);
        Decision::Pass
    };
    let device = Align::new(Fault::new(Blocks::new(512, 1024), watch), 512).expect("sound");
    let fua = Flags { fua: true, no_unmap: true };
    device.call(Operation::Write, 100, 1024, fua, vec![1; 1024]).expect("in range");
    device.call(Operation::WriteZeroes, 100, 5000, fua, Vec::new()).expect("in range");
    device.call(Operation::Write, 512, 512, fua, vec![1; 512]).expect("in range");
    assert_eq!(wrong.load(SeqCst), 0);
}

#[test]
fn a_long_line_of_waiters_needs_no_deep_stack() {
    const WAITERS: usize = 3000;
    let small = thread::Builder::new().stack_size(256 << 10);
    let test = || {
        let first = AtomicUsize::new(0);
        let decide = move |_: &Request| match first.fetch_add(1, SeqCst) {
            0 => Decision::Hold,
            _ => Decision::Fail(Error::new(ErrorKind::Unavailable, "at once")),
        };
        let device = Align::new(Fault::new(Blocks::new(512, 1 << 20), decide), 512).expect("sound");
        let outcomes: Vec<_> = (0..WAITERS).map(|_| write(&device, 7, b"x")).collect();
        assert_eq!(device.waiting(), WAITERS - 1);
        device.inner().release();
        assert_eq!(outcomes.iter().filter(|outcome| outcome.try_recv().is_ok()).count(), WAITERS);
        assert_eq!(device.waiting(), 0);
    };
    small.spawn(test).expect("a thread").join().expect("no overflow");
}

#[test]
fn what_waits_is_answered_when_the_layer_goes() {
    let device = holding_device();
    let outcomes =
        [write(&device, 0, &[1; 512]), write(&device, 7, b"x"), write(&device, 0, &[1; 512])];
    drop(device);
    assert!(outcomes.iter().all(|outcome| matches!(outcome.try_recv(), Ok(Err(_)))));
}

/// The story: a read-modify-write puts back what it read. A whole block that came in between would
/// be undone, and so would a neighbor's bytes. All writes of a round are under way at the same
/// time.
#[test]
fn nothing_is_undone_under_random_writes_of_wholes_and_parts() {
    const BLOCKS: u64 = 8;
    let device = Align::new(Blocks::late(512, 1 << 20, 3), 512).expect("sound");
    let mut random = 1_u64;
    let mut below = |bound: u64| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (random >> 33) % bound
    };
    let mut content = vec![0_u8; (BLOCKS * 512) as usize];
    for round in 0..1500_u32 {
        let (whole_value, part_value) = ((round * 2 % 250 + 1) as u8, (round * 2 % 250 + 2) as u8);
        let mut allowed: Vec<[Option<u8>; 2]> =
            content.iter().map(|byte| [Some(*byte), None]).collect();
        let mut outcomes = Vec::new();
        let wholes = below(4);
        for _ in 0..6 {
            let whole = below(6) < wholes;
            let (address, length) = if whole {
                let first = below(BLOCKS);
                (first * 512, (1 + below(BLOCKS - first)) * 512)
            } else {
                let first = below(BLOCKS * 512 - 1);
                (first, 1 + below((BLOCKS * 512 - first).min(700)))
            };
            let value = if whole { whole_value } else { part_value };
            outcomes.push(write(&device, address, &vec![value; length as usize]));
            for byte in &mut allowed[address as usize..(address + length) as usize] {
                // In every order the old bytes are gone; either write of this round may remain.
                let other = byte[0]
                    .filter(|byte| [whole_value, part_value].contains(byte) && *byte != value);
                *byte = [Some(value), other.or(byte[1].filter(|byte| *byte != value))];
            }
        }
        for outcome in outcomes {
            outcome.recv().expect("answered").expect("in range");
        }
        content = device.read_at(0, content.len()).expect("in range");
        let wrong = content
            .iter()
            .zip(&allowed)
            .position(|(byte, allowed)| !allowed.contains(&Some(*byte)));
        assert_eq!(wrong, None, "round {round}: a byte that no write of the round left there");
    }
}
