//! The status document: what a process with doors or links reports about itself, as JSON over HTTP
//! and as metrics.
//!
//! Invariants: every field has its unit in its name (`_bytes`, `_ms`) or is a count. The document
//! has everything that the metrics have, because the metrics are made from it. Fields are only ever
//! added.
//!
//! Not here: collecting the numbers (`serving`), answering with them (`answer`), the metrics
//! (`metrics`).

use std::time::Duration;

use sawmill_device::Operation;
use sawmill_device::layer::OperationSnapshot;
use sawmill_doors::Doors;
use sawmill_frontend::DoorCounts;
use sawmill_frontend::nbd::BudgetUse;
use sawmill_store::{CallMetrics, LATENCY_BUCKETS, MeterSnapshot};
use sawmill_volume::cache::CacheMetrics;
use sawmill_volume::{Counters, Health, LoopThreadCounts, Positions, Stall, Status};
use serde::{Deserialize, Serialize};

use crate::link::end_report::EndReport;

/// A serving process.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct ProcessStatus {
    /// Version of the binary.
    pub(crate) version: String,
    /// Process id.
    pub(crate) pid: u32,
    /// Time since start.
    pub(crate) uptime_ms: u64,
    /// Something that the request asked about is being handed to another process and is missing
    /// from `volumes`: ask again.
    // A server of an older version does not send it, and commands read its status too.
    #[serde(default)]
    pub(crate) handing_over: bool,
    /// The volumes it serves.
    pub(crate) volumes: Vec<VolumeStatus>,
    /// Its doors.
    pub(crate) doors: Vec<DoorStatus>,
    /// Memory of the NBD connections, if it can have any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) nbd_memory: Option<NbdMemoryStatus>,
    /// The threads that its volumes share, if it opens volumes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) volume_threads: Option<VolumeThreadsStatus>,
    /// The stores behind the volumes.
    pub(crate) stores: Vec<StoreStatus>,
    /// The read cache, if it has one.
    pub(crate) cache: Option<CacheStatus>,
    /// Its links, if it is an end of any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) link: Option<EndReport>,
}

/// One served volume.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct VolumeStatus {
    pub(crate) name: String,
    pub(crate) id: String,
    pub(crate) store: String,
    /// The addresses of its doors.
    pub(crate) uris: Vec<String>,
    /// The same, with the kind of each.
    #[serde(default)]
    pub(crate) doors: Vec<VolumeDoor>,
    /// The clients connected to them.
    pub(crate) clients: Vec<String>,
    /// `None` for a read-only attachment.
    pub(crate) journal_path: Option<String>,
    pub(crate) health: HealthStatus,
    pub(crate) read_only: bool,
    pub(crate) size_bytes: u64,
    pub(crate) block_bytes: u32,
    pub(crate) segment_bytes: u32,
    pub(crate) flush: String,
    pub(crate) created_unix_ms: u64,
    pub(crate) epoch: u64,
    pub(crate) positions: PositionsStatus,
    pub(crate) stored_sequence: u64,
    pub(crate) checkpoint_number: u64,
    pub(crate) live_bytes: u64,
    pub(crate) segment_data_bytes: u64,
    pub(crate) segment_object_bytes: u64,
    pub(crate) dead_object_bytes: u64,
    pub(crate) gc_left_bytes: u64,
    /// Garbage is past its bound: writers get no further than collection lets them.
    #[serde(default)]
    pub(crate) slowed_for_garbage: bool,
    pub(crate) segments: u64,
    pub(crate) extents: u64,
    pub(crate) map_bytes: u64,
    #[serde(default)]
    pub(crate) map_groups_unloaded: u64,
    pub(crate) journal_bytes: u64,
    pub(crate) journal_unstored_bytes: u64,
    pub(crate) journal_unstored_records: u64,
    pub(crate) stalled_requests: u64,
    /// `staging`, `journal_bytes`, `journal_records` or `unstored_age`: what the first waiting
    /// request waits for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) stall: Option<String>,
    pub(crate) uploads_in_flight: u32,
    pub(crate) counters: CountersStatus,
    /// What passed through the doors, by operation.
    pub(crate) operations: Vec<OperationStatus>,
}

