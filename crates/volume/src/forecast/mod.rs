//! Predicts what a disk does under given writes, without any data: how much goes to the store, how
//! much garbage collection copies, how large the map grows, how many requests it takes.
//!
//! Nothing is modeled twice. The functions of a served volume cut records, fill, coalesce and lay
//! out segments, enter extents into the map, count, choose, gather and pack segments, and encode
//! checkpoints. What differs: time is that of the caller's requests, the store answers at once, and
//! collecting begins and ends between two segments.
//!
//! Invariants: time never goes back. A segment is in the table before its extents enter the map,
//! and only a checkpoint removes it, if an earlier one had found it dead.
//!
//! Modules: `report` (the results). Not here: reading traces, prices, charts (the binary's matter).

mod report;
#[cfg(test)]
mod tests;

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use sawmill_format::checkpoint::{Checkpoint, CheckpointIdentity, PartEntry};
use sawmill_format::ids::{PutId, VolumeId};
use sawmill_format::journal::RecordOperation;
use sawmill_format::kept_block::KeptBlock;
use sawmill_format::segment::{SegmentHeader, SegmentKind, raw_frames};

use crate::cuts::Lineage;
use crate::engine::QUIET_AFTER;
use crate::gc::gather::contents_of;
use crate::gc::plan_bytes_max;
use crate::gc::policy::GcPolicy;
use crate::gc::sweep::MovePlan;
use crate::limits::AttachmentBounds;
use crate::map::ObjectMap;
use crate::map::freeze::freeze_map;
use crate::record::Record;
use crate::recovery::apply::apply_extents;
use crate::segment::builder::{self, SegmentLayout, lay_out};
use crate::segment::table::{SegmentInfo, SegmentTable};
use crate::view::View;
use crate::{Error, ErrorKind, Result, limits, names, write};

use report::Sampler;
pub use report::{Report, Requests, Sample};

/// The disk to predict.
#[derive(Clone, Debug)]
pub struct ForecastOptions {
    /// Size of the disk, at most [`limits::SIZE_BYTES_MAX`].
    pub size_bytes: u64,
    /// As of [`CreateOptions`](crate::CreateOptions).
    pub segment_bytes: u32,
    /// As of [`OpenOptions`](crate::OpenOptions).
    pub segment_age_max: Duration,
    /// As of [`OpenOptions`](crate::OpenOptions).
    pub checkpoint_bytes: u64,
    /// None: nothing is collected, and a segment is deleted only when none of its data is live.
    pub gc: Option<GcPolicy>,
    /// Whether holes of up to [`limits::GC_HOLE_BYTES_MAX`] are plugged when segments are
    /// collected.
    pub plugs: bool,
}

impl ForecastOptions {
    /// The defaults for a disk of `size_bytes`.
    #[must_use]
    pub fn new(size_bytes: u64) -> Self {
        ForecastOptions {
            size_bytes,
            segment_bytes: limits::SEGMENT_BYTES_DEFAULT,
            segment_age_max: Duration::from_secs(5),
            checkpoint_bytes: limits::CHECKPOINT_BYTES_DEFAULT,
            gc: Some(GcPolicy::default()),
            plugs: true,
        }
    }
}

/// A model of a served volume that holds no data: it counts what the volume would do.
pub struct Forecast {
    options: ForecastOptions,
    view: View,
    /// The segment being filled.
    pending: Vec<Arc<Record>>,
    pending_bytes: u64,
    pending_since: Duration,
    /// Position of the next record. Each takes one byte of position: only the order counts.
    position: u64,
    next_sequence: u32,
    now: Duration,
    /// When a segment was sealed last.
    busy_at: Duration,
    /// Log since the last checkpoint.
    log_bytes: u64,
    checkpoint_number: u64,
    parts: Vec<PartEntry>,
    root_bytes: u64,
    sampler: Sampler,
    report: Report,
}

const VOLUME: VolumeId = VolumeId([0; 16]);
const PUT: PutId = PutId([0; 16]);

