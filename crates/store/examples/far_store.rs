//! A store far away, for `bench/cold.py`: an S3 server over a folder that answers late, and a
//! client that shows what it carries.
//!
//!     far_store serve FOLDER --delay-ms 20 [--bytes-per-s 300000000]
//!     far_store read s3://bucket/PREFIX?endpoint=URL --bytes 1048576 --at-once 32
//!
//! The folder is a bucket: `FOLDER/KEY` is the object of that key. The server prints the port that
//! it listens at. Each request is answered after the delay, and the bodies of all answers share the
//! rate, which models the link. The client gets every object below `PREFIX` in ranges of that many
//! bytes, so many at once, and prints what it carried as one line of JSON.
//!
//! Invariant: a request waits for no other, except for its turn at the rate.
//!
//! Not here: faults, signatures, the time that a connection takes to open, durability.

use std::collections::{HashMap, VecDeque};
use std::error::Error;
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use sawmill_store::{Blocking, Class, Get, ObjectStore, StoreOptions, open};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Bytes of a body that are sent at one turn.
const PIECE_BYTES: u64 = 64 << 10;
const WHEN: &str = "Last-Modified: Mon, 01 Jan 2024 00:00:00 GMT\r\nETag: \"e\"\r\n";

fn main() -> Result<()> {
    let mut words = std::env::args().skip(1);
    let (command, place) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let mut options = HashMap::new();
    while let Some(name) = words.next() {
        options.insert(name, words.next().unwrap_or_default().parse()?);
    }
    let of = |name: &str, usual: u64| options.get(name).copied().unwrap_or(usual);
    match command.as_str() {
        "serve" => serve(Path::new(&place), of("--delay-ms", 0), of("--bytes-per-s", 0)),
        "read" => read(&place, of("--bytes", 1 << 20), of("--at-once", 32)),
        _ => Err("far_store serve FOLDER | read URL; its source says more".into()),
    }
}

/// What all connections share.
struct FarStore {
    folder: PathBuf,
    delay: Duration,
    /// 0: as fast as it goes.
    bytes_per_s: u64,
    /// When the link is free again.
    free_at: Mutex<Instant>,
}

struct Request {
    method: String,
    /// Decoded, without the bucket.
    key: String,
    query: String,
    headers: HashMap<String, String>,
    body: Vec<u8>,
}

fn serve(folder: &Path, delay_ms: u64, bytes_per_s: u64) -> Result<()> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    println!("port {}", listener.local_addr()?.port());
    let (delay, free_at) = (Duration::from_millis(delay_ms), Mutex::new(Instant::now()));
    let store = Arc::new(FarStore { folder: folder.to_owned(), delay, bytes_per_s, free_at });
    for stream in listener.incoming() {
        let (stream, store) = (stream?, Arc::clone(&store));
        stream.set_nodelay(true)?;
        // A client that goes away ends its connection.
        thread::spawn(move || store.connection(&stream));
    }
    Ok(())
}

impl FarStore {
    fn connection(&self, stream: &TcpStream) -> io::Result<()> {
        let mut reader = BufReader::new(stream);
        while let Some(request) = receive(&mut reader)? {
            thread::sleep(self.delay);
            match (request.method.as_str(), request.key.is_empty()) {
                ("GET", true) => self.list(stream, &request.query)?,
                ("GET", false) => self.get(stream, &request)?,
                ("PUT", false) => self.put(stream, &request)?,
                ("POST", true) => self.delete(stream, &request)?,
                _ => refuse(stream, 405, "MethodNotAllowed")?,
            }
        }
        Ok(())
    }

