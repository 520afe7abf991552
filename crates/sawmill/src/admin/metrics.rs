//! The metrics: tables of names, kinds and meanings, and their text in Prometheus' exposition
//! format 0.0.4.
//!
//! Invariants: every sample comes from a row of a table here; names carry their unit (`_bytes`,
//! `_seconds`) and counters end in `_total`. `docs/guide/metrics.md` lists exactly these rows; a
//! test compares them.

use std::fmt::Write;

use super::status::{
    CacheStatus, CallStatus, DoorStatus, HEALTH_STATES, Histogram, NbdMemoryStatus,
    OperationStatus, ProcessStatus, StoreStatus, VolumeStatus,
};
use crate::link::told::{CacheTold, ConnectionTold, EndTold, LinkTold};

/// What a metric's number does over time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Grows until the process ends.
    Counter,
    /// Goes up and down.
    Gauge,
    /// Counts by size.
    Histogram,
}

impl Kind {
    const fn name(self) -> &'static str {
        match self {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
            Kind::Histogram => "histogram",
        }
    }
}

/// One row of a table: a metric of a `T`.
struct Metric<T: 'static> {
    name: &'static str,
    kind: Kind,
    help: &'static str,
    value: fn(&T) -> u64,
}

const fn counter<T>(name: &'static str, help: &'static str, value: fn(&T) -> u64) -> Metric<T> {
    Metric { name, kind: Kind::Counter, help, value }
}

const fn gauge<T>(name: &'static str, help: &'static str, value: fn(&T) -> u64) -> Metric<T> {
    Metric { name, kind: Kind::Gauge, help, value }
}

/// Per process, without labels.
const PROCESS: &[Metric<ProcessStatus>] = &[
    gauge("sawmill_uptime_seconds", "Seconds since the process started.", |p| p.uptime_ms / 1000),
    gauge("sawmill_volumes", "Served volumes.", |p| p.volumes.len() as u64),
];

/// Per process that can have NBD doors.
const NBD_MEMORY: &[Metric<NbdMemoryStatus>] = &[
    gauge("sawmill_nbd_memory_bytes", "Memory that NBD connections reserve or use.", |m| m.bytes),
    gauge("sawmill_nbd_memory_bytes_max", "Limit of that memory.", |m| m.bytes_max),
    gauge("sawmill_nbd_memory_waiting", "NBD connections that wait for memory.", |m| m.waiting),
];

