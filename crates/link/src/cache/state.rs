//! The state under the cache's one lock: pages, their order, who waits, and the work to do without the lock.
//!
//! Invariants: nothing here calls the device below or answers a request; it makes [`Work`] of both. A page
//! leaves the table only by [`State::evict`], and only when it is quiet. `order` holds a page exactly when
//! some of its bytes are not below, under the number of the oldest such write.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};
use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Weak};
use std::time::Instant;

use sawmill_device::{Error, Operation, Outcome, Reply, Request};

use super::change::Claim;
use super::options::{Policy, Setup};
use super::page::Page;
use super::push::Push;
use super::read::Reading;
use super::stats::Stats;
use super::write_back::Run;
use super::{Hear, PAGE_BYTES};

/// What is done without the lock.
pub(super) enum Work {
    /// Submit to the device below.
    Below(Request),
    /// Submit as a packed write.
    Packed(Request),
    Answer(Request, Outcome),
}

pub(super) struct State {
    pub(super) setup: Setup,
    pub(super) stats: Arc<Stats>,
    pub(super) me: Weak<dyn Hear>,
    pub(super) pages: HashMap<u64, Box<Page>, BuildHasherDefault<PageHasher>>,
    /// Pages that may be thrown out, the oldest first: quiet when they joined.
    line_out: VecDeque<u64>,
    /// (number of the oldest write that is not below, page).
    pub(super) order: BTreeSet<(u64, u64)>,
    /// Dirty pages to write back as soon as may be; none of them is on its way.
    pub(super) wanted: BTreeSet<u64>,
    /// Where the next write-back begins to look.
    pub(super) cursor: u64,
    pub(super) write_backs: usize,
    /// The number of the newest write.
    pub(super) clock: u64,
    pub(super) unsaved_bytes: u64,
    /// What whole pages would have taken more so far.
    pub(super) saved_bytes: i64,
    /// Writes that wait for room, in order.
    pub(super) held: VecDeque<Request>,
    /// Ranges that are changed below directly. They do not overlap.
    pub(super) claims: Vec<Claim>,
    /// Requests that wait for a claim, or for one before them here, in order.
    pub(super) blocked: VecDeque<Request>,
    /// Flushes that wait for all writes up to a number, in order.
    pub(super) flushes: VecDeque<(u64, Request)>,
    pub(super) pushes: HashMap<u64, Push>,
    pub(super) reads: HashMap<u64, Reading>,
    pub(super) last_id: u64,
    pub(super) last_push: Option<Instant>,
    pub(super) work: Vec<Work>,
    /// A thread does the work.
    pub(super) acting: bool,
    /// Room for lists that are made anew each time.
    pub(super) holes: Vec<Range<u64>>,
    pub(super) runs: Vec<Run>,
}

/// A part of a range that lies in one page.
pub(super) struct Piece {
    pub(super) page: u64,
    pub(super) inside: Range<usize>,
    /// Bytes of the range before it.
    pub(super) offset: u64,
}

/// The pages that a range touches. The range is not empty, and ends before the end of the numbers.
pub(super) fn pages_of(address: u64, length: u64) -> Range<u64> {
    address / PAGE_BYTES as u64..(address + length - 1) / PAGE_BYTES as u64 + 1
}

/// The part of a range in a page that it touches.
pub(super) fn piece_of(page: u64, address: u64, length: u64) -> Piece {
    let first = page * PAGE_BYTES as u64;
    let start = address.max(first);
    let stop = (address + length - first).min(PAGE_BYTES as u64) as usize;
    Piece { page, inside: (start - first) as usize..stop, offset: start - address }
}

pub(super) fn pieces_of(address: u64, length: u64) -> impl Iterator<Item = Piece> {
    pages_of(address, length).map(move |page| piece_of(page, address, length))
}

pub(super) fn overlap(one: &Range<u64>, other: &Range<u64>) -> bool {
    one.start < other.end && other.start < one.end
}

impl State {
    pub(super) fn new(setup: Setup, stats: Arc<Stats>, me: Weak<dyn Hear>) -> Self {
        State {
            setup,
            stats,
            me,
            pages: HashMap::default(),
            line_out: VecDeque::new(),
            order: BTreeSet::new(),
            wanted: BTreeSet::new(),
            cursor: 0,
            write_backs: 0,
            clock: 0,
            unsaved_bytes: 0,
            saved_bytes: 0,
            held: VecDeque::new(),
            claims: Vec::new(),
            blocked: VecDeque::new(),
            flushes: VecDeque::new(),
            pushes: HashMap::new(),
            reads: HashMap::new(),
            last_id: 0,
            last_push: None,
            work: Vec::new(),
            acting: false,
            holes: Vec::new(),
            runs: Vec::new(),
        }
    }

