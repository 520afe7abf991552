//! FUSE: the volume as one file in a folder, byte by byte, and from there as a loop device.
//!
//! Works on every Linux with the fuse module, also for users who are not root. Modules:
//! [`options`](FuseOptions), `mount` (the folder), `greeting` (what is agreed with the kernel), `handover`
//! (what another process needs), `kept` (its mount holder, watched), `protocol` and `answer` (the codec,
//! pure),
//! `link` (the descriptor, shared), `worker` (what is asked), `ticket` and `seek` (requests in flight),
//! [`server`](FuseDoor), [`metrics`](FuseMetrics).
//!
//! A few worker threads read the same descriptor. None waits for the device: an answer goes from whichever
//! thread completes the request, with one system call. The page cache is left out (direct I/O), so all who
//! open the file see each other's writes at once, and a sync is the device's flush.
//!
//! Requests that a dead server took and did not answer are asked for again by its successor, from the kernel
//! (Linux 6.9). Some are then carried out twice. That is harmless: nobody was told of the first time, so
//! nobody built upon it; every request says the same thing again at the same place (bytes, zeroes, a flush);
//! and writes that overlap one that is not answered may win or lose by the device's contract (D8).
//!
//! Not here: more than one file, mappings that are shared for writing, who holds the mount (`mount_holder`).

mod answer;
mod greeting;
mod handover;
mod kept;
mod link;
mod metrics;
mod mount;
mod options;
mod protocol;
mod seek;
mod server;
#[cfg(test)]
mod tests;
mod ticket;
mod worker;

pub use metrics::FuseMetrics;
pub use options::{FuseOptions, MountHolderOptions};
pub use sawmill_sys::LoopDevice;
pub use server::FuseDoor;

/// See [`crate::fuzzing`].
pub(crate) fn fuzz_request(bytes: &[u8]) {
    use protocol::{Malformed, Operation, parse};
    let number = bytes.get(8..16).and_then(|number| number.try_into().ok()).map(u64::from_ne_bytes);
    match parse(bytes) {
        Ok(message) => {
            assert_eq!(Some(message.unique), number, "it is answered by its number");
            let within = |part: &[u8]| {
                part.is_empty() || bytes.as_ptr_range().contains(&part.as_ptr()) && part.len() <= bytes.len()
            };
            match message.operation {
                Operation::Write { payload, .. } => assert!(within(payload)),
                Operation::Lookup { name } => assert!(within(name) && !name.contains(&0)),
                _ => {}
            }
        }
        Err(Malformed::Arguments { unique, .. }) => assert_eq!(Some(unique), number),
        Err(Malformed::Head) => assert!(bytes.len() < 40, "the head is there"),
    }
}
