//! Bodies in pieces. Sent and received bytes are counted by piece, to show progress; answers that
//! are not objects have a bound. A put may travel in two halves with a pause between: so the probe
//! makes racing puts overlap inside the store, whatever the network does.
//!
//! Invariant: a request without a body takes the protocol crate's own path.
//!
//! Not here: the races and what they mean (`probe`); when an attempt is cut (`progress`).

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use futures_util::{Stream, StreamExt, stream};
use http_body_util::{BodyExt, Limited};
use object_store::client::{
    ClientConfigKey, HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest,
    HttpResponse, HttpResponseBody, HttpService, ReqwestConnector,
};
use object_store::{ClientOptions, HeaderValue};
use tokio::time::sleep;

use crate::progress::Progress;

/// Between the halves. Far more than racers need to send their first halves one after the other,
/// even over connections that are yet to be opened; and short enough for an attachment.
const HALVES_AFTER: Duration = Duration::from_millis(100);

/// A body is handed to the connection in pieces of this size.
const PIECE_BYTES: usize = 64 << 10;
/// The longest answer that is not an object: a page of a list, a refusal.
const TEXT_BYTES_MAX: usize = 64 << 20;
/// The kernel gives up a connection whose sent bytes stay unacknowledged for this long.
const UNACKNOWLEDGED_TIME_MAX: Duration = Duration::from_secs(30);

/// Marks a request (in its extensions) whose body is to be sent in pieces.
#[derive(Clone, Copy)]
pub(super) struct PiecesMark;

/// Connects as the protocol crate does, and can send marked requests in pieces.
#[derive(Debug)]
pub(super) struct Connector;

impl HttpConnector for Connector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let whole = ReqwestConnector::default().connect(options)?;
        Ok(HttpClient::new(Service { whole, options: options.clone(), pieces: OnceLock::new() }))
    }
}

/// Two clients with the same settings; the second is made when it is needed.
#[derive(Debug)]
struct Service {
    whole: HttpClient,
    options: ClientOptions,
    pieces: OnceLock<reqwest::Client>,
}

type Call<'a> = Pin<Box<dyn Future<Output = Result<HttpResponse, HttpError>> + Send + 'a>>;

impl HttpService for Service {
    fn call<'a, 'b>(&'a self, request: HttpRequest) -> Call<'b>
    where
        'a: 'b,
    {
        let progress = Progress::current();
        let pause = request.extensions().get::<PiecesMark>().map(|PiecesMark| HALVES_AFTER);
        let is_object = request.method().as_str() == "GET" && !is_list(request.uri().query());
        Box::pin(async move {
            let sent = match (request.body().content_length(), &progress) {
                (1.., Some(progress)) => self.send(request, pause, Arc::clone(progress)).await,
                _ => self.whole.execute(request).await,
            };
            let (head, body) = sent?.into_parts();
            // A refusal is text, even where an object was asked for: `bytes_max` does not bound it.
            let is_bounded = !is_object || !head.status.is_success();
            Ok(HttpResponse::from_parts(head, counted(body, progress, is_bounded)))
        })
    }
}

impl Service {
    async fn send(
        &self,
        request: HttpRequest,
        pause: Option<Duration>,
        progress: Arc<Progress>,
    ) -> Result<HttpResponse, HttpError> {
        let client = match self.pieces.get() {
            Some(client) => client.clone(),
            None => {
                // Invalid settings are an error; a client without them could bypass a proxy.
                let new_client = client(&self.options).map_err(failed)?;
                self.pieces.get_or_init(|| new_client).clone()
            }
        };
        let (head, body) = request.into_parts();
        // The body is in memory already; as one piece it can be cut anywhere.
        let body = body.collect().await?.to_bytes();
        let url = head.uri.to_string().parse();
        let url =
            url.map_err(|error| HttpError::new::<url::ParseError>(HttpErrorKind::Request, error))?;
        let mut request = reqwest::Request::new(head.method, url);
        *request.headers_mut() = head.headers;
        // A stream carries no length by itself, and stores require one.
        request.headers_mut().insert("content-length", HeaderValue::from(body.len()));
        *request.body_mut() = Some(in_pieces(body, pause, progress));
        let answer = client.execute(request).await.map_err(failed)?;
        let (status, headers) = (answer.status(), answer.headers().clone());
        let body = reqwest::Body::from(answer).map_err(failed);
        let mut response = HttpResponse::new(HttpResponseBody::new(body));
        *response.status_mut() = status;
        *response.headers_mut() = headers;
        Ok(response)
    }
}

/// The body piece by piece; a `pause` comes before its second half.
fn in_pieces(body: Bytes, pause: Option<Duration>, progress: Arc<Progress>) -> reqwest::Body {
    let second = body.slice(body.len() / 2..);
    let first = body.slice(..body.len() / 2);
    let wait = async move {
        if let Some(pause) = pause {
            sleep(pause).await;
        }
    };
    let later = stream::once(wait).flat_map(move |()| pieces_of(second.clone()));
    let counted = pieces_of(first).chain(later).map(move |piece| {
        progress.sent(piece.len() as u64);
        Ok::<_, HttpError>(piece)
    });
    reqwest::Body::wrap_stream(counted)
}

fn pieces_of(body: Bytes) -> impl Stream<Item = Bytes> + Send + 'static {
    stream::iter((0..body.len()).step_by(PIECE_BYTES).map(move |start| {
        let end = body.len().min(start + PIECE_BYTES);
        body.slice(start..end)
    }))
}

