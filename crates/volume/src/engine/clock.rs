//! How long the volume has been attached, and what the wall clock does in the meantime.
//!
//! Retention counts attached time: it advances with the monotonic clock, continues in the next
//! attachment from the value in the newest checkpoint, and stands still while the volume is not
//! attached. So a moment may be kept for longer than configured, but never for less.
//!
//! Invariant: the wall clock decides nothing here. A jump is logged once, and has no other effect.
//!
//! Not here: which moments are old enough to be dropped (`cuts::book`).

use std::time::Duration;

use sawmill_format::checkpoint::Checkpoint;

use super::context::Context;

/// A difference between wall clock and monotonic clock above this counts as a jump.
const JUMP_MS: u64 = 60_000;
/// A volume without writes for this long is mentioned at the next attach: perhaps the clock is
/// wrong.
const GAP_MS: u64 = 30 * 24 * 3600 * 1000;

/// How long the volume has been attached in all its life, and whether the wall clock jumps.
pub(super) struct AttachedClock {
    /// The start of this attachment, and the total time of the ones before it.
    since: Duration,
    before_ms: u64,
    /// Both clocks at the last check.
    looked: Duration,
    wall_unix_ms: u64,
}

impl AttachedClock {
    /// Continues from `loaded`.
    pub(super) fn behind(loaded: &Checkpoint, now: Duration, wall_unix_ms: u64) -> Self {
        AttachedClock { since: now, before_ms: loaded.attached_ms, looked: now, wall_unix_ms }
    }

    /// How long the volume has been attached in its whole life.
    pub(super) fn attached_ms(&self, now: Duration) -> u64 {
        self.before_ms.saturating_add(millis(now.saturating_sub(self.since)))
    }

    /// Warns of a wall clock that does not fit the volume's log.
    pub(super) fn compare_with_log(context: &Context, newest_root: &Checkpoint) {
        let view = context.stored.view();
        let segments = view.segments.snapshot();
        let newest = segments.iter().map(|(_, info)| info.wall_unix_ms).max().unwrap_or_default();
        let newest = newest.max(newest_root.wall_unix_ms);
        if let Some(odd) = odd_at_attach(newest, context.attachment.world.unix_ms()) {
            tracing::warn!(
                "volume {}: {odd}; no retained state is dropped for that: retention counts the \
                 time attached. If the clock is wrong, set it, and find moments of this attachment \
                 by position (`sawmill log`)",
                context.attachment.name
            );
        }
    }

    /// Warns of a jump of the wall clock.
    pub(super) fn step(&mut self, context: &Context, now: Duration) {
        if let Some(ms) = self.jumped_ms(now, context.attachment.world.unix_ms()) {
            tracing::warn!(
                "volume {}: this machine's wall clock jumped by {} s; no retained state is dropped \
                 for that: retention counts the time attached",
                context.attachment.name,
                ms / 1000
            );
        }
    }

    /// Milliseconds by which the wall clock has jumped since the last check.
    fn jumped_ms(&mut self, now: Duration, wall_unix_ms: u64) -> Option<i64> {
        let passed = millis(now.saturating_sub(std::mem::replace(&mut self.looked, now)));
        let expected = self.wall_unix_ms.saturating_add(passed);
        self.wall_unix_ms = wall_unix_ms;
        (wall_unix_ms.abs_diff(expected) > JUMP_MS).then(|| {
            i64::try_from(i128::from(wall_unix_ms) - i128::from(expected)).unwrap_or(i64::MAX)
        })
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// Why the wall clock at an attach looks wrong, if it does.
fn odd_at_attach(newest_unix_ms: u64, wall_unix_ms: u64) -> Option<String> {
    let text = if wall_unix_ms.saturating_add(JUMP_MS) < newest_unix_ms {
        let behind_s = (newest_unix_ms - wall_unix_ms) / 1000;
        format!("this machine's clock is {behind_s} s behind the newest time in the volume's log")
    } else if newest_unix_ms > 0 && wall_unix_ms > newest_unix_ms.saturating_add(GAP_MS) {
        let days = (wall_unix_ms - newest_unix_ms) / (24 * 3600 * 1000);
        format!("the newest time in the volume's log is {days} days ago by this machine's clock")
    } else {
        return None;
    };
    Some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_jump_is_reported_once_and_changes_no_age() {
        let second = Duration::from_secs(1);
        let mut clock = AttachedClock {
            since: second,
            before_ms: 500,
            looked: second,
            wall_unix_ms: 1_000_000,
        };
        assert_eq!(clock.jumped_ms(3 * second, 1_002_100), None);
        assert_eq!(clock.jumped_ms(4 * second, 5_002_100), Some(3_999_000));
        assert_eq!(clock.jumped_ms(5 * second, 5_003_100), None, "it was told");
        assert_eq!(clock.jumped_ms(6 * second, 1_004_100), Some(-4_000_000));
        assert_eq!(clock.attached_ms(6 * second), 5_500);
    }

    #[test]
    fn a_clock_that_does_not_fit_the_log_is_reported_at_attach() {
        let day = 24 * 3600 * 1000;
        assert_eq!(odd_at_attach(50 * day, 50 * day - JUMP_MS), None);
        assert!(odd_at_attach(50 * day, 10 * day).is_some_and(|text| text.contains("behind")));
        assert!(odd_at_attach(50 * day, 90 * day).is_some_and(|text| text.contains("40 days ago")));
        assert_eq!(odd_at_attach(0, 90 * day), None, "nothing was written yet");
    }
}