impl VolumeStatus {
    /// The part of the document that the engine knows.
    pub(crate) fn new(status: &Status) -> Self {
        VolumeStatus {
            name: status.name.clone(),
            id: status.volume_id.to_string(),
            health: HealthStatus::new(&status.health),
            read_only: status.read_only,
            size_bytes: status.size_bytes,
            epoch: status.epoch,
            positions: PositionsStatus::new(status.positions),
            stored_sequence: status.stored_sequence,
            checkpoint_number: status.checkpoint_number,
            live_bytes: status.live_bytes,
            segment_data_bytes: status.segment_data_bytes,
            segment_object_bytes: status.segment_object_bytes,
            dead_object_bytes: status.dead_object_bytes,
            gc_left_bytes: status.gc_left_bytes,
            slowed_for_garbage: status.slowed_for_garbage,
            segments: status.segments,
            extents: status.extents,
            map_bytes: status.map_bytes,
            map_groups_unloaded: status.map_groups_unloaded,
            journal_bytes: status.journal_bytes,
            journal_unstored_bytes: status.journal_unstored_bytes,
            journal_unstored_records: status.journal_unstored_records,
            stalled_requests: status.stalled_requests,
            stall: status.stall.map(|stall| stall_word(stall).to_owned()),
            uploads_in_flight: status.uploads_in_flight,
            counters: CountersStatus::new(&status.counters),
            ..VolumeStatus::default()
        }
    }
}

/// The reason why writes wait, as a word.
fn stall_word(stall: Stall) -> &'static str {
    match stall {
        Stall::Staging => "staging",
        Stall::JournalBytes => "journal_bytes",
        Stall::JournalRecords => "journal_records",
        Stall::UnstoredAge => "unstored_age",
    }
}

/// A door of a volume.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct VolumeDoor {
    /// `nbd`, `ublk`, `vhost-user`, `fuse` or `buse`.
    pub(crate) kind: String,
    /// The address that a user opens.
    pub(crate) address: String,
}

/// The health of a volume: a word, and the reason if it is not healthy.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct HealthStatus {
    /// `serving`, `store_unavailable`, `fenced`, `failed` or `closed`.
    pub(crate) state: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) since_ms: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) reason: Option<String>,
}

/// Every word of [`HealthStatus::state`].
pub(crate) const HEALTH_STATES: [&str; 5] =
    ["serving", "store_unavailable", "fenced", "failed", "closed"];

impl HealthStatus {
    /// The engine's health in words.
    pub(crate) fn new(health: &Health) -> Self {
        let state = |index: usize| HEALTH_STATES[index].to_owned();
        match health {
            Health::Serving => HealthStatus { state: state(0), since_ms: None, reason: None },
            Health::StoreUnavailable { since, reason } => HealthStatus {
                state: state(1),
                since_ms: Some(milliseconds(*since)),
                reason: Some(reason.clone()),
            },
            Health::Fenced { reason } => {
                HealthStatus { state: state(2), since_ms: None, reason: Some(reason.clone()) }
            }
            Health::Failed { reason } => {
                HealthStatus { state: state(3), since_ms: None, reason: Some(reason.clone()) }
            }
            Health::Closed => HealthStatus { state: state(4), since_ms: None, reason: None },
        }
    }
}

/// The safety positions, in bytes of log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PositionsStatus {
    pub(crate) accepted: u64,
    pub(crate) logged: u64,
    pub(crate) stored: u64,
}

impl PositionsStatus {
    /// The engine's positions.
    pub(crate) fn new(positions: Positions) -> Self {
        PositionsStatus {
            accepted: positions.accepted,
            logged: positions.logged,
            stored: positions.stored,
        }
    }
}

