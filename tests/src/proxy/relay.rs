//! One request on its way through the proxy: received completely, passed on (or not), its answer
//! received completely and returned (or something else instead).
//!
//! Not here: which faults occur, and when (`fault`); accepting or refusing connections (`proxy`).

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::header::{CONTENT_LENGTH, CONTENT_TYPE, ETAG, HeaderValue, RANGE};
use hyper::http::{request, response};
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

use super::fault::{Fault, Verb};
use super::{ProxyState, lock};

/// Remembered bodies of puts, which replace other bodies; small ones are not remembered.
const BODIES_REMEMBERED: usize = 6;
const REMEMBERED_BYTES_MIN: usize = 4096;
/// One request in this many triggers the delivery of a late put.
const LATE_ONCE_IN: u64 = 6;

type Body = UnsyncBoxBody<Bytes, io::Error>;

/// The socket of a connection, to reset it.
pub(super) struct ClientSocket(OwnedFd);

impl ClientSocket {
    pub(super) fn of(stream: &TcpStream) -> io::Result<Self> {
        Ok(ClientSocket(stream.as_fd().try_clone_to_owned()?))
    }

    /// From now on, closing the connection resets it.
    fn reset_when_closed(&self) -> io::Error {
        // If this fails, the connection still ends without an answer.
        let _ = rustix::net::sockopt::set_socket_linger(&self.0, Some(Duration::ZERO));
        io::Error::from(io::ErrorKind::ConnectionReset)
    }
}

/// A complete request.
#[derive(Clone)]
struct ProxyRequest {
    verb: Verb,
    key: String,
    parts: request::Parts,
    body: Bytes,
}

/// A complete answer.
struct Answer {
    parts: response::Parts,
    body: Bytes,
}

impl Answer {
    /// Whether there is a body to change.
    fn has_body(&self) -> bool {
        self.parts.status.is_success() && self.body.len() > 1
    }
}

/// A put that has not reached the store yet.
pub(super) struct LateRequest(ProxyRequest);

/// Earlier bodies and lists, to return in the wrong place.
#[derive(Default)]
pub(super) struct Memory {
    /// Bodies that were put, with their keys.
    bodies: VecDeque<(String, Bytes)>,
    /// Lists by their request: the last one and the one before it.
    lists: HashMap<String, (Bytes, Bytes)>,
}

impl ProxyRequest {
    async fn receive(request: Request<Incoming>) -> io::Result<Self> {
        let (parts, body) = request.into_parts();
        let body = body.collect().await.map_err(io::Error::other)?.to_bytes();
        let query = parts.uri.query().unwrap_or_default();
        let verb = match parts.method {
            Method::PUT => Verb::Put,
            Method::GET if query.contains("list-type=") => Verb::List,
            Method::GET | Method::HEAD => Verb::Get,
            _ => Verb::Delete,
        };
        let key = if verb == Verb::List { query } else { parts.uri.path() }.to_owned();
        Ok(ProxyRequest { verb, key, parts, body })
    }

    /// The first requested byte, if the request has a range.
    fn range_start(&self) -> usize {
        let range = self.parts.headers.get(RANGE).and_then(|range| range.to_str().ok());
        let start =
            range.and_then(|range| range.strip_prefix("bytes=")?.split('-').next()?.parse().ok());
        start.unwrap_or(0)
    }
}

/// Applies the script to a request.
pub(super) async fn relay(
    shared: Arc<ProxyState>,
    door: Arc<ClientSocket>,
    request: Request<Incoming>,
) -> io::Result<Response<Body>> {
    let request = ProxyRequest::receive(request).await?;
    lock(&shared.counts).requests += 1;
    let fault = lock(&shared.script).choose(request.verb, &request.key);
    bring_late(&shared);
    match fault {
        None => pass(&shared, &request).await.map(whole),
        Some(Fault::Reset) => {
            shared.count(Fault::Reset.name());
            Err(door.reset_when_closed())
        }
        Some(Fault::Status(code)) => {
            shared.count(Fault::Status(code).name());
            Ok(refusal(code))
        }
        Some(Fault::PutLate) => {
            lock(&shared.late_requests).push(LateRequest(request));
            shared.count(Fault::PutLate.name());
            Err(door.reset_when_closed())
        }
        Some(Fault::PutTwice) => {
            pass(&shared, &request).await?;
            shared.count(Fault::PutTwice.name());
            pass(&shared, &request).await.map(whole)
        }
        Some(Fault::ListLagged) => {
            let before =
                lock(&shared.memory).lists.get(&request.key).map(|(before, _)| before.clone());
            let mut answer = pass(&shared, &request).await?;
            if let Some(before) = before {
                shared.count(Fault::ListLagged.name());
                answer.body = before;
            }
            Ok(whole(answer))
        }
        Some(fault) => {
            let answer = pass(&shared, &request).await?;
            if fault.needs_body() && !answer.has_body() {
                lock(&shared.script).not_done(request.verb, &request.key, fault);
                return Ok(whole(answer));
            }
            spoil(&shared, &door, &request, answer, fault).await
        }
    }
}

