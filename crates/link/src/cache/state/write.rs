//! A write into the cache: it never reads below (BASS §3.3). Without room, it waits, with a copy of
//! its bytes: no more than the doors admit.
//!
//! Invariants: all bytes of a write appear at once. Writes that wait for room start in order, and
//! wait only while a write-back is in flight or about to start: its outcome starts or fails them.
//!
//! Not here: write-around (`change`), when a FUA or write-through write is answered (`push`), the
//! writing below (`write_back`).

use std::sync::atomic::Ordering::Relaxed;

use sawmill_device::{Error, Request};

use super::push::NextStep;
use super::{CacheState, Work};
use crate::cache::options::Policy;
use crate::cache::page::NEVER;
use crate::cache::table::{page_slices, pages_of};
use crate::cache::task::Task;

impl CacheState {
    /// Returns the write if it is done.
    pub(super) fn write(&mut self, task: Task) -> Option<Task> {
        if self.wait_lists.held_requests.is_empty() && self.has_room(&task.request) {
            return self.store(task);
        }
        self.counters.writes_held.fetch_add(1, Relaxed);
        self.wait_lists.held_requests.push_back(task);
        self.press();
        None
    }

    fn has_room(&self, request: &Request) -> bool {
        let pages = pages_of(request.address, request.length);
        let pages = self.dirty.order.len() + (pages.end - pages.start) as usize;
        let fits = self.dirty.bytes + request.length <= self.setup.unsaved_bytes_max
            && pages <= self.setup.unsaved_pages_max;
        fits || self.dirty.order.is_empty()
    }

    fn store(&mut self, mut task: Task) -> Option<Task> {
        self.clock += 1;
        let Task { request, buffers } = &mut task;
        let (address, length, fua) = (request.address, request.length, request.flags.fua);
        let (now, mut partial) = (self.clock, false);
        let mut buffers = buffers.iter_mut();
        for slice in page_slices(address, length) {
            let (number, inside) = (slice.page, slice.inside);
            partial |= inside.len() < self.table.page_length(number);
            let page = self.table.page(number);
            match buffers.next() {
                Some(bytes) => page.take(inside.clone(), bytes),
                None => page.fill(inside.clone(), |into| request.fill(slice.offset, into)),
            }
            let new = page.dirty.insert(inside);
            page.fua |= fua;
            page.used = true;
            let first = page.since() == NEVER;
            page.dirty_since = page.dirty_since.min(now);
            if first {
                self.dirty.order.insert((now, number));
            }
            self.dirty.bytes += new;
        }
        // Under the lock, so nothing else counts.
        let counters = [
            (&self.counters.partial_writes, u64::from(partial)),
            (&self.counters.bytes_written_by_user, length),
        ];
        for (counter, more) in counters {
            counter.store(counter.load(Relaxed) + more, Relaxed);
        }
        self.note_unsaved();
        if fua || self.setup.policy == Policy::WriteThrough {
            let replaced = std::mem::take(&mut task.buffers);
            if !replaced.is_empty() {
                self.work.push(Work::GiveBack(replaced));
            }
            self.push(task, &pages_of(address, length), NextStep::Answer);
            return None;
        }
        let half = self.dirty.bytes > self.setup.unsaved_bytes_max / 2
            || self.dirty.order.len() > self.setup.unsaved_pages_max / 2;
        if half {
            self.press();
        }
        Some(task)
    }

    /// Writes back the older half of the dirty pages, unless that has already started.
    pub(super) fn press(&mut self) {
        if self.write_backs > 0 || !self.dirty.wanted.is_empty() {
            return;
        }
        let oldest: Vec<_> =
            self.dirty.order.iter().take(self.dirty.order.len().div_ceil(2)).copied().collect();
        oldest.into_iter().for_each(|(_, page)| self.want(page, self.clock));
    }

    /// Starts the writes that have room now.
    pub(super) fn begin_held(&mut self) {
        while self.wait_lists.held_requests.front().is_some_and(|task| self.has_room(&task.request))
        {
            let Some(task) = self.wait_lists.held_requests.pop_front() else { break };
            if self.must_wait(&task.request) {
                self.wait_lists.blocked.push_back(task);
            } else if let Some(task) = self.store(task) {
                self.answer(task, Ok(sawmill_device::Reply::Done));
            }
        }
        if !self.wait_lists.held_requests.is_empty() {
            self.press();
        }
    }

    /// There will be no room: fails the writes that wait for it.
    pub(super) fn fail_held(&mut self, error: &Error) {
        while let Some(task) = self.wait_lists.held_requests.pop_front() {
            self.fail(task, error);
        }
    }
}
