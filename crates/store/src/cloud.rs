//! Stores on a network: S3 and its kin, Google Cloud Storage, Azure Blob Storage.
//!
//! Invariant: a 404 is `NotFound` only if its text names the object as missing. A missing bucket is
//! `Denied`, and a 404 that names neither (a proxy's, say) is `Unavailable` (S4).
//!
//! Not here: retry. The protocol crate's own is off; the client above retries.

use std::str::FromStr;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::{BoxFuture, FutureExt};
use futures_util::{StreamExt, TryStreamExt, stream};
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey, S3ConditionalPut};
use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};
use object_store::path::Path;
use object_store::{
    BackoffConfig, ClientOptions, GetOptions, GetRange, HeaderValue, ObjectStore, PutMode,
    PutOptions, PutPayload, RetryConfig,
};

use crate::backend::{Backend, Body, Creation, WantedBytes, room_for};
use crate::key::is_key;
use crate::location::{CloudLocation, CloudScheme};
use crate::profile::{self, Environment};
use crate::{Bodies, ObjectInfo, Result, StoreError, StoreErrorKind};

mod pieces;
pub(crate) mod refusal;

use pieces::{Connector, PiecesMark};
use refusal::explain;

/// The one limit of time that the HTTP client keeps: before there is a connection, no byte can show
/// progress.
const CONNECT_TIME_MAX: Duration = Duration::from_secs(5);

/// Objects in a bucket.
pub(crate) struct Cloud {
    store: Box<dyn ObjectStore>,
    /// Empty, or the root's prefix with its trailing `/`.
    root: String,
    /// The endpoint, if traffic to it can be read and changed on the way.
    exposed: Option<String>,
}

impl Cloud {
    /// A client of the bucket that `location` names, with credentials and settings from
    /// `environment`.
    pub(crate) fn new(location: &CloudLocation, environment: &Environment) -> Result<Self> {
        let mut endpoint = location.endpoint.clone();
        let store = match location.scheme {
            CloudScheme::S3 => s3(location, environment, &mut endpoint)?,
            CloudScheme::Gcs => gcs(location, environment)?,
            CloudScheme::Azure => azure(location, environment)?,
        };
        let exposed = endpoint.filter(|endpoint| is_exposed(endpoint));
        let root = if location.prefix.is_empty() {
            String::new()
        } else {
            format!("{}/", location.prefix)
        };
        Ok(Cloud { store, root, exposed })
    }

    fn path(&self, key: &str) -> Path {
        Path::from(format!("{}{key}", self.root))
    }

    async fn fetch(&self, key: &str, part: WantedBytes) -> Result<Bytes> {
        // S5 wants `Invalid`; servers differ in what they make of such a header.
        if let Some(range) = part.range.as_ref().filter(|range| range.start >= range.end) {
            let text = format!("range {}..{} is empty", range.start, range.end);
            return Err(StoreError::new(StoreErrorKind::Invalid, text));
        }
        let options = GetOptions {
            range: part.range.clone().map(GetRange::Bounded),
            ..GetOptions::default()
        };
        let answer = self.store.get_opts(&self.path(key), options).await.map_err(explain)?;
        let length = answer.range.end.saturating_sub(answer.range.start);
        let requested_bytes = part.range.as_ref().map_or(u64::MAX, |range| range.end - range.start);
        // An error, and not truncated: a server that ignores the range sends the object from its
        // start, so the first bytes would be the wrong ones.
        if length > requested_bytes {
            let text = format!(
                "the store answers with {length} bytes where {requested_bytes} were asked for"
            );
            return Err(StoreError::new(StoreErrorKind::Broken, text));
        }
        part.check_length(length)?;
        let length = length as usize;
        let mut chunks = answer.into_stream();
        let mut whole = Vec::new();
        while let Some(chunk) = chunks.try_next().await.map_err(explain)? {
            // The whole body is one chunk already: no copy.
            if chunk.len() == length && whole.is_empty() {
                return Ok(chunk);
            }
            if chunk.len() > length - whole.len() {
                let text = format!("the store promised {length} bytes and sends more");
                return Err(StoreError::new(StoreErrorKind::Broken, text));
            }
            if whole.capacity() == 0 {
                whole = room_for(length)?;
            }
            whole.extend_from_slice(&chunk);
        }
        if whole.len() == length {
            return Ok(Bytes::from(whole));
        }
        let text = format!("the store promised {length} bytes and sent {}", whole.len());
        Err(StoreError::new(StoreErrorKind::Broken, text))
    }

