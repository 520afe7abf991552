//! The metrics: tables of names, kinds and meanings, and their values for a process.
//!
//! Invariants: every sample comes from a row of a table here; names carry their unit (`_bytes`,
//! `_seconds`) and counters end in `_total`. `docs/guide/metrics.md` lists exactly these rows; a
//! test compares them. Not here: the metrics of links (`links`), the format (`text`).

mod links;
mod text;

use super::status::{
    CacheStatus, CallStatus, DoorStatus, HEALTH_STATES, NbdMemoryStatus, OperationStatus,
    ProcessStatus, StoreStatus, VolumeStatus, VolumeThreadsStatus,
};
use text::{Exposition, Metric, MetricKind, counter, gauge, labels};

/// Per process, without labels.
const PROCESS: &[Metric<ProcessStatus>] = &[
    gauge("sawmill_uptime_seconds", "Seconds since the process started.", |process| {
        process.uptime_ms / 1000
    }),
    gauge("sawmill_volumes", "Served volumes.", |process| process.volumes.len() as u64),
];

/// Per process that can have NBD doors.
const NBD_MEMORY: &[Metric<NbdMemoryStatus>] = &[
    gauge("sawmill_nbd_memory_bytes", "Memory that NBD connections reserve or use.", |memory| {
        memory.bytes
    }),
    gauge("sawmill_nbd_memory_bytes_max", "Limit of that memory.", |memory| memory.bytes_max),
    gauge("sawmill_nbd_memory_waiting", "NBD connections that wait for memory.", |memory| {
        memory.waiting
    }),
];

/// Per process that opens volumes.
const VOLUME_THREADS: &[Metric<VolumeThreadsStatus>] = &[
    gauge("sawmill_volume_threads", "Threads that run volumes, without the clock.", |found| {
        found.threads
    }),
    gauge(
        "sawmill_volume_threads_stuck",
        "Those that have waited for a local disk for half a second or more.",
        |found| found.stuck,
    ),
];

