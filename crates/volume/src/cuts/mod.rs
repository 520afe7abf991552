//! The past of a volume: snapshots, moments inside the retention window, rollback, and clones.
//!
//! A *cut* is a kept checkpoint and the segments after it, up to some last one. What is kept, and
//! since when, is written in the log itself as *orders* (segments of their own): an order is done
//! when its segment is stored, so the log alone tells whether it came before or after a fence, and
//! recovery applies it like any write. See `docs/decisions/0014`.
//!
//! Modules: `book` (what is kept, and which segments that needs), `cut` (which one is meant),
//! `find` (where it begins and ends), `clones` (volumes that begin from a cut of another; pins),
//! `removal` (the end of a volume that others may need), `status_pins` (whether it is deleted). Not
//! here: how the engine takes orders (`engine::orders`).

mod book;
mod clones;
mod cut;
mod find;
mod removal;
pub(crate) mod status_pins;

pub(crate) use book::{CutBook, Lineage, LogPosition, NumberedPin, needs};
pub use clones::{clone, clone_each, clone_in};
pub use cut::{Cut, rfc3339};
pub use find::{CutInfo, PastReport, past};
pub(crate) use find::{entry_of, state_at, stored_cut};
pub use removal::DeleteReport;
pub(crate) use removal::{KeptFences, PinHolder, release_pins, remove_objects};
