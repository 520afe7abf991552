//! Write-backs: which dirty pages are written together, in which form, and the meaning of their
//! outcome.
//!
//! A write-back takes wanted pages in the order of addresses. A row of whole pages becomes a plain
//! write; so does anything that turns out to be one range. Everything else is packed (BASS §3.1,
//! §3.2).
//!
//! Invariants: a page has at most one write-back in flight, so newer bytes arrive later. A packed
//! payload is a copy (BASS's temporary page), made without the lock. Until then, and as long as a
//! plain write-back is in flight, the pages' bytes are shared: a write to such a page in the
//! meantime gives it other ones, so bytes in flight do not change. A failed write-back
//! leaves its bytes dirty, fails all requests that wait for them, and is retried by the next
//! request that needs them: a flush, a tick, a writer without room.
//!
//! Not here: which pages are wanted (`write`, `push`, `change`), the bytes of a packed write
//! (`sawmill_format::packed_write`).

use std::ops::Range;
use std::sync::Weak;
use std::sync::atomic::Ordering::Relaxed;

use sawmill_device::{Exchange, Flags, Operation, Outcome, Request};
use sawmill_format::packed_write::{self, at, entry_at};

use super::{CacheState, Work};
use crate::cache::buffers::{self, PageBytes};
use crate::cache::page::NEVER;
use crate::cache::{OutcomeListener, PAGE_BYTES};

/// A row of at least this many whole pages is written without the partial ones around it.
const PLAIN_PAGES_MIN: usize = 4;

/// A run of bytes of a page.
pub(super) struct PageRun {
    page: u64,
    inside: Range<usize>,
}

impl PageRun {
    fn start(&self) -> u64 {
        self.page * PAGE_BYTES as u64 + self.inside.start as u64
    }

    fn end(&self) -> u64 {
        self.page * PAGE_BYTES as u64 + self.inside.end as u64
    }
}

impl CacheState {
    /// All writes to the page up to a number must be written back.
    pub(super) fn want(&mut self, number: u64, through: u64) {
        let Some(page) = self.table.get_mut(number) else { return };
        page.wanted_through = page.wanted_through.max(through);
        if page.sending_since == NEVER && page.dirty_since <= page.wanted_through {
            self.dirty.wanted.insert(number);
        }
    }

    /// Starts a write-back of wanted pages, if another one may be in flight. Other threads get the
    /// lock before the next one.
    pub(in crate::cache) fn pump(&mut self) {
        if self.write_backs < self.setup.write_backs_max && !self.dirty.wanted.is_empty() {
            let mut runs = Vec::new();
            let pages = self.choose(&mut runs);
            let work = self.send(runs, pages);
            self.write_backs += 1;
            self.work.push(work);
        }
    }

    /// How many whole pages in a row are wanted from `first` on, up to a limit.
    fn whole_row(&self, first: u64, at_most: usize) -> usize {
        let whole = |number: u64| {
            let page = self.table.get(number);
            page.is_some_and(|page| page.dirty.covers(&(0..self.table.page_length(number))))
        };
        let row = self.dirty.wanted.range(first..).zip(first..).take(at_most);
        row.take_while(|(number, next)| *number == next && whole(*next)).count()
    }

    /// The pages of the next write-back, and their runs: a row of whole pages, or what can be
    /// packed before the next such row.
    fn choose(&self, runs: &mut Vec<PageRun>) -> Vec<u64> {
        let first = self
            .dirty
            .wanted
            .range(self.dirty.cursor..)
            .next()
            .or_else(|| self.dirty.wanted.first());
        let first = first.copied().unwrap_or(0);
        let row = self.whole_row(first, self.setup.below_bytes_max as usize / PAGE_BYTES);
        if row >= PLAIN_PAGES_MIN {
            let pages: Vec<u64> = (first..first + row as u64).collect();
            runs.extend(
                pages
                    .iter()
                    .map(|page| PageRun { page: *page, inside: 0..self.table.page_length(*page) }),
            );
            return pages;
        }
        let (mut pages, mut bytes) = (Vec::new(), at::SIZE);
        for number in self.dirty.wanted.range(first..).copied() {
            if !pages.is_empty() && self.whole_row(number, PLAIN_PAGES_MIN) == PLAIN_PAGES_MIN {
                break;
            }
            let (Some(page), before) = (self.table.get(number), runs.len()) else { continue };
            page.runs_to_send(|inside| runs.push(PageRun { page: number, inside }));
            bytes +=
                runs[before..].iter().map(|run| entry_at::SIZE + run.inside.len()).sum::<usize>();
            let span = runs[runs.len() - 1].end() - runs[0].start();
            let fits = bytes as u64 <= self.setup.packed_bytes_max
                && span <= self.setup.packed_span_bytes_max;
            if !pages.is_empty() && !fits {
                runs.truncate(before);
                break;
            }
            pages.push(number);
        }
        pages
    }

