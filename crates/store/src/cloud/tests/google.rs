//! The backend against a small Google Cloud Storage: as S3 in what a list and a part look like, but
//! create-only by generation, one delete for each key, and keys escaped to their last slash.
//!
//! Not here: authentication. The account below has an empty token, which not every request carries.

use super::*;

/// An account that needs no token from Google.
const ACCOUNT: &str = r#"{"private_key": "key", "private_key_id": "id", "client_email": "me",
    "disable_oauth": true}"#;

fn perform(world: &mut World, request: &Request) -> Answer {
    let (path, query) = request.target.split_once('?').unwrap_or((&request.target, ""));
    let Some(path) = path.strip_prefix("/bucket") else { return code(404, "NoSuchBucket") };
    let key = unescaped(path.trim_start_matches('/'));
    let generation = request.headers.get("x-goog-if-generation-match");
    match request.method.as_str() {
        "PUT" if generation.is_none_or(|value| value != "0") => code(400, "NoCondition"),
        "PUT" if world.objects.contains_key(&key) => code(412, "PreconditionFailed"),
        "PUT" => made(world, key, &request.body),
        "DELETE" => match world.objects.remove(&key) {
            Some(_) => answer(204, ""),
            None => code(404, "NoSuchKey"),
        },
        "GET" if key.is_empty() => list(world, query),
        "GET" => match world.objects.get(&key) {
            Some(body) => part_of(body, request.headers.get("range")),
            None => code(404, "NoSuchKey"),
        },
        other => panic!("no method {other}"),
    }
}

/// A path without its escapes. No key of ours has a `+`.
fn unescaped(path: &str) -> String {
    let pair = format!("path={path}");
    url::form_urlencoded::parse(pair.as_bytes()).map(|(_, value)| value.into_owned()).collect()
}

fn client(server: &Server, bucket: &str) -> Arc<Client> {
    let url = format!("gs://{bucket}/some/prefix?endpoint=http://127.0.0.1:{}", server.port);
    let variables = environment(&[("GOOGLE_SERVICE_ACCOUNT_KEY", ACCOUNT)]);
    open_in(&url, &StoreOptions { deadline_s: 5, ..StoreOptions::default() }, &variables).unwrap()
}

#[test]
fn the_google_backend_keeps_the_contract() {
    let server = serving(perform);
    assert_eq!(conformance::run(&*client(&server, "bucket")), Vec::<String>::new());
    let requests = &server.world.lock().requests;
    let begin = "PUT /bucket/some%2Fprefix%2Fconformance%2F";
    assert!(requests.iter().any(|request| request.starts_with(begin)), "{:?}", requests.first());
}

#[test]
fn a_missing_bucket_of_google_is_denied_at_once() {
    let server = serving(perform);
    let error = put(&client(&server, "elsewhere"), "x").unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Denied, "{error}");
    assert!(error.to_string().contains("create the bucket"), "{error}");
    assert_eq!(server.world.lock().requests.len(), 1);
}
