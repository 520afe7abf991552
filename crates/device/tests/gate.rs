//! A gate that is shut, gets another device, and opens again, while requests come and go.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

use sawmill_device::layer::{Decision, Fault, Gate, ReadOnly};
use sawmill_device::{
    BlockDevice, BlockDeviceExt, ErrorKind, Flags, Geometry, MemoryDevice, Operation, Operations,
    Outcome, Request,
};

const SIZE: u64 = 16 << 20;
const ANSWER_TIME_MAX: Duration = Duration::from_secs(60);
/// The wait for something that must not happen.
const SHORT_TIME_MAX: Duration = Duration::from_millis(20);

fn memory() -> Arc<MemoryDevice> {
    Arc::new(MemoryDevice::new(SIZE))
}

type HoldDevice = Arc<Fault<MemoryDevice, fn(&Request) -> Decision>>;

/// A device that holds every request.
fn holding() -> HoldDevice {
    Arc::new(Fault::new(MemoryDevice::new(SIZE), |_: &Request| Decision::Hold))
}

fn write(device: &dyn BlockDevice, number: u8, sender: &Sender<(u8, bool)>) {
    let sender = sender.clone();
    // A finished test has no receiver.
    let receiver = move |outcome: Outcome, _| {
        let _ = sender.send((number, outcome.is_ok()));
    };
    device.submit(Request::with_bytes(
        Operation::Write,
        0,
        Flags::default(),
        vec![number; 4096],
        receiver,
    ));
}

#[test]
fn what_comes_to_a_shut_gate_waits_and_goes_in_in_its_order() {
    let device = memory();
    let gate = Gate::new(device.clone());
    gate.write_at(0, b"before").expect("in range");
    gate.shut(ANSWER_TIME_MAX).expect("nothing is inside");
    gate.shut(ANSWER_TIME_MAX).expect("it is shut");
    let (sender, receiver) = channel();
    (1..=100).for_each(|number| write(&gate, number, &sender));
    assert_eq!(gate.waiting(), 100);
    assert_eq!(device.read_at(0, 6).expect("in range"), b"before");
    assert!(receiver.try_recv().is_err(), "nothing was answered");
    gate.open();
    gate.open();
    let answers: Vec<_> = receiver.try_iter().collect();
    assert_eq!(answers, (1..=100).map(|number| (number, true)).collect::<Vec<_>>());
    assert_eq!(device.read_at(0, 2).expect("in range"), [100, 100]);
}

#[test]
fn a_gate_is_shut_when_the_last_request_inside_is_answered() {
    let device = holding();
    let gate = Arc::new(Gate::new(device.clone()));
    let (sender, receiver) = channel();
    write(&*gate, 1, &sender);
    let error = gate.shut(SHORT_TIME_MAX).expect_err("one is inside");
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    write(&*gate, 2, &sender);
    assert_eq!((gate.waiting(), device.held()), (0, 2), "it is open again");
    let shutting = std::thread::spawn({
        let gate = gate.clone();
        move || gate.shut(ANSWER_TIME_MAX)
    });
    // It is shutting as soon as something has to wait.
    let mut number = 3;
    while gate.waiting() == 0 {
        write(&*gate, number, &sender);
        number = number.wrapping_add(1).max(3);
    }
    assert!(!shutting.is_finished());
    let inside = device.release();
    shutting.join().expect("no panic").expect("they are answered");
    assert_eq!(receiver.try_iter().count(), inside);
    assert_eq!((gate.waiting(), device.held()), (1, 0));
}

#[test]
fn a_gate_is_not_shut_before_the_last_answer_was_heard() {
    let device = holding();
    let gate = Gate::new(device.clone());
    let (sender, receiver) = channel();
    let hears_slowly = move |_| receiver.recv().expect("the test says when");
    gate.submit(Request::bare(Operation::Flush, 0, 0, Flags::default(), hears_slowly));
    std::thread::scope(|threads| {
        threads.spawn(|| device.release());
        wait_until_taken(&device);
        let early = gate.shut(SHORT_TIME_MAX);
        sender.send(()).expect("it waits");
        early.expect_err("its answer was not heard to the end");
        gate.shut(ANSWER_TIME_MAX).expect("it is");
    });
}

/// Waits until the device holds no more requests.
fn wait_until_taken(device: &HoldDevice) {
    while device.held() > 0 {
        std::thread::yield_now();
    }
}

#[test]
fn another_device_takes_the_place_behind_a_shut_gate_alone() {
    let (first, second) = (memory(), memory());
    second.write_at(0, b"second").expect("in range");
    let gate = Gate::new(first.clone());
    let expect_refusal = |gate: &Gate, device: Arc<dyn BlockDevice>, part: &str| {
        let error = gate.replace(device).err().expect("it must be refused");
        assert_eq!(error.kind(), ErrorKind::Invalid);
        assert!(error.to_string().contains(part), "{error}");
    };
    expect_refusal(&gate, second.clone(), "behind a shut gate only");
    gate.shut(ANSWER_TIME_MAX).expect("nothing is inside");
    let (sender, receiver) = channel();
    write(&gate, 7, &sender);
    let old = gate.replace(second.clone()).expect("it fits");
    let first: Arc<dyn BlockDevice> = first;
    assert!(Arc::ptr_eq(&old, &first));
    gate.open();
    assert_eq!(receiver.recv().expect("answered"), (7, true));
    assert_eq!(first.read_at(0, 6).expect("in range"), [0; 6]);
    assert_eq!(second.read_at(0, 2).expect("in range"), [7, 7]);
    assert_eq!(gate.read_at(0, 2).expect("in range"), [7, 7]);
}