    /// Begins a checked request, or has it wait. Returns it when it is done already, with success.
    pub(super) fn start(&mut self, request: Request) -> Option<Request> {
        if self.must_wait(&request) {
            self.blocked.push_back(request);
            return None;
        }
        match request.operation {
            Operation::Read => return self.read(request),
            Operation::Write if self.setup.policy != Policy::WriteAround => return self.write(request),
            Operation::Write | Operation::Discard | Operation::WriteZeroes => self.change(request),
            Operation::Flush => self.flush(request),
            Operation::Allocation => self.ask(request),
            Operation::Prefetch => self.work.push(Work::Below(request)),
        }
        None
    }

    /// As [`State::start`], for a request that has waited: its answer is work too.
    pub(super) fn resume(&mut self, request: Request) {
        if let Some(request) = self.start(request) {
            self.answer(request, Ok(Reply::Done));
        }
    }

    pub(super) fn answer(&mut self, request: Request, outcome: Outcome) {
        self.work.push(Work::Answer(request, outcome));
    }

    pub(super) fn fail(&mut self, request: Request, error: &Error) {
        self.answer(request, Err(error.clone()));
    }

    pub(super) fn next_id(&mut self) -> u64 {
        self.last_id += 1;
        self.last_id
    }

    /// Bytes of a page that are on the device: fewer only of its last page.
    pub(super) fn page_length(&self, page: u64) -> usize {
        (self.setup.geometry.size_bytes - page * PAGE_BYTES as u64).min(PAGE_BYTES as u64) as usize
    }

    /// The pages of a range that are there, in no order.
    pub(super) fn present(&self, range: &Range<u64>) -> Vec<u64> {
        if range.end - range.start <= self.pages.len() as u64 {
            return range.clone().filter(|page| self.pages.contains_key(page)).collect();
        }
        self.pages.keys().copied().filter(|page| range.contains(page)).collect()
    }

    /// The page, made when it is not there: in the place of one that can be thrown out, if there must be one.
    pub(super) fn page(&mut self, number: u64) -> &mut Page {
        let new = (!self.pages.contains_key(&number)).then(|| {
            let full = self.pages.len() >= self.setup.pages_max;
            let evicted = if full { self.evict() } else { None };
            self.count_pages(self.pages.len() + 1);
            evicted.unwrap_or_default()
        });
        self.pages.entry(number).or_insert_with(|| new.unwrap_or_default())
    }

    fn count_pages(&self, pages: usize) {
        let (pages, peak) = (pages as u64, &self.stats.pages_peak);
        self.stats.pages.store(pages, Relaxed);
        // Under the lock: nobody else counts.
        if pages > peak.load(Relaxed) {
            peak.store(pages, Relaxed);
        }
    }

    /// Throws out a quiet page that was not used lately.
    fn evict(&mut self) -> Option<Box<Page>> {
        while let Some(number) = self.line_out.pop_front() {
            let Some(page) = self.pages.get_mut(&number) else { continue };
            if !page.is_quiet() {
                page.in_line = false;
            } else if page.used {
                page.used = false;
                self.line_out.push_back(number);
            } else if let Some(mut page) = self.pages.remove(&number) {
                page.reset();
                self.stats.evictions.fetch_add(1, Relaxed);
                return Some(page);
            }
        }
        None
    }

    /// A page has become quiet: it may be thrown out (see [`State::trim`]), and a claim that waited for it
    /// may go on.
    pub(super) fn quieted(&mut self, number: u64) {
        if let Some(page) = self.pages.get_mut(&number)
            && !page.in_line
        {
            page.in_line = true;
            self.line_out.push_back(number);
        }
        self.claim_quieted(number);
    }

    /// Pages became quiet: those beyond the bound go.
    pub(super) fn trim(&mut self) {
        while self.pages.len() > self.setup.pages_max && self.evict().is_some() {}
        self.count_pages(self.pages.len());
    }

    pub(super) fn note_unsaved(&self) {
        self.stats.dirty_bytes.store(self.unsaved_bytes, Relaxed);
    }
}

/// A quick hash of page numbers: they come from one's own disk addresses.
#[derive(Default)]
pub(super) struct PageHasher(u64);

impl Hasher for PageHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64(self.0 ^ u64::from(*byte)));
    }

    fn write_u64(&mut self, number: u64) {
        let mixed = number.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        self.0 = mixed ^ (mixed >> 32);
    }
}
