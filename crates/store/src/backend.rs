//! What one kind of store must be able to do: one attempt of each call, nothing more.
//!
//! Invariant: a backend never retries, never waits for a turn and never counts; the client does that for all.
//! It answers `NotFound` only where the store itself said so (S4).

use std::ops::Range;

use bytes::Bytes;
use futures_util::future::BoxFuture;

use crate::{ObjectInfo, Result, StoreError, StoreErrorKind};

/// How one attempt to create an object ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Creation {
    /// The object is there, whole, and this attempt made it.
    Created,
    /// The store says the key is taken. By whom is open: it may be an earlier attempt of the same put, or a
    /// passing conflict with nothing there at all.
    Exists,
}

/// One kind of store. Keys and prefixes have been checked.
pub(crate) trait Backend: Send + Sync + 'static {
    /// Fetches the bytes of `range`, cut to the object's end, or all.
    fn get<'a>(&'a self, key: &'a str, range: Option<Range<u64>>) -> BoxFuture<'a, Result<Bytes>>;
    /// Creates an object, never overwriting one.
    fn create<'a>(&'a self, key: &'a str, body: Bytes) -> BoxFuture<'a, Result<Creation>>;
    /// As `create`; a store on a network gets the body in pieces with a pause between.
    fn create_in_pieces<'a>(&'a self, key: &'a str, body: Bytes) -> BoxFuture<'a, Result<Creation>> {
        self.create(key, body)
    }
    /// Lists the objects strictly below `prefix`, which has no trailing `/`; empty means all.
    fn list<'a>(&'a self, prefix: &'a str) -> BoxFuture<'a, Result<Vec<ObjectInfo>>>;
    /// Deletes objects; absent ones are fine.
    fn delete<'a>(&'a self, keys: &'a [String]) -> BoxFuture<'a, Result<()>>;
}

/// The bytes that `range` means in an object of `size_bytes`.
pub(crate) fn cut_range(range: Option<Range<u64>>, size_bytes: u64) -> Result<Range<u64>> {
    match range {
        None => Ok(0..size_bytes),
        Some(range) if range.start < range.end && range.start < size_bytes => {
            Ok(range.start..range.end.min(size_bytes))
        }
        Some(range) => Err(StoreError::new(
            StoreErrorKind::Invalid,
            format!("range {}..{} is not inside the object's {size_bytes} bytes", range.start, range.end),
        )),
    }
}
