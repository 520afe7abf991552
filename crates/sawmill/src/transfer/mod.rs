//! Copies a whole disk from one end to another: import, export and copy are this with different
//! ends.
//!
//! Modules: `ends` (files, NBD exports, volumes), `image` (disk images, through QEMU), `progress`
//! (how far it got, kept beside the journal), this file (the plan, the workers, the progress).
//!
//! Invariants:
//! 1. Progress is noted only for a prefix of the disk whose every byte is durable at the
//!    destination.
//! 2. The result of an earlier attempt is trusted only if both ends can tell that they have not
//!    changed. Otherwise it is compared, and rewritten where it differs.
//! 3. Holes and zeroes are not read, sent or stored where the destination is known to read as
//!    zeroes.
//! 4. A source that changes during the transfer ends it with an error, never with success.
//!
//! Not here: what a command allows and prints (`command::past`: `import`, `export`).

mod cage;
pub(crate) mod ends;
pub(crate) mod image;
pub(crate) mod image_file;
mod inspect_image;
pub(crate) mod progress;

use std::collections::{BTreeSet, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use sawmill_device::Allocation;

use sawmill_console::exit::{Exit, Failure, Result};
use sawmill_console::output::Bar;

/// The largest piece; no longer than a record of a volume's journal.
const PIECE_BYTES_MAX: u64 = 1 << 20;
/// The largest hole in one request to the destination.
const HOLE_BYTES_MAX: u64 = 1 << 30;
/// Bytes whose allocation is requested at a time.
const WINDOW_BYTES: u64 = 1 << 30;
/// Zeroes are detected in units of this size.
const GRAIN_BYTES: usize = 4096;
/// Concurrent pieces.
const WORKERS_MAX: usize = 8;
/// Interval at which progress is shown and, once durable, noted.
const PROGRESS_EVERY: Duration = Duration::from_millis(200);

/// The source of a transfer. All calls may block.
pub(crate) trait Source: Sync {
    fn size_bytes(&self) -> u64;

    /// The longest read.
    fn request_bytes_max(&self) -> u64;

    /// Reads exactly `length` bytes.
    fn read(&self, address: u64, length: usize) -> Result<Vec<u8>>;

    /// The first runs of the range, at least one; together no longer than the range.
    fn allocation(&self, address: u64, length: u64) -> Result<Vec<Allocation>>;

    /// Fails if the source has changed since it was opened.
    fn check_unchanged(&self) -> Result<()>;
}

/// The destination of a transfer. All calls may block.
pub(crate) trait Destination: Sync {
    /// The longest read or write.
    fn request_bytes_max(&self) -> u64;

    fn read(&self, address: u64, length: usize) -> Result<Vec<u8>>;

    fn write(&self, address: u64, bytes: Vec<u8>) -> Result<()>;

    /// Makes a range read as zeroes, without moving them if possible.
    fn zero(&self, address: u64, length: u64) -> Result<()>;

    /// A point that covers everything completed so far, which becomes durable in time.
    fn safe_point(&self) -> Result<u64>;

    /// Whether everything that the point covers is durable.
    fn is_durable(&self, safe_point: u64) -> Result<bool>;
}

/// The starting point of a transfer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Start {
    /// Everything before this is in place from an earlier attempt, and is skipped.
    pub(crate) from: u64,
    /// Everything between `from` and here may be in place: equal data is not rewritten.
    pub(crate) compare_below: u64,
    /// Beyond `compare_below` the destination reads as zeroes where it has not been written.
    pub(crate) blank: bool,
}

/// The result of a transfer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub(crate) struct TransferResult {
    /// Bytes of the disk, holes included.
    pub(crate) size_bytes: u64,
    /// Bytes skipped because an earlier attempt had copied them.
    pub(crate) resumed_bytes: u64,
    /// Bytes read from the source in this attempt.
    pub(crate) read_bytes: u64,
    /// Bytes written to the destination in this attempt: neither holes nor zeroes.
    pub(crate) written_bytes: u64,
}

/// One piece of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct CopyPiece {
    address: u64,
    length: u64,
    data: bool,
}

