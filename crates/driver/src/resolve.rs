//! Ignores late writes (BUSE thesis, section 4.3.2): chunks of several queues may be applied in any
//! order, and by several threads, and every byte ends with what was written last.
//!
//! Invariants: two writes of one collision area are never applied at the same time. A byte is never
//! written with an older number after a newer one. The writes of a chunk are remembered until
//! everything older is answered: until its `horizon` is below the `floor`
//! (`docs/format/write_chunk.md`). So memory is bounded by what is in flight.
//!
//! Not here: the source of the numbers (`batch::areas`).

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use parking_lot::Mutex;

use crate::batch::chunk::ChunkEntry;

const SHARDS: usize = 64;

/// A write that was applied.
struct AppliedWrite {
    start: u64,
    end: u64,
    write_number: u64,
    /// The horizon of its chunk.
    horizon: u64,
}

type Areas = HashMap<u64, Vec<AppliedWrite>>;

/// What a chunk states about the ordinals of other chunks.
#[derive(Clone, Copy, Debug)]
pub struct OrderBounds {
    /// The last ordinal that the host had given when it closed this chunk.
    pub horizon: u64,
    /// All chunks with smaller ordinals are answered.
    pub floor: u64,
}

/// Applies the chunks of a driver in any order. One for each device; threads share it.
pub struct Resolver {
    area_bytes: u64,
    shards: Box<[Mutex<Areas>]>,
    remembered: Mutex<RememberedAreas>,
}

#[derive(Default)]
struct RememberedAreas {
    /// Areas that chunks wrote to, by the horizon of the chunk.
    areas: BTreeMap<u64, Vec<u64>>,
    floor: u64,
}

impl Resolver {
    /// A resolver for chunks of a device with collision areas of this size.
    #[must_use]
    pub fn new(area_bytes: u64) -> Self {
        let shards = (0..SHARDS).map(|_| Mutex::default()).collect();
        Resolver { area_bytes, shards, remembered: Mutex::default() }
    }