    /// Marks pages as in flight.
    fn send(&mut self, runs: Vec<PageRun>, pages: Vec<u64>) -> Work {
        let (address, one_range) =
            (runs[0].start(), runs.windows(2).all(|pair| pair[0].end() == pair[1].start()));
        let length = runs[runs.len() - 1].end() - address;
        let plain = one_range && length <= self.setup.below_bytes_max;
        let (mut flags, mut whole_bytes) = (Flags::default(), 0);
        let mut shared = Vec::with_capacity(pages.len());
        for number in &pages {
            self.dirty.wanted.remove(number);
            self.dirty.cursor = number + 1;
            whole_bytes += self.table.page_length(*number) as i64;
            let Some(page) = self.table.get_mut(*number) else { continue };
            flags.fua |= std::mem::take(&mut page.fua);
            std::mem::swap(&mut page.dirty, &mut page.sending);
            page.sending_since = std::mem::replace(&mut page.dirty_since, NEVER);
            shared.push((*number, PageBytes::clone(&page.bytes)));
        }
        let whole =
            runs.iter().filter(|run| run.inside == (0..self.table.page_length(run.page))).count();
        self.counters.whole_pages_sent.fetch_add(whole as u64, Relaxed);
        let skipped = runs[0].inside.start;
        let unpacked = Unpacked { address, runs, pages: shared };
        let bytes = if plain { length } else { packed_write::encoded_bytes(unpacked.ranges()) };
        let kind = if plain { &self.counters.plain_sent } else { &self.counters.packed_sent };
        kind.fetch_add(1, Relaxed);
        self.counters.bytes_sent.fetch_add(bytes, Relaxed);
        let saved_bytes = whole_bytes - bytes as i64;
        let me = self.me.clone();
        if plain {
            let payload = Payload::Shared { skipped, pages: unpacked.buffers() };
            let write_back = Box::new(WriteBack { me, payload, pages, saved_bytes });
            return Work::Below(Request::new(Operation::Write, address, bytes, flags, write_back));
        }
        let payload = Payload::Packed(Vec::new());
        let write_back = Box::new(WriteBack { me, payload, pages, saved_bytes });
        Work::Packed(PackedPages { flags, bytes, unpacked, write_back })
    }

    /// A write-back has completed.
    fn sent(&mut self, pages: &[u64], saved_bytes: i64, outcome: &Outcome) {
        self.write_backs -= 1;
        match outcome {
            Ok(_) => {
                self.dirty.saved_bytes += saved_bytes;
                let total_bytes = u64::try_from(self.dirty.saved_bytes).unwrap_or(0);
                self.counters.bytes_saved.fetch_max(total_bytes, Relaxed);
                pages.iter().for_each(|number| self.saved(*number));
                self.table.trim();
            }
            Err(error) => {
                self.counters.write_back_errors.fetch_add(1, Relaxed);
                tracing::warn!(pages = pages.len(), %error, "cache: write-back failed; its bytes \
                    stay dirty");
                pages.iter().for_each(|number| self.not_saved(*number, error));
                self.fail_held(error);
                self.unblock();
            }
        }
        self.note_unsaved();
        self.advance_flushes();
        self.begin_held();
    }

    fn saved(&mut self, number: u64) {
        let Some(page) = self.table.get_mut(number) else { return };
        self.dirty.bytes -= page.sending.bytes();
        self.dirty.order.remove(&(page.sending_since, number));
        page.sending.clear();
        page.sending_since = NEVER;
        if page.dirty_since != NEVER {
            self.dirty.order.insert((page.dirty_since, number));
            if page.dirty_since <= page.wanted_through {
                self.dirty.wanted.insert(number);
            }
        }
        let (since, is_quiet) = (page.since(), page.is_quiet());
        if !page.waiters.is_empty() {
            let waiters = std::mem::take(&mut page.waiters);
            self.pushed(number, waiters, since);
        }
        if is_quiet {
            self.quieted(number);
        }
    }

