//! Puts whose bodies travel in two halves with a pause between: how the probe makes racing puts overlap
//! inside the store, whatever the network does.
//!
//! Invariant: a request that was not marked [`InPieces`] goes the way that the protocol crate made for it.
//!
//! Not here: who races, and what it means (that is `probe`).

use std::future::Future;
use std::pin::Pin;
use std::sync::OnceLock;
use std::time::Duration;

use bytes::Bytes;
use futures_util::{StreamExt, stream};
use http_body_util::BodyExt;
use object_store::ClientOptions;
use object_store::client::{
    ClientConfigKey, HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse,
    HttpResponseBody, HttpService, ReqwestConnector,
};
use tokio::time::sleep;

/// Between the halves. Far more than racers need to send their first halves one after the other, also over
/// connections that are still to be made; and what an attachment can spare.
const PAUSE: Duration = Duration::from_millis(100);

/// Marks a request (in its extensions) whose body is to be sent in pieces.
#[derive(Clone, Copy)]
pub(super) struct InPieces;

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
        match request.extensions().get::<InPieces>() {
            None => Box::pin(self.whole.execute(request)),
            Some(InPieces) => Box::pin(self.send_in_pieces(request)),
        }
    }
}

impl Service {
    async fn send_in_pieces(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let client = match self.pieces.get() {
            Some(client) => client.clone(),
            None => {
                // Settings it cannot have are an error, not another client that goes past a proxy.
                let made = client(&self.options).map_err(failed)?;
                self.pieces.get_or_init(|| made).clone()
            }
        };
        let (head, body) = request.into_parts();
        let body = body.collect().await?.to_bytes();
        let url = head.uri.to_string().parse();
        let url = url.map_err(|error| HttpError::new::<url::ParseError>(HttpErrorKind::Request, error))?;
        let mut request = reqwest::Request::new(head.method, url);
        // Among them is the length: the body counts as long as it was promised.
        *request.headers_mut() = head.headers;
        *request.body_mut() = Some(halves(body));
        let answer = client.execute(request).await.map_err(failed)?;
        let (status, headers) = (answer.status(), answer.headers().clone());
        let body = reqwest::Body::from(answer).map_err(failed);
        let mut response = HttpResponse::new(HttpResponseBody::new(body));
        *response.status_mut() = status;
        *response.headers_mut() = headers;
        Ok(response)
    }
}

fn halves(body: Bytes) -> reqwest::Body {
    let second = body.slice(body.len() / 2..);
    let first = body.slice(..body.len() / 2);
    let later = stream::once(async move {
        sleep(PAUSE).await;
        Ok::<_, HttpError>(second)
    });
    reqwest::Body::wrap_stream(stream::once(async move { Ok(first) }).chain(later))
}

fn failed(error: reqwest::Error) -> HttpError {
    HttpError::new(HttpErrorKind::Unknown, error)
}

/// A client with those settings that `AWS_*` and its kin can make.
fn client(options: &ClientOptions) -> reqwest::Result<reqwest::Client> {
    let value = |key| options.get_config_value(&key);
    let is_set = |key| value(key).is_some_and(|value| value == "true");
    let mut builder = reqwest::Client::builder();
    if let Some(agent) = value(ClientConfigKey::UserAgent) {
        builder = builder.user_agent(agent);
    }
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
    builder.http1_only().connect_timeout(super::CONNECT_MAX).build()
}
