//! The admin server: HTTP/1.1 on a Unix socket per volume, and on a loopback address if requested.
//!
//! | target | answer |
//! |---|---|
//! | `GET /`, `/style.css`, `/script.js` | the dashboard |
//! | `GET /status` | [`status::ProcessStatus`] as JSON |
//! | `GET /metrics` | Prometheus text |
//! | `GET /wait?safety=stored&timeout_ms=500[&volume=NAME]` | `{"reached": true}` when it is |
//! | `POST /request` on a control socket | see [`control::protocol`](crate::control::protocol) |
//!
//! Invariants: over TCP it reads and never changes anything. It runs on one thread of its own, so
//! its requests cannot delay the disk. Over TCP it answers only to names of this machine, so that
//! no web page elsewhere can read it through a browser.
//!
//! Not here: what a request gets (`answer`), what the numbers mean (`status`), where they come
//! from (`wiring`).

mod answer;
pub(crate) mod fuzzing;
pub(crate) mod metrics;
mod page;
pub(crate) mod status;

use std::convert::Infallible;
use std::fs;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use parking_lot::{Condvar, Mutex};
use sawmill_volume::Safety;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::watch;

use crate::control;
use crate::control::protocol::ControlRequest;
use answer::answer;
use sawmill_console::exit::{Failure, Result};
use status::ProcessStatus;

/// Concurrent connections to the loopback address: any user of this machine can make them.
const LOOPBACK_CONNECTIONS_MAX: u32 = 64;
/// The longest wait through the loopback address. It ends early if the client hangs up.
const LOOPBACK_WAIT_MAX: Duration = Duration::from_secs(60);
/// Concurrent connections to control sockets: doors need descriptors too.
const CONTROL_CONNECTIONS_MAX: u32 = 128;
/// The longest life of a connection to the loopback address; requests that arrived by then are
/// still answered.
const LOOPBACK_TIME_MAX: Duration = Duration::from_secs(60);
/// Time to send answers before the process exits.
const ANSWERS_TIME_MAX: Duration = Duration::from_secs(2);
/// Time a client may take to send its request.
const REQUEST_TIME_MAX: Duration = Duration::from_secs(10);

/// The server's callbacks. A volume's name narrows the answer to that volume.
pub(crate) struct Callbacks {
    /// The status of the process, or of one volume in it.
    pub(crate) status: Box<StatusSource>,
    /// Waits for a volume, as long as the client is connected; blocks.
    pub(crate) waiter: Box<SafetyWaiter>,
    /// Carries a request out; blocks. What may be given up ends when its client hangs up.
    pub(crate) carry_out: Box<RequestHandler>,
}

/// See [`Callbacks::status`].
type StatusSource = dyn Fn(Option<&str>) -> ProcessStatus + Send + Sync;
/// See [`Callbacks::waiter`].
type SafetyWaiter =
    dyn Fn(&str, Safety, Option<Duration>, &dyn Fn() -> bool) -> Result<bool> + Send + Sync;
/// See [`Callbacks::carry_out`].
type RequestHandler =
    dyn Fn(&str, ControlRequest, &dyn Fn() -> bool) -> Result<serde_json::Value> + Send + Sync;

/// An address to listen on.
pub(crate) enum ListenAddress {
    /// A Unix socket for one volume.
    Control { path: PathBuf, volume: String },
    /// A loopback address for all volumes.
    Loopback(SocketAddr),
    /// The same, from the previous process, which listened on it.
    Inherited(TcpListener),
}

/// A running admin server.
pub(crate) struct Admin {
    stop_sender: watch::Sender<bool>,
    shared: Option<Arc<AdminState>>,
    thread: Option<JoinHandle<()>>,
    sockets: Mutex<Vec<PathBuf>>,
    /// The loopback address's socket, for the next process.
    loopback: Option<TcpListener>,
    /// The loopback address, with the actual port.
    pub(crate) address: Option<SocketAddr>,
}

enum Listener {
    Control(UnixListener, String),
    Loopback(TcpListener),
}

