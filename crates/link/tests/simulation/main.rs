//! The link in a simulated world: a network that loses, duplicates, reorders, damages and cuts,
//! links that die, targets that restart and machines that lose power, all from a seed, under a load
//! that an oracle judges.
//!
//! `SAWMILL_SEEDS=N` runs N seeds, `SAWMILL_SEED=S` only that one, and prints its story.
//!
//! Invariant: one thread, one clock: a seed determines a run. Not here: real carriers, real
//! threads.

mod day;
mod disk;
mod faults;
mod hostile;
mod keys;
mod lengths;
mod load;
mod network;
mod oracle;
mod reconnection;
mod reservations;
mod rig;
mod story;
mod users;
mod worlds;

#[global_allocator]
static ALLOCATOR: sawmill_sys::CountingAllocator = sawmill_sys::CountingAllocator;
