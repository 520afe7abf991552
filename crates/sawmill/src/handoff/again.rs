//! Reopens volumes after a hand-off was rolled back, each on a thread of its own, so that a store
//! that does not answer delays neither other volumes nor signals.
//!
//! Invariants: only these threads wait for stores; callers wait for the threads, and never beyond a
//! deadline. Doors resume as soon as one of their volumes is open. No volume returns after
//! [`ReopenQueue::end`], and none is being opened while another process may open it
//! ([`ReopenQueue::wait_for_reopens`]). Not here: when to retry (`command::serve`).

use std::sync::Arc;
use std::time::Instant;

use parking_lot::{Condvar, Mutex};

use crate::handoff::accepting_nothing;
use crate::plan::ServePlan;
use crate::serving::{Cache, ServeProcess, ServedVolume};
use crate::sizes;
use crate::wiring::{self, Local};
use sawmill_console::exit::{Exit, Failure, Result};

/// The volumes of a process that must be reopened.
pub(crate) struct ReopenQueue {
    plan: ServePlan,
    serving: Arc<ServeProcess>,
    state: Mutex<State>,
    changed: Condvar,
    /// One thread at a time resumes doors.
    resuming: Mutex<()>,
}

#[derive(Default)]
struct State {
    /// Indexes of volumes that a thread is opening.
    reopening_indexes: Vec<usize>,
    /// How many of them are being put back or given up.
    landing: usize,
    /// Nothing is put back or given up any more.
    has_ended: bool,
}

impl ReopenQueue {
    pub(crate) fn new(plan: &ServePlan, serving: &Arc<ServeProcess>) -> Arc<ReopenQueue> {
        // A loss that was accepted at the start must not be accepted silently again (P70).
        let options = accepting_nothing(&plan.options);
        Arc::new(ReopenQueue {
            plan: ServePlan { options, ..plan.clone() },
            serving: Arc::clone(serving),
            state: Mutex::default(),
            changed: Condvar::new(),
            resuming: Mutex::default(),
        })
    }

    /// Starts to open every volume that is away and not already being opened, and resumes the doors
    /// of open volumes. Does not wait.
    pub(crate) fn try_all(self: &Arc<Self>) {
        self.resume_doors();
        let cache = self.cache();
        for (index, served) in self.serving.volumes.iter().enumerate() {
            if !served.is_away() || !self.depart(index) {
                continue;
            }
            let (again, cache) = (Arc::clone(self), cache.clone());
            let open = move || {
                again.try_one(index, cache.as_ref());
                again.arrive(index);
            };
            if let Err(error) = std::thread::Builder::new().name("volume-reopen".into()).spawn(open)
            {
                served.keep_away(&Failure::io("cannot start a thread", &error));
                self.arrive(index);
            }
        }
    }

    /// Waits until no volume is being opened. Returns `InUse`, with the names, if that takes too
    /// long.
    pub(crate) fn wait_for_reopens(&self, deadline: Instant) -> Result<()> {
        let mut state = self.state.lock();
        while !state.reopening_indexes.is_empty() {
            if !self.changed.wait_until(&mut state, deadline).timed_out() {
                continue;
            }
            let name = |&index: &usize| self.serving.volumes[index].name();
            let names: Vec<&str> = state.reopening_indexes.iter().map(name).collect();
            if names.is_empty() {
                break;
            }
            let text = format!(
                "{} is still being reopened after the last hand-off: its store does not answer; \
                 try again when it does",
                names.join(", ")
            );
            return Err(Failure::new(Exit::InUse, text));
        }
        Ok(())
    }

    /// As [`wait_for_reopens`](Self::wait_for_reopens). Volumes that are still not open then report
    /// that.
    pub(crate) fn settle(&self, deadline: Instant) {
        if self.wait_for_reopens(deadline).is_ok() {
            return;
        }
        let late_indexes = self.state.lock().reopening_indexes.clone();
        for index in late_indexes {
            let why = Failure::new(Exit::Unavailable, "its store has not answered yet");
            self.serving.volumes[index].keep_away(&why);
        }
    }

    /// From now on, volumes that are away stay away: the process is about to exit.
    pub(crate) fn end(&self) {
        let mut state = self.state.lock();
        state.has_ended = true;
        // The stores of these volumes have answered.
        while state.landing > 0 {
            self.changed.wait(&mut state);
        }
    }

    fn depart(&self, index: usize) -> bool {
        let mut state = self.state.lock();
        if state.has_ended || state.reopening_indexes.contains(&index) {
            return false;
        }
        state.reopening_indexes.push(index);
        true
    }

    fn arrive(&self, index: usize) {
        self.state.lock().reopening_indexes.retain(|&other| other != index);
        self.changed.notify_all();
    }

    /// The read cache, reopened if it was closed.
    fn cache(&self) -> Option<Cache> {
        let mut guard = self.serving.cache.lock();
        if guard.is_none() {
            // Without a cache reads are slower and nothing is lost, so a failure is no reason to
            // stop.
            *guard = wiring::open_cache(&self.plan.cache, self.plan.cache_bytes).unwrap_or_else(
                |failure| {
                    tracing::warn!(
                        "a hand-off was rolled back; serving without the read cache: {failure}"
                    );
                    None
                },
            );
        }
        guard.clone()
    }

    /// Tries to open a volume. If it may succeed later, the users of the volume wait; if it never
    /// can, the volume is given up and its users get errors.
    fn try_one(&self, index: usize, cache: Option<&Cache>) {
        let served = &self.serving.volumes[index];
        let journal_path = served.journal_path.as_deref();
        // An existing journal keeps its size.
        let journal_bytes =
            journal_path.map_or(sizes::JOURNAL_BYTES, |path| self.plan.journal_size.of(path, 0));
        let local = Local { folder: &served.folder, journal_path, journal_bytes, cache };
        let opened = wiring::open_volume(
            &self.plan,
            &served.address,
            &served.store,
            served.volume_id,
            &local,
        );
        if !self.may_land() {
            // Close the volume as it is: what was accepted is in its journal.
            opened.iter().for_each(|volume| volume.close_now());
            return;
        }
        match opened.and_then(|volume| served.put_back(volume).map_err(Failure::from)) {
            Ok(()) => self.resume_doors(),
            Err(failure) => self.stay_away(served, &failure),
        }
        self.state.lock().landing -= 1;
        self.changed.notify_all();
    }

    fn may_land(&self) -> bool {
        let mut state = self.state.lock();
        // Counted under the lock that `end` takes: `end` waits for whoever passes here.
        state.landing += usize::from(!state.has_ended);
        !state.has_ended
    }

    fn stay_away(&self, served_volume: &ServedVolume, failure: &Failure) {
        let name = served_volume.name();
        // These may pass by themselves; anything else needs a person, and users would wait in vain.
        if matches!(failure.exit(), Exit::Unavailable | Exit::InUse | Exit::Full) {
            tracing::error!(
                "a hand-off was rolled back; reopening volume {name} failed, retrying: {failure}"
            );
            served_volume.keep_away(failure);
        } else {
            tracing::error!("a hand-off was rolled back; giving up on volume {name}: {failure}");
            served_volume.give_up(failure);
            self.resume_doors();
        }
    }

    fn resume_doors(&self) {
        let _one_at_a_time = self.resuming.lock();
        self.serving.resume_doors();
    }
}