/// Applies the script to an answer.
async fn spoil(
    shared: &Arc<ProxyState>,
    door: &ClientSocket,
    request: &ProxyRequest,
    mut answer: Answer,
    fault: Fault,
) -> io::Result<Response<Body>> {
    let half = answer.body.len() / 2;
    match fault {
        Fault::AnswerLost => {
            shared.count(fault.name());
            return Err(door.reset_when_closed());
        }
        Fault::Delayed(pause) => {
            shared.count(fault.name());
            tokio::time::sleep(pause).await;
        }
        Fault::Held => {
            // Before it is counted: a test that waits for the count may call `release` at once.
            let mut turns = shared.release_turn.subscribe();
            turns.borrow_and_update();
            shared.count(fault.name());
            // The sender lives as long as the proxy.
            let _ = turns.changed().await;
        }
        Fault::WrongEtag => {
            answer.parts.headers.insert(ETAG, HeaderValue::from_static("\"0123456789abcdef\""));
            shared.count(fault.name());
        }
        Fault::Cut => {
            shared.count(fault.name());
            return Ok(cut(answer, half));
        }
        Fault::Trickle(pause) => {
            shared.count(fault.name());
            return Ok(trickle(answer, pause));
        }
        Fault::Shortened => {
            answer.body.truncate(half);
            shared.count(fault.name());
        }
        Fault::Garbled => {
            let mut bytes = answer.body.to_vec();
            for at in [0, half, bytes.len() - 1] {
                bytes[at] ^= 0x40;
            }
            answer.body = Bytes::from(bytes);
            shared.count(fault.name());
        }
        Fault::Foreign => {
            if let Some(foreign) = foreign(shared, request, answer.body.len()) {
                answer.body = foreign;
                shared.count(fault.name());
            }
        }
        Fault::ListLacking => {
            if let Some(fewer) = without_later_half(&answer.body) {
                answer.body = fewer;
                shared.count(fault.name());
            }
        }
        _ => {}
    }
    Ok(whole(answer))
}

/// Passes the request to the store, over a connection of its own.
async fn pass(shared: &ProxyState, request: &ProxyRequest) -> io::Result<Answer> {
    let answer = forward(shared.upstream, request).await?;
    let mut memory = lock(&shared.memory);
    let is_large = request.body.len() >= REMEMBERED_BYTES_MIN;
    if request.verb == Verb::Put && answer.parts.status.is_success() && is_large {
        memory.bodies.push_back((request.key.clone(), request.body.clone()));
        if memory.bodies.len() > BODIES_REMEMBERED {
            memory.bodies.pop_front();
        }
    }
    if request.verb == Verb::List && answer.parts.status.is_success() {
        let body = answer.body.clone();
        let last =
            memory.lists.get(&request.key).map_or_else(|| body.clone(), |(_, last)| last.clone());
        memory.lists.insert(request.key.clone(), (last, body));
    }
    Ok(answer)
}

async fn forward(upstream: SocketAddr, request: &ProxyRequest) -> io::Result<Answer> {
    let stream = TcpStream::connect(upstream).await?;
    stream.set_nodelay(true)?;
    let handshake = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await;
    let (mut sender, connection) = handshake.map_err(io::Error::other)?;
    let connection = tokio::spawn(connection);
    let request = Request::from_parts(request.parts.clone(), Full::new(request.body.clone()));
    let (parts, body) = sender.send_request(request).await.map_err(io::Error::other)?.into_parts();
    let body = body.collect().await.map_err(io::Error::other)?.to_bytes();
    connection.abort();
    Ok(Answer { parts, body })
}

