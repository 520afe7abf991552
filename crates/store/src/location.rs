//! Store URLs: their meaning, and one-line errors for those that have none.
//!
//! Invariant: no secret is taken from a URL, and a secret that a user wrote into one never gets
//! into an error text.
//!
//! Not here: opening the store (`open`), credentials (`cloud`, `profile`), and which keys are legal
//! (`key`).

use std::path::PathBuf;

use url::Url;

use crate::key::why_not;
use crate::{Result, StoreError, StoreErrorKind};

/// The forms of a store URL, for error texts.
const FORMS: &str = "write s3://bucket/prefix, gs://bucket/prefix, az://container/prefix, \
    file:///path, /path or memory:NAME";
/// Longest volume name in bytes.
const NAME_BYTES_MAX: usize = 128;

/// A store that a URL names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Location {
    Memory { name: Option<String> },
    Directory { root: PathBuf },
    Cloud(CloudLocation),
}

/// A bucket of an object store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CloudLocation {
    pub(crate) scheme: CloudScheme,
    /// Bucket or container.
    pub(crate) bucket: String,
    /// Key prefix without slashes at its ends; may be empty.
    pub(crate) prefix: String,
    /// `endpoint=`: the base URL of the service.
    pub(crate) endpoint: Option<String>,
    /// `region=` (S3).
    pub(crate) region: Option<String>,
    /// `account=` (Azure).
    pub(crate) account: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CloudScheme {
    S3,
    Gcs,
    Azure,
}

impl CloudScheme {
    pub(crate) fn name(self) -> &'static str {
        match self {
            CloudScheme::S3 => "s3",
            CloudScheme::Gcs => "gs",
            CloudScheme::Azure => "az",
        }
    }

    fn parameters(self) -> &'static [&'static str] {
        match self {
            CloudScheme::S3 => &["endpoint", "region"],
            CloudScheme::Gcs => &["endpoint"],
            CloudScheme::Azure => &["endpoint", "account"],
        }
    }

    /// Where credentials belong.
    pub(crate) fn credentials(self) -> &'static str {
        match self {
            CloudScheme::S3 => "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
            CloudScheme::Gcs => "GOOGLE_APPLICATION_CREDENTIALS",
            CloudScheme::Azure => "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
        }
    }
}

fn invalid(text: String) -> StoreError {
    StoreError::new(StoreErrorKind::Invalid, text)
}

fn bad(url: &str, error: url::ParseError) -> StoreError {
    invalid(format!("bad store URL {:?}: {error}", public_form(url))).with_source(error)
}

/// Reads a store URL.
pub(crate) fn parse(url: &str) -> Result<Location> {
    if let Some(name) = url.strip_prefix("memory:") {
        return match why_not(name) {
            _ if name.is_empty() => Ok(Location::Memory { name: None }),
            None => Ok(Location::Memory { name: Some(name.to_owned()) }),
            Some(why) => Err(invalid(format!("the name of memory store {name:?} {why}"))),
        };
    }
    // Before the rules of URLs: in a path, `?`, `#` and `%` are characters like any other.
    if url.starts_with('/') {
        return Ok(Location::Directory { root: PathBuf::from(url) });
    }
    // A URL parser drops control characters and takes a backslash for a slash: the store would be
    // another than the one that is shown.
    if url.contains(|c: char| c == '\\' || c.is_control()) {
        let text = "has a backslash or a control character: write %5C, or the path by itself";
        return Err(invalid(format!("store URL {:?} {text}", public_form(url))));
    }
    let scheme = url.split_once("://").map_or("", |(scheme, _)| scheme).to_ascii_lowercase();
    match scheme.as_str() {
        "file" => parse_file(url),
        "s3" => parse_cloud(url, CloudScheme::S3),
        "gs" => parse_cloud(url, CloudScheme::Gcs),
        "az" => parse_cloud(url, CloudScheme::Azure),
        "" => Err(invalid(format!("{:?} is not a store URL: {FORMS}", public_form(url)))),
        other => Err(invalid(format!("there is no store of kind {other:?}: {FORMS}"))),
    }
}

