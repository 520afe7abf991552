//! The metrics of links, from both ends of a device on another machine.
//!
//! Invariant: a process without links still lists every metric with its help, and no samples.
//!
//! Not here: what the numbers mean (`link::end_report`).

use super::text::{Exposition, Metric, MetricKind, counter, gauge, labels};
use crate::link::end_report::{CacheReport, ConnectionReport, EndReport, LinkReport};

/// Per end of links, without labels.
pub(super) const END: &[Metric<EndReport>] = &[gauge(
    "sawmill_link_connections",
    "Initiators connected to a target; for an `attach`, whether it is connected.",
    |end| end.connections.iter().filter(|connection| connection.connected).count() as u64,
)];

/// Per connection, labels `connection` (the same at both ends) and `peer`.
pub(super) const CONNECTION: &[Metric<ConnectionReport>] = &[
    gauge(
        "sawmill_link_connected",
        "1 while connected, 0 while the target is unreachable.",
        |connection| u64::from(connection.connected),
    ),
    gauge(
        "sawmill_link_unheard_seconds",
        "Seconds since the last packet of the other end.",
        |connection| connection.heard_ms / 1000,
    ),
    gauge("sawmill_link_places", "Requests that the target accepts at a time.", |connection| {
        connection.places as u64
    }),
    gauge(
        "sawmill_link_places_in_use",
        "Places in use: their requests are not done.",
        |connection| connection.places.saturating_sub(connection.places_free) as u64,
    ),
    gauge(
        "sawmill_link_requests_in_flight",
        "Requests that wait for their answer.",
        |connection| connection.pending as u64,
    ),
    gauge(
        "sawmill_link_requests_waiting",
        "Requests that wait for a place, or for the target.",
        |connection| connection.waiting as u64,
    ),
];

/// Per link, labels `connection`, `peer`, `link` (the same at both ends) and `address`.
pub(super) const LINK: &[Metric<LinkReport>] = &[
    gauge(
        "sawmill_link_up",
        "1 while the link carries requests, 0 while it is down or silent.",
        |link| u64::from(link.state == "open"),
    ),
    gauge(
        "sawmill_link_state_seconds",
        "Seconds since the link came up, fell silent or went down.",
        |link| link.state_ms / 1000,
    ),
    gauge(
        "sawmill_link_packet_bytes",
        "Bytes of the longest packet that the link carries.",
        |link| link.packet_bytes as u64,
    ),
    gauge("sawmill_link_window_bytes", "Bytes that may be in flight.", |link| {
        link.window_bytes as u64
    }),
    counter("sawmill_link_sent_packets_total", "Packets sent.", |link| link.sent_packets),
    counter("sawmill_link_sent_bytes_total", "Bytes of packets sent.", |link| link.sent_bytes),
    counter(
        "sawmill_link_received_packets_total",
        "Packets received that passed their check and were no duplicates.",
        |link| link.received_packets,
    ),
    counter("sawmill_link_received_bytes_total", "Bytes of those packets.", |link| {
        link.received_bytes
    }),
    counter("sawmill_link_lost_packets_total", "Packets that counted as lost.", |link| {
        link.lost_packets
    }),
    counter(
        "sawmill_link_sent_again_total",
        "Pieces of lost packets (commands, data, replies) that were sent again, by any link.",
        |link| link.sent_again,
    ),
    counter("sawmill_link_timeouts_total", "Times that an answer was overdue.", |link| {
        link.timeouts
    }),
    counter(
        "sawmill_link_refused_packets_total",
        "Packets dropped because they failed authentication or their checksum.",
        |link| link.refused_packets,
    ),
    counter("sawmill_link_doubled_packets_total", "Packets dropped as duplicates.", |link| {
        link.doubled_packets
    }),
];

/// Name and help of a metric with the labels of [`LINK`].
pub(super) const LINK_RTT: (&str, &str) =
    ("sawmill_link_rtt_seconds", "Smoothed time from a packet to its acknowledgement.");

/// The byte-granular cache of an `attach`, without labels.
pub(super) const LINK_CACHE: &[Metric<CacheReport>] = &[
    gauge(
        "sawmill_link_cache_dirty_bytes",
        "Dirty bytes: the target does not have them yet.",
        |cache| cache.dirty_bytes,
    ),
    gauge("sawmill_link_cache_pages", "Pages in the cache.", |cache| cache.pages),
    counter("sawmill_link_cache_written_bytes_total", "Payload bytes of writes.", |cache| {
        cache.written_by_user_bytes
    }),
    counter("sawmill_link_cache_partial_writes_total", "Writes of part of a page.", |cache| {
        cache.partial_writes
    }),
    counter(
        "sawmill_link_cache_sent_bytes_total",
        "Bytes written to the target, with their positions.",
        |cache| cache.sent_bytes,
    ),
    counter(
        "sawmill_link_cache_saved_bytes_total",
        "Bytes saved by not writing whole pages.",
        |cache| cache.saved_bytes,
    ),
    counter("sawmill_link_cache_fetched_bytes_total", "Bytes read from the target.", |cache| {
        cache.fetched_bytes
    }),
    counter(
        "sawmill_link_cache_errors_total",
        "Writes that the target answered with an error.",
        |cache| cache.write_back_errors,
    ),
];

/// The metrics of links; without any link, only their names and help.
pub(super) fn write(text: &mut Exposition, end: Option<&EndReport>) {
    // Without an end there are no samples below, but every head all the same.
    let connections = end.map_or(&[][..], |end| &end.connections);
    let ends: Vec<_> = end.iter().map(|end| (String::new(), *end)).collect();
    text.table(END, &ends);
    let labels_of = |connection: &ConnectionReport| {
        labels(&[("connection", &connection.id), ("peer", &connection.peer)])
    };
    let rows: Vec<_> =
        connections.iter().map(|connection| (labels_of(connection), connection)).collect();
    text.table(CONNECTION, &rows);
    let mut links = Vec::new();
    for connection in connections {
        for link in &connection.links {
            let address = link.address.as_deref().unwrap_or_default();
            let own = labels(&[("link", &link.link.to_string()), ("address", address)]);
            links.push((format!("{},{own}", labels_of(connection)), link));
        }
    }
    text.table(LINK, &links);
    // Not in the table, whose values are whole numbers: a round trip is a part of a second.
    text.head(LINK_RTT.0, MetricKind::Gauge, LINK_RTT.1);
    for (labels, link) in &links {
        text.sample(LINK_RTT.0, labels, link.rtt_us as f64 / 1e6);
    }
    let caches: Vec<_> = end
        .and_then(|end| end.cache.as_ref())
        .iter()
        .map(|cache| (String::new(), *cache))
        .collect();
    text.table(LINK_CACHE, &caches);
}
