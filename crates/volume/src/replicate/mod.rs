//! Replicas: the same volume in a second store, copied byte for byte, readable at any time, promoted when the
//! first store is lost. See `docs/decisions/0015`.
//!
//! Modules: `role` (what a store is to a volume: replica or promoted), `destination` (may it become one),
//! `copier` (round by round), `there` (what the destination holds, for sure or not), `objects` (reading and
//! verifying what is copied), `sweep` (deletes at the destination), `promote` (a replica becomes a volume of
//! its own), `drill` (what that would find, and lose).
//!
//! Invariants:
//! 1. Whatever call the copier dies at, the destination is a cut: all writes up to some position. Opened for
//!    reading, its log ends at the first name that is not there, or that knows a newer checkpoint than it
//!    has.
//! 2. Nobody attaches a replica for writing.
//! 3. A promoted history has epochs, sequences and checkpoint numbers of its own, far above those of the
//!    history it comes from. So whatever a late copier still puts or deletes, it cannot be part of it.
//!
//! Not here: when to look again, how fast to go (the caller says so), clones that share with their base.

mod copier;
mod destination;
mod drill;
mod objects;
mod options;
mod promote;
pub(crate) mod role;
mod sweep;
mod there;

pub use copier::{Copier, Round};
pub use destination::demand_fencing;
pub use drill::{Behind, Drill, behind, drill};
pub use options::CopyOptions;
pub use promote::{Promotion, promote, promote_as_it_is};
