//! An open volume: a block device. Hands each request to `write`, `read` or `flush`, and starts and
//! ends the loops.
//!
//! Invariants: the lock on the journal is held until the loops have ended and every waiter has its
//! answer. A close removes the staging file only when everything is stored and the journal's
//! superblock records that.
//!
//! Not here: how a volume is attached (`open`), the threads (`threads`), and requests about the
//! past (`past`).

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use sawmill_device::{BlockDevice, Geometry, Operation, Request};
use sawmill_format::volume_record::VolumeRecord;
use sawmill_store::ObjectStore;
use sawmill_sys::StagingFile;

use crate::attachment::Attachment;
use crate::contexts::Contexts;
use crate::cuts::stored_cut;
use crate::disk::Lock;
use crate::engine::{Engine, EngineOptions, EngineStart, GcRequest, Resize};
use crate::gc::{Garbage, garbage_of};
use crate::journal::Journal;
use crate::journal::writer::JournalWriter;
use crate::open::{self, AttachState};
use crate::options::OpenOptions;
use crate::read::{ReadContext, fetch};
use crate::recovery::{RecoveryReport, Reporter};
use crate::status::{GcReport, Health, Positions, Safety, Status};
use crate::threads::pool::Pool;
use crate::threads::{JournalLoop, LoopPlace, Loops, Threads};
use crate::world::{RealWorld, World};
use crate::write::{WriteContext, flush};
use crate::{Error, ErrorKind, Result, limits, names, read, write};

/// How often a waiter checks whether its result is still wanted.
const WANTED_EVERY: Duration = Duration::from_millis(250);

/// A volume whose loops do not run yet.
struct PreparedVolume {
    contexts: Contexts,
    recovery: RecoveryReport,
    memory: Vec<PathBuf>,
    lock: Option<Arc<Lock>>,
}

impl PreparedVolume {
    fn start(
        self,
        loops: Option<(JournalWriter, Engine)>,
        place: &LoopPlace,
    ) -> Result<Arc<Volume>> {
        let threads = Threads::start(&self.contexts, loops, self.lock.as_ref(), place)?;
        Ok(self.with(threads))
    }

    fn with(self, threads: Threads) -> Arc<Volume> {
        let PreparedVolume { contexts, recovery, memory, lock } = self;
        let Contexts { attachment, write, read, collector, cache_filler, map_loader } = contexts;
        let lock = Mutex::new(lock);
        let dropped = Mutex::default();
        Arc::new(Volume {
            attachment,
            write,
            read,
            background: [collector, cache_filler, map_loader],
            recovery,
            threads,
            memory,
            lock,
            dropped,
        })
    }
}

/// An open volume: a block device whose data is in a store.
pub struct Volume {
    pub(crate) attachment: Arc<Attachment>,
    pub(crate) write: Arc<WriteContext>,
    pub(crate) read: Arc<ReadContext>,
    background: [Arc<Pool>; 3],
    recovery: RecoveryReport,
    threads: Threads,
    /// Files in memory that a clean close removes: the staging file, and the one preallocated for
    /// the next open.
    memory: Vec<PathBuf>,
    /// `None` once this is closed; the threads hold the lock, too, for as long as they run.
    lock: Mutex<Option<Arc<Lock>>>,
    /// Disconnects those that wait for the volume's last user: dropped after everything above.
    /// Bounded by the callers of `when_dropped`.
    dropped: Mutex<Vec<SyncSender<()>>>,
}

impl Volume {
    /// Opens volume `name` of `store`: recovers it, fences other writers, replays the journal.
    pub fn open(
        store: Arc<dyn ObjectStore>,
        name: &str,
        options: OpenOptions,
    ) -> Result<Arc<Volume>> {
        let world: Arc<dyn World> = Arc::new(RealWorld::default());
        let threads = limits::READER_THREADS_MAX;
        if options.read_only {
            let place = LoopPlace { threads: options.loop_threads.clone(), disk: 0 };
            Self::open_to_read(store, name, &options, world, threads)?.start(None, &place)
        } else {
            let (unstarted, writer, engine) = Self::attach(store, name, &options, world, threads)?;
            // The journal is there now.
            let place = LoopPlace::of(options.loop_threads, &options.journal_path);
            unstarted.start(Some((writer, engine)), &place)
        }
    }

