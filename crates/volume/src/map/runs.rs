//! A sorted list of runs in one area: the sparse form, and what a dense area cannot keep as whole
//! pages.
//!
//! Invariants: sorted by start, never overlapping, never empty, and no two neighbors that could be
//! one run. Addresses are bytes from the start of the area. Capacity stays within about an eighth
//! of the length.
//!
//! Not here: locks, the choice of form.

use super::{AREA_BYTES, Location};

/// Runs that a search looks at one by one: two cache lines.
const NEAR_RUNS: usize = 8;

/// Contiguous bytes of an area that lie contiguously in one segment: 16 bytes of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MapRun {
    pub(super) start: u32,
    pub(super) length: u32,
    pub(super) location: Location,
}

impl MapRun {
    pub(super) fn new(start: u32, end: u32, location: Location) -> MapRun {
        MapRun { start, length: end - start, location }
    }

    pub(super) fn end(&self) -> u32 {
        self.start + self.length
    }

    /// The part of this run inside `start..end`, which must overlap it.
    pub(super) fn clipped(&self, start: u32, end: u32) -> MapRun {
        let from = self.start.max(start);
        MapRun::new(from, self.end().min(end), self.location.advanced(from - self.start))
    }

    /// Whether `next` follows in the area and in the segment, so that both are one run.
    pub(super) fn continues_in(&self, next: &MapRun) -> bool {
        self.end() == next.start
            && self.location.sequence == next.location.sequence
            && u64::from(self.location.data_offset) + u64::from(self.length)
                == u64::from(next.location.data_offset)
    }

    fn joined(&self, next: &MapRun) -> MapRun {
        MapRun { start: self.start, length: self.length + next.length, location: self.location }
    }
}

/// Collects what an operation replaces and reports it in as few calls as the order allows.
pub(super) struct ReplacedBytes<'a> {
    sink: &'a mut dyn FnMut(u32, u64),
    sequence: u32,
    bytes: u64,
    total_bytes: u64,
}

impl<'a> ReplacedBytes<'a> {
    pub(super) fn new(sink: &'a mut dyn FnMut(u32, u64)) -> ReplacedBytes<'a> {
        ReplacedBytes { sink, sequence: 0, bytes: 0, total_bytes: 0 }
    }

    pub(super) fn add(&mut self, sequence: u32, bytes: u32) {
        if sequence != self.sequence {
            self.report();
            self.sequence = sequence;
        }
        self.bytes += u64::from(bytes);
        self.total_bytes += u64::from(bytes);
    }

    fn report(&mut self) {
        if self.bytes > 0 {
            (self.sink)(self.sequence, self.bytes);
            self.bytes = 0;
        }
    }

    /// Reports the rest; returns all replaced bytes.
    pub(super) fn finish(mut self) -> u64 {
        self.report();
        self.total_bytes
    }
}

/// The sorted list.
#[derive(Default)]
pub(super) struct Runs {
    list: Vec<MapRun>,
}

impl Runs {
    /// A list with no slack. `list` keeps the invariants above.
    pub(super) fn from_sorted(list: &[MapRun]) -> Runs {
        Runs { list: list.to_vec() }
    }

    pub(super) fn as_slice(&self) -> &[MapRun] {
        &self.list
    }

    pub(super) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.list.len()
    }

    pub(super) fn heap_bytes(&self) -> usize {
        self.list.capacity() * size_of::<MapRun>()
    }

