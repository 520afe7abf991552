//! Which segments garbage collection takes, and when. Pure: no I/O, no clock; the engine and the
//! forecast ask the same questions here.
//!
//! Utilization is the share of a segment's data that the map still points at. Greedy takes the
//! emptiest first (LSVD §3.5); cost-benefit also considers how old the live data is (Rosenblum and
//! Ousterhout 1992, §3.5).
//!
//! Invariants: a choice depends on the arguments alone, and among equals takes the older segment
//! first. A segment without garbage is never chosen.
//!
//! Not here: finding and moving the live data (`sweep`, `gather`), deleting what is dead (the
//! engine).

use std::cmp::Ordering;

/// Order in which segments are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice {
    /// The emptiest first.
    Greedy,
    /// The most freed for the least moved, and old data before young data.
    CostBenefit,
}

/// When to collect, and what.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GcPolicy {
    /// Collection starts when less than this share of all data is live. Zero: never.
    pub start: f64,
    /// It stops when at least this share is live.
    pub stop: f64,
    /// Which segments go first.
    pub choice: Choice,
    /// Bytes moved a second at most; zero: no limit.
    pub bytes_per_second_max: u64,
}

impl Default for GcPolicy {
    /// 0.70 to 0.72, greedy: moves less than LSVD's 0.70 to 0.75 (decision 0013).
    fn default() -> Self {
        GcPolicy { start: 0.70, stop: 0.72, choice: Choice::Greedy, bytes_per_second_max: 0 }
    }
}

/// A segment that could be taken. A dead segment is not a candidate: it only waits to be deleted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// Which segment.
    pub sequence: u32,
    /// Bytes of its data that the map points at.
    pub live_bytes: u64,
    /// Bytes of its data.
    pub data_bytes: u64,
    /// When it was made.
    pub wall_unix_ms: u64,
}

impl Candidate {
    /// Whether less than `threshold` of its data is live; 1: any.
    pub(crate) fn is_below(&self, threshold: f64) -> bool {
        threshold >= 1.0 || (self.live_bytes as f64) < self.data_bytes as f64 * threshold
    }
}

impl Candidate {
    fn utilization(&self) -> f64 {
        share(self.live_bytes, self.data_bytes)
    }

    /// Benefit over cost: space freed times age, over the cost of reading all data and writing what
    /// is live.
    fn benefit(&self, now_unix_ms: u64) -> f64 {
        let used = self.utilization();
        let age_ms = now_unix_ms.saturating_sub(self.wall_unix_ms).max(1);
        (1.0 - used) * age_ms as f64 / (1.0 + used)
    }
}

impl GcPolicy {
    /// Why the policy is invalid, if it is.
    #[must_use]
    pub fn fault(&self) -> Option<String> {
        let GcPolicy { start, stop, .. } = *self;
        if !(0.0..=0.95).contains(&start) {
            return Some(format!(
                "collection cannot start at a live share of {start}: give 0 (never) to 0.95"
            ));
        }
        if stop < start || stop.is_nan() || stop > 0.98 {
            return Some(format!(
                "collection that starts at {start} cannot stop at {stop}: give {start} to 0.98"
            ));
        }
        None
    }

    /// Whether there is enough garbage to start collection. Neither count includes the bytes of
    /// dead segments.
    #[must_use]
    pub fn is_due(&self, live_bytes: u64, data_bytes: u64) -> bool {
        data_bytes > live_bytes && share(live_bytes, data_bytes) < self.start
    }

    /// Whether so little garbage is left that it may stop.
    #[must_use]
    pub fn is_enough(&self, live_bytes: u64, data_bytes: u64) -> bool {
        data_bytes <= live_bytes || share(live_bytes, data_bytes) >= self.stop
    }

    /// Whether garbage grows faster than it is collected: then collection also continues while
    /// writers are busy or wait for room.
    #[must_use]
    pub fn is_pressing(&self, live_bytes: u64, data_bytes: u64) -> bool {
        share(live_bytes, data_bytes) < self.start * 0.8
    }

    /// Whether writers have outrun collection so far that they must be slowed down: less than 0.6
    /// of [`start`](Self::start) is live. A collection with a rate of its own bounds nothing.
    #[must_use]
    pub fn is_exceeded(&self, live_bytes: u64, data_bytes: u64) -> bool {
        self.bytes_per_second_max == 0 && share(live_bytes, data_bytes) < self.start * 0.6
    }

