//! How many requests one store gets at a time, and who goes first.
//!
//! Invariants: never more than `requests_max` permits are out; background holds at most half of
//! them; uploads and background together at most three quarters, so a read never waits for all of
//! them to end. Reads go before uploads, uploads before background, first come first served within
//! a class. One exception keeps a stream of reads from holding uploads up forever: while fewer
//! than an eighth of the permits (at least one) are out to uploads, waiting uploads go first. If
//! there is one permit only, the two take turns.
//!
//! How many bodies travel at once in one direction adapts to what the link carries. A stalled
//! transfer halves the number that were in flight, once for all that began before; each round of
//! transfers that arrived admits one more. At least one is always allowed.
//!
//! A caller that stops waiting leaves no place behind: in a class that gets no permit for long,
//! such places would add up to the bound, and then every call would be refused.
//!
//! Not here: rates. A store that wants fewer requests a second answers so; the client backs off.

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::oneshot;

use crate::{CallKind, Class, Result, StoreError, StoreErrorKind};

/// Most calls that may wait for their turn; more are refused, to bound memory.
pub(crate) const WAITING_MAX: usize = 1 << 16;

/// Hands out permits, each for one request. A store has one limiter for all its callers.
pub(crate) struct Limiter {
    requests_max: usize,
    state: Mutex<LimiterState>,
}

#[derive(Default)]
struct LimiterState {
    /// Permits out, by class.
    running: [usize; 3],
    /// Whether the last permit went to an upload.
    upload_was_last: bool,
    /// By class and direction. Bounded by [`WAITING_MAX`], all nine together.
    waiting: [[VecDeque<Waiter>; 3]; 3],
    /// Bodies that travel up and down.
    windows: [Window; 2],
    /// Numbers the waiting calls and the permits.
    next_number: u64,
}

struct Waiter {
    number: u64,
    give: oneshot::Sender<Permit>,
}

/// A caller's place among those that wait. Dropped, it is given up.
struct Place<'a> {
    limiter: &'a Limiter,
    class: Class,
    direction: Direction,
    number: u64,
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let mut state = self.limiter.state.lock();
        let waiting = &mut state.waiting[self.class as usize][self.direction as usize];
        // In order of arrival. Whoever had a turn is not there any more.
        if let Ok(at) = waiting.binary_search_by_key(&self.number, |waiter| waiter.number) {
            waiting.remove(at);
        }
    }
}

/// Which way a request's bytes go.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    Up,
    Down,
    /// Few bytes either way.
    Neither,
}

impl Direction {
    pub(crate) fn of(kind: CallKind) -> Self {
        match kind {
            CallKind::Put => Direction::Up,
            CallKind::Get => Direction::Down,
            CallKind::List | CallKind::Delete => Direction::Neither,
        }
    }
}

/// How many bodies may travel one way at once.
#[derive(Default)]
struct Window {
    /// How far the window lies below `requests_max`.
    withheld: usize,
    running: usize,
    /// Transfers that arrived while the window was full, since it last changed.
    arrived: usize,
    /// The number at the last halving. A transfer with a lower one stalled for the same reason.
    halved_at: u64,
}

/// The right to one request at a time; given back when dropped.
pub(crate) struct Permit {
    /// `None` once disarmed.
    limiter: Option<Arc<Limiter>>,
    class: Class,
    direction: Direction,
    /// Its place in the order in which permits were given.
    number: u64,
}

impl Limiter {
    /// A limiter for `requests_max` requests at a time; at least one is always allowed.
    pub(crate) fn new(requests_max: usize) -> Arc<Self> {
        Arc::new(Limiter { requests_max: requests_max.max(1), state: Mutex::default() })
    }

    /// Waits for a turn. Fails with `Unavailable` if [`WAITING_MAX`] calls wait already.
    pub(crate) async fn acquire(
        self: &Arc<Self>,
        class: Class,
        direction: Direction,
    ) -> Result<Permit> {
        // The lock must end before the wait below, so it lives in this block only.
        let (turn, _place) = {
            let mut state = self.state.lock();
            if state.waiting.iter().flatten().map(VecDeque::len).sum::<usize>() >= WAITING_MAX {
                let text = format!(
                    "{WAITING_MAX} calls wait for the store already; slow down or raise \
                    requests_max"
                );
                return Err(StoreError::new(StoreErrorKind::Unavailable, text));
            }
            let (give, turn) = oneshot::channel();
            let number = state.number();
            // Even a call that could run now joins the queue, so that it overtakes nobody who
            // waits.
            state.waiting[class as usize][direction as usize].push_back(Waiter { number, give });
            self.dispatch(&mut state);
            (turn, Place { limiter: self, class, direction, number })
        };
        turn.await.map_err(|_| StoreError::new(StoreErrorKind::Unavailable, "the store was closed"))
    }

