//! A read, from request to answer. It holds a shared lock of one area of a map at a time, waits for
//! no I/O of a write, and asks the engine nothing; a first read after an idle time wakes it
//! (`watch`).
//!
//! The range is resolved into *pieces*: zeroes, a part of a journal record, a part of one frame of
//! a stored segment, or bytes whose map is not loaded yet. Pieces in memory are served immediately;
//! the rest go in parallel to threads that may wait (for the local disk, or for a part of the map)
//! and to [`fetch`], and the last one to end answers the request.
//!
//! Invariants: the journal map is asked before the object map (see `map`); every byte is verified
//! by its record's or its frame's checksum; a piece whose source was given up meanwhile is resolved
//! again, in a read-only attachment with the whole read, so that all of it is from one cut.
//!
//! Not here: the maps (`map`), payloads in the journal (`journal::read`), the read cache (`cache`).

use std::sync::Arc;

use sawmill_device::{Allocation, Reply, Request};
use sawmill_format::journal::RecordOperation;

use crate::attachment::Attachment;
use crate::cache::CacheRead;
use crate::counters::add;
use crate::engine::mailbox::Mailbox;
use crate::journal::{Journal, JournalRead, Reach};
use crate::map::JournalMap;
use crate::map::load::UNREADABLE_SEQUENCE;
use crate::record::Record;
use crate::stored_data::{FrameName, StoredData};
use crate::threads::later::DeferredJobs;
use crate::threads::pool::Pool;
use crate::view::View;
use crate::{Error, ErrorKind, Result};

pub(crate) mod ahead;
pub(crate) mod ahead_memory;
pub(crate) mod fetch;
mod follow;
mod landed;
mod pending;
mod pipe;
pub(crate) mod reads_seen;
#[cfg(test)]
mod unloaded_tests;
pub(crate) mod warm;

use ahead::{ReadSpan, Streams};
use fetch::Fetcher;
use pending::PendingRead;
use reads_seen::ReadsSeen;

/// What a read needs.
pub(crate) struct ReadContext {
    pub(crate) attachment: Arc<Attachment>,
    /// None when read-only.
    pub(crate) journal: Option<Arc<Journal>>,
    /// Addresses whose newest bytes are not in a stored segment yet.
    pub(crate) journal_map: Arc<JournalMap<Arc<Record>>>,
    pub(crate) stored: Arc<StoredData>,
    pub(crate) fetcher: Fetcher,
    /// Sequential readers, for fetching ahead.
    pub(crate) streams: Streams,
    /// Which ranges are read, while somebody records that.
    pub(crate) reads_seen: ReadsSeen,
    pub(crate) pool: Arc<Pool>,
    pub(crate) jobs: Arc<DeferredJobs>,
    pub(crate) mailbox: Arc<Mailbox>,
}

/// How often one piece may be resolved again before we call it a bug.
const RESOLVE_AGAIN_MAX: u32 = 16;

/// A run of bytes that comes from one source.
#[derive(Clone)]
pub(crate) struct ReadPiece {
    /// First byte in the volume.
    pub(crate) address: u64,
    /// Bytes.
    pub(crate) length: u64,
    pub(crate) source: ReadSource,
    /// How often it was resolved again, because its source was given up.
    times_resolved: u32,
}

#[derive(Clone)]
pub(crate) enum ReadSource {
    Zero,
    /// With the segment that holds the same bytes, if it is stored already.
    Record {
        record: Arc<Record>,
        offset: u64,
        stored: Option<u32>,
    },
    Frame {
        name: FrameName,
        offset: u32,
    },
    /// The map of these bytes must be loaded first.
    Unloaded,
}

/// The result of an attempt to serve a piece without the network.
enum LocalResult {
    Done,
    /// It must wait for the local disk.
    Slow,
    /// It must come from the store.
    Absent,
    /// The source was given up: resolve again.
    Gone,
}

/// The farthest source that a read needed: it is counted there, once. A range that was never
/// written comes from nowhere.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
enum FarthestSource {
    #[default]
    Nowhere,
    Journal,
    Cache,
    Store,
}

impl FarthestSource {
    fn count(self, context: &ReadContext) {
        let counters = &context.attachment.counters;
        match self {
            FarthestSource::Nowhere => {}
            FarthestSource::Journal => add(&counters.reads_journal, 1),
            FarthestSource::Cache => add(&counters.reads_cache, 1),
            FarthestSource::Store => add(&counters.reads_store, 1),
        }
    }
}

