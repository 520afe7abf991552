//! A false world for the real engine: one seed is one whole run, bit for bit.
//!
//! [`run`](mod@run) plays a seed: machines with disks that tear ([`disk`]), processes that die at
//! any I/O ([`death`]), a store that answers late or loses answers ([`store`]), a clock nobody
//! waits for ([`world`]), clients ([`client`]) and the judge ([`oracle`]). What a seed's world is
//! like: [`settings`]. What happened: [`trace`], in numbers [`story`]. What seldom happens:
//! [`edges`]. The shortest story of a failure: [`shrink`](mod@shrink). Small worlds without chance:
//! [`exhaustive`].
//!
//! It can inject: death at any I/O, power cuts with lost, kept and torn sectors, reads, writes and
//! syncs that fail, syncs that lie, disks that are full, short or cannot be made, rot and sectors
//! in the wrong place, memory lost or damaged, lost journals, old images; puts,
//! deletes and lists that fail, come late, lag, are answered wrongly or not at all; stores that are
//! restored or copied; takeovers, hand-offs, clocks that jump, two servers, names in dispute. It
//! cannot: threads that run at once (`shuttle` does), a kernel, a network.
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
