//! The admin server: HTTP/1.1 on a Unix socket per volume, and on a loopback address if requested.
//!
//! | target | answer |
//! |---|---|
//! | `GET /` | the dashboard |
//! | `GET /status` | [`status::ProcessStatus`] as JSON |
//! | `GET /metrics` | Prometheus text |
//! | `GET /wait?safety=stored&timeout_ms=500[&volume=NAME]` | `{"reached": true}` when it is |
//! | `POST /request` on a control socket | see [`control::protocol`](crate::control::protocol) |
//!
//! Invariants: over TCP it reads and never changes anything. It runs on one thread of its own, so
//! its requests cannot delay the disk. Over TCP it answers only to names of this machine, so that
//! no web page elsewhere can read it through a browser.
//!
//! Not here: what the numbers mean (`status`), where they come from (`wiring`).

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

use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::header::{CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, HOST};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use parking_lot::{Condvar, Mutex};
use sawmill_volume::Safety;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::watch;

use crate::control;
use crate::control::protocol::{ControlRequest, REQUEST_BYTES_MAX, REQUEST_TARGET};
use sawmill_console::exit::{Exit, Failure, Result};
use status::ProcessStatus;

/// Concurrent connections to the loopback address: any user of this machine can make them.
const LOOPBACK_CONNECTIONS_MAX: u32 = 64;
/// The longest wait there. A client that hangs up is not waited for any longer.
const LOOPBACK_WAIT_MAX: Duration = Duration::from_secs(60);
/// Concurrent connections to control sockets: doors need descriptors too.
const CONTROL_CONNECTIONS_MAX: u32 = 128;
/// The longest life of a connection to the loopback address; requests that arrived by then are
/// still answered.
const LOOPBACK_TIME_MAX: Duration = Duration::from_secs(60);
/// Time to send answers before the process exits.
const ANSWERS_WITHIN: Duration = Duration::from_secs(2);
/// Time a client may take to send its request.
const REQUEST_TIME_MAX: Duration = Duration::from_secs(10);

/// The server's callbacks. A volume's name narrows the answer to that volume.
pub(crate) struct Subject {
    /// The status of the process, or of one volume in it.
    pub(crate) status: Box<Tell>,
    /// Waits for a volume, as long as the client is connected; blocks.
    pub(crate) wait: Box<Wait>,
    /// Carries a request out; blocks.
    pub(crate) carry_out: Box<Carry>,
}

/// See [`Subject::status`].
type Tell = dyn Fn(Option<&str>) -> ProcessStatus + Send + Sync;
/// See [`Subject::wait`].
type Wait = dyn Fn(&str, Safety, Option<Duration>, &dyn Fn() -> bool) -> Result<bool> + Send + Sync;
/// See [`Subject::carry_out`].
type Carry = dyn Fn(&str, ControlRequest) -> Result<serde_json::Value> + Send + Sync;

/// An address to listen on.
pub(crate) enum Door {
    /// A Unix socket for one volume.
    Control { path: PathBuf, volume: String },
    /// A loopback address for all volumes.
    Loopback(SocketAddr),
    /// The same, from the previous process, which listened on it.
    Inherited(TcpListener),
}

/// A running admin server.
pub(crate) struct Admin {
    stop: watch::Sender<bool>,
    shared: Option<Arc<Shared>>,
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

struct Shared {
    subject: Subject,
    /// Requests that block now, by lane; each holds a thread.
    blocked: [AtomicU32; Lane::ALL.len()],
    /// Open connections, and a way to wait until there are none.
    connections: Mutex<u32>,
    none_left: Condvar,
    /// Of these, those to control sockets and those to the loopback address.
    own: AtomicU32,
    strangers: AtomicU32,
}

/// The kinds of blocking requests. Each lane has threads of its own, so that a request that only
/// reads cannot delay a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lane {
    /// A change, which only our own user can request.
    Change,
    /// A wait of our own user.
    OwnWait,
    /// A wait of any user, through the loopback address.
    LoopbackWait,
}

impl Lane {
    const ALL: [Lane; 3] = [Lane::Change, Lane::OwnWait, Lane::LoopbackWait];

    const fn places(self) -> u32 {
        match self {
            Lane::Change => 16,
            Lane::OwnWait => 32,
            Lane::LoopbackWait => 8,
        }
    }

    fn threads() -> usize {
        Lane::ALL.into_iter().map(|lane| lane.places() as usize).sum()
    }
}

