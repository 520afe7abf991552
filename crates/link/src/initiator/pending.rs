//! Requests that wait for their answers. A request longer than a place is sent in several, and is
//! answered when all of them are.
//!
//! Invariants: a request is answered once, with the first failure if there was one. Requests
//! without a place wait in order. Entries are allocated when the initiator is made; only more
//! requests than entries make a queue grow.
//!
//! Not here: places (`places`), what a reconnection does (`connect`).

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};

use parking_lot::Mutex;
use sawmill_device::{Error, Exchange, Operation as Asks, Outcome, Reply, Request};
use sawmill_format::link::statement::{self, Command, Operation};

/// The most requests in flight; more of them wait.
pub(crate) const REQUESTS_MAX: usize = 4096;

/// The range of a request that one place carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Chunk {
    pub(crate) entry: u16,
    /// Its start in the request's range, and its bytes.
    pub(crate) offset: u64,
    pub(crate) length: u64,
}

/// A request in flight.
pub(crate) struct PendingRequest {
    request: Option<Request>,
    template: Option<Command>,
    /// Chunks were made up to this byte.
    chunked: u64,
    /// Chunks without an answer.
    open: u32,
    failure: Option<Error>,
    export: u8,
    terms: Terms,
}

/// The properties of a request besides its command.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Terms {
    pub(crate) submitted_at_ns: u64,
    /// The number of changes that the target had answered before this was submitted: what a flush
    /// covers.
    pub(crate) changes_before: u64,
    /// The longest read or write of the export's device.
    pub(crate) bytes_max: u64,
}

/// The counters of an export, wherever its chunks are.
struct ExportCounters {
    /// Its number on the newest connection.
    number: AtomicU8,
    /// Chunks of changes that succeeded at a target, and may be only in its memory.
    changes: AtomicU64,
    /// Requests that were accepted and are not answered.
    under_way: AtomicU32,
}

/// A completed request, for code that must see it before the user.
pub(crate) struct CompletedRequest {
    pub(crate) request: Request,
    pub(crate) failure: Option<Error>,
    pub(crate) export: u8,
    pub(crate) operation: Operation,
    pub(crate) terms: Terms,
}

/// All requests in flight.
pub(crate) struct PendingRequests {
    entries: Box<[Mutex<PendingRequest>]>,
    lists: Mutex<Lists>,
    exports: Box<[ExportCounters]>,
}

struct Lists {
    /// Why no request is accepted any more.
    close_error: Option<Error>,
    free: Vec<u16>,
    /// Chunks of a dead connection; they are sent first.
    /// Bounded by the chunks of one connection (`REQUESTS_MAX`).
    again: VecDeque<Chunk>,
    /// Requests with bytes for which no chunk was made.
    /// Bounded by `REQUESTS_MAX`.
    waiting: VecDeque<u16>,
    /// Requests without an entry.
    /// Bounded by the requests that the doors admit.
    overflow: VecDeque<(Command, Terms, Request)>,
}

/// The wire's operation for a device operation.
pub(crate) fn operation_of(asks: Asks) -> Operation {
    match asks {
        Asks::Read => Operation::Read,
        Asks::Write => Operation::Write,
        Asks::Flush => Operation::Flush,
        Asks::Discard => Operation::Discard,
        Asks::WriteZeroes => Operation::WriteZeroes,
        Asks::Prefetch => Operation::Prefetch,
        Asks::Allocation => Operation::Allocation,
    }
}

/// The command for a request; place and use number are set later.
pub(crate) fn template(request: &Request, operation: Operation, export: u8) -> Command {
    let fua = if request.flags.fua { statement::FUA } else { 0 };
    let no_unmap = if request.flags.no_unmap { statement::NO_UNMAP } else { 0 };
    Command {
        operation,
        place: 0,
        flags: fua | no_unmap,
        export,
        use_number: 0,
        address: request.address,
        length: request.length,
    }
}

impl PendingRequests {
    pub(crate) fn new() -> Self {
        let pending = |_| {
            Mutex::new(PendingRequest {
                request: None,
                template: None,
                chunked: 0,
                open: 0,
                failure: None,
                export: 0,
                terms: Terms::default(),
            })
        };
        let lists = Lists {
            close_error: None,
            free: (0..REQUESTS_MAX as u16).rev().collect(),
            again: VecDeque::with_capacity(REQUESTS_MAX),
            waiting: VecDeque::with_capacity(REQUESTS_MAX),
            overflow: VecDeque::with_capacity(REQUESTS_MAX),
        };
        let export = |number: u8| ExportCounters {
            number: number.into(),
            changes: 0.into(),
            under_way: 0.into(),
        };
        PendingRequests {
            entries: (0..REQUESTS_MAX).map(pending).collect(),
            lists: Mutex::new(lists),
            exports: (0..=u8::MAX).map(export).collect(),
        }
    }

