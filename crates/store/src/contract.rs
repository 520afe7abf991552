//! The contract of an object store, numbered, and blocking wrappers for it.
//!
//! Keys are relative to the root the store was opened with, use `/` between parts, and consist of
//! `[A-Za-z0-9._/-]`; no part is empty, starts with a dot, or is longer than 255 bytes; a
//! key has at most 768. No key may be the beginning of another up to a `/`: a folder of files could
//! not hold both.
//!
//! Invariant: a call of [`Blocking`] that the store drops without an answer fails as `Unavailable`,
//! never as `NotFound`.
//!
//! Not here: the clauses as tests (`conformance`), the check of one key (`key`), and retries
//! (`client`).

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::sync_channel;

use bytes::Bytes;
use tokio::sync::Notify;

use crate::{Result, StoreError, StoreErrorKind};

/// The class of a call: user reads go before uploads, uploads before background work. Uploads have
/// a small share that reads cannot take.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Class {
    /// A reader of the disk waits for it.
    Read,
    /// Stored data waits for it: segments, checkpoints, fences.
    Upload,
    /// Nothing waits for it: prefetch, deletes, scrubbing.
    Background,
}

/// Turns background calls into such that a reader waits for. Nobody knows beforehand whether a
/// reader will want what is fetched ahead of it; once one does, it must not wait behind work that
/// nobody wants.
#[derive(Clone, Debug, Default)]
pub struct Raise {
    shared: Arc<RaiseState>,
}

#[derive(Debug, Default)]
struct RaiseState {
    is_raised: AtomicBool,
    changed: Notify,
}

impl Raise {
    /// From now on the call goes with the reads.
    pub fn raise(&self) {
        if !self.shared.is_raised.swap(true, Ordering::AcqRel) {
            self.shared.changed.notify_waiters();
        }
    }

    /// Whether a reader waits for the call.
    #[must_use]
    pub fn is_raised(&self) -> bool {
        self.shared.is_raised.load(Ordering::Acquire)
    }

    /// Waits until it is raised, as any number of calls may.
    pub(crate) async fn raised(&self) {
        // Made before the look: what is raised between the two is not missed.
        let changed = self.shared.changed.notified();
        if !self.is_raised() {
            changed.await;
        }
    }
}

/// Fetch an object or a part of it.
#[derive(Clone, Debug)]
pub struct Get {
    /// The object's key. An illegal key is answered with `Invalid`, without a request.
    pub key: String,
    /// Which bytes, or all. A range that reaches past the end is cut there; an empty range, or one
    /// that starts at or past the end, is `Invalid`.
    pub range: Option<Range<u64>>,
    /// The most bytes that the caller can use. An object (or a range) that claims more is
    /// `Damaged`, and takes no memory.
    pub bytes_max: u64,
    /// Decides when its turn comes, not how long it may take.
    pub class: Class,
    /// If raised, the call goes with the reads from then on, whatever its class.
    pub raise: Option<Raise>,
}

/// How the body of a put travels to a store across a network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bodies {
    /// At once. Everything but a probe wants this.
    Whole,
    /// In halves with a pause between, so that every one of several racing puts has begun before
    /// any can end. This exposes stores that check first whether the key is free, and create the
    /// object when the body is complete. A store without a network puts it whole.
    InHalves,
}

/// Create an object.
#[derive(Clone, Debug)]
pub struct Put {
    /// The key to create. One that is taken stays as it is.
    pub key: String,
    /// Its bytes. The first 4 KiB must be unique to this put (they hold a random put-id), so that a
    /// lost answer can be told from another writer's object.
    pub body: Bytes,
    /// Decides when its turn comes, not how long it may take.
    pub class: Class,
    /// How the body travels.
    pub bodies: Bodies,
}

/// How a create-only put ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PutOutcome {
    /// The object is there and is ours (also when an earlier attempt of this call had succeeded,
    /// but its answer was lost).
    Created,
    /// The key is taken by an object with other bytes.
    Taken,
}

