//! A read of which some pieces have to wait, until its last piece has ended.
//!
//! Invariants: each piece ends once, and the last one answers the request. After a read-only
//! attachment has moved to another cut, all of the read is repeated.
//!
//! Not here: what a piece is and where its bytes are (`read`), and the store (`fetch`).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use parking_lot::Mutex;
use sawmill_device::Request;

use super::fetch::{self, AwaitedBytes, FetchResult, Purpose};
use super::{
    FarthestSource, LocalResult, RESOLVE_AGAIN_MAX, ReadContext, ReadPiece, ReadSource, lost,
    resolve, resolve_again, serve,
};
use crate::journal::Reach;
use crate::readers::ReadGuard;
use crate::stored_data::FrameName;
use crate::{Error, ErrorKind};

/// What counts a read until it ends: as a reader, and with its bytes if it waits for the store.
type ReadGuards = (ReadGuard, Option<AwaitedBytes>);

/// A read with pieces in flight.
pub(super) struct PendingRead {
    context: Arc<ReadContext>,
    start: u64,
    request: Mutex<Option<Request>>,
    pending_pieces: AtomicUsize,
    error: Mutex<Option<Error>>,
    /// Where it is to be counted when it ends; what waits for the store is counted at once.
    source: Mutex<FarthestSource>,
    /// A read-only attachment moved to another cut: the whole read is repeated, so that all of it
    /// is from one cut.
    restart: AtomicBool,
    restarts: AtomicUsize,
    _guards: ReadGuards,
}

impl PendingRead {
    /// The pending of a read of which `pending_pieces` pieces are not served yet.
    pub(super) fn new(
        context: &Arc<ReadContext>,
        request: Request,
        pending_pieces: usize,
        source: FarthestSource,
        guards: ReadGuards,
    ) -> Arc<Self> {
        Arc::new(PendingRead {
            context: context.clone(),
            start: request.address,
            request: Mutex::new(Some(request)),
            pending_pieces: AtomicUsize::new(pending_pieces),
            error: Mutex::default(),
            source: Mutex::new(source),
            restart: AtomicBool::new(false),
            restarts: AtomicUsize::new(0),
            _guards: guards,
        })
    }

    /// Notes that a piece came from `source`, or is asked for there.
    fn came_from(&self, source: FarthestSource) {
        let mut farthest = self.source.lock();
        if source > *farthest {
            *farthest = source;
            if source == FarthestSource::Store {
                source.count(&self.context);
            }
        }
    }

    /// Serves a piece on a thread that may wait.
    fn serve_waiting(self: &Arc<Self>, piece: ReadPiece) {
        let absent = self.serve_here(piece);
        self.fetch(absent.into_iter().collect());
    }

    /// As [`serve_waiting`](Self::serve_waiting). Returns the piece if the store has to be asked.
    fn serve_here(self: &Arc<Self>, piece: ReadPiece) -> Option<ReadPiece> {
        if matches!(piece.source, ReadSource::Unloaded) {
            self.load_and_serve(&piece);
            return None;
        }
        let mut bytes = vec![0; piece.length as usize];
        let mut source = FarthestSource::default();
        match serve(&self.context, &piece, &mut bytes, Reach::Device, &mut source) {
            Ok(LocalResult::Done) => {
                self.came_from(source);
                self.arrived(&piece, &bytes);
            }
            Ok(LocalResult::Absent | LocalResult::Slow) => return Some(piece),
            Ok(LocalResult::Gone) => self.resolve_again(&piece),
            Err(error) => self.end_piece(Some(error)),
        }
        None
    }

    /// Loads the map of a piece, then serves what is there, on this thread: a volume that is closed
    /// meanwhile starts no job any more.
    fn load_and_serve(self: &Arc<Self>, piece: &ReadPiece) {
        if piece.times_resolved >= RESOLVE_AGAIN_MAX {
            return self.end_piece(Some(lost(piece)));
        }
        if let Err(error) = self.context.stored.view().map.load(piece.address, piece.length) {
            return self.end_piece(Some(error));
        }
        let pieces = resolve_again(&self.context, piece);
        let is_stored = |piece: &ReadPiece| {
            matches!(
                piece.source,
                ReadSource::Frame { .. } | ReadSource::Record { stored: Some(_), .. }
            )
        };
        if pieces.iter().any(is_stored) {
            let now = || self.context.attachment.world.now();
            self.context.reads_seen.note(piece.address, piece.length, now);
        }
        self.pending_pieces.fetch_add(pieces.len(), Ordering::AcqRel);
        let absent = pieces.into_iter().filter_map(|piece| self.serve_here(piece)).collect();
        self.fetch(absent);
        self.end_piece(None);
    }

