//! An open volume: a block device. Sends each request down its corridor (`write`, `read`, `flush`) and runs
//! the loops.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, RwLock};
use sawmill_device::{BlockDevice, Geometry, Operation, Operations, Request};
use sawmill_format::volume_record::VolumeRecord;
use sawmill_store::ObjectStore;
use sawmill_sys::StagingFile;

use crate::cuts::stored_cut;
use crate::disk::Lock;
use crate::driver::{Driver, JournalLoop};
use crate::fetch::{self, Fetcher};
use crate::gc::{Garbage, garbage_of};
use crate::geometry::ResizableGeometry;
use crate::journal::Journal;
use crate::journal::writer::JournalWriter;
use crate::keeper::{GcOrder, Inbox, Keeper, KeeperOptions, KeeperStart, Resize};
use crate::later::Later;
use crate::map::JournalMap;
use crate::open::{self, Attached, Stored};
use crate::options::OpenOptions;
use crate::pool::{Pool, Priority};
use crate::readers::Readers;
use crate::recovery::{RecoveryReport, Reporter};
use crate::shared::{Shared, Tally};
use crate::state::State;
use crate::status::{GcReport, Health, Positions, Safety, Status};
use crate::steps::Loops;
use crate::unstored::Unstored;
use crate::watch::Watch;
use crate::world::{RealWorld, World};
use crate::{Error, ErrorKind, Result, flush, limits, names, read, write};

/// How often a waiter looks whether anybody still wants to know.
const WANTED_EVERY: Duration = Duration::from_millis(250);

/// A volume whose loops do not run yet.
struct Unstarted {
    shared: Arc<Shared>,
    recovery: RecoveryReport,
    memory: Vec<PathBuf>,
    lock: Option<Arc<Lock>>,
}

impl Unstarted {
    fn start(self, loops: Option<(JournalWriter, Keeper)>) -> Result<Arc<Volume>> {
        let driver = Driver::start(&self.shared, loops, self.lock.as_ref())?;
        Ok(self.with(driver))
    }

    fn with(self, driver: Driver) -> Arc<Volume> {
        let Unstarted { shared, recovery, memory, lock } = self;
        Arc::new(Volume { shared, recovery, driver, memory, lock: Mutex::new(lock) })
    }
}

/// See the head of this file.
pub struct Volume {
    pub(crate) shared: Arc<Shared>,
    recovery: RecoveryReport,
    driver: Driver,
    /// Files in memory that a clean end removes: the staging file, and what is preallocated for the next one.
    memory: Vec<PathBuf>,
    /// Gone once this is closed; its threads hold it, too, for as long as they run.
    lock: Mutex<Option<Arc<Lock>>>,
}

impl Volume {
    /// Opens volume `name` of `store`: recovers it, fences other writers, replays the journal.
    pub fn open(store: Arc<dyn ObjectStore>, name: &str, options: OpenOptions) -> Result<Arc<Volume>> {
        let world: Arc<dyn World> = Arc::new(RealWorld::default());
        let threads = limits::READER_THREADS;
        if options.read_only {
            Self::open_to_read(store, name, &options, world, threads)?.start(None)
        } else {
            let (unstarted, writer, keeper) = Self::attach(store, name, &options, world, threads)?;
            unstarted.start(Some((writer, keeper)))
        }
    }

    fn open_to_read(
        store: Arc<dyn ObjectStore>,
        name: &str,
        options: &OpenOptions,
        world: Arc<dyn World>,
        reader_threads: usize,
    ) -> Result<Unstarted> {
        let mut reporter = Reporter::new(&*world);
        let stored = match &options.cut {
            Some(cut) => stored_cut(&*store, name, cut, &mut reporter)?,
            None => open::stored(&*store, name, &mut reporter)?,
        };
        let recovery = reporter.report;
        let (position, sequence) = (stored.end.position, stored.end.stored_sequence);
        let checkpoint_number = stored.newest.number_max;
        let shared = share(store, options, world, stored, None, reader_threads);
        shared.inbox.set_stored(position, sequence, checkpoint_number);
        Ok(Unstarted { shared, recovery, memory: Vec::new(), lock: None })
    }

