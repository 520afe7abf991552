//! Which ranges of stored data are read, in the order of their first read: what a boot set is made
//! of.
//!
//! Invariants: while nobody records, a read costs one load. A recording has a bound in ranges and
//! in bytes, and ends by itself: one that was forgotten takes no more memory.
//!
//! Not here: the object that a recording becomes (`boot_set`).

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use crate::limits;

/// What is told apart: a read of a part of it reads it.
const UNIT_BYTES: u64 = 4096;

/// What was read while it was recorded.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SeenReads {
    /// Addresses and lengths in the order of the first read; no unit is in two of them.
    pub ranges: Vec<(u64, u64)>,
    /// More was read than a boot set holds: the rest is missing.
    pub is_cut: bool,
}

impl SeenReads {
    /// Bytes of all ranges.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.ranges.iter().map(|(_, length)| length).sum()
    }
}

struct ReadRecording {
    until: Duration,
    units: HashSet<u64>,
    seen: SeenReads,
}

/// The recording of a volume's reads, if there is one.
#[derive(Default)]
pub(crate) struct ReadsSeen {
    is_on: AtomicBool,
    /// The units of a recording are bounded by `BOOT_SET_BYTES_MAX`.
    recording: Mutex<Option<ReadRecording>>,
}

impl ReadsSeen {
    /// Records from now on, until `until` at most. A recording under way is forgotten.
    pub(crate) fn begin(&self, until: Duration) {
        let fresh = ReadRecording { until, units: HashSet::new(), seen: SeenReads::default() };
        *self.recording.lock() = Some(fresh);
        self.is_on.store(true, Ordering::Release);
    }

    /// What was read since then; none: nobody records.
    pub(crate) fn end(&self) -> Option<SeenReads> {
        self.is_on.store(false, Ordering::Release);
        self.recording.lock().take().map(|recording| recording.seen)
    }

    /// Notes a read of stored data.
    pub(super) fn note(&self, address: u64, length: u64, now: impl Fn() -> Duration) {
        if !self.is_on.load(Ordering::Acquire) {
            return;
        }
        let mut held = self.recording.lock();
        let Some(recording) = &mut *held else { return };
        if now() >= recording.until || recording.seen.is_cut {
            // What was seen stays until somebody asks for it.
            return self.is_on.store(false, Ordering::Release);
        }
        let units = address / UNIT_BYTES..(address + length).div_ceil(UNIT_BYTES);
        for unit in units.filter(|unit| !recording.units.contains(unit)).collect::<Vec<_>>() {
            recording.add(unit);
        }
    }
}

impl ReadRecording {
    fn add(&mut self, unit: u64) {
        let (units_max, seen) = (limits::BOOT_SET_BYTES_MAX / UNIT_BYTES, &mut self.seen);
        if self.units.len() as u64 >= units_max || seen.is_cut {
            seen.is_cut = true;
            return;
        }
        let at = unit * UNIT_BYTES;
        let is_full = seen.ranges.len() >= limits::BOOT_SET_RANGES_MAX;
        match seen.ranges.last_mut() {
            Some((address, length)) if *address + *length == at => *length += UNIT_BYTES,
            _ if is_full => {
                seen.is_cut = true;
                return;
            }
            _ => seen.ranges.push((at, UNIT_BYTES)),
        }
        self.units.insert(unit);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn noted(seen: &ReadsSeen, reads: &[(u64, u64)]) -> Option<SeenReads> {
        reads.iter().for_each(|(address, length)| seen.note(*address, *length, || SECOND));
        seen.end()
    }

    #[test]
    fn ranges_stand_in_the_order_of_their_first_read_and_none_twice() {
        let seen = ReadsSeen::default();
        assert_eq!(noted(&seen, &[(0, 4096)]), None, "nobody records");
        seen.begin(9 * SECOND);
        let reads = [(40_960, 8192), (49_152, 100), (0, 4096), (36_864, 12_288), (0, 4096)];
        let ranges = vec![(40_960, 12_288), (0, 4096), (36_864, 4096)];
        assert_eq!(noted(&seen, &reads), Some(SeenReads { ranges, is_cut: false }));
    }

    #[test]
    fn a_recording_ends_by_itself_and_keeps_what_it_saw() {
        let seen = ReadsSeen::default();
        seen.begin(9 * SECOND);
        seen.note(0, 4096, || SECOND);
        seen.note(8192, 4096, || 9 * SECOND);
        assert!(!seen.is_on.load(Ordering::Acquire));
        assert_eq!(seen.end().expect("it was begun").ranges, [(0, 4096)]);
    }

    #[test]
    fn a_recording_holds_no_more_than_a_boot_set() {
        let seen = ReadsSeen::default();
        seen.begin(9 * SECOND);
        let reads = (0..=limits::BOOT_SET_RANGES_MAX as u64).map(|number| (8192 * number, 4096));
        let found = noted(&seen, &reads.collect::<Vec<_>>()).expect("it was begun");
        assert_eq!(found.ranges.len(), limits::BOOT_SET_RANGES_MAX);
        assert!(found.is_cut);
        seen.begin(9 * SECOND);
        let whole = [(0, limits::BOOT_SET_BYTES_MAX), (1 << 40, 4096)];
        let found = noted(&seen, &whole).expect("it was begun");
        assert_eq!((found.bytes(), found.is_cut), (limits::BOOT_SET_BYTES_MAX, true));
    }
}