    /// Whether one more call of `class` may run.
    fn has_room(&self, running: &[usize; 3], class: Class) -> bool {
        let [reads, uploads, background] = *running;
        // At least one each: a share that rounds down to nothing would lock its class out.
        let patient_max = (self.requests_max * 3 / 4).max(1);
        let background_max = (self.requests_max / 2).max(1);
        reads + uploads + background < self.requests_max
            && (class == Class::Read || uploads + background < patient_max)
            && (class != Class::Background || background < background_max)
    }

    /// Whether uploads have less than the share that they get before reads.
    fn owes_uploads(&self, state: &LimiterState) -> bool {
        let share = (self.requests_max / 8).max(1);
        // If that share is all there is, it would hold up reads in turn.
        let leaves_some = share < self.requests_max || !state.upload_was_last;
        leaves_some && state.running[Class::Upload as usize] < share
    }

    /// Gives free permits to waiting calls.
    fn dispatch(self: &Arc<Self>, state: &mut LimiterState) {
        // First, because a full journal makes writers wait (P13), and only uploads empty it.
        while self.owes_uploads(state) && self.serve(state, Class::Upload) {}
        for class in [Class::Read, Class::Upload, Class::Background] {
            while self.serve(state, class) {}
        }
    }

    /// The first call waiting in `class` whose direction has room.
    fn next_of(&self, state: &mut LimiterState, class: Class) -> Option<(Direction, Waiter)> {
        let first = |direction: Direction| {
            let window = state.windows.get(direction as usize);
            let has_room =
                window.is_none_or(|window| window.running < self.requests_max - window.withheld);
            state.waiting[class as usize][direction as usize]
                .front()
                .filter(|_| has_room)
                .map(|waiter| waiter.number)
        };
        // By age across directions: a window that is full upward must not hold up what goes down.
        let directions = [Direction::Up, Direction::Down, Direction::Neither];
        let direction = directions
            .into_iter()
            .filter(|direction| first(*direction).is_some())
            .min_by_key(|direction| first(*direction))?;
        state.waiting[class as usize][direction as usize]
            .pop_front()
            .map(|waiting| (direction, waiting))
    }

    /// Gives a permit to the first call waiting in `class`; `false` if there is none, or no room.
    fn serve(self: &Arc<Self>, state: &mut LimiterState, class: Class) -> bool {
        if !self.has_room(&state.running, class) {
            return false;
        }
        let Some((direction, waiting)) = self.next_of(state, class) else { return false };
        let number = state.number();
        match waiting.give.send(Permit {
            limiter: Some(Arc::clone(self)),
            class,
            direction,
            number,
        }) {
            Ok(()) => {
                state.running[class as usize] += 1;
                if let Some(window) = state.windows.get_mut(direction as usize) {
                    window.running += 1;
                }
                state.upload_was_last = class == Class::Upload;
            }
            // The caller is gone. Its permit must not return through `drop`, which would lock.
            Err(mut permit) => permit.limiter = None,
        }
        true
    }
}

impl LimiterState {
    fn number(&mut self) -> u64 {
        self.next_number += 1;
        self.next_number
    }
}

impl Permit {
    /// The request was answered: a window that was full may grow.
    pub(crate) fn carried(self) {
        if let Some(limiter) = &self.limiter
            && let Some(window) = limiter.state.lock().windows.get_mut(self.direction as usize)
            && window.withheld > 0
            // An arrival shows that the link carries this many only if this many were on their way.
            // This transfer is still one of them: its permit returns after this call.
            && window.running >= limiter.requests_max - window.withheld
        {
            window.arrived += 1;
            if window.arrived >= limiter.requests_max - window.withheld {
                window.arrived = 0;
                window.withheld -= 1;
            }
        }
    }

