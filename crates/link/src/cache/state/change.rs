//! Changes that go straight below: discards, write-zeroes, and writes around the cache.
//!
//! A change locks its pages. Their dirty bytes are written below, and fetches end. Then the change
//! is submitted. When it is answered, the cache forgets its range, whatever the outcome. Until
//! then, reads and writes of these pages wait, so nothing in the cache is older than what is below.
//!
//! Invariants: locks do not overlap. A page that became quiet under a lock stays so until the
//! lock ends. Waiting requests start in order; none overtakes an older overlapping request if one
//! of the two is a change. No request starves.
//!
//! Not here: writes into the cache (`write`), waiting for dirty bytes without a change (`push`).

use std::ops::Range;

use sawmill_device::{Error, Exchange, Operation, Request};

use super::{CacheState, Work};
use crate::cache::options::Policy;
use crate::cache::table::{overlap, page_slice, pages_of};
use crate::cache::task::Task;

/// The pages of one change.
pub(super) struct PageLock {
    id: u64,
    pages: Range<u64>,
    address: u64,
    length: u64,
    /// Pages that are not quiet yet.
    busy: usize,
    /// The change, until it is submitted.
    task: Option<Task>,
}

impl CacheState {
    fn is_change(&self, request: &Request) -> bool {
        match request.operation {
            Operation::Discard | Operation::WriteZeroes => true,
            Operation::Write => self.setup.policy == Policy::WriteAround,
            _ => false,
        }
    }

    /// Whether a lock, or a request that waits for it, precedes a request.
    pub(super) fn must_wait(&self, request: &Request) -> bool {
        let touches = matches!(request.operation, Operation::Read | Operation::Write)
            || self.is_change(request);
        if !touches || (self.wait_lists.page_locks.is_empty() && self.wait_lists.blocked.is_empty())
        {
            return false;
        }
        let pages = pages_of(request.address, request.length);
        let change = self.is_change(request);
        self.wait_lists.page_locks.iter().any(|lock| overlap(&lock.pages, &pages))
            || self.wait_lists.blocked.iter().any(|Task { request: other, .. }| {
                (change || self.is_change(other))
                    && overlap(&pages_of(other.address, other.length), &pages)
            })
    }

    pub(super) fn change(&mut self, task: Task) {
        let (address, length) = (task.request.address, task.request.length);
        let (id, pages, mut busy) = (self.next_id(), pages_of(address, length), 0);
        for number in self.table.present(&pages) {
            if self.table.get(number).is_some_and(|page| !page.is_quiet()) {
                busy += 1;
                self.want(number, self.clock);
            }
        }
        self.wait_lists.page_locks.push(PageLock {
            id,
            pages,
            address,
            length,
            busy,
            task: Some(task),
        });
        if busy == 0 {
            self.submit_change(self.wait_lists.page_locks.len() - 1);
        }
    }

    fn submit_change(&mut self, index: usize) {
        let lock = &mut self.wait_lists.page_locks[index];
        let (me, id) = (self.me.clone(), lock.id);
        let task = lock.task.take();
        let on_completed = move |outcome, asker: Box<dyn Exchange>| {
            if let Some(me) = me.upgrade() {
                me.notify(&mut |state| state.changed(id));
            }
            asker.complete(outcome);
        };
        self.work.extend(task.map(|task| Work::Below(task.request.then(on_completed))));
    }

    /// A page became quiet: submits the change that locks it if all of its pages are quiet now.
    pub(super) fn page_quieted(&mut self, number: u64) {
        let waits = |lock: &PageLock| lock.task.is_some() && lock.pages.contains(&number);
        if let Some(index) = self.wait_lists.page_locks.iter().position(waits) {
            self.wait_lists.page_locks[index].busy -= 1;
            if self.wait_lists.page_locks[index].busy == 0 {
                self.submit_change(index);
            }
        }
    }

    /// Dirty bytes could not be written: fails the change that locks this page. The caller then
    /// calls `unblock`.
    pub(super) fn fail_lock(&mut self, number: u64, error: &Error) {
        if let Some(index) =
            self.wait_lists.page_locks.iter().position(|lock| lock.pages.contains(&number))
        {
            let lock = self.wait_lists.page_locks.swap_remove(index);
            lock.task.into_iter().for_each(|task| self.fail(task, error));
        }
    }

    /// The device below answered a change.
    fn changed(&mut self, id: u64) {
        let Some(index) = self.wait_lists.page_locks.iter().position(|lock| lock.id == id) else {
            return;
        };
        let PageLock { pages, address, length, .. } = self.wait_lists.page_locks.swap_remove(index);
        for number in self.table.present(&pages) {
            if let Some(page) = self.table.get_mut(number) {
                page.known.remove(page_slice(number, address, length).inside);
            }
        }
        self.unblock();
    }

    /// Starts requests that need not wait for a lock any more.
    pub(super) fn unblock(&mut self) {
        for task in std::mem::take(&mut self.wait_lists.blocked) {
            self.resume(task);
        }
    }
}
