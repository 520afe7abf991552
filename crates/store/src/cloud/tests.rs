//! The network backend, through the client, against a small S3 server that misbehaves on request.
//!
//! Not here: similar stores (`google`, `azure`), which use another protocol over the same
//! connections; what slow links do (`slow`).

use std::collections::{BTreeMap, VecDeque};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;

use parking_lot::Mutex;

use crate::open::open_in;
use crate::{
    Blocking, Bodies, Class, Client, PutOutcome, StoreErrorKind, StoreOptions, conformance,
    probe_conditional_create,
};

mod azure;
mod google;
mod slow;

/// What the server does with one request.
#[derive(Clone, Copy)]
enum Trouble {
    None,
    /// Answers with this status and text, and does nothing.
    Refuse(u16, &'static str),
    /// Executes it, and closes the connection without an answer.
    Mute,
    /// Executes it, and closes the connection in the middle of the answer.
    Cut,
    /// Deletes the first half of the keys, and reports that the others could not be deleted.
    HalfDone,
    /// Claims that its answer has this many bytes, and sends what there is.
    Claim(u64),
}

#[derive(Default)]
struct World {
    objects: BTreeMap<String, Vec<u8>>,
    troubles: VecDeque<Trouble>,
    /// Method and target of each request.
    requests: Vec<String>,
    /// Checks whether a key is free when the head of a put arrives, and creates the object when the
    /// body does, like some stores.
    looks_first: bool,
}

/// What a kind of server does with a request.
type RequestHandler = fn(&mut World, &Request) -> Answer;

/// A server for one bucket on loopback; its thread ends with the process.
struct Server {
    world: Arc<Mutex<World>>,
    port: u16,
}

struct Request {
    method: String,
    target: String,
    headers: BTreeMap<String, String>,
    body: Vec<u8>,
    /// Whether the key was free before the body came.
    was_free: bool,
}

struct Answer {
    status: u16,
    headers: String,
    body: Vec<u8>,
}

fn answer(status: u16, body: impl Into<Vec<u8>>) -> Answer {
    Answer { status, headers: String::new(), body: body.into() }
}

fn code(status: u16, code: &str) -> Answer {
    answer(status, format!("<Error><Code>{code}</Code><Message>scripted</Message></Error>"))
}

fn receive(world: &Mutex<World>, stream: &TcpStream) -> Option<Request> {
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    reader.read_line(&mut line).ok().filter(|length| *length > 0)?;
    let mut words = line.split_whitespace().map(str::to_owned);
    let (method, target) = (words.next()?, words.next()?);
    let mut headers = BTreeMap::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        let Some((name, value)) = line.trim_end().split_once(": ") else { break };
        headers.insert(name.to_ascii_lowercase(), value.to_owned());
    }
    let length = headers.get("content-length").map_or(0, |length| length.parse().unwrap());
    let was_free = !world.lock().objects.contains_key(target.trim_start_matches("/bucket/"));
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    Some(Request { method, target, headers, body, was_free })
}

fn perform(world: &mut World, request: &Request) -> Answer {
    assert!(request.headers["authorization"].contains("Credential=key/"), "an unsigned request");
    let (path, query) = request.target.split_once('?').unwrap_or((&request.target, ""));
    let Some(path) = path.strip_prefix("/bucket") else { return code(404, "NoSuchBucket") };
    let key = path.trim_start_matches('/').to_owned();
    match request.method.as_str() {
        "PUT" if request.headers.get("if-none-match").is_none_or(|value| value != "*") => {
            code(400, "NoCondition")
        }
        "PUT" if world.looks_first && request.was_free => made(world, key, &request.body),
        "PUT" if world.objects.contains_key(&key) => code(412, "PreconditionFailed"),
        "PUT" => made(world, key, &request.body),
        "POST" => {
            let deleted = named(request).into_iter().map(|key| {
                world.objects.remove(&key);
                format!("<Deleted><Key>{key}</Key></Deleted>")
            });
            answer(200, format!("<DeleteResult>{}</DeleteResult>", deleted.collect::<String>()))
        }
        "GET" if key.is_empty() => list(world, query),
        "GET" => match world.objects.get(&key) {
            Some(body) => part_of(body, request.headers.get("range")),
            None => code(404, "NoSuchKey"),
        },
        other => panic!("no method {other}"),
    }
}

