//! The log-structured virtual disk (being written).
#![forbid(unsafe_code)]
#![allow(missing_docs)]
mod disk;
pub mod map;
pub mod cache;