/// Per volume, label `volume`.
const VOLUME: &[Metric<VolumeStatus>] = &[
    gauge("sawmill_size_bytes", "Size of the disk.", |v| v.size_bytes),
    gauge("sawmill_epoch", "Number of the attachment.", |v| v.epoch),
    gauge(
        "sawmill_position_accepted_bytes",
        "Log position answered to writers: survives the death of the process.",
        |v| v.positions.accepted,
    ),
    gauge(
        "sawmill_position_logged_bytes",
        "Log position on the local disk: survives power loss.",
        |v| v.positions.logged,
    ),
    gauge(
        "sawmill_position_stored_bytes",
        "Log position in the store: survives loss of the machine.",
        |v| v.positions.stored,
    ),
    gauge("sawmill_journal_bytes", "Capacity of the journal.", |v| v.journal_bytes),
    gauge(
        "sawmill_journal_unstored_bytes",
        "Bytes of the journal that hold writes not yet stored.",
        |v| v.journal_unstored_bytes,
    ),
    gauge(
        "sawmill_journal_unstored_records",
        "Records of the journal that hold writes not yet stored.",
        |v| v.journal_unstored_records,
    ),
    gauge("sawmill_stalled_requests", "Requests waiting because the journal is full.", |v| {
        v.stalled_requests
    }),
    gauge("sawmill_uploads_in_flight", "Segments on their way to the store.", |v| {
        u64::from(v.uploads_in_flight)
    }),
    gauge("sawmill_live_bytes", "Bytes of the address space that hold data.", |v| v.live_bytes),
    gauge(
        "sawmill_segment_data_bytes",
        "Data bytes in the segments of the store, live or not.",
        |v| v.segment_data_bytes,
    ),
    gauge(
        "sawmill_segment_object_bytes",
        "Bytes of segment objects in the store, headers included.",
        |v| v.segment_object_bytes,
    ),
    gauge(
        "sawmill_dead_object_bytes",
        "Bytes of segments without live data that wait to be deleted.",
        |v| v.dead_object_bytes,
    ),
    gauge("sawmill_gc_left_bytes", "Live bytes that garbage collection plans to move now.", |v| {
        v.gc_left_bytes
    }),
    gauge("sawmill_segments", "Segments in the store.", |v| v.segments),
    gauge("sawmill_extents", "Extents of the map.", |v| v.extents),
    gauge("sawmill_map_bytes", "Memory of the map.", |v| v.map_bytes),
    gauge("sawmill_clients", "Clients connected to the volume.", |v| v.clients.len() as u64),
    counter("sawmill_written_bytes_total", "Payload bytes of writes accepted.", |v| {
        v.counters.written_bytes
    }),
    counter("sawmill_writes_total", "Writes accepted.", |v| v.counters.writes),
    counter("sawmill_read_bytes_total", "Bytes read.", |v| v.counters.read_bytes),
    counter("sawmill_reads_total", "Reads.", |v| v.counters.reads),
    counter("sawmill_flushes_total", "Flushes answered.", |v| v.counters.flushes),
    counter("sawmill_discards_total", "Discards and write-zeroes accepted.", |v| {
        v.counters.discards
    }),
    counter(
        "sawmill_writes_stalled_total",
        "Writes that had to wait for space in the journal.",
        |v| v.counters.writes_stalled,
    ),
    counter("sawmill_journal_syncs_total", "Syncs of the journal's disk.", |v| {
        v.counters.journal_syncs
    }),
    counter("sawmill_journal_written_bytes_total", "Bytes written to the journal's disk.", |v| {
        v.counters.journal_written_bytes
    }),
    counter("sawmill_segments_stored_total", "Segments stored.", |v| v.counters.segments_stored),
    counter(
        "sawmill_segment_stored_bytes_total",
        "Bytes of segment objects stored, headers included.",
        |v| v.counters.segment_bytes_stored,
    ),
    counter(
        "sawmill_coalesced_bytes_total",
        "Data bytes that were not stored because later writes of the same batch replaced them.",
        |v| v.counters.coalesced_bytes,
    ),
    counter("sawmill_checkpoints_total", "Checkpoints written.", |v| v.counters.checkpoints),
    counter("sawmill_segments_deleted_total", "Dead segments deleted.", |v| {
        v.counters.segments_deleted
    }),
    counter("sawmill_segments_moved_total", "Segments written by garbage collection.", |v| {
        v.counters.segments_moved
    }),
    counter("sawmill_moved_bytes_total", "Live bytes that garbage collection rewrote.", |v| {
        v.counters.moved_bytes
    }),
    counter(
        "sawmill_moved_segment_bytes_total",
        "Bytes of segment objects that garbage collection wrote, headers included.",
        |v| v.counters.moved_segment_bytes,
    ),
    counter("sawmill_collections_total", "Plans of garbage collection.", |v| {
        v.counters.collections
    }),
    counter("sawmill_reads_journal_total", "Reads served from the journal.", |v| {
        v.counters.reads_journal
    }),
    counter("sawmill_reads_cache_total", "Reads served from the read cache.", |v| {
        v.counters.reads_cache
    }),
    counter("sawmill_reads_store_total", "Reads served from the store.", |v| {
        v.counters.reads_store
    }),
    counter("sawmill_prefetched_frames_total", "Frames fetched ahead of a reader.", |v| {
        v.counters.prefetched_frames
    }),
];

/// Per volume and state, labels `volume` and `state`: 1 for the state the volume is in.
const HEALTH: (&str, &str) =
    ("sawmill_health", "1 for the state the volume is in, 0 for the others.");

/// Per volume and operation, labels `volume` and `operation`.
const OPERATION: &[Metric<OperationStatus>] = &[
    counter("sawmill_requests_total", "Requests answered to the front doors.", |o| o.requests),
    counter("sawmill_request_bytes_total", "Bytes of requests that succeeded.", |o| o.bytes),
    counter("sawmill_request_errors_total", "Requests answered with an error.", |o| o.errors),
    gauge("sawmill_requests_in_flight", "Requests that wait for their answer.", |o| o.in_flight),
];

/// Per volume and operation.
const OPERATION_LATENCY: (&str, &str) =
    ("sawmill_request_seconds", "Time from a request to its answer.");