    async fn try_create(&self, key: &str, body: Bytes, options: PutOptions) -> Result<Creation> {
        match self.store.put_opts(&self.path(key), PutPayload::from(body), options).await {
            Ok(_) => Ok(Creation::Created),
            Err(object_store::Error::AlreadyExists { .. }) => Ok(Creation::Exists),
            // A create cannot miss the object: it is the bucket that is missing.
            Err(error) => Err(match explain(error) {
                absent if absent.kind() == StoreErrorKind::NotFound => {
                    StoreError::new(StoreErrorKind::Unavailable, absent.to_string())
                        .with_source(absent)
                }
                other => other,
            }),
        }
    }

    async fn find(&self, prefix: &str) -> Result<Vec<ObjectInfo>> {
        let below = self.path(prefix);
        // The prefix of the root goes with the request, because others may share the bucket.
        let mut listed = self.store.list(Some(&below).filter(|below| !below.as_ref().is_empty()));
        let mut found = Vec::new();
        while let Some(object) = listed.try_next().await.map_err(explain)? {
            let key = object.location.as_ref().strip_prefix(&self.root).filter(|key| is_key(key));
            // Some stores ignore the prefix, and a caller may delete what a list names.
            let key = key.filter(|key| is_below(key, prefix));
            found
                .extend(key.map(|key| ObjectInfo { key: key.to_owned(), size_bytes: object.size }));
        }
        Ok(found)
    }