/// Takes a read.
pub(crate) fn submit(context: &Arc<ReadContext>, mut request: Request) {
    let reading = context.stored.readers.enter();
    let (start, length) = (request.address, request.length);
    add(&context.attachment.counters.reads, 1);
    add(&context.attachment.counters.read_bytes, length);
    let mut source = FarthestSource::default();
    let (mut slow, mut absent) = (Vec::new(), Vec::new());
    let mut is_stored = false;
    let mut pieces = resolve(context, start, length);
    while let Some(piece) = pieces.pop() {
        let at = (piece.address - start) as usize;
        let into = &mut request.buffer()[at..at + piece.length as usize];
        is_stored |= matches!(piece.source, ReadSource::Record { stored: Some(_), .. });
        match serve(context, &piece, into, Reach::PageCache, &mut source) {
            Ok(LocalResult::Done) => {}
            Ok(LocalResult::Slow) => slow.push(piece),
            Ok(LocalResult::Absent) => absent.push(piece),
            Ok(LocalResult::Gone) if piece.times_resolved < RESOLVE_AGAIN_MAX => {
                pieces.extend(resolve_again(context, &piece));
            }
            Ok(LocalResult::Gone) => return request.fail(lost(&piece)),
            Err(error) => return request.fail(error),
        }
    }
    let waits = has_frames(&absent);
    let streams = source == FarthestSource::Cache || has_frames(&slow) || waits;
    if slow.is_empty() && absent.is_empty() {
        source.count(context);
        request.done();
    } else {
        slow.reverse();
        absent.reverse();
        let pieces = slow.len() + absent.len();
        let awaited = waits.then(|| context.fetcher.awaits(length, context.attachment.world.now()));
        let pending = PendingRead::new(context, request, pieces, source, (reading, awaited));
        pending.serve_all(slow);
        pending.fetch(absent);
    }
    if streams || is_stored {
        // Also what the journal still has: a clone has no such journal.
        context.reads_seen.note(start, length, || context.attachment.world.now());
    }
    if streams {
        ahead::note(context, ReadSpan { address: start, length, waits });
    }
}

/// Whether any of them is a frame that the cache did not answer at once.
fn has_frames(later: &[ReadPiece]) -> bool {
    later.iter().any(|piece| matches!(piece.source, ReadSource::Frame { .. }))
}

/// Takes a prefetch: a hint, answered at once.
pub(crate) fn prefetch(context: &Arc<ReadContext>, request: Request) {
    ahead::fetch_hinted(context, request.address, request.length);
    request.done();
}

/// Takes an allocation query.
pub(crate) fn allocation(context: &ReadContext, request: Request) {
    /// Past this many runs the rest of the range is reported as data: always allowed, and bounded.
    const RUNS_MAX: usize = 1 << 20;
    let end = request.address + request.length;
    let mut runs: Vec<Allocation> = Vec::new();
    let mut at = request.address;
    while at < end && runs.len() < RUNS_MAX {
        // In steps, so that the answer stays bounded.
        let step = (end - at).min(1 << 30);
        for (length, data) in resolve_places(context, at, step) {
            match runs.last_mut() {
                Some(last) if last.data == data => last.length += length,
                _ => runs.push(Allocation { length, data }),
            }
        }
        at += step;
    }
    if at < end {
        runs.push(Allocation { length: end - at, data: true });
    }
    request.complete(Ok(Reply::Allocation(runs)));
}

/// Lengths and whether there is data, in address order.
fn resolve_places(context: &ReadContext, address: u64, length: u64) -> Vec<(u64, bool)> {
    let mut runs = Vec::new();
    let mut holes = Vec::new();
    context.journal_map.lookup(address, length, &mut |piece| match piece.entry {
        Some((_, record)) => {
            runs.push((piece.address, piece.length, record.operation == RecordOperation::Write));
        }
        None => holes.push((piece.address, piece.length)),
    });
    let view = context.stored.view();
    for (address, length) in holes {
        if !view.map.is_loaded(address, length) {
            // Counts as data: an allocation query does not wait for the map.
            runs.push((address, length, true));
            continue;
        }
        view.map.lookup(address, length, &mut |piece| {
            runs.push((piece.address, piece.length, piece.location.is_some()));
        });
    }
    runs.sort_unstable_by_key(|run| run.0);
    runs.into_iter().map(|(_, length, data)| (length, data)).collect()
}

/// Resolves a range into pieces. Their order does not matter. There are as many as the range has
/// extents: at most one a byte, of [`limits::REQUEST_BYTES_MAX`](crate::limits::REQUEST_BYTES_MAX).
pub(crate) fn resolve(context: &ReadContext, address: u64, length: u64) -> Vec<ReadPiece> {
    let mut pieces = Vec::with_capacity(2);
    let mut holes: Vec<(u64, u64)> = Vec::new();
    context.journal_map.lookup(address, length, &mut |piece| match piece.entry {
        Some((_, record)) => {
            let source = if record.operation == RecordOperation::Write {
                let offset = piece.address - record.address;
                ReadSource::Record { record: record.clone(), offset, stored: None }
            } else {
                ReadSource::Zero
            };
            pieces.push(ReadPiece {
                address: piece.address,
                length: piece.length,
                source,
                times_resolved: 0,
            });
        }
        None => holes.push((piece.address, piece.length)),
    });
    // After the journal map: writes that follow a rollback enter the new map before they leave the
    // journal map.
    let view = context.stored.view();
    for (address, length) in holes {
        if !view.map.is_loaded(address, length) {
            let source = ReadSource::Unloaded;
            pieces.push(ReadPiece { address, length, source, times_resolved: 0 });
            continue;
        }
        view.map.lookup(address, length, &mut |piece| match piece.location {
            None => pieces.push(ReadPiece {
                address: piece.address,
                length: piece.length,
                source: ReadSource::Zero,
                times_resolved: 0,
            }),
            Some(location) => {
                resolve_stored(context, &view, piece.address, piece.length, location, &mut pieces);
            }
        });
    }
    pieces
}