/// Per front door, labels `door` and `address`.
const DOOR: &[Metric<DoorStatus>] = &[
    gauge("sawmill_door_connections", "Connections open now.", |d| d.connections),
    gauge(
        "sawmill_door_requests_in_flight",
        "Requests given to a volume and not answered yet.",
        |d| d.in_flight,
    ),
    counter("sawmill_door_connections_total", "Connections accepted.", |d| d.connections_total),
    counter(
        "sawmill_door_connections_refused_total",
        "Connections closed because there were too many.",
        |d| d.connections_refused,
    ),
    counter(
        "sawmill_door_connections_cut_total",
        "Connections closed to serve others: during the handshake, or because the client did not \
         read its replies.",
        |d| d.connections_cut,
    ),
    counter("sawmill_door_requests_total", "Requests received.", |d| d.requests),
    counter("sawmill_door_errors_total", "Requests answered with an error.", |d| d.errors),
    counter("sawmill_door_received_bytes_total", "Bytes received after the handshake.", |d| {
        d.bytes_in
    }),
    counter("sawmill_door_sent_bytes_total", "Bytes sent after the handshake.", |d| d.bytes_out),
    counter(
        "sawmill_door_protocol_violations_total",
        "Connections closed because the client broke the protocol.",
        |d| d.protocol_violations,
    ),
];

/// Per process, without labels; absent when there is no read cache.
const CACHE: &[Metric<CacheStatus>] = &[
    gauge("sawmill_cache_slots", "Frames that fit into the read cache.", |k| k.slots),
    gauge("sawmill_cache_frames", "Frames in the read cache.", |k| k.frames),
    gauge("sawmill_cache_bytes", "Data bytes in the read cache.", |k| k.bytes),
    gauge("sawmill_cache_memory_bytes", "Memory of the read cache's index.", |k| k.memory_bytes),
    gauge(
        "sawmill_cache_inserting",
        "1 while frames are put into the read cache, 0 after its disk failed.",
        |k| u64::from(k.insertion_off.is_none()),
    ),
    counter("sawmill_cache_hits_total", "Frames found in the read cache.", |k| k.hits),
    counter("sawmill_cache_misses_total", "Frames not found in the read cache.", |k| k.misses),
    counter("sawmill_cache_inserted_total", "Frames put into the read cache.", |k| k.inserted),
    counter("sawmill_cache_evicted_total", "Frames dropped from the read cache for others.", |k| {
        k.evicted
    }),
    counter("sawmill_cache_damaged_total", "Frames dropped because their bytes were wrong.", |k| {
        k.damaged
    }),
];

/// Per store, label `store`.
const STORE: &[Metric<StoreStatus>] = &[gauge(
    "sawmill_store_up",
    "1 while the store answers, 0 after its newest request failed.",
    |s| u64::from(s.unavailable_since_unix_ms.is_none()),
)];

/// Per store and kind of call, labels `store` and `call`.
const CALL: &[Metric<CallStatus>] = &[
    counter(
        "sawmill_store_requests_total",
        "Requests sent to the store, repeated ones too.",
        |c| c.requests,
    ),
    counter("sawmill_store_errors_total", "Requests that failed; 'not found' is an answer.", |c| {
        c.errors
    }),
    counter("sawmill_store_retries_total", "Requests that repeated an earlier one.", |c| c.retries),
    counter(
        "sawmill_store_stalls_total",
        "Requests cancelled because none of their bytes moved.",
        |c| c.stalls,
    ),
    counter("sawmill_store_received_bytes_total", "Bytes received in bodies.", |c| c.bytes_in),
    counter("sawmill_store_sent_bytes_total", "Bytes sent in bodies, repeated ones too.", |c| {
        c.bytes_out
    }),
];

/// Per store and kind of call.
const CALL_LATENCY: (&str, &str) =
    ("sawmill_store_request_seconds", "Duration of requests to the store.");

/// Per end of links, without labels.
const END: &[Metric<EndTold>] = &[gauge(
    "sawmill_link_connections",
    "Initiators connected to a target; for an `attach`, whether it is connected.",
    |e| e.connections.iter().filter(|c| c.connected).count() as u64,
)];

