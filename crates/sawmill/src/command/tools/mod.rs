//! Commands that look, explain and check.
//! Not here: what several commands share (`super`).

pub(super) mod check;
pub(super) mod completions;
pub(super) mod doctor;
pub(super) mod explain;
pub(super) mod help;
pub(super) mod inspect;
pub(super) mod man;
