//! The fault proxy between the real server and a real S3 server: it causes the faults of such a
//! path on purpose, by a script or by chance.
//!
//! Invariants: the proxy does not change what it lets through (host and path stay as they were
//! signed). A fault affects its own request alone, and is counted when it is done. Modules: `fault`
//! (which faults, when, how often), `relay` (one request on its way).
//!
//! Not here: TLS; answers before the request's body has arrived; several proxies in a row.

mod fault;
mod relay;

use std::net::SocketAddr;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};

pub use fault::{Counts, Fault, FaultRates, Rule, Verb};

use crate::machine::PATIENCE;
use crate::store::{Minio, ReservedAddress, StoreUnderTest};
use fault::Script;
use relay::{ClientSocket, LateRequest, Memory};

/// A proxy in front of a MinIO.
pub struct Proxy {
    address: ReservedAddress,
    shared: Arc<ProxyState>,
    accepting: Mutex<Option<JoinHandle<()>>>,
    runtime: Runtime,
    /// Dropped after the proxy.
    _store: Arc<Minio>,
}

/// The state that all requests of a proxy share.
struct ProxyState {
    upstream: SocketAddr,
    script: Mutex<Script>,
    counts: Mutex<Counts>,
    counted: Condvar,
    late_requests: Mutex<Vec<LateRequest>>,
    memory: Mutex<Memory>,
    /// Increases each time the held answers are released.
    release_turn: watch::Sender<u64>,
}

impl std::fmt::Debug for Proxy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "a proxy at {} before {}", self.address(), self.shared.upstream)
    }
}

impl Proxy {
    /// A proxy that lets everything through.
    #[must_use]
    pub fn before(store: Arc<Minio>) -> Arc<Self> {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let shared = ProxyState {
            upstream: store.address(),
            script: Mutex::default(),
            counts: Mutex::default(),
            counted: Condvar::new(),
            late_requests: Mutex::default(),
            memory: Mutex::default(),
            release_turn: watch::Sender::new(0),
        };
        let proxy = Proxy {
            address: ReservedAddress::new(),
            shared: Arc::new(shared),
            accepting: Mutex::new(None),
            runtime: runtime.expect("a runtime for the proxy"),
            _store: store,
        };
        proxy.open();
        Arc::new(proxy)
    }

    /// The proxy as a store for volumes.
    #[must_use]
    pub fn store(self: &Arc<Self>) -> StoreUnderTest {
        StoreUnderTest::Proxied(Arc::clone(self))
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address.address()
    }

    /// Adds a rule. Earlier rules go first.
    pub fn rule(&self, rule: Rule) {
        lock(&self.shared.script).rules.push(rule);
    }

    /// Faults by chance from now on.
    pub fn inject_by_chance(&self, rates: FaultRates) {
        lock(&self.shared.script).rates = Some(rates);
    }

    /// No more faults: no rules, none by chance. Held answers are released; late puts stay late.
    pub fn stop_faults(&self) {
        *lock(&self.shared.script) = Script::default();
        self.release();
    }

    /// Releases every held answer.
    pub fn release(&self) {
        self.shared.release_turn.send_modify(|turn| *turn += 1);
    }

    /// Stops listening: connections are reset, new ones are refused by the kernel.
    pub fn shut(&self) {
        if let Some(accepting) = lock(&self.accepting).take() {
            accepting.abort();
            // Its socket is closed only when the task has ended.
            let _ = self.runtime.block_on(accepting);
            self.shared.count("refused");
        }
    }

    /// Opens the door again, at the same address.
    pub fn open(&self) {
        let mut accepting = lock(&self.accepting);
        if accepting.is_none() {
            let listener =
                std::net::TcpListener::bind(self.address()).expect("the proxy's own address");
            listener.set_nonblocking(true).expect("a socket can be made non-blocking");
            let _inside = self.runtime.enter();
            let listener = TcpListener::from_std(listener).expect("a listening socket");
            *accepting = Some(self.runtime.spawn(accept(listener, Arc::clone(&self.shared))));
        }
    }

    /// The number of late puts that have not been delivered.
    #[must_use]
    pub fn late(&self) -> usize {
        lock(&self.shared.late_requests).len()
    }

    /// Delivers every late put now; returns the store's status for each.
    pub fn deliver_late(&self) -> Vec<u16> {
        let requests = std::mem::take(&mut *lock(&self.shared.late_requests));
        requests
            .into_iter()
            .map(|request| self.runtime.block_on(relay::deliver(&self.shared, request)))
            .collect()
    }

    /// How often each fault was done so far.
    #[must_use]
    pub fn counts(&self) -> Counts {
        lock(&self.shared.counts).clone()
    }

    /// Waits until a fault has been done `times` times.
    ///
    /// # Panics
    /// When that takes too long.
    pub fn wait_for(&self, name: &str, times: u64) {
        let counts = lock(&self.shared.counts);
        let (counts, waited) = self
            .shared
            .counted
            .wait_timeout_while(counts, PATIENCE, |counts| counts.of(name) < times)
            .unwrap_or_else(PoisonError::into_inner);
        assert!(!waited.timed_out(), "{name} did not happen {times} times: {counts}");
    }
}

impl ProxyState {
    fn count(&self, name: &'static str) {
        *lock(&self.counts).faults.entry(name).or_default() += 1;
        self.counted.notify_all();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Accepts connections until aborted; they end with it.
async fn accept(listener: TcpListener, shared: Arc<ProxyState>) {
    let mut connections = JoinSet::new();
    loop {
        let Ok((stream, _)) = listener.accept().await else { continue };
        let (Ok(()), Ok(door)) = (stream.set_nodelay(true), ClientSocket::of(&stream)) else {
            continue;
        };
        let (shared, door) = (Arc::clone(&shared), Arc::new(door));
        let service = service_fn(move |request| {
            relay::relay(Arc::clone(&shared), Arc::clone(&door), request)
        });
        // A connection that ends with an error ends as its fault intends.
        connections.spawn(http1::Builder::new().serve_connection(TokioIo::new(stream), service));
        while connections.try_join_next().is_some() {}
    }
}