    fn open_to_read(
        store: Arc<dyn ObjectStore>,
        name: &str,
        options: &OpenOptions,
        world: Arc<dyn World>,
        reader_threads: usize,
    ) -> Result<PreparedVolume> {
        let mut reporter = Reporter::new(&*world);
        let stored = match &options.cut {
            Some(cut) => stored_cut(&*store, name, cut, &mut reporter)?,
            None => names::stored(&*store, name, &mut reporter)?,
        };
        let recovery = reporter.report;
        let (position, sequence) = (stored.end.position, stored.end.stored_sequence);
        let checkpoint_number = stored.newest.number_max;
        let contexts = Contexts::new(store, options, world, stored, None, reader_threads);
        contexts.write.mailbox.set_stored(position, sequence, checkpoint_number);
        Ok(PreparedVolume { contexts, recovery, memory: Vec::new(), lock: None })
    }

    fn attach(
        store: Arc<dyn ObjectStore>,
        name: &str,
        options: &OpenOptions,
        world: Arc<dyn World>,
        reader_threads: usize,
    ) -> Result<(PreparedVolume, JournalWriter, Engine)> {
        if options.cut.is_some() {
            let text =
                "a state of the past is for reading only: roll back to it, or clone it, to write";
            return Err(Error::new(ErrorKind::ReadOnly, text));
        }
        let mut reporter = Reporter::new(&*world);
        let AttachState { stored, bound, lock, looked_at } =
            open::attach(&*store, name, options, &*world, &mut reporter)?;
        let recovery = reporter.report;
        let journal = Arc::new(Journal::new(bound.ring, bound.disk, &bound.start));
        let end = stored.end.clone();
        let start = EngineStart {
            next_sequence: end.next_sequence,
            stored_sequence: end.stored_sequence,
            stored_position: end.position,
            looked_at,
            checkpoint_number: stored.newest.number_max,
            loaded: stored.newest.checkpoint.clone(),
            size_bytes: stored.record.size_bytes,
            rolled_back: end.rolled_back,
            log_bytes: end.log_bytes,
            received_end: bound.start.position,
            records: bound.records,
        };
        let contexts =
            Contexts::new(store, options, world, stored, Some(journal.clone()), reader_threads);
        for record in &start.records {
            contexts.write.journal_map.insert(
                record.address,
                record.length,
                record.position,
                record.clone(),
            );
            record.set_complete();
        }
        let memory = vec![
            bound.staging_path,
            open::spare_path(contexts.attachment.record.volume_id, options),
        ];
        let options = EngineOptions {
            segment_age_max: options.segment_age_max,
            log_age_max: options.log_age_max,
            checkpoint_bytes: options.checkpoint_bytes,
            uploads_max: options.uploads_max as usize,
            gc: options.gc,
            bounds: options.bounds,
        };
        let engine = Engine::new(contexts.engine(), options, start);
        let world = contexts.attachment.world.clone();
        let writer = JournalWriter::new(journal, bound.consumer, bound.superblock, world);
        Ok((
            PreparedVolume { contexts, recovery, memory, lock: Some(Arc::new(lock)) },
            writer,
            engine,
        ))
    }

    /// Opens without threads, for a simulation. A read-only volume needs no loops.
    pub(crate) fn open_stepped(
        store: Arc<dyn ObjectStore>,
        name: &str,
        options: &OpenOptions,
        world: Arc<dyn World>,
    ) -> Result<(Arc<Volume>, Loops)> {
        if options.read_only {
            let unstarted = Self::open_to_read(store, name, options, world, 0)?;
            let threads = Threads::idle(&unstarted.contexts);
            return Ok((unstarted.with(threads), None));
        }
        let (unstarted, writer, engine) = Self::attach(store, name, options, world, 0)?;
        let threads = Threads::idle(&unstarted.contexts);
        let contexts = &unstarted.contexts;
        let Some(journal) = contexts.write.journal.clone() else {
            return Err(Error::new(ErrorKind::Internal, "attached without a journal"));
        };
        let journal = JournalLoop::new(contexts, journal, writer, threads.loop_end());
        Ok((unstarted.with(threads), Some((journal, engine))))
    }

    pub(crate) fn begin_close(&self) {
        self.attachment.state.set_closing();
        self.threads.begin_close();
    }

    pub(crate) fn is_settled(&self) -> bool {
        self.write.mailbox.is_closed()
    }

    pub(crate) fn allow_clean(&self) {
        self.threads.allow_clean();
    }

    pub(crate) fn run_later(&self, now: Duration) -> Option<Duration> {
        self.read.jobs.run_due(now)
    }