struct AdminState {
    callbacks: Callbacks,
    /// Requests that block now, by kind; each holds a thread.
    blocked: [AtomicU32; Call::ALL.len()],
    /// Open connections, and a way to wait until there are none.
    connections: Mutex<u32>,
    none_left: Condvar,
    /// Of these, those to control sockets and those to the loopback address.
    own: AtomicU32,
    strangers: AtomicU32,
}

impl AdminState {
    fn new(callbacks: Callbacks) -> AdminState {
        AdminState {
            callbacks,
            blocked: Default::default(),
            connections: Mutex::default(),
            none_left: Condvar::new(),
            own: AtomicU32::new(0),
            strangers: AtomicU32::new(0),
        }
    }
}

/// The kinds of calls that block. Each has threads of its own, so that a request that only
/// reads cannot delay a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Call {
    /// A change, which only our own user can request.
    Change,
    /// A step of warming: many commands may wait for their turns, and changes must not wait for
    /// them.
    Warm,
    /// A wait of our own user.
    OwnWait,
    /// A wait of any user, through the loopback address.
    LoopbackWait,
}

impl Call {
    const ALL: [Call; 4] = [Call::Change, Call::Warm, Call::OwnWait, Call::LoopbackWait];

    const fn calls_max(self) -> u32 {
        match self {
            Call::Change => 16,
            Call::Warm => 4,
            Call::OwnWait => 32,
            Call::LoopbackWait => 8,
        }
    }

    fn threads() -> usize {
        Call::ALL.into_iter().map(|kind| kind.calls_max() as usize).sum()
    }
}

impl Admin {
    /// Binds all addresses and starts the server's thread.
    pub(crate) fn start(callbacks: Callbacks, addresses: Vec<ListenAddress>) -> Result<Admin> {
        let mut sockets = Vec::new();
        let mut listeners = Vec::new();
        let mut loopback = None;
        for address in addresses {
            let listener = match address {
                ListenAddress::Control { path, volume } => {
                    listeners.push(Listener::Control(bind_control(&path)?, volume));
                    sockets.push(path);
                    continue;
                }
                ListenAddress::Loopback(wanted) => bind_loopback(wanted)?,
                ListenAddress::Inherited(listener) => listener,
            };
            loopback = listener.try_clone().ok();
            listeners.push(Listener::Loopback(listener));
        }
        let address = loopback.as_ref().and_then(|listener| listener.local_addr().ok());
        let (stop_sender, stopped) = watch::channel(false);
        let shared = Arc::new(AdminState::new(callbacks));
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .enable_time()
            .thread_name("admin")
            // A thread for every call, so that a kind that is full takes none of another's.
            .max_blocking_threads(Call::threads())
            .thread_keep_alive(Duration::from_secs(1))
            .build()
            .map_err(|error| Failure::io("cannot start the admin server", &error))?;
        let served = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("admin".into())
            .spawn(move || {
                runtime.block_on(serve_all(listeners, served, stopped));
                // Long polls that still wait are closed; their clients see the connection end.
                runtime.shutdown_background();
            })
            .map_err(|error| Failure::io("cannot start the admin server's thread", &error))?;
        let (shared, thread) = (Some(shared), Some(thread));
        Ok(Admin { stop_sender, shared, thread, sockets: Mutex::new(sockets), loopback, address })
    }

    /// A server without addresses.
    pub(crate) fn none() -> Admin {
        let (stop_sender, _) = watch::channel(true);
        Admin {
            stop_sender,
            shared: None,
            thread: None,
            sockets: Mutex::default(),
            loopback: None,
            address: None,
        }
    }

    /// The URL for browsers, if it has a loopback address.
    pub(crate) fn url(&self) -> Option<String> {
        self.address.map(|address| format!("http://{address}/"))
    }

    /// A duplicate of the loopback address's socket, for another process.
    pub(crate) fn listener(&self) -> Option<Result<OwnedFd>> {
        let cannot = |error| Failure::io("cannot hand over the admin server's socket", &error);
        let listener = self.loopback.as_ref()?.try_clone();
        Some(listener.map(OwnedFd::from).map_err(cannot))
    }

