//! Stores that are slow, broken, gone, older or shared with another writer.
//!
//! Not here: what needs a machine to itself (`idle`, `torture`, `verify_crash` and others have
//! programs of their own).

mod contract;
mod dishonest_store;
mod fencing;
mod older_store;
mod store_faults_http;
mod store_lengths;
mod store_outage;
mod unstored;
mod waiting;