    /// What recovery did.
    #[must_use]
    pub fn recovery(&self) -> &RecoveryReport {
        &self.recovery
    }

    /// The volume's record.
    #[must_use]
    pub fn record(&self) -> &VolumeRecord {
        &self.attachment.record
    }

    /// The volume's status at this moment.
    #[must_use]
    pub fn status(&self) -> Status {
        let view = self.read.stored.view();
        let totals = view.segments.totals();
        let stored = self.write.mailbox.stored();
        let mut counters = self.attachment.counters.counters();
        let mut health = self.attachment.state.health(self.attachment.world.now());
        let mut positions = Positions { accepted: stored, logged: stored, stored };
        let (mut journal_bytes, mut unstored_records) = (0, 0);
        if let Some(journal) = &self.write.journal {
            if let (Health::Serving | Health::StoreUnavailable { .. }, Some(error)) =
                (&health, journal.failure())
            {
                health = Health::Failed { reason: error.to_string() };
            }
            // Stored data survives a power cut too, logged or not. `accepted` is read last, so it
            // is never behind the others.
            positions.logged = journal.logged().max(stored);
            positions.accepted = journal.ring.next();
            counters.journal_syncs = journal.syncs.load(Ordering::Relaxed);
            counters.journal_written_bytes = journal.written_bytes.load(Ordering::Relaxed);
            journal_bytes = journal.capacity_bytes();
            unstored_records = journal.unstored_records() as u64;
        }
        Status {
            volume_id: self.attachment.record.volume_id,
            name: self.attachment.name.clone(),
            health,
            size_bytes: self.attachment.geometry.now().size_bytes,
            epoch: self.attachment.epoch,
            epoch_before: self.attachment.epoch_before,
            read_only: self.attachment.read_only,
            positions,
            stored_sequence: self.write.mailbox.stored_sequence(),
            checkpoint_number: self.write.mailbox.checkpoint_number(),
            live_bytes: view.live_bytes(),
            segment_data_bytes: totals.data_bytes,
            segment_object_bytes: totals.object_bytes,
            segments: totals.segments,
            dead_object_bytes: totals.dead_object_bytes,
            gc_left_bytes: self.write.mailbox.gc_left(),
            slowed_for_garbage: self.write.mailbox.is_slowed_for_garbage(),
            extents: view.map.extents(),
            map_bytes: view.map.memory_bytes(),
            map_groups_unloaded: view.map.held_groups(),
            journal_bytes,
            journal_unstored_bytes: positions.accepted.saturating_sub(stored),
            journal_unstored_records: unstored_records,
            stalled_requests: self.write.stalled.count() as u64,
            stall: self.write.stalled.reason(),
            uploads_in_flight: self.write.mailbox.uploads() as u32,
            counters,
        }
    }

    /// Waits until everything accepted so far is as safe as requested; false if `timeout` passed
    /// first.
    pub fn wait(&self, safety: Safety, timeout: Option<Duration>) -> Result<bool> {
        self.wait_while(safety, timeout, || true)
    }

    /// As [`wait`](Self::wait), but polls `is_wanted` a few times a second and stops when it
    /// returns false.
    pub fn wait_while(
        &self,
        safety: Safety,
        timeout: Option<Duration>,
        is_wanted: impl Fn() -> bool,
    ) -> Result<bool> {
        let Some(journal) = &self.write.journal else { return Ok(true) };
        if let Some(error) = self.attachment.state.refusal() {
            return Err(error);
        }
        let (sender, receiver) = sync_channel(1);
        let callback = Box::new(move |outcome| {
            // The waiter may have given up.
            let _ = sender.send(outcome);
        });
        let through = journal.ring.next();
        match safety {
            Safety::Logged => journal.when_logged(through, callback),
            Safety::Stored => self.write.mailbox.when_stored(through, callback),
        }
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        loop {
            let time_left =
                deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            match receiver.recv_timeout(
                time_left.map_or(WANTED_EVERY, |time_left| time_left.min(WANTED_EVERY)),
            ) {
                Ok(outcome) => return outcome.map(|()| true),
                Err(RecvTimeoutError::Disconnected) => return Err(closed_too_early()),
                Err(RecvTimeoutError::Timeout) => {
                    if time_left.is_some_and(|time_left| time_left <= WANTED_EVERY) || !is_wanted()
                    {
                        return Ok(false);
                    }
                }
            }
        }
    }

