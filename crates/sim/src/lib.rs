//! A simulated world for the real engine: one seed is one whole run, bit for bit.
//!
//! [`run`](mod@run) plays a seed: machines with disks that tear ([`disk`]), processes that die at
//! any I/O ([`death`]), a store that answers late or loses answers ([`store`]), a simulated clock
//! ([`world`]), clients ([`client`]) and the oracle ([`oracle`]). [`settings`] describes a seed's
//! world, [`trace`] records its events, [`story`] counts them, [`edges`] adds rare events,
//! [`shrink`](mod@shrink) finds the shortest run of a failure, [`exhaustive`] explores small worlds
//! without chance.
//!
//! It can inject: death at any I/O, power cuts with lost, kept and torn sectors, reads, writes and
//! syncs that fail, syncs that lie, disks that are full, short or cannot be made, rot and sectors
//! in the wrong place, memory lost or damaged, lost journals, old images; puts, deletes and lists
//! that fail, come late, lag, are done in part, show what was deleted, are answered wrongly or not
//! at all; stores that are restored or copied; takeovers, hand-offs, clocks that jump, two servers,
//! names in dispute. Meanwhile users work: they take snapshots, roll back, clone, resize, order a
//! collection, copy the volume to a second store and read it there. It cannot simulate concurrent
//! threads (`shuttle` does), a kernel, or a network.
//!
//! Not here: threads, real disks, real stores. Those are tested by the suites in `tests/`.
#![forbid(unsafe_code)]

pub mod client;
pub mod death;
pub mod disk;
pub mod edges;
pub mod exhaustive;
pub mod locks;
pub mod names;
pub mod oracle;
pub mod run;
pub mod settings;
pub mod shrink;
pub mod store;
pub mod story;
pub mod trace;
pub mod world;
