//! The packet numbers that one link has received: the last 4096 exactly, and none before them.
//!
//! Invariants: a number is accepted once; a number older than the window is never fresh; nothing is
//! allocated. Accept a number only after its packet opened, or a stranger could move the window.
//!
//! Not here: locks, what happens with a packet, the bytes of an acknowledgement.

/// The size of the window, including the newest number.
pub const WINDOW_PACKETS: u64 = 4096;
/// Numbers at and above this do not fit below a link's index.
const NUMBER_END: u64 = 1 << 56;
const GROUPS: usize = (WINDOW_PACKETS / 64) as usize;

/// The packet numbers received on one link, without the link's index.
///
/// Number `n` has bit `n % 64` of group `n / 64 % 64`. The lowest numbers of the window may share a
/// group with the highest: they are 4096 apart, so no bit has two meanings.
#[derive(Clone, Debug)]
pub struct ReplayWindow {
    /// One more than the newest number; zero if there is none.
    end: u64,
    taken_groups: [u64; GROUPS],
}

impl Default for ReplayWindow {
    fn default() -> Self {
        Self::new()
    }
}

impl ReplayWindow {
    /// A window without any number.
    pub fn new() -> Self {
        Self { end: 0, taken_groups: [0; GROUPS] }
    }

    /// The newest accepted number.
    pub fn newest(&self) -> Option<u64> {
        self.end.checked_sub(1)
    }

    /// Whether a packet with this number can be accepted: it has not arrived, and is inside the
    /// window.
    pub fn fresh(&self, number: u64) -> bool {
        let ahead = number >= self.end && number < NUMBER_END;
        ahead || (number < self.end && number >= self.floor() && !self.is_taken(number))
    }

    /// Accepts a number once. Returns whether it was fresh.
    pub fn take(&mut self, number: u64) -> bool {
        if !self.fresh(number) {
            return false;
        }
        if number >= self.end {
            self.forget(self.end.max(number.saturating_sub(WINDOW_PACKETS - 1)), number);
            self.end = number + 1;
        }
        self.taken_groups[group(number)] |= bit(number);
        true
    }

    /// Writes the accepted numbers as ranges (first, last), the newest first, until `out` is full
    /// or the window ends. Returns their number.
    pub fn ranges(&self, out: &mut [(u64, u64)]) -> usize {
        let mut end = self.end;
        for (count, range) in out.iter_mut().enumerate() {
            end -= self.run_below(end, false);
            let first = end - self.run_below(end, true);
            if first == end {
                return count;
            }
            *range = (first, end - 1);
            end = first;
        }
        out.len()
    }

    /// The oldest number in the window.
    fn floor(&self) -> u64 {
        self.end.saturating_sub(WINDOW_PACKETS)
    }

    fn is_taken(&self, number: u64) -> bool {
        self.taken_groups[group(number)] & bit(number) != 0
    }

    /// Marks the numbers from `first` to `end` as not received, a group at a time.
    fn forget(&mut self, mut first: u64, end: u64) {
        while first < end {
            let count = (64 - first % 64).min(end - first);
            self.taken_groups[group(first)] &= !(u64::MAX >> (64 - count) << (first % 64));
            first += count;
        }
    }

    /// How many numbers directly below `end` are all received, or all not, down to the window's
    /// end.
    fn run_below(&self, end: u64, is_taken: bool) -> u64 {
        let mut first = end;
        while first > self.floor() {
            let last = first - 1;
            let bits = self.taken_groups[group(last)];
            // The bits from `last` downward, moved to the top.
            let bits = (if is_taken { bits } else { !bits }) << (63 - last % 64);
            let bits_in_group = (last % 64 + 1).min(first - self.floor());
            let run = u64::from(bits.leading_ones()).min(bits_in_group);
            first -= run;
            if run < bits_in_group {
                break;
            }
        }
        end - first
    }
}

fn group(number: u64) -> usize {
    (number / 64) as usize % GROUPS
}

