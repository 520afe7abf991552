//! What a volume may contain after any event, and what a read may return.
//!
//! The engine orders all writes; for a single client that is the order of submission. So after any
//! failure the volume is exactly the result of the first `k` operations, and each promise is a
//! lower bound of `k`:
//!
//! | event | bound |
//! |---|---|
//! | death of the process | *accepted*: every completed operation |
//! | power cut | *durable*: what a flush (or FUA) covered, by the mode; all an attach found |
//! | journal lost | *stored*: what a flush covered if flush means stored; all after a clean close |
//!
//! Invariants: the bounds only grow within a history; when a volume is opened, its history is cut
//! to what was found. Not here: what causes the events.

use std::fmt::Write as _;
use std::sync::Arc;

use sawmill_volume::FlushMode;
use sawmill_volume::limits::RECORD_PAYLOAD_BYTES_MAX;

use sawmill_testkit::mix;

/// The effect of an operation on the bytes of its range.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Stamps them with this number.
    Stamp(u64),
    /// They become zeroes.
    Zero,
    /// They become these bytes, from address 0 on: a rollback.
    Image(Arc<[u8]>),
}

/// One write, discard, write-zeroes or rollback.
#[derive(Clone, Debug)]
pub struct Operation {
    /// First byte.
    pub address: u64,
    /// Bytes.
    pub length: u64,
    /// Its effect.
    pub effect: Effect,
}

impl Operation {
    /// The byte this operation leaves at `address`, which is in its range.
    #[must_use]
    pub fn byte(&self, address: u64) -> u8 {
        match &self.effect {
            Effect::Stamp(stamp) => stamp_byte(*stamp, address),
            Effect::Zero => 0,
            Effect::Image(image) => image[address as usize],
        }
    }

    /// Writes what the operation leaves in all of its range.
    fn put(&self, into: &mut [u8]) {
        match &self.effect {
            Effect::Stamp(stamp) => put_stamp(into, *stamp, self.address),
            Effect::Zero => into.fill(0),
            Effect::Image(image) => {
                into.copy_from_slice(&image[self.address as usize..][..into.len()])
            }
        }
    }

    fn covers(&self, address: u64) -> bool {
        address >= self.address && address - self.address < self.length
    }
}

/// The byte that write `stamp` puts at `address`: never zero, so that it differs from a hole.
#[must_use]
pub fn stamp_byte(stamp: u64, address: u64) -> u8 {
    (stamp_word(stamp, address / 8) >> (address % 8 * 8)) as u8
}

fn stamp_word(stamp: u64, word: u64) -> u64 {
    mix(stamp.wrapping_mul(0x1_0001).wrapping_add(word)) | 0x0101_0101_0101_0101
}

/// The payload of a write.
#[must_use]
pub fn payload(stamp: u64, address: u64, length: u64) -> Vec<u8> {
    let mut bytes = vec![0; length as usize];
    put_stamp(&mut bytes, stamp, address);
    bytes
}

/// The same as [`stamp_byte`] for each byte, word by word.
fn put_stamp(into: &mut [u8], stamp: u64, address: u64) {
    let mut at = address;
    let mut rest = into;
    while !rest.is_empty() {
        let word = stamp_word(stamp, at / 8).to_le_bytes();
        let from = (at % 8) as usize;
        let (part, others) = rest.split_at_mut((8 - from).min(rest.len()));
        part.copy_from_slice(&word[from..from + part.len()]);
        at += part.len() as u64;
        rest = others;
    }
}

/// The loss at the end of a life, which determines the promises that hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loss {
    /// The process died; the journal and its memory survive.
    Process,
    /// Power was cut: memory is lost, and unsynced disk writes may be.
    Power,
    /// The journal is gone, or another machine attached without it.
    Journal,
}

/// A read in flight.
#[derive(Clone, Debug)]
pub struct ReadWatch {
    address: u64,
    /// The bytes of everything visible when it was submitted.
    before: Vec<u8>,
    /// Operations from this one on may be visible or not.
    from: usize,
}

/// The operations in order, and how many of them must have survived.
#[derive(Clone)]
pub struct Oracle {
    mode: FlushMode,
    /// The content before the first operation.
    base: Vec<u8>,
    operations: Vec<Operation>,
    /// `base` and the first `visible` operations.
    image: Vec<u8>,
    visible: usize,
    accepted: usize,
    durable: usize,
    stored: usize,
}

impl Oracle {
    /// An empty volume.
    #[must_use]
    pub fn new(size_bytes: u64, mode: FlushMode) -> Self {
        let base = vec![0; size_bytes as usize];
        let image = base.clone();
        Oracle {
            mode,
            base,
            operations: Vec::new(),
            image,
            visible: 0,
            accepted: 0,
            durable: 0,
            stored: 0,
        }
    }