/// Defines a document with the same fields as an engine struct, and the copy into it.
macro_rules! mirror {
    ($(#[$doc:meta])* $name:ident of $source:ty { $($field:ident),* $(,)? }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
        pub(crate) struct $name {
            $(pub(crate) $field: u64,)*
        }

        impl $name {
            /// Copies the numbers.
            pub(crate) fn new(source: &$source) -> Self {
                $name { $($field: source.$field,)* }
            }
        }
    };
}

mirror! {
    /// Counters of a volume since it was opened.
    CountersStatus of Counters {
        written_bytes, writes, read_bytes, reads, flushes, discards, journal_syncs,
        journal_written_bytes,
        segments_stored, segment_bytes_stored, coalesced_bytes, written_cached_bytes,
        written_uncached_bytes, checkpoints, segments_deleted,
        segments_moved, moved_bytes, moved_segment_bytes, collections, reads_journal, reads_cache,
        reads_store, prefetched_frames, prefetches_cut, writes_stalled,
    }
}

/// A store and the requests to it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct StoreStatus {
    pub(crate) url: String,
    /// Since when requests fail; absent while the store answers.
    pub(crate) unavailable_since_unix_ms: Option<u64>,
    pub(crate) last_error: Option<String>,
    pub(crate) get: CallStatus,
    pub(crate) put: CallStatus,
    pub(crate) list: CallStatus,
    pub(crate) delete: CallStatus,
}

impl StoreStatus {
    /// A store's meter.
    pub(crate) fn new(url: &str, meter: &MeterSnapshot) -> Self {
        StoreStatus {
            url: url.to_owned(),
            unavailable_since_unix_ms: meter.unavailable_since,
            last_error: meter.last_error.as_ref().map(|(_, text)| text.clone()),
            get: CallStatus::new(&meter.get),
            put: CallStatus::new(&meter.put),
            list: CallStatus::new(&meter.list),
            delete: CallStatus::new(&meter.delete),
        }
    }

    /// The four kinds of calls with their names.
    pub(crate) fn calls(&self) -> [(&'static str, &CallStatus); 4] {
        [("get", &self.get), ("put", &self.put), ("list", &self.list), ("delete", &self.delete)]
    }
}

/// One kind of store call.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct CallStatus {
    pub(crate) requests: u64,
    pub(crate) errors: u64,
    pub(crate) retries: u64,
    #[serde(default)]
    pub(crate) stalls: u64,
    pub(crate) bytes_in: u64,
    pub(crate) bytes_out: u64,
    pub(crate) latency: Histogram,
}

impl CallStatus {
    fn new(stats: &CallMetrics) -> Self {
        CallStatus {
            requests: stats.requests,
            errors: stats.errors,
            retries: stats.retries,
            stalls: stats.stalls,
            bytes_in: stats.bytes_in,
            bytes_out: stats.bytes_out,
            latency: Histogram::new(&stats.latency, None),
        }
    }
}

/// One operation of a volume as its doors saw it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct OperationStatus {
    /// `read`, `write`, `flush`, `discard`, `write_zeroes`, `prefetch` or `allocation`.
    pub(crate) operation: String,
    pub(crate) requests: u64,
    pub(crate) bytes: u64,
    pub(crate) errors: u64,
    pub(crate) in_flight: u64,
    pub(crate) latency: Histogram,
}

impl OperationStatus {
    /// The numbers of a device's meter.
    pub(crate) fn new(snapshot: &OperationSnapshot) -> Self {
        let operation = match snapshot.operation {
            Operation::Read => "read",
            Operation::Write => "write",
            Operation::Flush => "flush",
            Operation::Discard => "discard",
            Operation::WriteZeroes => "write_zeroes",
            Operation::Prefetch => "prefetch",
            Operation::Allocation => "allocation",
        };
        OperationStatus {
            operation: operation.to_owned(),
            requests: snapshot.requests,
            bytes: snapshot.bytes,
            errors: snapshot.errors,
            in_flight: snapshot.in_flight,
            latency: Histogram::new(&snapshot.latency, Some(snapshot.latency_ns / 1000)),
        }
    }
}

/// A door and what passed through it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct DoorStatus {
    /// `nbd`, `ublk`, `vhost-user`, `fuse` or `buse`.
    pub(crate) door: String,
    /// Socket path or address.
    pub(crate) address: String,
    pub(crate) connections: u64,
    pub(crate) connections_total: u64,
    pub(crate) connections_refused: u64,
    #[serde(default)]
    pub(crate) connections_cut: u64,
    pub(crate) requests: u64,
    pub(crate) errors: u64,
    pub(crate) in_flight: u64,
    pub(crate) bytes_in: u64,
    pub(crate) bytes_out: u64,
    pub(crate) protocol_violations: u64,
    pub(crate) receives_awake: u64,
}