/// The body of an answer, counted; one that is not an object ends with an error beyond its bound.
fn counted(
    body: HttpResponseBody,
    progress: Option<Arc<Progress>>,
    is_bounded: bool,
) -> HttpResponseBody {
    let counted = body.map_frame(move |frame| {
        if let Some(progress) = &progress {
            progress.received();
        }
        frame
    });
    if !is_bounded {
        return HttpResponseBody::new(counted);
    }
    let bounded = Limited::new(counted, TEXT_BYTES_MAX);
    HttpResponseBody::new(
        bounded.map_err(|error| HttpError::new(HttpErrorKind::Decode, AnswerError(error))),
    )
}

/// Why an answer was not read to its end.
#[derive(Debug, thiserror::Error)]
#[error("the answer was not received whole: {0}")]
struct AnswerError(Box<dyn std::error::Error + Send + Sync>);

/// Whether a query asks for a list, in any of the three protocols.
fn is_list(query: Option<&str>) -> bool {
    let words = query.unwrap_or_default().split('&');
    words
        .map(|word| word.split('=').next().unwrap_or_default())
        .any(|name| matches!(name, "list-type" | "prefix" | "restype" | "comp"))
}

fn failed(error: reqwest::Error) -> HttpError {
    HttpError::new(HttpErrorKind::Unknown, error)
}

/// A client with those settings that `AWS_*` and similar variables can set.
fn client(options: &ClientOptions) -> reqwest::Result<reqwest::Client> {
    let value = |key| options.get_config_value(&key);
    let is_set = |key| value(key).is_some_and(|value| value == "true");
    let mut builder = reqwest::Client::builder();
    if let Some(agent) = value(ClientConfigKey::UserAgent) {
        builder = builder.user_agent(agent);
    }
    // The same proxy settings as the crate's own client has: a second client must not bypass the
    // proxy.
    if let Some(url) = value(ClientConfigKey::ProxyUrl) {
        if let Some(certificate) = value(ClientConfigKey::ProxyCaCertificate) {
            let certificate = reqwest::tls::Certificate::from_pem(certificate.as_bytes())?;
            builder = builder.tls_certs_merge([certificate]);
        }
        let excluded = value(ClientConfigKey::ProxyExcludes);
        let excluded = excluded.and_then(|list| reqwest::NoProxy::from_string(&list));
        builder = builder.proxy(reqwest::Proxy::all(url)?.no_proxy(excluded));
    }
    if is_set(ClientConfigKey::AllowInvalidCertificates) {
        builder = builder.tls_danger_accept_invalid_certs(true);
    }
    // One connection per racer: streams inside one could queue behind each other.
    builder
        .http1_only()
        .connect_timeout(super::CONNECT_TIME_MAX)
        .tcp_user_timeout(UNACKNOWLEDGED_TIME_MAX)
        .build()
}
