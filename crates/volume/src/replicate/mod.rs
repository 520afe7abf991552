//! Replicas: the same volume in a second store, copied byte for byte, readable at any time,
//! promoted when the first store is lost. See `docs/decisions/0015`.
//!
//! Modules: `role` (what a store is to a volume: replica or promoted), `destination` (may it become
//! one), `copier` (round by round), `destination_objects` (what the destination holds, known for
//! certain or not), `objects` (reading and verifying what is copied), `sweep` (deletes at the
//! destination), `promote` (a replica becomes a volume of its own), `drill` (what that would find,
//! and lose).
//!
//! Invariants:
//! 1. Whichever call the copier dies at, the destination is a cut: all writes up to some position.
//!    Opened for reading, its log ends at the first name that does not exist, or that knows a newer
//!    checkpoint than the destination has.
//! 2. A replica is never attached for writing.
//! 3. A promoted history has epochs, sequences and checkpoint numbers of its own, far above those
//!    of the history it comes from. So whatever a late copier puts or deletes cannot be part of it.
//!
//! Not here: when to check again, how fast to copy (the caller decides), clones that share with
//! their base.

mod copier;
mod destination;
mod destination_objects;
mod drill;
mod objects;
mod options;
mod promote;
pub(crate) mod role;
mod sweep;

pub use copier::{Copier, Round};
pub use destination::require_fencing;
pub use drill::{Drill, ReplicaLag, behind, drill};
pub use options::{CopyOptions, VolumeAt};
pub use promote::{Promotion, promote, promote_as_it_is};
