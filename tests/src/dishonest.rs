//! A small S3 server that lies as some real ones do: it checks whether a key is free when the head
//! of a put arrives, and creates the object when the body is complete. Sequential puts are safe; of
//! racing conditional puts, several may win.
//!
//! Not here: signatures (all are accepted), buckets (the first part of a path is one), paging, and
//! anything else that `sawmill` does not use.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

type Objects = Mutex<BTreeMap<String, Vec<u8>>>;

/// The server. Its threads end with the test program.
#[derive(Debug)]
pub struct Dishonest {
    address: SocketAddr,
}

impl Dishonest {
    /// Starts a server with nothing in it on a free port of the loopback.
    #[must_use]
    pub fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("the loopback has a free port");
        let address = listener.local_addr().expect("a bound socket has an address");
        let objects = Arc::new(Objects::default());
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let objects = Arc::clone(&objects);
                std::thread::spawn(move || while answer_one(&objects, &stream).is_some() {});
            }
        });
        Dishonest { address }
    }

    /// Where it listens.
    #[must_use]
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }
}

struct Request {
    method: String,
    /// Bucket and key, without the query.
    path: String,
    query: String,
    headers: BTreeMap<String, String>,
}

struct Answer {
    status: u16,
    headers: String,
    body: Vec<u8>,
}

fn answer(status: u16, body: impl Into<Vec<u8>>) -> Answer {
    Answer { status, headers: String::new(), body: body.into() }
}

fn refusal(status: u16, code: &str) -> Answer {
    answer(status, format!("<Error><Code>{code}</Code><Message>no</Message></Error>"))
}

/// Answers one request; `None` if the client has closed.
fn answer_one(objects: &Objects, mut stream: &TcpStream) -> Option<()> {
    let mut reader = BufReader::new(stream);
    let request = read_head(&mut reader)?;
    // The check that comes too early.
    let was_free =
        !objects.lock().expect("no thread panics with this lock").contains_key(&request.path);
    let length = request.headers.get("content-length").and_then(|length| length.parse().ok());
    let mut body = vec![0; length.unwrap_or(0)];
    reader.read_exact(&mut body).ok()?;
    let answer = perform(objects, &request, body, was_free);
    let head = format!(
        "HTTP/1.1 {} Said\r\nContent-Length: {}\r\nETag: \"e\"\r\n\
         Last-Modified: Mon, 01 Jan 2024 00:00:00 GMT\r\n{}\r\n",
        answer.status,
        answer.body.len(),
        answer.headers
    );
    stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(&answer.body)).ok()
}

fn read_head(reader: &mut impl BufRead) -> Option<Request> {
    let mut line = String::new();
    reader.read_line(&mut line).ok()?;
    let mut words = line.split_whitespace();
    let (method, target) = (words.next()?.to_owned(), words.next()?);
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let mut request = Request {
        method,
        path: path.to_owned(),
        query: query.to_owned(),
        headers: BTreeMap::new(),
    };
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        let Some((name, value)) = line.trim_end().split_once(": ") else { return Some(request) };
        request.headers.insert(name.to_ascii_lowercase(), value.to_owned());
    }
}

fn perform(objects: &Objects, request: &Request, body: Vec<u8>, was_free: bool) -> Answer {
    let mut objects = objects.lock().expect("no thread panics with this lock");
    let in_bucket = request.path.trim_start_matches('/').contains('/');
    match request.method.as_str() {
        "PUT" if !was_free && request.headers.contains_key("if-none-match") => {
            refusal(412, "PreconditionFailed")
        }
        "PUT" => {
            objects.insert(request.path.clone(), body);
            answer(200, "")
        }
        "POST" => delete(&mut objects, &request.path, &String::from_utf8_lossy(&body)),
        "GET" if !in_bucket => list(&objects, &request.path, &request.query),
        "GET" => match objects.get(&request.path) {
            Some(found) => part_of(found, request.headers.get("range")),
            None => refusal(404, "NoSuchKey"),
        },
        _ => refusal(405, "MethodNotAllowed"),
    }
}

fn delete(objects: &mut BTreeMap<String, Vec<u8>>, bucket: &str, body: &str) -> Answer {
    let keys = body.split("<Key>").skip(1).filter_map(|part| part.split_once("</Key>"));
    let deleted = keys.map(|(key, _)| {
        objects.remove(&format!("{bucket}/{key}"));
        format!("<Deleted><Key>{key}</Key></Deleted>")
    });
    answer(200, format!("<DeleteResult>{}</DeleteResult>", deleted.collect::<String>()))
}

fn list(objects: &BTreeMap<String, Vec<u8>>, bucket: &str, query: &str) -> Answer {
    let prefix = query.split('&').find_map(|pair| pair.strip_prefix("prefix=")).unwrap_or_default();
    let below = format!("{bucket}/{}", prefix.replace("%2F", "/"));
    let found = objects.iter().filter(|(key, _)| key.starts_with(&below)).map(|(key, body)| {
        let key = key[bucket.len()..].trim_start_matches('/');
        format!(
            "<Contents><Key>{key}</Key><LastModified>2024-01-01T00:00:00.000Z</LastModified>\
             <Size>{}</Size></Contents>",
            body.len()
        )
    });
    answer(200, format!("<ListBucketResult>{}</ListBucketResult>", found.collect::<String>()))
}

fn part_of(body: &[u8], range: Option<&String>) -> Answer {
    let Some(range) = range else { return answer(200, body) };
    let bounds = range.strip_prefix("bytes=").and_then(|range| range.split_once('-'));
    let bounds = bounds.and_then(|(start, end)| Some((start.parse().ok()?, end.parse().ok()?)));
    match bounds {
        Some((start, end)) if start < body.len() && start <= end => {
            let end: usize = body.len().min(end + 1);
            let headers = format!("Content-Range: bytes {start}-{}/{}\r\n", end - 1, body.len());
            Answer { headers, ..answer(206, &body[start..end]) }
        }
        _ => refusal(416, "InvalidRange"),
    }
}
