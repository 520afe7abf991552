//! What a running `target` or `attach` says of its links: one JSON document to whoever connects to its
//! socket.
//!
//! Invariants: a socket is its owner's alone, and named after its process; what nobody listens on is removed
//! by whoever asks. Not here: what the numbers are made of (`sawmill-link`).

use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use sawmill_link::carrier::LinkAddress;
use sawmill_link::{LinkStatus, cache};
use serde::{Deserialize, Serialize};

use crate::exit::{Failure, Result};
use crate::wiring::make_folder;

/// What sockets of ends are called; `.sock` is for those that speak HTTP.
const EXTENSION: &str = "end";

/// How long an end may take to take a question or an answer.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);

/// One end and its connections.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct EndTold {
    /// `target` or `attach`.
    pub(crate) kind: String,
    /// The target's name, or the place that is attached.
    pub(crate) name: String,
    pub(crate) pid: u32,
    pub(crate) connections: Vec<ConnectionTold>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) cache: Option<CacheTold>,
}

/// One connection.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct ConnectionTold {
    /// Who is at the other end.
    pub(crate) peer: String,
    pub(crate) connected: bool,
    /// Credits, and how many are free; an initiator knows them.
    pub(crate) slots: usize,
    pub(crate) slots_free: usize,
    /// Requests under way, and those of them that wait for a credit.
    pub(crate) pending: usize,
    pub(crate) waiting: usize,
    pub(crate) links: Vec<LinkTold>,
}

/// One link of a connection.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct LinkTold {
    /// Where it leads, if this end knows.
    pub(crate) address: Option<String>,
    /// `open`, `silent` or `down`.
    pub(crate) state: String,
    pub(crate) packet_bytes: usize,
    pub(crate) rtt_us: u64,
    pub(crate) window_bytes: usize,
    pub(crate) sent_packets: u64,
    pub(crate) sent_bytes: u64,
    /// Packets that counted as lost; what was in them was sent again.
    pub(crate) lost_packets: u64,
    pub(crate) time_outs: u64,
    pub(crate) refused_packets: u64,
    pub(crate) doubled_packets: u64,
}

/// The cache of an `attach`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct CacheTold {
    pub(crate) dirty_bytes: u64,
    pub(crate) pages: u64,
    pub(crate) written_by_user_bytes: u64,
    pub(crate) sent_bytes: u64,
    /// What whole pages would have cost more than the bytes that were written.
    pub(crate) saved_bytes: u64,
    pub(crate) partial_writes: u64,
    pub(crate) fetched_bytes: u64,
    pub(crate) write_back_errors: u64,
}

impl ConnectionTold {
    /// `addresses`: where its links lead, where that is known.
    pub(crate) fn new(peer: String, status: &LinkStatus, addresses: &[LinkAddress]) -> Self {
        let links = status.links.iter().enumerate().map(|(index, link)| LinkTold {
            address: addresses.get(index).map(ToString::to_string),
            state: if !link.open {
                "down"
            } else if link.silent {
                "silent"
            } else {
                "open"
            }
            .into(),
            packet_bytes: link.packet_bytes,
            rtt_us: link.rtt_us,
            window_bytes: link.window_bytes,
            sent_packets: link.sent.packets,
            sent_bytes: link.sent.bytes,
            lost_packets: link.sent.lost,
            time_outs: link.sent.time_outs,
            refused_packets: link.refused,
            doubled_packets: link.doubled,
        });
        ConnectionTold {
            peer,
            connected: status.connected,
            slots: status.slots,
            slots_free: status.slots_free,
            pending: status.pending,
            waiting: status.waiting,
            links: links.collect(),
        }
    }
}

impl CacheTold {
    pub(crate) fn new(stats: &cache::Stats) -> Self {
        let get = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
        CacheTold {
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

/// Answers whoever asks, until dropped.
pub(crate) struct Telling {
    path: PathBuf,
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Telling {
    /// Listens in `folder`.
    pub(crate) fn start(folder: &Path, tell: impl Fn() -> EndTold + Send + 'static) -> Result<Telling> {
        make_folder(folder)?;
        let path = folder.join(format!("{}.{EXTENSION}", std::process::id()));
        let cannot = |error: io::Error| Failure::io(format!("cannot listen on {}", path.display()), &error);
        // Whoever had this number before is gone.
        let _ = std::fs::remove_file(&path);
        let listener = UnixListener::bind(&path).map_err(cannot)?;
        let over = Arc::new(AtomicBool::new(false));
        let ended = Arc::clone(&over);
        let answer = move || {
            for asked in listener.incoming() {
                if ended.load(Ordering::SeqCst) {
                    return;
                }
                if let Err(error) = asked.and_then(|stream| answer(stream, &tell())) {
                    tracing::debug!("nobody heard how the links do: {error}");
                }
            }
        };
        let thread = std::thread::Builder::new().name("told".into()).spawn(answer).map_err(cannot)?;
        Ok(Telling { path, over, thread: Some(thread) })
    }
}

fn answer(mut stream: UnixStream, told: &EndTold) -> io::Result<()> {
    stream.set_write_timeout(Some(ANSWER_WITHIN))?;
    stream.write_all(&serde_json::to_vec(told)?)
}

impl Drop for Telling {
    fn drop(&mut self) {
        self.over.store(true, Ordering::SeqCst);
        // Ends the wait. Without it the thread ends with the process.
        let woken = UnixStream::connect(&self.path).is_ok();
        let _ = std::fs::remove_file(&self.path);
        if let Some(thread) = self.thread.take().filter(|_| woken)
            && thread.join().is_err()
        {
            tracing::error!("the thread that tells how links do died");
        }
    }
}

/// Asks all that run, in the order of their processes.
pub(crate) fn ask_all(folder: &Path) -> Vec<EndTold> {
    let mut all = Vec::new();
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.extension().is_none_or(|extension| extension != EXTENSION) {
            continue;
        }
        match ask(&path) {
            Ok(told) => all.push(told),
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                // Its process died.
                let _ = std::fs::remove_file(&path);
            }
            Err(error) => tracing::warn!("{} does not answer: {error}", path.display()),
        }
    }
    all.sort_by_key(|told| told.pid);
    all
}

fn ask(path: &Path) -> io::Result<EndTold> {
    let mut stream = UnixStream::connect(path)?;
    stream.set_read_timeout(Some(ANSWER_WITHIN))?;
    let mut text = Vec::new();
    stream.read_to_end(&mut text)?;
    Ok(serde_json::from_slice(&text)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_told_is_heard_until_the_end_and_the_dead_are_swept() {
        let folder = tempfile::tempdir().unwrap();
        let told = || EndTold { name: "store".into(), pid: 7, ..EndTold::default() };
        let telling = Telling::start(folder.path(), told).unwrap();
        let heard = ask_all(folder.path());
        assert_eq!((heard.len(), heard[0].name.as_str(), heard[0].pid), (1, "store", 7));
        drop(telling);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
        let dead = folder.path().join("9.end");
        drop(UnixListener::bind(&dead).unwrap());
        assert!(ask_all(folder.path()).is_empty() && !dead.exists());
    }
}