/// The keys that a multi-object delete names.
fn named(request: &Request) -> Vec<String> {
    let text = String::from_utf8(request.body.clone()).unwrap();
    let keys =
        text.split("<Key>").skip(1).map(|part| part.split_once("</Key>").unwrap().0.to_owned());
    keys.collect()
}

fn half_deleted(world: &mut World, request: &Request) -> Answer {
    let keys = named(request);
    let entries = keys.iter().enumerate().map(|(number, key)| {
        if number < keys.len() / 2 {
            world.objects.remove(key);
            return format!("<Deleted><Key>{key}</Key></Deleted>");
        }
        format!(
            "<Error><Key>{key}</Key><Code>InternalError</Code><Message>scripted</Message></Error>"
        )
    });
    answer(200, format!("<DeleteResult>{}</DeleteResult>", entries.collect::<String>()))
}

fn made(world: &mut World, key: String, body: &[u8]) -> Answer {
    world.objects.insert(key, body.to_vec());
    Answer { headers: "ETag: \"e\"\r\n".to_owned(), ..answer(200, "") }
}

fn list(world: &World, query: &str) -> Answer {
    let prefix = url::form_urlencoded::parse(query.as_bytes()).find(|(name, _)| name == "prefix");
    let prefix = prefix.map(|(_, value)| value.into_owned()).unwrap_or_default();
    let entries: String = world
        .objects
        .iter()
        .filter(|(key, _)| key.starts_with(&prefix))
        .map(|(key, body)| {
            let when = "2024-01-01T00:00:00.000Z";
            let size = body.len();
            format!(
                "<Contents><Key>{key}</Key><LastModified>{when}</LastModified>\
                 <Size>{size}</Size></Contents>"
            )
        })
        .collect();
    answer(200, format!("<ListBucketResult>{entries}</ListBucketResult>"))
}

fn part_of(body: &[u8], range: Option<&String>) -> Answer {
    let common = "ETag: \"e\"\r\nLast-Modified: Mon, 01 Jan 2024 00:00:00 GMT\r\n";
    let Some(range) = range else {
        return Answer { headers: common.to_owned(), ..answer(200, body) };
    };
    let (start, end) = range.strip_prefix("bytes=").unwrap().split_once('-').unwrap();
    let (start, end): (usize, usize) = (start.parse().unwrap(), end.parse().unwrap());
    if start >= body.len() {
        return code(416, "InvalidRange");
    }
    let end = end.min(body.len() - 1);
    let headers = format!("{common}Content-Range: bytes {start}-{end}/{}\r\n", body.len());
    Answer { headers, ..answer(206, &body[start..=end]) }
}

/// Serves one connection. An answer that cannot be sent belongs to a client that has gone.
fn serve(world: &Mutex<World>, handler: RequestHandler, mut stream: TcpStream) {
    let Some(request) = receive(world, &stream) else { return };
    let (answer, trouble) = {
        let mut world = world.lock();
        world.requests.push(format!("{} {}", request.method, request.target));
        match world.troubles.pop_front().unwrap_or(Trouble::None) {
            Trouble::Refuse(status, text) => (answer(status, text), Trouble::None),
            Trouble::HalfDone => (half_deleted(&mut world, &request), Trouble::None),
            trouble => (handler(&mut world, &request), trouble),
        }
    };
    let claimed = match trouble {
        Trouble::Claim(bytes) => bytes,
        _ => answer.body.len() as u64,
    };
    let head = format!(
        "HTTP/1.1 {} As Told\r\nContent-Length: {}\r\nConnection: close\r\n{}\r\n",
        answer.status, claimed, answer.headers
    );
    let sent = match trouble {
        Trouble::Mute => return,
        Trouble::Cut => answer.body.len() / 2,
        _ => answer.body.len(),
    };
    let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(&answer.body[..sent]));
}