/// Per volume, label `volume`. The three positions are those of one log, so that the difference of
/// two is what a failure would take now.
const VOLUME: &[Metric<VolumeStatus>] = &[
    gauge("sawmill_size_bytes", "Size of the disk.", |volume| volume.size_bytes),
    gauge("sawmill_epoch", "Number of the attachment.", |volume| volume.epoch),
    gauge(
        "sawmill_position_accepted_bytes",
        "Log position answered to writers: survives the death of the process.",
        |volume| volume.positions.accepted,
    ),
    gauge(
        "sawmill_position_logged_bytes",
        "Log position on the local disk: survives power loss.",
        |volume| volume.positions.logged,
    ),
    gauge(
        "sawmill_position_stored_bytes",
        "Log position in the store: survives loss of the machine.",
        |volume| volume.positions.stored,
    ),
    gauge("sawmill_journal_bytes", "Capacity of the journal.", |volume| volume.journal_bytes),
    gauge(
        "sawmill_journal_unstored_bytes",
        "Bytes of the journal that hold writes not yet stored.",
        |volume| volume.journal_unstored_bytes,
    ),
    gauge(
        "sawmill_journal_unstored_records",
        "Records of the journal that hold writes not yet stored.",
        |volume| volume.journal_unstored_records,
    ),
    gauge(
        "sawmill_stalled_requests",
        "Requests that wait for staging memory, journal space, the limit of unstored writes, or \
         --unstored-age-max.",
        |volume| volume.stalled_requests,
    ),
    gauge("sawmill_uploads_in_flight", "Segments on their way to the store.", |volume| {
        u64::from(volume.uploads_in_flight)
    }),
    gauge("sawmill_live_bytes", "Bytes of the address space that hold data.", |volume| {
        volume.live_bytes
    }),
    gauge(
        "sawmill_segment_data_bytes",
        "Data bytes in the segments of the store, live or not.",
        |volume| volume.segment_data_bytes,
    ),
    gauge(
        "sawmill_segment_object_bytes",
        "Bytes of segment objects in the store, headers included.",
        |volume| volume.segment_object_bytes,
    ),
    gauge(
        "sawmill_dead_object_bytes",
        "Bytes of segments without live data that wait to be deleted.",
        |volume| volume.dead_object_bytes,
    ),
    gauge(
        "sawmill_gc_left_bytes",
        "Live bytes that garbage collection plans to move now.",
        |volume| volume.gc_left_bytes,
    ),
    gauge(
        "sawmill_slowed_for_garbage",
        "1 while garbage is past its bound, so that writers get no further than collection lets \
         them.",
        |volume| u64::from(volume.slowed_for_garbage),
    ),
    gauge("sawmill_segments", "Segments in the store.", |volume| volume.segments),
    gauge("sawmill_extents", "Extents of the map.", |volume| volume.extents),
    gauge("sawmill_map_bytes", "Memory of the map.", |volume| volume.map_bytes),
    gauge(
        "sawmill_map_groups_unloaded",
        "Groups of the map (16 GiB of addresses each) that are not loaded yet: a volume with a \
         large map serves before. Until 0, no checkpoint begins and nothing is collected.",
        |volume| volume.map_groups_unloaded,
    ),
    gauge("sawmill_clients", "Clients connected to the volume.", |volume| {
        volume.clients.len() as u64
    }),
    counter("sawmill_written_bytes_total", "Payload bytes of writes accepted.", |volume| {
        volume.counters.written_bytes
    }),
    counter("sawmill_writes_total", "Writes accepted.", |volume| volume.counters.writes),
    counter("sawmill_read_bytes_total", "Bytes read.", |volume| volume.counters.read_bytes),
    counter("sawmill_reads_total", "Reads.", |volume| volume.counters.reads),
    counter("sawmill_flushes_total", "Flushes answered.", |volume| volume.counters.flushes),
    counter("sawmill_discards_total", "Discards and write-zeroes accepted.", |volume| {
        volume.counters.discards
    }),
    counter(
        "sawmill_writes_stalled_total",
        "Requests that had to wait (see sawmill_stalled_requests).",
        |volume| volume.counters.writes_stalled,
    ),
    counter("sawmill_journal_syncs_total", "Syncs of the journal's disk.", |volume| {
        volume.counters.journal_syncs
    }),
    counter(
        "sawmill_journal_written_bytes_total",
        "Bytes written to the journal's disk.",
        |volume| volume.counters.journal_written_bytes,
    ),
    counter("sawmill_segments_stored_total", "Segments stored.", |volume| {
        volume.counters.segments_stored
    }),
    counter(
        "sawmill_segment_stored_bytes_total",
        "Bytes of segment objects stored, headers included.",
        |volume| volume.counters.segment_bytes_stored,
    ),
    counter(
        "sawmill_coalesced_bytes_total",
        "Data bytes that were not stored because later writes of the same segment replaced them.",
        |volume| volume.counters.coalesced_bytes,
    ),
    counter(
        "sawmill_written_cached_bytes_total",
        "Data bytes of written segments that the read cache got; streams are not among them.",
        |volume| volume.counters.written_cached_bytes,
    ),
    counter(
        "sawmill_written_uncached_bytes_total",
        "Data bytes of written segments that the read cache did not get in time.",
        |volume| volume.counters.written_uncached_bytes,
    ),
    counter("sawmill_checkpoints_total", "Checkpoints written.", |volume| {
        volume.counters.checkpoints
    }),
    counter("sawmill_segments_deleted_total", "Dead segments deleted.", |volume| {
        volume.counters.segments_deleted
    }),
    counter("sawmill_segments_moved_total", "Segments written by garbage collection.", |volume| {
        volume.counters.segments_moved
    }),
    counter("sawmill_moved_bytes_total", "Live bytes that garbage collection rewrote.", |volume| {
        volume.counters.moved_bytes
    }),
    counter(
        "sawmill_moved_segment_bytes_total",
        "Bytes of segment objects that garbage collection wrote, headers included.",
        |volume| volume.counters.moved_segment_bytes,
    ),
    counter("sawmill_collections_total", "Plans of garbage collection.", |volume| {
        volume.counters.collections
    }),
    counter("sawmill_reads_journal_total", "Reads served from the journal.", |volume| {
        volume.counters.reads_journal
    }),
    counter("sawmill_reads_cache_total", "Reads served from the read cache.", |volume| {
        volume.counters.reads_cache
    }),
    counter("sawmill_reads_store_total", "Reads served from the store.", |volume| {
        volume.counters.reads_store
    }),
    counter("sawmill_prefetched_frames_total", "Frames fetched ahead of a reader.", |volume| {
        volume.counters.prefetched_frames
    }),
    counter(
        "sawmill_prefetches_cut_total",
        "Hints to prefetch a range of which a part was left out: without a read cache, beyond \
        what `--prefetch` allows on its way, beyond 1 GiB, or where the map is not loaded yet.",
        |volume| volume.counters.prefetches_cut,
    ),
];

