//! What the journal and the read cache need of a local disk. Four methods and no defaults, so that a false disk
//! can stand in its place.

use std::io;

/// A local disk or file, addressed in bytes, shared by threads.
pub trait Disk: Send + Sync {
    /// Size in bytes.
    fn len_bytes(&self) -> u64;
    /// Reads exactly `into.len()` bytes at `offset`; may wait for the device.
    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()>;
    /// As `read_at`, but answers `WouldBlock` instead of waiting for the device.
    fn read_now(&self, offset: u64, into: &mut [u8]) -> io::Result<()>;
    /// Writes all of `bytes` at `offset`. Not durable before `sync`.
    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()>;
    /// Makes every completed write durable. A failure is final: what was unsynced may be lost.
    fn sync(&self) -> io::Result<()>;
}
