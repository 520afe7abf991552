//! Devices of another machine: targets and initiators as processes, in network namespaces of their
//! own.
//!
//! Not here: what needs a machine to itself (`idle`, `torture`, `verify_crash` and others have
//! programs of their own).

mod attach;
mod link_deaths;
mod link_keys;
mod link_machine;
mod link_reported;
