//! Commands for devices whose drivers are programs.
//! Not here: what several commands share (`super`).

pub(super) mod conform;
pub(super) mod driver;
pub(super) mod run;