fn server() -> Server {
    serving(perform)
}

fn serving(handler: RequestHandler) -> Server {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let world = Arc::new(Mutex::new(World::default()));
    let shared = Arc::clone(&world);
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let world = Arc::clone(&shared);
            std::thread::spawn(move || serve(&world, handler, stream));
        }
    });
    Server { world, port }
}

fn environment(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
    pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
}

fn keys() -> Vec<(String, String)> {
    environment(&[("AWS_ACCESS_KEY_ID", "key"), ("AWS_SECRET_ACCESS_KEY", "secret")])
}

impl Server {
    fn client(&self, bucket: &str, deadline_s: u64) -> Arc<Client> {
        let url = format!("s3://{bucket}/some/prefix?endpoint=http://127.0.0.1:{}", self.port);
        open_in(&url, &StoreOptions { deadline_s, ..StoreOptions::default() }, &keys()).unwrap()
    }

    fn expect(&self, troubles: &[Trouble]) {
        self.world.lock().troubles = troubles.iter().copied().collect();
    }
}

fn put(client: &Client, body: &'static str) -> crate::Result<PutOutcome> {
    Blocking(client).put("k", body.into(), Class::Upload)
}

fn get(client: &Client) -> crate::Result<bytes::Bytes> {
    Blocking(client).get("k", None, Class::Read)
}

use Trouble::{Claim, Cut, HalfDone, Mute, None as Fine, Refuse};

#[test]
fn an_answer_that_claims_more_than_asked_for_is_an_error_and_takes_no_memory() {
    let server = server();
    let client = server.client("bucket", 1);
    put(&client, "body").unwrap();
    for claimed in [crate::BLOCKING_GET_BYTES_MAX + 1, 1 << 40, 1 << 62] {
        server.expect(&[Claim(claimed)]);
        let error = get(&client).unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Damaged, "{error}");
        assert!(error.to_string().contains("claims"), "{error}");
    }
    // A claim within the bound that is not met is a cut answer, and the request is repeated.
    server.expect(&[Claim(1000)]);
    assert_eq!(get(&client).unwrap(), "body");
}

#[test]
fn a_delete_of_many_that_is_half_done_is_done_by_repeating_it() {
    let server = server();
    let client = server.client("bucket", 60);
    let calls = Blocking(&*client);
    let keys: Vec<String> = (0..10).map(|number| format!("k{number}")).collect();
    for trouble in
        [HalfDone, Mute, Cut, SLOW_DOWN, Refuse(500, "<Error><Code>InternalError</Code></Error>")]
    {
        for key in &keys {
            assert_eq!(
                calls.put(key, key.clone().into(), Class::Upload).unwrap(),
                PutOutcome::Created
            );
        }
        server.expect(&[trouble, trouble]);
        calls.delete(keys.clone(), Class::Background).unwrap();
        assert_eq!(server.world.lock().objects.len(), 0);
    }
    // A key that the store may not delete is an error, and never reported as deleted.
    calls.put("k0", "body".into(), Class::Upload).unwrap();
    server.expect(&[Refuse(200, DENIED); 64]);
    let error = calls.delete(keys, Class::Background).unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Denied, "{error}");
    assert_eq!(server.world.lock().objects.len(), 1);
}

#[test]
fn a_list_has_only_keys_below_its_prefix_even_if_the_store_ignores_the_prefix() {
    let server = serving(|world, request| match request.method.as_str() {
        "GET" if request.target.contains("prefix=") => list(world, ""),
        _ => perform(world, request),
    });
    let client = server.client("bucket", 60);
    let calls = Blocking(&*client);
    for key in ["a/b/1", "a/b2", "c"] {
        calls.put(key, "body".into(), Class::Upload).unwrap();
    }
    for (prefix, expected) in [("a/b/", &["a/b/1"][..]), ("a", &["a/b/1", "a/b2"]), ("d", &[])] {
        let listed = calls.list(prefix, Class::Read).unwrap();
        assert_eq!(listed.iter().map(|object| &*object.key).collect::<Vec<_>>(), expected);
    }
}