/// Per connection, labels `connection` (the same at both ends) and `peer`.
const CONNECTION: &[Metric<ConnectionTold>] = &[
    gauge("sawmill_link_connected", "1 while connected, 0 while the target is unreachable.", |c| {
        u64::from(c.connected)
    }),
    gauge("sawmill_link_unheard_seconds", "Seconds since the last packet of the other end.", |c| {
        c.heard_ms / 1000
    }),
    gauge("sawmill_link_credits", "Requests that the target accepts at a time.", |c| {
        c.slots as u64
    }),
    gauge("sawmill_link_credits_in_use", "Credits in use: their requests are not done.", |c| {
        c.slots.saturating_sub(c.slots_free) as u64
    }),
    gauge("sawmill_link_requests_in_flight", "Requests that wait for their answer.", |c| {
        c.pending as u64
    }),
    gauge(
        "sawmill_link_requests_waiting",
        "Requests that wait for a credit, or for the target.",
        |c| c.waiting as u64,
    ),
];

/// Per link, labels `connection`, `peer`, `link` (the same at both ends) and `address`.
const LINK: &[Metric<LinkTold>] = &[
    gauge(
        "sawmill_link_up",
        "1 while the link carries requests, 0 while it is down or silent.",
        |l| u64::from(l.state == "open"),
    ),
    gauge(
        "sawmill_link_state_seconds",
        "Seconds since the link came up, fell silent or went down.",
        |l| l.state_ms / 1000,
    ),
    gauge("sawmill_link_packet_bytes", "Bytes of the longest packet that the link carries.", |l| {
        l.packet_bytes as u64
    }),
    gauge("sawmill_link_window_bytes", "Bytes that may be in flight.", |l| l.window_bytes as u64),
    counter("sawmill_link_sent_packets_total", "Packets sent.", |l| l.sent_packets),
    counter("sawmill_link_sent_bytes_total", "Bytes of packets sent.", |l| l.sent_bytes),
    counter(
        "sawmill_link_received_packets_total",
        "Packets received that were good and new.",
        |l| l.received_packets,
    ),
    counter("sawmill_link_received_bytes_total", "Bytes of those packets.", |l| l.received_bytes),
    counter("sawmill_link_lost_packets_total", "Packets that counted as lost.", |l| l.lost_packets),
    counter(
        "sawmill_link_sent_again_total",
        "Pieces of lost packets (commands, data, replies) that were sent again, by any link.",
        |l| l.sent_again,
    ),
    counter("sawmill_link_time_outs_total", "Times that an answer was overdue.", |l| l.time_outs),
    counter(
        "sawmill_link_refused_packets_total",
        "Packets dropped because they failed authentication or their checksum.",
        |l| l.refused_packets,
    ),
    counter("sawmill_link_doubled_packets_total", "Packets dropped as duplicates.", |l| {
        l.doubled_packets
    }),
];

/// Per link as well.
const LINK_RTT: (&str, &str) =
    ("sawmill_link_rtt_seconds", "Smoothed time from a packet to its acknowledgement.");

/// The byte-granular cache of an `attach`, without labels.
const LINK_CACHE: &[Metric<CacheTold>] = &[
    gauge(
        "sawmill_link_cache_dirty_bytes",
        "Dirty bytes: the target does not have them yet.",
        |k| k.dirty_bytes,
    ),
    gauge("sawmill_link_cache_pages", "Pages in the cache.", |k| k.pages),
    counter("sawmill_link_cache_written_bytes_total", "Payload bytes of writes.", |k| {
        k.written_by_user_bytes
    }),
    counter("sawmill_link_cache_partial_writes_total", "Writes of part of a page.", |k| {
        k.partial_writes
    }),
    counter(
        "sawmill_link_cache_sent_bytes_total",
        "Bytes written to the target, with their positions.",
        |k| k.sent_bytes,
    ),
    counter(
        "sawmill_link_cache_saved_bytes_total",
        "Bytes saved by not writing whole pages.",
        |k| k.saved_bytes,
    ),
    counter("sawmill_link_cache_fetched_bytes_total", "Bytes read from the target.", |k| {
        k.fetched_bytes
    }),
    counter(
        "sawmill_link_cache_errors_total",
        "Writes that the target answered with an error.",
        |k| k.write_back_errors,
    ),
];