    /// A volume that holds `base`, all of it stored.
    #[must_use]
    pub fn of(base: Vec<u8>, mode: FlushMode) -> Self {
        Oracle { image: base.clone(), base, ..Oracle::new(0, mode) }
    }

    /// An operation is submitted; returns its number. A long write counts as one operation for each
    /// of its records, because records are atomic; the number is that of the last one.
    pub fn submit(&mut self, address: u64, length: u64, effect: Effect) -> usize {
        let piece_max = match effect {
            Effect::Stamp(_) => RECORD_PAYLOAD_BYTES_MAX,
            Effect::Zero | Effect::Image(_) => length.max(1),
        };
        for done in (0..length).step_by(piece_max as usize) {
            let length = (length - done).min(piece_max);
            let effect = effect.clone();
            self.operations.push(Operation { address: address + done, length, effect });
        }
        self.operations.len() - 1
    }

    /// It has completed.
    pub fn complete(&mut self, number: usize) {
        self.accepted = self.accepted.max(number + 1);
        self.show_accepted();
    }

    /// It has completed, with FUA: it is as durable as a flush would make it.
    pub fn complete_fua(&mut self, number: usize) {
        self.accepted = self.accepted.max(number + 1);
        self.flushed(number + 1);
        self.show_accepted();
    }

    fn show_accepted(&mut self) {
        while self.visible < self.accepted {
            apply(&mut self.image, &self.operations[self.visible]);
            self.visible += 1;
        }
    }

    /// The last operation was refused, and will never be visible.
    pub fn take_back(&mut self, number: usize) {
        if number + 1 == self.operations.len() {
            self.operations.truncate(number);
        }
    }

    /// The number of operations that a flush submitted now must cover.
    #[must_use]
    pub fn flush_covers(&self) -> usize {
        self.accepted
    }

    /// A flush that covers `count` operations has completed.
    pub fn flushed(&mut self, count: usize) {
        match self.mode {
            FlushMode::Weak => {}
            FlushMode::Logged => self.durable = self.durable.max(count),
            FlushMode::Stored => {
                self.durable = self.durable.max(count);
                self.stored = self.stored.max(count);
            }
        }
    }

    /// The first `count` operations are on the journal's disk.
    pub fn note_logged(&mut self, count: usize) {
        self.durable = self.durable.max(count);
    }

    /// The first `count` operations are in the store.
    pub fn note_stored(&mut self, count: usize) {
        self.stored = self.stored.max(count);
        self.durable = self.durable.max(count);
    }

    /// The store was restored, and may have only the first `count` operations.
    pub fn note_restored(&mut self, count: usize) {
        self.stored = self.stored.min(count);
    }

    /// A read is submitted.
    #[must_use]
    pub fn watch_read(&self, address: u64, length: u64) -> ReadWatch {
        let range = address as usize..(address + length) as usize;
        ReadWatch { address, before: self.image[range].to_vec(), from: self.visible }
    }

    /// Checks that `bytes` is a legal result of the read.
    pub fn check_read(&self, watch: &ReadWatch, bytes: &[u8]) -> Result<(), String> {
        if bytes == watch.before {
            return Ok(());
        }
        for (index, (got, before)) in bytes.iter().zip(&watch.before).enumerate() {
            let address = watch.address + index as u64;
            let later = &self.operations[watch.from.min(self.operations.len())..];
            let may_be = |operation: &Operation| {
                operation.covers(address) && operation.byte(address) == *got
            };
            if got != before && !later.iter().any(may_be) {
                return Err(format!(
                    "a read of byte {address} returned {got:#04x}; it was {before:#04x} when the \
                     read began, and nothing wrote {got:#04x} since{}",
                    self.origin(address, *got)
                ));
            }
        }
        Ok(())
    }

    /// How many operations must have survived.
    #[must_use]
    pub fn bound(&self, loss: Loss) -> usize {
        match loss {
            Loss::Process => self.accepted,
            Loss::Power => self.durable,
            Loss::Journal => self.stored,
        }
    }

    /// Operations in this history.
    #[must_use]
    pub fn len(&self) -> usize {
        self.operations.len()
    }

