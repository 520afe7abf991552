//! Tells whether an attempt progresses: bytes are counted as they move, and an attempt is cut only
//! when none moved for a while. So a slow link is used to its capacity, and a dead one is still
//! noticed quickly.
//!
//! Invariants: an attempt whose bytes move is never cut. One whose body was handed over whole gets
//! more time for its answer, because the kernel may still hold the end of the body.
//!
//! Not here: what happens after a cut (the client tries again); how many attempts run at a time
//! (`limit`).

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::{Instant, sleep_until};

tokio::task_local! {
    /// The attempt that this task makes.
    static CURRENT: Arc<Progress>;
}

/// The most bytes of a body that the kernel (and what lies on the way) may still hold after it
/// accepted the last of them.
// Linux's usual limit of a socket's send buffer (decision 0025).
const HELD_BYTES_MAX: u64 = 4 << 20;

/// How long an attempt may be silent.
#[derive(Clone, Debug)]
pub(crate) struct SilenceLimits {
    /// While bytes should move, and for an answer.
    pub silence_max: Duration,
    /// The slowest link that is still tolerated where its bytes cannot be seen to move.
    pub unseen_bytes_per_s: u64,
}

impl Default for SilenceLimits {
    fn default() -> Self {
        SilenceLimits { silence_max: Duration::from_secs(10), unseen_bytes_per_s: 32 << 10 }
    }
}

impl SilenceLimits {
    /// Extra time, beyond silence, for bytes that cannot be seen to move.
    fn unseen(&self, bytes: u64) -> Duration {
        Duration::from_millis(bytes.saturating_mul(1000) / self.unseen_bytes_per_s.max(1))
    }
}

/// What one attempt has moved.
pub(crate) struct Progress {
    progress: Mutex<TransferProgress>,
}

struct TransferProgress {
    sent_bytes: u64,
    last: Instant,
}

impl Progress {
    fn start() -> Arc<Self> {
        Arc::new(Progress {
            progress: Mutex::new(TransferProgress { sent_bytes: 0, last: Instant::now() }),
        })
    }

    /// The progress of the attempt that this task makes, if any.
    pub(crate) fn current() -> Option<Arc<Self>> {
        CURRENT.try_with(Arc::clone).ok()
    }

    /// The connection accepted the next bytes of the body.
    pub(crate) fn sent(&self, bytes: u64) {
        let mut moved = self.progress.lock();
        moved.sent_bytes += bytes;
        moved.last = Instant::now();
    }

    /// Some of the answer came.
    pub(crate) fn received(&self) {
        self.progress.lock().last = Instant::now();
    }
}

/// What an attempt moves, as far as it is known beforehand.
pub(crate) struct Load {
    /// Bytes of its body.
    pub out_bytes: u64,
    /// Work without visible bytes, as bytes.
    pub unseen_bytes: u64,
}

/// Makes an attempt; `None` if it was cut because nothing moved for as long as `silence_limits`
/// allows.
pub(crate) async fn unless_stalled<T>(
    silence_limits: &SilenceLimits,
    load: &Load,
    attempt: impl Future<Output = T>,
) -> Option<T> {
    let progress = Progress::start();
    let cut_at = || {
        let moved = progress.progress.lock();
        let is_out = moved.sent_bytes >= load.out_bytes;
        // Before the last byte is accepted, every further piece shows progress, and no extra time
        // is due.
        let held = if is_out { load.out_bytes.min(HELD_BYTES_MAX) } else { 0 };
        moved.last + silence_limits.silence_max + silence_limits.unseen(held + load.unseen_bytes)
    };
    let mut attempt = std::pin::pin!(CURRENT.scope(Arc::clone(&progress), attempt));
    loop {
        let cut = cut_at();
        tokio::select! {
            // An attempt that ends at the instant of its cut has ended: its effect is known then.
            biased;
            outcome = &mut attempt => return Some(outcome),
            () = sleep_until(cut) => {
                // Bytes that moved during the sleep have put the cut off.
                if cut_at() <= cut {
                    return None;
                }
            }
        }
    }
}
