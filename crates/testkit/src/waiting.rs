//! Waiting for what another thread or process is about to do. A hang is a failure that says what
//! never came. Not here: time in the simulation, which passes by steps (`crates/sim`).

use std::time::{Duration, Instant};

/// How long a condition may take: far longer than it does on the slowest machine.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Asks again and again until `ask` has an answer.
///
/// # Panics
/// When it has none within [`PATIENCE`]: the text says `what` was waited for.
#[track_caller]
pub fn wait_for<T>(what: &str, mut ask: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(answer) = ask() {
            return answer;
        }
        assert!(Instant::now() < deadline, "waited {} s in vain: {what}", PATIENCE.as_secs());
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// As [`wait_for`], until `holds` is true.
#[track_caller]
pub fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    wait_for(what, || holds().then_some(()));
}