impl Admin {
    /// Binds all doors and starts the server's thread.
    pub(crate) fn start(subject: Subject, doors: Vec<Door>) -> Result<Admin> {
        let mut sockets = Vec::new();
        let mut listeners = Vec::new();
        let mut loopback = None;
        for door in doors {
            let listener = match door {
                Door::Control { path, volume } => {
                    listeners.push(Listener::Control(bind_control(&path)?, volume));
                    sockets.push(path);
                    continue;
                }
                Door::Loopback(wanted) => bind_loopback(wanted)?,
                Door::Inherited(listener) => listener,
            };
            loopback = listener.try_clone().ok();
            listeners.push(Listener::Loopback(listener));
        }
        let address = loopback.as_ref().and_then(|listener| listener.local_addr().ok());
        let (stop, stopped) = watch::channel(false);
        let shared = Arc::new(Shared {
            subject,
            blocked: Default::default(),
            connections: Mutex::default(),
            none_left: Condvar::new(),
            own: AtomicU32::new(0),
            strangers: AtomicU32::new(0),
        });
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .enable_time()
            .max_blocking_threads(Lane::threads())
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
        Ok(Admin { stop, shared, thread, sockets: Mutex::new(sockets), loopback, address })
    }

    /// A server without addresses.
    pub(crate) fn none() -> Admin {
        let (stop, _) = watch::channel(true);
        Admin {
            stop,
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
            shared.none_left.wait_while_for(&mut open, |open| *open > 0, ANSWERS_WITHIN);
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
        for socket in self.sockets.lock().iter() {
            // It may be gone already; the next process recognises a left-over socket.
            let _ = fs::remove_file(socket);
        }
        let _ = self.stop.send(true);
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
    // The socket gets its name when a process listens on it, and the name always has a socket: in a
    // hand-off the previous process still has it, and no client may find the volume unserved.
    // Otherwise the process that made the old one is gone, because we hold the journal's lock.
    let unnamed = path.with_extension("new");
    let cannot =
        |error: io::Error| Failure::io(format!("cannot listen on {}", path.display()), &error);
    match fs::remove_file(&unnamed) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(cannot(error)),
        _ => {}
    }
    let listener = UnixListener::bind(&unnamed).map_err(cannot)?;
    let private = fs::set_permissions(&unnamed, fs::Permissions::from_mode(0o600));
    let ready = private.and_then(|()| listener.set_nonblocking(true));
    ready.and_then(|()| fs::rename(&unnamed, path)).map_err(cannot)?;
    Ok(listener)
}

fn bind_loopback(wanted: SocketAddr) -> Result<TcpListener> {
    let cannot =
        |error: io::Error| Failure::io(format!("cannot listen on {wanted} for --admin"), &error);
    let listener = TcpListener::bind(wanted).map_err(cannot)?;
    listener.set_nonblocking(true).map_err(cannot)?;
    Ok(listener)
}

async fn serve_all(
    listeners: Vec<Listener>,
    shared: Arc<Shared>,
    mut stopped: watch::Receiver<bool>,
) {
    for listener in listeners {
        let shared = Arc::clone(&shared);
        match listener {
            Listener::Control(listener, volume) => {
                let Ok(listener) = tokio::net::UnixListener::from_std(listener) else { continue };
                let volume = Arc::new(Some(volume));
                tokio::spawn(async move {
                    loop {
                        match listener.accept().await {
                            Ok((stream, _)) if is_ours(&stream) => match Place::take(&shared, true)
                            {
                                Some(place) => start_connection(stream, &shared, &volume, place),
                                None => tracing::debug!("all control connections are in use"),
                            },
                            Ok(_) => {
                                tracing::warn!("a control connection of another user was closed")
                            }
                            Err(error) => accept_failed(&error).await,
                        }
                    }
                });
            }
            Listener::Loopback(listener) => {
                let Ok(listener) = tokio::net::TcpListener::from_std(listener) else { continue };
                let volume = Arc::new(None);
                tokio::spawn(async move {
                    loop {
                        match listener.accept().await {
                            Ok((stream, _)) => match Place::take(&shared, false) {
                                Some(place) => start_connection(stream, &shared, &volume, place),
                                // A connection above the limit is closed immediately.
                                None => tracing::debug!("all admin connections are in use"),
                            },
                            Err(error) => accept_failed(&error).await,
                        }
                    }
                });
            }
        }
    }
    // An error means that the sender is gone, which also means stop.
    let _ = stopped.wait_for(|stop| *stop).await;
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

/// A place for a connection, of our own user's or of those to the loopback address, until dropped.
struct Place {
    shared: Arc<Shared>,
    is_own: bool,
}

impl Place {
    fn take(shared: &Arc<Shared>, is_own: bool) -> Option<Place> {
        let place = Place { shared: Arc::clone(shared), is_own };
        let places = if is_own { CONTROL_CONNECTIONS_MAX } else { LOOPBACK_CONNECTIONS_MAX };
        (place.count().fetch_add(1, Ordering::AcqRel) < places).then_some(place)
    }

    fn count(&self) -> &AtomicU32 {
        if self.is_own { &self.shared.own } else { &self.shared.strangers }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.count().fetch_sub(1, Ordering::AcqRel);
    }
}

fn start_connection<S>(stream: S, shared: &Arc<Shared>, volume: &Arc<Option<String>>, place: Place)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (shared, volume) = (Arc::clone(shared), Arc::clone(volume));
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
        let ended = match place.is_own {
            true => connection.await,
            // A client that takes no answers, or has no more requests, must not keep its place.
            false => match tokio::time::timeout(LOOPBACK_TIME_MAX, connection.as_mut()).await {
                Ok(ended) => ended,
                Err(_) => {
                    connection.as_mut().graceful_shutdown();
                    let last = tokio::time::timeout(LOOPBACK_WAIT_MAX + ANSWERS_WITHIN, connection);
                    last.await.unwrap_or(Ok(()))
                }
            },
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
        drop(place);
    });
}

