//! A store's answers to the client of S3, Google Cloud Storage and Azure.
//!
//! Invariants: a get returns the body of the answer, and never more than was asked for; a list
//! returns keys below its prefix only; a create has succeeded only if the answer is a success. A
//! message is one short line, and an object is missing only if the answer says so.
//!
//! Not here: retries, which the client above does; encryption; an answer that leads to another
//! server.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use sawmill_store::fuzzing::{self, OneAttempt};
use sawmill_store::{StoreError, check_key};

/// The most bytes that a get accepts here.
const GET_BYTES_MAX: u64 = 4096;
const RANGE_BYTES: u64 = 100;
const STATUSES: [u16; 16] =
    [200, 206, 204, 202, 400, 401, 403, 404, 405, 409, 412, 416, 429, 500, 501, 503];
/// An answer to every request after the first.
const NOT_AGAIN: &[u8] =
    b"HTTP/1.1 500 Not Again\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";

/// A server that gives one answer to the first request, whatever it is.
struct Server {
    next: Arc<Mutex<Option<Vec<u8>>>>,
    stores: [OneAttempt; 3],
}

impl Server {
    fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = listener.local_addr().expect("a port").port();
        let next = Arc::new(Mutex::new(None));
        let answers = Arc::clone(&next);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let answers = Arc::clone(&answers);
                std::thread::spawn(move || serve(&answers, stream));
            }
        });
        let endpoint = format!("endpoint=http://127.0.0.1:{port}");
        let store = |url: &str, variables: &[(&str, &str)]| {
            let owned = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
            let variables: Vec<_> = variables.iter().map(owned).collect();
            OneAttempt::new(&format!("{url}{endpoint}"), &variables)
                .expect("its settings are right")
        };
        let account = r#"{"private_key": "key", "private_key_id": "id", "client_email": "me",
            "disable_oauth": true}"#;
        let stores = [
            store(
                "s3://bucket/some/prefix?",
                &[("AWS_ACCESS_KEY_ID", "key"), ("AWS_SECRET_ACCESS_KEY", "secret")],
            ),
            store("gs://bucket/some/prefix?", &[("GOOGLE_SERVICE_ACCOUNT_KEY", account)]),
            store("az://bucket/some/prefix?account=me&", &[("AZURE_STORAGE_ACCOUNT_KEY", "a2V5")]),
        ];
        Server { next, stores }
    }
}

/// Reads one request and answers it. A client that leaves needs no answer.
fn serve(answers: &Mutex<Option<Vec<u8>>>, mut stream: TcpStream) {
    let mut reader = BufReader::new(&stream);
    let mut body_bytes = 0;
    loop {
        let mut line = String::new();
        if !reader.read_line(&mut line).is_ok_and(|bytes| bytes > 0) {
            return;
        }
        let line = line.trim_end().to_ascii_lowercase();
        if let Some(length) = line.strip_prefix("content-length: ") {
            body_bytes = length.parse().unwrap_or(0);
        }
        if line.is_empty() {
            break;
        }
    }
    if reader.read_exact(&mut vec![0; body_bytes]).is_err() {
        return;
    }
    let answer = answers.lock().expect("no thread panics with it").take();
    let _ = stream.write_all(answer.as_deref().unwrap_or(NOT_AGAIN));
}

thread_local! {
    static SERVER: Server = Server::start();
}

/// Bits 0 and 1 of the first byte choose the kind of store, bits 2 to 4 the call; with the highest
/// bit, the rest is the whole answer. Otherwise the second byte chooses the status, and the rest is
/// the body.
pub(crate) fn run(bytes: &[u8]) {
    let [choice, status, body @ ..] = bytes else { return };
    explanation(*choice, body);
    let is_raw = choice & 0x80 != 0;
    let leads_elsewhere = |line: &[u8]| line.to_ascii_lowercase().starts_with(b"location");
    if is_raw && body.windows(8).any(leads_elsewhere) {
        return;
    }
    let (store, call) = (usize::from(choice & 3) % 3, choice >> 2 & 7);
    if (store, call) == (0, 7) && names_another_key(body) {
        return;
    }
    let status = STATUSES[usize::from(*status) % STATUSES.len()];
    let answer = if is_raw { body.to_vec() } else { answer(status, body) };
    let given = (!is_raw).then_some((status, body));
    SERVER.with(|server| {
        *server.next.lock().expect("no thread panics with it") = Some(answer);
        make_call(&server.stores[store], call, given);
    });
}

/// Whether S3's answer to a delete may name a key that was not in the request. The protocol crate
/// panics then, and the client reports that its task has ended.
fn names_another_key(body: &[u8]) -> bool {
    let text = String::from_utf8_lossy(body);
    let keys = ["a/key", "b/key"].map(|key| format!("<Key>some/prefix/{key}</Key>"));
    text.replace(&keys[0], "").replace(&keys[1], "").contains("Key")
}

fn answer(status: u16, body: &[u8]) -> Vec<u8> {
    let range = match status {
        206 => format!("Content-Range: bytes 0-{}/{}\r\n", body.len().max(1) - 1, body.len()),
        _ => String::new(),
    };
    let head = format!(
        "HTTP/1.1 {status} Answer\r\nContent-Length: {}\r\nConnection: close\r\nETag: \"e\"\r\n\
         Last-Modified: Mon, 01 Jan 2024 00:00:00 GMT\r\n{range}\
         Content-Type: multipart/mixed; boundary=edge\r\n\r\n",
        body.len()
    );
    [head.as_bytes(), body].concat()
}

/// Makes one call. `given`: the status and the body of the answer, if it is well-formed.
fn make_call(store: &OneAttempt, call: u8, given: Option<(u16, &[u8])>) {
    let is_success = given.is_none_or(|(status, _)| (200..300).contains(&status));
    let failure = match call {
        0..=2 => {
            let range = (call == 1).then_some(0..RANGE_BYTES);
            let bytes_max = range.as_ref().map_or(GET_BYTES_MAX, |range| range.end);
            store.get("a/key", range, GET_BYTES_MAX).map(|bytes| {
                assert!(is_success && bytes.len() as u64 <= bytes_max, "no more than asked for");
                assert!(given.is_none_or(|(_, body)| bytes == body), "the body of the answer");
            })
        }
        3..=5 => store.list("a/prefix").map(|objects| {
            assert!(is_success, "a refusal lists nothing");
            for object in objects {
                assert!(check_key(&object.key).is_ok(), "{}", object.key);
                assert!(object.key.starts_with("a/prefix/"), "{}", object.key);
            }
        }),
        6 => store.create("a/key", b"body").map(|is_created| {
            assert!(!is_created || is_success, "a refusal creates nothing");
        }),
        _ => store.delete(&["a/key".to_owned(), "b/key".to_owned()]),
    };
    if let Err(error) = failure {
        one_short_line(&error);
    }
}

fn one_short_line(error: &StoreError) {
    let message = error.to_string();
    assert!(message.len() < 1000 && !message.contains(char::is_control), "{message:?}");
}

/// The body as the text of an error of the protocol crate.
fn explanation(choice: u8, body: &[u8]) {
    one_short_line(&fuzzing::explanation(choice, &String::from_utf8_lossy(body)));
}