/// The remaining work, and the pieces in flight.
struct CopyPlan<'a> {
    source: &'a dyn Source,
    at: u64,
    piece_bytes: u64,
    /// Bounded by the runs of one window.
    runs: VecDeque<Allocation>,
    in_flight_addresses: BTreeSet<u64>,
}

impl CopyPlan<'_> {
    fn next(&mut self) -> Result<Option<CopyPiece>> {
        let size = self.source.size_bytes();
        if self.at >= size {
            return Ok(None);
        }
        if self.runs.is_empty() {
            let window = WINDOW_BYTES.min(size - self.at);
            self.runs.extend(self.source.allocation(self.at, window)?);
        }
        let Some(run) = self.runs.front_mut() else {
            // Not the end of the disk: a copy that stops here would be short, yet count as
            // complete.
            let at = self.at;
            let text = format!("the source reports no allocation for the bytes from {at} on");
            return Err(Failure::new(Exit::Internal, text));
        };
        let most = if run.data { self.piece_bytes } else { HOLE_BYTES_MAX };
        // Pieces end where pieces of the whole disk would, so that requests are aligned.
        let length = run.length.min(most - self.at % most);
        let piece = CopyPiece { address: self.at, length, data: run.data };
        run.length -= length;
        if run.length == 0 {
            self.runs.pop_front();
        }
        self.at += length;
        // Under the lock of the plan: `done_through` must never pass a piece that is being moved.
        self.in_flight_addresses.insert(piece.address);
        Ok(Some(piece))
    }

    /// Everything before this is in place.
    fn done_through(&self) -> u64 {
        self.in_flight_addresses.first().copied().unwrap_or(self.at)
    }
}

/// A transfer in progress: what the workers share.
struct Transfer<'a> {
    source: &'a dyn Source,
    destination: &'a dyn Destination,
    start: Start,
    plan: Mutex<CopyPlan<'a>>,
    is_stopped: AtomicBool,
    read_bytes: AtomicU64,
    written_bytes: AtomicU64,
}

/// Copies everything from `source` to `destination`. `keep` notes that everything before an address
/// is in place and durable. When this returns, everything is written, and the next
/// [`Destination::safe_point`] covers it.
pub(crate) fn transfer(
    source: &dyn Source,
    destination: &dyn Destination,
    start: Start,
    bar: &mut Bar,
    keep: &mut dyn FnMut(u64) -> Result<()>,
) -> Result<TransferResult> {
    let size_bytes = source.size_bytes();
    let piece_bytes =
        PIECE_BYTES_MAX.min(source.request_bytes_max()).min(destination.request_bytes_max());
    let transfer = Transfer {
        source,
        destination,
        start,
        plan: Mutex::new(CopyPlan {
            source,
            at: start.from,
            piece_bytes: piece_bytes.max(GRAIN_BYTES as u64),
            runs: VecDeque::new(),
            in_flight_addresses: BTreeSet::new(),
        }),
        is_stopped: AtomicBool::new(false),
        read_bytes: AtomicU64::new(0),
        written_bytes: AtomicU64::new(0),
    };
    std::thread::scope(|scope| {
        let (sender, receiver) = sync_channel(WORKERS_MAX);
        for _ in 0..WORKERS_MAX {
            let (sender, transfer) = (sender.clone(), &transfer);
            scope.spawn(move || transfer.work(&sender));
        }
        drop(sender);
        let mut progress = ProgressPoint { begun: None, kept: start.from };
        let outcome = loop {
            match receiver.recv_timeout(PROGRESS_EVERY) {
                Err(RecvTimeoutError::Timeout) => {
                    let done = transfer.plan().done_through();
                    bar.show(done, size_bytes);
                    if let Err(failure) = progress.advance(&transfer, done, keep) {
                        break Err(failure);
                    }
                }
                Err(RecvTimeoutError::Disconnected) => break Ok(()),
                Ok(failure) => break Err(failure),
            }
        };
        // Before the scope joins the workers, which would move all other pieces first.
        transfer.is_stopped.store(true, Ordering::Release);
        outcome
    })?;
    // After the last read, because a change during any read spoils the copy.
    source.check_unchanged()?;
    bar.show(size_bytes, size_bytes);
    Ok(TransferResult {
        size_bytes,
        resumed_bytes: start.from,
        read_bytes: transfer.read_bytes.into_inner(),
        written_bytes: transfer.written_bytes.into_inner(),
    })
}