    /// The target's number of an export.
    pub(crate) fn number(&self, export: u8) -> u8 {
        self.exports[usize::from(export)].number.load(Ordering::SeqCst)
    }

    pub(crate) fn set_number(&self, export: u8, number: u8) {
        self.exports[usize::from(export)].number.store(number, Ordering::SeqCst);
    }

    /// The number of chunks of changes of an export that succeeded.
    pub(crate) fn changes(&self, export: u8) -> u64 {
        self.exports[usize::from(export)].changes.load(Ordering::SeqCst)
    }

    /// A chunk of a change succeeded. This is called before its place counts as free, so that after
    /// a connection is abandoned, everything it did is counted.
    pub(crate) fn changed(&self, export: u8) {
        self.exports[usize::from(export)].changes.fetch_add(1, Ordering::SeqCst);
    }

    /// Accepts a request, which is sent when there is a place. After [`PendingRequests::take_all`]
    /// it fails.
    pub(crate) fn add(&self, template: Command, terms: Terms, request: Request) {
        let mut lists = self.lists.lock();
        if let Some(error) = lists.close_error.clone() {
            drop(lists);
            return request.fail(error);
        }
        self.exports[usize::from(template.export)].under_way.fetch_add(1, Ordering::SeqCst);
        match lists.free.pop() {
            Some(entry) => {
                self.enter(entry, template, terms, request);
                lists.waiting.push_back(entry);
            }
            None => lists.overflow.push_back((template, terms, request)),
        }
    }

    fn enter(&self, entry: u16, template: Command, terms: Terms, request: Request) {
        *self.entries[usize::from(entry)].lock() = PendingRequest {
            export: template.export,
            request: Some(request),
            template: Some(template),
            chunked: 0,
            open: 0,
            failure: None,
            terms,
        };
    }

    /// Whether other requests of its export allow a request to be sent: a close must wait until all
    /// other requests are answered.
    fn is_due(&self, template: &Command) -> bool {
        let under_way = &self.exports[usize::from(template.export)].under_way;
        template.operation != Operation::Close || under_way.load(Ordering::SeqCst) == 1
    }

    /// The next chunk with its command; of at most `bytes_max` if its bytes travel. `admit` returns
    /// whether requests of an export may be sent now.
    pub(crate) fn next_chunk(
        &self,
        bytes_max: u64,
        admit: impl Fn(Operation) -> bool,
    ) -> Option<(Chunk, Command)> {
        let admit = |template: &Command| admit(template.operation) && self.is_due(template);
        let mut lists = self.lists.lock();
        for index in 0..lists.again.len() {
            let chunk = lists.again[index];
            let (template, terms) = {
                let pending = self.entries[usize::from(chunk.entry)].lock();
                (pending.template, pending.terms)
            };
            let Some(template) = template.filter(admit) else { continue };
            let bytes_max = bytes_max.min(terms.bytes_max);
            if !travels(template.operation) || chunk.length <= bytes_max {
                lists.again.remove(index);
                return Some((chunk, cut(template, chunk)));
            }
            // The places of the new connection are smaller.
            let first = Chunk { length: bytes_max, ..chunk };
            let rest = &mut lists.again[index];
            (rest.offset, rest.length) = (chunk.offset + bytes_max, chunk.length - bytes_max);
            self.entries[usize::from(chunk.entry)].lock().open += 1;
            return Some((first, cut(template, first)));
        }
        for index in 0..lists.waiting.len() {
            let entry = lists.waiting[index];
            let mut pending = self.entries[usize::from(entry)].lock();
            let Some(template) = pending.template.filter(admit) else { continue };
            let remaining_bytes = template.length - pending.chunked;
            let length = if travels(template.operation) {
                remaining_bytes.min(bytes_max).min(pending.terms.bytes_max)
            } else {
                remaining_bytes
            };
            let chunk = Chunk { entry, offset: pending.chunked, length };
            pending.chunked += length;
            pending.open += 1;
            if pending.chunked == template.length {
                lists.waiting.remove(index);
            }
            return Some((chunk, cut(template, chunk)));
        }
        None
    }

    /// A chunk returns without an answer: its connection is gone.
    pub(crate) fn put_back(&self, chunk: Chunk) {
        let mut lists = self.lists.lock();
        if lists.close_error.is_none() {
            lists.again.push_back(chunk);
        }
    }

