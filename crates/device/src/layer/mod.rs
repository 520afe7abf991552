//! Layers: devices around devices. Each keeps the contract as long as the device inside does.
//!
//! A layer that wants to hear an outcome wraps the request's exchange (`Request::wrap`); a layer
//! that only decides passes the request on or answers it.
//!
//! Not here: which layers a server puts around a volume (`crates/sawmill/src/serving`).

mod align;
mod fault;
mod gate;
mod meter;
mod read_only;

pub use align::Align;
pub use fault::{Decision, Fault};
pub use gate::Gate;
pub use meter::{LATENCY_BUCKETS, Meter, MeterSnapshot, OperationSnapshot};
pub use read_only::ReadOnly;