    fn attach(
        store: Arc<dyn ObjectStore>,
        name: &str,
        options: &OpenOptions,
        world: Arc<dyn World>,
        reader_threads: usize,
    ) -> Result<(Unstarted, JournalWriter, Keeper)> {
        if options.cut.is_some() {
            let text = "a state of the past is for reading only: roll back to it, or clone it, to write";
            return Err(Error::new(ErrorKind::ReadOnly, text));
        }
        let mut reporter = Reporter::new(&*world);
        let Attached { stored, bound, lock, looked_at } =
            open::attach(&*store, name, options, &*world, &mut reporter)?;
        let recovery = reporter.report;
        let journal = Arc::new(Journal::new(bound.ring, bound.disk, &bound.start));
        let end = stored.end.clone();
        let start = KeeperStart {
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
        let shared = share(store, options, world, stored, Some(journal.clone()), reader_threads);
        for record in &start.records {
            shared.journal_map.insert(record.address, record.length, record.position, record.clone());
            record.set_complete();
        }
        let memory = vec![bound.staging_path, open::spare_path(shared.record.volume_id, options)];
        let options = KeeperOptions {
            segment_age_max: options.segment_age_max,
            checkpoint_bytes: options.checkpoint_bytes,
            uploads_max: options.uploads_max as usize,
            gc: options.gc,
        };
        let keeper = Keeper::new(shared.clone(), options, start);
        let writer = JournalWriter::new(journal, bound.consumer, bound.superblock);
        Ok((Unstarted { shared, recovery, memory, lock: Some(Arc::new(lock)) }, writer, keeper))
    }

    /// Opens without threads, for a simulation. Who only reads needs no loops.
    pub(crate) fn open_stepped(
        store: Arc<dyn ObjectStore>,
        name: &str,
        options: &OpenOptions,
        world: Arc<dyn World>,
    ) -> Result<(Arc<Volume>, Loops)> {
        if options.read_only {
            let unstarted = Self::open_to_read(store, name, options, world, 0)?;
            let driver = Driver::idle(&unstarted.shared);
            return Ok((unstarted.with(driver), None));
        }
        let (unstarted, writer, keeper) = Self::attach(store, name, options, world, 0)?;
        let driver = Driver::idle(&unstarted.shared);
        let shared = &unstarted.shared;
        let Some(journal) = shared.journal.clone() else {
            return Err(Error::new(ErrorKind::Internal, "attached without a journal"));
        };
        let journal = JournalLoop::new(shared.clone(), journal, writer, driver.orders());
        Ok((unstarted.with(driver), Some((journal, keeper))))
    }

    pub(crate) fn begin_close(&self) {
        self.shared.state.set_closing();
        self.driver.begin_close();
    }

    pub(crate) fn is_settled(&self) -> bool {
        self.shared.inbox.is_closed()
    }

    pub(crate) fn allow_clean(&self) {
        self.driver.allow_clean();
    }

    pub(crate) fn run_later(&self, now: Duration) -> Option<Duration> {
        self.shared.later.run_due(now)
    }

    /// What recovery did.
    #[must_use]
    pub fn recovery(&self) -> &RecoveryReport {
        &self.recovery
    }

    /// The volume's record.
    #[must_use]
    pub fn record(&self) -> &VolumeRecord {
        &self.shared.record
    }

    /// A picture of the volume.
    #[must_use]
    pub fn status(&self) -> Status {
        let shared = &self.shared;
        let view = shared.view();
        let totals = view.segments.totals();
        let stored = shared.inbox.stored();
        let mut counters = shared.tally.counters();
        let mut health = shared.state.health(shared.world.now());
        let mut positions = Positions { accepted: stored, logged: stored, stored };
        let (mut journal_bytes, mut unstored_records) = (0, 0);
        if let Some(journal) = &shared.journal {
            if let (Health::Serving | Health::StoreUnavailable { .. }, Some(error)) =
                (&health, journal.failure())
            {
                health = Health::Failed { reason: error.to_string() };
            }
            positions.accepted = journal.ring.next();
            positions.logged = journal.logged();
            counters.journal_syncs = journal.syncs.load(Ordering::Relaxed);
            counters.journal_written_bytes = journal.written_bytes.load(Ordering::Relaxed);
            journal_bytes = journal.capacity_bytes();
            unstored_records = journal.unstored_records() as u64;
        }
        Status {
            volume_id: shared.record.volume_id,
            name: shared.name.clone(),
            health,
            size_bytes: shared.geometry.now().size_bytes,
            epoch: shared.epoch,
            epoch_before: shared.epoch_before,
            read_only: shared.read_only,
            positions,
            stored_sequence: shared.inbox.stored_sequence(),
            checkpoint_number: shared.inbox.checkpoint_number(),
            live_bytes: view.map.mapped_bytes(),
            segment_data_bytes: totals.data_bytes,
            segment_object_bytes: totals.object_bytes,
            segments: totals.segments,
            dead_object_bytes: totals.dead_object_bytes,
            gc_left_bytes: shared.inbox.gc_left(),
            extents: view.map.extents(),
            map_bytes: view.map.memory_bytes(),
            journal_bytes,
            journal_unstored_bytes: positions.accepted.saturating_sub(stored),
            journal_unstored_records: unstored_records,
            stalled_requests: shared.stalled.count() as u64,
            stall: shared.stalled.reason(),
            uploads_in_flight: shared.inbox.uploads() as u32,
            counters,
        }
    }

    /// Waits until everything accepted by now is as safe as asked; false when `timeout` passed first.
    pub fn wait(&self, safety: Safety, timeout: Option<Duration>) -> Result<bool> {
        self.wait_while(safety, timeout, || true)
    }

    /// The same, for as long as somebody wants to know, who is asked a few times a second.
    pub fn wait_while(
        &self,
        safety: Safety,
        timeout: Option<Duration>,
        is_wanted: impl Fn() -> bool,
    ) -> Result<bool> {
        let shared = &self.shared;
        let Some(journal) = &shared.journal else { return Ok(true) };
        if let Some(error) = shared.state.refusal() {
            return Err(error);
        }
        let (tell, hear) = sync_channel(1);
        let told = Box::new(move |outcome| {
            // The waiter may have given up.
            let _ = tell.send(outcome);
        });
        let target = journal.ring.next();
        match safety {
            Safety::Logged => journal.when_logged(target, told),
            Safety::Stored => shared.inbox.when_stored(shared, target, told),
        }
        let closed = || Error::new(ErrorKind::Closed, "the volume was closed before this was done");
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        loop {
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            match hear.recv_timeout(left.map_or(WANTED_EVERY, |left| left.min(WANTED_EVERY))) {
                Ok(outcome) => return outcome.map(|()| true),
                Err(RecvTimeoutError::Disconnected) => return Err(closed()),
                Err(RecvTimeoutError::Timeout) => {
                    if left.is_some_and(|left| left <= WANTED_EVERY) || !is_wanted() {
                        return Ok(false);
                    }
                }
            }
        }
    }

    /// Writes a checkpoint of what is stored, so that the next open has little log to read; false when
    /// `timeout` passed first, or the volume ended. A volume opened for reading needs none.
    pub fn checkpoint(&self, timeout: Duration) -> bool {
        if self.shared.journal.is_none() {
            return true;
        }
        let (tell, hear) = sync_channel(1);
        self.shared.inbox.order_checkpoint(tell);
        // Who closed or died before the order was there told nobody.
        if self.shared.state.refusal().is_some() {
            drop(self.shared.inbox.take_checkpoint_orders());
        }
        hear.recv_timeout(timeout).is_ok()
    }

    /// Empties every segment of which less than `threshold` of the data is live (1: all of them, so that the
    /// whole volume lies in address order) and deletes what is dead then. Blocks; others go on meanwhile.
    pub fn collect_garbage(&self, threshold: f64) -> Result<GcReport> {
        let (tell, hear) = sync_channel(1);
        // The asker waits.
        self.order_collection(threshold, Box::new(move |outcome| drop(tell.send(outcome))))?;
        hear.recv()
            .map_err(|_| Error::new(ErrorKind::Closed, "the volume was closed before this was done"))?
    }

    /// As [`collect_garbage`](Self::collect_garbage); `tell` hears how it ended.
    pub fn order_collection(
        &self,
        threshold: f64,
        tell: Box<dyn FnOnce(Result<GcReport>) + Send>,
    ) -> Result<()> {
        let shared = &self.shared;
        if !(0.0..=1.0).contains(&threshold) {
            let text = format!("a threshold of {threshold} is not a share: give a number from 0 to 1");
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        if shared.read_only {
            let text = "a volume opened read-only cannot collect garbage: run the command where the volume \
                        is served for writing";
            return Err(Error::new(ErrorKind::Refused, text));
        }
        shared.inbox.order_gc(GcOrder { threshold, through: 0, is_settling: false, tell });
        // Who closed or died before the order was there told nobody.
        if let Some(error) = shared.state.refusal() {
            shared.inbox.fail_waiters(&error);
        }
        Ok(())
    }

    /// Segments of which less than `threshold` of the data is live, and what they hold: what
    /// [`collect_garbage`](Self::collect_garbage) would move.
    #[must_use]
    pub fn garbage(&self, threshold: f64) -> Garbage {
        garbage_of(&self.shared.view().segments, threshold)
    }

    /// Gives the disk another size. Returns when a checkpoint that says so is durable; only then do doors see
    /// the new size. A crash before that leaves the old size or the new one, and every byte below both.
    ///
    /// Shrinking loses what lies beyond the new end, for good, and nobody may use the device meanwhile.
    /// Errors: `Invalid` for a size that no volume of these blocks can have, `ReadOnly`.
    pub fn resize(&self, size_bytes: u64) -> Result<()> {
        let shared = &self.shared;
        if shared.read_only {
            let text = format!("volume {} is open for reading only: it cannot be resized", shared.name);
            return Err(Error::new(ErrorKind::ReadOnly, text));
        }
        names::check_size(size_bytes, shared.record.block_bytes)?;
        let current = shared.geometry.now().size_bytes;
        if size_bytes == current {
            return Ok(());
        }
        if size_bytes < current {
            // What is on its way may lie beyond the new end.
            self.wait(Safety::Stored, None)?;
        }
        self.ask_resize(size_bytes, current)
            .recv()
            .map_err(|_| Error::new(ErrorKind::Closed, "the volume was closed before this was done"))?
    }

    /// Makes the disk larger, as [`resize`](Self::resize) does, for who must not wait: the answer comes
    /// through the channel.
    pub fn begin_grow(&self, size_bytes: u64) -> Result<Receiver<Result<()>>> {
        names::check_size(size_bytes, self.shared.record.block_bytes)?;
        let current = self.shared.geometry.now().size_bytes;
        if size_bytes < current {
            let text = format!("the disk has {current} bytes: {size_bytes} would shrink it");
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        Ok(self.ask_resize(size_bytes, current))
    }

    fn ask_resize(&self, size_bytes: u64, from_bytes: u64) -> Receiver<Result<()>> {
        let (tell, hear) = sync_channel(1);
        let told = Box::new(move |outcome| {
            // Whoever asked may not care any more.
            let _ = tell.send(outcome);
        });
        self.shared.inbox.resize(&self.shared, Resize { size_bytes, from_bytes, tell: told });
        hear
    }

    /// Lays up what a later [`open`](Self::open) of this volume in this or another process would take time
    /// for, and its users would wait for: memory for the journal's newest part.
    pub fn preallocate(&self, options: &OpenOptions) -> Result<()> {
        let spare = open::spare_path(self.shared.record.volume_id, options);
        StagingFile::preallocate(&spare, options.staging_bytes).map_err(|error| {
            let text = format!("cannot preallocate memory in {}: {error}", spare.display());
            Error::new(ErrorKind::Full, text)
        })
    }

    /// Frees what was preallocated for an open that does not come.
    pub fn release_preallocated(&self) {
        if let [_, spare] = &self.memory[..] {
            let _ = std::fs::remove_file(spare);
        }
    }

    /// Stores everything, writes a last checkpoint and lets the volume go. Takes no more requests. Blocks
    /// while the store is away; [`close_now`](Self::close_now) from another thread ends that.
    pub fn close(&self) -> Result<()> {
        // To store everything may take long, and memory may go with who ends this process meanwhile.
        if let (Some(journal), None) = (&self.shared.journal, self.shared.state.refusal()) {
            journal.when_logged(journal.ring.next(), Box::new(|_| ()));
        }
        self.shared.state.set_closing();
        let closed = self.driver.close();
        self.finish_close(closed)
    }

    /// The loops have ended, with everything stored if `closed`.
    pub(crate) fn finish_close(&self, closed: bool) -> Result<()> {
        let dead = self.shared.state.refusal().filter(|_| self.shared.state.is_dead());
        self.shared.state.set_closed();
        self.end_all();
        match (dead, closed) {
            (Some(error), _) => Err(error),
            (None, true) => {
                // Everything is in the store and the journal says so: the memory has done its duty.
                for path in &self.memory {
                    let _ = std::fs::remove_file(path);
                }
                Ok(())
            }
            (None, false) => Err(Error::new(
                ErrorKind::Closed,
                "the volume was stopped before everything was stored; accepted writes are in the journal",
            )),
        }
    }

    /// Stops at once. Nothing accepted is lost: it is in the journal and in the memory that outlives the
    /// process.
    pub fn close_now(&self) {
        self.shared.state.set_closing();
        self.driver.abandon();
        self.shared.state.set_closed();
        self.end_all();
    }

    /// Nobody waits longer than the volume lives; then the journal may be somebody else's.
    fn end_all(&self) {
        let error = Error::new(ErrorKind::Closed, "the volume was stopped");
        self.shared.stalled.fail(&error);
        flush::go_on(&self.shared);
        self.shared.inbox.fail_waiters(&error);
        if let Some(journal) = &self.shared.journal {
            journal.fail(error.clone());
        }
        self.shared.pool.close();
        self.shared.collector.close();
        fetch::fail_all(&self.shared, &error);
        if let Some(journal) = &self.shared.journal {
            journal.ring.unlock();
        }
        *self.lock.lock() = None;
    }
}

impl Drop for Volume {
    fn drop(&mut self) {
        // Also when it was fenced or has failed: its threads go with it.
        self.close_now();
    }
}

impl BlockDevice for Volume {
    fn geometry(&self) -> Geometry {
        self.shared.geometry.now()
    }

    fn submit(&self, request: Request) {
        let shared = &self.shared;
        if let Some(error) = shared.state.refusal() {
            return request.fail(error);
        }
        if let Err(error) = request.check(&shared.geometry.now()) {
            return request.fail(error);
        }
        if shared.journal.is_some() && shared.watch.is_woken_by_use(shared.world.now()) {
            // The keeper sleeps while nobody uses the volume.
            shared.inbox.wake.ring();
        }
        match request.operation {
            Operation::Read => read::submit(shared, request),
            Operation::Prefetch => read::prefetch(shared, request),
            Operation::Allocation => read::allocation(shared, request),
            Operation::Flush => flush::submit(shared, request),
            Operation::Write | Operation::Discard | Operation::WriteZeroes => {
                match shared.journal.as_ref().and_then(|journal| journal.failure()) {
                    Some(error) => request.fail(error.clone()),
                    None => write::submit(shared, request),
                }
            }
        }
    }
}

fn share(
    store: Arc<dyn ObjectStore>,
    options: &OpenOptions,
    world: Arc<dyn World>,
    stored: Stored,
    journal: Option<Arc<Journal>>,
    reader_threads: usize,
) -> Arc<Shared> {
    let record = stored.record;
    let geometry = Geometry {
        size_bytes: record.size_bytes,
        block_bytes: record.block_bytes,
        preferred_bytes: limits::FRAME_BYTES,
        request_bytes_max: limits::REQUEST_BYTES_MAX,
        read_only: options.read_only,
        shared_cache: true,
        operations: Operations { discard: true, write_zeroes: true, allocation: true },
    };
    let pool = Pool::new("reader", reader_threads, Priority::Usual);
    let collectors = if options.read_only { 0 } else { reader_threads.min(1) };
    let collector = Pool::new("collector", collectors, Priority::Lowest);
    let cache = options.cache.clone().map(|cache| {
        let owner = cache.owner(record.volume_id);
        let ancestors = stored.view.lineage.entries().iter().map(|entry| cache.owner(entry.volume_id));
        let ancestors = ancestors.collect();
        (cache, owner, ancestors)
    });
    let lineage = stored.view.lineage.clone();
    let unstored = Unstored::new(options.unstored_age_max, stored.end.position, world.now());
    Arc::new(Shared {
        name: record.name.clone(),
        record,
        geometry: ResizableGeometry::new(geometry),
        epoch: stored.end.epoch,
        epoch_before: stored.end.epoch_before,
        read_only: options.read_only,
        world,
        store,
        journal,
        journal_map: JournalMap::new(),
        view: RwLock::new(Arc::new(stored.view)),
        residents: crate::segment::resident::Residents::default(),
        cache,
        lineage,
        fixed_cut: options.cut.clone(),
        readers: Arc::new(Readers::default()),
        pool,
        collector,
        fetcher: Fetcher::new(options.prefetch_bytes),
        later: Later::default(),
        state: State::default(),
        tally: Tally::default(),
        inbox: Inbox::default(),
        stalled: write::Stalled::default(),
        watch: Watch::default(),
        unstored,
    })
}
