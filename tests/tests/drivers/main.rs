//! Devices whose drivers are other programs, in each language, and the conformance tests for them.
//!
//! Not here: what needs a machine to itself (`idle`, `torture`, `verify_crash` and others have
//! programs of their own).

mod conform;
mod conform_examples;
mod driver_bdus;
mod driver_bs3;
mod driver_c;
mod driver_go;
mod driver_own_host;
mod driver_python;
mod run;
