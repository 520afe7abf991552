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
    /// Who began it ends it.
    token: u64,
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
    /// Records from `now` on, for `time_max` at most. An error is how long another recording that
    /// nobody has ended may still take.
    pub(crate) fn begin(
        &self,
        token: u64,
        now: Duration,
        time_max: Duration,
    ) -> Result<(), Duration> {
        let mut held = self.recording.lock();
        if let Some(other) = held.as_ref().filter(|other| now < other.until) {
            return Err(other.until - now);
        }
        let (until, units) = (now.saturating_add(time_max), HashSet::new());
        *held = Some(ReadRecording { token, until, units, seen: SeenReads::default() });
        self.is_on.store(true, Ordering::Release);
        Ok(())
    }

    /// What was read since the recording of `token` began; none: it is not, or no longer, under
    /// way.
    pub(crate) fn end(&self, token: u64) -> Option<SeenReads> {
        let mut held = self.recording.lock();
        let ended = held.take_if(|recording| recording.token == token)?;
        self.is_on.store(false, Ordering::Release);
        Some(ended.seen)
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
            recording.units = HashSet::new();
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
        seen.end(1)
    }

    #[test]
    fn ranges_stand_in_the_order_of_their_first_read_and_none_twice() {
        let seen = ReadsSeen::default();
        assert_eq!(noted(&seen, &[(0, 4096)]), None, "nobody records");
        seen.begin(1, Duration::ZERO, 9 * SECOND).expect("nobody records");
        let reads = [(40_960, 8192), (49_152, 100), (0, 4096), (36_864, 12_288), (0, 4096)];
        let ranges = vec![(40_960, 12_288), (0, 4096), (36_864, 4096)];
        assert_eq!(noted(&seen, &reads), Some(SeenReads { ranges, is_cut: false }));
    }

    #[test]
    fn a_recording_ends_by_itself_and_keeps_what_it_saw() {
        let seen = ReadsSeen::default();
        seen.begin(1, Duration::ZERO, 9 * SECOND).expect("nobody records");
        seen.note(0, 4096, || SECOND);
        seen.note(8192, 4096, || 9 * SECOND);
        assert!(!seen.is_on.load(Ordering::Acquire));
        assert_eq!(seen.end(1).expect("it was begun").ranges, [(0, 4096)]);
    }

    #[test]
    fn a_recording_is_neither_lost_to_another_nor_ended_by_it() {
        let seen = ReadsSeen::default();
        assert_eq!(seen.begin(1, Duration::ZERO, 9 * SECOND), Ok(()));
        seen.note(0, 4096, || SECOND);
        assert_eq!(seen.begin(2, 2 * SECOND, 9 * SECOND), Err(7 * SECOND));
        assert_eq!(seen.end(2), None);
        // One that nobody ended is over at its time, and then its end is no end of the next.
        assert_eq!(seen.begin(3, 9 * SECOND, 9 * SECOND), Ok(()));
        seen.note(8192, 4096, || 10 * SECOND);
        assert_eq!(seen.end(1), None);
        assert_eq!(seen.end(3).expect("it goes on").ranges, [(8192, 4096)]);
        assert_eq!(seen.begin(4, 11 * SECOND, SECOND), Ok(()));
    }

    #[test]
    fn a_recording_holds_no_more_than_a_boot_set() {
        let seen = ReadsSeen::default();
        seen.begin(1, Duration::ZERO, 9 * SECOND).expect("nobody records");
        let reads = (0..=limits::BOOT_SET_RANGES_MAX as u64).map(|number| (8192 * number, 4096));
        let found = noted(&seen, &reads.collect::<Vec<_>>()).expect("it was begun");
        assert_eq!(found.ranges.len(), limits::BOOT_SET_RANGES_MAX);
        assert!(found.is_cut);
        seen.begin(1, Duration::ZERO, 9 * SECOND).expect("nobody records");
        let whole = [(0, limits::BOOT_SET_BYTES_MAX), (1 << 40, 4096)];
        let found = noted(&seen, &whole).expect("it was begun");
        assert_eq!((found.bytes(), found.is_cut), (limits::BOOT_SET_BYTES_MAX, true));
    }
}
