//! The metrics of links, from both ends of a device on another machine.
//!
//! Invariant: a process without links still lists every metric with its help, and no samples.
//!
//! Not here: what the numbers mean (`link::end_report`).

use super::text::{Exposition, Kind, Metric, counter, gauge, labels};
use crate::link::end_report::{CacheReport, ConnectionReport, EndReport, LinkReport};

/// Per end of links, without labels.
pub(super) const END: &[Metric<EndReport>] = &[gauge(
    "sawmill_link_connections",
    "Initiators connected to a target; for an `attach`, whether it is connected.",
    |e| e.connections.iter().filter(|c| c.connected).count() as u64,
)];

/// Per connection, labels `connection` (the same at both ends) and `peer`.
pub(super) const CONNECTION: &[Metric<ConnectionReport>] = &[
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
pub(super) const LINK: &[Metric<LinkReport>] = &[
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
    counter("sawmill_link_timeouts_total", "Times that an answer was overdue.", |l| l.timeouts),
    counter(
        "sawmill_link_refused_packets_total",
        "Packets dropped because they failed authentication or their checksum.",
        |l| l.refused_packets,
    ),
    counter("sawmill_link_doubled_packets_total", "Packets dropped as duplicates.", |l| {
        l.doubled_packets
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

/// The metrics of links; without any link, only their names and help.
pub(super) fn write(text: &mut Exposition, end: Option<&EndReport>) {
    // Without an end there are no samples below, but every head all the same.
    let connections = end.map_or(&[][..], |end| &end.connections);
    let ends: Vec<_> = end.iter().map(|end| (String::new(), *end)).collect();
    text.table(END, &ends);
    let of = |c: &ConnectionReport| labels(&[("connection", &c.id), ("peer", &c.peer)]);
    let rows: Vec<_> = connections.iter().map(|c| (of(c), c)).collect();
    text.table(CONNECTION, &rows);
    let of_link = |c: &ConnectionReport, l: &LinkReport| {
        let address = l.address.as_deref().unwrap_or_default();
        format!("{},{}", of(c), labels(&[("link", &l.link.to_string()), ("address", address)]))
    };
    let links: Vec<_> =
        connections.iter().flat_map(|c| c.links.iter().map(move |l| (of_link(c, l), l))).collect();
    text.table(LINK, &links);
    // Not in the table, whose values are whole numbers: a round trip is a part of a second.
    text.head(LINK_RTT.0, Kind::Gauge, LINK_RTT.1);
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
