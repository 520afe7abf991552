//! Requests that wait until bytes are below: a flush waits for all, a push for some pages (FUA,
//! write-through, allocation queries).
//!
//! Invariants: a flush goes below only when every write completed before it is there. It fails if a
//! write-back of bytes that it covers fails, and so does each other flush that covers them. The
//! bytes stay dirty, and the next flush retries: its result describes the state at its end. If the
//! device below fails a flush, data that it had accepted may be lost: the cache forgets clean
//! bytes, so that readers see what is there.
//!
//! Not here: the write-backs that a request waits for (`write_back`), writes that wait for room
//! (`write`).

use std::ops::Range;

use sawmill_device::{Error, Reply};

use super::{CacheState, Work};
use crate::cache::table::pages_of;
use crate::cache::task::Task;

/// A request that waits until all writes to some pages, up to its own number, are below.
pub(super) struct Push {
    task: Task,
    pages_left: usize,
    step: NextStep,
}

/// What happens to the request then.
#[derive(Clone, Copy)]
pub(super) enum NextStep {
    /// It is done.
    Answer,
    /// It is submitted below too.
    Below,
}

impl CacheState {
    pub(super) fn flush(&mut self, task: Task) {
        let through = self.clock;
        self.want_all(through);
        self.wait_lists.flushes.push_back((through, task));
        self.advance_flushes();
    }

    /// Writes back all writes up to a number.
    pub(in crate::cache) fn want_all(&mut self, through: u64) {
        let pages: Vec<_> =
            self.dirty.order.range(..=(through, u64::MAX)).map(|(_, page)| *page).collect();
        pages.into_iter().for_each(|page| self.want(page, through));
    }

    /// Submits the flushes that have nothing left to wait for.
    pub(super) fn advance_flushes(&mut self) {
        let oldest = self.dirty.order.first().map_or(u64::MAX, |(since, _)| *since);
        while self.wait_lists.flushes.front().is_some_and(|(through, _)| *through < oldest) {
            if let Some((_, task)) = self.wait_lists.flushes.pop_front() {
                let me = self.me.clone();
                let request = task.request.then(move |outcome, asker| {
                    if let (Err(_), Some(me)) = (&outcome, me.upgrade()) {
                        me.notify(&mut CacheState::doubt);
                    }
                    asker.complete(outcome);
                });
                self.work.push(Work::Below(request));
            }
        }
    }

    /// Forgets clean bytes, which the device below may have lost.
    fn doubt(&mut self) {
        self.table.values_mut().for_each(|page| page.doubt());
    }

    /// Fails the flushes that cover a write.
    pub(super) fn fail_flushes(&mut self, since: u64, error: &Error) {
        let covers = self.wait_lists.flushes.partition_point(|(through, _)| *through < since);
        for (_, task) in self.wait_lists.flushes.split_off(covers) {
            self.fail(task, error);
        }
    }

    /// Starts an allocation query. It is about the device below: dirty bytes are written there
    /// first.
    pub(super) fn start_query(&mut self, task: Task) {
        let pages = pages_of(task.request.address, task.request.length);
        self.push(task, &pages, NextStep::Below);
    }

    pub(super) fn push(&mut self, task: Task, pages: &Range<u64>, next_step: NextStep) {
        let (id, through, mut pages_left) = (self.next_id(), self.clock, 0);
        for number in self.table.present(pages) {
            let Some(page) = self.table.get_mut(number) else { continue };
            if page.since() <= through {
                page.waiters.push((through, id));
                pages_left += 1;
                self.want(number, through);
            }
        }
        let push = Push { task, pages_left, step: next_step };
        if pages_left == 0 {
            return self.end_push(push);
        }
        self.wait_lists.pushes.insert(id, push);
    }

    fn end_push(&mut self, push: Push) {
        match push.step {
            NextStep::Answer => self.answer(push.task, Ok(Reply::Done)),
            NextStep::Below => self.work.push(Work::Below(push.task.request)),
        }
    }

    /// All writes to a page before number `since` are below: some of its waiters are done with that
    /// page.
    pub(super) fn pushed(&mut self, number: u64, mut waiters: Vec<(u64, u64)>, since: u64) {
        waiters.retain(|(through, id)| {
            if *through >= since {
                return true;
            }
            if let Some(push) = self.wait_lists.pushes.get_mut(id) {
                push.pages_left -= 1;
                if push.pages_left == 0
                    && let Some(push) = self.wait_lists.pushes.remove(id)
                {
                    self.end_push(push);
                }
            }
            false
        });
        if let Some(page) = self.table.get_mut(number) {
            page.waiters = waiters;
        }
    }

    pub(super) fn fail_push(&mut self, id: u64, error: &Error) {
        // It may have failed because of another page.
        if let Some(push) = self.wait_lists.pushes.remove(&id) {
            self.fail(push.task, error);
        }
    }
}