    fn not_saved(&mut self, number: u64, error: &sawmill_device::Error) {
        let Some(page) = self.table.get_mut(number) else { return };
        let before = page.dirty.bytes() + page.sending.bytes();
        for run in page.sending.runs() {
            page.dirty.insert(run);
        }
        self.dirty.bytes -= before - page.dirty.bytes();
        page.sending.clear();
        page.dirty_since = std::mem::replace(&mut page.sending_since, NEVER);
        page.wanted_through = 0;
        let (since, waiters) = (page.since(), std::mem::take(&mut page.waiters));
        waiters.into_iter().for_each(|(_, push)| self.fail_push(push, error));
        self.fail_flushes(since, error);
        self.fail_lock(number, error);
    }
}

/// Runs of pages, in order, and the bytes of those pages at one moment.
struct Unpacked {
    address: u64,
    runs: Vec<PageRun>,
    pages: Vec<(u64, PageBytes)>,
}

impl Unpacked {
    fn bytes_of(&self, run: &PageRun) -> &[u8] {
        let index = self.pages.binary_search_by_key(&run.page, |(number, _)| *number);
        index.map_or(&[], |index| &self.pages[index].1[run.inside.clone()])
    }

    fn ranges(&self) -> impl Iterator<Item = (u32, &[u8])> + Clone {
        self.runs.iter().map(|run| ((run.start() - self.address) as u32, self.bytes_of(run)))
    }

    fn buffers(self) -> Vec<PageBytes> {
        self.pages.into_iter().map(|(_, bytes)| bytes).collect()
    }
}

/// A packed write-back whose payload is not encoded yet.
pub(in crate::cache) struct PackedPages {
    flags: Flags,
    bytes: u64,
    unpacked: Unpacked,
    write_back: Box<WriteBack>,
}

impl PackedPages {
    /// Encodes the payload, without the lock.
    pub(in crate::cache) fn encode(mut self) -> Request {
        let address = self.unpacked.address;
        let mut bytes = vec![0; self.bytes as usize];
        // The runs are in order and within the limits that `choose` keeps.
        let encoded = packed_write::encode(self.unpacked.ranges(), &mut bytes);
        debug_assert!(encoded.is_ok(), "{encoded:?}");
        self.write_back.payload = Payload::Packed(bytes);
        buffers::give_back(self.unpacked.buffers());
        Request::new(Operation::Write, address, self.bytes, self.flags, self.write_back)
    }
}

/// The exchange of a write-back.
struct WriteBack {
    me: Weak<dyn OutcomeListener>,
    payload: Payload,
    pages: Vec<u64>,
    /// Bytes saved compared with writing whole pages; negative if the entries of many runs cost
    /// more.
    saved_bytes: i64,
}

enum Payload {
    Packed(Vec<u8>),
    /// One range over adjacent pages, without the first bytes of the first page.
    Shared {
        skipped: usize,
        pages: Vec<PageBytes>,
    },
}

impl Exchange for WriteBack {
    fn fill(&mut self, offset: u64, into: &mut [u8]) {
        let start = offset as usize;
        match &self.payload {
            Payload::Packed(bytes) => into.copy_from_slice(&bytes[start..start + into.len()]),
            Payload::Shared { skipped, pages } => {
                let (mut at, mut rest) = (skipped + start, into);
                while !rest.is_empty() {
                    let bytes = &pages[at / PAGE_BYTES][at % PAGE_BYTES..];
                    let (front, behind) = rest.split_at_mut(rest.len().min(bytes.len()));
                    front.copy_from_slice(&bytes[..front.len()]);
                    at += front.len();
                    rest = behind;
                }
            }
        }
    }

    fn buffer(&mut self) -> &mut [u8] {
        &mut []
    }

    fn complete(self: Box<Self>, outcome: Outcome) {
        let WriteBack { me, payload, pages, saved_bytes } = *self;
        // Later writes to these pages need not copy them.
        drop(payload);
        if let Some(me) = me.upgrade() {
            me.notify(&mut |state| state.sent(&pages, saved_bytes, &outcome));
        }
    }
}
