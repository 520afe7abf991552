//! Many gets or puts in parallel, awaited in order: for recovery, checks and commands, which may
//! block.
//!
//! Invariants: `None` means only that the store has definitely no such object; a call that was
//! dropped without an answer is an error. Answers stand in the order of the gets.
//!
//! Not here: retries (the client of `sawmill_store`), decoding, and what a missing object means to
//! the caller.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::mpsc::{Receiver, sync_channel};

use bytes::Bytes;
use sawmill_format::FormatError;
use sawmill_format::checkpoint::{parse_checkpoint_key, parse_kept_key};
use sawmill_format::map_part::parse_part_key;
use sawmill_format::segment::parse_segment_key;
use sawmill_store::{
    Bodies, Class, Get, List, ObjectInfo, ObjectStore, Put, PutOutcome, StoreError, StoreErrorKind,
};

use crate::{Error, ErrorKind, limits};

/// A get and its outcome: `None` means the store's definite answer that it has no such object.
pub(crate) type Answer = crate::Result<Option<Bytes>>;

/// A get that takes no more memory than an object of the key's kind can fill.
pub(crate) fn want(key: String, range: Option<Range<u64>>, class: Class) -> Get {
    let bytes_max = object_bytes_max(&key);
    Get { key, range, bytes_max, class, raise: None }
}

/// A get of an object whose length its checkpoint names: it takes no more memory than that.
pub(crate) fn want_named(key: String, length_bytes: u32, class: Class) -> Get {
    Get { key, range: None, bytes_max: length_bytes.into(), class, raise: None }
}

fn object_bytes_max(key: &str) -> u64 {
    if parse_segment_key(key).is_some() {
        limits::SEGMENT_OBJECT_BYTES_MAX
    } else if parse_part_key(key).is_some() {
        limits::MAP_PART_BYTES_MAX
    } else if parse_checkpoint_key(key).is_some() || parse_kept_key(key).is_some() {
        limits::CHECKPOINT_BYTES_MAX
    } else {
        limits::RECORD_OBJECT_BYTES_MAX
    }
}

/// Gets all of `requests` in parallel and returns the answers in the same order.
pub(crate) fn get_all(
    store: &dyn ObjectStore,
    requests: Vec<(String, Option<Range<u64>>)>,
    class: Class,
) -> Vec<Answer> {
    get_each(store, requests.into_iter().map(|(key, range)| want(key, range, class)).collect())
}

/// Makes all of `gets` in parallel and returns the answers in the same order.
pub(crate) fn get_each(store: &dyn ObjectStore, gets: Vec<Get>) -> Vec<Answer> {
    ask_each(store, gets).wait()
}

/// Gets that are under way, for a caller that has something else to do meanwhile.
pub(crate) struct PendingAnswers {
    count: usize,
    receiver: Receiver<(usize, sawmill_store::Result<Bytes>)>,
}

/// Makes all of `gets` in parallel, and waits for none.
pub(crate) fn ask_each(store: &dyn ObjectStore, gets: Vec<Get>) -> PendingAnswers {
    let count = gets.len();
    let (sender, receiver) = sync_channel(count.max(1));
    for (index, get) in gets.into_iter().enumerate() {
        let sender = sender.clone();
        let done = Box::new(move |outcome| {
            // The caller may have given up. There is room for every answer.
            let _ = sender.send((index, outcome));
        });
        store.get(get, done);
    }
    PendingAnswers { count, receiver }
}

impl PendingAnswers {
    /// The answers, in the order of the gets.
    pub(crate) fn wait(self) -> Vec<Answer> {
        let mut answers: Vec<Answer> = Vec::new();
        answers.resize_with(self.count, || Err(dropped_call()));
        for (index, outcome) in self.receiver {
            answers[index] = found(outcome);
        }
        answers
    }
}

/// A list that is under way.
pub(crate) struct PendingList(Receiver<sawmill_store::Result<Vec<ObjectInfo>>>);

/// Lists what lies below `prefix`, and does not wait for it.
pub(crate) fn ask_list(store: &dyn ObjectStore, prefix: String) -> PendingList {
    let (sender, receiver) = sync_channel(1);
    let done = Box::new(move |outcome| {
        // The caller may have given up.
        let _ = sender.send(outcome);
    });
    store.list(List { prefix, class: Class::Read }, done);
    PendingList(receiver)
}

impl PendingList {
    /// What was listed.
    pub(crate) fn wait(self) -> crate::Result<Vec<ObjectInfo>> {
        let outcome = self.0.recv().map_err(|_| dropped_call())?;
        outcome.map_err(|error| store_error(&error))
    }
}

/// Puts all of `objects` in parallel. One that exists already is fine: their names are random.
pub(crate) fn put_all(
    store: &dyn ObjectStore,
    objects: Vec<(String, Vec<u8>)>,
) -> crate::Result<()> {
    put_each(store, objects.into_iter().map(Ok))
}

/// As [`put_all`], but makes each object while the ones before it are on their way.
pub(crate) fn put_each(
    store: &dyn ObjectStore,
    objects: impl IntoIterator<Item = crate::Result<(String, Vec<u8>)>>,
) -> crate::Result<()> {
    let mut in_flight = VecDeque::new();
    for object in objects {
        let (key, body) = object?;
        if in_flight.len() == limits::PUTS_PARALLEL_MAX
            && let Some(oldest) = in_flight.pop_front()
        {
            put_outcome(&oldest)?;
        }
        let (sender, receiver) = sync_channel(1);
        let done = Box::new(move |outcome| {
            // The caller may have given up.
            let _ = sender.send(outcome);
        });
        store.put(
            Put { key, body: Bytes::from(body), class: Class::Upload, bodies: Bodies::Whole },
            done,
        );
        in_flight.push_back(receiver);
    }
    in_flight.iter().try_for_each(put_outcome)
}