    /// Writes a checkpoint of what is stored, so that the next open has little log to read; false
    /// when `timeout` passed first, or the volume ended. A volume opened for reading needs none.
    pub fn checkpoint(&self, timeout: Duration) -> bool {
        if self.write.journal.is_none() {
            return true;
        }
        let (sender, receiver) = sync_channel(1);
        self.write.mailbox.request_checkpoint(sender);
        // A volume that ended before this request was queued never answers it: withdraw it.
        if self.attachment.state.refusal().is_some() {
            drop(self.write.mailbox.take_checkpoint_requests());
        }
        receiver.recv_timeout(timeout).is_ok()
    }

    /// Empties every segment whose share of live data is below `threshold` (1: every segment, so
    /// that the whole volume lies in address order), then deletes the dead ones. Blocks the caller;
    /// other requests continue.
    pub fn collect_garbage(&self, threshold: f64) -> Result<GcReport> {
        let (sender, receiver) = sync_channel(1);
        // The requester waits for it.
        self.request_collection(threshold, Box::new(move |outcome| drop(sender.send(outcome))))?;
        receiver.recv().map_err(|_| closed_too_early())?
    }

    /// As [`collect_garbage`](Self::collect_garbage); passes the result to `callback`.
    pub fn request_collection(
        &self,
        threshold: f64,
        callback: Box<dyn FnOnce(Result<GcReport>) + Send>,
    ) -> Result<()> {
        if !(0.0..=1.0).contains(&threshold) {
            let text =
                format!("a threshold of {threshold} is not a share: give a number from 0 to 1");
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        if self.attachment.read_only {
            let text = "a volume opened read-only cannot collect garbage: run the command where \
                        the volume is served for writing";
            return Err(Error::new(ErrorKind::Refused, text));
        }
        self.write.mailbox.request_gc(GcRequest {
            threshold,
            through: 0,
            is_settling: false,
            callback,
        });
        // A volume that ended before this request was queued never answers it: withdraw it.
        self.write.mailbox.fail_if_ended();
        Ok(())
    }

    /// The segments whose share of live data is below `threshold`, and what they hold: what
    /// [`collect_garbage`](Self::collect_garbage) would move.
    #[must_use]
    pub fn garbage(&self, threshold: f64) -> Garbage {
        garbage_of(&self.read.stored.view().segments, threshold)
    }

    /// Resizes the disk. Returns when two checkpoints with the new size are durable; only then do
    /// doors see it. A crash before that leaves the old size or the new one, and every byte below
    /// both.
    ///
    /// Shrinking loses what lies beyond the new end, for good, and the device must not be in use
    /// meanwhile. Errors: `Invalid` for a size that no volume of these blocks can have, `ReadOnly`.
    pub fn resize(&self, size_bytes: u64) -> Result<()> {
        if self.attachment.read_only {
            let text = format!(
                "volume {} is open for reading only: it cannot be resized",
                self.attachment.name
            );
            return Err(Error::new(ErrorKind::ReadOnly, text));
        }
        names::check_size(size_bytes, self.attachment.record.block_bytes)?;
        let current = self.attachment.geometry.now().size_bytes;
        if size_bytes == current {
            return Ok(());
        }
        if size_bytes < current {
            // Data in flight may lie beyond the new end.
            self.wait(Safety::Stored, None)?;
        }
        self.request_resize(size_bytes, current).recv().map_err(|_| closed_too_early())?
    }

    /// Grows the disk, as [`resize`](Self::resize) does, but does not block: the result arrives
    /// through the channel.
    pub fn begin_grow(&self, size_bytes: u64) -> Result<Receiver<Result<()>>> {
        names::check_size(size_bytes, self.attachment.record.block_bytes)?;
        let current = self.attachment.geometry.now().size_bytes;
        if size_bytes < current {
            let text = format!("the disk has {current} bytes: {size_bytes} would shrink it");
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        Ok(self.request_resize(size_bytes, current))
    }

    fn request_resize(&self, size_bytes: u64, from_bytes: u64) -> Receiver<Result<()>> {
        let (sender, receiver) = sync_channel(1);
        let callback = Box::new(move |outcome| {
            // The requester may have given up.
            let _ = sender.send(outcome);
        });
        self.write.mailbox.resize(Resize { size_bytes, from_bytes, callback });
        receiver
    }

    /// Preallocates the memory for the journal's newest part, so that a later [`open`](Self::open)
    /// of this volume, in this or another process, takes less time.
    pub fn preallocate(&self, options: &OpenOptions) -> Result<()> {
        let spare = open::spare_path(self.attachment.record.volume_id, options);
        StagingFile::preallocate(&spare, options.staging_bytes).map_err(|error| {
            let what = format!("cannot preallocate memory in {}", spare.display());
            Error::caused(ErrorKind::Full, what, error)
        })
    }

    /// Frees the preallocated memory if no later open will use it.
    pub fn release_preallocated(&self) {
        if let [_, spare] = &self.memory[..] {
            let _ = std::fs::remove_file(spare);
        }
    }

    /// Stores everything, writes a last checkpoint and releases the volume. Refuses new requests.
    /// Blocks while the store is unavailable; [`close_now`](Self::close_now) from another thread
    /// ends that.
    pub fn close(&self) -> Result<()> {
        // Storing everything may take long, and whatever kills this process meanwhile may free its
        // memory too: log everything first.
        if let (Some(journal), None) = (&self.write.journal, self.attachment.state.refusal()) {
            journal.when_logged(journal.ring.next(), Box::new(|_| ()));
        }
        self.attachment.state.set_closing();
        let closed = self.threads.close();
        self.finish_close(closed)
    }

    /// Finishes a close after the loops have ended, with everything stored if `closed`.
    pub(crate) fn finish_close(&self, closed: bool) -> Result<()> {
        let dead = self.attachment.state.refusal().filter(|_| self.attachment.state.is_dead());
        self.attachment.state.set_closed();
        self.end_all();
        match (dead, closed) {
            (Some(error), _) => Err(error),
            (None, true) => {
                // Everything is in the store. If the superblock that records this could not be
                // written, the one on the disk still needs the memory.
                if self.threads.is_memory_done() {
                    for path in &self.memory {
                        let _ = std::fs::remove_file(path);
                    }
                }
                Ok(())
            }
            (None, false) => Err(Error::new(
                ErrorKind::Closed,
                "the volume was stopped before everything was stored; accepted writes are in the \
                journal",
            )),
        }
    }

    /// Stops at once. Nothing accepted is lost: it is in the journal and in the memory that
    /// outlives the process.
    pub fn close_now(&self) {
        self.attachment.state.set_closing();
        self.threads.abandon();
        self.attachment.state.set_closed();
        self.end_all();
    }

    /// Ends every wait: from now on, another process may own the journal.
    fn end_all(&self) {
        let error = Error::new(ErrorKind::Closed, "the volume was stopped");
        self.write.resumer.close();
        self.write.stalled.fail(&error);
        flush::resume(&self.write);
        self.write.mailbox.fail_waiters(&error);
        if let Some(journal) = &self.write.journal {
            journal.fail(error.clone());
        }
        self.read.pool.close();
        self.background.iter().for_each(|pool| pool.close());
        fetch::fail_all(&self.read, &error);
        if let Some(journal) = &self.write.journal {
            journal.ring.unlock();
        }
        *self.lock.lock() = None;
    }

    /// Returns a receiver that is disconnected after the last user has dropped the volume.
    #[must_use]
    pub fn when_dropped(&self) -> Receiver<()> {
        let (sender, receiver) = sync_channel(0);
        self.dropped.lock().push(sender);
        receiver
    }
}

fn closed_too_early() -> Error {
    Error::new(ErrorKind::Closed, "the volume was closed before this was done")
}

impl Drop for Volume {
    fn drop(&mut self) {
        // A fenced or failed volume also ends its threads here.
        self.close_now();
    }
}

impl BlockDevice for Volume {
    fn geometry(&self) -> Geometry {
        self.attachment.geometry.now()
    }

    fn submit(&self, request: Request) {
        if let Some(error) = self.attachment.state.refusal() {
            return request.fail(error);
        }
        if let Err(error) = request.check(&self.attachment.geometry.now()) {
            return request.fail(error);
        }
        if self.write.journal.is_some()
            && self.write.watch.is_woken_by_use(self.attachment.world.now())
        {
            // The engine sleeps while the volume is not in use.
            self.write.mailbox.wake.notify();
        }
        match request.operation {
            Operation::Read => read::submit(&self.read, request),
            Operation::Prefetch => read::prefetch(&self.read, request),
            Operation::Allocation => read::allocation(&self.read, request),
            Operation::Flush => flush::submit(&self.write, request),
            Operation::Write | Operation::Discard | Operation::WriteZeroes => {
                match self.write.journal.as_ref().and_then(|journal| journal.failure()) {
                    Some(error) => request.fail(error.clone()),
                    None => write::submit(&self.write, request),
                }
            }
        }
    }
}
