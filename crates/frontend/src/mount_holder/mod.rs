//! The mount holder: a small process that holds a mount's descriptor while no server runs.
//!
//! A FUSE mount dies when the last process that holds its descriptor does. So that a server's death is only
//! a pause for its users, the door starts this process; whoever serves next asks it for the descriptor. It
//! is in a session of its own and outlives the one that started it; it ends when told to, or when the mount
//! is gone.
//!
//! Modules: [`holder`](keep) (the process), `client` (those who talk to it), `wire` (the bytes between them).
//!
//! Invariants: it never reads from what it holds; it talks to its own user (and root) alone; it holds one
//! thing. Not here: what the descriptor means, mounting and unmounting.

mod client;
mod holder;
#[cfg(test)]
mod tests;
mod wire;

pub use client::MountHolder;
pub use holder::keep;
pub(crate) use holder::lives;
