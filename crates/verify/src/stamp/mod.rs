//! Blocks that record which write made them, the log of all writes, and the judge of crash images.
//!
//! Every 512-byte sector of a write carries magic, run, address, write, its index in the write, the
//! write's length, and a checksum over all of it. After a crash the judge looks at each sector and
//! decides whether the image is a *cut*: all writes up to some time, none after it, each whole or
//! absent, in one order. Modules: `block` (the stamp), `log` (all writes and flushes), `judge` (the
//! definition and its proof).
//!
//! Not here: who writes such blocks (`load`), how an image is read from a device (`cut_check`,
//! `crash`).

mod block;
mod judge;
mod log;

#[cfg(test)]
mod tests;

pub use block::{SECTOR_BYTES, Sector, Stamp};
pub use judge::{
    Verdict, Violation, check_cut, check_flushed_kept, check_kept_before,
    check_nothing_accepted_lost, check_sectors, check_sectors_accepted,
};
pub use log::{Clock, CutTime, Flush, Kind, Log, Write};