/// Per volume and state, labels `volume` and `state`: 1 for the state the volume is in.
const HEALTH: (&str, &str) =
    ("sawmill_health", "1 for the state the volume is in, 0 for the others.");

/// Per volume and operation, labels `volume` and `operation`.
const OPERATION: &[Metric<OperationStatus>] = &[
    counter("sawmill_requests_total", "Requests answered to the doors.", |operation| {
        operation.requests
    }),
    counter("sawmill_request_bytes_total", "Bytes of requests that succeeded.", |operation| {
        operation.bytes
    }),
    counter("sawmill_request_errors_total", "Requests answered with an error.", |operation| {
        operation.errors
    }),
    gauge("sawmill_requests_in_flight", "Requests that wait for their answer.", |operation| {
        operation.in_flight
    }),
];

/// Per volume and operation.
const OPERATION_LATENCY: (&str, &str) =
    ("sawmill_request_seconds", "Time from a request to its answer.");

/// Per door, labels `door` and `address`.
const DOOR: &[Metric<DoorStatus>] = &[
    gauge("sawmill_door_connections", "Connections open now.", |door| door.connections),
    gauge(
        "sawmill_door_requests_in_flight",
        "Requests given to a volume and not answered yet.",
        |door| door.in_flight,
    ),
    counter("sawmill_door_connections_total", "Connections accepted.", |door| {
        door.connections_total
    }),
    counter(
        "sawmill_door_connections_refused_total",
        "Connections closed because there were too many.",
        |door| door.connections_refused,
    ),
    counter(
        "sawmill_door_connections_cut_total",
        "Connections closed to serve others: during the handshake, or because the client did not \
         read its replies.",
        |door| door.connections_cut,
    ),
    counter("sawmill_door_requests_total", "Requests received.", |door| door.requests),
    counter("sawmill_door_errors_total", "Requests answered with an error.", |door| door.errors),
    counter("sawmill_door_received_bytes_total", "Bytes received after the handshake.", |door| {
        door.bytes_in
    }),
    counter("sawmill_door_sent_bytes_total", "Bytes sent after the handshake.", |door| {
        door.bytes_out
    }),
    counter(
        "sawmill_door_protocol_violations_total",
        "Connections closed because the client broke the protocol.",
        |door| door.protocol_violations,
    ),
    counter(
        "sawmill_door_receives_awake_total",
        "Receives for which an NBD connection did not sleep (`--nbd-busy-poll`).",
        |door| door.receives_awake,
    ),
];