const DENIED: &str = "<DeleteResult><Error><Key>some/prefix/k0</Key><Code>AccessDenied</Code>\
    <Message>scripted</Message></Error></DeleteResult>";

#[test]
fn an_endpoint_without_encryption_is_known_as_such_unless_it_is_on_this_machine() {
    let exposed = |query: &str, more: &[(&str, &str)]| {
        let variables = [keys(), environment(more)].concat();
        let client =
            open_in(&format!("s3://bucket{query}"), &StoreOptions::default(), &variables).unwrap();
        client.exposed_endpoint().map(str::to_owned)
    };
    for url in
        ["http://127.0.0.1:9000", "http://localhost", "http://[::1]:1", "https://store.example"]
    {
        assert_eq!(exposed(&format!("?endpoint={url}"), &[]), None, "{url}");
    }
    for url in ["http://10.0.0.1:9000", "http://store.example", "http://127.0.0.1.example"] {
        assert_eq!(exposed(&format!("?endpoint={url}"), &[]).as_deref(), Some(url));
        assert_eq!(exposed("", &[("AWS_ENDPOINT_URL", url)]).as_deref(), Some(url));
    }
}

const SLOW_DOWN: Trouble = Refuse(503, "<Error><Code>SlowDown</Code></Error>");

#[test]
fn the_s3_backend_keeps_the_contract() {
    let server = server();
    assert_eq!(conformance::run(&*server.client("bucket", 60)), Vec::<String>::new());
    let requests = &server.world.lock().requests;
    assert!(
        requests.iter().any(|request| request.starts_with("PUT /bucket/some/prefix/conformance/"))
    );
}

#[test]
fn a_store_that_checks_before_the_body_arrives_is_detected() {
    let server = server();
    let client = server.client("bucket", 60);
    let probe = |rounds| probe_conditional_create(&*client, rounds, 8, Bodies::InHalves).unwrap();
    assert!(probe(4).is_honest());
    server.world.lock().looks_first = true;
    let found = probe(20);
    assert_eq!((found.several_winners, found.overwrites), (20, 0), "{found:?}");
    // Sequential puts do not reveal it: that is why the probe races.
    assert_eq!(put(&client, "first").unwrap(), PutOutcome::Created);
    assert_eq!(put(&client, "second").unwrap(), PutOutcome::Taken);
}

#[test]
fn an_answer_lost_on_the_way_is_created_and_is_put_once() {
    let server = server();
    let client = server.client("bucket", 60);
    server.expect(&[Mute, Fine, Mute]);
    assert_eq!(put(&client, "ours").unwrap(), PutOutcome::Created);
    assert_eq!(server.world.lock().objects["some/prefix/k"], b"ours");
    assert_eq!(put(&client, "others").unwrap(), PutOutcome::Taken);
    assert_eq!(client.meter().get.retries, 1);
}

#[test]
fn a_conflict_with_nothing_there_is_put_again() {
    let server = server();
    let client = server.client("bucket", 60);
    server.expect(&[Refuse(409, "<Error><Code>ConditionalRequestConflict</Code></Error>")]);
    assert_eq!(put(&client, "ours").unwrap(), PutOutcome::Created);
    assert_eq!((client.meter().put.requests, client.meter().get.requests), (2, 1));
}

#[test]
fn passing_errors_and_cut_bodies_are_tried_again() {
    let server = server();
    let client = server.client("bucket", 60);
    server.expect(&[SLOW_DOWN, Refuse(500, "oops")]);
    assert_eq!(put(&client, "a longer body").unwrap(), PutOutcome::Created);
    server.expect(&[SLOW_DOWN, Cut, Mute]);
    assert_eq!(get(&client).unwrap(), "a longer body");
    server.expect(&[SLOW_DOWN, Mute, Cut]);
    assert_eq!(Blocking(&*client).list("", Class::Read).unwrap().len(), 1);
    server.expect(&[SLOW_DOWN, Mute]);
    Blocking(&*client).delete(vec!["k".to_owned()], Class::Background).unwrap();
    let meter = client.meter();
    assert_eq!(
        (meter.put.retries, meter.get.retries, meter.list.retries, meter.delete.retries),
        (2, 3, 3, 2)
    );
}