fn put_outcome(answer: &Receiver<sawmill_store::Result<PutOutcome>>) -> crate::Result<()> {
    let outcome = answer.recv().map_err(|_| dropped_call())?;
    outcome.map(drop).map_err(|error| store_error(&error))
}

fn dropped_call() -> Error {
    Error::new(ErrorKind::Unavailable, "the store dropped a call without an answer")
}

/// The same get once more.
pub(crate) fn get_again(store: &dyn ObjectStore, get: &Get) -> Answer {
    get_each(store, vec![get.clone()]).pop().unwrap_or_else(|| Err(dropped_call()))
}

/// Gets one object or a part of it.
pub(crate) fn get(
    store: &dyn ObjectStore,
    key: &str,
    range: Option<Range<u64>>,
    class: Class,
) -> Answer {
    let mut answers = get_all(store, vec![(key.to_owned(), range)], class);
    answers.pop().unwrap_or_else(|| Err(dropped_call()))
}

/// Reads a damaged object once more: it may have been garbled in transit and be intact in the
/// store.
pub(crate) fn again_if_damaged<T>(mut read: impl FnMut() -> crate::Result<T>) -> crate::Result<T> {
    match read() {
        Err(error) if error.kind() == ErrorKind::Corrupt => read(),
        outcome => outcome,
    }
}

fn found(outcome: sawmill_store::Result<Bytes>) -> Answer {
    match outcome {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == StoreErrorKind::NotFound => Ok(None),
        Err(error) => Err(store_error(&error)),
    }
}

/// A structure of ours that breaks its own format: it is a bug, and nothing is written.
pub(crate) fn cannot_encode(error: FormatError) -> Error {
    Error::caused(
        ErrorKind::Internal,
        "cannot encode the object, so nothing was written: this is a bug",
        error,
    )
}

/// Converts a store's failure to an error of a block device.
pub(crate) fn store_error(error: &StoreError) -> Error {
    let kind = match error.kind() {
        StoreErrorKind::NotFound => ErrorKind::NotFound,
        StoreErrorKind::Denied => ErrorKind::Denied,
        StoreErrorKind::Unavailable => ErrorKind::Unavailable,
        // A garbled answer says nothing about the object.
        StoreErrorKind::Broken => ErrorKind::Unavailable,
        StoreErrorKind::Damaged => ErrorKind::Corrupt,
        StoreErrorKind::Invalid => ErrorKind::Invalid,
    };
    Error::new(kind, error.to_string()).with_source(error.clone())
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc::{SyncSender, sync_channel};
    use std::thread;

    use sawmill_store::Completion;

    use super::*;

    type PutAnswer = Completion<PutOutcome>;

    /// Gives its puts to a thread that answers them.
    struct PutStore {
        puts: SyncSender<PutAnswer>,
        in_flight: AtomicUsize,
        in_flight_max: AtomicUsize,
    }

    impl ObjectStore for PutStore {
        fn put(&self, _: Put, done: PutAnswer) {
            let in_flight = self.in_flight.fetch_add(1, Ordering::SeqCst) + 1;
            self.in_flight_max.fetch_max(in_flight, Ordering::SeqCst);
            self.puts.send(done).expect("the thread takes every put");
        }
        fn get(&self, _: Get, _: Completion<Bytes>) {}
        fn list(&self, _: List, _: Completion<Vec<ObjectInfo>>) {}
        fn delete(&self, _: Vec<String>, _: Class, _: Completion<()>) {}
    }

    /// Puts `count` objects, with each call answered or, where `answer` is false, dropped. Returns
    /// the outcome and how many puts were in flight at once.
    fn put_objects(count: usize, answer: fn(usize) -> bool) -> (crate::Result<()>, usize) {
        let (puts, calls) = sync_channel::<PutAnswer>(count);
        let (in_flight, in_flight_max) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let store = PutStore { puts, in_flight, in_flight_max };
        let outcome = thread::scope(|threads| {
            let store = &store;
            threads.spawn(move || {
                // The first is answered when as many are in flight as may be.
                let window = limits::PUTS_PARALLEL_MAX;
                let mut held: VecDeque<_> = calls.iter().take(window.min(count)).collect();
                let mut number = 0;
                while let Some(done) = held.pop_front() {
                    store.in_flight.fetch_sub(1, Ordering::SeqCst);
                    if answer(number) {
                        done(Ok(PutOutcome::Created));
                    }
                    if number + window < count {
                        held.push_back(calls.recv().expect("one more put"));
                    }
                    number += 1;
                }
            });
            put_all(store, (0..count).map(|number| (number.to_string(), vec![0])).collect())
        });
        (outcome, store.in_flight_max.into_inner())
    }

    #[test]
    fn puts_in_flight_are_bounded() {
        let (outcome, in_flight_max) = put_objects(4 * limits::PUTS_PARALLEL_MAX, |_| true);
        outcome.unwrap();
        assert_eq!(in_flight_max, limits::PUTS_PARALLEL_MAX);
    }

    #[test]
    fn a_put_that_the_store_dropped_is_no_success() {
        let (outcome, _) = put_objects(limits::PUTS_PARALLEL_MAX, |number| number != 1);
        assert_eq!(outcome.unwrap_err().kind(), ErrorKind::Unavailable);
    }
}
