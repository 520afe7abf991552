//! One user of a device: a thread that owns a region of it, and knows every byte there.
//!
//! Invariant: each answer is compared with what was written before, byte for byte; after a failure
//! the region is not used any more. Not here: when workers run (`load`).

use std::thread;
use std::time::{Duration, Instant};

use sawmill_device::{BlockDevice, BlockDeviceExt, Flags, Geometry, Operation, Request, Result};
use sawmill_format::packed_write;
use sawmill_link::PackedDevice;
use sawmill_link::initiator::RemoteDevice;

/// The longest request: several places.
const REQUEST_BYTES_MAX: u64 = 200 << 10;
/// The most ranges of a packed write, and the most bytes of each.
const PACKED_RANGES_MAX: u64 = 40;
const PACKED_RANGE_BYTES_MAX: u64 = 300;

/// The counters of a worker.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counts {
    pub(crate) reads: u64,
    pub(crate) writes: u64,
    pub(crate) packed: u64,
    pub(crate) discards: u64,
    pub(crate) zeroes: u64,
    pub(crate) flushes: u64,
    pub(crate) bytes: u64,
    pub(crate) mismatches: u64,
    pub(crate) errors: u64,
    pub(crate) longest_us: u64,
}

impl Counts {
    pub(crate) fn add(&mut self, other: &Counts) {
        self.reads += other.reads;
        self.writes += other.writes;
        self.packed += other.packed;
        self.discards += other.discards;
        self.zeroes += other.zeroes;
        self.flushes += other.flushes;
        self.bytes += other.bytes;
        self.mismatches += other.mismatches;
        self.errors += other.errors;
        self.longest_us = self.longest_us.max(other.longest_us);
    }
}

/// A worker, and what its region holds.
pub(crate) struct Worker {
    dice: u64,
    first: u64,
    model: Vec<u8>,
    has_failed: bool,
    pub(crate) counts: Counts,
}

impl Worker {
    /// A worker for the region of `bytes` from `first` on, which holds zeroes.
    pub(crate) fn new(seed: u64, first: u64, bytes: u64) -> Self {
        let dice = seed.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        Worker {
            dice,
            first,
            model: vec![0; bytes as usize],
            has_failed: false,
            counts: Counts::default(),
        }
    }

    fn roll(&mut self) -> u64 {
        self.dice ^= self.dice << 13;
        self.dice ^= self.dice >> 7;
        self.dice ^= self.dice << 17;
        self.dice
    }

    fn below(&mut self, bound: u64) -> u64 {
        (self.roll() >> 11) % bound.max(1)
    }

    /// Makes one request every `every`, for `long`.
    pub(crate) fn run(&mut self, device: &RemoteDevice, every: Duration, long: Duration) {
        let began = Instant::now();
        let mut due = began;
        while began.elapsed() < long && !self.has_failed {
            self.one(device);
            due = (due + every).max(Instant::now() - every * 4);
            thread::sleep(due.saturating_duration_since(Instant::now()));
        }
    }

    fn one(&mut self, device: &RemoteDevice) {
        let kind = self.below(100);
        let most = match self.below(32) {
            0 => REQUEST_BYTES_MAX,
            1..8 => 16 << 10,
            8..20 => 4096,
            _ => 512,
        };
        let size_bytes = self.model.len() as u64;
        let length = 1 + self.below(most.min(size_bytes));
        let start = self.below(size_bytes - length + 1);
        let began = Instant::now();
        let outcome = match kind {
            0..35 => self.write(device, start, length, kind < 3),
            35..70 => self.read(device, start, length),
            70..80 => self.write_packed(device),
            80..87 => self.clear(device, Operation::Discard, start, length),
            87..94 => self.clear(device, Operation::WriteZeroes, start, length),
            _ => {
                self.counts.flushes += 1;
                device.flush()
            }
        };
        let took_us = began.elapsed().as_micros() as u64;
        self.counts.longest_us = self.counts.longest_us.max(took_us);
        if let Err(error) = outcome {
            eprintln!("request of kind {kind}, {length} bytes at {start}: {error}");
            self.counts.errors += 1;
            self.has_failed = true;
        }
    }

