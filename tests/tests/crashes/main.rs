//! Servers that are killed, and disks that lie, fail or lose power.
//!
//! Not here: what needs a machine to itself (`idle`, `torture`, `verify_crash` and others have
//! programs of their own).

mod device_faults;
mod journal_cases;
mod journal_recorded;
mod kill_nine;
mod power_loss;