/// Cuts a stored run at resident records and at frames.
fn resolve_stored(
    context: &ReadContext,
    view: &View,
    address: u64,
    length: u64,
    location: crate::map::Location,
    pieces: &mut Vec<ReadPiece>,
) {
    let frame_bytes = context.attachment.record.frame_bytes;
    let sequence = location.sequence;
    let epoch = view.segments.get(sequence).map_or(0, |info| info.epoch);
    let mut done = 0;
    while done < length {
        let data_offset = location.data_offset + done as u32;
        let name = FrameName { sequence, epoch, frame: data_offset / frame_bytes };
        let (source, available) = match context.stored.residents.find(sequence, data_offset) {
            Some((record, offset, available)) => {
                // What is read from the journal now is wanted in the cache afterwards.
                if let Some((cache, key)) = context.stored.cached(name) {
                    cache.visit(key);
                }
                (ReadSource::Record { record, offset, stored: Some(sequence) }, available)
            }
            None => {
                let offset = data_offset % frame_bytes;
                (ReadSource::Frame { name, offset }, u64::from(frame_bytes - offset))
            }
        };
        let run = available.min(length - done);
        pieces.push(ReadPiece { address: address + done, length: run, source, times_resolved: 0 });
        done += run;
    }
}

/// Serves a piece from memory, or, if it may wait, from the local disk.
fn serve(
    context: &ReadContext,
    piece: &ReadPiece,
    into: &mut [u8],
    reach: Reach<'_>,
    source: &mut FarthestSource,
) -> Result<LocalResult> {
    match &piece.source {
        ReadSource::Zero => {
            into.fill(0);
            Ok(LocalResult::Done)
        }
        ReadSource::Record { record, offset, stored } => {
            let Some(journal) = &context.journal else { return Ok(LocalResult::Gone) };
            *source = (*source).max(FarthestSource::Journal);
            match (journal.read(record, *offset, into, reach), stored) {
                (Ok(JournalRead::Done), _) => Ok(LocalResult::Done),
                (Ok(JournalRead::Slow), _) => Ok(LocalResult::Slow),
                (Ok(JournalRead::Gone), _) => Ok(LocalResult::Gone),
                // The journal was only the nearer copy.
                (Err(error), Some(sequence)) => {
                    tracing::warn!("{error}; reading segment {sequence} from the store instead");
                    context.stored.residents.forget(*sequence);
                    Ok(LocalResult::Gone)
                }
                (Err(error), None) => Err(error),
            }
        }
        // See `load_and_serve`.
        ReadSource::Unloaded => Ok(LocalResult::Slow),
        ReadSource::Frame { name, offset } => {
            if name.sequence == UNREADABLE_SEQUENCE
                && let Some(error) = context.stored.view().map.broken()
            {
                return Err(error);
            }
            if context.fetcher.landed.read(*name, *offset, into) {
                *source = (*source).max(FarthestSource::Cache);
                return Ok(LocalResult::Done);
            }
            let Some((cache, key)) = context.stored.cached(*name) else {
                return Ok(LocalResult::Absent);
            };
            let found = match reach {
                Reach::PageCache => cache.read_now(key, *offset, into),
                _ if cache.read(key, *offset, into) => CacheRead::Hit,
                _ => CacheRead::Miss,
            };
            Ok(match found {
                CacheRead::Hit => {
                    *source = (*source).max(FarthestSource::Cache);
                    LocalResult::Done
                }
                CacheRead::Slow => LocalResult::Slow,
                CacheRead::Miss => LocalResult::Absent,
            })
        }
    }
}

/// Resolves a piece whose source was given up.
fn resolve_again(context: &ReadContext, piece: &ReadPiece) -> Vec<ReadPiece> {
    let mut pieces = resolve(context, piece.address, piece.length);
    for fresh in &mut pieces {
        fresh.times_resolved = piece.times_resolved + 1;
    }
    pieces
}

fn lost(piece: &ReadPiece) -> Error {
    let text = format!(
        "{} bytes at {} were moved {RESOLVE_AGAIN_MAX} times while they were being read: report \
         this, with the log",
        piece.length, piece.address
    );
    Error::new(ErrorKind::Internal, text)
}
