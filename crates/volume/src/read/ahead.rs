//! Reading ahead: runs of reads that follow each other get the next part of the address space
//! fetched before they ask, within a budget.
//!
//! Invariant: a stream asks for each range once, at most `ahead_bytes` beyond its reader and never
//! beyond the end of the volume.
//!
//! Not here: frames that follow in the same segment, whatever their addresses (`fetch` takes them
//! along).

use std::sync::Arc;

use parking_lot::Mutex;
use sawmill_store::Class;

use super::ReadContext;
use super::fetch::{self, Waiter};
use super::{ReadSource, resolve};
use crate::counters::add;
use crate::stored_data::FrameName;

/// Sequential readers told apart.
const STREAMS_MAX: usize = 16;
/// Reads in a row before anything is fetched ahead.
const ROW_MIN: u32 = 2;

#[derive(Clone, Copy)]
struct Stream {
    next: u64,
    fetched_to: u64,
    row: u32,
}

/// The sequential readers seen lately, newest last.
pub(crate) struct Streams {
    streams: Mutex<Vec<Stream>>,
    pub(crate) ahead_bytes: u64,
}

impl Streams {
    pub(crate) fn new(ahead_bytes: u64) -> Self {
        Streams { streams: Mutex::default(), ahead_bytes }
    }

    /// Notes a read and returns the range to fetch ahead, if any.
    fn note(&self, address: u64, length: u64, size_bytes: u64) -> Option<(u64, u64)> {
        if self.ahead_bytes == 0 {
            return None;
        }
        let end = address + length;
        let mut streams = self.streams.lock();
        let Some(index) = streams.iter().position(|stream| stream.next == address) else {
            if streams.len() == STREAMS_MAX {
                streams.remove(0);
            }
            streams.push(Stream { next: end, fetched_to: end, row: 0 });
            return None;
        };
        let mut stream = streams.remove(index);
        stream.next = end;
        stream.row += 1;
        let mut range = None;
        // Refilled when half is used up, so that requests stay large.
        if stream.row >= ROW_MIN && stream.fetched_to < end + self.ahead_bytes / 2 {
            let from = stream.fetched_to.max(end);
            let to = (end + self.ahead_bytes).min(size_bytes);
            if from < to {
                stream.fetched_to = to;
                range = Some((from, to - from));
            }
        }
        streams.push(stream);
        range
    }
}

/// Notes a read that touched stored data, and fetches ahead of it if it is one of a row.
pub(super) fn note(context: &Arc<ReadContext>, address: u64, length: u64) {
    let size_bytes = context.attachment.geometry.now().size_bytes;
    if let Some((from, length)) = context.streams.note(address, length, size_bytes) {
        fetch_range(context, from, length);
    }
}

/// Fetches the stored frames of a range that are not cached, in the background.
pub(super) fn fetch_range(context: &Arc<ReadContext>, address: u64, length: u64) {
    if !context.stored.has_cache() {
        return;
    }
    let mut frames: Vec<(FrameName, Option<Waiter>)> = Vec::new();
    for piece in resolve(context, address, length) {
        let ReadSource::Frame { name, .. } = piece.source else { continue };
        let Some((cache, key)) = context.stored.cached(name) else { continue };
        if !cache.contains(key) && !frames.iter().any(|(other, _)| *other == name) {
            frames.push((name, None));
        }
    }
    add(&context.attachment.counters.prefetched_frames, frames.len() as u64);
    fetch::fetch(context, frames, Class::Background);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_reads_in_a_row_are_fetched_ahead_and_never_past_the_end() {
        let streams = Streams::new(1 << 20);
        assert_eq!(streams.note(0, 4096, 1 << 21), None);
        assert_eq!(streams.note(1 << 19, 4096, 1 << 21), None);
        assert_eq!(streams.note(4096, 4096, 1 << 21), None);
        assert_eq!(streams.note(8192, 4096, 1 << 21), Some((12288, 1 << 20)));
        assert_eq!(streams.note(12288, 4096, 1 << 21), None, "enough is on its way");
        let end = (1 << 21) - 4096;
        streams.note(end - 8192, 4096, 1 << 21);
        streams.note(end - 4096, 4096, 1 << 21);
        assert_eq!(streams.note(end, 4096, 1 << 21), None);
    }

    #[test]
    fn a_disabled_budget_fetches_nothing() {
        let streams = Streams::new(0);
        for block in 0..10 {
            assert_eq!(streams.note(block * 4096, 4096, 1 << 21), None);
        }
    }
}