async fn answer(
    request: Request<Incoming>,
    shared: &Arc<Shared>,
    only: Option<&str>,
) -> Response<Full<Bytes>> {
    if only.is_none() && !names_this_machine(&request) {
        return refuse(
            StatusCode::FORBIDDEN,
            &Failure::usage("the Host header does not name this machine"),
        );
    }
    if only.is_none() && is_of_another_site(&request) {
        return refuse(
            StatusCode::FORBIDDEN,
            &Failure::usage("requests from pages of other sites are refused"),
        );
    }
    if request.method() == Method::POST
        && let Some(volume) = only
    {
        return match read_request(request).await {
            Ok(request) => carry_out(request, shared, volume.to_owned()).await,
            Err(refused) => refused,
        };
    }
    if request.method() != Method::GET {
        return refuse(StatusCode::METHOD_NOT_ALLOWED, &Failure::usage("only GET is supported"));
    }
    match request.uri().path() {
        "/" => reply("text/html; charset=utf-8", page::DASHBOARD),
        "/status" => match serde_json::to_vec(&told(shared, only)) {
            Ok(body) => reply("application/json", body),
            Err(error) => refuse(
                StatusCode::INTERNAL_SERVER_ERROR,
                &Failure::new(Exit::Internal, format!("cannot write the status: {error}")),
            ),
        },
        "/metrics" => {
            reply("text/plain; version=0.0.4", metrics::exposition(&(shared.subject.status)(only)))
        }
        "/wait" => wait(request.uri().query().unwrap_or_default(), shared, only).await,
        path => refuse(
            StatusCode::NOT_FOUND,
            &Failure::usage(format!("unknown path {path}; try /, /status, /metrics or /wait")),
        ),
    }
}

/// A browser sends the name it was given. A name that merely resolves to this machine is DNS
/// rebinding.
fn names_this_machine(request: &Request<Incoming>) -> bool {
    let host = request.headers().get(HOST).and_then(|host| host.to_str().ok()).unwrap_or_default();
    let host = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => host.split(':').next().unwrap_or_default(),
    };
    host == "localhost"
        || host.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// A browser names the site that made the request: a page from elsewhere must not occupy anything
/// here.
fn is_of_another_site(request: &Request<Incoming>) -> bool {
    let site = request.headers().get("sec-fetch-site").map(|site| site.as_bytes());
    site.is_some_and(|site| site != b"same-origin" && site != b"none")
}

/// The status. Through the loopback address, which any user of this machine can read, it omits our
/// paths.
fn told(shared: &Shared, only: Option<&str>) -> ProcessStatus {
    let mut status = (shared.subject.status)(only);
    if only.is_none() {
        status.volumes.iter_mut().for_each(|volume| volume.journal_path = None);
        status.cache.iter_mut().for_each(|cache| cache.path.clear());
    }
    status
}

async fn wait(query: &str, shared: &Arc<Shared>, only: Option<&str>) -> Response<Full<Bytes>> {
    let (volume, safety, mut timeout) = match parse_wait(query, only) {
        Ok(parsed) => parsed,
        Err(failure) => return refuse(StatusCode::BAD_REQUEST, &failure),
    };
    let lane = if only.is_some() { Lane::OwnWait } else { Lane::LoopbackWait };
    if lane == Lane::LoopbackWait {
        timeout = Some(timeout.map_or(LOOPBACK_WAIT_MAX, |timeout| timeout.min(LOOPBACK_WAIT_MAX)));
    }
    // If the client hangs up, this future is dropped with the token, and the wait ends.
    let token = Arc::new(());
    let caller = Arc::downgrade(&token);
    let waited = blocking(shared, lane, move |subject| {
        (subject.wait)(&volume, safety, timeout, &|| caller.strong_count() > 0)
    })
    .await;
    drop(token);
    waited.map_or_else(
        |refused| refused,
        |reached| reply("application/json", format!("{{\"reached\":{reached}}}")),
    )
}

