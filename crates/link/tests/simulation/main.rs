//! The link in a false world: a network that loses, doubles, reorders, damages and cuts, links that
//! die, targets that are started anew and machines that lose their power, all by seed, under a load
//! that an oracle judges.
//!
//! `SAWMILL_SEEDS=N` runs N seeds, `SAWMILL_SEED=S` that one alone, with its story told.
//!
//! Invariant: one thread and one clock: a seed is a story. Not here: real carriers, real threads.

mod claims;
mod day;
mod disk;
mod hostile;
mod keys;
mod lengths;
mod load;
mod mischief;
mod network;
mod oracle;
mod reservations;
mod story;
mod users;
mod worlds;

#[global_allocator]
static ALLOCATOR: sawmill_sys::CountingAllocator = sawmill_sys::CountingAllocator;
