//! How many requests one store gets at a time, and who goes first.
//!
//! Invariants: never more than `requests_max` permits are out; background holds at most half of them; uploads
//! and background together at most three quarters, so a read never waits for all of them to end. Reads go
//! before uploads, uploads before background, first come first served within a class. One exception keeps
//! a stream of reads from holding uploads up for ever: while fewer than an eighth of the permits (at least
//! one) are out to uploads, waiting uploads go first. If there is one permit only, the two take turns.
//!
//! Not here: rates. A store that wants fewer requests per second says so, and the client backs off.

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::oneshot;

use crate::{Class, Result, StoreError, StoreErrorKind};

/// Most calls that may wait for their turn; more are refused, for memory's sake.
const WAITING_MAX: usize = 1 << 16;

/// Hands out permits.
pub(crate) struct Limiter {
    requests_max: usize,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Permits out, by class.
    running: [usize; 3],
    /// Whether the last permit went to an upload.
    upload_was_last: bool,
    waiting: [VecDeque<oneshot::Sender<Permit>>; 3],
}

/// The right to one request at a time; given back when dropped.
pub(crate) struct Permit {
    /// `None` once disarmed.
    limiter: Option<Arc<Limiter>>,
    class: Class,
}

impl Limiter {
    /// A limiter for `requests_max` requests at a time; at least one is always allowed.
    pub(crate) fn new(requests_max: usize) -> Arc<Self> {
        Arc::new(Limiter { requests_max: requests_max.max(1), state: Mutex::default() })
    }

    /// Waits for a turn.
    pub(crate) async fn acquire(self: &Arc<Self>, class: Class) -> Result<Permit> {
        let turn = {
            let mut state = self.state.lock();
            if state.waiting.iter().map(VecDeque::len).sum::<usize>() >= WAITING_MAX {
                let text = format!(
                    "{WAITING_MAX} calls wait for the store already; slow down or raise requests_max"
                );
                return Err(StoreError::new(StoreErrorKind::Unavailable, text));
            }
            let (give, turn) = oneshot::channel();
            state.waiting[class as usize].push_back(give);
            self.dispatch(&mut state);
            turn
        };
        turn.await.map_err(|_| StoreError::new(StoreErrorKind::Unavailable, "the store was closed"))
    }

    /// Whether one more call of `class` may run.
    fn has_room(&self, running: &[usize; 3], class: Class) -> bool {
        let [reads, uploads, background] = *running;
        let patient_max = (self.requests_max * 3 / 4).max(1);
        let background_max = (self.requests_max / 2).max(1);
        reads + uploads + background < self.requests_max
            && (class == Class::Read || uploads + background < patient_max)
            && (class != Class::Background || background < background_max)
    }

    /// Whether uploads have less than the share that goes to them before reads.
    fn owes_uploads(&self, state: &State) -> bool {
        let share = (self.requests_max / 8).max(1);
        // Where the share is all there is, it would hold up reads in turn.
        let leaves_some = share < self.requests_max || !state.upload_was_last;
        leaves_some && state.running[Class::Upload as usize] < share
    }

    /// Gives free permits to those who wait.
    fn dispatch(self: &Arc<Self>, state: &mut State) {
        while self.owes_uploads(state) && self.serve(state, Class::Upload) {}
        for class in [Class::Read, Class::Upload, Class::Background] {
            while self.serve(state, class) {}
        }
    }