/// The safe point that becomes progress once it is durable.
struct ProgressPoint {
    begun: Option<(u64, u64)>,
    kept: u64,
}

impl ProgressPoint {
    fn advance(
        &mut self,
        transfer: &Transfer<'_>,
        done: u64,
        keep: &mut dyn FnMut(u64) -> Result<()>,
    ) -> Result<()> {
        if self.begun.is_none() && done > self.kept {
            // `done` was looked up before the point is taken, so the point covers all of it.
            self.begun = Some((done, transfer.destination.safe_point()?));
        }
        if let Some((through, safe_point)) = self.begun
            && transfer.destination.is_durable(safe_point)?
        {
            // A source that has changed must not leave progress that a later attempt trusts.
            transfer.source.check_unchanged()?;
            keep(through)?;
            (self.begun, self.kept) = (None, through);
        }
        Ok(())
    }
}

impl<'a> Transfer<'a> {
    fn plan(&self) -> std::sync::MutexGuard<'_, CopyPlan<'a>> {
        self.plan.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes pieces until none are left, or a worker failed.
    fn work(&self, sender: &SyncSender<sawmill_console::exit::Failure>) {
        while !self.is_stopped.load(Ordering::Acquire) {
            let next = self.plan().next();
            let moved = match next {
                Ok(None) => return,
                Ok(Some(piece)) => self.move_piece(piece).map(|()| {
                    self.plan().in_flight_addresses.remove(&piece.address);
                }),
                Err(failure) => Err(failure),
            };
            if let Err(failure) = moved {
                self.is_stopped.store(true, Ordering::Release);
                // The receiver of a first failure has stopped listening.
                let _ = sender.send(failure);
                return;
            }
        }
    }

    fn move_piece(&self, piece: CopyPiece) -> Result<()> {
        let CopyPiece { address, length, data } = piece;
        let blank = self.start.blank && address >= self.start.compare_below;
        if !data {
            return if blank { Ok(()) } else { self.destination.zero(address, length) };
        }
        let bytes = self.source.read(address, length as usize)?;
        self.read_bytes.fetch_add(length, Ordering::Relaxed);
        // An earlier attempt may have moved it: what is equal is not stored a second time.
        if address < self.start.compare_below
            && self.destination.read(address, length as usize)? == bytes
        {
            return Ok(());
        }
        for (start, end, is_zero) in runs_of(&bytes) {
            let at = address + start as u64;
            if !is_zero {
                self.written_bytes.fetch_add((end - start) as u64, Ordering::Relaxed);
                self.destination.write(at, bytes[start..end].to_vec())?;
            } else if !blank {
                self.destination.zero(at, (end - start) as u64)?;
            }
        }
        Ok(())
    }
}

/// Splits bytes into runs of zeroes and of others, in whole grains: (start, end, is zero).
fn runs_of(bytes: &[u8]) -> Vec<(usize, usize, bool)> {
    const ZEROES: [u8; GRAIN_BYTES] = [0; GRAIN_BYTES];
    let mut runs: Vec<(usize, usize, bool)> = Vec::new();
    let mut at = 0;
    for grain in bytes.chunks(GRAIN_BYTES) {
        let is_zero = *grain == ZEROES[..grain.len()];
        let end = at + grain.len();
        match runs.last_mut() {
            Some((_, last, zero)) if *zero == is_zero => *last = end,
            _ => runs.push((at, end, is_zero)),
        }
        at = end;
    }
    runs
}

/// Waits until everything written so far is durable.
pub(crate) fn settle(destination: &dyn Destination) -> Result<()> {
    let safe_point = destination.safe_point()?;
    let began = Instant::now();
    while !destination.is_durable(safe_point)? {
        // There is no notification: this is the polling interval.
        let pause = if began.elapsed() < PROGRESS_EVERY { 5 } else { 50 };
        std::thread::park_timeout(Duration::from_millis(pause));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
