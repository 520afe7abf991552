//! A store that wraps another and fails on request, for tests of code that must survive it.
//!
//! Invariant: it keeps S1. A held call is answered when it is released or when the wrapper is
//! dropped, and every other clause is broken only where the script demands it.
//!
//! Not here: failures below the client, which it retries (`client::erratic`), and the clauses as
//! tests (`conformance`).

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use parking_lot::Mutex;

use crate::{
    CallKind, Class, Completion, Get, List, ObjectInfo, ObjectStore, Put, PutOutcome, Result,
    StoreError, StoreErrorKind,
};

/// A call as the script sees it and as the log keeps it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    /// How many calls came before it, of all kinds.
    pub number: u64,
    /// Which method.
    pub kind: CallKind,
    /// Its key, its prefix (list) or its keys (delete).
    pub keys: Vec<String>,
    /// The range of a get.
    pub range: Option<Range<u64>>,
    /// Bytes of a put's body, else 0.
    pub size_bytes: u64,
    /// Who waits.
    pub class: Class,
}

impl Call {
    /// The key, the prefix, or the first of the keys; empty for a delete of nothing.
    #[must_use]
    pub fn key(&self) -> &str {
        self.keys.first().map_or("", String::as_str)
    }
}

/// What happens to a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// No fault: the call goes through.
    None,
    /// It does not reach the store and fails with this kind.
    Fail(StoreErrorKind),
    /// It takes effect, but the caller gets `Unavailable`.
    LoseAnswer,
    /// It waits for [`FaultStore::release`], then goes through; the caller waits too.
    Delay,
    /// The caller gets `Unavailable` at once, yet the call takes effect at [`FaultStore::release`]:
    /// the late put of S8.
    Late,
    /// A get answers the first half of its bytes as if that were all; a put stores its first half.
    Truncate,
    /// A get or a put goes to this key instead.
    Swap(String),
}

/// Decides what happens to each call.
pub type FaultPolicy = Box<dyn FnMut(&Call) -> Fault + Send>;

/// Starts a held call, or drops it.
type HeldCall = Box<dyn FnOnce(&dyn ObjectStore) + Send>;

/// A store that fails as its script decides, and remembers every call.
pub struct FaultStore {
    inner: Arc<dyn ObjectStore>,
    policy: Mutex<FaultPolicy>,
    calls: Mutex<Vec<Call>>,
    held: Mutex<VecDeque<(Call, HeldCall)>>,
    /// How many scripts there were.
    scripts: AtomicU64,
}

impl FaultStore {
    /// Wraps `inner`. The script must not call the store.
    pub fn new(inner: Arc<dyn ObjectStore>, fault_policy: FaultPolicy) -> Arc<Self> {
        Arc::new(FaultStore {
            inner,
            policy: Mutex::new(fault_policy),
            calls: Mutex::default(),
            held: Mutex::default(),
            scripts: AtomicU64::new(0),
        })
    }

    /// Wraps `inner` to watch it: no faults.
    pub fn watching(inner: Arc<dyn ObjectStore>) -> Arc<Self> {
        FaultStore::new(inner, Box::new(|_| Fault::None))
    }

    /// Follows another script from now on. Held calls stay held.
    pub fn script(&self, policy: FaultPolicy) {
        let mut current = self.policy.lock();
        *current = policy;
        self.scripts.fetch_add(1, Ordering::SeqCst);
    }

    /// All calls so far, in order.
    #[must_use]
    pub fn calls(&self) -> Vec<Call> {
        self.calls.lock().clone()
    }

    /// The calls that are held, oldest first.
    #[must_use]
    pub fn held(&self) -> Vec<Call> {
        self.held.lock().iter().map(|(call, _)| call.clone()).collect()
    }

    /// Lets the held calls through that `chosen` picks, oldest first; returns how many there were.
    pub fn release(&self, mut chosen: impl FnMut(&Call) -> bool) -> usize {
        let (free, kept): (VecDeque<_>, VecDeque<_>) =
            std::mem::take(&mut *self.held.lock()).into_iter().partition(|(call, _)| chosen(call));
        {
            // Calls held meanwhile are newer, so they go last.
            let mut held = self.held.lock();
            let newer = std::mem::replace(&mut *held, kept);
            held.extend(newer);
        }
        let count = free.len();
        for (_, start) in free {
            start(&*self.inner);
        }
        count
    }

    /// Lets all held calls go through.
    pub fn release_all(&self) -> usize {
        self.release(|_| true)
    }