    /// Waits a moment until open requests have their answers.
    pub(crate) fn finish_answers(&self) {
        if let Some(shared) = &self.shared {
            let mut open = shared.connections.lock();
            shared.none_left.wait_while_for(&mut open, |open| *open > 0, ANSWERS_TIME_MAX);
        }
    }

    /// The control sockets belong to another process from now on: they stay when this one exits.
    /// Readers' sockets do not, because they are named after their process.
    pub(crate) fn leave(&self) {
        let own = control::reader_socket(process::id());
        self.sockets.lock().retain(|socket| socket.ends_with(&own));
    }
}

impl Drop for Admin {
    fn drop(&mut self) {
        // The names go first: who connects from now on finds no process, and none that hangs up.
        for socket in self.sockets.lock().iter() {
            // It may be gone already; the next process recognizes a left-over socket.
            let _ = fs::remove_file(socket);
        }
        let _ = self.stop_sender.send(true);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the admin server's thread died");
        }
    }
}

fn bind_control(path: &Path) -> Result<UnixListener> {
    /// What the kernel's socket address holds, less its final zero.
    const SOCKET_PATH_BYTES_MAX: usize = 107;
    if path.as_os_str().len() > SOCKET_PATH_BYTES_MAX {
        return Err(Failure::usage(format!(
            "the control socket's path {} is longer than {SOCKET_PATH_BYTES_MAX} bytes; \
             set XDG_STATE_HOME to a shorter folder",
            path.display()
        )));
    }
    // A socket gets its name only once a process listens on it. In a hand-off the previous process
    // still has the name, which must never lack a socket, or a client finds the volume unserved.
    // Otherwise the process that made the old socket is gone, because we hold the journal's lock.
    let unnamed = path.with_extension("new");
    let cannot =
        |error: io::Error| Failure::io(format!("cannot listen on {}", path.display()), &error);
    match fs::remove_file(&unnamed) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(cannot(error)),
        _ => {}
    }
    let listener = UnixListener::bind(&unnamed).map_err(cannot)?;
    // Private before it has its name: nobody else can connect in between.
    let private = fs::set_permissions(&unnamed, fs::Permissions::from_mode(0o600));
    let ready = private.and_then(|()| listener.set_nonblocking(true));
    ready.and_then(|()| fs::rename(&unnamed, path)).map_err(cannot)?;
    Ok(listener)
}

fn bind_loopback(address: SocketAddr) -> Result<TcpListener> {
    let cannot =
        |error: io::Error| Failure::io(format!("cannot listen on {address} for --admin"), &error);
    let listener = TcpListener::bind(address).map_err(cannot)?;
    listener.set_nonblocking(true).map_err(cannot)?;
    Ok(listener)
}

async fn serve_all(
    listeners: Vec<Listener>,
    shared: Arc<AdminState>,
    mut stopped: watch::Receiver<bool>,
) {
    for listener in listeners {
        let shared = Arc::clone(&shared);
        match listener {
            Listener::Control(listener, volume) => {
                let Ok(listener) = tokio::net::UnixListener::from_std(listener) else { continue };
                tokio::spawn(accept_own(listener, volume, shared));
            }
            Listener::Loopback(listener) => {
                let Ok(listener) = tokio::net::TcpListener::from_std(listener) else { continue };
                tokio::spawn(accept_strangers(listener, shared));
            }
        }
    }
    // An error means that the sender is gone, which also means stop.
    let _ = stopped.wait_for(|is_stopped| *is_stopped).await;
}

/// Takes connections to the control socket of a volume, forever.
async fn accept_own(listener: tokio::net::UnixListener, volume: String, shared: Arc<AdminState>) {
    let volume = Arc::new(Some(volume));
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                accept_failed(&error).await;
                continue;
            }
        };
        if !is_ours(&stream) {
            tracing::warn!("a control connection of another user was closed");
            continue;
        }
        match ConnectionPermit::take(&shared, Side::Own) {
            Some(permit) => start_connection(stream, &shared, &volume, permit),
            None => tracing::debug!("all control connections are in use"),
        }
    }
}

