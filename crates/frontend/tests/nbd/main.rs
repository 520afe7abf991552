//! The NBD door from outside: a small client that can misbehave, and third-party clients.

mod client;
#[path = "../door/conformance.rs"]
mod conformance;
mod contract;
mod devices;
mod hand_over;
mod handshake;
mod hostile_client;
mod neighbors;
mod programs;
mod quiet;
mod requests;
mod server;