/// Every metric as rows of name, kind, labels and help.
#[cfg(test)]
fn rows() -> Vec<(&'static str, Kind, &'static str, &'static str)> {
    fn of<T>(
        metrics: &[Metric<T>],
        labels: &'static str,
    ) -> Vec<(&'static str, Kind, &'static str, &'static str)> {
        metrics.iter().map(|m| (m.name, m.kind, labels, m.help)).collect()
    }
    let mut rows = of(PROCESS, "");
    rows.push((HEALTH.0, Kind::Gauge, "volume, state", HEALTH.1));
    rows.extend(of(VOLUME, "volume"));
    rows.extend(of(OPERATION, "volume, operation"));
    rows.push((OPERATION_LATENCY.0, Kind::Histogram, "volume, operation", OPERATION_LATENCY.1));
    rows.extend(of(DOOR, "door, address"));
    rows.extend(of(NBD_MEMORY, ""));
    rows.extend(of(CACHE, ""));
    rows.extend(of(STORE, "store"));
    rows.extend(of(CALL, "store, call"));
    rows.push((CALL_LATENCY.0, Kind::Histogram, "store, call", CALL_LATENCY.1));
    rows.extend(of(END, ""));
    rows.extend(of(CONNECTION, "connection, peer"));
    rows.extend(of(LINK, "connection, peer, link, address"));
    rows.push((LINK_RTT.0, Kind::Gauge, "connection, peer, link, address", LINK_RTT.1));
    rows.extend(of(LINK_CACHE, ""));
    rows
}

/// The exposition of a status document.
pub(crate) fn exposition(process: &ProcessStatus) -> String {
    let mut text = Exposition::default();
    text.table(PROCESS, &[(String::new(), process)]);
    text.health(&process.volumes);
    let volumes: Vec<_> =
        process.volumes.iter().map(|v| (labels(&[("volume", &v.name)]), v)).collect();
    text.table(VOLUME, &volumes);
    let operations: Vec<_> = process
        .volumes
        .iter()
        .flat_map(|v| {
            v.operations
                .iter()
                .map(|o| (labels(&[("volume", &v.name), ("operation", &o.operation)]), o))
        })
        .collect();
    text.table(OPERATION, &operations);
    text.head(OPERATION_LATENCY.0, Kind::Histogram, OPERATION_LATENCY.1);
    for (labels, seen) in &operations {
        text.histogram(OPERATION_LATENCY.0, labels, &seen.latency);
    }
    let doors: Vec<_> = process
        .doors
        .iter()
        .map(|d| (labels(&[("door", &d.door), ("address", &d.address)]), d))
        .collect();
    text.table(DOOR, &doors);
    let memory: Vec<_> = process.nbd_memory.iter().map(|memory| (String::new(), memory)).collect();
    text.table(NBD_MEMORY, &memory);
    let caches: Vec<_> = process.cache.iter().map(|cache| (String::new(), cache)).collect();
    text.table(CACHE, &caches);
    let stores: Vec<_> = process.stores.iter().map(|s| (labels(&[("store", &s.url)]), s)).collect();
    text.table(STORE, &stores);
    let calls: Vec<_> = process
        .stores
        .iter()
        .flat_map(|s| {
            s.calls().map(|(call, stats)| (labels(&[("store", &s.url), ("call", call)]), stats))
        })
        .collect();
    text.table(CALL, &calls);
    text.head(CALL_LATENCY.0, Kind::Histogram, CALL_LATENCY.1);
    for (labels, stats) in &calls {
        text.histogram(CALL_LATENCY.0, labels, &stats.latency);
    }
    text.link(process.link.as_ref());
    text.text
}

/// `a="x",b="y"` with the values escaped.
fn labels(pairs: &[(&str, &str)]) -> String {
    let pairs: Vec<String> = pairs
        .iter()
        .map(|(name, value)| {
            let value = value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
            format!("{name}=\"{value}\"")
        })
        .collect();
    pairs.join(",")
}

#[derive(Default)]
struct Exposition {
    text: String,
}

impl Exposition {
    // Writing to a string cannot fail, so the results of `write!` are dropped.

    fn head(&mut self, name: &str, kind: Kind, help: &str) {
        let _ = writeln!(self.text, "# HELP {name} {help}\n# TYPE {name} {}", kind.name());
    }

