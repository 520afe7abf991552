//! The streams that a target accepted, with their quotas.
//!
//! A stream is a stranger's until it carries a packet of a connection. A stranger has a limited
//! time for that and a share of the table per source; when a new stream arrives, strangers are
//! evicted first.
//!
//! Invariants: the number of streams is bounded; a stream that has carried such a packet is never
//! evicted. Not here: threads and sockets (`crate::threads`).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::clock::SECOND;
use crate::source::PacketSource;

/// The longest life of a stranger's stream.
pub(crate) const STRANGER_NS_MAX: u64 = 10 * SECOND;
/// The most streams at a time, over all connections.
pub(crate) const STREAMS_MAX: usize = 256;
/// The most strangers of one source.
const OF_SOURCE_MAX: usize = 64;

/// One stream, with what ends it.
pub(crate) struct Stream<T> {
    pub(crate) threads: T,
    pub(crate) source: PacketSource,
    /// Set when it has carried a packet of a connection.
    pub(crate) is_known: Arc<AtomicBool>,
}

/// All streams, the oldest first.
pub(crate) struct Streams<T>(Vec<Stream<T>>);

impl<T> Default for Streams<T> {
    fn default() -> Self {
        Streams(Vec::new())
    }
}

impl<T> Streams<T> {
    /// Removes streams that have ended.
    pub(crate) fn retain(&mut self, is_alive: impl Fn(&T) -> bool) {
        self.0.retain(|stream| is_alive(&stream.threads));
    }

    /// Makes room for a stream from `source`. Returns an evicted stream, which the caller
    /// must close; `Err` if the table is full.
    pub(crate) fn make_room(&mut self, source: PacketSource) -> Result<Option<Stream<T>>, ()> {
        let strangers = |of: PacketSource| {
            let is = move |stream: &&Stream<T>| stream.source == of && stream.is_stranger();
            self.0.iter().filter(is).count()
        };
        let goes = if strangers(source) >= OF_SOURCE_MAX {
            Some(source)
        } else if self.0.len() >= STREAMS_MAX {
            let all =
                self.0.iter().filter(|stream| stream.is_stranger()).map(|stream| stream.source);
            Some(all.max_by_key(|source| strangers(*source)).ok_or(())?)
        } else {
            None
        };
        let index = goes.and_then(|goes| {
            self.0.iter().position(|stream| stream.source == goes && stream.is_stranger())
        });
        Ok(index.map(|index| self.0.remove(index)))
    }

    pub(crate) fn push(&mut self, stream: Stream<T>) {
        self.0.push(stream);
    }

    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }
}

impl<T> Stream<T> {
    fn is_stranger(&self) -> bool {
        !self.is_known.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn from(last: u8) -> PacketSource {
        PacketSource::of_ip([10, 0, 0, last].into())
    }

    fn stream(number: usize, source: PacketSource, is_known: bool) -> Stream<usize> {
        Stream { threads: number, source, is_known: Arc::new(is_known.into()) }
    }

    #[test]
    fn a_source_loses_its_own_strangers_first_and_a_known_stream_stays() {
        let mut streams = Streams::default();
        streams.push(stream(0, from(1), true));
        for number in 1..=OF_SOURCE_MAX {
            assert!(streams.make_room(from(1)).expect("there is room").is_none());
            streams.push(stream(number, from(1), false));
        }
        assert!(streams.make_room(from(2)).expect("there is room").is_none(), "others have room");
        let evicted =
            streams.make_room(from(1)).expect("it makes room for itself").expect("one goes");
        assert_eq!(evicted.threads, 1, "the oldest stranger");
    }

    #[test]
    fn a_full_table_takes_from_the_source_with_the_most_strangers_and_from_no_other() {
        let mut streams = Streams::default();
        let last = |number: usize| from((number % 8) as u8);
        (0..STREAMS_MAX - 1).for_each(|number| streams.push(stream(number, last(number), true)));
        streams.push(stream(1000, from(9), false));
        let evicted = streams.make_room(from(10)).expect("a stranger goes").expect("one goes");
        assert_eq!(evicted.threads, 1000);
        streams.push(stream(1001, from(10), true));
        assert!(streams.make_room(from(10)).is_err(), "none there is a stranger");
    }
}
