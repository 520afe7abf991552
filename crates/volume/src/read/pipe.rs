//! What the way to the store holds: how long an answer takes and how many bytes arrive a second,
//! learned from the answers themselves. Their product is what must be in flight to fill the way.
//!
//! The shortest delay and the highest rate of the last while are taken. A rate can only be as high
//! as what was in flight allowed, so a multiple of the product is reported: while that still raises
//! the rate, more is asked for the next time; once the way is full, it grows no further. Four
//! times, because a get counts until its last byte is there, and gets made together end together:
//! with twice the product, a shared link stands still now and then.
//!
//! Invariant: time comes from the caller. Not here: what is fetched ahead (`ahead`), and how many
//! requests the store's client makes at once (`sawmill_store`).

use std::time::Duration;

use parking_lot::Mutex;

/// What is reported, of the product.
const MULTIPLE: u64 = 4;
/// A delay or a rate counts for this long at least, and for twice that at most.
const PERIOD: Duration = Duration::from_secs(10);

/// What was known when a get was made.
#[derive(Clone, Copy)]
pub(super) struct Departure {
    at: Duration,
    arrived_bytes: u64,
}

/// The shortest delay and the highest rate of one period.
#[derive(Clone, Copy, Default)]
struct Extremes {
    delay: Option<Duration>,
    bytes_per_s: u64,
}

#[derive(Default)]
struct PipeState {
    /// Of all gets so far.
    arrived_bytes: u64,
    period_began: Duration,
    now: Extremes,
    before: Extremes,
}

/// The way to the store, as this volume's gets find it.
#[derive(Default)]
pub(crate) struct Pipe {
    state: Mutex<PipeState>,
}

impl Pipe {
    /// A get is made.
    pub(super) fn departs(&self, at: Duration) -> Departure {
        Departure { at, arrived_bytes: self.state.lock().arrived_bytes }
    }

    /// It was answered with so many bytes.
    pub(super) fn arrives(&self, departure: Departure, bytes: u64, now: Duration) {
        let mut state = self.state.lock();
        state.arrived_bytes += bytes;
        if now.saturating_sub(state.period_began) >= PERIOD {
            let last = std::mem::take(&mut state.now);
            let was_long_ago = now.saturating_sub(state.period_began) >= 2 * PERIOD;
            state.before = if was_long_ago { Extremes::default() } else { last };
            state.period_began = now;
        }
        let took = now.saturating_sub(departure.at);
        // No time has passed on a clock that stands still.
        let Some(took_ns) = u64::try_from(took.as_nanos()).ok().filter(|took_ns| *took_ns > 0)
        else {
            return;
        };
        let arrived_bytes = u128::from(state.arrived_bytes - departure.arrived_bytes);
        let bytes_per_s = (arrived_bytes * 1_000_000_000 / u128::from(took_ns)) as u64;
        let extremes = &mut state.now;
        extremes.bytes_per_s = extremes.bytes_per_s.max(bytes_per_s);
        extremes.delay = Some(extremes.delay.map_or(took, |delay| delay.min(took)));
    }

    /// Bytes that fill the way for certain: [`MULTIPLE`] times what was in it; 0: nothing is known
    /// yet.
    pub(super) fn bytes(&self) -> u64 {
        let state = self.state.lock();
        let delays = [state.now.delay, state.before.delay];
        let Some(delay) = delays.into_iter().flatten().min() else { return 0 };
        let bytes_per_s = state.now.bytes_per_s.max(state.before.bytes_per_s);
        let product = u128::from(bytes_per_s) * delay.as_nanos() / 1_000_000_000;
        let bytes = u128::from(MULTIPLE) * product;
        u64::try_from(bytes).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn what_fills_the_way_is_learned_from_the_answers() {
        let pipe = Pipe::default();
        assert_eq!(pipe.bytes(), 0);
        // 1 MiB in flight at 20 ms.
        let departure = pipe.departs(Duration::ZERO);
        pipe.arrives(departure, 1 << 20, 20 * MS);
        assert!(pipe.bytes().abs_diff(MULTIPLE << 20) < 1000, "{}", pipe.bytes());
        // Eight at once: the rate is that of all that arrived while one was under way.
        let departures = [pipe.departs(40 * MS); 8];
        for departure in departures {
            pipe.arrives(departure, 1 << 20, 60 * MS);
        }
        assert!(pipe.bytes().abs_diff((8 * MULTIPLE) << 20) < 1000, "{}", pipe.bytes());
        // A full way: what waits in it takes longer, and neither raises the rate nor the delay.
        let departure = pipe.departs(60 * MS);
        pipe.arrives(departure, 8 << 20, 100 * MS);
        assert!(pipe.bytes().abs_diff((8 * MULTIPLE) << 20) < 1000, "{}", pipe.bytes());
    }

    #[test]
    fn a_way_that_became_slow_is_forgotten_after_two_periods() {
        let pipe = Pipe::default();
        let fast = pipe.departs(Duration::ZERO);
        pipe.arrives(fast, 100 << 20, 10 * MS);
        for period in 1..=2 {
            let at = PERIOD * period;
            let slow = pipe.departs(at);
            pipe.arrives(slow, 1 << 20, at + 20 * MS);
        }
        assert!(pipe.bytes() < (MULTIPLE + 1) << 20, "{}", pipe.bytes());
    }

    #[test]
    fn a_clock_that_stands_still_teaches_nothing() {
        let pipe = Pipe::default();
        let departure = pipe.departs(MS);
        pipe.arrives(departure, 1 << 20, MS);
        assert_eq!(pipe.bytes(), 0);
    }
}