    /// Logs a call and asks the script.
    fn judge(&self, mut call: Call) -> (Call, Fault, u64) {
        {
            let mut calls = self.calls.lock();
            call.number = calls.len() as u64;
            calls.push(call.clone());
        }
        // The script and its number are read under one lock: `hold` tells by the number whether the
        // script was replaced since.
        let mut decide = self.policy.lock();
        let fault = decide(&call);
        (call, fault, self.scripts.load(Ordering::SeqCst))
    }

    /// Holds a call, as the script of number `script` decided. If that script has been replaced
    /// meanwhile, the held calls may have been released already: then the call goes through.
    fn hold(&self, call: Call, start: HeldCall, script: u64) {
        let number = call.number;
        // First held, then compared: a release that comes in between finds the call.
        self.held.lock().push_back((call, start));
        if self.scripts.load(Ordering::SeqCst) != script {
            self.release(|held| held.number == number);
        }
    }

    /// Applies the faults that are the same for all kinds of calls.
    fn carry_out<T: Send + 'static>(
        &self,
        call: Call,
        fault: &Fault,
        script: u64,
        done: Completion<T>,
        start: impl FnOnce(&dyn ObjectStore, Completion<T>) + Send + 'static,
    ) {
        match fault {
            Fault::None | Fault::Truncate | Fault::Swap(_) => start(&*self.inner, done),
            Fault::Fail(kind) => done(Err(planned(*kind, &call))),
            Fault::LoseAnswer => {
                let lost = planned(StoreErrorKind::Unavailable, &call);
                start(&*self.inner, Box::new(move |_| done(Err(lost))));
            }
            Fault::Delay => {
                let answer = HeldAnswer(Some(done));
                let held = Box::new(move |inner: &dyn ObjectStore| {
                    start(inner, Box::new(move |outcome| answer.complete(outcome)));
                });
                self.hold(call, held, script);
            }
            Fault::Late => {
                let lost = planned(StoreErrorKind::Unavailable, &call);
                let held = Box::new(move |inner: &dyn ObjectStore| start(inner, Box::new(drop)));
                // Held before the caller hears of it, because a test may release it at once.
                self.hold(call, held, script);
                done(Err(lost));
            }
        }
    }
}

/// The closure of a held call; answers when dropped.
struct HeldAnswer<T>(Option<Completion<T>>);

impl<T> HeldAnswer<T> {
    fn complete(mut self, outcome: Result<T>) {
        if let Some(done) = self.0.take() {
            done(outcome);
        }
    }
}

impl<T> Drop for HeldAnswer<T> {
    fn drop(&mut self) {
        if let Some(done) = self.0.take() {
            done(Err(StoreError::new(
                StoreErrorKind::Unavailable,
                "the fault store went with a held call",
            )));
        }
    }
}

fn planned(kind: StoreErrorKind, call: &Call) -> StoreError {
    StoreError::new(kind, format!("planned fault: {:?} of {} is {kind:?}", call.kind, call.key()))
}

impl ObjectStore for FaultStore {
    fn get(&self, mut get: Get, done: Completion<Bytes>) {
        let Get { key, range, class, .. } = get.clone();
        let call =
            Call { number: 0, kind: CallKind::Get, keys: vec![key], range, size_bytes: 0, class };
        let (call, fault, script) = self.judge(call);
        if let Fault::Swap(other) = &fault {
            get.key.clone_from(other);
        }
        let done: Completion<Bytes> = match fault {
            Fault::Truncate => Box::new(move |outcome| done(outcome.map(|body| first_half(&body)))),
            _ => done,
        };
        self.carry_out(call, &fault, script, done, move |inner, done| inner.get(get, done));
    }

    fn put(&self, mut put: Put, done: Completion<PutOutcome>) {
        let size_bytes = put.body.len() as u64;
        let (keys, class) = (vec![put.key.clone()], put.class);
        let call = Call { number: 0, kind: CallKind::Put, keys, range: None, size_bytes, class };
        let (call, fault, script) = self.judge(call);
        match &fault {
            Fault::Swap(other) => put.key.clone_from(other),
            Fault::Truncate => put.body = first_half(&put.body),
            _ => {}
        }
        self.carry_out(call, &fault, script, done, move |inner, done| inner.put(put, done));
    }

    fn list(&self, list: List, done: Completion<Vec<ObjectInfo>>) {
        let (keys, class) = (vec![list.prefix.clone()], list.class);
        let call =
            Call { number: 0, kind: CallKind::List, keys, range: None, size_bytes: 0, class };
        let (call, fault, script) = self.judge(call);
        self.carry_out(call, &fault, script, done, move |inner, done| inner.list(list, done));
    }