/// Per process, without labels; absent when there is no read cache. Hits and misses count frames,
/// not requests: a long read may have both.
const CACHE: &[Metric<CacheStatus>] = &[
    gauge("sawmill_cache_cells", "Frames that fit into the read cache.", |cache| cache.cells),
    gauge("sawmill_cache_frames", "Frames in the read cache.", |cache| cache.frames),
    gauge("sawmill_cache_bytes", "Data bytes in the read cache.", |cache| cache.bytes),
    gauge("sawmill_cache_memory_bytes", "Memory of the read cache's index.", |cache| {
        cache.memory_bytes
    }),
    gauge(
        "sawmill_cache_inserting",
        "1 while frames are put into the read cache, 0 after its disk failed.",
        |cache| u64::from(cache.insertion_off.is_none()),
    ),
    counter("sawmill_cache_hits_total", "Frames found in the read cache.", |cache| cache.hits),
    counter("sawmill_cache_misses_total", "Frames not found in the read cache.", |cache| {
        cache.misses
    }),
    counter("sawmill_cache_inserted_total", "Frames put into the read cache.", |cache| {
        cache.inserted
    }),
    counter(
        "sawmill_cache_evicted_total",
        "Frames dropped from the read cache for others.",
        |cache| cache.evicted,
    ),
    counter(
        "sawmill_cache_damaged_total",
        "Frames dropped because their bytes were wrong.",
        |cache| cache.damaged,
    ),
];

/// Per store, label `store`.
const STORE: &[Metric<StoreStatus>] = &[gauge(
    "sawmill_store_up",
    "1 while the store answers, 0 after its newest request failed.",
    |store| u64::from(store.unavailable_since_unix_ms.is_none()),
)];

/// Per store and kind of call, labels `store` and `call`.
const CALL: &[Metric<CallStatus>] = &[
    counter(
        "sawmill_store_requests_total",
        "Requests sent to the store, repeated ones too.",
        |call| call.requests,
    ),
    counter(
        "sawmill_store_errors_total",
        "Requests that failed; 'not found' is an answer.",
        |call| call.errors,
    ),
    counter("sawmill_store_retries_total", "Requests that repeated an earlier one.", |call| {
        call.retries
    }),
    counter(
        "sawmill_store_stalls_total",
        "Requests canceled because none of their bytes moved.",
        |call| call.stalls,
    ),
    counter("sawmill_store_received_bytes_total", "Bytes received in bodies.", |call| {
        call.bytes_in
    }),
    counter("sawmill_store_sent_bytes_total", "Bytes sent in bodies, repeated ones too.", |call| {
        call.bytes_out
    }),
];

/// Per store and kind of call.
const CALL_LATENCY: (&str, &str) =
    ("sawmill_store_request_seconds", "Duration of requests to the store.");

/// Every metric as rows of name, kind, labels and help.
#[cfg(test)]
fn rows() -> Vec<(&'static str, MetricKind, &'static str, &'static str)> {
    fn of<T>(
        metrics: &[Metric<T>],
        labels: &'static str,
    ) -> Vec<(&'static str, MetricKind, &'static str, &'static str)> {
        metrics.iter().map(|m| (m.name, m.kind, labels, m.help)).collect()
    }
    let mut rows = of(PROCESS, "");
    rows.push((HEALTH.0, MetricKind::Gauge, "volume, state", HEALTH.1));
    rows.extend(of(VOLUME, "volume"));
    rows.extend(of(OPERATION, "volume, operation"));
    rows.push((
        OPERATION_LATENCY.0,
        MetricKind::Histogram,
        "volume, operation",
        OPERATION_LATENCY.1,
    ));
    rows.extend(of(DOOR, "door, address"));
    rows.extend(of(NBD_MEMORY, ""));
    rows.extend(of(VOLUME_THREADS, ""));
    rows.extend(of(CACHE, ""));
    rows.extend(of(STORE, "store"));
    rows.extend(of(CALL, "store, call"));
    rows.push((CALL_LATENCY.0, MetricKind::Histogram, "store, call", CALL_LATENCY.1));
    rows.extend(of(links::END, ""));
    rows.extend(of(links::CONNECTION, "connection, peer"));
    rows.extend(of(links::LINK, "connection, peer, link, address"));
    rows.push((
        links::LINK_RTT.0,
        MetricKind::Gauge,
        "connection, peer, link, address",
        links::LINK_RTT.1,
    ));
    rows.extend(of(links::LINK_CACHE, ""));
    rows
}