    /// The segments to take next, best first: enough to reach `stop`, but no more than
    /// `moved_bytes_max` of live data, and at least one if any holds garbage.
    #[must_use]
    pub fn choose(
        &self,
        candidates: &[Candidate],
        live_bytes: u64,
        data_bytes: u64,
        now_unix_ms: u64,
        moved_bytes_max: u64,
    ) -> Vec<u32> {
        let mut ranked: Vec<(f64, &Candidate)> = candidates
            .iter()
            .filter(|candidate| candidate.live_bytes < candidate.data_bytes)
            .map(|candidate| match self.choice {
                Choice::Greedy => (candidate.utilization(), candidate),
                Choice::CostBenefit => (-candidate.benefit(now_unix_ms), candidate),
            })
            .collect();
        // Among equals the older one first, so that the choice is deterministic.
        ranked.sort_by(|(one, left), (other, right)| {
            one.partial_cmp(other)
                .unwrap_or(Ordering::Equal)
                .then(left.sequence.cmp(&right.sequence))
        });
        let (mut chosen, mut moved_bytes, mut data_bytes) = (Vec::new(), 0, data_bytes);
        for (_, candidate) in ranked {
            let full = moved_bytes + candidate.live_bytes > moved_bytes_max && !chosen.is_empty();
            if full || self.is_enough(live_bytes, data_bytes) {
                break;
            }
            chosen.push(candidate.sequence);
            moved_bytes += candidate.live_bytes;
            data_bytes = (data_bytes + candidate.live_bytes).saturating_sub(candidate.data_bytes);
        }
        chosen
    }
}

fn share(part: u64, whole: u64) -> f64 {
    if whole == 0 { 1.0 } else { part as f64 / whole as f64 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(sequence: u32, live_bytes: u64, wall_unix_ms: u64) -> Candidate {
        Candidate { sequence, live_bytes, data_bytes: 100, wall_unix_ms }
    }

    #[test]
    fn greedy_takes_the_emptiest_until_enough_is_live() {
        let candidates =
            [candidate(1, 90, 0), candidate(2, 20, 0), candidate(3, 50, 0), candidate(4, 20, 0)];
        let policy = GcPolicy::default();
        assert!(policy.is_due(180, 400));
        // 180 of 320, 180 of 240: enough.
        assert_eq!(policy.choose(&candidates, 180, 400, 0, 1000), [2, 4]);
        // What may be moved at once ends it earlier, but one is always taken.
        assert_eq!(policy.choose(&candidates, 180, 400, 0, 30), [2]);
        assert_eq!(policy.choose(&candidates, 180, 400, 0, 0), [2]);
    }

    #[test]
    fn cost_benefit_takes_an_old_fuller_one_before_a_young_emptier_one() {
        let candidates = [candidate(1, 40, 9_000), candidate(2, 60, 1_000)];
        let policy = GcPolicy { choice: Choice::CostBenefit, ..GcPolicy::default() };
        assert_eq!(policy.choose(&candidates, 100, 200, 10_000, 1000), [2, 1]);
        let greedy = GcPolicy::default();
        assert_eq!(greedy.choose(&candidates, 100, 200, 10_000, 1000), [1, 2]);
    }

    #[test]
    fn a_full_segment_is_never_taken_and_zero_means_never() {
        let policy = GcPolicy::default();
        assert!(policy.choose(&[candidate(1, 100, 0)], 100, 200, 0, 1000).is_empty());
        assert!(!policy.is_due(0, 0) && !policy.is_due(100, 100));
        assert!(!GcPolicy { start: 0.0, ..policy }.is_due(1, 100));
    }

    #[test]
    fn the_bound_lies_below_what_is_pressing_and_a_rate_or_zero_has_none() {
        let policy = GcPolicy::default();
        assert!(policy.is_pressing(50, 100) && !policy.is_exceeded(50, 100));
        assert!(policy.is_exceeded(41, 100) && !policy.is_exceeded(0, 0));
        assert!(!GcPolicy { bytes_per_second_max: 1, ..policy }.is_exceeded(1, 100));
        assert!(!GcPolicy { start: 0.0, ..policy }.is_exceeded(1, 100));
    }

    #[test]
    fn thresholds_out_of_order_are_refused_by_name() {
        let policy = |start, stop| GcPolicy { start, stop, ..GcPolicy::default() };
        assert_eq!(policy(0.7, 0.72).fault(), None);
        assert_eq!(policy(0.0, 0.0).fault(), None);
        for (start, stop) in [(0.7, 0.6), (-0.1, 0.5), (0.7, 1.0), (f64::NAN, 0.5), (0.5, f64::NAN)]
        {
            assert!(policy(start, stop).fault().is_some(), "{start} to {stop}");
        }
    }
}