    /// Applies the entries of a chunk with these bounds of order, and forgets what is no longer
    /// needed. `write` gets the first byte of each piece on the disk, and its bytes.
    ///
    /// # Errors
    /// The first error of `write`; that entry and those after it count as not applied.
    pub fn apply_chunk<'a, E>(
        &self,
        entries: impl Iterator<Item = (ChunkEntry, &'a [u8])>,
        bounds: OrderBounds,
        mut write: impl FnMut(u64, &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let OrderBounds { horizon, floor } = bounds;
        // First, so that memory shrinks before it grows.
        self.forget_below(floor);
        let mut areas = Vec::new();
        let mut outcome = Ok(());
        for (entry, data) in entries {
            areas.push(entry.address / self.area_bytes);
            outcome = self.apply_until(&entry, data, horizon, &mut write);
            if outcome.is_err() {
                break;
            }
        }
        // Also after a failure: the entries before it were applied and are remembered.
        self.remembered.lock().areas.entry(horizon).or_default().append(&mut areas);
        outcome
    }

    /// Applies those parts of an entry that nothing newer has written, and remembers it without a
    /// time limit.
    ///
    /// # Errors
    /// The error of `write`; the entry counts as not applied.
    pub fn apply<E>(
        &self,
        entry: &ChunkEntry,
        data: &[u8],
        mut write: impl FnMut(u64, &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        self.apply_until(entry, data, u64::MAX, &mut write)
    }

    fn apply_until<E>(
        &self,
        entry: &ChunkEntry,
        data: &[u8],
        horizon: u64,
        write: &mut impl FnMut(u64, &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let area = entry.address / self.area_bytes;
        // Held while the pieces are written: of two writes to one area, the second must find the
        // first in the list.
        let mut shard = self.shard(area).lock();
        let applied = shard.entry(area).or_default();
        let end = entry.address + entry.length;
        let mut free: Vec<Range<u64>> = std::iter::once(entry.address..end).collect();
        for newer in applied.iter().filter(|applied| applied.write_number > entry.write_number) {
            free =
                free.into_iter().flat_map(|part| without(part, newer.start..newer.end)).collect();
        }
        for Range { start, end } in free {
            let at = (start - entry.address) as usize;
            write(start, &data[at..at + (end - start) as usize])?;
        }
        applied.push(AppliedWrite {
            start: entry.address,
            end,
            write_number: entry.write_number,
            horizon,
        });
        Ok(())
    }

    /// All chunks with ordinals below `floor` are answered.
    fn forget_below(&self, floor: u64) {
        let mut remembered = self.remembered.lock();
        if floor <= remembered.floor {
            return;
        }
        remembered.floor = floor;
        let newer = remembered.areas.split_off(&floor);
        let settled = std::mem::replace(&mut remembered.areas, newer);
        drop(remembered);
        for area in settled.into_values().flatten() {
            let mut shard = self.shard(area).lock();
            if let Some(applied) = shard.get_mut(&area) {
                applied.retain(|applied| applied.horizon >= floor);
                if applied.is_empty() {
                    shard.remove(&area);
                }
            }
        }
    }

    /// The number of remembered writes.
    #[must_use]
    pub fn remembered(&self) -> usize {
        self.shards.iter().map(|shard| shard.lock().values().map(Vec::len).sum::<usize>()).sum()
    }

    fn shard(&self, area: u64) -> &Mutex<Areas> {
        &self.shards[(area % SHARDS as u64) as usize]
    }
}

/// The parts of a range that are outside another one.
fn without(part: Range<u64>, hole: Range<u64>) -> impl Iterator<Item = Range<u64>> {
    let before = part.start..part.end.min(hole.start);
    let after = part.start.max(hole.end)..part.end;
    [before, after].into_iter().filter(|part| !part.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bounds(horizon: u64, floor: u64) -> OrderBounds {
        OrderBounds { horizon, floor }
    }

    struct World {
        resolver: Resolver,
        disk: [u8; 8192],
    }

    impl World {
        fn new() -> Self {
            World { resolver: Resolver::new(4096), disk: [0; 8192] }
        }

        /// Applies a chunk of one entry of `length` bytes of `value`.
        fn chunk(&mut self, place: (u64, u64), write_number: u64, value: u8, bounds: OrderBounds) {
            let entry = ChunkEntry { address: place.0, length: place.1, write_number };
            let data = vec![value; place.1 as usize];
            let disk = &mut self.disk;
            let write = |at: u64, data: &[u8]| -> Result<(), ()> {
                disk[at as usize..at as usize + data.len()].copy_from_slice(data);
                Ok(())
            };
            self.resolver.apply_chunk([(entry, &data[..])].into_iter(), bounds, write).unwrap();
        }
    }

    #[test]
    fn a_late_write_changes_only_what_nothing_newer_wrote() {
        let mut world = World::new();
        world.chunk((512, 1024), 2, 2, bounds(2, 1));
        world.chunk((0, 2048), 1, 1, bounds(2, 1));
        assert_eq!(
            (world.disk[0], world.disk[512], world.disk[1535], world.disk[1536]),
            (1, 2, 2, 1)
        );
    }

    #[test]
    fn a_write_is_forgotten_when_its_horizon_lies_below_the_floor_and_not_before() {
        let mut world = World::new();
        // Chunk 2 is newer than what chunk 1 has; when it was closed, chunk 3 had been opened.
        world.chunk((0, 512), 2, 2, bounds(3, 1));
        world.chunk((4096, 512), 1, 3, bounds(3, 3));
        assert_eq!(
            world.resolver.remembered(),
            2,
            "chunk 3 is not answered: it may hold something older"
        );
        world.chunk((0, 512), 1, 1, bounds(3, 3));
        assert_eq!(world.disk[0], 2, "what is late is known to be late");
        world.chunk((4096, 512), 2, 4, bounds(4, 4));
        assert_eq!(world.resolver.remembered(), 1, "everything up to chunk 3 is answered");
    }

    #[test]
    fn an_older_floor_that_comes_late_brings_nothing_back() {
        let mut world = World::new();
        world.chunk((0, 512), 1, 1, bounds(1, 1));
        world.chunk((0, 512), 2, 2, bounds(2, 2));
        world.chunk((0, 512), 3, 3, bounds(3, 1));
        assert_eq!(world.resolver.remembered(), 2);
        for n in 4..1000 {
            world.chunk((n % 8 * 512, 512), n, 4, bounds(n, n - 1));
        }
        assert!(world.resolver.remembered() <= 3, "memory is bounded by what is on its way");
    }

    #[test]
    fn a_write_that_failed_does_not_hide_an_older_one() {
        let resolver = Resolver::new(4096);
        let entry = |write_number| ChunkEntry { address: 0, length: 512, write_number };
        let fails = |_: u64, _: &[u8]| Err(());
        let chunk = |write_number| [(entry(write_number), &[1u8; 512][..])].into_iter();
        assert!(resolver.apply_chunk(chunk(2), bounds(2, 1), fails).is_err());
        let mut written = 0;
        let write = |_: u64, data: &[u8]| {
            written += data.len();
            Ok::<(), ()>(())
        };
        resolver.apply_chunk(chunk(1), bounds(2, 1), write).unwrap();
        assert_eq!(written, 512);
    }
}