    /// Asks the store for the frames of `pieces`; frames that follow each other in one segment
    /// share a request.
    pub(super) fn fetch(self: &Arc<Self>, pieces: Vec<ReadPiece>) {
        let mut wanted: Vec<(FrameName, Option<fetch::Waiter>)> = Vec::new();
        for piece in pieces {
            let ReadSource::Frame { name, offset } = piece.source else {
                self.resolve_again(&piece);
                continue;
            };
            let pending = self.clone();
            let waiter = Box::new(move |fetched| match fetched {
                FetchResult::Frame(data) => pending.arrived_in(&piece, name, offset, &data),
                FetchResult::Gone => pending.resolve_again(&piece),
                // Who fetched ahead gives up; a read waits for the store, however often that was.
                FetchResult::Away(_) => pending.fetch(vec![piece]),
                FetchResult::Failed(error) => pending.end_piece(Some(error)),
            });
            wanted.push((name, Some(waiter)));
        }
        if !wanted.is_empty() {
            self.came_from(FarthestSource::Store);
            fetch::fetch(&self.context, wanted, Purpose::Read);
        }
    }

    fn resolve_again(self: &Arc<Self>, piece: &ReadPiece) {
        if piece.times_resolved >= RESOLVE_AGAIN_MAX {
            return self.end_piece(Some(lost(piece)));
        }
        if self.context.attachment.read_only {
            self.restart.store(true, Ordering::Release);
            return self.end_piece(None);
        }
        let pieces = resolve_again(&self.context, piece);
        self.pending_pieces.fetch_add(pieces.len(), Ordering::AcqRel);
        self.serve_all(pieces);
        self.end_piece(None);
    }

    pub(super) fn serve_all(self: &Arc<Self>, pieces: Vec<ReadPiece>) {
        for piece in pieces {
            let pending = self.clone();
            self.context.pool.run(move || pending.serve_waiting(piece));
        }
    }

    /// Resolves and serves all of the read again; false when that was done too often.
    fn serve_again(self: &Arc<Self>) -> bool {
        let length = self.request.lock().as_ref().map_or(0, |request| request.length);
        if self.restarts.fetch_add(1, Ordering::Relaxed) as u32 >= RESOLVE_AGAIN_MAX || length == 0
        {
            return false;
        }
        let pieces = resolve(&self.context, self.start, length);
        self.pending_pieces.store(pieces.len(), Ordering::Release);
        self.serve_all(pieces);
        true
    }

    /// The frame of a piece has arrived; the piece's bytes are at `offset` in it.
    fn arrived_in(self: &Arc<Self>, piece: &ReadPiece, name: FrameName, offset: u32, frame: &[u8]) {
        let end = offset as usize + piece.length as usize;
        match frame.get(offset as usize..end) {
            Some(bytes) => self.arrived(piece, bytes),
            None => self.end_piece(Some(short_frame(&self.context, name))),
        }
    }

    fn arrived(self: &Arc<Self>, piece: &ReadPiece, bytes: &[u8]) {
        if let Some(request) = &mut *self.request.lock() {
            let at = (piece.address - self.start) as usize;
            request.buffer()[at..at + bytes.len()].copy_from_slice(bytes);
        }
        self.end_piece(None);
    }

    fn end_piece(self: &Arc<Self>, error: Option<Error>) {
        if let Some(error) = error {
            self.error.lock().get_or_insert(error);
        }
        if self.pending_pieces.fetch_sub(1, Ordering::AcqRel) > 1 {
            return;
        }
        if self.restart.swap(false, Ordering::AcqRel) && self.error.lock().is_none() {
            if self.serve_again() {
                return;
            }
            let text = "the volume's cut changed faster than this range could be read";
            self.error.lock().get_or_insert(Error::new(ErrorKind::Unavailable, text));
        }
        let Some(request) = self.request.lock().take() else { return };
        let source = *self.source.lock();
        if source != FarthestSource::Store {
            source.count(&self.context);
        }
        match self.error.lock().take() {
            None => request.done(),
            Some(error) => request.fail(error),
        }
    }
}

fn short_frame(context: &ReadContext, name: FrameName) -> Error {
    let key = sawmill_format::segment::segment_key(
        context.stored.owner_of(name.sequence),
        u64::from(name.sequence),
    );
    let text =
        format!("{key}: frame {} is shorter than the map says; run `sawmill check`", name.frame);
    Error::new(ErrorKind::Corrupt, text)
}