    /// Whether nothing was written yet.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.operations.is_empty()
    }

    /// A volume was opened after `loss`: checks that `found` is legal, and cuts the history to it.
    /// What an attach found is durable.
    pub fn opened(&mut self, loss: Loss, found: &[u8]) -> Result<usize, String> {
        let least = self.bound(loss);
        let legal = self.longest_prefix(least, found);
        let Some(count) = legal else { return Err(self.explain(loss, least, found)) };
        self.operations.truncate(count);
        self.image.copy_from_slice(found);
        (self.visible, self.accepted, self.durable) = (count, count, count);
        self.stored = self.stored.min(count);
        Ok(count)
    }

    /// As [`opened`](Self::opened), from the store alone: what was found is stored, too.
    pub fn opened_from_store(&mut self, loss: Loss, found: &[u8]) -> Result<usize, String> {
        let count = self.opened(loss, found)?;
        self.stored = count;
        Ok(count)
    }

    /// The most operations, at least `least`, whose result is `found`.
    fn longest_prefix(&self, least: usize, found: &[u8]) -> Option<usize> {
        let mut image = self.image_after(least);
        let mut compared = ImageDifference::new(&image, found);
        let mut legal = compared.is_equal().then_some(least);
        for (number, operation) in self.operations.iter().enumerate().skip(least) {
            apply(&mut image, operation);
            compared.check_again(&image, found, operation);
            if compared.is_equal() {
                legal = Some(number + 1);
            }
        }
        legal
    }

    /// The content after the first `count` operations.
    fn image_after(&self, count: usize) -> Vec<u8> {
        if count == self.visible {
            return self.image.clone();
        }
        let mut image = self.base.clone();
        self.operations[..count].iter().for_each(|operation| apply(&mut image, operation));
        image
    }

    /// Checks a read of the store alone: `found` must be a prefix with all of the first `least`
    /// operations.
    pub fn check_view(&self, least: usize, found: &[u8]) -> Result<usize, String> {
        self.longest_prefix(least, found).ok_or_else(|| self.explain(Loss::Journal, least, found))
    }

    /// Checks a read of a replica: a prefix with all of the first `least` operations. Returns the
    /// shortest such prefix, which the replica must hold from now on.
    pub fn check_replica(&self, least: usize, found: &[u8]) -> Result<usize, String> {
        let mut image = self.image_after(least);
        let mut compared = ImageDifference::new(&image, found);
        for count in least..=self.operations.len() {
            if compared.is_equal() {
                return Ok(count);
            }
            if let Some(operation) = self.operations.get(count) {
                apply(&mut image, operation);
                compared.check_again(&image, found, operation);
            }
        }
        Err(self.explain(Loss::Journal, least, found))
    }

    fn origin(&self, address: u64, byte: u8) -> String {
        let found = self
            .operations
            .iter()
            .rposition(|operation| operation.covers(address) && operation.byte(address) == byte);
        found.map_or(String::new(), |number| format!(" (operation {number} did, before)"))
    }

    fn explain(&self, loss: Loss, least: usize, found: &[u8]) -> String {
        let mut text = format!(
            "after {loss:?} at least {least} of {} operations must be there, and the volume is no \
            prefix:",
            self.operations.len()
        );
        let (nearest, image) = self.nearest_prefix(least, found);
        let differs = image.iter().zip(found).enumerate().filter(|(_, (one, other))| one != other);
        for (at, (want, got)) in differs.take(4) {
            let origin = self.origin(at as u64, *got);
            let _ = write!(
                text,
                "\n  byte {at}: {want:#04x} after {nearest}, found {got:#04x}{origin}"
            );
        }
        text
    }

    /// The number of operations, at least `least`, whose result is nearest to `found`, and that
    /// result.
    fn nearest_prefix(&self, least: usize, found: &[u8]) -> (usize, Vec<u8>) {
        let distance =
            |image: &[u8]| image.iter().zip(found).filter(|(one, other)| one != other).count();
        let mut image = self.image_after(least);
        let mut nearest = (distance(&image), least, image.clone());
        for (number, operation) in self.operations.iter().enumerate().skip(least) {
            apply(&mut image, operation);
            let far = distance(&image);
            if far < nearest.0 {
                nearest = (far, number + 1, image.clone());
            }
        }
        (nearest.1, nearest.2)
    }
}

fn apply(image: &mut [u8], operation: &Operation) {
    operation.put(
        &mut image[operation.address as usize..(operation.address + operation.length) as usize],
    );
}

/// The parts in which two images differ, up to the length of the second.
struct ImageDifference {
    differs: Vec<bool>,
    count: usize,
}

impl ImageDifference {
    const PART_BYTES: usize = 256;

    fn new(one: &[u8], other: &[u8]) -> Self {
        let parts = one[..other.len()].chunks(Self::PART_BYTES).zip(other.chunks(Self::PART_BYTES));
        let differs: Vec<bool> = parts.map(|(one, other)| one != other).collect();
        let count = differs.iter().filter(|differs| **differs).count();
        ImageDifference { differs, count }
    }

    fn is_equal(&self) -> bool {
        self.count == 0
    }

