//! The dense form of an area: one 8-byte location per 4 KiB page, for areas that are shattered into
//! pages.
//!
//! A page is in the table when one run holds all of it; a page with sub-page fragments is marked
//! `MIXED` and its fragments lie in a small sorted list. Invariant: every byte of that list is in a
//! `MIXED` page.
//!
//! Not here: when an area takes this form, and when it leaves it.

use super::runs::{MapRun, ReplacedBytes, Runs};
use super::{AREA_BYTES, Location, PAGE_BYTES};

const PAGES: usize = (AREA_BYTES / PAGE_BYTES as u64) as usize;

// No whole page can lie at these data offsets, since an extent ends at or before 4 GiB of data
// space.
const HOLE: Location = Location { sequence: 0, data_offset: u32::MAX };
const MIXED: Location = Location { sequence: 0, data_offset: u32::MAX - 1 };

/// The page table and its fragments.
pub(super) struct Dense {
    pages: Box<[Location]>,
    /// Pages of the table that are neither hole nor mixed.
    whole_pages: usize,
    fragments: Runs,
}

fn is_whole(entry: Location) -> bool {
    entry.data_offset < MIXED.data_offset
}

impl Dense {
    pub(super) fn from_runs(runs: &[MapRun]) -> Dense {
        let mut dense =
            Dense { pages: vec![HOLE; PAGES].into(), whole_pages: 0, fragments: Runs::default() };
        let mut nothing = |_, _| {};
        let mut replaced = ReplacedBytes::new(&mut nothing);
        for run in runs {
            dense.replace(run.start, run.end(), Some(run.location), &mut replaced);
        }
        dense
    }

    /// What `from_runs` would take, without slack.
    pub(super) fn heap_bytes_for(runs: &[MapRun]) -> usize {
        let fragments: usize = runs
            .iter()
            .map(|run| {
                let (first, last) =
                    (run.start.next_multiple_of(PAGE_BYTES), run.end() / PAGE_BYTES * PAGE_BYTES);
                if first >= last {
                    1
                } else {
                    usize::from(run.start < first) + usize::from(last < run.end())
                }
            })
            .sum();
        size_of::<Dense>() + PAGES * size_of::<Location>() + fragments * size_of::<MapRun>()
    }

    pub(super) fn heap_bytes(&self) -> usize {
        size_of::<Dense>() + PAGES * size_of::<Location>() + self.fragments.heap_bytes()
    }

    /// Whole pages and fragments; neighbors in the table count one by one.
    pub(super) fn len(&self) -> usize {
        self.whole_pages + self.fragments.len()
    }

    pub(super) fn lookup(&self, start: u32, end: u32, visit: &mut impl FnMut(MapRun)) {
        let mut at = start;
        while at < end {
            let page = at / PAGE_BYTES;
            let next = end.min((page + 1) * PAGE_BYTES);
            let entry = self.pages[page as usize];
            if is_whole(entry) {
                visit(MapRun::new(at, next, entry.advanced(at - page * PAGE_BYTES)));
            } else if entry == MIXED {
                self.fragments.lookup(at, next, visit);
            }
            at = next;
        }
    }

    pub(super) fn replace(
        &mut self,
        start: u32,
        end: u32,
        with: Option<Location>,
        replaced: &mut ReplacedBytes<'_>,
    ) {
        let first_whole = start.next_multiple_of(PAGE_BYTES);
        let end_whole = end / PAGE_BYTES * PAGE_BYTES;
        if first_whole >= end_whole {
            return self.replace_fragment(start, end, with, replaced);
        }
        if start < first_whole {
            self.replace_fragment(start, first_whole, with, replaced);
        }
        self.replace_pages(
            first_whole,
            end_whole,
            with.map(|at| at.advanced(first_whole - start)),
            replaced,
        );
        if end_whole < end {
            self.replace_fragment(
                end_whole,
                end,
                with.map(|at| at.advanced(end_whole - start)),
                replaced,
            );
        }
    }

    fn replace_pages(
        &mut self,
        start: u32,
        end: u32,
        with: Option<Location>,
        replaced: &mut ReplacedBytes<'_>,
    ) {
        if !self.fragments.is_empty() {
            self.fragments.replace(start, end, None, replaced);
        }
        for page in start / PAGE_BYTES..end / PAGE_BYTES {
            let entry = &mut self.pages[page as usize];
            if is_whole(*entry) {
                replaced.add(entry.sequence, PAGE_BYTES);
                self.whole_pages -= 1;
            }
            *entry = match with {
                Some(location) => {
                    self.whole_pages += 1;
                    location.advanced(page * PAGE_BYTES - start)
                }
                None => HOLE,
            };
        }
    }

    /// `start..end` holds no whole page, so it touches one or two.
    fn replace_fragment(
        &mut self,
        start: u32,
        end: u32,
        with: Option<Location>,
        replaced: &mut ReplacedBytes<'_>,
    ) {
        for page in start / PAGE_BYTES..=(end - 1) / PAGE_BYTES {
            let entry = std::mem::replace(&mut self.pages[page as usize], MIXED);
            if is_whole(entry) {
                self.whole_pages -= 1;
                let page_start = page * PAGE_BYTES;
                self.fragments.replace(page_start, page_start + PAGE_BYTES, Some(entry), replaced);
            }
        }
        self.fragments.replace(start, end, with, replaced);
    }
}