    fn get(&self, mut stream: &TcpStream, request: &Request) -> io::Result<()> {
        let Some(mut file) = self.object(&request.key) else {
            return refuse(stream, 404, "NoSuchKey");
        };
        let size_bytes = file.metadata()?.len();
        let range = request.headers.get("range").and_then(|range| {
            let (start, end) = range.strip_prefix("bytes=")?.split_once('-')?;
            Some(start.parse::<u64>().ok()?..end.parse::<u64>().ok()? + 1)
        });
        let (status, range) = match range {
            None => (200, 0..size_bytes),
            Some(range) if range.start >= size_bytes => {
                return refuse(stream, 416, "InvalidRange");
            }
            Some(range) => (206, range.start..range.end.min(size_bytes)),
        };
        let length = range.end - range.start;
        let part = match status {
            206 => {
                format!("Content-Range: bytes {}-{}/{size_bytes}\r\n", range.start, range.end - 1)
            }
            _ => String::new(),
        };
        let head = format!("HTTP/1.1 {status} OK\r\nContent-Length: {length}\r\n{WHEN}{part}\r\n");
        stream.write_all(head.as_bytes())?;
        file.seek(SeekFrom::Start(range.start))?;
        let mut left = length;
        while left > 0 {
            let piece = left.min(if self.bytes_per_s > 0 { PIECE_BYTES } else { left });
            self.take_turn(piece);
            // From file to socket inside the kernel.
            io::copy(&mut Read::by_ref(&mut file).take(piece), &mut stream)?;
            left -= piece;
        }
        Ok(())
    }

    /// Waits until the link has carried so many bytes.
    fn take_turn(&self, bytes: u64) {
        if self.bytes_per_s == 0 {
            return;
        }
        let takes = Duration::from_secs_f64(bytes as f64 / self.bytes_per_s as f64);
        let done_at = {
            let mut free_at = self.free_at.lock().unwrap_or_else(PoisonError::into_inner);
            *free_at = (*free_at).max(Instant::now()) + takes;
            *free_at
        };
        thread::sleep(done_at.saturating_duration_since(Instant::now()));
    }

    fn put(&self, stream: &TcpStream, request: &Request) -> io::Result<()> {
        let Some(path) = self.path(&request.key) else { return refuse(stream, 400, "InvalidKey") };
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent)?;
        }
        match File::options().write(true).create_new(true).open(&path) {
            Ok(mut file) => {
                file.write_all(&request.body)?;
                answer(stream, 200, "")
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                refuse(stream, 412, "PreconditionFailed")
            }
            Err(_) => refuse(stream, 500, "InternalError"),
        }
    }

    fn delete(&self, stream: &TcpStream, request: &Request) -> io::Result<()> {
        let text = String::from_utf8_lossy(&request.body);
        let keys =
            text.split("<Key>").skip(1).filter_map(|part| Some(part.split_once("</Key>")?.0));
        let mut deleted = String::new();
        for key in keys {
            if let Some(path) = self.path(key) {
                let _ = fs::remove_file(path);
            }
            deleted += &format!("<Deleted><Key>{key}</Key></Deleted>");
        }
        answer(stream, 200, &format!("<DeleteResult>{deleted}</DeleteResult>"))
    }

    fn list(&self, stream: &TcpStream, query: &str) -> io::Result<()> {
        let prefix = query.split('&').find_map(|pair| pair.strip_prefix("prefix="));
        let prefix = decoded(prefix.unwrap_or_default());
        let mut entries = String::new();
        let mut folders = VecDeque::from([self.folder.join(prefix.trim_end_matches('/'))]);
        while let Some(folder) = folders.pop_front() {
            for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
                let (path, about) = (entry.path(), entry.metadata()?);
                if about.is_dir() {
                    folders.push_back(path);
                } else if let Ok(key) = path.strip_prefix(&self.folder) {
                    entries += &format!(
                        "<Contents><Key>{}</Key><LastModified>2024-01-01T00:00:00.000Z\
                         </LastModified><Size>{}</Size></Contents>",
                        key.display(),
                        about.len()
                    );
                }
            }
        }
        answer(stream, 200, &format!("<ListBucketResult>{entries}</ListBucketResult>"))
    }

    /// Where the object of a key lies, unless that is outside the folder.
    fn path(&self, key: &str) -> Option<PathBuf> {
        let is_inside = !key.split('/').any(|part| part == ".." || part.is_empty());
        is_inside.then(|| self.folder.join(key))
    }

    fn object(&self, key: &str) -> Option<File> {
        let file = File::open(self.path(key)?).ok()?;
        file.metadata().is_ok_and(|about| about.is_file()).then_some(file)
    }
}