    fn sample(&mut self, name: &str, labels: &str, value: impl std::fmt::Display) {
        let _ = match labels {
            "" => writeln!(self.text, "{name} {value}"),
            _ => writeln!(self.text, "{name}{{{labels}}} {value}"),
        };
    }

    fn table<T>(&mut self, metrics: &[Metric<T>], subjects: &[(String, &T)]) {
        for metric in metrics {
            self.head(metric.name, metric.kind, metric.help);
            for (labels, subject) in subjects {
                self.sample(metric.name, labels, (metric.value)(subject));
            }
        }
    }

    fn health(&mut self, volumes: &[VolumeStatus]) {
        self.head(HEALTH.0, Kind::Gauge, HEALTH.1);
        for volume in volumes {
            for state in HEALTH_STATES {
                let labels = labels(&[("volume", &volume.name), ("state", state)]);
                self.sample(HEALTH.0, &labels, u8::from(volume.health.state == state));
            }
        }
    }

    /// The metrics of links; without any link, only their names and help.
    fn link(&mut self, end: Option<&EndTold>) {
        let connections = end.map_or(&[][..], |end| &end.connections);
        let ends: Vec<_> = end.iter().map(|end| (String::new(), *end)).collect();
        self.table(END, &ends);
        let of = |c: &ConnectionTold| labels(&[("connection", &c.id), ("peer", &c.peer)]);
        let told: Vec<_> = connections.iter().map(|c| (of(c), c)).collect();
        self.table(CONNECTION, &told);
        let of_link = |c: &ConnectionTold, l: &LinkTold| {
            let address = l.address.as_deref().unwrap_or_default();
            format!("{},{}", of(c), labels(&[("link", &l.link.to_string()), ("address", address)]))
        };
        let links: Vec<_> = connections
            .iter()
            .flat_map(|c| c.links.iter().map(move |l| (of_link(c, l), l)))
            .collect();
        self.table(LINK, &links);
        self.head(LINK_RTT.0, Kind::Gauge, LINK_RTT.1);
        for (labels, link) in &links {
            self.sample(LINK_RTT.0, labels, link.rtt_us as f64 / 1e6);
        }
        let caches: Vec<_> = end
            .and_then(|end| end.cache.as_ref())
            .iter()
            .map(|cache| (String::new(), *cache))
            .collect();
        self.table(LINK_CACHE, &caches);
    }

