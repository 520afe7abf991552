//! That a device must end, and why, if at once. For a driver that is its own host.
//!
//! Invariant: a reason is never lost, also if an end in order was requested before.
//!
//! Not here: the end itself (`own_host`).

use parking_lot::{Condvar, Mutex};

/// What was requested so far.
#[derive(Default)]
pub(super) struct EndRequest {
    state: Mutex<EndState>,
    changed: Condvar,
}

#[derive(Default)]
struct EndState {
    is_asked: bool,
    why: Option<String>,
    is_over: bool,
}

/// What a wait ended with.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Ending {
    /// The device must end in order.
    InOrder,
    /// It must end at once, for this reason.
    AtOnce(String),
    /// It has ended.
    Over,
}

impl EndRequest {
    /// Requests the end: in order, or at once for a reason. The first reason counts.
    pub(super) fn ask(&self, why: Option<String>) {
        let mut state = self.state.lock();
        state.is_asked = true;
        state.why = state.why.take().or(why);
        self.changed.notify_all();
    }

    /// The end in order is done.
    pub(super) fn finished(&self) {
        self.state.lock().is_over = true;
        self.changed.notify_all();
    }

    /// Waits for a request.
    pub(super) fn wait(&self) -> Ending {
        self.wait_for(|state| state.is_asked.then_some(Ending::InOrder))
    }

    /// While the device ends in order, waits until that is done, or must not take longer.
    pub(super) fn wait_until_over(&self) -> Ending {
        self.wait_for(|state| state.is_over.then_some(Ending::Over))
    }

    fn wait_for(&self, done: impl Fn(&EndState) -> Option<Ending>) -> Ending {
        let mut state = self.state.lock();
        loop {
            if let Some(why) = &state.why {
                return Ending::AtOnce(why.clone());
            }
            if let Some(ending) = done(&state) {
                return ending;
            }
            self.changed.wait(&mut state);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_counts_also_after_a_request_without_one() {
        let request = EndRequest::default();
        request.ask(None);
        assert_eq!(request.wait(), Ending::InOrder);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| request.wait_until_over());
            request.ask(Some("it hangs".to_owned()));
            request.ask(Some("another reason".to_owned()));
            assert_eq!(waiting.join().unwrap(), Ending::AtOnce("it hangs".to_owned()));
        });
    }

    #[test]
    fn an_end_in_order_is_over_when_it_is_said() {
        let request = EndRequest::default();
        request.ask(None);
        request.finished();
        assert_eq!(request.wait_until_over(), Ending::Over);
    }
}