    fn delete(&self, keys: Vec<String>, class: Class, done: Completion<()>) {
        let call = Call {
            number: 0,
            kind: CallKind::Delete,
            keys: keys.clone(),
            range: None,
            size_bytes: 0,
            class,
        };
        let (call, fault, script) = self.judge(call);
        self.carry_out(call, &fault, script, done, move |inner, done| {
            inner.delete(keys, class, done)
        });
    }
}

fn first_half(body: &Bytes) -> Bytes {
    body.slice(..body.len() / 2)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, TryRecvError, channel};

    use super::*;
    use crate::{Blocking, Bodies, StoreOptions, open};

    fn memory() -> Arc<dyn ObjectStore> {
        open("memory:", StoreOptions::default()).unwrap()
    }

    fn store(fault: Fault) -> Arc<FaultStore> {
        FaultStore::new(memory(), Box::new(move |_| fault.clone()))
    }

    fn start_put(store: &FaultStore, key: &str) -> Receiver<Result<PutOutcome>> {
        let (sender, receiver) = channel();
        let put = Put {
            key: key.to_owned(),
            body: Bytes::from_static(b"body"),
            class: Class::Upload,
            bodies: Bodies::Whole,
        };
        store.put(put, Box::new(move |outcome| sender.send(outcome).unwrap()));
        receiver
    }

    fn kind<T: std::fmt::Debug>(outcome: Result<T>) -> StoreErrorKind {
        outcome.unwrap_err().kind()
    }

    #[test]
    fn a_failed_call_does_not_reach_the_store_and_one_with_a_lost_answer_does() {
        let store = store(Fault::Fail(StoreErrorKind::Denied));
        assert_eq!(kind(start_put(&store, "a").recv().unwrap()), StoreErrorKind::Denied);
        store.script(Box::new(|call| {
            if call.kind == CallKind::Put { Fault::LoseAnswer } else { Fault::None }
        }));
        let absent = Blocking(&*store).get("a", None, Class::Read);
        assert_eq!(kind(absent), StoreErrorKind::NotFound);
        assert_eq!(kind(start_put(&store, "a").recv().unwrap()), StoreErrorKind::Unavailable);
        assert_eq!(Blocking(&*store).get("a", None, Class::Read).unwrap(), "body");
        let keys: Vec<_> =
            store.calls().iter().map(|call| (call.number, call.key().to_owned())).collect();
        assert_eq!(keys, [0, 1, 2, 3].map(|number| (number, "a".to_owned())));
    }

    #[test]
    fn a_delayed_call_waits_for_its_release() {
        let store = store(Fault::Delay);
        let a = start_put(&store, "a");
        let b = start_put(&store, "b");
        assert_eq!(store.held().len(), 2);
        assert_eq!(store.release(|call| call.key() == "b"), 1);
        assert_eq!(b.recv().unwrap().unwrap(), PutOutcome::Created);
        assert!(matches!(a.try_recv(), Err(TryRecvError::Empty)));
        drop(store);
        assert_eq!(kind(a.recv().unwrap()), StoreErrorKind::Unavailable);
    }

    #[test]
    fn a_late_put_fails_first_and_takes_effect_afterwards() {
        let store = store(Fault::Late);
        assert_eq!(kind(start_put(&store, "a").recv().unwrap()), StoreErrorKind::Unavailable);
        store.script(Box::new(|_| Fault::None));
        let absent = Blocking(&*store).get("a", None, Class::Read);
        assert_eq!(kind(absent), StoreErrorKind::NotFound);
        assert_eq!(store.release_all(), 1);
        // The released put has no caller to answer; a put of the same bytes waits for it.
        assert_eq!(start_put(&store, "a").recv().unwrap().unwrap(), PutOutcome::Created);
        assert_eq!(Blocking(&*store).get("a", None, Class::Read).unwrap(), "body");
    }

    #[test]
    fn bytes_can_be_cut_and_swapped() {
        let store = store(Fault::None);
        for key in ["a", "b"] {
            Blocking(&*store).put(key, Bytes::from(key.repeat(4)), Class::Upload).unwrap();
        }
        store.script(Box::new(|_| Fault::Truncate));
        assert_eq!(Blocking(&*store).get("a", None, Class::Read).unwrap(), "aa");
        store.script(Box::new(|_| Fault::Swap("b".to_owned())));
        assert_eq!(Blocking(&*store).get("a", None, Class::Read).unwrap(), "bbbb");
    }
}
