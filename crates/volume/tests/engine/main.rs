//! The engine as a library: real files, stores that fail on request, one module a subject.
//!
//! Not here: worlds by seed (`crates/sim`); the real binary (`tests/`).

mod bounded;
mod checking;
mod clones;
mod collect;
mod copies;
mod crash_between;
mod cuts;
mod damage;
mod deltas;
mod faulty;
mod fencing;
mod groups;
mod histories;
mod journal_cases;
mod life;
mod memory_lost;
mod names;
mod old_volumes;
mod opening;
mod power_cut;
mod read_only;
mod reading;
mod rename;
mod resize;
mod rig;
mod shared_threads;
mod stepped_volume;
mod store_faults;