/// The URL without the parts that may hold a secret: user, password, query and fragment. A secret
/// with a slash in it is a path to a parser of URLs, so what follows a colon counts as a password
/// up to the last `@`.
pub(crate) fn public_form(url: &str) -> String {
    if url.starts_with('/') {
        return url.to_owned();
    }
    let bare = split_query(url).0;
    let bare = bare.split_once('#').map_or(bare, |(bare, _)| bare);
    let (scheme, rest) = bare.split_once("://").map_or(("", bare), |(scheme, rest)| (scheme, rest));
    let (host, path) = rest.find('/').map_or((rest, ""), |slash| rest.split_at(slash));
    let public = match (rest.rsplit_once('@'), host.rsplit_once('@')) {
        (Some((_, public)), _) if host.contains(':') => public.to_owned(),
        (_, Some((_, host))) => format!("{host}{path}"),
        _ => rest.to_owned(),
    };
    if scheme.is_empty() { public } else { format!("{scheme}://{public}") }
}

fn parse_file(url: &str) -> Result<Location> {
    let parsed = Url::parse(url).map_err(|error| bad(url, error))?;
    if parsed.query().is_some() || parsed.fragment().is_some() {
        return Err(invalid(format!(
            "store URL {:?} takes no parameters: write file:///path",
            public_form(url)
        )));
    }
    parsed.to_file_path().map(|root| Location::Directory { root }).map_err(|()| {
        invalid(format!(
            "store URL {:?} names no absolute path: write file:///path, three slashes",
            public_form(url)
        ))
    })
}

fn parse_cloud(url: &str, scheme: CloudScheme) -> Result<Location> {
    // Errors quote this form only: the URL itself may hold a secret.
    let public_url = public_form(url);
    let parsed = Url::parse(url).map_err(|error| bad(url, error))?;
    let refuse_secret = || {
        let place = scheme.credentials();
        invalid(format!(
            "credentials do not belong in store URL {public_url:?}: remove them and set {place}"
        ))
    };
    if !parsed.username().is_empty() || parsed.password().is_some() {
        return Err(refuse_secret());
    }
    if parsed.port().is_some() || parsed.fragment().is_some() {
        let text =
            "has a port or a fragment: name the service with ?endpoint=http://host:port instead";
        return Err(invalid(format!("store URL {public_url:?} {text}")));
    }
    let bucket = parsed.host_str().unwrap_or_default().to_owned();
    if let Some(why) = why_not(&bucket) {
        return Err(invalid(format!("the bucket in store URL {public_url:?} {why}")));
    }
    let prefix = parsed.path().trim_matches('/').to_owned();
    if let Some(why) = why_not(&prefix).filter(|_| !prefix.is_empty()) {
        return Err(invalid(format!("the prefix in store URL {public_url:?} {why}")));
    }
    let mut location =
        CloudLocation { scheme, bucket, prefix, endpoint: None, region: None, account: None };
    for (name, value) in parsed.query_pairs() {
        let value = Some(value.into_owned()).filter(|value| !value.is_empty());
        match name.as_ref() {
            known if !scheme.parameters().contains(&known) => {
                // The name alone is judged and quoted; the value never gets into a text.
                if is_secret(known) {
                    return Err(refuse_secret());
                }
                let all = scheme.parameters().join(", ");
                return Err(invalid(format!(
                    "store URL {public_url:?} has parameter {known:?}: there are {all}"
                )));
            }
            "endpoint" => location.endpoint = value,
            "region" => location.region = value,
            _ => location.account = value,
        }
    }
    check_endpoint(&public_url, location.endpoint.as_deref(), refuse_secret)?;
    Ok(Location::Cloud(location))
}

