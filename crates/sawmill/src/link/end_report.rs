//! The status of the links of a running `target` or `attach`: one JSON document for each connection
//! to its socket, and part of the status document of its admin server.
//!
//! Invariants: a socket is accessible to its owner only, and is named after its process. A socket
//! without a listener is removed by the next process that asks. Not here: where the numbers come
//! from (`sawmill-link`).

use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use sawmill_link::carrier::{LinkAddress, Peer};
use sawmill_link::{ConnectionStatus, LinkStatus, cache};
use serde::{Deserialize, Serialize};

use crate::folders::make_folder;
use sawmill_console::exit::{Failure, Result};

/// The file name extension of these sockets; `.sock` is for those that speak HTTP.
const EXTENSION: &str = "end";

/// Time for an end to accept a question or an answer.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(5);

/// The longest report: four times that of 4,096 connections with eight links each.
const REPORT_BYTES_MAX: usize = 64 << 20;

/// One end and its connections.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct EndReport {
    /// `target` or `attach`.
    pub(crate) kind: String,
    /// The target's name, or the attached place.
    pub(crate) name: String,
    pub(crate) pid: u32,
    pub(crate) connections: Vec<ConnectionReport>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) cache: Option<CacheReport>,
}

/// One connection.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct ConnectionReport {
    /// The id of the initiator's run: the same at both ends, and in its next connection.
    pub(crate) id: String,
    /// The name of the other end.
    pub(crate) peer: String,
    pub(crate) connected: bool,
    /// Time since the last packet of the other end.
    pub(crate) heard_ms: u64,
    /// Places at the target, and how many are free. An initiator frees a place when it has the
    /// whole answer; a target frees it as soon as it has answered. An end of an older version says
    /// `slots`.
    #[serde(alias = "slots")]
    pub(crate) places: usize,
    #[serde(alias = "slots_free")]
    pub(crate) places_free: usize,
    /// Requests in flight, and how many of them wait for a place.
    pub(crate) pending: usize,
    pub(crate) waiting: usize,
    pub(crate) links: Vec<LinkReport>,
}

/// One link of a connection.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct LinkReport {
    /// Its number in the connection, the same at both ends.
    pub(crate) link: usize,
    /// The address of the other end, if this end knows it.
    pub(crate) address: Option<String>,
    /// `open`, `silent` or `down`, and for how long.
    pub(crate) state: String,
    pub(crate) state_ms: u64,
    pub(crate) packet_bytes: usize,
    /// 0: not measured yet.
    pub(crate) rtt_us: u64,
    pub(crate) window_bytes: usize,
    pub(crate) sent_packets: u64,
    pub(crate) sent_bytes: u64,
    pub(crate) received_packets: u64,
    pub(crate) received_bytes: u64,
    /// Packets that counted as lost, and pieces of commands, data and replies in them that were
    /// sent again.
    pub(crate) lost_packets: u64,
    pub(crate) sent_again: u64,
    pub(crate) timeouts: u64,
    pub(crate) refused_packets: u64,
    pub(crate) doubled_packets: u64,
    /// Measured by the process that asks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) rate: Option<RateReport>,
}

/// The traffic of a link per second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RateReport {
    pub(crate) sent_bytes_per_s: u64,
    pub(crate) received_bytes_per_s: u64,
    pub(crate) sent_packets_per_s: u64,
    pub(crate) received_packets_per_s: u64,
}

/// The cache of an `attach`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct CacheReport {
    pub(crate) dirty_bytes: u64,
    pub(crate) pages: u64,
    pub(crate) written_by_user_bytes: u64,
    pub(crate) sent_bytes: u64,
    /// Bytes that writing whole pages would have added to what was written.
    pub(crate) saved_bytes: u64,
    pub(crate) partial_writes: u64,
    pub(crate) fetched_bytes: u64,
    pub(crate) write_back_errors: u64,
}