/// The next request of a connection; `None` at its end.
fn receive(reader: &mut impl BufRead) -> io::Result<Option<Request>> {
    let mut line = String::new();
    if reader.read_line(&mut line)? == 0 {
        return Ok(None);
    }
    let mut words = line.split_whitespace();
    let (method, target) = (words.next().unwrap_or(""), words.next().unwrap_or(""));
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let key = path.trim_start_matches('/').split_once('/').map_or("", |(_bucket, key)| key);
    let (method, key, query) = (method.to_owned(), decoded(key), query.to_owned());
    let mut headers = HashMap::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line)?;
        let Some((name, value)) = line.trim_end().split_once(": ") else { break };
        headers.insert(name.to_ascii_lowercase(), value.to_owned());
    }
    let length = headers.get("content-length").and_then(|length| length.parse().ok()).unwrap_or(0);
    let mut body = vec![0; length];
    reader.read_exact(&mut body)?;
    Ok(Some(Request { method, key, query, headers, body }))
}

/// Undoes the percent signs of a URL.
fn decoded(text: &str) -> String {
    let mut parts = text.split('%');
    let mut bytes = parts.next().unwrap_or_default().as_bytes().to_vec();
    for part in parts {
        let code = part.get(..2).and_then(|digits| u8::from_str_radix(digits, 16).ok());
        bytes.extend(code);
        bytes.extend(part.as_bytes().iter().skip(2));
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

fn refuse(stream: &TcpStream, status: u16, code: &str) -> io::Result<()> {
    answer(stream, status, &format!("<Error><Code>{code}</Code><Message>no</Message></Error>"))
}

fn answer(mut stream: &TcpStream, status: u16, body: &str) -> io::Result<()> {
    let length = body.len();
    let head = format!("HTTP/1.1 {status} Said\r\nContent-Length: {length}\r\n{WHEN}\r\n{body}");
    stream.write_all(head.as_bytes())
}

/// Gets every object below the URL's prefix, in ranges, and reports the rate.
fn read(url: &str, bytes: u64, at_once: u64) -> Result<()> {
    let client = open(url, StoreOptions::default())?;
    let objects = Blocking(&*client).list("", Class::Read)?;
    let mut gets = Vec::new();
    for object in objects.iter().filter(|object| object.size_bytes >= bytes) {
        for start in (0..object.size_bytes).step_by(bytes as usize) {
            let range = start..(start + bytes).min(object.size_bytes);
            let (key, bytes_max) = (object.key.clone(), bytes);
            gets.push(Get { key, range: Some(range), bytes_max, class: Class::Read, raise: None });
        }
    }
    let (sender, receiver) = sync_channel(at_once as usize);
    let (begun, mut carried, mut in_flight) = (Instant::now(), 0, 0);
    let mut gets = gets.into_iter();
    loop {
        while in_flight < at_once {
            let Some(get) = gets.next() else { break };
            let sender = sender.clone();
            // The receiver is there until every answer has come.
            client.get(get, Box::new(move |outcome| drop(sender.send(outcome))));
            in_flight += 1;
        }
        if in_flight == 0 {
            break;
        }
        carried += receiver.recv()??.len() as u64;
        in_flight -= 1;
    }
    let took_s = begun.elapsed().as_secs_f64();
    println!("{{\"bytes\": {carried}, \"took_s\": {took_s:.4}}}");
    Ok(())
}