fn bit(number: u64) -> u64 {
    1 << (number % 64)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    /// A slow reference model of the window.
    #[derive(Default)]
    struct Model(BTreeSet<u64>);

    impl Model {
        fn floor(&self) -> u64 {
            self.0.last().map_or(0, |newest| (newest + 1).saturating_sub(WINDOW_PACKETS))
        }

        fn fresh(&self, number: u64) -> bool {
            number < NUMBER_END && number >= self.floor() && !self.0.contains(&number)
        }

        fn ranges(&self) -> Vec<(u64, u64)> {
            let mut ranges: Vec<(u64, u64)> = Vec::new();
            for &number in self.0.range(self.floor()..).rev() {
                match ranges.last_mut() {
                    Some((first, _)) if *first == number + 1 => *first = number,
                    _ => ranges.push((number, number)),
                }
            }
            ranges
        }
    }

    fn agrees(numbers: &[u64]) {
        let (mut window, mut model) = (ReplayWindow::new(), Model::default());
        for &number in numbers {
            let fresh = model.fresh(number);
            assert_eq!(window.fresh(number), fresh, "{number}");
            assert_eq!(window.take(number), fresh, "{number}");
            assert!(!window.fresh(number), "{number} twice");
            if fresh {
                model.0.insert(number);
            }
            assert_eq!(window.newest(), model.0.last().copied());
        }
        let mut out = vec![(7, 7); WINDOW_PACKETS as usize];
        let count = window.ranges(&mut out);
        assert_eq!(out[..count], model.ranges());
        assert!(
            out[count..].iter().all(|&range| range == (7, 7)),
            "nothing is written beyond the count"
        );
        // Fewer entries: the same ranges, the newest first.
        let mut few = [(7, 7); 3];
        let range_count = window.ranges(&mut few);
        assert_eq!((range_count, &few[..range_count]), (count.min(3), &out[..count.min(3)]));
    }

    proptest! {
        /// Numbers in bursts around moving points, as links lose, duplicate and delay them.
        #[test]
        fn the_window_is_the_last_4096_numbers_of_a_set(
            steps in proptest::collection::vec((0u8..20, 0u64..6000, 1u64..200), 1..120),
        ) {
            let (mut at, mut numbers) = (0u64, Vec::new());
            for (kind, far, near) in steps {
                match kind {
                    0 => at += far,
                    1 => numbers.push(at.saturating_sub(far)),
                    2 => at += 64 * near,
                    3 => numbers.extend((at..at + near).rev()),
                    4..8 => numbers.push(at.saturating_sub(near)),
                    8..12 => { numbers.extend(at..at + near); at += near; }
                    _ => { numbers.push(at); at += 1 + near % 3; }
                }
            }
            agrees(&numbers);
        }
    }

    #[test]
    fn nothing_came_at_first_and_zero_is_a_number() {
        let mut window = ReplayWindow::new();
        assert_eq!((window.newest(), window.ranges(&mut [(0, 0); 4])), (None, 0));
        assert!(window.fresh(0) && window.take(0) && !window.take(0));
        let mut out = [(9, 9); 2];
        assert_eq!((window.ranges(&mut out), out[0]), (1, (0, 0)));
        assert_eq!(window.ranges(&mut []), 0);
    }

    #[test]
    fn the_oldest_number_of_the_window_is_taken_and_the_one_before_is_not() {
        let newest = 1_000_000;
        let mut window = ReplayWindow::new();
        assert!(window.take(newest));
        assert!(!window.take(newest - WINDOW_PACKETS), "just out of the window");
        assert!(window.take(newest - WINDOW_PACKETS + 1), "the oldest in it");
        assert!(window.take(newest + 1), "moves the window by one");
        let mut out = [(0, 0); 4];
        assert_eq!((window.ranges(&mut out), out[0]), (1, (newest, newest + 1)));
    }

    #[test]
    fn numbers_skipped_by_a_leap_are_fresh_though_their_bits_were_used_before() {
        for leap in [1, 63, 64, 65, 4095, 4096, 4097, 4096 * 3 + 1, 1 << 40] {
            let mut numbers: Vec<u64> = (0..5000).collect();
            numbers.push(4999 + leap);
            numbers.extend((4999 + leap).saturating_sub(5000)..4999 + leap + 70);
            agrees(&numbers);
        }
    }

    #[test]
    fn a_full_window_is_one_range_and_every_other_number_makes_2048() {
        agrees(&(0..10_000).collect::<Vec<_>>());
        agrees(&(0..10_000).map(|n| 2 * n).collect::<Vec<_>>());
    }

    #[test]
    fn a_number_that_reaches_into_the_link_index_is_never_fresh() {
        agrees(&[NUMBER_END, u64::MAX, NUMBER_END - 1, NUMBER_END, u64::MAX, NUMBER_END - 2]);
    }
}