impl ConnectionReport {
    /// `addresses`: the addresses of its links, if known. Links that are not joined are down.
    pub(crate) fn new(status: &ConnectionStatus, addresses: &[LinkAddress]) -> Self {
        let joined =
            status.links.iter().enumerate().map(|(index, link)| LinkReport::new(index, link));
        let away = (status.links.len()..addresses.len()).map(|link| LinkReport {
            link,
            state: "down".into(),
            state_ms: status.heard_ms,
            ..LinkReport::default()
        });
        let mut links: Vec<LinkReport> = joined.chain(away).collect();
        for (link, address) in links.iter_mut().zip(addresses) {
            link.address = Some(address.to_string());
        }
        ConnectionReport {
            id: status.instance[..8].iter().map(|byte| format!("{byte:02x}")).collect(),
            peer: status.peer.clone(),
            connected: status.connected,
            heard_ms: status.heard_ms,
            places: status.places,
            places_free: status.places_free,
            pending: status.pending,
            waiting: status.waiting,
            links,
        }
    }
}

impl LinkReport {
    fn new(link: usize, status: &LinkStatus) -> Self {
        let state = match status {
            LinkStatus { open: false, .. } => "down",
            LinkStatus { silent: true, .. } => "silent",
            _ => "open",
        };
        LinkReport {
            link,
            address: status.peer.as_ref().map(peer_address),
            state: state.into(),
            state_ms: status.state_ms,
            packet_bytes: status.packet_bytes,
            rtt_us: status.rtt_us,
            window_bytes: status.window_bytes,
            sent_packets: status.sent.packets,
            sent_bytes: status.sent.bytes,
            received_packets: status.received.packets,
            received_bytes: status.received.bytes,
            lost_packets: status.sent.lost,
            sent_again: status.sent.pieces_resent,
            timeouts: status.sent.timeouts,
            refused_packets: status.refused,
            doubled_packets: status.doubled,
            rate: None,
        }
    }
}

/// The address of a peer, nearly in the form that users type.
fn peer_address(peer: &Peer) -> String {
    match peer {
        Peer::Udp(address) => format!("udp:{address}"),
        Peer::Ethernet(address) => {
            let parts: Vec<String> = address.iter().map(|byte| format!("{byte:02x}")).collect();
            format!("eth:{}", parts.join(":"))
        }
        Peer::Stream => "tcp".into(),
    }
}

impl CacheReport {
    pub(crate) fn new(stats: &cache::CacheCounters) -> Self {
        let get = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
        CacheReport {
            dirty_bytes: get(&stats.dirty_bytes),
            pages: get(&stats.pages),
            written_by_user_bytes: get(&stats.bytes_written_by_user),
            sent_bytes: get(&stats.bytes_sent),
            saved_bytes: get(&stats.bytes_saved),
            partial_writes: get(&stats.partial_writes),
            fetched_bytes: get(&stats.fetched_bytes),
            write_back_errors: get(&stats.write_back_errors),
        }
    }
}

/// Returns the status of an end.
pub(crate) type ReportSource = Arc<dyn Fn() -> EndReport + Send + Sync>;