#[test]
fn a_device_that_doors_cannot_live_with_is_refused() {
    let gate = Gate::new(memory());
    gate.shut(ANSWER_TIME_MAX).expect("nothing is inside");
    let full = memory().geometry();
    let without = |change: fn(&mut Operations)| {
        let mut geometry = full;
        change(&mut geometry.operations);
        geometry
    };
    let cases = [
        (
            Geometry { size_bytes: SIZE - 1, ..full },
            "size in bytes shrank from 16777216 to 16777215",
        ),
        (
            Geometry { block_bytes: if full.block_bytes == 512 { 4096 } else { 512 }, ..full },
            "blocks",
        ),
        (Geometry { request_bytes_max: 1 << 20, ..full }, "longest request"),
        (Geometry { shared_cache: false, ..full }, "cache"),
        (without(|operations| operations.discard = false), "discard"),
        (without(|operations| operations.write_zeroes = false), "write zeroes"),
        (without(|operations| operations.allocation = false), "allocation"),
    ];
    let check = |device: Arc<dyn BlockDevice>, part: &str| {
        let text = gate.replace(device).err().expect("it must be refused").to_string();
        assert!(text.contains(part), "{part}: {text}");
    };
    for (geometry, part) in cases {
        check(Arc::new(MemoryDevice::with_geometry(geometry)), part);
    }
    check(Arc::new(ReadOnly::new(MemoryDevice::new(SIZE))), "read-only");
    assert_eq!(gate.geometry(), full);
    gate.replace(Arc::new(MemoryDevice::new(2 * SIZE))).expect("a larger one fits");
    assert_eq!(gate.geometry().size_bytes, 2 * SIZE);
    gate.open();
    gate.write_at(2 * SIZE - 1, b"x").expect("it has grown");
}

/// A disk that grows once.
struct ResizableDevice {
    sizes: [Geometry; 2],
    grown: AtomicBool,
}

impl BlockDevice for ResizableDevice {
    fn geometry(&self) -> Geometry {
        self.sizes[usize::from(self.grown.load(Ordering::SeqCst))]
    }

    fn submit(&self, request: Request) {
        request.done();
    }
}

#[test]
fn a_resize_behind_the_gate_is_seen_in_front_of_it() {
    let small = memory().geometry();
    let sizes = [small, Geometry { size_bytes: 2 * SIZE, ..small }];
    let device = Arc::new(ResizableDevice { sizes, grown: AtomicBool::new(false) });
    let gate = Gate::new(device.clone());
    let before = gate.geometry();
    device.grown.store(true, Ordering::SeqCst);
    assert_eq!((before.size_bytes, gate.geometry().size_bytes), (SIZE, 2 * SIZE));
    device.grown.store(false, Ordering::SeqCst);
    gate.shut(ANSWER_TIME_MAX).expect("nothing is inside");
    assert_eq!(gate.geometry().size_bytes, SIZE, "the last before it was shut");
    device.grown.store(true, Ordering::SeqCst);
    assert_eq!(gate.geometry().size_bytes, SIZE, "shut, it asks no device");
}

#[test]
fn requests_that_wait_at_a_gate_that_goes_answer_themselves() {
    let gate = Gate::new(memory());
    gate.shut(ANSWER_TIME_MAX).expect("nothing is inside");
    let (sender, receiver) = channel();
    write(&gate, 1, &sender);
    drop(gate);
    assert_eq!(receiver.recv().expect("answered"), (1, false));
}

#[test]
fn a_gate_shut_again_and_again_under_load_loses_nothing() {
    let devices = [memory(), memory()];
    let gate = Gate::new(devices[0].clone());
    let done = AtomicBool::new(false);
    std::thread::scope(|threads| {
        let writers: Vec<_> = (0..4u64)
            .map(|place| {
                let gate = &gate;
                threads.spawn(move || {
                    for round in 0..20_000u64 {
                        let bytes = (place << 32 | round).to_le_bytes();
                        gate.write_at(place * 4096, &bytes).expect("in range");
                        assert_eq!(gate.read_at(place * 4096, 8).expect("in range"), bytes);
                    }
                })
            })
            .collect();
        threads.spawn(|| {
            let mut turn = 0;
            while !done.load(Ordering::SeqCst) {
                gate.shut(ANSWER_TIME_MAX).expect("memory answers");
                // The next device continues where this one ended.
                let (from, to) = (&devices[turn], &devices[1 - turn]);
                let bytes = from.read_at(0, 4 * 4096).expect("in range");
                to.write_at(0, &bytes).expect("in range");
                gate.replace(to.clone()).expect("it is shut");
                turn = 1 - turn;
                gate.open();
            }
        });
        let well: Vec<bool> = writers.into_iter().map(|writer| writer.join().is_ok()).collect();
        done.store(true, Ordering::SeqCst);
        assert_eq!(well, [true; 4]);
    });
}
