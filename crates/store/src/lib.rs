//! Object stores behind one contract. See [`ObjectStore`] for the numbered clauses.
//!
//! The async runtime of the stores stays inside: callers pass a closure, which gets the outcome on
//! one of the store's threads.
//!
//! ```text
//! open (a URL) -> Client: retry, limits, meter -> one backend: memory | directory | cloud
//!                                                 (cloud: S3, GCS, Azure)
//! ```
//!
//! A backend makes one attempt and reports its outcome; the client alone retries, times out, reads
//! back a doubtful put, orders by priority and counts. A new store needs one file with its backend,
//! its form of URL in `location`, and one line in `open`.
//!
//! Not here: what objects mean. This crate never looks inside one.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::unwrap_used))]

mod backend;
mod client;
mod cloud;
pub mod conformance;
mod contract;
mod directory;
mod error;
mod fault;
#[doc(hidden)]
pub mod fuzzing;
mod key;
mod limit;
mod location;
mod memory;
mod meter;
mod open;
mod probe;
mod profile;
mod progress;
mod runtime;

pub use client::{Client, StoreOptions};
pub use contract::{
    BLOCKING_GET_BYTES_MAX, Blocking, Bodies, Class, Completion, Get, List, ObjectInfo,
    ObjectStore, Put, PutOutcome, Raise,
};
pub use error::{StoreError, StoreErrorKind};
pub use fault::{Call, Fault, FaultPolicy, FaultStore};
pub use key::{check_key, check_prefix};
pub use location::split_volume_url;
pub use meter::{CallKind, CallMetrics, LATENCY_BUCKETS, MeterSnapshot};
pub use open::{check_url, open, open_in};
pub use probe::{CheckResult, ProbeReport, doctor, probe_conditional_create};

/// The result type of this crate.
pub type Result<T, E = StoreError> = std::result::Result<T, E>;
