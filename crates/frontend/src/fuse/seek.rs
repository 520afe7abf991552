//! Finds the start of the next data or hole: queries the device for one window after another.
//!
//! Invariant: the stack depth is constant, however many windows there are, and whether the device
//! answers immediately or later: the code that finds a window answered continues in a loop.
//!
//! Not here: seeks relative to a position, which the kernel does itself.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering::AcqRel};

use parking_lot::Mutex;
use rustix::io::Errno;
use sawmill_device::{
    Allocation, BlockDevice, Error, ErrorKind, Flags, Operation, Outcome, Reply, Request,
};

use super::answer::sought;
use super::channel::KernelChannel;
use super::limits::SEEK_BYTES;
use super::ticket::errno_of;

/// One seek.
pub(super) struct Seek {
    pub(super) channel: Arc<KernelChannel>,
    pub(super) device: Arc<dyn BlockDevice>,
    pub(super) unique: u64,
    /// Whether to look for data; otherwise for a hole.
    pub(super) data: bool,
    pub(super) size_bytes: u64,
}

/// One query for a window, and the decision whether `look` or the answer continues after it.
struct Window {
    seek: Arc<Seek>,
    offset: u64,
    /// How many of two events have happened: the return of `submit`, and the answer. The second one
    /// continues.
    came: AtomicU8,
    answer: Mutex<Option<Outcome>>,
}

impl Window {
    fn answered(self: Arc<Self>, outcome: Outcome) {
        *self.answer.lock() = Some(outcome);
        if self.came.fetch_add(1, AcqRel) == 1 {
            match self.judged() {
                Some(next) => self.seek.clone().query_window(next),
                None => self.seek.channel.end(0),
            }
        }
    }

    /// Where to look next, if the answer did not decide.
    fn judged(&self) -> Option<u64> {
        let outcome = self.answer.lock().take()?;
        self.seek.judge(self.offset, outcome)
    }
}

impl Seek {
    /// Searches from `offset` on and answers, now or later.
    pub(super) fn start(self, offset: u64) {
        self.channel.begin(0);
        // Counted as in flight, though it holds no bytes: a door must not be handed over while a
        // seek waits for its answer.
        Arc::new(self).query_window(offset);
    }

    /// Queries the window at `offset`, and further windows as long as the answers are immediate.
    fn query_window(self: Arc<Self>, mut offset: u64) {
        loop {
            let window = Arc::new(Window {
                seek: self.clone(),
                offset,
                came: AtomicU8::new(0),
                answer: Mutex::default(),
            });
            let length = SEEK_BYTES.min(self.size_bytes - offset);
            let callback_window = window.clone();
            let on_outcome = |outcome| callback_window.answered(outcome);
            self.device.submit(Request::bare(
                Operation::Allocation,
                offset,
                length,
                Flags::default(),
                on_outcome,
            ));
            // A loop and no recursion: a device that answers inside `submit` would otherwise use
            // stack for each window of an empty disk.
            if window.came.fetch_add(1, AcqRel) == 0 {
                // Not answered yet: the answer continues the search.
                return;
            }
            match window.judged() {
                Some(next) => offset = next,
                None => return self.channel.end(0),
            }
        }
    }

    /// Answers if this window decides; otherwise returns the start of the next one.
    fn judge(&self, offset: u64, outcome: Outcome) -> Option<u64> {
        let errno = match outcome {
            Ok(Reply::Allocation(runs)) => match self.find(offset, &runs) {
                Ok(position) => {
                    self.channel.send(&[&sought(self.unique, position)]);
                    return None;
                }
                // An answer that does not reach past its own start would repeat the same query
                // forever.
                Err(end) if end > offset && end < self.size_bytes => return Some(end),
                Err(_) if self.data => Errno::NXIO.raw_os_error(),
                Err(_) => {
                    // The end of the file counts as a hole.
                    self.channel.send(&[&sought(self.unique, self.size_bytes)]);
                    return None;
                }
            },
            Ok(Reply::Done) => {
                let text = "the device answered an allocation query without runs";
                errno_of(&self.channel, &Error::new(ErrorKind::Internal, text))
            }
            Err(error) => errno_of(&self.channel, &error),
        };
        self.channel.send_status(self.unique, errno);
        None
    }

    /// The first place of the right kind, or the end of these runs.
    fn find(&self, offset: u64, runs: &[Allocation]) -> Result<u64, u64> {
        let mut at = offset;
        for run in runs {
            if run.data == self.data {
                return Ok(at);
            }
            at = at.saturating_add(run.length);
        }
        Err(at)
    }
}