impl DoorStatus {
    /// Those of all doors.
    pub(crate) fn of_all(doors: &Doors) -> Vec<DoorStatus> {
        let all = doors.counts().into_iter();
        all.map(|(kind, address, counts)| DoorStatus::new(kind, address, &counts)).collect()
    }

    fn new(kind: &str, address: String, counts: &DoorCounts) -> Self {
        let DoorCounts { reads, writes, flushes, discards, write_zeroes, others, .. } = counts;
        DoorStatus {
            door: kind.to_owned(),
            address,
            connections: counts.connections,
            connections_total: counts.connections_total,
            connections_refused: counts.connections_refused,
            connections_cut: counts.connections_cut,
            // The sum is formed here, so that metrics and dashboard agree on it.
            requests: reads + writes + flushes + discards + write_zeroes + others,
            errors: counts.errors,
            in_flight: counts.in_flight,
            bytes_in: counts.bytes_in,
            bytes_out: counts.bytes_out,
            protocol_violations: counts.protocol_violations,
            receives_awake: counts.receives_awake,
        }
    }
}

/// The threads that run the loops of a process's volumes.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(crate) struct VolumeThreadsStatus {
    /// All of them, without the clock.
    pub(crate) threads: u64,
    /// Those that have waited for a local disk for half a second or more: does it hang?
    pub(crate) stuck: u64,
}

impl VolumeThreadsStatus {
    pub(crate) fn new(counts: LoopThreadCounts) -> Self {
        VolumeThreadsStatus { threads: counts.threads, stuck: counts.stuck }
    }
}

/// Memory of all NBD connections of a process.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(crate) struct NbdMemoryStatus {
    /// The limit: `--nbd-memory-max`.
    pub(crate) bytes_max: u64,
    /// Reserved for connections, or used by their requests and replies.
    pub(crate) bytes: u64,
    /// Connections that wait for memory.
    pub(crate) waiting: u64,
}

impl From<BudgetUse> for NbdMemoryStatus {
    fn from(BudgetUse { bytes_max, bytes, waiting }: BudgetUse) -> Self {
        NbdMemoryStatus { bytes_max, bytes, waiting }
    }
}

/// The read cache.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct CacheStatus {
    pub(crate) path: String,
    /// Frames that fit, and frames that are there. A server of an older version says `slots`.
    #[serde(alias = "slots")]
    pub(crate) cells: u64,
    pub(crate) frames: u64,
    /// Data bytes in those frames.
    pub(crate) bytes: u64,
    /// Memory of the index.
    pub(crate) memory_bytes: u64,
    pub(crate) hits: u64,
    pub(crate) misses: u64,
    pub(crate) inserted: u64,
    pub(crate) evicted: u64,
    pub(crate) damaged: u64,
    /// Why nothing is inserted now.
    pub(crate) insertion_off: Option<String>,
}

impl CacheStatus {
    /// The cache's own numbers.
    pub(crate) fn new(path: String, stats: &CacheMetrics) -> Self {
        CacheStatus {
            path,
            cells: u64::from(stats.frames_max),
            frames: u64::from(stats.frames),
            bytes: stats.bytes,
            memory_bytes: stats.memory_bytes,
            hits: stats.hits,
            misses: stats.misses,
            inserted: stats.inserted,
            evicted: stats.evicted,
            damaged: stats.damaged,
            insertion_off: stats.insertion_off.clone(),
        }
    }
}

const _: () = assert!(LATENCY_BUCKETS <= 64);

/// A histogram of durations: bucket `i` counts those under 2^i microseconds and not under 2^(i-1).
/// Empty buckets at the end are left out.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Histogram {
    pub(crate) buckets_us_log2: Vec<u64>,
    /// The sum of all durations, if counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) sum_us: Option<u64>,
}

impl Histogram {
    /// A histogram from its buckets, and their sum if known.
    pub(crate) fn new(buckets: &[u64], sum_us: Option<u64>) -> Self {
        let bucket_count = buckets.iter().rposition(|count| *count > 0).map_or(0, |last| last + 1);
        Histogram { buckets_us_log2: buckets[..bucket_count].to_vec(), sum_us }
    }

    /// How many durations it holds.
    pub(crate) fn count(&self) -> u64 {
        self.buckets_us_log2.iter().sum()
    }
}

/// A whole number of milliseconds; an age that does not fit becomes the maximum.
pub(crate) fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