/// List the objects below a prefix.
#[derive(Clone, Debug)]
pub struct List {
    /// Key prefix; ends with `/` or names a whole part. Objects strictly below it are listed: `a/b`
    /// and `a/b/` both list `a/b/c`, and neither lists `a/b` or `a/bc`. Empty lists the whole
    /// store.
    pub prefix: String,
    /// Decides when its turn comes, not how long it may take.
    pub class: Class,
}

/// One listed object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectInfo {
    /// Its key, relative to the store's root.
    pub key: String,
    /// Bytes of the whole object.
    pub size_bytes: u64,
}

/// Receives the outcome of a call, once, on a store thread or on the caller's. Must not block.
pub type Completion<T> = Box<dyn FnOnce(Result<T>) + Send>;

/// An object store.
///
/// # The contract
///
/// - **S1** No method blocks. Every call is answered exactly once.
/// - **S2** `put` is create-only: of any number of racing puts of one key exactly one is answered
///   `Created`. Nothing is ever overwritten.
/// - **S3** An object is visible whole or not at all, and after `Created` to every later `get`.
/// - **S4** `NotFound` means the store said so. An error, a timeout or a cut answer is never
///   `NotFound`.
/// - **S5** A `get` returns exactly the bytes of the range cut to the object's end, or an error. It
///   never takes memory for more than `bytes_max`, whatever length the store claims.
/// - **S6** `list` returns keys in no particular order. It may lag behind puts and deletes.
/// - **S7** `delete` of an absent key succeeds.
/// - **S8** A call that fails with `Unavailable` may still take effect later.
/// - **S9** A call with an illegal key or prefix fails as `Invalid`, and changes nothing.
pub trait ObjectStore: Send + Sync {
    /// Fetches an object or a part of it.
    fn get(&self, get: Get, done: Completion<Bytes>);
    /// Creates an object.
    fn put(&self, put: Put, done: Completion<PutOutcome>);
    /// Lists objects.
    fn list(&self, list: List, done: Completion<Vec<ObjectInfo>>);
    /// Deletes objects.
    fn delete(&self, keys: Vec<String>, class: Class, done: Completion<()>);
}

/// What a [`Blocking::get`] takes at most.
pub const BLOCKING_GET_BYTES_MAX: u64 = 256 << 20;

/// Blocking calls on a store, for recovery and commands. Never call them on a store's own thread.
pub struct Blocking<'a>(pub &'a dyn ObjectStore);

impl Blocking<'_> {
    fn wait<T: Send + 'static>(start: impl FnOnce(Completion<T>)) -> Result<T> {
        // Room for the answer: a store that answers on the caller's own thread must not wait for
        // `recv`.
        let (sender, receiver) = sync_channel(1);
        start(Box::new(move |outcome| {
            // The waiter can be gone only if its thread died.
            let _ = sender.send(outcome);
        }));
        // A closure that was dropped closes the channel: nothing is known then (S4).
        receiver.recv().unwrap_or_else(|_| {
            Err(StoreError::new(
                StoreErrorKind::Unavailable,
                "the store dropped a call without an answer",
            ))
        })
    }

    /// Fetches an object or a part of it, of [`BLOCKING_GET_BYTES_MAX`] at most.
    pub fn get(&self, key: &str, range: Option<Range<u64>>, class: Class) -> Result<Bytes> {
        let get = Get {
            key: key.to_owned(),
            range,
            bytes_max: BLOCKING_GET_BYTES_MAX,
            class,
            raise: None,
        };
        Self::wait(|done| self.0.get(get, done))
    }

    /// As [`ObjectStore::put`], with a body that travels whole.
    pub fn put(&self, key: &str, body: Bytes, class: Class) -> Result<PutOutcome> {
        Self::wait(|done| {
            self.0.put(Put { key: key.to_owned(), body, class, bodies: Bodies::Whole }, done)
        })
    }

    /// As [`ObjectStore::list`].
    pub fn list(&self, prefix: &str, class: Class) -> Result<Vec<ObjectInfo>> {
        Self::wait(|done| self.0.list(List { prefix: prefix.to_owned(), class }, done))
    }

    /// Deletes objects.
    pub fn delete(&self, keys: Vec<String>, class: Class) -> Result<()> {
        Self::wait(|done| self.0.delete(keys, class, done))
    }
}