/// While faults come by chance, some later requests trigger the delivery of a late put.
fn bring_late(shared: &Arc<ProxyState>) {
    let mut script = lock(&shared.script);
    let Some(rates) = script.rates.as_mut() else { return };
    let mut late_requests = lock(&shared.late_requests);
    if late_requests.is_empty() || !rates.dice.one_in(LATE_ONCE_IN) {
        return;
    }
    let chosen = rates.dice.below(late_requests.len() as u64) as usize;
    let (request, shared) = (late_requests.swap_remove(chosen), Arc::clone(shared));
    tokio::spawn(async move { deliver(&shared, request).await });
}

/// Delivers a late put and returns the store's status; 0 if the store could not be reached.
pub(super) async fn deliver(shared: &ProxyState, request: LateRequest) -> u16 {
    shared.count("late put delivered");
    pass(shared, &request.0).await.map_or(0, |answer| answer.parts.status.as_u16())
}

/// The same number of bytes of another object, from the same place if it is long enough.
fn foreign(shared: &ProxyState, request: &ProxyRequest, length: usize) -> Option<Bytes> {
    let memory = lock(&shared.memory);
    let start = request.range_start();
    let mut others = memory.bodies.iter().rev().filter(|(key, _)| *key != request.key);
    others.next().map(|(_, body)| {
        let start = if start < body.len() { start } else { 0 };
        let mut bytes = body[start..body.len().min(start + length)].to_vec();
        bytes.resize(length, 0);
        Bytes::from(bytes)
    })
}

/// The list without the later half of its objects; `None` when there are none.
fn without_later_half(list: &[u8]) -> Option<Bytes> {
    const END: &str = "</Contents>";
    let text = std::str::from_utf8(list).ok()?;
    let starts: Vec<usize> = text.match_indices("<Contents>").map(|(at, _)| at).collect();
    let from = *starts.get(starts.len() / 2)?;
    let to = text.rfind(END)? + END.len();
    Some(Bytes::from(format!("{}{}", &text[..from], &text[to..])))
}

fn whole(mut answer: Answer) -> Response<Body> {
    // HEAD has a length and no body.
    if !answer.body.is_empty() {
        answer.parts.headers.insert(CONTENT_LENGTH, HeaderValue::from(answer.body.len()));
    }
    let body = Full::new(answer.body).map_err(|never| match never {}).boxed_unsync();
    Response::from_parts(answer.parts, body)
}

fn streamed(
    mut answer: Answer,
    pieces: impl stream::Stream<Item = io::Result<Frame<Bytes>>> + Send + 'static,
) -> Response<Body> {
    answer.parts.headers.insert(CONTENT_LENGTH, HeaderValue::from(answer.body.len()));
    Response::from_parts(answer.parts, StreamBody::new(pieces).boxed_unsync())
}

fn cut(answer: Answer, at: usize) -> Response<Body> {
    let front = answer.body.slice(..at);
    let pieces = [Ok(Frame::data(front)), Err(io::Error::from(io::ErrorKind::ConnectionAborted))];
    streamed(answer, stream::iter(pieces))
}

fn trickle(answer: Answer, pause: Duration) -> Response<Body> {
    const PIECES: usize = 8;
    let step = answer.body.len().div_ceil(PIECES);
    let pieces = stream::unfold(answer.body.clone(), move |mut left| async move {
        if left.is_empty() {
            return None;
        }
        tokio::time::sleep(pause).await;
        let piece = left.split_to(step.min(left.len()));
        Some((Ok(Frame::data(piece)), left))
    });
    streamed(answer, pieces)
}

/// S3's answer with this status.
fn refusal(code: u16) -> Response<Body> {
    let name = match code {
        403 => "AccessDenied",
        429 | 503 => "SlowDown",
        _ => "InternalError",
    };
    let text = format!("<Error><Code>{name}</Code><Message>by the proxy</Message></Error>");
    let mut response =
        Response::new(Full::from(text).map_err(|never| match never {}).boxed_unsync());
    *response.status_mut() =
        StatusCode::from_u16(code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/xml"));
    response
}
