//! That a device must end, and why, if at once; or that another driver is to serve it. For a driver
//! that is its own host.
//!
//! Invariants: a reason is never lost, also if an end in order was requested before. A next driver
//! that comes when nobody looks any more sees the end of its stream.
//!
//! Not here: the end itself, and the hand-over (`own_host`).

use std::os::unix::net::UnixStream;
use std::sync::Arc;

use parking_lot::{Condvar, Mutex};

/// The stream to a driver that is to serve next.
pub(super) type NextStream = Arc<UnixStream>;

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
    next: Option<NextStream>,
    /// No driver can follow any more.
    is_closed: bool,
}

/// What a wait ended with.
#[derive(Debug)]
pub(super) enum Ending {
    /// The device must end in order.
    InOrder,
    /// It must end at once, for this reason.
    AtOnce(String),
    /// It has ended.
    Over,
    /// This driver is to serve it.
    HandOver(NextStream),
}

impl EndRequest {
    /// Requests the end: in order, or at once for a reason. The first reason counts.
    pub(super) fn ask(&self, why: Option<String>) {
        let mut state = self.state.lock();
        state.is_asked = true;
        state.why = state.why.take().or(why);
        self.changed.notify_all();
    }

    /// Whether the device must end.
    pub(super) fn is_asked(&self) -> bool {
        self.state.lock().is_asked
    }

    /// Why it must end at once, if so.
    pub(super) fn why(&self) -> Option<String> {
        self.state.lock().why.clone()
    }

    /// Another driver is to serve the device. Of two, the later one.
    pub(super) fn ask_hand_over(&self, next: NextStream) {
        let mut state = self.state.lock();
        if !state.is_closed {
            state.next = Some(next);
            self.changed.notify_all();
        }
    }

    /// No driver can follow any more. Returns one that waits for that.
    pub(super) fn close(&self) -> Option<NextStream> {
        let mut state = self.state.lock();
        state.is_closed = true;
        state.next.take()
    }

    /// The end in order is done.
    pub(super) fn finished(&self) {
        self.state.lock().is_over = true;
        self.changed.notify_all();
    }

    /// Waits for a request.
    pub(super) fn wait(&self) -> Ending {
        self.wait_for(|state| match state.is_asked {
            true => Some(Ending::InOrder),
            false => state.next.take().map(Ending::HandOver),
        })
    }

    /// While the device ends in order, waits until that is done, or must not take longer.
    pub(super) fn wait_until_over(&self) -> Ending {
        self.wait_for(|state| state.is_over.then_some(Ending::Over))
    }

    fn wait_for(&self, done: impl Fn(&mut EndState) -> Option<Ending>) -> Ending {
        let mut state = self.state.lock();
        loop {
            if let Some(why) = &state.why {
                return Ending::AtOnce(why.clone());
            }
            if let Some(ending) = done(&mut state) {
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
        assert!(matches!(request.wait(), Ending::InOrder));
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| request.wait_until_over());
            request.ask(Some("it hangs".to_owned()));
            request.ask(Some("another reason".to_owned()));
            let ending = waiting.join().unwrap();
            assert!(matches!(&ending, Ending::AtOnce(why) if why == "it hangs"), "{ending:?}");
        });
    }

    #[test]
    fn an_end_in_order_is_over_when_it_is_said() {
        let request = EndRequest::default();
        request.ask(None);
        request.finished();
        assert!(matches!(request.wait_until_over(), Ending::Over));
    }

    #[test]
    fn a_next_driver_comes_once_and_after_an_end_and_never_waits_in_vain() {
        use std::io::Read as _;
        let next = || {
            let (ours, theirs) = UnixStream::pair().unwrap();
            (ours, Arc::new(theirs))
        };
        let request = EndRequest::default();
        let (first, first_next) = next();
        request.ask_hand_over(first_next);
        assert!(matches!(request.wait(), Ending::HandOver(_)));
        let (second, second_next) = next();
        request.ask_hand_over(second_next);
        request.ask(None);
        assert!(matches!(request.wait(), Ending::InOrder));
        assert!(request.close().is_some(), "the second");
        let (third, third_next) = next();
        request.ask_hand_over(third_next);
        assert!(request.close().is_none());
        for mut stream in [first, second, third] {
            assert_eq!(stream.read(&mut [0]).unwrap(), 0, "its end");
        }
    }
}