    fn write(&mut self, device: &RemoteDevice, start: u64, length: u64, fua: bool) -> Result<()> {
        let bytes = self.fresh(start, length);
        self.counts.writes += 1;
        self.counts.bytes += length;
        let flags = Flags { fua, no_unmap: false };
        device.call(Operation::Write, self.first + start, length, flags, bytes).map(drop)
    }

    /// Makes new bytes for a range, and stores them in the model.
    fn fresh(&mut self, start: u64, length: u64) -> Vec<u8> {
        let mut bytes = vec![0; length as usize];
        for chunk in bytes.chunks_mut(8) {
            let word = self.roll().to_le_bytes();
            chunk.copy_from_slice(&word[..chunk.len()]);
        }
        self.model[start as usize..(start + length) as usize].copy_from_slice(&bytes);
        bytes
    }

    fn read(&mut self, device: &RemoteDevice, start: u64, length: u64) -> Result<()> {
        let bytes = device.read_at(self.first + start, length as usize)?;
        self.counts.reads += 1;
        self.counts.bytes += length;
        let expected = &self.model[start as usize..(start + length) as usize];
        if let Some(at) = bytes.iter().zip(expected).position(|(read, expected)| read != expected) {
            eprintln!("{length} bytes at {start}: byte {at} is another than was written");
            self.counts.mismatches += 1;
            self.has_failed = true;
        }
        Ok(())
    }

    fn clear(
        &mut self,
        device: &RemoteDevice,
        operation: Operation,
        start: u64,
        length: u64,
    ) -> Result<()> {
        self.model[start as usize..(start + length) as usize].fill(0);
        match operation {
            Operation::Discard => self.counts.discards += 1,
            _ => self.counts.zeroes += 1,
        }
        let address = self.first + start;
        device.call(operation, address, length, Flags::default(), Vec::new()).map(drop)
    }

    /// Writes several short ranges as one request.
    fn write_packed(&mut self, device: &RemoteDevice) -> Result<()> {
        let size_bytes = self.model.len() as u64;
        let base = self.below(size_bytes / 2);
        let (mut at, mut ranges) = (base, Vec::new());
        for _ in 0..1 + self.below(PACKED_RANGES_MAX) {
            let length = 1 + self.below(PACKED_RANGE_BYTES_MAX);
            if at + length > size_bytes {
                break;
            }
            ranges.push(((at - base) as u32, self.fresh(at, length)));
            at += length + 1 + self.below(5000);
        }
        let slices = ranges.iter().map(|(offset, bytes)| (*offset, bytes.as_slice()));
        let mut payload = vec![0; packed_write::encoded_bytes(slices.clone()) as usize];
        packed_write::encode(slices, &mut payload).map_err(|error| {
            let what = "the ranges cannot be packed";
            sawmill_device::Error::caused(sawmill_device::ErrorKind::Invalid, what, error)
        })?;
        self.counts.packed += 1;
        self.counts.bytes += payload.len() as u64;
        let length = payload.len() as u64;
        let address = self.first + base;
        PackedRemote(device)
            .call(Operation::Write, address, length, Flags::default(), payload)
            .map(drop)
    }

    /// Reads all of the region.
    pub(crate) fn verify(&mut self, device: &RemoteDevice) {
        let size_bytes = self.model.len() as u64;
        for start in (0..size_bytes).step_by(REQUEST_BYTES_MAX as usize) {
            let length = REQUEST_BYTES_MAX.min(size_bytes - start);
            if !self.has_failed
                && let Err(error) = self.read(device, start, length)
            {
                eprintln!("the last look, {length} bytes at {start}: {error}");
                self.counts.errors += 1;
                self.has_failed = true;
            }
        }
    }
}

/// A device whose writes are packed ones.
struct PackedRemote<'a>(&'a RemoteDevice);

impl BlockDevice for PackedRemote<'_> {
    fn geometry(&self) -> Geometry {
        self.0.geometry()
    }

    fn submit(&self, request: Request) {
        self.0.submit_packed(request);
    }
}
