//! Decides when a thread looks for its next messages for a while before it sleeps (busy polling).
//!
//! To sleep and to be woken costs both ends more than a small request. So where the next message is
//! expected soon, a receiver looks for it first, and gives way to other threads between two looks.
//! Where messages arrive in bursts, it sleeps, because more of them are handled at once then.
//!
//! Invariants: one look lasts no longer than the limit. A receiver looks only while recent waits
//! were shorter than that, so an idle one stops after one look. A receiver that notices another
//! thread waiting for its core stops looking, and tries again after longer and longer rests. A step
//! to another thread reaches those of the same scheduling group only, so a message that comes right
//! after a look was in vain counts as such a notice: its sender may have waited for this core.
//!
//! Not here: how messages are found and received, the sleep, whether looks are allowed at all.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

const MS: u64 = 1_000_000;

/// The longest look that is worthwhile: what a sleep costs here and at the other end.
pub const SPIN_TIME_MAX: Duration = Duration::from_micros(50);
/// After more messages at once than this, a receiver sleeps.
const MESSAGES_MAX: usize = 4;
/// A longer step to another thread and back means that somebody needs the core. (An interrupt, or a
/// thread that does a little, takes less.)
const STEP_NS_MAX: u64 = 100_000;
/// A message that comes so soon after a look means the same.
const LATE_NS_MAX: u64 = 50_000;
/// How long a receiver only sleeps after that, the first time and at most, and how many times as
/// long each time. What it finds out costs it a turn of the other thread: some milliseconds.
const REST_NS_MIN: u64 = MS;
const REST_NS_MAX: u64 = 1000 * MS;
const REST_GROWTH: u64 = 4;
/// After this many looks in a row that gave way to nobody for long, the next rest is a first one.
const CALM_LOOKS: u32 = 32;
/// How many times the limit a wait counts for at most, and the weight of the newest one.
const LONG_WAIT_LIMITS: u64 = 16;
const NEWEST_SHARE: u64 = 4;

/// A limit that is larger means this.
const LIMIT_NS_MAX: u64 = 1000 * MS;

/// Decides on looks.
#[derive(Debug)]
pub struct Spin {
    clock: Instant,
    limit_ns: u64,
    /// The expected wait: a mean of recent ones.
    wait_ns: u64,
    /// Messages that the last wait ended with.
    messages: usize,
    rest_ns: u64,
    rests_until_ns: u64,
    /// Looks since the last rest that gave way to nobody for long.
    calm_looks: u32,
    /// The start of the wait under way.
    began_at_ns: Option<u64>,
    /// The end of its look, if that was in vain.
    looked_until_ns: Option<u64>,
    lookers: Option<Arc<Lookers>>,
}

/// How many threads may look at once: more would take the cores from each other and from the rest.
/// By default, none.
#[derive(Debug, Default)]
pub struct Lookers {
    looking: AtomicUsize,
    most: usize,
}

/// The right to look, until it is dropped.
pub struct Looker<'a>(&'a Lookers);

impl Lookers {
    /// At most so many.
    #[must_use]
    pub fn new(most: usize) -> Self {
        Lookers { looking: AtomicUsize::new(0), most }
    }

    /// The right to look, if it is left.
    pub fn enter(&self) -> Option<Looker<'_>> {
        let more = |looking: usize| Some(looking + 1).filter(|more| *more <= self.most);
        self.looking.fetch_update(Relaxed, Relaxed, more).ok().map(|_| Looker(self))
    }
}

impl Drop for Looker<'_> {
    fn drop(&mut self) {
        self.0.looking.fetch_sub(1, Relaxed);
    }
}

/// Time, and a step to another thread.
trait Stepper {
    fn now_ns(&mut self) -> u64;
    /// Gives way to another thread, if one waits for this core.
    fn step(&mut self);
}

struct ThreadStepper(Instant);

impl Stepper for ThreadStepper {
    fn now_ns(&mut self) -> u64 {
        now_ns(self.0)
    }

