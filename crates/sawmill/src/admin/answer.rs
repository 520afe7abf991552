//! Handles one request: whether its sender may make it, what it asks for, and the answer.
//!
//! Invariants: a request through the loopback address changes nothing and reveals no path of ours.
//! A request that blocks takes a permit of its kind.
//!
//! Not here: connections (`super`), what the numbers mean (`status`).

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::header::{CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, HOST};
use hyper::{Method, Request, Response, StatusCode};
use sawmill_console::exit::{Exit, Failure, Result};
use sawmill_volume::Safety;
use serde::Serialize;

use super::status::ProcessStatus;
use super::{AdminState, Call, Callbacks, LOOPBACK_WAIT_MAX, REQUEST_TIME_MAX, metrics, page};
use crate::control::protocol::{
    ControlRequest, REQUEST_BYTES_MAX, REQUEST_TARGET, Refusal, UNKNOWN_REQUEST, WaitReply,
    WarmReply,
};

pub(super) async fn answer(
    request: Request<Incoming>,
    shared: &Arc<AdminState>,
    only: Option<&str>,
) -> Response<Full<Bytes>> {
    // A browser cannot open a Unix socket, so only the loopback address needs these checks.
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
    // Through the loopback address a POST goes on to the refusal of methods (P112).
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
        "/status" => json(&visible_status(shared, only)),
        "/metrics" => reply(
            "text/plain; version=0.0.4",
            metrics::exposition(&(shared.callbacks.status)(only)),
        ),
        "/wait" => wait(request.uri().query().unwrap_or_default(), shared, only).await,
        path => match page::file(path) {
            Some((kind, text)) => reply(kind, text),
            None => refuse(
                StatusCode::NOT_FOUND,
                &Failure::usage(format!("unknown path {path}; try /, /status, /metrics or /wait")),
            ),
        },
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
fn visible_status(shared: &AdminState, only: Option<&str>) -> ProcessStatus {
    let mut status = (shared.callbacks.status)(only);
    if only.is_none() {
        status.volumes.iter_mut().for_each(|volume| volume.journal_path = None);
        status.cache.iter_mut().for_each(|cache| cache.path.clear());
    }
    status
}

async fn wait(query: &str, shared: &Arc<AdminState>, only: Option<&str>) -> Response<Full<Bytes>> {
    let (volume, safety, mut timeout) = match parse_wait(query, only) {
        Ok(parsed) => parsed,
        Err(failure) => return refuse(StatusCode::BAD_REQUEST, &failure),
    };
    let kind = if only.is_some() { Call::OwnWait } else { Call::LoopbackWait };
    if kind == Call::LoopbackWait {
        timeout = Some(timeout.map_or(LOOPBACK_WAIT_MAX, |timeout| timeout.min(LOOPBACK_WAIT_MAX)));
    }
    // If the client hangs up, this future is dropped with the token, and the wait ends.
    let token = Arc::new(());
    let caller = Arc::downgrade(&token);
    let waited = blocking(shared, kind, move |callbacks| {
        (callbacks.waiter)(&volume, safety, timeout, &|| caller.strong_count() > 0)
    })
    .await;
    drop(token);
    waited.map_or_else(|refused| refused, |reached| json(&WaitReply { reached }))
}

/// The request in a POST.
async fn read_request(request: Request<Incoming>) -> Result<ControlRequest, Response<Full<Bytes>>> {
    let path = request.uri().path();
    if path != REQUEST_TARGET {
        let failure =
            Failure::usage(format!("unknown path {path}; requests go to {REQUEST_TARGET}"));
        return Err(refuse(StatusCode::NOT_FOUND, &failure));
    }
    // In bytes and in time: a client that sends slowly must not keep its place.
    let body = Limited::new(request.into_body(), REQUEST_BYTES_MAX).collect();
    let body = tokio::time::timeout(REQUEST_TIME_MAX, body).await;
    let unread = |why: String| refuse(StatusCode::BAD_REQUEST, &Failure::usage(why));
    let body = body.map_err(|error| unread(format!("the request did not arrive: {error}")))?;
    let body = body.map_err(|error| unread(format!("the request cannot be read: {error}")))?;
    serde_json::from_slice(&body.to_bytes())
        .map_err(|error| unread(format!("{UNKNOWN_REQUEST}: {error}")))
}

async fn carry_out(
    request: ControlRequest,
    shared: &Arc<AdminState>,
    volume: String,
) -> Response<Full<Bytes>> {
    let kind = match request {
        ControlRequest::Warm(_) => Call::Warm,
        _ => Call::Change,
    };
    // As in `wait`.
    let token = Arc::new(());
    let caller = Arc::downgrade(&token);
    let carried = blocking(shared, kind, move |callbacks| {
        (callbacks.carry_out)(&volume, request, &|| caller.strong_count() > 0)
    })
    .await;
    drop(token);
    match carried {
        // Others have the turn: an empty step, after which the client asks again.
        Err(refused)
            if kind == Call::Warm && refused.status() == StatusCode::SERVICE_UNAVAILABLE =>
        {
            json(&WarmReply::default())
        }
        Err(refused) => refused,
        Ok(answer) => json(&answer),
    }
}

/// One of the threads for a kind of blocking work. Given back on drop, also after a panic: else a
/// few of them would close that kind of request for good.
struct CallPermit {
    shared: Arc<AdminState>,
    kind: Call,
}

impl CallPermit {
    /// None if all are in use.
    fn take(shared: &Arc<AdminState>, kind: Call) -> Option<Self> {
        let in_use = &shared.blocked[kind as usize];
        if in_use.fetch_add(1, Ordering::Relaxed) >= kind.calls_max() {
            in_use.fetch_sub(1, Ordering::Relaxed);
            return None;
        }
        Some(CallPermit { shared: Arc::clone(shared), kind })
    }
}

impl Drop for CallPermit {
    fn drop(&mut self) {
        self.shared.blocked[self.kind as usize].fetch_sub(1, Ordering::Relaxed);
    }
}

/// Runs blocking work on a thread of its own, if this kind has one left.
async fn blocking<T: Send + 'static>(
    shared: &Arc<AdminState>,
    kind: Call,
    work: impl FnOnce(&Callbacks) -> Result<T> + Send + 'static,
) -> Result<T, Response<Full<Bytes>>> {
    let Some(permit) = CallPermit::take(shared, kind) else {
        let failure = Failure::new(
            Exit::Unavailable,
            format!("{} other requests wait already; try again later", kind.calls_max()),
        );
        return Err(refuse(StatusCode::SERVICE_UNAVAILABLE, &failure));
    };
    let outcome = tokio::task::spawn_blocking(move || work(&permit.shared.callbacks)).await;
    match outcome {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(failure)) => Err(refuse(StatusCode::CONFLICT, &failure)),
        Err(error) => {
            let failure = Failure::caused(Exit::Internal, "the wait ended early", error);
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
                let milliseconds = text.parse().map_err(|error| {
                    let what = format!("timeout_ms={text} is not a whole number of milliseconds");
                    Failure::caused(Exit::Usage, what, error)
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

fn json(answer: &impl Serialize) -> Response<Full<Bytes>> {
    match serde_json::to_vec(answer) {
        Ok(body) => reply("application/json", body),
        Err(error) => {
            let failure = Failure::caused(Exit::Internal, "cannot write the answer", error);
            refuse(StatusCode::INTERNAL_SERVER_ERROR, &failure)
        }
    }
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
    let refusal = Refusal { error: failure.to_string(), exit: failure.exit().code() };
    // A text and a number: this cannot fail.
    let body = serde_json::to_vec(&refusal).unwrap_or_default();
    let mut response = reply("application/json", body);
    *response.status_mut() = status;
    response
}