    /// Copies bytes of a request's payload.
    pub(crate) fn fill(&self, entry: u16, offset: u64, into: &mut [u8]) {
        if let Some(request) = &mut self.entries[usize::from(entry)].lock().request {
            request.fill(offset, into);
        }
    }

    /// Stores bytes of an answer. Bytes outside the request's buffer are dropped.
    pub(crate) fn store(&self, entry: u16, offset: u64, bytes: &[u8]) {
        let mut pending = self.entries[usize::from(entry)].lock();
        let Some(request) = &mut pending.request else { return };
        let (start, buffer) = (offset as usize, request.buffer());
        if let Some(room) = buffer.get_mut(start..start + bytes.len()) {
            room.copy_from_slice(bytes);
        }
    }

    /// A chunk is answered. Returns the request if that was its last chunk.
    pub(crate) fn answered(&self, entry: u16, failure: Option<Error>) -> Option<CompletedRequest> {
        let mut lists = self.lists.lock();
        let mut pending = self.entries[usize::from(entry)].lock();
        // None: it failed with all others, and its entry is not reused.
        let template = pending.template?;
        pending.open -= 1;
        if pending.failure.is_none() {
            pending.failure = failure;
        }
        if pending.open > 0 || pending.chunked < template.length {
            return None;
        }
        pending.template = None;
        let completed_request = CompletedRequest {
            request: pending.request.take()?,
            failure: pending.failure.take(),
            export: pending.export,
            operation: template.operation,
            terms: pending.terms,
        };
        drop(pending);
        self.exports[usize::from(completed_request.export)]
            .under_way
            .fetch_sub(1, Ordering::SeqCst);
        match lists.overflow.pop_front() {
            Some((template, terms, request)) => {
                self.enter(entry, template, terms, request);
                lists.waiting.push_back(entry);
            }
            None => lists.free.push(entry),
        }
        Some(completed_request)
    }

    /// Removes all requests, to be failed because no answer can arrive. Later requests fail with
    /// `why`. No place may be live any more: it would send bytes of a request that no longer
    /// exists.
    pub(crate) fn take_all(&self, why: &Error) -> Vec<Request> {
        let mut lists = self.lists.lock();
        lists.close_error.get_or_insert_with(|| why.clone());
        let mut all = Vec::new();
        for (entry, pending) in self.entries.iter().enumerate() {
            let mut pending = pending.lock();
            if pending.template.take().is_some() {
                all.extend(pending.request.take());
                lists.free.push(entry as u16);
            }
        }
        lists.again.clear();
        lists.waiting.clear();
        all.extend(lists.overflow.drain(..).map(|(_, _, request)| request));
        all
    }

    /// Requests in flight or waiting.
    pub(crate) fn count(&self) -> usize {
        let lists = self.lists.lock();
        REQUESTS_MAX - lists.free.len() + lists.overflow.len()
    }

    /// Requests that wait for a place: back-pressure that users notice.
    pub(crate) fn waiting(&self) -> usize {
        let lists = self.lists.lock();
        lists.waiting.len() + lists.again.len() + lists.overflow.len()
    }
}

/// Whether the bytes of its range travel, so that a place must hold them.
fn travels(operation: Operation) -> bool {
    matches!(operation, Operation::Read | Operation::Write)
}

fn cut(template: Command, chunk: Chunk) -> Command {
    if !travels(template.operation) {
        return template;
    }
    Command { address: template.address + chunk.offset, length: chunk.length, ..template }
}

/// The exchange of a control command: its payload is sent, its answer received.
pub(crate) struct ControlExchange {
    pub(crate) payload: Vec<u8>,
    pub(crate) answer: Vec<u8>,
    pub(crate) sender: std::sync::mpsc::SyncSender<(Outcome, Vec<u8>)>,
}

impl Exchange for ControlExchange {
    fn fill(&mut self, offset: u64, into: &mut [u8]) {
        let start = offset as usize;
        into.copy_from_slice(&self.payload[start..start + into.len()]);
    }

    fn buffer(&mut self) -> &mut [u8] {
        &mut self.answer
    }

    fn complete(self: Box<Self>, outcome: Outcome) {
        // The requester may have given up.
        let _ = self.sender.send((outcome, self.answer));
    }
}

impl CompletedRequest {
    /// Completes the request with its result.
    pub(crate) fn complete(self) {
        match self.failure {
            Some(error) => self.request.fail(error),
            None => self.request.complete(Ok(Reply::Done)),
        }
    }
}
