//! Commands for a disk itself: made, served, listed, changed, deleted.
//! Not here: what several commands share (`super`).

pub(super) mod boot_set;
pub(super) mod create;
pub(super) mod delete;
pub(super) mod gc;
pub(super) mod info;
pub(super) mod list;
pub(super) mod rename;
pub(super) mod resize;
pub(super) mod serve;
pub(super) mod wait;
pub(super) mod warm;