fn check_endpoint(
    public_url: &str,
    endpoint: Option<&str>,
    refuse_secret: impl Fn() -> StoreError,
) -> Result<()> {
    let Some(endpoint) = endpoint else { return Ok(()) };
    match Url::parse(endpoint) {
        // An endpoint is a URL inside the URL, and can hold a password as well.
        Ok(url) if !url.username().is_empty() || url.password().is_some() => Err(refuse_secret()),
        Ok(url) if matches!(url.scheme(), "http" | "https") && url.query().is_none() => Ok(()),
        _ => {
            let text = "write endpoint=https://host or endpoint=http://host:port";
            Err(invalid(format!("store URL {public_url:?} has a bad endpoint: {text}")))
        }
    }
}

/// Whether the name of a parameter marks its value as a secret.
fn is_secret(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    ["key", "secret", "token", "password", "credential", "sas", "sig"]
        .iter()
        .any(|part| name.contains(part))
}

fn split_query(url: &str) -> (&str, &str) {
    url.find('?').map_or((url, ""), |at| url.split_at(at))
}

/// Splits a volume's URL such as `s3://bucket/prefix/disk1?region=x` into its store's URL
/// (`s3://bucket/prefix?region=x`) and the volume's name (`disk1`).
///
/// A volume's name is 1 to 128 of `[A-Za-z0-9._-]` and does not start with a dot; else `Invalid`.
pub fn split_volume_url(url: &str) -> Result<(String, String)> {
    // A plain path has no query: `?` is a character like any other there.
    let (path, query) = if url.starts_with('/') { (url, "") } else { split_query(url) };
    let public_url = public_form(url);
    let missing = || {
        invalid(format!(
            "volume URL {public_url:?} names no volume: put its name behind the store, as in \
             STORE/disk1"
        ))
    };
    let (store, name) = path.rsplit_once('/').ok_or_else(missing)?;
    let is_bare = store.ends_with('/') || store.ends_with(':');
    let store = match store {
        "" => "/",
        // The slash that was split off was the root folder itself.
        "file://" => "file:///",
        "memory:" => store,
        _ if is_bare => return Err(missing()),
        _ => store,
    };
    if name.is_empty() {
        return Err(missing());
    }
    let why = why_not(name).map(|why| format!("the volume name {name:?} in {public_url:?} {why}"));
    let too_long = || {
        format!(
            "the volume name in {public_url:?} is longer than {NAME_BYTES_MAX} bytes: shorten it"
        )
    };
    match why.or_else(|| (name.len() > NAME_BYTES_MAX).then(too_long)) {
        Some(text) => Err(invalid(text)),
        None => {
            let store = format!("{store}{query}");
            // A bad store is an error of the command line, before anything acts on the name.
            parse(&store)?;
            Ok((store, name.to_owned()))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cloud(url: &str) -> CloudLocation {
        match parse(url).unwrap() {
            Location::Cloud(location) => location,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn every_form_of_store_url_parses_to_its_parts() {
        assert_eq!(parse("memory:").unwrap(), Location::Memory { name: None });
        assert_eq!(parse("memory:a").unwrap(), Location::Memory { name: Some("a".to_owned()) });
        assert_eq!(parse("/srv/a?b").unwrap(), Location::Directory { root: "/srv/a?b".into() });
        assert_eq!(
            parse("file:///srv/a%20b").unwrap(),
            Location::Directory { root: "/srv/a b".into() }
        );
        let s3 = cloud("s3://bucket/some/prefix/?endpoint=http://127.0.0.1:9000&region=eu-1");
        assert_eq!(
            (s3.scheme, s3.bucket.as_str(), s3.prefix.as_str()),
            (CloudScheme::S3, "bucket", "some/prefix")
        );
        assert_eq!(s3.endpoint.as_deref(), Some("http://127.0.0.1:9000"));
        assert_eq!(s3.region.as_deref(), Some("eu-1"));
        assert_eq!(cloud("gs://bucket").prefix, "");
        assert_eq!(cloud("az://c/p?account=me").account.as_deref(), Some("me"));
    }

    #[test]
    fn bad_urls_get_one_line_that_says_what_to_do() {
        let bad = [
            ("disk1", "write s3://"),
            ("ftp://host/x", "no store of kind \"ftp\""),
            ("s3://", "bucket"),
            ("s3:///prefix", "bucket"),
            ("s3://bucket/a/../../.x", "dot"),
            ("s3://bucket/a%20b", "only letters"),
            ("s3://bucket:9000/x", "?endpoint="),
            ("s3://bucket?color=red", "there are endpoint, region"),
            ("gs://bucket?region=x", "there are endpoint"),
            ("s3://bucket?endpoint=127.0.0.1:9000", "endpoint=http"),
            ("file://host/x", "three slashes"),
            ("file:///x?y=z", "no parameters"),
            ("memory:a b", "only letters"),
            ("file:///srv\\a", "backslash"),
            ("s3://buc\tket/x", "control character"),
            ("", "write s3://"),
        ];
        for (url, expected) in bad {
            let error = parse(url).unwrap_err();
            assert_eq!(error.kind(), StoreErrorKind::Invalid, "{url}");
            let text = error.to_string();
            assert!(text.contains(expected) && !text.contains('\n'), "{url}: {text}");
        }
    }

    #[test]
    fn a_bad_url_keeps_what_its_parser_said() {
        let error = parse("s3://[bucket").unwrap_err();
        let source = std::error::Error::source(&error).expect("a source");
        assert!(source.is::<url::ParseError>() && error.to_string().ends_with(&source.to_string()));
    }

    #[test]
    fn credentials_in_a_url_are_refused_and_not_repeated() {
        let urls = [
            "s3://hunter1:hunter2@bucket/x",
            "s3://bucket/x?secret_access_key=hunter2",
            "s3://bucket/x?AWS_ACCESS_KEY_ID=hunter2",
            "az://c/x?sas_token=hunter2",
            "s3://bucket/x?endpoint=http://hunter1:hunter2@host",
        ];
        for url in urls {
            let text = parse(url).unwrap_err().to_string();
            assert!(text.contains("credentials") && !text.contains("hunter"), "{text}");
        }
        let not_parsed = [
            "ftp://hunter1:hunter2@x/",
            "s3://AKIA:hunter1/hunter2@bucket",
            "s3://AKIA:a@hunter1/hunter2@bucket",
            "hunter1:hunter2@bucket/x",
            "s3://bucket/x#hunter2",
        ];
        for url in not_parsed {
            let text = parse(url).unwrap_err().to_string();
            assert!(!text.contains("hunter"), "{text}");
        }
    }

    #[test]
    fn a_volume_url_is_its_store_and_its_name() {
        let good = [
            ("s3://bucket/disk1", "s3://bucket", "disk1"),
            (
                "s3://bucket/p/q/disk1?region=x&endpoint=http://h:1/",
                "s3://bucket/p/q?region=x&endpoint=http://h:1/",
                "disk1",
            ),
            ("file:///srv/sawmill/disk1", "file:///srv/sawmill", "disk1"),
            ("file:///disk1", "file:///", "disk1"),
            ("/srv/disk-1.a_b", "/srv", "disk-1.a_b"),
            ("/disk1", "/", "disk1"),
            ("memory:x/disk1", "memory:x", "disk1"),
            ("memory:/disk1", "memory:", "disk1"),
        ];
        for (url, store, name) in good {
            assert_eq!(
                split_volume_url(url).unwrap(),
                (store.to_owned(), name.to_owned()),
                "{url}"
            );
        }
    }

    #[test]
    fn a_volume_url_without_a_legal_name_is_refused() {
        let long = format!("s3://bucket/{}", "x".repeat(129));
        let bad = [
            "s3://bucket",
            "s3://bucket/",
            "disk1",
            "s3://b/.hidden",
            "/srv/a b",
            "memory:x",
            "nfs://h/d",
            &long,
        ];
        for url in bad {
            assert_eq!(split_volume_url(url).unwrap_err().kind(), StoreErrorKind::Invalid, "{url}");
        }
    }
}