    fn histogram(&mut self, name: &str, labels: &str, histogram: &Histogram) {
        // The bounds are fixed whatever was counted, so that series from different times can be
        // added up.
        const FIRST_US_LOG2: usize = 6;
        const LAST_US_LOG2: usize = 26;
        let counts = &histogram.buckets_us_log2;
        let below = |end: usize| counts.iter().take(end + 1).sum::<u64>();
        for exponent in FIRST_US_LOG2..=LAST_US_LOG2 {
            let bound = (1u64 << exponent) as f64 / 1e6;
            let labels = format!("{labels},le=\"{bound}\"");
            self.sample(&format!("{name}_bucket"), &labels, below(exponent));
        }
        let count = histogram.count();
        self.sample(&format!("{name}_bucket"), &format!("{labels},le=\"+Inf\""), count);
        if let Some(sum_us) = histogram.sum_us {
            self.sample(&format!("{name}_sum"), labels, sum_us as f64 / 1e6);
        }
        self.sample(&format!("{name}_count"), labels, count);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample_process() -> ProcessStatus {
        let mut process = ProcessStatus { uptime_ms: 90_500, ..ProcessStatus::default() };
        let mut volume = VolumeStatus { name: "disk\"1".into(), ..VolumeStatus::default() };
        volume.health.state = "serving".into();
        volume.counters.writes = 7;
        let latency = Histogram::new(&[0, 5], Some(4));
        volume.operations.push(OperationStatus {
            operation: "write".into(),
            latency,
            ..OperationStatus::default()
        });
        process.volumes.push(volume);
        let latency = Histogram::new(&[0, 0, 0, 0, 0, 0, 0, 3, 1, 0], None);
        let put = CallStatus { requests: 4, latency, ..CallStatus::default() };
        process.stores.push(StoreStatus { url: "memory:".into(), put, ..StoreStatus::default() });
        process.doors.push(DoorStatus { door: "nbd".into(), ..DoorStatus::default() });
        process.nbd_memory = Some(NbdMemoryStatus::default());
        process.cache = Some(CacheStatus::default());
        let link = LinkTold { link: 1, state: "open".into(), rtt_us: 250, ..LinkTold::default() };
        let connection = ConnectionTold {
            id: "ab12".into(),
            peer: "client".into(),
            slots: 64,
            slots_free: 60,
            links: vec![link, LinkTold { link: 2, state: "silent".into(), ..LinkTold::default() }],
            ..ConnectionTold::default()
        };
        let cache = Some(CacheTold { saved_bytes: 4000, ..CacheTold::default() });
        process.link = Some(EndTold { connections: vec![connection], cache, ..EndTold::default() });
        process
    }

    #[test]
    fn the_guide_lists_exactly_the_metrics() {
        let mut table = String::from("| metric | kind | labels | meaning |\n|---|---|---|---|\n");
        for (name, kind, labels, help) in rows() {
            table.push_str(&format!("| `{name}` | {} | {labels} | {help} |\n", kind.name()));
        }
        crate::guide::compare("metrics.md", &table);
    }

    #[test]
    fn names_are_distinct_and_carry_their_kind() {
        let mut names: Vec<&str> = rows().iter().map(|row| row.0).collect();
        for (name, kind, _, help) in rows() {
            assert!(name.starts_with("sawmill_") && help.ends_with('.'), "{name}: {help}");
            assert_eq!(name.ends_with("_total"), kind == Kind::Counter, "{name}");
        }
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
    }

    #[test]
    fn every_metric_has_a_head_and_a_sample() {
        let text = exposition(&sample_process());
        for (name, kind, _, _) in rows() {
            assert_eq!(
                text.matches(&format!("# TYPE {name} {}\n", kind.name())).count(),
                1,
                "{name}"
            );
            let sampled = text.lines().any(|l| {
                l.strip_prefix(name).is_some_and(|rest| {
                    rest.starts_with([' ', '{']) || rest.starts_with("_bucket{")
                })
            });
            assert!(sampled, "{name} has no sample");
        }
    }

    #[test]
    fn label_values_are_escaped_and_numbers_are_right() {
        let text = exposition(&sample_process());
        assert!(text.contains("sawmill_writes_total{volume=\"disk\\\"1\"} 7\n"), "{text}");
        assert!(text.contains("sawmill_uptime_seconds 90\n"));
        assert!(text.contains("sawmill_health{volume=\"disk\\\"1\",state=\"serving\"} 1\n"));
        assert!(text.contains("sawmill_health{volume=\"disk\\\"1\",state=\"fenced\"} 0\n"));
    }

    #[test]
    fn a_link_is_told_by_both_ends_under_the_same_labels() {
        let text = exposition(&sample_process());
        let connection = "connection=\"ab12\",peer=\"client\"";
        assert!(
            text.contains(&format!("sawmill_link_credits_in_use{{{connection}}} 4\n")),
            "{text}"
        );
        let link = |number| format!("{{{connection},link=\"{number}\",address=\"\"}}");
        assert!(text.contains(&format!("sawmill_link_up{} 1\n", link(1))));
        assert!(
            text.contains(&format!("sawmill_link_up{} 0\n", link(2))),
            "a silent link carries nothing"
        );
        assert!(text.contains(&format!("sawmill_link_rtt_seconds{} 0.00025\n", link(1))));
        assert!(text.contains("sawmill_link_cache_saved_bytes_total 4000\n"));
        let without = exposition(&ProcessStatus::default());
        assert!(!without.lines().any(|line| line.starts_with("sawmill_link")), "{without}");
    }

    #[test]
    fn a_histogram_counts_up_to_its_total() {
        let text = exposition(&sample_process());
        let put = "store=\"memory:\",call=\"put\"";
        assert!(text.contains(&format!("_seconds_bucket{{{put},le=\"0.000064\"}} 0\n")), "{text}");
        assert!(text.contains(&format!("_seconds_bucket{{{put},le=\"0.000128\"}} 3\n")));
        assert!(text.contains(&format!("_seconds_bucket{{{put},le=\"0.000256\"}} 4\n")));
        assert!(text.contains(&format!("_seconds_bucket{{{put},le=\"+Inf\"}} 4\n")));
        assert!(text.contains(&format!("_seconds_count{{{put}}} 4\n")));
    }
}