    /// Gives a permit to the first who waits in `class`; `false` if there is no room, or nobody.
    fn serve(self: &Arc<Self>, state: &mut State, class: Class) -> bool {
        if !self.has_room(&state.running, class) {
            return false;
        }
        let Some(give) = state.waiting[class as usize].pop_front() else { return false };
        match give.send(Permit { limiter: Some(Arc::clone(self)), class }) {
            Ok(()) => {
                state.running[class as usize] += 1;
                state.upload_was_last = class == Class::Upload;
            }
            // The caller is gone. Its permit must not come back through `drop`: that would lock.
            Err(mut permit) => permit.limiter = None,
        }
        true
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        if let Some(limiter) = self.limiter.take() {
            let mut state = limiter.state.lock();
            state.running[self.class as usize] -= 1;
            limiter.dispatch(&mut state);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    use futures_util::FutureExt;
    use futures_util::future::BoxFuture;

    use super::*;

    type Turn = BoxFuture<'static, Result<Permit>>;

    fn ask(limiter: &Arc<Limiter>, class: Class) -> Turn {
        let limiter = Arc::clone(limiter);
        let mut turn = async move { limiter.acquire(class).await }.boxed();
        match poll(&mut turn) {
            Poll::Ready(outcome) => std::future::ready(outcome).boxed(),
            Poll::Pending => turn,
        }
    }

    fn poll(turn: &mut Turn) -> Poll<Result<Permit>> {
        pin!(turn).poll(&mut Context::from_waker(Waker::noop()))
    }

    fn permit(turn: &mut Turn) -> Option<Permit> {
        match poll(turn) {
            Poll::Ready(outcome) => Some(outcome.unwrap()),
            Poll::Pending => None,
        }
    }

    #[test]
    fn reads_go_before_uploads_and_uploads_before_background_in_order_of_arrival() {
        // One permit goes round; the others are out, the uploads' share among them.
        let limiter = Limiter::new(4);
        let held = [Class::Upload, Class::Read, Class::Read];
        let _held = held.map(|class| permit(&mut ask(&limiter, class)).unwrap());
        let first = permit(&mut ask(&limiter, Class::Read)).unwrap();
        let mut background = ask(&limiter, Class::Background);
        let mut upload_1 = ask(&limiter, Class::Upload);
        let mut upload_2 = ask(&limiter, Class::Upload);
        let mut read = ask(&limiter, Class::Read);
        drop(first);
        assert!(permit(&mut upload_1).is_none() && permit(&mut background).is_none());
        drop(permit(&mut read).unwrap());
        assert!(permit(&mut upload_2).is_none());
        drop(permit(&mut upload_1).unwrap());
        assert!(permit(&mut background).is_none());
        drop(permit(&mut upload_2).unwrap());
        assert!(permit(&mut background).is_some());
    }

    #[test]
    fn reads_without_end_leave_uploads_an_eighth_of_the_permits() {
        let limiter = Limiter::new(16);
        let mut reads: Vec<Permit> = std::iter::from_fn(|| permit(&mut ask(&limiter, Class::Read))).collect();
        assert_eq!(reads.len(), 16);
        let mut more_reads: VecDeque<Turn> = (0..16).map(|_| ask(&limiter, Class::Read)).collect();
        let mut uploads = [(); 4].map(|()| ask(&limiter, Class::Upload));
        let mut next_read = || more_reads.pop_front().and_then(|mut turn| permit(&mut turn));

        reads.truncate(14);
        let share = [permit(&mut uploads[0]), permit(&mut uploads[1])].map(Option::unwrap);
        reads.truncate(13);
        assert!(permit(&mut uploads[2]).is_none());
        let _read = next_read().unwrap();

        let [ended, _runs] = share;
        drop(ended);
        assert!(permit(&mut uploads[3]).is_none());
        assert!(permit(&mut uploads[2]).is_some());
    }

    #[test]
    fn reads_and_uploads_take_turns_at_a_single_permit() {
        let limiter = Limiter::new(1);
        let mut running = permit(&mut ask(&limiter, Class::Read)).unwrap();
        let mut reads = [(); 3].map(|()| ask(&limiter, Class::Read));
        let mut uploads = [(); 3].map(|()| ask(&limiter, Class::Upload));
        for (upload, read) in uploads.iter_mut().zip(&mut reads) {
            drop(running);
            let upload = permit(upload).unwrap();
            assert!(permit(read).is_none());
            drop(upload);
            running = permit(read).unwrap();
        }
    }

    #[test]
    fn background_has_half_and_with_uploads_three_quarters_and_reads_the_rest() {
        let limiter = Limiter::new(64);
        let take = |class| {
            let taken: Vec<Permit> = std::iter::from_fn(|| permit(&mut ask(&limiter, class))).collect();
            (taken.len(), taken)
        };
        let (background, _held_1) = take(Class::Background);
        let (uploads, _held_2) = take(Class::Upload);
        let (reads, _held_3) = take(Class::Read);
        assert_eq!((background, uploads, reads), (32, 16, 16));
    }

    #[test]
    fn uploads_alone_have_three_quarters() {
        let limiter = Limiter::new(8);
        let held: Vec<Permit> = std::iter::from_fn(|| permit(&mut ask(&limiter, Class::Upload))).collect();
        assert_eq!(held.len(), 6);
    }

    #[test]
    fn callers_that_left_cost_no_permit() {
        let limiter = Limiter::new(1);
        let first = permit(&mut ask(&limiter, Class::Read)).unwrap();
        let left_waiting = ask(&limiter, Class::Upload);
        let left_with_a_turn = ask(&limiter, Class::Read);
        let mut last = ask(&limiter, Class::Background);
        drop(left_waiting);
        drop(first);
        drop(left_with_a_turn);
        assert!(permit(&mut last).is_some());
    }

    #[test]
    fn the_queue_is_bounded() {
        let limiter = Limiter::new(1);
        let _first = permit(&mut ask(&limiter, Class::Read)).unwrap();
        let _waiting: Vec<Turn> = (0..WAITING_MAX).map(|_| ask(&limiter, Class::Read)).collect();
        let refused = poll(&mut ask(&limiter, Class::Read));
        assert!(matches!(refused, Poll::Ready(Err(error)) if error.kind() == StoreErrorKind::Unavailable));
    }
}