/// The exposition of a status document.
pub(crate) fn exposition(process: &ProcessStatus) -> String {
    let mut text = Exposition::default();
    text.table(PROCESS, &[(String::new(), process)]);
    write_health(&mut text, &process.volumes);
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
    // Once, before all series: the format allows one head for a metric.
    text.head(OPERATION_LATENCY.0, MetricKind::Histogram, OPERATION_LATENCY.1);
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
    let threads: Vec<_> =
        process.volume_threads.iter().map(|found| (String::new(), found)).collect();
    text.table(VOLUME_THREADS, &threads);
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
    text.head(CALL_LATENCY.0, MetricKind::Histogram, CALL_LATENCY.1);
    for (labels, stats) in &calls {
        text.histogram(CALL_LATENCY.0, labels, &stats.latency);
    }
    links::write(&mut text, process.link.as_ref());
    text.text
}

/// One sample per state a volume can be in.
fn write_health(text: &mut Exposition, volumes: &[VolumeStatus]) {
    text.head(HEALTH.0, MetricKind::Gauge, HEALTH.1);
    for volume in volumes {
        // Also the states that it is not in: a series that appears and vanishes is hard to alert
        // on.
        for state in HEALTH_STATES {
            let labels = labels(&[("volume", &volume.name), ("state", state)]);
            text.sample(HEALTH.0, &labels, u8::from(volume.health.state == state));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admin::status::Histogram;
    use crate::link::end_report::{CacheReport, ConnectionReport, EndReport, LinkReport};

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
        process.volume_threads = Some(VolumeThreadsStatus::default());
        process.cache = Some(CacheStatus::default());
        let link =
            LinkReport { link: 1, state: "open".into(), rtt_us: 250, ..LinkReport::default() };
        let connection = ConnectionReport {
            id: "ab12".into(),
            peer: "client".into(),
            places: 64,
            places_free: 60,
            links: vec![
                link,
                LinkReport { link: 2, state: "silent".into(), ..LinkReport::default() },
            ],
            ..ConnectionReport::default()
        };
        let cache = Some(CacheReport { saved_bytes: 4000, ..CacheReport::default() });
        process.link =
            Some(EndReport { connections: vec![connection], cache, ..EndReport::default() });
        process
    }

    #[test]
    fn the_guide_lists_exactly_the_metrics() {
        let mut table = String::from("| metric | type | labels | meaning |\n|---|---|---|---|\n");
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
            assert_eq!(name.ends_with("_total"), kind == MetricKind::Counter, "{name}");
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
    fn label_values_are_escaped_and_numbers_equal_the_counters() {
        let text = exposition(&sample_process());
        assert!(text.contains("sawmill_writes_total{volume=\"disk\\\"1\"} 7\n"), "{text}");
        assert!(text.contains("sawmill_uptime_seconds 90\n"));
        assert!(text.contains("sawmill_health{volume=\"disk\\\"1\",state=\"serving\"} 1\n"));
        assert!(text.contains("sawmill_health{volume=\"disk\\\"1\",state=\"fenced\"} 0\n"));
    }

    #[test]
    fn a_link_is_reported_by_both_ends_under_the_same_labels() {
        let text = exposition(&sample_process());
        let connection = "connection=\"ab12\",peer=\"client\"";
        assert!(
            text.contains(&format!("sawmill_link_places_in_use{{{connection}}} 4\n")),
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
