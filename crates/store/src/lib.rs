//! Object stores behind one contract. See [`ObjectStore`] for the numbered clauses.
//!
//! Async lives in this crate alone: callers hand in a closure and hear the outcome on one of the store's threads.
//!
//! Not here: what objects mean. This crate never looks inside one.
#![forbid(unsafe_code)]

mod contract;
mod error;

pub use contract::{Blocking, Class, Done, Get, List, ObjectInfo, ObjectStore, Put, PutOutcome};
pub use error::{StoreError, StoreErrorKind};

/// The result type of this crate.
pub type Result<T, E = StoreError> = std::result::Result<T, E>;