    fn step(&mut self) {
        std::thread::yield_now();
    }
}

fn now_ns(clock: Instant) -> u64 {
    // 584 years.
    clock.elapsed().as_nanos() as u64
}

impl Default for Spin {
    fn default() -> Self {
        Spin::new()
    }
}

impl Spin {
    /// One that never looks.
    #[must_use]
    pub fn new() -> Self {
        Spin {
            clock: Instant::now(),
            limit_ns: 0,
            wait_ns: u64::MAX / NEWEST_SHARE,
            messages: 0,
            rest_ns: REST_NS_MIN / REST_GROWTH,
            rests_until_ns: 0,
            calm_looks: 0,
            began_at_ns: None,
            looked_until_ns: None,
            lookers: None,
        }
    }

    /// One that looks for up to [`SPIN_TIME_MAX`], while no more than these do.
    #[must_use]
    pub fn among(lookers: Arc<Lookers>) -> Self {
        let mut spin = Spin::new();
        spin.set_limit(if lookers.most > 0 { SPIN_TIME_MAX } else { Duration::ZERO });
        spin.lookers = Some(lookers);
        spin
    }

    /// Looks last this long at most from now on; zero: none.
    pub fn set_limit(&mut self, limit: Duration) {
        let limit_ns = u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX);
        self.limit_ns = limit_ns.min(LIMIT_NS_MAX);
    }

    /// A wait for messages begins: looks for them if that is worthwhile. Returns whether `is_there`
    /// found some. Ends early when `is_over`.
    pub fn look(
        &mut self,
        wait: Option<Duration>,
        mut is_over: impl FnMut() -> bool,
        mut is_there: impl FnMut() -> bool,
    ) -> bool {
        if self.limit_ns == 0 {
            return false;
        }
        let stepper = &mut ThreadStepper(self.clock);
        self.look_by(stepper, wait, &mut is_there, &mut is_over)
    }

    fn look_by(
        &mut self,
        stepper: &mut dyn Stepper,
        wait: Option<Duration>,
        is_there: &mut dyn FnMut() -> bool,
        is_over: &mut dyn FnMut() -> bool,
    ) -> bool {
        let began_at_ns = stepper.now_ns();
        (self.began_at_ns, self.looked_until_ns) = (Some(began_at_ns), None);
        let is_soon = self.wait_ns <= self.limit_ns && self.messages <= MESSAGES_MAX;
        if !is_soon || began_at_ns < self.rests_until_ns {
            return false;
        }
        let lookers = self.lookers.clone();
        let looker = lookers.as_deref().map(Lookers::enter);
        if matches!(looker, Some(None)) {
            return false;
        }
        let wait_ns = wait.map_or(u64::MAX, |wait| wait.as_nanos().try_into().unwrap_or(u64::MAX));
        let end_ns = began_at_ns.saturating_add(self.limit_ns.min(wait_ns));
        let (mut now, mut is_found) = (began_at_ns, false);
        while now < end_ns && !is_over() {
            is_found = is_there();
            if is_found {
                break;
            }
            stepper.step();
            let after = stepper.now_ns();
            if after.saturating_sub(now) > STEP_NS_MAX {
                self.rest_from(after);
                return is_there();
            }
            now = after;
        }
        // What is there at once says nothing about the core.
        self.calm_looks = self.calm_looks.saturating_add(u32::from(now > began_at_ns));
        self.looked_until_ns = Some(now).filter(|_| !is_found);
        is_found
    }

    fn rest_from(&mut self, now: u64) {
        let longer_ns = (self.rest_ns * REST_GROWTH).min(REST_NS_MAX);
        self.rest_ns = if self.calm_looks < CALM_LOOKS { longer_ns } else { REST_NS_MIN };
        self.rests_until_ns = now.saturating_add(self.rest_ns);
        self.calm_looks = 0;
    }

    /// The wait has ended with so many messages.
    pub fn received(&mut self, messages: usize) {
        if self.limit_ns > 0 {
            self.received_at(now_ns(self.clock), messages);
        }
    }

    /// Another thread has ended the wait: that says nothing about messages.
    pub fn called(&mut self) {
        self.messages = 0;
        (self.began_at_ns, self.looked_until_ns) = (None, None);
    }

    fn received_at(&mut self, now: u64, messages: usize) {
        self.messages = messages;
        let Some(began_at_ns) = self.began_at_ns.take() else { return };
        let is_late = |until: u64| messages > 0 && now.saturating_sub(until) <= LATE_NS_MAX;
        if self.looked_until_ns.take().is_some_and(is_late) {
            self.rest_from(now);
        }
        let longest_ns = self.limit_ns * LONG_WAIT_LIMITS;
        let took_ns = match messages {
            0 => longest_ns,
            _ => now.saturating_sub(began_at_ns).min(longest_ns),
        };
        let before_ns = self.wait_ns.min(longest_ns);
        self.wait_ns = (before_ns * (NEWEST_SHARE - 1) + took_ns) / NEWEST_SHARE;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const US: u64 = 1000;

    /// Each step takes this long; messages are there from a moment on.
    struct FakeSteps {
        now_ns: u64,
        step_ns: u64,
        steps: u64,
    }

    impl Stepper for FakeSteps {
        fn now_ns(&mut self) -> u64 {
            self.now_ns
        }

        fn step(&mut self) {
            self.now_ns += self.step_ns;
            self.steps += 1;
        }
    }

    struct Scene {
        spin: Spin,
        steps: FakeSteps,
    }

    impl Scene {
        fn new(limit: Duration) -> Self {
            let steps = FakeSteps { now_ns: 1, step_ns: US, steps: 0 };
            let mut spin = Spin::new();
            spin.set_limit(limit);
            Scene { spin, steps }
        }

        /// A wait whose messages come after this time. Returns the steps of its look.
        fn wait(&mut self, messages: usize, after_ns: u64) -> u64 {
            let (before, began_at_ns) = (self.steps.steps, self.steps.now_ns);
            // The look cannot see the clock, so messages count steps.
            let mut looks_left = after_ns / US;
            let is_there = &mut || {
                looks_left = looks_left.saturating_sub(1);
                looks_left == 0 && messages > 0
            };
            self.spin.look_by(&mut self.steps, None, is_there, &mut || false);
            self.steps.now_ns = self.steps.now_ns.max(began_at_ns + after_ns);
            self.spin.received_at(self.steps.now_ns, messages);
            self.steps.steps - before
        }

        fn short_waits(&mut self, count: u64) -> u64 {
            (0..count).map(|_| self.wait(1, 10 * US)).sum()
        }
    }

    #[test]
    fn a_receiver_looks_after_short_waits_and_finds_what_comes() {
        let mut scene = Scene::new(SPIN_TIME_MAX);
        assert_eq!(scene.wait(1, 10 * US), 0, "it knows nothing yet");
        scene.short_waits(20);
        let steps = scene.wait(1, 10 * US);
        assert!((1..=10).contains(&steps), "{steps}");
    }

    #[test]
    fn an_idle_receiver_stops_after_one_look() {
        let mut scene = Scene::new(SPIN_TIME_MAX);
        scene.short_waits(20);
        assert_eq!(scene.wait(0, 5 * MS), 50, "no longer than the limit");
        assert_eq!((0..1000).map(|_| scene.wait(0, 5 * MS)).sum::<u64>(), 0);
    }

    #[test]
    fn a_receiver_whose_messages_come_at_long_intervals_never_looks() {
        let mut scene = Scene::new(SPIN_TIME_MAX);
        let steps: u64 = (0..1000).map(|_| scene.wait(1, 60 * US)).sum();
        assert_eq!(steps, 0);
        assert!(scene.short_waits(20) > 0, "shorter ones change that");
    }

    #[test]
    fn a_receiver_of_bursts_sleeps() {
        let mut scene = Scene::new(SPIN_TIME_MAX);
        scene.short_waits(20);
        let look_before = scene.wait(32, 10 * US);
        let steps: u64 = (0..100).map(|_| scene.wait(32, 10 * US)).sum();
        assert!(look_before > 0 && steps == 0);
    }

    #[test]
    fn who_finds_its_core_wanted_sleeps_longer_and_longer() {
        let mut scene = Scene::new(SPIN_TIME_MAX);
        scene.short_waits(20);
        scene.steps.step_ns = 3 * MS;
        let mut looks = 0;
        let began_at_ns = scene.steps.now_ns;
        while scene.steps.now_ns < began_at_ns + 4000 * MS {
            let steps = scene.wait(1, 10 * US);
            assert!(steps <= 1, "one step is enough to notice");
            looks += steps;
            // The mean stays short: only the core keeps it from looking.
            scene.spin.wait_ns = 10 * US;
            // What is there at once says nothing about the core.
            assert_eq!((0..2).map(|_| scene.wait(1, 0)).sum::<u64>(), 0);
            scene.spin.wait_ns = 10 * US;
        }
        assert!((6..=12).contains(&looks), "{looks} looks in four seconds");
        scene.steps.step_ns = US;
        scene.steps.now_ns += REST_NS_MAX;
        assert!(scene.short_waits(50) > 0, "a core that is free again is used again");
        scene.spin.rest_from(scene.steps.now_ns);
        assert_eq!(scene.spin.rest_ns, REST_NS_MIN, "and one turn of another costs little");
    }

    #[test]
    fn a_message_right_after_a_look_in_vain_means_that_its_sender_waited_for_the_core() {
        let mut scene = Scene::new(SPIN_TIME_MAX);
        scene.short_waits(20);
        assert_eq!(scene.wait(1, 70 * US), 50, "the sender ran when the look had ended");
        assert_eq!(scene.wait(1, 10 * US), 0, "so it sleeps");
        scene.steps.now_ns += REST_NS_MIN;
        assert!(scene.short_waits(50) > 0, "for a while");
    }

    #[test]
    fn only_so_many_threads_look_at_once() {
        let lookers = Lookers::new(2);
        let (first, second) = (lookers.enter(), lookers.enter());
        assert!(first.is_some() && second.is_some() && lookers.enter().is_none());
        drop((first, second));
        let lookers = Arc::new(lookers);
        let mut scene = Scene::new(SPIN_TIME_MAX);
        scene.spin = Spin::among(lookers.clone());
        assert!(scene.short_waits(20) > 0);
        let others = (lookers.enter(), lookers.enter());
        assert_eq!(scene.short_waits(20), 0);
        drop(others);
        assert!(scene.short_waits(20) > 0, "a look that ends makes room");
        assert!(lookers.enter().is_some() && Spin::among(Arc::new(Lookers::new(0))).limit_ns == 0);
    }

    #[test]
    fn a_limit_of_zero_turns_it_off_and_no_limit_is_too_long() {
        let mut off = Spin::new();
        off.set_limit(Duration::ZERO);
        for _ in 0..100 {
            assert!(!off.look(None, || false, || panic!("it looks")));
            off.received(1);
        }
        let mut endless = Scene::new(Duration::MAX);
        endless.short_waits(20);
        endless.wait(0, 5 * MS);
    }

    #[test]
    fn a_call_of_the_waker_and_a_due_timer_end_a_look() {
        let mut scene = Scene::new(SPIN_TIME_MAX);
        scene.short_waits(20);
        let wait = Some(Duration::from_micros(3));
        let (nothing, called) = (&mut || false, &mut || true);
        assert!(!scene.spin.look_by(&mut scene.steps, wait, nothing, called));
        let before = scene.steps.steps;
        assert!(!scene.spin.look_by(&mut scene.steps, wait, nothing, &mut || false));
        assert_eq!(scene.steps.steps - before, 3);
    }
}
