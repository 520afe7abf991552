//! The results of a forecast, at the end and on the way.
//!
//! Invariant: however long the trace, there are at most [`SAMPLES_MAX`] samples, with equal numbers
//! of segments between them; only the last one is taken at the end.
//!
//! Not here: what is counted when (`super`), and prices and charts (the binary).

use std::time::Duration;

/// Samples kept: when there are more, every second one is dropped.
const SAMPLES_MAX: usize = 512;

/// Requests to the store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Requests {
    /// Segments put, those of garbage collection too.
    pub put_segments: u64,
    /// Parts and roots of checkpoints put.
    pub put_checkpoints: u64,
    /// Fetches for garbage collection if nothing it copies were cached: one for each segment it
    /// copies from.
    pub get_moves_max: u64,
    /// Fetches for reads if nothing were cached.
    pub get_reads_max: u64,
    /// Listings.
    pub list: u64,
    /// Deletes, each of many objects.
    pub delete: u64,
}

impl Requests {
    /// Objects put.
    #[must_use]
    pub fn put(&self) -> u64 {
        self.put_segments + self.put_checkpoints
    }

    /// Fetches at most.
    #[must_use]
    pub fn get_max(&self) -> u64 {
        self.get_moves_max + self.get_reads_max
    }
}

/// One moment.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sample {
    /// Since the start.
    pub at: Duration,
    /// Bytes written by the user so far.
    pub written_bytes: u64,
    /// [`Report::write_amplification`] so far.
    pub write_amplification: f64,
    /// Bytes in the store that the map names.
    pub live_bytes: u64,
    /// Bytes in the store, all objects.
    pub store_bytes: u64,
    /// Entries of the map. An area kept as a table of pages counts each page.
    pub extents: u64,
    /// Objects put so far.
    pub puts: u64,
}

/// The totals. Counts and sums are since the start, unless stated otherwise.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Write requests.
    pub writes: u64,
    /// Their bytes.
    pub written_bytes: u64,
    /// Read requests.
    pub reads: u64,
    /// Their bytes.
    pub read_bytes: u64,
    /// Discards and writes of zeroes.
    pub discards: u64,
    /// Bytes that never went to the store, because the same segment overwrote or discarded them.
    pub coalesced_bytes: u64,
    /// Data of segments of kind data.
    pub data_segment_bytes: u64,
    /// Segments of kind data.
    pub data_segments: u64,
    /// Data that garbage collection copied, plugs too.
    pub moved_bytes: u64,
    /// Segments it made.
    pub moved_segments: u64,
    /// Data it copied out of segments that were not collected, to plug holes.
    pub plugged_bytes: u64,
    /// How often garbage collection began.
    pub collections: u64,
    /// Checkpoints written.
    pub checkpoints: u64,
    /// Bytes of all objects put.
    pub put_bytes: u64,
    /// Requests to the store.
    pub requests: Requests,
    /// At the end: bytes that the map names.
    pub live_bytes: u64,
    /// At the end: data bytes of all segments.
    pub data_bytes: u64,
    /// At the end: data bytes of segments that hold nothing live and wait to be deleted.
    pub dead_bytes: u64,
    /// At the end: segments.
    pub segments: u64,
    /// At the end: bytes of all objects.
    pub store_bytes: u64,
    /// The most bytes of segments there ever were.
    pub store_bytes_max: u64,
    /// At the end: entries of the map, joined where they continue one another.
    pub extents: u64,
    /// At the end: memory that the map takes.
    pub map_bytes: u64,
    /// Moments, evenly spread over the segments.
    pub samples: Vec<Sample>,
}

fn ratio(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

impl Report {
    /// Data put, of written data and by garbage collection, to bytes written. Below 1 when much is
    /// coalesced.
    #[must_use]
    pub fn write_amplification(&self) -> f64 {
        ratio(self.data_segment_bytes + self.moved_bytes, self.written_bytes)
    }

    /// 1 + bytes copied by garbage collection to bytes written: the reading of LSVD's Table 5.
    #[must_use]
    pub fn gc_amplification(&self) -> f64 {
        1.0 + ratio(self.moved_bytes, self.written_bytes)
    }

    /// Data put to data of segments of kind data.
    #[must_use]
    pub fn data_amplification(&self) -> f64 {
        ratio(self.data_segment_bytes + self.moved_bytes, self.data_segment_bytes)
    }

    /// The part of what was written that coalescing kept from the store.
    #[must_use]
    pub fn merge_ratio(&self) -> f64 {
        ratio(self.coalesced_bytes, self.written_bytes)
    }

    fn sample(&self, at: Duration) -> Sample {
        Sample {
            at,
            written_bytes: self.written_bytes,
            write_amplification: self.write_amplification(),
            live_bytes: self.live_bytes,
            store_bytes: self.store_bytes,
            extents: self.extents,
            puts: self.requests.put(),
        }
    }
}

/// Samples ever more rarely, so that a long trace has no more samples than a short one.
pub(super) struct Sampler {
    stride: u64,
    call_count: u64,
}

impl Sampler {
    pub(super) fn new() -> Self {
        Sampler { stride: 1, call_count: 0 }
    }

    /// Takes a sample if it is time.
    pub(super) fn sample(&mut self, report: &mut Report, at: Duration) {
        self.call_count += 1;
        if !self.call_count.is_multiple_of(self.stride) {
            return;
        }
        report.samples.push(report.sample(at));
        if report.samples.len() >= SAMPLES_MAX {
            let mut index = 0;
            report.samples.retain(|_| {
                index += 1;
                index % 2 == 0
            });
            self.stride *= 2;
        }
    }

    /// Takes the last sample, whatever time it is.
    pub(super) fn end(&mut self, report: &mut Report, at: Duration) {
        report.samples.push(report.sample(at));
    }
}
