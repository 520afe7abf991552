//! Commands for devices of other machines, on both ends.
//! Not here: what several commands share (`super`).

pub(super) mod attach;
pub(super) mod link;
pub(super) mod target;
