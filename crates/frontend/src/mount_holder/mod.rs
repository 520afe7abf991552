//! The mount holder: a small process that holds a mount's descriptor while no server runs.
//!
//! A FUSE mount dies with the last process that holds its descriptor. So that a server's death is
//! only a pause for its users, the door starts this process, and the next server gets the
//! descriptor from it. It has a POSIX session of its own and outlives the process that started it.
//! It ends when it is told to, or when the mount is gone.
//!
//! Modules: [`holder`](keep) (the process), `client` (the processes that talk to it), `wire` (the
//! bytes between them), `fuzzing` (what must hold of any packet).
//!
//! Invariants: it never reads from what it holds; it talks only to its own user (and root); it
//! holds one thing. Not here: what the descriptor means, mounting and unmounting.

mod client;
pub(crate) mod fuzzing;
mod holder;
#[cfg(test)]
mod tests;
mod wire;

pub use client::MountHolder;
pub use holder::keep;
pub(crate) use holder::lives;