    /// Index of the first run that ends after `at` (`len` if none).
    ///
    /// Runs of an area tend to be evenly spread, so the search starts where that would put the run:
    /// first one by one, in the same cache line or the next, then in steps that double. A cold area
    /// costs one or two cache misses, where bisection costs one per step.
    fn first_ending_after(&self, at: u32) -> usize {
        let list = &self.list[..];
        let guess = (u64::from(at) * list.len() as u64 / AREA_BYTES) as usize;
        let ends_before = |run: &MapRun| run.end() <= at;
        let (before, from) = list.split_at(guess.min(list.len()));
        if !from.first().is_some_and(ends_before) {
            let near = before.iter().rev().take(NEAR_RUNS);
            let skipped = near.take_while(|run| !ends_before(run)).count();
            if skipped < NEAR_RUNS {
                return before.len() - skipped;
            }
            let (mut step, mut high) = (NEAR_RUNS, before.len() - skipped);
            while step < high && !ends_before(&list[high - step]) {
                high -= step;
                step *= 2;
            }
            let low = high.saturating_sub(step);
            return low + list[low..high].partition_point(ends_before);
        }
        let skipped = from.iter().take(NEAR_RUNS).take_while(|run| ends_before(run)).count();
        if skipped < NEAR_RUNS {
            return before.len() + skipped;
        }
        let (mut step, mut low) = (NEAR_RUNS, before.len() + skipped);
        while low + step < list.len() && ends_before(&list[low + step]) {
            low += step;
            step *= 2;
        }
        let high = list.len().min(low + step);
        low + list[low..high].partition_point(ends_before)
    }

    /// Visits what is mapped in `start..end`, clipped to it, in order.
    pub(super) fn lookup(&self, start: u32, end: u32, visit: &mut impl FnMut(MapRun)) {
        for run in &self.list[self.first_ending_after(start)..] {
            if run.start >= end {
                break;
            }
            visit(run.clipped(start, end));
        }
    }

    /// Maps `start..end` to `with` (or to nothing), whatever was there before.
    pub(super) fn replace(
        &mut self,
        start: u32,
        end: u32,
        with: Option<Location>,
        replaced: &mut ReplacedBytes<'_>,
    ) {
        let mut first = self.first_ending_after(start);
        let mut last = first;
        let (mut left, mut right) = (None, None);
        while let Some(run) = self.list.get(last).filter(|run| run.start < end) {
            let cut = run.clipped(start, end);
            replaced.add(cut.location.sequence, cut.length);
            if run.start < start {
                left = Some(run.clipped(0, start));
            }
            if run.end() > end {
                right = Some(run.clipped(end, u32::MAX));
            }
            last += 1;
        }
        let mut middle = with.map(|location| MapRun::new(start, end, location));
        if let Some(run) = &mut middle {
            if left.is_none() && first > 0 && self.list[first - 1].continues_in(run) {
                first -= 1;
                left = Some(self.list[first]);
            }
            if let Some(before) = left.filter(|before| before.continues_in(run)) {
                *run = before.joined(run);
                left = None;
            }
            if right.is_none() && self.list.get(last).is_some_and(|after| run.continues_in(after)) {
                right = Some(self.list[last]);
                last += 1;
            }
            if let Some(after) = right.filter(|after| run.continues_in(after)) {
                *run = run.joined(&after);
                right = None;
            }
        }
        let mut fresh = [MapRun::new(0, 0, Location { sequence: 0, data_offset: 0 }); 3];
        let mut count = 0;
        for run in [left, middle, right].into_iter().flatten() {
            fresh[count] = run;
            count += 1;
        }
        self.splice(first, last, &fresh[..count]);
    }

    /// Puts `fresh` in place of `first..last`.
    fn splice(&mut self, first: usize, last: usize, fresh: &[MapRun]) {
        let old_len = self.list.len();
        let fresh_end = first + fresh.len();
        if fresh_end > last {
            let added_count = fresh_end - last;
            if self.list.capacity() - old_len < added_count {
                self.list.reserve_exact(added_count.max(old_len / 8).max(2));
            }
            self.list.resize(old_len + added_count, fresh[0]);
            self.list.copy_within(last..old_len, fresh_end);
        } else if fresh_end < last {
            self.list.copy_within(last.., fresh_end);
            self.list.truncate(old_len - (last - fresh_end));
        }
        self.list[first..fresh_end].copy_from_slice(fresh);
        if self.list.capacity() > 8 + self.list.len() + self.list.len() / 4 {
            self.list.shrink_to(self.list.len() + self.list.len() / 16);
        }
    }
}
