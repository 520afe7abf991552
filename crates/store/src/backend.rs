//! The interface of one kind of store: one attempt of each call, nothing more.
//!
//! Invariant: a backend never retries, never waits for a turn and never counts; the client does
//! that for all. It answers `NotFound` only where the store itself reported it (S4).
//!
//! Not here: the check of keys (`key`), what the client adds (`client`), and the backends
//! (`memory`, `directory`, `cloud`).

use std::ops::Range;

use bytes::Bytes;
use futures_util::future::BoxFuture;

use crate::{Bodies, ObjectInfo, Result, StoreError, StoreErrorKind};

/// How one attempt to create an object ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Creation {
    /// The object is there, whole, and this attempt made it.
    Created,
    /// The store reports that the key is taken. The cause is open: it may be an earlier attempt of
    /// the same put, or a passing conflict with nothing there at all.
    Exists,
}

/// The bytes of an object that a get asks for.
#[derive(Clone, Debug)]
pub(crate) struct WantedBytes {
    /// The range, or all.
    pub range: Option<Range<u64>>,
    /// The most bytes that the caller accepts.
    pub bytes_max: u64,
}

impl WantedBytes {
    /// The bytes that this means in an object of `size_bytes`.
    pub(crate) fn cut(&self, size_bytes: u64) -> Result<Range<u64>> {
        let range = cut_range(self.range.clone(), size_bytes)?;
        self.check_length(range.end - range.start)?;
        Ok(range)
    }

    /// Refuses an answer that claims to be longer than the caller can use, before memory is
    /// allocated for it.
    pub(crate) fn check_length(&self, length_bytes: u64) -> Result<()> {
        if length_bytes <= self.bytes_max {
            return Ok(());
        }
        // `Damaged`, because a repeat meets the same claim (decision 0025).
        let text =
            format!("the object claims {length_bytes} bytes where {} is the most", self.bytes_max);
        Err(StoreError::new(
            StoreErrorKind::Damaged,
            format!("{text}: it is damaged, or not Sawmill's"),
        ))
    }
}

/// Allocates memory for a body of `length_bytes`; an error if there is none.
pub(crate) fn room_for(length_bytes: usize) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    // A failed allocation would abort the process, and with it the volumes that need no such
    // object.
    bytes.try_reserve_exact(length_bytes).map_err(|error| {
        let text = format!("no memory for {length_bytes} bytes: {error}");
        StoreError::new(StoreErrorKind::Unavailable, text).with_source(error)
    })?;
    Ok(bytes)
}

/// What a put creates, and how its bytes travel.
#[derive(Clone)]
pub(crate) struct Body {
    pub(crate) bytes: Bytes,
    pub(crate) bodies: Bodies,
}

/// One kind of store. Keys and prefixes have been checked.
pub(crate) trait Backend: Send + Sync + 'static {
    /// Whether it counts the bytes of an attempt as they move ([`crate::progress`]).
    fn shows_progress(&self) -> bool;
    /// The endpoint, if traffic to it can be read and changed on the way.
    fn exposed_endpoint(&self) -> Option<&str>;
    /// Fetches what is asked for, cut to the object's end.
    fn get<'a>(&'a self, key: &'a str, part: WantedBytes) -> BoxFuture<'a, Result<Bytes>>;
    /// Creates an object, never overwriting one.
    fn create<'a>(&'a self, key: &'a str, body: Body) -> BoxFuture<'a, Result<Creation>>;
    /// Lists the objects strictly below `prefix`, which has no trailing `/`; empty means all.
    fn list<'a>(&'a self, prefix: &'a str) -> BoxFuture<'a, Result<Vec<ObjectInfo>>>;
    /// Deletes objects; absent ones are fine.
    fn delete<'a>(&'a self, keys: &'a [String]) -> BoxFuture<'a, Result<()>>;
}

/// The bytes that `range` means in an object of `size_bytes`.
pub(crate) fn cut_range(range: Option<Range<u64>>, size_bytes: u64) -> Result<Range<u64>> {
    match range {
        None => Ok(0..size_bytes),
        // A range may reach past the end (S5), so only its start decides.
        Some(range) if range.start < range.end && range.start < size_bytes => {
            Ok(range.start..range.end.min(size_bytes))
        }
        Some(range) => Err(StoreError::new(
            StoreErrorKind::Invalid,
            format!(
                "range {}..{} is not inside the object's {size_bytes} bytes",
                range.start, range.end
            ),
        )),
    }
}