/// The request in a POST.
async fn read_request(request: Request<Incoming>) -> Result<ControlRequest, Response<Full<Bytes>>> {
    let path = request.uri().path();
    if path != REQUEST_TARGET {
        let failure =
            Failure::usage(format!("unknown path {path}; requests go to {REQUEST_TARGET}"));
        return Err(refuse(StatusCode::NOT_FOUND, &failure));
    }
    let body = Limited::new(request.into_body(), REQUEST_BYTES_MAX).collect();
    let body = tokio::time::timeout(REQUEST_TIME_MAX, body).await;
    let unread = |why: String| refuse(StatusCode::BAD_REQUEST, &Failure::usage(why));
    let body = body.map_err(|late| unread(format!("the request did not arrive: {late}")))?;
    let body = body.map_err(|error| unread(format!("the request cannot be read: {error}")))?;
    serde_json::from_slice(&body.to_bytes())
        .map_err(|error| unread(format!("unknown request: {error}")))
}

async fn carry_out(
    request: ControlRequest,
    shared: &Arc<Shared>,
    volume: String,
) -> Response<Full<Bytes>> {
    let carried =
        blocking(shared, Lane::Change, move |subject| (subject.carry_out)(&volume, request)).await;
    carried.map_or_else(|refused| refused, |answer| reply("application/json", answer.to_string()))
}

/// Runs what blocks on a thread of its own, if its lane has one left.
async fn blocking<T: Send + 'static>(
    shared: &Arc<Shared>,
    lane: Lane,
    work: impl FnOnce(&Subject) -> Result<T> + Send + 'static,
) -> Result<T, Response<Full<Bytes>>> {
    let places = lane.places();
    if shared.blocked[lane as usize].fetch_add(1, Ordering::Relaxed) >= places {
        shared.blocked[lane as usize].fetch_sub(1, Ordering::Relaxed);
        let failure = Failure::new(
            Exit::Unavailable,
            format!("{places} other requests wait already; try again later"),
        );
        return Err(refuse(StatusCode::SERVICE_UNAVAILABLE, &failure));
    }
    let waiting = Arc::clone(shared);
    let outcome = tokio::task::spawn_blocking(move || {
        let outcome = work(&waiting.subject);
        waiting.blocked[lane as usize].fetch_sub(1, Ordering::Relaxed);
        outcome
    })
    .await;
    match outcome {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(failure)) => Err(refuse(StatusCode::CONFLICT, &failure)),
        Err(error) => {
            let failure = Failure::new(Exit::Internal, format!("the wait ended early: {error}"));
            Err(refuse(StatusCode::INTERNAL_SERVER_ERROR, &failure))
        }
    }
}

fn parse_wait(query: &str, only: Option<&str>) -> Result<(String, Safety, Option<Duration>)> {
    let (mut volume, mut safety, mut timeout) = (only.map(str::to_owned), None, None);
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        match pair.split_once('=').unwrap_or((pair, "")) {
            ("safety", "stored") => safety = Some(Safety::Stored),
            ("safety", "logged") => safety = Some(Safety::Logged),
            ("timeout_ms", text) => {
                let milliseconds = text.parse().map_err(|_| {
                    Failure::usage(format!(
                        "timeout_ms={text} is not a whole number of milliseconds"
                    ))
                })?;
                timeout = Some(Duration::from_millis(milliseconds));
            }
            ("volume", name) if only.is_none() => volume = Some(name.to_owned()),
            (name, value) => {
                return Err(Failure::usage(format!(
                    "cannot read {name}={value}; give safety=stored or safety=logged, \
                     timeout_ms=N, volume=NAME"
                )));
            }
        }
    }
    let safety = safety.ok_or_else(|| Failure::usage("give safety=stored or safety=logged"))?;
    let volume = volume.ok_or_else(|| Failure::usage("give volume=NAME"))?;
    Ok((volume, safety, timeout))
}

fn reply(kind: &'static str, body: impl Into<Bytes>) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(body.into()));
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, hyper::header::HeaderValue::from_static(kind));
    headers.insert(CACHE_CONTROL, hyper::header::HeaderValue::from_static("no-store"));
    headers.insert(
        CONTENT_SECURITY_POLICY,
        hyper::header::HeaderValue::from_static(page::CONTENT_SECURITY_POLICY),
    );
    response
}

fn refuse(status: StatusCode, failure: &Failure) -> Response<Full<Bytes>> {
    let body = serde_json::json!({ "error": failure.to_string(), "exit": failure.exit().code() });
    let mut response = reply("application/json", body.to_string());
    *response.status_mut() = status;
    response
}

#[cfg(test)]
mod tests;