impl Forecast {
    /// An empty disk.
    pub fn new(options: ForecastOptions) -> Result<Forecast> {
        names::check_segment_bytes(options.segment_bytes)?;
        let size_bytes = options.size_bytes;
        if size_bytes == 0 || size_bytes > limits::SIZE_BYTES_MAX {
            let text =
                format!("a size of {size_bytes} bytes is not in 1..={}", limits::SIZE_BYTES_MAX);
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        Ok(Forecast {
            view: View {
                map: ObjectMap::new(size_bytes),
                segments: SegmentTable::default(),
                cuts: Mutex::default(),
                lineage: Lineage::default(),
            },
            options,
            pending: Vec::new(),
            pending_bytes: 0,
            pending_since: Duration::ZERO,
            position: 0,
            next_sequence: 1,
            now: Duration::ZERO,
            busy_at: Duration::ZERO,
            log_bytes: 0,
            checkpoint_number: 0,
            parts: Vec::new(),
            root_bytes: 0,
            sampler: Sampler::new(),
            report: Report::default(),
        })
    }

    /// Writes `length` bytes at `address`, at time `at` since some start. Time never goes back: an
    /// earlier time counts as that of the request before.
    pub fn write(&mut self, address: u64, length: u64, at: Duration) -> Result<()> {
        self.check_range(address, length)?;
        self.report.written_bytes += length;
        self.report.writes += 1;
        self.append(RecordOperation::Write, address, length, at)
    }

    /// A discard; arguments as for [`write`](Self::write).
    pub fn discard(&mut self, address: u64, length: u64, at: Duration) -> Result<()> {
        self.check_range(address, length)?;
        self.report.discards += 1;
        self.append(RecordOperation::Discard, address, length, at)
    }

    /// A write of zeroes; arguments as for [`write`](Self::write).
    pub fn zero(&mut self, address: u64, length: u64, at: Duration) -> Result<()> {
        self.check_range(address, length)?;
        self.report.discards += 1;
        self.append(RecordOperation::Zero, address, length, at)
    }

    /// A read; arguments as for [`write`](Self::write). Counts the fetches without any cache: one
    /// for each piece, also where nothing was written, because a trace begins with a disk that is
    /// not empty.
    pub fn read(&mut self, address: u64, length: u64, at: Duration) -> Result<()> {
        self.check_range(address, length)?;
        self.pass_time(at)?;
        self.report.reads += 1;
        self.report.read_bytes += length;
        let mut pieces = 0;
        self.view.map.lookup(address, length, &mut |_| pieces += 1);
        self.report.requests.get_reads_max += pieces;
        Ok(())
    }

    /// Seals what is left and returns the totals.
    pub fn finish(mut self) -> Result<Report> {
        self.seal()?;
        self.settle();
        let map = &self.view.map;
        self.report.extents =
            map.groups().into_iter().map(|group| map.export_group(group).len() as u64).sum();
        self.sampler.end(&mut self.report, self.now);
        Ok(self.report)
    }

    fn check_range(&self, address: u64, length: u64) -> Result<()> {
        let size_bytes = self.options.size_bytes;
        if address.checked_add(length).is_some_and(|end| end <= size_bytes) {
            return Ok(());
        }
        let text = format!("{length} bytes at {address} reach past the disk's {size_bytes} bytes");
        Err(Error::new(ErrorKind::Invalid, text))
    }

    /// The range was checked, so that nothing counts what is refused.
    fn append(
        &mut self,
        operation: RecordOperation,
        address: u64,
        length: u64,
        at: Duration,
    ) -> Result<()> {
        self.pass_time(at)?;
        let mut done = 0;
        while done < length {
            let bytes = write::record_length(operation, length - done);
            let record = Record::new(self.position, operation, address + done, bytes, 1);
            self.position = record.end();
            if self.pending.is_empty() {
                self.pending_since = self.now;
            }
            self.pending_bytes += record.payload_bytes();
            self.pending.push(Arc::new(record));
            done += bytes;
            if builder::is_full(self.pending_bytes, self.pending.len(), self.options.segment_bytes)
            {
                self.seal()?;
            }
        }
        Ok(())
    }

    /// Seals the pending segment if it becomes too old by `at`.
    fn pass_time(&mut self, at: Duration) -> Result<()> {
        let age = self.options.segment_age_max;
        if !age.is_zero() && !self.pending.is_empty() && at >= self.pending_since + age {
            self.now = self.now.max(self.pending_since + age);
            self.seal()?;
        }
        // The disk is idle until `at`: dead segments are deleted, which takes two checkpoints.
        if self.pending.is_empty() && at >= self.busy_at + QUIET_AFTER {
            for _ in 0..2 {
                if self.view.segments.totals().is_worth_a_checkpoint_in_peace() {
                    self.checkpoint()?;
                }
            }
        }
        self.now = self.now.max(at);
        Ok(())
    }

    fn unix_ms(&self) -> u64 {
        u64::try_from(self.now.as_millis()).unwrap_or(u64::MAX)
    }

    fn header(&mut self, kind: SegmentKind) -> Result<SegmentHeader> {
        let sequence = self.next_sequence;
        if u64::from(sequence) >= limits::SEQUENCE_MAX {
            return Err(Error::new(ErrorKind::Full, "a volume has no more sequences than these"));
        }
        self.next_sequence += 1;
        Ok(SegmentHeader {
            volume_id: VOLUME,
            put_id: PUT,
            sequence: u64::from(sequence),
            epoch: 1,
            previous_sequence: u64::from(sequence) - 1,
            stored_through: u64::from(sequence) - 1,
            checkpoint_number: self.checkpoint_number,
            position_start: self.position,
            position_end: self.position,
            wall_unix_ms: self.unix_ms(),
            next_sequence: u64::from(sequence) + 1,
            kind,
            frame_bytes: limits::FRAME_BYTES,
            data_bytes: 0,
            extents: Vec::new(),
            frames: Vec::new(),
            origins: Vec::new(),
            size_bytes: 0,
        })
    }

    fn seal(&mut self) -> Result<()> {
        if self.pending.is_empty() {
            return Ok(());
        }
        let records = std::mem::take(&mut self.pending);
        self.pending_bytes = 0;
        self.busy_at = self.now;
        let header = self.header(SegmentKind::Data)?;
        let SegmentLayout { header, coalesced_bytes, .. } = lay_out(&records, header)?;
        self.report.coalesced_bytes += coalesced_bytes;
        self.report.data_segment_bytes += header.data_bytes;
        self.report.data_segments += 1;
        self.store(&header);
        apply_extents(&self.view, &header);
        self.collect()?;
        let (totals, parts_bytes) = (self.view.segments.totals(), self.parts_bytes());
        if self.log_bytes >= self.options.checkpoint_bytes
            || totals.is_worth_a_checkpoint(self.options.segment_bytes, parts_bytes)
        {
            self.checkpoint()?;
        }
        self.settle();
        self.sampler.sample(&mut self.report, self.now);
        Ok(())
    }

    /// Puts a segment and enters it into the table.
    fn store(&mut self, header: &SegmentHeader) {
        let object_bytes = header.object_bytes();
        self.report.requests.put_segments += 1;
        self.report.put_bytes += object_bytes;
        self.log_bytes += object_bytes;
        let info = SegmentInfo {
            epoch: header.epoch,
            header_bytes: header.header_bytes() as u32,
            data_bytes: header.data_bytes,
            live_bytes: header.data_bytes,
            object_bytes,
            wall_unix_ms: header.wall_unix_ms,
            dead_since: 0,
            is_settled: false,
        };
        self.view.segments.add(header.sequence as u32, info);
        let totals = self.view.segments.totals();
        self.report.store_bytes_max = self.report.store_bytes_max.max(totals.object_bytes);
    }

    /// As in the engine, but with no writes in between.
    fn collect(&mut self) -> Result<()> {
        let Some(policy) = self.options.gc else { return Ok(()) };
        loop {
            let totals = self.view.segments.totals();
            if !policy.is_due(totals.own_live_bytes, totals.own_used_bytes) {
                return Ok(());
            }
            let plan_bytes_max =
                plan_bytes_max(self.options.segment_bytes, self.view.map.extents());
            let candidates = self.view.segments.candidates();
            let victims = policy.victims(&candidates, &totals, self.unix_ms(), plan_bytes_max);
            if victims.is_empty() {
                return Ok(());
            }
            self.move_out(&victims.into_iter().collect(), plan_bytes_max)?;
            self.report.collections += 1;
            if self.view.segments.totals().own_used_bytes >= totals.own_used_bytes {
                // Nothing was gained, and nothing will be.
                return Ok(());
            }
        }
    }

    /// Moves the live data out of `victims`.
    fn move_out(&mut self, victims: &HashSet<u32>, plan_bytes_max: u64) -> Result<()> {
        let is_victim = |sequence: u32| victims.contains(&sequence);
        let plugs = self.options.plugs;
        let mut plan = MovePlan::make(&self.view.map, &is_victim, &|_| plugs, plan_bytes_max);
        let mut sources: HashSet<u32> = HashSet::new();
        while !plan.is_done() {
            let segment_bytes = u64::from(self.options.segment_bytes);
            let pieces = plan.take_live(&self.view.map, segment_bytes, limits::GC_EXTENTS_MAX);
            if pieces.is_empty() {
                break;
            }
            sources.extend(pieces.iter().map(|piece| piece.sequence));
            let plugging = pieces.iter().filter(|piece| !is_victim(piece.sequence));
            self.report.plugged_bytes += plugging.map(|piece| piece.length).sum::<u64>();
            let mut header = self.header(SegmentKind::Moved)?;
            (header.extents, header.origins, header.data_bytes) = contents_of(&pieces);
            header.frames = raw_frames(header.data_bytes, header.frame_bytes).map_err(internal)?;
            self.report.moved_bytes += header.data_bytes;
            self.report.moved_segments += 1;
            self.store(&header);
            apply_extents(&self.view, &header);
        }
        self.report.requests.get_moves_max += sources.len() as u64;
        Ok(())
    }

    /// Encodes a checkpoint, to learn its size, and deletes what it allows to be deleted.
    fn checkpoint(&mut self) -> Result<()> {
        self.checkpoint_number += 1;
        self.log_bytes = 0;
        let number = self.checkpoint_number;
        let identity = CheckpointIdentity { volume_id: VOLUME, number };
        let bounds = AttachmentBounds::default();
        let frozen = freeze_map(&self.view.map, &self.parts, identity, PUT, &bounds)?;
        for part in &frozen.objects {
            self.report.requests.put_checkpoints += 1;
            self.report.put_bytes += u64::from(part.entry.bytes);
        }
        self.parts = frozen.parts;
        let (segments, deletable) = self.view.segments.freeze(number, &|_, _| false);
        let parts = self.parts.clone();
        let root = Checkpoint {
            volume_id: VOLUME,
            put_id: PUT,
            number,
            epoch: 1,
            through_sequence: u64::from(self.next_sequence) - 1,
            next_sequence: u64::from(self.next_sequence),
            position: self.position,
            wall_unix_ms: self.unix_ms(),
            attached_ms: 0,
            repeats: 0,
            size_bytes: self.options.size_bytes,
            clean: false,
            extent_total: parts.iter().map(|part| u64::from(part.extents)).sum(),
            live_bytes: segments.iter().map(|segment| segment.live_bytes).sum(),
            segments,
            parts,
            kept: KeptBlock::default(),
        };
        self.root_bytes = root.encode().map_err(internal)?.len() as u64;
        self.report.put_bytes += self.root_bytes;
        let requests = &mut self.report.requests;
        requests.put_checkpoints += 1;
        // Old roots and old parts are listed; they are deleted first, then the segments.
        requests.list += 2;
        requests.delete += 2 + u64::from(!deletable.is_empty());
        for sequence in deletable {
            self.view.segments.remove(sequence);
        }
        self.report.checkpoints += 1;
        Ok(())
    }

    fn parts_bytes(&self) -> u64 {
        self.parts.iter().map(|part| u64::from(part.bytes)).sum()
    }

    /// Brings the report up to now.
    fn settle(&mut self) {
        let totals = self.view.segments.totals();
        let parts_bytes = self.parts_bytes();
        let report = &mut self.report;
        report.live_bytes = totals.live_bytes;
        report.data_bytes = totals.data_bytes;
        report.dead_bytes = totals.data_bytes - totals.own_used_bytes;
        report.segments = totals.segments;
        report.store_bytes = totals.object_bytes + parts_bytes + self.root_bytes;
        report.extents = self.view.map.extents();
        report.map_bytes = self.view.map.memory_bytes();
    }
}

fn internal(error: impl std::error::Error + Send + Sync + 'static) -> Error {
    Error::caused(ErrorKind::Internal, "what was laid out cannot be encoded", error)
}