    async fn remove(&self, keys: &[String]) -> Result<()> {
        let paths: Vec<_> = keys.iter().map(|key| Ok(self.path(key))).collect();
        let mut deleted = self.store.delete_stream(stream::iter(paths).boxed());
        // Each key has an outcome: a bulk delete that was answered with 200 may list keys that
        // stayed (P103).
        while let Some(outcome) = deleted.next().await {
            match outcome.map_err(explain) {
                Err(error) if error.kind() != StoreErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }
}

impl Backend for Cloud {
    fn shows_progress(&self) -> bool {
        true
    }

    fn exposed_endpoint(&self) -> Option<&str> {
        self.exposed.as_deref()
    }

    fn get<'a>(&'a self, key: &'a str, part: WantedBytes) -> BoxFuture<'a, Result<Bytes>> {
        self.fetch(key, part).boxed()
    }

    fn create<'a>(&'a self, key: &'a str, body: Body) -> BoxFuture<'a, Result<Creation>> {
        let mut options = PutOptions::from(PutMode::Create);
        if body.bodies == Bodies::InHalves {
            options.extensions.insert(PiecesMark);
        }
        self.try_create(key, body.bytes, options).boxed()
    }

    fn list<'a>(&'a self, prefix: &'a str) -> BoxFuture<'a, Result<Vec<ObjectInfo>>> {
        self.find(prefix).boxed()
    }

    fn delete<'a>(&'a self, keys: &'a [String]) -> BoxFuture<'a, Result<()>> {
        self.remove(keys).boxed()
    }
}

/// Whether a key lies strictly below a prefix; every key lies below the empty one.
fn is_below(key: &str, prefix: &str) -> bool {
    prefix.is_empty() || key.strip_prefix(prefix).is_some_and(|rest| rest.starts_with('/'))
}

/// The HTTP settings. The client sets all time limits except that of connecting.
fn http_options() -> ClientOptions {
    let agent = HeaderValue::from_static(concat!("sawmill/", env!("CARGO_PKG_VERSION")));
    ClientOptions::new()
        .with_user_agent(agent)
        .with_timeout_disabled()
        .with_connect_timeout(CONNECT_TIME_MAX)
}

/// Whether traffic to an endpoint leaves this machine unencrypted.
fn is_exposed(endpoint: &str) -> bool {
    let Ok(url) = url::Url::parse(endpoint) else { return false };
    let is_here = match url.host() {
        // Names below `localhost` are this machine too (RFC 6761).
        Some(url::Host::Domain(name)) => name == "localhost" || name.ends_with(".localhost"),
        Some(url::Host::Ipv4(address)) => address.is_loopback(),
        Some(url::Host::Ipv6(address)) => address.is_loopback(),
        None => false,
    };
    url.scheme() == "http" && !is_here
}

fn no_retry() -> RetryConfig {
    // A retry in the crate would hide whether "exists" is about our own first attempt (decision
    // 0005).
    RetryConfig { backoff: BackoffConfig::default(), max_retries: 0, retry_timeout: Duration::ZERO }
}

/// The settings in the variables that start with `prefix`. Variables that are not settings are
/// ignored.
fn settings<'a, K: FromStr>(
    environment: &'a Environment,
    prefix: &'a str,
) -> impl Iterator<Item = (K, &'a str)> {
    environment.iter().filter(move |(name, _)| name.starts_with(prefix)).filter_map(
        |(name, value)| {
            Some((name.to_ascii_lowercase().parse().ok()?, value.as_str()))
                .filter(|_| !value.is_empty())
        },
    )
}

fn refuse(location: &CloudLocation, error: object_store::Error) -> StoreError {
    let text = refusal::one_line(&error.to_string());
    let (scheme, bucket) = (location.scheme.name(), &location.bucket);
    let place = location.scheme.credentials();
    let text =
        format!("cannot use {scheme}://{bucket}: {text}; check the variables, such as {place}");
    StoreError::new(StoreErrorKind::Invalid, text).with_source(error)
}

fn s3(
    location: &CloudLocation,
    environment: &Environment,
    used: &mut Option<String>,
) -> Result<Box<dyn ObjectStore>> {
    let mut variables = profile::credentials(environment)?;
    // After those of the profile: the builder takes the last value, and variables win.
    variables.extend_from_slice(environment);
    let set = |name| variables.iter().any(|(n, value)| n == name && !value.is_empty());
    let mut builder = AmazonS3Builder::new()
        .with_client_options(http_options())
        .with_http_connector(Connector)
        .with_retry(no_retry());
    for (key, value) in settings(&variables, "AWS_") {
        builder = builder.with_config(key, value);
    }
    // The URL comes last, because it is more specific than the environment.
    if let Some(endpoint) = &location.endpoint {
        builder = builder.with_config(AmazonS3ConfigKey::S3Endpoint, endpoint);
    }
    if let Some(region) = &location.region {
        builder = builder.with_region(region);
    }
    // In this order, which is that of the builder: the warning must be about the endpoint in use.
    let own_endpoint = builder.get_config_value(&AmazonS3ConfigKey::S3Endpoint);
    let endpoint = own_endpoint.or_else(|| builder.get_config_value(&AmazonS3ConfigKey::Endpoint));
    let sources = [
        "AWS_ACCESS_KEY_ID",
        "AWS_SKIP_SIGNATURE",
        "AWS_WEB_IDENTITY_TOKEN_FILE",
        "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
        "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    ];
    if let Some(endpoint) = endpoint {
        // Only Amazon's own machines have a metadata service that supplies credentials.
        if !sources.into_iter().any(set) {
            let place = location.scheme.credentials();
            let text =
                format!("no credentials for s3://{} at {endpoint}: set {place}", location.bucket);
            return Err(StoreError::new(StoreErrorKind::Invalid, text));
        }
        builder = builder.with_allow_http(endpoint.starts_with("http://"));
        *used = Some(endpoint);
    }
    let builder = builder
        .with_bucket_name(&location.bucket)
        .with_conditional_put(S3ConditionalPut::ETagMatch);
    Ok(Box::new(builder.build().map_err(|error| refuse(location, error))?))
}

fn gcs(location: &CloudLocation, environment: &Environment) -> Result<Box<dyn ObjectStore>> {
    let mut options = http_options();
    if location.endpoint.as_ref().is_some_and(|endpoint| endpoint.starts_with("http://")) {
        options = options.with_allow_http(true);
    }
    let mut builder = GoogleCloudStorageBuilder::new()
        .with_client_options(options)
        .with_http_connector(Connector)
        .with_retry(no_retry());
    for (key, value) in settings(environment, "GOOGLE_") {
        builder = builder.with_config(key, value);
    }
    if let Some(endpoint) = &location.endpoint {
        builder = builder.with_config(GoogleConfigKey::BaseUrl, endpoint);
    }
    let builder = builder.with_bucket_name(&location.bucket);
    Ok(Box::new(builder.build().map_err(|error| refuse(location, error))?))
}

fn azure(location: &CloudLocation, environment: &Environment) -> Result<Box<dyn ObjectStore>> {
    let mut builder = MicrosoftAzureBuilder::new()
        .with_client_options(http_options())
        .with_http_connector(Connector)
        .with_retry(no_retry());
    for (key, value) in settings(environment, "AZURE_") {
        builder = builder.with_config(key, value);
    }
    if let Some(endpoint) = &location.endpoint {
        builder = builder
            .with_endpoint(endpoint.clone())
            .with_allow_http(endpoint.starts_with("http://"));
    }
    if let Some(account) = &location.account {
        builder = builder.with_config(AzureConfigKey::AccountName, account);
    }
    let builder = builder.with_container_name(&location.bucket);
    Ok(Box::new(builder.build().map_err(|error| refuse(location, error))?))
}

#[cfg(test)]
mod tests;