    /// Compares again where the operation changed one of the images.
    fn check_again(&mut self, one: &[u8], other: &[u8], operation: &Operation) {
        let first = operation.address as usize / Self::PART_BYTES;
        let end = ((operation.address + operation.length) as usize).min(other.len());
        for part in first..end.div_ceil(Self::PART_BYTES) {
            let range = part * Self::PART_BYTES..other.len().min((part + 1) * Self::PART_BYTES);
            let differs = one[range.clone()] != other[range];
            self.count = self.count + usize::from(differs) - usize::from(self.differs[part]);
            self.differs[part] = differs;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An oracle after write 1 (0..600), write 2 (300..900), a flush of both, discard (100..200)
    /// and write 3 (0..50), of which the last has no answer.
    fn oracle(mode: FlushMode) -> Oracle {
        let mut oracle = Oracle::new(1024, mode);
        let first = oracle.submit(0, 600, Effect::Stamp(1));
        oracle.complete(first);
        let second = oracle.submit(300, 600, Effect::Stamp(2));
        oracle.complete(second);
        oracle.flushed(oracle.flush_covers());
        let third = oracle.submit(100, 100, Effect::Zero);
        oracle.complete(third);
        oracle.submit(0, 50, Effect::Stamp(3));
        oracle
    }

    /// The volume after the first `count` of them.
    fn after(count: usize) -> Vec<u8> {
        let oracle = oracle(FlushMode::Logged);
        let mut image = vec![0; 1024];
        oracle.operations[..count].iter().for_each(|operation| apply(&mut image, operation));
        image
    }

    #[test]
    fn every_prefix_beyond_the_bound_is_legal_and_no_shorter_one() {
        for (mode, loss, least) in [
            (FlushMode::Logged, Loss::Process, 3),
            (FlushMode::Logged, Loss::Power, 2),
            (FlushMode::Logged, Loss::Journal, 0),
            (FlushMode::Stored, Loss::Power, 2),
            (FlushMode::Stored, Loss::Journal, 2),
            (FlushMode::Weak, Loss::Process, 3),
            (FlushMode::Weak, Loss::Power, 0),
        ] {
            for count in 0..=4 {
                let opened = oracle(mode).opened(loss, &after(count));
                assert_eq!(
                    opened.ok(),
                    (count >= least).then_some(count),
                    "{mode:?} {loss:?} {count}"
                );
            }
        }
    }

    #[test]
    fn what_is_no_prefix_is_never_legal() {
        let mut illegal: Vec<(&str, Vec<u8>)> = Vec::new();
        for count in 2..=4 {
            for at in [0, 99, 150, 299, 300, 599, 899, 900, 1023] {
                let mut one_byte = after(count);
                one_byte[at] ^= 0x10;
                illegal.push(("one byte is wrong", one_byte));
            }
            let mut torn = after(count);
            torn[300..500].copy_from_slice(&payload(1, 300, 200));
            illegal.push(("an older write shows through", torn));
        }
        let mut hole = after(4);
        hole[100..200].copy_from_slice(&payload(1, 100, 100));
        illegal.push(("the last write without the discard before it", hole));
        let mut half = after(3);
        half[..25].copy_from_slice(&payload(3, 0, 25));
        illegal.push(("half a write", half));
        let mut misplaced = after(3);
        misplaced[..50].copy_from_slice(&payload(3, 512, 50));
        illegal.push(("a write at another place", misplaced));
        assert!(illegal.len() >= 30);
        for (what, image) in illegal {
            for loss in [Loss::Process, Loss::Power, Loss::Journal] {
                assert!(oracle(FlushMode::Logged).opened(loss, &image).is_err(), "{what}");
            }
        }
    }

    #[test]
    fn a_read_sees_what_was_there_or_what_came_since() {
        let mut oracle = oracle(FlushMode::Logged);
        let watch = oracle.watch_read(0, 400);
        assert!(oracle.check_read(&watch, &after(3)[..400]).is_ok());
        assert!(
            oracle.check_read(&watch, &after(4)[..400]).is_ok(),
            "a write under way may be seen"
        );
        assert!(oracle.check_read(&watch, &after(2)[..400]).is_err(), "the discard was completed");
        let later = oracle.submit(200, 100, Effect::Stamp(9));
        oracle.complete(later);
        let mut mixed = after(4);
        mixed[250..300].copy_from_slice(&payload(9, 250, 50));
        assert!(
            oracle.check_read(&watch, &mixed[..400]).is_ok(),
            "so may a part of one that came since"
        );
        let next = oracle.watch_read(200, 100);
        assert!(
            oracle.check_read(&next, &after(4)[200..300]).is_err(),
            "but not missed by the next read"
        );
    }

    #[test]
    fn what_an_attach_found_is_durable() {
        let mut oracle = oracle(FlushMode::Logged);
        assert_eq!(oracle.opened(Loss::Process, &after(4)), Ok(4));
        assert_eq!(oracle.bound(Loss::Power), 4);
        assert_eq!(oracle.bound(Loss::Journal), 0);
        assert!(oracle.opened(Loss::Power, &after(3)).is_err());
    }
}