/// Answers every connection, until dropped.
pub(crate) struct StatusListener {
    path: PathBuf,
    is_over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl StatusListener {
    /// Listens in `folder`.
    pub(crate) fn start(folder: &Path, report_source: ReportSource) -> Result<StatusListener> {
        make_folder(folder)?;
        let path = folder.join(format!("{}.{EXTENSION}", std::process::id()));
        let cannot =
            |error: io::Error| Failure::io(format!("cannot listen on {}", path.display()), &error);
        // The process that had this number before is gone.
        let _ = std::fs::remove_file(&path);
        let listener = UnixListener::bind(&path).map_err(cannot)?;
        let is_over = Arc::new(AtomicBool::new(false));
        let is_ended = Arc::clone(&is_over);
        let answer = move || {
            for connection in listener.incoming() {
                if is_ended.load(Ordering::SeqCst) {
                    return;
                }
                if let Err(error) = connection.and_then(|stream| answer(stream, &report_source())) {
                    tracing::debug!("cannot report link status: {error}");
                }
            }
        };
        let thread =
            std::thread::Builder::new().name("link-status".into()).spawn(answer).map_err(cannot)?;
        Ok(StatusListener { path, is_over, thread: Some(thread) })
    }
}

fn answer(mut stream: UnixStream, report: &EndReport) -> io::Result<()> {
    // One thread answers everybody: a client that reads nothing must not stop it.
    stream.set_write_timeout(Some(ANSWER_TIME_MAX))?;
    stream.write_all(&serde_json::to_vec(report)?)
}

impl Drop for StatusListener {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::SeqCst);
        // Wakes the thread. Without that, the thread ends with the process.
        let woken = UnixStream::connect(&self.path).is_ok();
        let _ = std::fs::remove_file(&self.path);
        if let Some(thread) = self.thread.take().filter(|_| woken)
            && thread.join().is_err()
        {
            tracing::error!("the thread that reports link status died");
        }
    }
}

/// Asks all running ends, in the order of their process ids.
pub(crate) fn query_all(folder: &Path) -> Vec<EndReport> {
    let mut all = Vec::new();
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.extension().is_none_or(|extension| extension != EXTENSION) {
            continue;
        }
        match query(&path) {
            Ok(report) => all.push(report),
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                // Its process has died.
                let _ = std::fs::remove_file(&path);
            }
            Err(error) => tracing::warn!("{} does not answer: {error}", path.display()),
        }
    }
    all.sort_by_key(|report| report.pid);
    all
}

fn query(path: &Path) -> io::Result<EndReport> {
    let mut stream = UnixStream::connect(path)?;
    let deadline = Instant::now() + ANSWER_TIME_MAX;
    let mut text = Vec::new();
    let mut part = [0; 16 << 10];
    // An end that hangs, is slow or never stops must not keep the others from being listed.
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut part) {
            Ok(0) => return Ok(serde_json::from_slice(&text)?),
            Ok(count) => text.extend_from_slice(&part[..count]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
        if text.len() > REPORT_BYTES_MAX {
            let what = format!("its report is longer than {REPORT_BYTES_MAX} bytes");
            return Err(io::Error::new(io::ErrorKind::InvalidData, what));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_is_listed_until_it_ends_and_dead_sockets_are_swept() {
        let folder = tempfile::tempdir().unwrap();
        let report = || EndReport { name: "store".into(), pid: 7, ..EndReport::default() };
        let status_listener = StatusListener::start(folder.path(), Arc::new(report)).unwrap();
        let reports = query_all(folder.path());
        assert_eq!((reports.len(), reports[0].name.as_str(), reports[0].pid), (1, "store", 7));
        drop(status_listener);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
        let dead = folder.path().join("9.end");
        drop(UnixListener::bind(&dead).unwrap());
        assert!(query_all(folder.path()).is_empty() && !dead.exists());
    }

    #[test]
    fn a_connection_of_an_end_of_an_older_version_is_read() {
        let mut document = serde_json::to_value(ConnectionReport::default()).unwrap();
        document.as_object_mut().unwrap().retain(|name, _| !name.starts_with("places"));
        document["slots"] = 7.into();
        document["slots_free"] = 3.into();
        let report: ConnectionReport = serde_json::from_value(document).unwrap();
        assert_eq!((report.places, report.places_free), (7, 3));
    }

    #[test]
    fn a_report_without_an_end_is_given_up_at_its_limit() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("7.end");
        let listener = UnixListener::bind(&path).unwrap();
        std::thread::scope(|scope| {
            let endless = scope.spawn(|| {
                let (mut stream, _) = listener.accept().unwrap();
                // Ends when the other end closes.
                while stream.write_all(&[b' '; 1 << 16]).is_ok() {}
            });
            let error = query(&path).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{error}");
            endless.join().unwrap();
        });
    }
}
