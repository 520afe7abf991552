//! Commands for what exports a disk, and for the process behind it.
//! Not here: what several commands share (`super`).

pub(super) mod device;
pub(super) mod door;
pub(super) mod handoff;
