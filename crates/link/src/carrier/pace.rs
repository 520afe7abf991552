//! Decides when a receiver of Ethernet frames lets them accumulate instead of waking for each: like
//! interrupt moderation of a network card, but for the waiting thread (WZBLK §2.2.5).
//!
//! A wake-up costs both ends more than a frame of 9000 bytes. So while frames come in a steady
//! flow, the receiver sleeps (a *nap*) for about as long as [`NAP_FRAMES`] take to arrive. Each nap
//! shows whether the flow is steady: if its last frame came in the first half, the sender had
//! nothing more to send, probably because it waited for us. Then the next nap requires many more
//! frames first, and more after each such failure, so a sender with few requests in flight is not
//! delayed.
//!
//! Invariant: a nap lasts at most [`NAP_NS_MAX`]. Not here: sleeping, clocks, the ring.

use std::time::Duration;

/// The target number of frames per nap.
const NAP_FRAMES: u64 = 32;
/// A nap for fewer frames is not worthwhile.
const WORTH_FRAMES: u64 = 4;
/// Shorter naps are not worth their system call; longer ones would add noticeable latency.
const NAP_NS_MIN: u64 = 40_000;
const NAP_NS_MAX: u64 = 500_000;
/// Frames of a steady flow that must arrive before the first nap, and at most after failures.
const STEADY_FRAMES_MIN: u64 = 64;
const STEADY_FRAMES_MAX: u64 = 4096;

/// Ethernet frames received together: their number, and the arrival times of the first and the
/// last.
#[derive(Clone, Copy, Default, Debug, PartialEq, Eq)]
pub(super) struct FrameBurst {
    pub(super) frames: u64,
    pub(super) first_at_ns: u64,
    pub(super) last_at_ns: u64,
}

impl FrameBurst {
    pub(super) fn add(&mut self, arrived_at_ns: u64) {
        if self.frames == 0 {
            self.first_at_ns = arrived_at_ns;
        }
        self.last_at_ns = arrived_at_ns;
        self.frames += 1;
    }
}

/// Decides on naps.
#[derive(Debug)]
pub(super) struct Pace {
    /// The mean time between two frames during a flow.
    gap_ns: u64,
    /// Frames since the last failed nap, and the number required before the next nap.
    frames: u64,
    steady_frames: u64,
}

impl Pace {
    pub(super) fn new() -> Self {
        Pace { gap_ns: NAP_NS_MAX, frames: 0, steady_frames: STEADY_FRAMES_MIN }
    }

    /// How long to sleep before looking for the next frames, if at all.
    pub(super) fn nap(&self) -> Option<Duration> {
        let nap_ns = (self.gap_ns * NAP_FRAMES).clamp(NAP_NS_MIN, NAP_NS_MAX);
        let is_worth_it = self.gap_ns * WORTH_FRAMES <= nap_ns;
        (is_worth_it && self.frames >= self.steady_frames).then(|| Duration::from_nanos(nap_ns))
    }

    /// Counts received frames.
    pub(super) fn took(&mut self, burst: &FrameBurst) {
        self.frames = self.frames.saturating_add(burst.frames);
        if burst.frames > 1 {
            let gap_ns = burst.last_at_ns.saturating_sub(burst.first_at_ns) / (burst.frames - 1);
            self.gap_ns = (3 * self.gap_ns + gap_ns.min(NAP_NS_MAX)) / 4;
        }
    }

    /// Judges the frames received after a nap from `began_at_ns` to `ended_at_ns`.
    pub(super) fn napped(&mut self, began_at_ns: u64, ended_at_ns: u64, burst: &FrameBurst) {
        let middle_at_ns = began_at_ns + ended_at_ns.saturating_sub(began_at_ns) / 2;
        if burst.frames >= WORTH_FRAMES && burst.last_at_ns >= middle_at_ns {
            self.steady_frames = (self.steady_frames / 2).max(STEADY_FRAMES_MIN);
        } else {
            self.steady_frames = (self.steady_frames * 4).min(STEADY_FRAMES_MAX);
            self.frames = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const US: u64 = 1000;

    fn taken(frames: u64, first_at_ns: u64, last_at_ns: u64) -> FrameBurst {
        FrameBurst { frames, first_at_ns, last_at_ns }
    }

    /// A pace after a long flow with this gap.
    fn in_flow(gap_ns: u64) -> Pace {
        let mut pace = Pace::new();
        for pair in 0..STEADY_FRAMES_MIN {
            let first_at_ns = pair * 2 * gap_ns;
            pace.took(&taken(2, first_at_ns, first_at_ns + gap_ns));
        }
        pace
    }

    #[test]
    fn a_steady_flow_is_slept_through_for_32_frames_and_no_longer_than_half_a_millisecond() {
        let naps = [1, 5, 10, 15, 72]
            .map(|gap_us| in_flow(gap_us * US).nap().expect("a flow").as_micros());
        assert_eq!(naps, [40, 160, 320, 480, 500]);
        assert_eq!(in_flow(200 * US).nap(), None, "too few would come");
    }

    #[test]
    fn no_receiver_naps_before_many_frames_came() {
        let mut pace = Pace::new();
        for _ in 0..STEADY_FRAMES_MIN - 1 {
            assert_eq!(pace.nap(), None);
            pace.took(&taken(1, 0, 0));
        }
        assert_eq!(pace.nap(), None);
    }

    #[test]
    fn a_nap_after_whose_start_nothing_came_is_followed_by_rarer_and_rarer_ones() {
        let mut pace = in_flow(5 * US);
        let mut frames_between = Vec::new();
        for _ in 0..6 {
            let mut frames = 0;
            while pace.nap().is_none() {
                pace.took(&taken(2, 0, 5 * US));
                frames += 2;
            }
            frames_between.push(frames);
            pace.napped(0, 80 * US, &taken(8, 5 * US, 39 * US));
        }
        assert_eq!(frames_between, [0, 256, 1024, 4096, 4096, 4096]);
    }

    #[test]
    fn a_nap_that_was_filled_is_followed_by_the_next_and_makes_up_for_failures() {
        let mut pace = in_flow(5 * US);
        for _ in 0..3 {
            pace.napped(0, 80 * US, &taken(0, 0, 0));
        }
        assert_eq!(pace.nap(), None);
        for _ in 0..STEADY_FRAMES_MAX {
            pace.took(&taken(1, 0, 0));
        }
        for _ in 0..6 {
            assert!(pace.nap().is_some());
            pace.napped(0, 80 * US, &taken(16, 5 * US, 80 * US));
        }
        assert_eq!(pace.steady_frames, STEADY_FRAMES_MIN);
    }
}