    /// Its transfer was cut, because nothing moved.
    pub(crate) fn stalled(self) {
        let Some(limiter) = &self.limiter else { return };
        let mut state = limiter.state.lock();
        // Permits that are given from now on have greater numbers: only their stalls are a new
        // event.
        let now = state.number();
        if let Some(window) = state.windows.get_mut(self.direction as usize)
            && self.number > window.halved_at
        {
            let half = (window.running / 2).max(1);
            // Fewer transfers than the window allows may have been in flight.
            window.withheld = window.withheld.max(limiter.requests_max.saturating_sub(half));
            window.arrived = 0;
            window.halved_at = now;
            tracing::debug!(
                at_once = half,
                "a transfer to the store stalled: lowering the number of calls at once"
            );
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        if let Some(limiter) = self.limiter.take() {
            let mut state = limiter.state.lock();
            state.running[self.class as usize] -= 1;
            if let Some(window) = state.windows.get_mut(self.direction as usize) {
                window.running -= 1;
            }
            // Under the same lock, so that no newcomer takes the permit before those that wait.
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

    fn request_turn(limiter: &Arc<Limiter>, class: Class) -> Turn {
        let limiter = Arc::clone(limiter);
        let mut turn = async move { limiter.acquire(class, Direction::Neither).await }.boxed();
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
        // One permit is free in turn; the others are out, the uploads' share among them.
        let limiter = Limiter::new(4);
        let held = [Class::Upload, Class::Read, Class::Read];
        let _held = held.map(|class| permit(&mut request_turn(&limiter, class)).unwrap());
        let first = permit(&mut request_turn(&limiter, Class::Read)).unwrap();
        let mut background = request_turn(&limiter, Class::Background);
        let mut upload_1 = request_turn(&limiter, Class::Upload);
        let mut upload_2 = request_turn(&limiter, Class::Upload);
        let mut read = request_turn(&limiter, Class::Read);
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
        let mut reads: Vec<Permit> =
            std::iter::from_fn(|| permit(&mut request_turn(&limiter, Class::Read))).collect();
        assert_eq!(reads.len(), 16);
        let mut more_reads: VecDeque<Turn> =
            (0..16).map(|_| request_turn(&limiter, Class::Read)).collect();
        let mut uploads = [(); 4].map(|()| request_turn(&limiter, Class::Upload));
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
        let mut running = permit(&mut request_turn(&limiter, Class::Read)).unwrap();
        let mut reads = [(); 3].map(|()| request_turn(&limiter, Class::Read));
        let mut uploads = [(); 3].map(|()| request_turn(&limiter, Class::Upload));
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
            let permits: Vec<Permit> =
                std::iter::from_fn(|| permit(&mut request_turn(&limiter, class))).collect();
            (permits.len(), permits)
        };
        let (background, _held_1) = take(Class::Background);
        let (uploads, _held_2) = take(Class::Upload);
        let (reads, _held_3) = take(Class::Read);
        assert_eq!((background, uploads, reads), (32, 16, 16));
    }

    #[test]
    fn uploads_alone_have_three_quarters() {
        let limiter = Limiter::new(8);
        let held: Vec<Permit> =
            std::iter::from_fn(|| permit(&mut request_turn(&limiter, Class::Upload))).collect();
        assert_eq!(held.len(), 6);
    }

    fn transfers(limiter: &Arc<Limiter>, direction: Direction) -> Vec<Permit> {
        let next = || {
            let limiter = Arc::clone(limiter);
            permit(&mut async move { limiter.acquire(Class::Upload, direction).await }.boxed())
        };
        std::iter::from_fn(next).collect()
    }

    #[test]
    fn a_stall_halves_what_travels_at_once_and_rounds_that_arrive_let_more_go() {
        let limiter = Limiter::new(16);
        let mut running = transfers(&limiter, Direction::Up);
        assert_eq!(running.len(), 12);
        // All of them began before the link was known to be slow, so they count as one stall.
        running.drain(..).for_each(Permit::stalled);
        let mut running = transfers(&limiter, Direction::Up);
        assert_eq!(running.len(), 6);
        assert_eq!(transfers(&limiter, Direction::Down).len(), 6, "the other way is another link");
        running.pop().unwrap().stalled();
        running.drain(..).for_each(drop);
        assert_eq!(transfers(&limiter, Direction::Up).len(), 3);
        for more in [4, 5, 6] {
            // The window is full at each arrival.
            for _ in 0..more - 1 {
                let mut running = transfers(&limiter, Direction::Up);
                running.pop().unwrap().carried();
            }
            assert_eq!(transfers(&limiter, Direction::Up).len(), more);
        }
        for _ in 0..10 {
            transfers(&limiter, Direction::Up).pop().unwrap().stalled();
        }
        assert_eq!(transfers(&limiter, Direction::Up).len(), 1, "one is always allowed");
    }

    #[test]
    fn callers_that_left_cost_no_permit() {
        let limiter = Limiter::new(1);
        let first = permit(&mut request_turn(&limiter, Class::Read)).unwrap();
        let left_waiting = request_turn(&limiter, Class::Upload);
        let left_with_a_turn = request_turn(&limiter, Class::Read);
        let mut last = request_turn(&limiter, Class::Background);
        drop(left_waiting);
        drop(first);
        drop(left_with_a_turn);
        assert!(permit(&mut last).is_some());
    }

    #[test]
    fn callers_that_left_take_no_place_in_the_queue() {
        let limiter = Limiter::new(1);
        let _first = permit(&mut request_turn(&limiter, Class::Read)).unwrap();
        for _ in 0..=WAITING_MAX {
            drop(request_turn(&limiter, Class::Background));
        }
        let mut last = request_turn(&limiter, Class::Read);
        assert!(poll(&mut last).is_pending(), "not refused");
    }

    #[test]
    fn the_queue_is_bounded() {
        let limiter = Limiter::new(1);
        let _first = permit(&mut request_turn(&limiter, Class::Read)).unwrap();
        let _waiting: Vec<Turn> =
            (0..WAITING_MAX).map(|_| request_turn(&limiter, Class::Read)).collect();
        let refused = poll(&mut request_turn(&limiter, Class::Read));
        assert!(matches!(
            refused,
            Poll::Ready(Err(error)) if error.kind() == StoreErrorKind::Unavailable
        ));
    }
}
