//! Reused buffers that segments are built in: a fresh one costs a page fault per 4 KiB and a pass
//! of zeroing.
//!
//! Invariants: the taker of a buffer writes every byte it asked for; what an earlier segment left
//! is not cleared. No more are kept than were on loan at once: a segment in flight has one, and the
//! next segment and what it reads back have one each.

use std::sync::Arc;

use parking_lot::Mutex;
use sawmill_sys::AlignedBytes;

use crate::limits;

/// A pool of buffers for building segments. Clones share it.
#[derive(Clone, Default)]
pub(crate) struct Buffers {
    /// Bounded by `limits::UPLOADS_MAX`, those beyond it and the two.
    spare: Arc<Mutex<Vec<AlignedBytes>>>,
}

/// A buffer on loan: its first `length` bytes.
pub(crate) struct Buffer {
    bytes: Option<AlignedBytes>,
    length: usize,
    home: Buffers,
}

impl Buffers {
    /// A block-aligned buffer of `length` bytes with any content.
    pub(crate) fn take(&self, length: usize) -> Buffer {
        let mut spare = self.spare.lock();
        let fitting = spare.iter().position(|bytes| bytes.len() >= length);
        let bytes = fitting.map(|index| spare.swap_remove(index));
        let bytes = bytes.unwrap_or_else(|| {
            AlignedBytes::zeroed(length.next_multiple_of(limits::BUFFER_STEP_BYTES))
        });
        Buffer { bytes: Some(bytes), length, home: self.clone() }
    }

    /// Gives the memory of idle buffers back.
    pub(crate) fn clear(&self) {
        self.spare.lock().clear();
    }
}

impl Buffer {
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        match &mut self.bytes {
            Some(bytes) => &mut bytes[..self.length],
            None => &mut [],
        }
    }
}

impl AsRef<[u8]> for Buffer {
    fn as_ref(&self) -> &[u8] {
        self.bytes.as_ref().map_or(&[], |bytes| &bytes[..self.length])
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.home.spare.lock().extend(self.bytes.take());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_come_back_and_fit_what_is_asked() {
        let buffers = Buffers::default();
        let mut first = buffers.take(5000);
        first.bytes_mut().fill(1);
        let address = first.as_ref().as_ptr();
        drop(first);
        let again = buffers.take(6000);
        assert_eq!((again.as_ref().as_ptr(), again.as_ref().len()), (address, 6000));
        let larger = buffers.take(100_000);
        assert_eq!(larger.as_ref().len(), 100_000);
        drop((again, larger));
        assert_eq!(buffers.spare.lock().len(), 2);
        drop((buffers.take(1), buffers.take(1)));
        assert_eq!(buffers.spare.lock().len(), 2, "no more than were on loan at once");
        buffers.clear();
        assert_eq!(buffers.spare.lock().len(), 0);
    }
}
