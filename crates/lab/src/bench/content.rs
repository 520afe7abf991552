//! The bytes that a replay writes, and thus what its reads must find. Every byte follows from the
//! number of its write and its address.
//!
//! Invariants: the newest write that was handed out determines a range. No request is handed out
//! that overlaps a write in flight, so the known content is what a read must find. The content of
//! ranges that were never written, or were discarded, is unknown.
//!
//! Not here: which requests are in flight (`flight`), their order and times (`replay`).

use sawmill_testkit::Dice;
use std::collections::BTreeMap;

/// The write number of zeroes.
const ZEROES: u64 = 0;

/// The write that determines a stretch of the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct StretchWrite {
    pub(super) address: u64,
    pub(super) length: u64,
    pub(super) write: u64,
}

/// The content of the disk, as far as this replay knows it.
#[derive(Default)]
pub(super) struct Content {
    /// Start of a stretch: its end and its write. Stretches do not overlap.
    stretches: BTreeMap<u64, (u64, u64)>,
    seed: u64,
    writes: u64,
}

impl Content {
    /// Starts with nothing known. Each `seed` gives other bytes, so data of an earlier replay
    /// cannot pass for ours.
    pub(super) fn new(seed: u64) -> Self {
        Content { seed, ..Content::default() }
    }

    /// The bytes of the next write, and their number.
    pub(super) fn write(&mut self, address: u64, length: u64) -> Vec<u8> {
        self.writes += 1;
        self.set(address, length, Some(self.writes));
        bytes_of(self.seed, self.writes, address, length as usize)
    }

    pub(super) fn zero(&mut self, address: u64, length: u64) {
        self.set(address, length, Some(ZEROES));
    }

    /// The range reads as zeroes or as before from now on: its content is unknown.
    pub(super) fn discard(&mut self, address: u64, length: u64) {
        // Unknown and not zero: a discarded range may keep its bytes (D9).
        self.set(address, length, None);
    }

    /// What is known of a range, in address order.
    pub(super) fn known_writes(&self, address: u64, length: u64) -> Vec<StretchWrite> {
        let end = address + length;
        let before = self.stretches.range(..address).next_back();
        let within = self.stretches.range(address..end);
        let cut = |(start, (stop, write)): (&u64, &(u64, u64))| {
            let (from, to) = ((*start).max(address), (*stop).min(end));
            (from < to).then(|| StretchWrite { address: from, length: to - from, write: *write })
        };
        before.into_iter().chain(within).filter_map(cut).collect()
    }

    /// Everything that is known.
    pub(super) fn all(&self) -> Vec<StretchWrite> {
        self.known_writes(0, u64::MAX)
    }

    fn set(&mut self, address: u64, length: u64, write: Option<u64>) {
        let end = address + length;
        for StretchWrite { address: from, length, .. } in self.known_writes(address, length) {
            // The stretch may reach out of the range on both sides. What does so keeps its older
            // write.
            let Some((start, (stop, old))) = self
                .stretches
                .range(..=from)
                .next_back()
                .map(|(start, stretch)| (*start, *stretch))
            else {
                continue;
            };
            self.stretches.remove(&start);
            if start < from {
                self.stretches.insert(start, (from, old));
            }
            if from + length < stop {
                self.stretches.insert(from + length, (stop, old));
            }
        }
        if let Some(write) = write {
            self.stretches.insert(address, (end, write));
        }
    }
}

/// The first byte that differs from what is known of the range read at `address`: its address, and
/// the write that should be there.
pub(super) fn mismatch(
    seed: u64,
    writes: &[StretchWrite],
    address: u64,
    read: &[u8],
) -> Option<(u64, u64)> {
    writes.iter().find_map(|known| {
        let start = (known.address - address) as usize;
        let found = &read[start..start + known.length as usize];
        let want = bytes_of(seed, known.write, known.address, found.len());
        let at = found.iter().zip(&want).position(|(one, other)| one != other)?;
        Some((known.address + at as u64, known.write))
    })
}

/// The bytes that write number `write` puts at an address.
fn bytes_of(seed: u64, write: u64, address: u64, length: usize) -> Vec<u8> {
    if write == ZEROES {
        return vec![0; length];
    }
    // By the absolute address, so that the bytes of any part of a write can be computed alone,
    // whatever a read asks for.
    let skipped = (address % 8) as usize;
    let first = address / 8;
    let words = (skipped + length).div_ceil(8) as u64;
    let word = |index: u64| {
        Dice::new(seed ^ Dice::new(write).word() ^ (first + index)).word().to_le_bytes()
    };
    let mut bytes: Vec<u8> = (0..words).flat_map(word).skip(skipped).collect();
    bytes.truncate(length);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_write_tells_each_byte() {
        let mut content = Content::new(7);
        let mut model = vec![None; 4000];
        let mut state = 1_u64;
        for number in 1..400 {
            state = Dice::new(state).word();
            let (address, length) = (state % 3900, 1 + (state >> 20) % 100);
            let write = match state >> 62 {
                0 => {
                    content.discard(address, length);
                    None
                }
                1 => {
                    content.zero(address, length);
                    Some(ZEROES)
                }
                _ => {
                    content.write(address, length);
                    Some(content.writes)
                }
            };
            model[address as usize..(address + length) as usize].fill(write);
            let known = content.all();
            let disjoint =
                known.windows(2).all(|pair| pair[0].address + pair[0].length <= pair[1].address);
            assert!(disjoint, "after {number}");
            let mut contents = vec![None; 4000];
            for stretch in known {
                contents[stretch.address as usize..(stretch.address + stretch.length) as usize]
                    .fill(Some(stretch.write));
            }
            assert_eq!(contents, model, "after {number}");
        }
    }

    #[test]
    fn a_byte_of_another_write_address_or_replay_is_found() {
        let mut content = Content::new(7);
        let old = content.write(1003, 5000);
        let new = content.write(2000, 700);
        let mut read = old.clone();
        read[997..1697].copy_from_slice(&new);
        let writes = content.known_writes(1003, 5000);
        assert_eq!(mismatch(7, &writes, 1003, &read), None);
        assert_eq!(mismatch(7, &writes, 1003, &old), Some((2000, 2)), "the write before");
        read[4321] ^= 1;
        assert_eq!(mismatch(7, &writes, 1003, &read), Some((1003 + 4321, 1)), "a flipped bit");
        read[4321] ^= 1;
        assert!(mismatch(8, &writes, 1003, &read).is_some(), "another replay");
        read.rotate_left(1);
        assert!(mismatch(7, &writes, 1003, &read).is_some(), "another address");
        assert!(
            content.known_writes(0, 1003).is_empty() && content.known_writes(6003, 99).is_empty()
        );
    }
}
