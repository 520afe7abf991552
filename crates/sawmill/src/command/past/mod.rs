//! Commands for the past of a disk, and for copies: snapshots, clones, images, replicas.
//! Not here: what several commands share (`super`).

pub(super) mod clone;
pub(super) mod copy;
pub(super) mod export;
pub(super) mod flatten;
pub(super) mod import;
pub(super) mod log;
pub(super) mod promote;
pub(super) mod replicate;
pub(super) mod rollback;
pub(super) mod set;
pub(super) mod snapshot;
