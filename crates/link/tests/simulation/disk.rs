//! The target's disk: answers late and in any order, keeps unflushed writes in a memory that a
//! power cut empties, and survives the target's process.
//!
//! Invariant: a request is applied at one instant between its submission and its answer. Not here:
//! what is legal (`oracle`).

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::sync::{Arc, Mutex};

use sawmill_device::{BlockDevice, Geometry, Operation, Operations, Request};
use sawmill_link::clock::Clock;
use sawmill_link::target::Standing;

use crate::network::{Dice, WorldClock};

struct QueueEntry {
    request: Request,
}

struct State {
    dice: Dice,
    /// What a power cut leaves.
    durable: Vec<u8>,
    /// What readers see.
    bytes: Vec<u8>,
    queue: BTreeMap<u64, QueueEntry>,
    due: BinaryHeap<Reverse<(u64, u64)>>,
    next: u64,
}

/// A disk.
pub(crate) struct Disk {
    geometry: Geometry,
    clock: Arc<WorldClock>,
    delay_ns_max: u64,
    /// The standing that its target stores beside it.
    pub(crate) standing: Arc<Mutex<Standing>>,
    state: Mutex<State>,
}

impl Disk {
    pub(crate) fn new(
        seed: u64,
        size_bytes: u64,
        delay_ns_max: u64,
        clock: Arc<WorldClock>,
    ) -> Self {
        let geometry = Geometry {
            size_bytes,
            block_bytes: 512,
            preferred_bytes: 4096,
            request_bytes_max: 1 << 20,
            read_only: false,
            shared_cache: true,
            operations: Operations { discard: true, write_zeroes: true, allocation: false },
        };
        let bytes = vec![0; size_bytes as usize];
        let state = State {
            dice: Dice::new(seed ^ 0xd15c),
            durable: bytes.clone(),
            bytes,
            queue: BTreeMap::new(),
            due: BinaryHeap::new(),
            next: 0,
        };
        Disk { geometry, clock, delay_ns_max, standing: Arc::default(), state: Mutex::new(state) }
    }

    /// The time of the next answer.
    pub(crate) fn next_ns(&self) -> Option<u64> {
        self.state.lock().expect("one thread").due.peek().map(|Reverse((at_ns, _))| *at_ns)
    }

    /// Executes and answers what is due.
    pub(crate) fn run(&self, now: u64) {
        loop {
            let mut state = self.state.lock().expect("one thread");
            match state.due.peek() {
                Some(Reverse((at_ns, _))) if *at_ns <= now => {}
                _ => return,
            }
            let Some(Reverse((_, id))) = state.due.pop() else { return };
            let Some(mut queued) = state.queue.remove(&id) else { continue };
            apply(&mut state, &mut queued.request);
            drop(state);
            queued.request.done();
        }
    }

    /// The target's process dies: each of its requests is executed or not, and none is answered.
    pub(crate) fn forsaken(&self) {
        let forsaken: Vec<Request> = {
            let mut state = self.state.lock().expect("one thread");
            let queue = std::mem::take(&mut state.queue);
            let mut forsaken = Vec::new();
            for (_, mut queued) in queue {
                if state.dice.permille(500) {
                    apply(&mut state, &mut queued.request);
                }
                forsaken.push(queued.request);
            }
            state.due.clear();
            forsaken
        };
        drop(forsaken);
    }

    /// The power fails: tiles written and not flushed come back as they are now, or as they were.
    pub(crate) fn power_cut(&self, tile: usize) {
        let state = &mut *self.state.lock().expect("one thread");
        for start in (0..state.bytes.len()).step_by(tile) {
            if state.dice.permille(500) {
                let range = start..start + tile;
                state.bytes[range.clone()].copy_from_slice(&state.durable[range]);
            }
        }
        state.durable.copy_from_slice(&state.bytes);
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.state.lock().expect("one thread").queue.is_empty()
    }
}

fn apply(state: &mut State, request: &mut Request) {
    let (start, end) = (request.address as usize, (request.address + request.length) as usize);
    match request.operation {
        Operation::Read => request.buffer().copy_from_slice(&state.bytes[start..end]),
        Operation::Write => request.fill(0, &mut state.bytes[start..end]),
        Operation::WriteZeroes | Operation::Discard => state.bytes[start..end].fill(0),
        Operation::Flush => state.durable.copy_from_slice(&state.bytes),
        _ => {}
    }
    if request.flags.fua && request.operation != Operation::Read {
        state.durable[start..end].copy_from_slice(&state.bytes[start..end]);
    }
}

impl BlockDevice for Disk {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn submit(&self, request: Request) {
        if let Err(error) = request.check(&self.geometry) {
            return request.fail(error);
        }
        let mut state = self.state.lock().expect("one thread");
        let delay = state.dice.below(self.delay_ns_max + 1);
        let id = state.next;
        state.next += 1;
        if delay == 0 {
            let mut request = request;
            apply(&mut state, &mut request);
            drop(state);
            return request.done();
        }
        state.due.push(Reverse((self.clock.now_ns() + delay, id)));
        state.queue.insert(id, QueueEntry { request });
    }
}
