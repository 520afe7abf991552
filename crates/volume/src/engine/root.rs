//! A durable checkpoint's root, kept for as long as cuts may start from it. Its segments are
//! packed: they are wanted again only for a copy of the root, and unpacked they would take as much
//! memory as the table of segments itself.
//!
//! Invariant: unpacking returns exactly what was packed.
//!
//! Not here: when a root is copied (`past`), and the bytes of the copy
//! (`sawmill_format::checkpoint`).

use std::ops::Deref;

use sawmill_format::checkpoint::{Checkpoint, SegmentEntry};

/// A root whose segments are packed.
pub(super) struct PackedRoot {
    /// Without segments.
    facts: Checkpoint,
    packed_segments: Box<[u8]>,
}

impl PackedRoot {
    pub(super) fn of(mut root: Checkpoint) -> Self {
        let packed_segments = pack(&root.segments);
        root.segments = Vec::new();
        PackedRoot { facts: root, packed_segments }
    }

    /// The root as it was.
    pub(super) fn whole(&self) -> Checkpoint {
        Checkpoint { segments: unpack(&self.packed_segments), ..self.facts.clone() }
    }
}

/// All but the segments, which the target does not have.
impl Deref for PackedRoot {
    type Target = Checkpoint;

    fn deref(&self) -> &Checkpoint {
        &self.facts
    }
}

/// The numbers of an entry as differences: from the entry before, and from one another. Most of
/// them are small or zero.
fn pack(segments: &[SegmentEntry]) -> Box<[u8]> {
    // Twelve bytes for each are usual.
    let mut bytes = Vec::with_capacity(12 * segments.len());
    let (mut sequence, mut epoch, mut wall_unix_ms) = (0, 0, 0);
    for entry in segments {
        put(&mut bytes, (entry.sequence.wrapping_sub(sequence) << 1) | u64::from(entry.dead));
        put_signed(&mut bytes, entry.epoch.wrapping_sub(epoch));
        put_signed(&mut bytes, entry.wall_unix_ms.wrapping_sub(wall_unix_ms));
        put(&mut bytes, entry.data_bytes);
        put_signed(&mut bytes, entry.data_bytes.wrapping_sub(entry.live_bytes));
        put(&mut bytes, u64::from(entry.header_bytes));
        let sum = entry.data_bytes.wrapping_add(u64::from(entry.header_bytes));
        put_signed(&mut bytes, entry.object_bytes.wrapping_sub(sum));
        (sequence, epoch, wall_unix_ms) = (entry.sequence, entry.epoch, entry.wall_unix_ms);
    }
    bytes.into()
}

fn unpack(mut bytes: &[u8]) -> Vec<SegmentEntry> {
    let bytes = &mut bytes;
    let mut segments = Vec::new();
    let (mut sequence, mut epoch, mut wall_unix_ms) = (0u64, 0u64, 0u64);
    while !bytes.is_empty() {
        let first = take(bytes);
        sequence = sequence.wrapping_add(first >> 1);
        epoch = epoch.wrapping_add(take_signed(bytes));
        wall_unix_ms = wall_unix_ms.wrapping_add(take_signed(bytes));
        let data_bytes = take(bytes);
        let live_bytes = data_bytes.wrapping_sub(take_signed(bytes));
        let header_bytes = take(bytes) as u32;
        let sum = data_bytes.wrapping_add(u64::from(header_bytes));
        let object_bytes = sum.wrapping_add(take_signed(bytes));
        segments.push(SegmentEntry {
            sequence,
            epoch,
            data_bytes,
            live_bytes,
            wall_unix_ms,
            header_bytes,
            object_bytes,
            dead: first & 1 == 1,
        });
    }
    segments
}

/// Seven bits a byte, the lowest first.
fn put(bytes: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        bytes.push(number as u8 | 0x80);
        number >>= 7;
    }
    bytes.push(number as u8);
}

/// A difference: its sign in the lowest bit.
fn put_signed(bytes: &mut Vec<u8>, difference: u64) {
    let signed = difference.cast_signed();
    put(bytes, ((signed << 1) ^ (signed >> 63)).cast_unsigned());
}

fn take(bytes: &mut &[u8]) -> u64 {
    let (mut number, mut shift) = (0, 0);
    while let Some((byte, rest)) = bytes.split_first() {
        *bytes = rest;
        number |= u64::from(byte & 0x7f) << shift;
        shift += 7;
        if byte & 0x80 == 0 {
            break;
        }
    }
    number
}

fn take_signed(bytes: &mut &[u8]) -> u64 {
    let number = take(bytes);
    (number >> 1) ^ (number & 1).wrapping_neg()
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use sawmill_testkit::Dice;

    use super::*;

    fn entry(sequence: u64, dice: &mut Dice) -> SegmentEntry {
        // Some of every length, up to the longest.
        let mut number = || dice.word() >> dice.below(64);
        SegmentEntry {
            sequence,
            epoch: number(),
            data_bytes: number(),
            live_bytes: number(),
            wall_unix_ms: number(),
            header_bytes: number() as u32,
            object_bytes: number(),
            dead: number() % 2 == 1,
        }
    }

    #[test]
    fn whatever_is_packed_comes_back() {
        let mut dice = Dice::seeded("the segments of a packed root");
        for _ in 0..2000 {
            let mut sequence = 0;
            let count = dice.below(8);
            let segments: Vec<_> = (0..count)
                .map(|_| {
                    sequence += 1 + dice.below(1 << 50);
                    entry(sequence, &mut dice)
                })
                .collect();
            assert_eq!(unpack(&pack(&segments)), segments);
        }
    }

    #[test]
    fn a_usual_segment_takes_at_most_sixteen_bytes() {
        let entry = |number: u64| SegmentEntry {
            sequence: number,
            epoch: 3_000_000_000,
            data_bytes: 1 << 20,
            live_bytes: (1 << 20) - number % 4 * 4096,
            wall_unix_ms: 1_790_000_000_000 + 900 * number,
            header_bytes: 8192,
            object_bytes: (1 << 20) + 8192,
            dead: false,
        };
        let segments: Vec<_> = (1..=1000).map(entry).collect();
        assert!(pack(&segments).len() <= 16 * segments.len());
    }
}
