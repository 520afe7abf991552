//! Nothing is allocated while requests go through both ends (WZBLK §2.2.7).
//!
//! The allocator counts for each thread, so the counts are read while the threads of the link are
//! in this file: the initiator's when a request completes, the target's when the device gets one.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::mpsc::{Sender, channel};
use std::thread;

use parking_lot::{Condvar, Mutex};
use sawmill_device::{
    BlockDevice, Exchange, Flags, Geometry, NullDevice, Operation, Outcome, Request,
};
use sawmill_sys::CountingAllocator;

use crate::pair::{ANSWER_TIME_MAX, Pair, key};

const WARM: u64 = 2_000;
const ALL: u64 = 20_000;
const DEPTH: usize = 16;
/// Of one packet, and of several.
const LENGTHS: [u64; 3] = [512, 4 << 10, 64 << 10];

/// What the threads of the link have allocated since the warm-up.
#[derive(Default)]
struct Watch {
    warm: AtomicBool,
    questions: AtomicU64,
    allocated: AtomicU64,
}

thread_local! {
    static SEEN: Cell<Option<u64>> = const { Cell::new(None) };
}

impl Watch {
    /// Called by a thread of the link.
    fn check(&self) {
        let now = CountingAllocator::allocations_of_this_thread();
        let before = SEEN.replace(Some(now));
        if let Some(before) = before.filter(|_| self.warm.load(SeqCst)) {
            self.questions.fetch_add(1, SeqCst);
            self.allocated.fetch_add(now - before, SeqCst);
        }
    }
}

struct WatchedDevice {
    inner: NullDevice,
    watch: Arc<Watch>,
}

impl BlockDevice for WatchedDevice {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn submit(&self, request: Request) {
        self.watch.check();
        self.inner.submit(request);
    }
}

struct Load {
    pair: Arc<Pair>,
    watch: Arc<Watch>,
    done: AtomicU64,
    under_way: AtomicUsize,
}

impl Load {
    fn submit(&self, number: u64, exchange: Box<RepeatExchange>) {
        let length = LENGTHS[number as usize % LENGTHS.len()];
        let (operation, length) = match number / LENGTHS.len() as u64 % 3 {
            0 => (Operation::Read, length),
            1 => (Operation::Write, length),
            _ => (Operation::Flush, 0),
        };
        self.pair.submit(Request::new(operation, 0, length, Flags::default(), exchange));
    }
}

/// A request that submits its successor when it completes.
struct RepeatExchange {
    load: Arc<Load>,
    buffer: Vec<u8>,
    number: u64,
    end_sender: Sender<Outcome>,
}

impl Exchange for RepeatExchange {
    fn fill(&mut self, _: u64, into: &mut [u8]) {
        into.fill(0x5A);
    }

    fn buffer(&mut self) -> &mut [u8] {
        &mut self.buffer[..LENGTHS[self.number as usize % LENGTHS.len()] as usize]
    }

    fn complete(mut self: Box<Self>, outcome: Outcome) {
        let load = Arc::clone(&self.load);
        load.watch.check();
        let done = load.done.fetch_add(1, SeqCst) + 1;
        if done == WARM {
            load.watch.warm.store(true, SeqCst);
        }
        if outcome.is_ok() && done < ALL {
            self.number = done;
            return load.submit(done, self);
        }
        // The link does not cause what follows.
        load.watch.warm.store(false, SeqCst);
        if outcome.is_err() || load.under_way.fetch_sub(1, SeqCst) == 1 {
            self.end_sender.send(outcome).expect("a receiver waits");
        }
    }
}

/// Locks allocate once for the most threads that wait for one at a time; this does it in advance.
fn make_many_threads_wait_for_a_lock() {
    const MANY: usize = 64;
    let (waiting, all, go) = (Mutex::new(0), Condvar::new(), Condvar::new());
    thread::scope(|scope| {
        for _ in 0..MANY {
            scope.spawn(|| {
                let mut waiting = waiting.lock();
                *waiting += 1;
                all.notify_one();
                go.wait_while(&mut waiting, |waiting| *waiting <= MANY);
            });
        }
        let mut waiting = waiting.lock();
        all.wait_while(&mut waiting, |waiting| *waiting < MANY);
        *waiting += 1;
        go.notify_all();
    });
}

fn allocates_nothing(kinds: &[&str]) {
    make_many_threads_wait_for_a_lock();
    let watch = Arc::new(Watch::default());
    let device = WatchedDevice { inner: NullDevice::new(1 << 30), watch: Arc::clone(&watch) };
    let pair = Arc::new(Pair::new(Arc::new(device), kinds, &key));
    let (end_sender, end) = channel();
    let load =
        Arc::new(Load { pair, watch: Arc::clone(&watch), done: 0.into(), under_way: DEPTH.into() });
    for number in 0..DEPTH as u64 {
        let (load, end_sender) = (Arc::clone(&load), end_sender.clone());
        let buffer = vec![0; LENGTHS[2] as usize];
        let exchange =
            Box::new(RepeatExchange { load: Arc::clone(&load), buffer, number, end_sender });
        load.submit(number, exchange);
    }
    end.recv_timeout(ANSWER_TIME_MAX).expect("all end").expect("all are done");
    // The pair's threads must not be those that drop it.
    while Arc::strong_count(&load) > 1 {
        thread::yield_now();
    }
    assert!(watch.questions.load(SeqCst) > ALL, "threads of both ends were asked");
    assert_eq!(watch.allocated.load(SeqCst), 0, "allocations while requests went");
}

#[test]
fn nothing_is_allocated_by_either_end_over_udp() {
    allocates_nothing(&["udp"]);
}

#[test]
fn nothing_is_allocated_by_either_end_over_tcp() {
    allocates_nothing(&["tcp"]);
}

#[test]
fn nothing_is_allocated_by_either_end_over_several_links() {
    allocates_nothing(&["udp", "tcp", "udp"]);
}
