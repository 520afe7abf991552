//! Waits for an action of another thread or process. A hang is a failure whose text names the
//! missing condition. Not here: time in the simulation, which passes by steps (`crates/sim`).

use std::time::{Duration, Instant};

/// How long a condition may take, as [`wait_for`] says: far longer than on the slowest machine.
const WAIT_TIME_MAX: Duration = Duration::from_secs(60);

/// Calls `ask` repeatedly until it returns an answer.
///
/// # Panics
/// If it returns none for 60 s; the text names `what` was expected.
#[track_caller]
pub fn wait_for<T>(what: &str, mut ask: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + WAIT_TIME_MAX;
    loop {
        if let Some(answer) = ask() {
            return answer;
        }
        assert!(Instant::now() < deadline, "not after {} s: {what}", WAIT_TIME_MAX.as_secs());
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// As [`wait_for`], until `holds` is true.
#[track_caller]
pub fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    wait_for(what, || holds().then_some(()));
}
