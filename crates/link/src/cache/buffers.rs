//! Buffers of pages, shared by all that read them.
//!
//! Invariants: a buffer with a second reference never changes (the compiler proves it), so no read
//! is torn, and no eviction, write or discard disturbs a copy under way. A spare buffer has one
//! reference; what it holds is never read before it is written. A thread keeps few of them.
//!
//! Not here: which bytes of a page are known (`page`), what a request copies (`task`).

use std::cell::Cell;
use std::sync::Arc;

use super::PAGE_BYTES;

/// The bytes of a page; empty if none of them was ever known.
pub(super) type PageBytes = Arc<[u8]>;

/// The most spare buffers of a thread: those of a write of 64 KiB.
const SPARE_PAGES_MAX: usize = 16;

thread_local! {
    /// Buffers that nobody uses: what this thread's last write replaced.
    static SPARE: Cell<Vec<PageBytes>> = const { Cell::new(Vec::new()) };
}

/// Takes this many buffers of any content.
pub(super) fn take(count: usize) -> Vec<PageBytes> {
    let mut spare = SPARE.try_with(Cell::take).unwrap_or_default();
    if spare.len() > count {
        let taken = spare.split_off(spare.len() - count);
        let _ = SPARE.try_with(|cell| cell.set(spare));
        return taken;
    }
    spare.resize_with(count, new_buffer);
    spare
}

/// A buffer of zeroes.
pub(super) fn new_buffer() -> PageBytes {
    std::iter::repeat_n(0, PAGE_BYTES).collect()
}

/// Takes buffers that nobody needs, or that others still use.
pub(super) fn give_back(mut buffers: Vec<PageBytes>) {
    // Who drops the last reference keeps the buffer; nobody can make a new one meanwhile.
    buffers.retain_mut(|bytes| bytes.len() == PAGE_BYTES && is_own(bytes));
    let mut spare = SPARE.try_with(Cell::take).unwrap_or_default();
    if spare.is_empty() {
        std::mem::swap(&mut spare, &mut buffers);
    } else {
        spare.append(&mut buffers);
    }
    spare.truncate(SPARE_PAGES_MAX);
    spare.shrink_to(SPARE_PAGES_MAX);
    let _ = SPARE.try_with(|cell| cell.set(spare));
}

/// Whether there is no other reference.
pub(super) fn is_own(bytes: &mut PageBytes) -> bool {
    Arc::strong_count(bytes) == 1 && Arc::get_mut(bytes).is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spare_pages() -> usize {
        let spare = SPARE.take();
        let pages = spare.len();
        SPARE.set(spare);
        pages
    }

    fn filled(byte: u8) -> Vec<PageBytes> {
        let mut buffers = take(1);
        Arc::make_mut(&mut buffers[0]).fill(byte);
        buffers
    }

    #[test]
    fn a_buffer_that_somebody_reads_is_not_used_again() {
        let buffers = filled(1);
        let reader = Arc::clone(&buffers[0]);
        give_back(buffers);
        let other = filled(2);
        assert!(reader.iter().all(|byte| *byte == 1), "the reader's bytes have changed");
        drop(reader);
        give_back(other);
        assert_eq!(spare_pages(), 1);
    }

    #[test]
    fn a_thread_keeps_few_spare_buffers_and_no_empty_ones() {
        give_back(take(1000));
        assert_eq!(spare_pages(), SPARE_PAGES_MAX);
        give_back(take(3));
        give_back(vec![PageBytes::default(); 9]);
        assert_eq!(spare_pages(), SPARE_PAGES_MAX);
        assert!(SPARE.take().capacity() <= SPARE_PAGES_MAX);
        give_back(vec![PageBytes::default(); 9]);
        assert_eq!(spare_pages(), 0);
        assert_eq!(take(9).len(), 9);
    }
}
