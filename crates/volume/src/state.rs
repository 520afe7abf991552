//! The health of a volume, and whether it takes requests. Read on every request, changed a few
//! times in the volume's life.
//!
//! Invariant: the stage only gets worse, in the order serving, closing, closed, fenced, failed; an
//! outage of the store changes no stage.
//!
//! Not here: the end of what waits (`write`, `volume`), and a failed journal (`journal`).

use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use crate::status::Health;
use crate::{Error, ErrorKind};

const SERVING: u8 = 0;
const CLOSING: u8 = 1;
const CLOSED: u8 = 2;
const FENCED: u8 = 3;
const FAILED: u8 = 4;

struct Outage {
    since: Duration,
    reason: String,
}

/// The health and the stage of an open volume, and the error that every refused request gets.
#[derive(Default)]
pub(crate) struct VolumeState {
    stage: AtomicU8,
    reason: Mutex<Option<Error>>,
    outage: Mutex<Option<Outage>>,
}

impl VolumeState {
    /// Why requests are refused, if they are.
    pub(crate) fn refusal(&self) -> Option<Error> {
        if self.stage.load(Ordering::Acquire) == SERVING {
            return None;
        }
        let reason = self.reason.lock().clone();
        Some(reason.unwrap_or_else(|| Error::new(ErrorKind::Closed, "the volume is closed")))
    }

    /// Whether a fence or a failure makes it impossible to store more.
    pub(crate) fn is_dead(&self) -> bool {
        self.stage.load(Ordering::Acquire) >= FENCED
    }

    pub(crate) fn set_closing(&self) {
        self.worsen(CLOSING, None);
    }

    pub(crate) fn set_closed(&self) {
        self.worsen(CLOSED, None);
    }

    /// Another writer has taken the volume over.
    pub(crate) fn set_fenced(&self, reason: String) {
        tracing::error!("fenced: {reason}");
        self.worsen(FENCED, Some(Error::new(ErrorKind::Fenced, reason)));
    }

    /// The volume stops rather than guess.
    pub(crate) fn set_failed(&self, error: Error) {
        tracing::error!("stopped: {error}");
        self.worsen(FAILED, Some(error));
    }

    fn worsen(&self, stage: u8, reason: Option<Error>) {
        let mut kept = self.reason.lock();
        if self.stage.fetch_max(stage, Ordering::AcqRel) < stage && reason.is_some() {
            *kept = reason;
        }
    }

    /// The store failed a call whose result is needed.
    pub(crate) fn store_failed(&self, now: Duration, reason: String) {
        let mut outage = self.outage.lock();
        match &mut *outage {
            Some(outage) => outage.reason = reason,
            None => {
                tracing::warn!(
                    "cannot use the store; serving from the journal and the cache: {reason}"
                );
                *outage = Some(Outage { since: now, reason });
            }
        }
    }

    /// The store answered.
    pub(crate) fn store_answered(&self) {
        if self.outage.lock().take().is_some() {
            tracing::info!("the store answers again");
        }
    }

    pub(crate) fn health(&self, now: Duration) -> Health {
        let reason = || self.reason.lock().as_ref().map(ToString::to_string).unwrap_or_default();
        match self.stage.load(Ordering::Acquire) {
            FENCED => Health::Fenced { reason: reason() },
            FAILED => Health::Failed { reason: reason() },
            CLOSED => Health::Closed,
            _ => match &*self.outage.lock() {
                Some(outage) => Health::StoreUnavailable {
                    since: now.saturating_sub(outage.since),
                    reason: outage.reason.clone(),
                },
                None => Health::Serving,
            },
        }
    }
}