#[test]
fn a_404_that_is_not_the_stores_is_unavailable() {
    let server = server();
    let client = server.client("bucket", 0);
    server.expect(&[Refuse(404, "<html>a proxy knows no such page</html>"), Refuse(404, "")]);
    for _ in 0..2 {
        let error = get(&client).unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Unavailable, "{error}");
    }
    assert_eq!(get(&client).unwrap_err().kind(), StoreErrorKind::NotFound);
}

#[test]
fn a_missing_bucket_and_refused_credentials_are_denied_at_once() {
    let server = server();
    let elsewhere = server.client("elsewhere", 60);
    for error in [get(&elsewhere).unwrap_err(), put(&elsewhere, "x").unwrap_err()] {
        assert_eq!(error.kind(), StoreErrorKind::Denied, "{error}");
        assert!(error.to_string().contains("create the bucket"), "{error}");
    }
    let client = server.client("bucket", 60);
    let denied = Refuse(403, "<Error><Code>AccessDenied</Code></Error>");
    server.expect(&[denied, Refuse(401, "")]);
    assert_eq!(get(&client).unwrap_err().kind(), StoreErrorKind::Denied);
    assert_eq!(put(&client, "x").unwrap_err().kind(), StoreErrorKind::Denied);
    assert_eq!(server.world.lock().requests.len(), 4);
}

#[test]
fn a_store_without_a_server_is_unavailable() {
    // A port that was free a moment ago, and that no process holds.
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let server = Server { world: Arc::default(), port };
    let error = get(&server.client("bucket", 0)).unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unavailable);
    assert!(error.to_string().contains("cannot get k in s3://bucket/some/prefix"), "{error}");
}

#[test]
fn an_endpoint_comes_from_the_url_or_the_variables_and_needs_credentials() {
    let open = |url: &str, pairs: &[(&str, &str)]| {
        open_in(url, &StoreOptions::default(), &environment(pairs)).map(drop)
    };
    let nothing_set = [("HOME", "/nowhere")];
    let error = open("s3://bucket?endpoint=http://127.0.0.1:1", &nothing_set).unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Invalid);
    assert!(error.to_string().contains("set AWS_ACCESS_KEY_ID"), "{error}");
    for name in ["AWS_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"] {
        let endpoint = [(name, "http://127.0.0.1:1"), ("HOME", "/nowhere")];
        assert!(open("s3://bucket", &endpoint).is_err(), "{name}");
    }
    let half = [("AWS_ACCESS_KEY_ID", "key")];
    assert_eq!(open("s3://bucket", &half).unwrap_err().kind(), StoreErrorKind::Invalid);
}

#[test]
fn the_variables_name_the_server_that_is_asked() {
    let server = server();
    let endpoint = format!("http://127.0.0.1:{}", server.port);
    let mut environment = keys();
    environment.push(("AWS_ENDPOINT_URL".to_owned(), endpoint));
    let client = open_in("s3://bucket", &StoreOptions::default(), &environment).unwrap();
    assert_eq!(put(&client, "x").unwrap(), PutOutcome::Created);
    assert_eq!(server.world.lock().requests, ["PUT /bucket/k"]);
}

#[test]
fn google_and_azure_stores_open_with_their_variables() {
    let open = |url: &str, pairs: &[(&str, &str)]| {
        open_in(url, &StoreOptions::default(), &environment(pairs)).map(drop)
    };
    open("gs://bucket/prefix", &[("GOOGLE_SKIP_SIGNATURE", "true")]).unwrap();
    open("gs://bucket?endpoint=http://127.0.0.1:1", &[("GOOGLE_SKIP_SIGNATURE", "true")]).unwrap();
    open("az://container/prefix?account=me", &[("AZURE_STORAGE_ACCOUNT_KEY", "a2V5")]).unwrap();
    let error = open("az://container", &[]).unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Invalid);
    assert!(error.to_string().contains("AZURE_STORAGE_ACCOUNT_NAME"), "{error}");
}
