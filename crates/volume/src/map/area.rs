//! One area of the object map, 16 MiB of address space, in the form that takes less memory.
//!
//! Sparse: a sorted list, 16 bytes per run. Dense: a table of pages, 32 KiB and fragments. An area
//! turns dense when its list grows past what the table would take; it turns back only when `settle`
//! finds that this saves enough memory, so that areas do not oscillate between the forms.
//!
//! Invariants: the forms differ in memory and in how runs are cut, never in what is mapped where.
//! An area that maps nothing is sparse.
//!
//! Not here: locks, addresses of the volume.

use super::dense::Dense;
use super::runs::{MapRun, ReplacedBytes, Runs};
use super::{AREA_BYTES, Location};
use crate::limits::MAP_DENSE_FROM_RUNS;

/// What one area maps.
pub(super) enum Area {
    Sparse(Runs),
    Dense(Box<Dense>),
}

impl Default for Area {
    fn default() -> Area {
        Area::Sparse(Runs::default())
    }
}

impl Area {
    /// `list` keeps the invariants of [`Runs`].
    pub(super) fn from_sorted(list: &[MapRun]) -> Area {
        if turns_dense(list, size_of_val(list)) {
            Area::Dense(Box::new(Dense::from_runs(list)))
        } else {
            Area::Sparse(Runs::from_sorted(list))
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Entries kept. A dense area counts each page.
    pub(super) fn len(&self) -> usize {
        match self {
            Area::Sparse(runs) => runs.len(),
            Area::Dense(dense) => dense.len(),
        }
    }

    /// Memory besides the `Area` itself.
    pub(super) fn heap_bytes(&self) -> usize {
        match self {
            Area::Sparse(runs) => runs.heap_bytes(),
            Area::Dense(dense) => dense.heap_bytes(),
        }
    }

    /// Visits what is mapped in `start..end`, clipped to it, in order. Runs that touch are not
    /// always joined.
    pub(super) fn lookup(&self, start: u32, end: u32, visit: &mut impl FnMut(MapRun)) {
        match self {
            Area::Sparse(runs) => runs.lookup(start, end, visit),
            Area::Dense(dense) => dense.lookup(start, end, visit),
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
        if start == 0 && u64::from(end) == AREA_BYTES {
            self.lookup(start, end, &mut |run| replaced.add(run.location.sequence, run.length));
            *self = match with {
                Some(location) => Area::from_sorted(&[MapRun::new(start, end, location)]),
                None => Area::default(),
            };
            return;
        }
        match self {
            Area::Sparse(runs) => {
                let heap_bytes = runs.heap_bytes();
                runs.replace(start, end, with, replaced);
                // Checked only when the list grew, so that the check costs a few steps per insert
                // at most.
                if runs.heap_bytes() > heap_bytes && turns_dense(runs.as_slice(), heap_bytes) {
                    *self = Area::Dense(Box::new(Dense::from_runs(runs.as_slice())));
                }
            }
            Area::Dense(dense) => {
                dense.replace(start, end, with, replaced);
                if dense.len() == 0 {
                    *self = Area::default();
                }
            }
        }
    }

    /// Everything mapped, joined where it touches.
    pub(super) fn sorted(&self) -> Vec<MapRun> {
        let mut list: Vec<MapRun> = Vec::new();
        self.lookup(0, AREA_BYTES as u32, &mut |run| match list.last_mut() {
            Some(last) if last.continues_in(&run) => last.length += run.length,
            _ => list.push(run),
        });
        list
    }

    /// Whether a dense area would be at least a third smaller as a list of `runs` entries.
    pub(super) fn should_turn_sparse(&self, runs: usize) -> bool {
        let sparse_bytes = runs * size_of::<MapRun>();
        matches!(self, Area::Dense(dense) if sparse_bytes * 3 < dense.heap_bytes() * 2)
    }

    #[cfg(test)]
    pub(super) fn is_dense(&self) -> bool {
        matches!(self, Area::Dense(_))
    }

    #[cfg(test)]
    pub(super) fn make_dense(&mut self) {
        *self = Area::Dense(Box::new(Dense::from_runs(&self.sorted())));
    }
}

fn turns_dense(list: &[MapRun], sparse_bytes: usize) -> bool {
    list.len() >= MAP_DENSE_FROM_RUNS
        && Dense::heap_bytes_for(list) <= sparse_bytes + sparse_bytes / 8
}