/// Takes connections to the loopback address, forever.
async fn accept_strangers(listener: tokio::net::TcpListener, shared: Arc<AdminState>) {
    let volume = Arc::new(None);
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                accept_failed(&error).await;
                continue;
            }
        };
        match ConnectionPermit::take(&shared, Side::Strangers) {
            Some(permit) => start_connection(stream, &shared, &volume, permit),
            // A connection above the limit is closed immediately.
            None => tracing::debug!("all admin connections are in use"),
        }
    }
}

/// Whether the peer is this user or root: they could stop the process anyway.
fn is_ours(stream: &tokio::net::UnixStream) -> bool {
    let own = rustix::process::geteuid().as_raw();
    stream.peer_cred().is_ok_and(|peer| peer.uid() == own || peer.uid() == 0)
}

/// Most likely out of descriptors: wait a moment instead of spinning.
async fn accept_failed(error: &io::Error) {
    tracing::warn!("the admin server cannot accept a connection: {error}");
    tokio::time::sleep(Duration::from_secs(1)).await;
}

/// Who a connection belongs to.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Side {
    /// Our own user, through a control socket.
    Own,
    /// Anybody on this machine, through the loopback address.
    Strangers,
}

/// Permission for one more connection of a side, until dropped.
struct ConnectionPermit {
    shared: Arc<AdminState>,
    side: Side,
}

impl ConnectionPermit {
    fn take(shared: &Arc<AdminState>, side: Side) -> Option<ConnectionPermit> {
        // Counted first and compared second; one beyond the limit is given back by its drop.
        let permit = ConnectionPermit { shared: Arc::clone(shared), side };
        let connections_max = match side {
            Side::Own => CONTROL_CONNECTIONS_MAX,
            Side::Strangers => LOOPBACK_CONNECTIONS_MAX,
        };
        (permit.count().fetch_add(1, Ordering::AcqRel) < connections_max).then_some(permit)
    }

    fn count(&self) -> &AtomicU32 {
        match self.side {
            Side::Own => &self.shared.own,
            Side::Strangers => &self.shared.strangers,
        }
    }
}

impl Drop for ConnectionPermit {
    fn drop(&mut self) {
        self.count().fetch_sub(1, Ordering::AcqRel);
    }
}

fn start_connection<S>(
    stream: S,
    shared: &Arc<AdminState>,
    volume: &Arc<Option<String>>,
    permit: ConnectionPermit,
) where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (shared, volume) = (Arc::clone(shared), Arc::clone(volume));
    // Before the task runs, so that `finish_answers` does not miss it.
    *shared.connections.lock() += 1;
    let counted = Arc::clone(&shared);
    tokio::spawn(async move {
        let service = service_fn(move |request| {
            let (shared, volume) = (Arc::clone(&shared), Arc::clone(&volume));
            async move { Ok::<_, Infallible>(answer(request, &shared, volume.as_deref()).await) }
        });
        let connection = hyper::server::conn::http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(REQUEST_TIME_MAX)
            .max_buf_size(16 << 10)
            .serve_connection(TokioIo::new(stream), service);
        let mut connection = std::pin::pin!(connection);
        // A client that reads no answers or sends no more requests must not keep its permit.
        let ended = match permit.side {
            Side::Own => Ok(connection.as_mut().await),
            Side::Strangers => tokio::time::timeout(LOOPBACK_TIME_MAX, connection.as_mut()).await,
        };
        let ended = match ended {
            Ok(ended) => ended,
            Err(_) => {
                connection.as_mut().graceful_shutdown();
                let last = tokio::time::timeout(LOOPBACK_WAIT_MAX + ANSWERS_TIME_MAX, connection);
                last.await.unwrap_or(Ok(()))
            }
        };
        if let Err(error) = ended {
            tracing::debug!("an admin connection ended: {error}");
        }
        let left = {
            let mut open = counted.connections.lock();
            *open -= 1;
            *open
        };
        if left == 0 {
            counted.none_left.notify_all();
        }
        drop(permit);
    });
}

#[cfg(test)]
mod tests;
