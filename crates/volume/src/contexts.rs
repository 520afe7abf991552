//! Puts an open volume together: what a write, a read and the engine each need, made once.
//!
//! Invariants: writes, reads and the engine share one journal, one journal map and one stored data.
//! A read-only volume has no journal and no thread of writing: collector, resumer, cache filler,
//! map loader.
//!
//! Not here: what is in them ([`WriteContext`], [`ReadContext`], [`engine::Context`]).

use std::sync::Arc;

use sawmill_device::{Geometry, Operations};
use sawmill_store::ObjectStore;

use crate::attachment::Attachment;
use crate::counters::AtomicCounters;
use crate::engine::{self, Mailbox};
use crate::geometry::ResizableGeometry;
use crate::journal::Journal;
use crate::limits;
use crate::options::OpenOptions;
use crate::read::ReadContext;
use crate::read::ahead::Streams;
use crate::read::fetch::Fetcher;
use crate::read::reads_seen::ReadsSeen;
use crate::recovery::stored::StoredVolume;
use crate::state::VolumeState;
use crate::stored_data::{StoredData, VolumeCache};
use crate::threads::later::DeferredJobs;
use crate::threads::pool::{Pool, Priority};
use crate::unstored::AgeLimit;
use crate::world::World;
use crate::write::WriteContext;

/// What writes, reads and the engine of one open volume each need.
#[derive(Clone)]
pub(crate) struct Contexts {
    pub(crate) attachment: Arc<Attachment>,
    pub(crate) write: Arc<WriteContext>,
    pub(crate) read: Arc<ReadContext>,
    pub(crate) collector: Arc<Pool>,
    pub(crate) cache_filler: Arc<Pool>,
    pub(crate) map_loader: Arc<Pool>,
}

impl Contexts {
    /// `journal`: none when read-only. `reader_threads`: 0 in a simulation, which runs jobs itself.
    pub(crate) fn new(
        store: Arc<dyn ObjectStore>,
        options: &OpenOptions,
        world: Arc<dyn World>,
        stored: StoredVolume,
        journal: Option<Arc<Journal>>,
        reader_threads: usize,
    ) -> Self {
        let StoredVolume { record, view, end, .. } = stored;
        view.segments.share(&options.segment_lists);
        let unstored = AgeLimit::new(options.unstored_age_max, end.position, world.now());
        let enter = |cache| VolumeCache::enter(cache, record.volume_id, &view.lineage);
        let cache = options.cache.clone().map(enter);
        let stored = Arc::new(StoredData::new(record.volume_id, view, cache, options.cut.clone()));
        let geometry = Geometry {
            size_bytes: record.size_bytes,
            block_bytes: record.block_bytes,
            preferred_bytes: limits::FRAME_BYTES,
            request_bytes_max: limits::REQUEST_BYTES_MAX,
            read_only: options.read_only,
            shared_cache: true,
            operations: Operations { discard: true, write_zeroes: true, allocation: true },
        };
        let attachment = Arc::new(Attachment {
            name: record.name.clone(),
            record,
            geometry: ResizableGeometry::new(geometry),
            epoch: end.epoch,
            epoch_before: end.epoch_before,
            read_only: options.read_only,
            world,
            store,
            state: VolumeState::default(),
            counters: AtomicCounters::default(),
        });
        let mailbox = Arc::new(Mailbox::new(attachment.clone(), journal.clone()));
        let threads_of_one = if options.read_only { 0 } else { reader_threads.min(1) };
        let resumer = Pool::new("resumer", threads_of_one, Priority::Usual);
        let write = Arc::new(WriteContext::new(
            attachment.clone(),
            journal.clone(),
            mailbox.clone(),
            resumer,
            unstored,
        ));
        let read = Arc::new(ReadContext {
            attachment: attachment.clone(),
            journal,
            journal_map: write.journal_map.clone(),
            stored,
            fetcher: Fetcher::new(options.prefetch_bytes, options.ahead_memory.clone()),
            streams: Streams::new(options.prefetch_bytes),
            reads_seen: ReadsSeen::default(),
            pool: Pool::new("reader", reader_threads, Priority::Usual),
            jobs: Arc::<DeferredJobs>::default(),
            mailbox,
        });
        let collector = Pool::new("collector", threads_of_one, Priority::Lowest);
        let cache_filler = Pool::new("cache-filler", threads_of_one, Priority::Lowest);
        let map_loader = Pool::new("map-loader", threads_of_one, Priority::Usual);
        Contexts { attachment, write, read, collector, cache_filler, map_loader }
    }

    /// What the engine needs.
    pub(crate) fn engine(&self) -> Arc<engine::Context> {
        Arc::new(engine::Context {
            attachment: self.attachment.clone(),
            journal: self.write.journal.clone(),
            journal_map: self.write.journal_map.clone(),
            stored: self.read.stored.clone(),
            mailbox: self.write.mailbox.clone(),
            write: self.write.clone(),
            collector: self.collector.clone(),
            cache_filler: self.cache_filler.clone(),
            map_loader: self.map_loader.clone(),
        })
    }
}
