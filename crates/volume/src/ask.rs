//! Many gets or puts in parallel, awaited in order: for recovery, checks and commands, which may
//! block.
//!
//! Invariants: `None` means only that the store has definitely no such object; a get that was
//! dropped without an answer is an error. Answers stand in the order of the gets.
//!
//! Not here: retries (the client of `sawmill_store`), decoding, and what a missing object means to
//! the caller.

use std::ops::Range;
use std::sync::mpsc::{channel, sync_channel};

use bytes::Bytes;
use sawmill_format::checkpoint::{parse_checkpoint_key, parse_kept_key};
use sawmill_format::map_part::parse_part_key;
use sawmill_format::segment::parse_segment_key;
use sawmill_store::{Bodies, Class, Get, ObjectStore, Put, PutOutcome, StoreError, StoreErrorKind};

use crate::{Error, ErrorKind, limits};

/// A get and its outcome: `None` means the store's definite answer that it has no such object.
pub(crate) type Answer = crate::Result<Option<Bytes>>;

/// A get that takes no more memory than an object of the key's kind can fill.
pub(crate) fn want(key: String, range: Option<Range<u64>>, class: Class) -> Get {
    let bytes_max = object_bytes_max(&key);
    Get { key, range, bytes_max, class }
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

/// Gets all of `wanted` in parallel and returns the answers in the same order.
pub(crate) fn get_all(
    store: &dyn ObjectStore,
    wanted: Vec<(String, Option<Range<u64>>)>,
    class: Class,
) -> Vec<Answer> {
    let count = wanted.len();
    let (sender, receiver) = sync_channel(count.max(1));
    for (index, (key, range)) in wanted.into_iter().enumerate() {
        let sender = sender.clone();
        let done = Box::new(move |outcome| {
            // The caller waits for all answers, so the receiver still exists.
            let _ = sender.send((index, outcome));
        });
        store.get(want(key, range, class), done);
    }
    drop(sender);
    let mut answers: Vec<Answer> = Vec::new();
    answers.resize_with(count, || {
        Err(Error::new(ErrorKind::Unavailable, "the store dropped a call without an answer"))
    });
    for (index, outcome) in receiver {
        answers[index] = found(outcome);
    }
    answers
}

/// Puts all of `objects` in parallel. One that exists already is fine: their names are random.
pub(crate) fn put_all(
    store: &dyn ObjectStore,
    objects: Vec<(String, Vec<u8>)>,
) -> crate::Result<()> {
    put_as_made(store, objects.into_iter().map(Ok))
}

/// As [`put_all`], but each is put while the next one is still being made.
pub(crate) fn put_as_made(
    store: &dyn ObjectStore,
    objects: impl IntoIterator<Item = crate::Result<(String, Vec<u8>)>>,
) -> crate::Result<()> {
    // Bounded by the objects of one checkpoint.
    let (sender, receiver) = channel();
    for object in objects {
        let (key, body) = object?;
        let sender = sender.clone();
        let done = Box::new(move |outcome: sawmill_store::Result<PutOutcome>| {
            // The caller may have given up.
            let _ = sender.send(outcome);
        });
        store.put(
            Put { key, body: Bytes::from(body), class: Class::Upload, bodies: Bodies::Whole },
            done,
        );
    }
    drop(sender);
    receiver
        .into_iter()
        .try_for_each(|outcome| outcome.map(drop).map_err(|error| store_error(&error)))
}

/// Gets one object or a part of it.
pub(crate) fn get(
    store: &dyn ObjectStore,
    key: &str,
    range: Option<Range<u64>>,
    class: Class,
) -> Answer {
    let mut answers = get_all(store, vec![(key.to_owned(), range)], class);
    answers.pop().unwrap_or(Ok(None))
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
