//! A small NBD client that sends exactly what a test tells it to, valid or invalid.

use std::collections::HashMap;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use sawmill_device::BlockDevice;
use sawmill_frontend::nbd::{Export, Listen, NbdOptions, NbdServer};

pub(crate) const LIST: u32 = 3;
pub(crate) const STARTTLS: u32 = 5;
pub(crate) const INFO: u32 = 6;
pub(crate) const GO: u32 = 7;
pub(crate) const STRUCTURED_REPLY: u32 = 8;
pub(crate) const LIST_META_CONTEXT: u32 = 9;
pub(crate) const SET_META_CONTEXT: u32 = 10;
pub(crate) const EXTENDED_HEADERS: u32 = 11;

pub(crate) const ACK: u32 = 1;
pub(crate) const ERR_UNSUP: u32 = 1 << 31 | 1;
pub(crate) const ERR_INVALID: u32 = 1 << 31 | 3;
pub(crate) const ERR_UNKNOWN: u32 = 1 << 31 | 6;

pub(crate) const READ: u16 = 0;
pub(crate) const WRITE: u16 = 1;
pub(crate) const DISCONNECT: u16 = 2;
pub(crate) const FLUSH: u16 = 3;
pub(crate) const TRIM: u16 = 4;
pub(crate) const CACHE: u16 = 5;
pub(crate) const WRITE_ZEROES: u16 = 6;
pub(crate) const BLOCK_STATUS: u16 = 7;

pub(crate) const FUA: u16 = 1;
pub(crate) const NO_HOLE: u16 = 2;
pub(crate) const DF: u16 = 4;
pub(crate) const REQ_ONE: u16 = 8;
pub(crate) const FAST_ZERO: u16 = 16;
pub(crate) const PAYLOAD_LEN: u16 = 32;

/// A wait that ends this late is a hang, and the test fails.
const HANG: Duration = Duration::from_secs(60);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Style {
    Simple,
    Structured,
    Extended,
}

pub(crate) const STYLES: [Style; 3] = [Style::Simple, Style::Structured, Style::Extended];

/// A server on a socket in a folder of its own.
pub(crate) struct TestServer {
    pub(crate) server: NbdServer,
    pub(crate) path: PathBuf,
    pub(crate) folder: tempfile::TempDir,
}

pub(crate) fn serve_with(
    devices: &[(&str, Arc<dyn BlockDevice>)],
    change: impl FnOnce(&mut NbdOptions),
) -> TestServer {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("nbd.sock");
    let mut options = NbdOptions::new(Listen::Unix(path.clone()));
    change(&mut options);
    let server = NbdServer::start(options).expect("the server starts");
    for (name, device) in devices {
        let export = Export {
            name: (*name).into(),
            description: format!("about {name}"),
            device: device.clone(),
        };
        server.add_export(export).expect("a fresh name");
    }
    TestServer { server, path, folder }
}

pub(crate) fn serve(device: Arc<dyn BlockDevice>) -> TestServer {
    serve_with(&[("disk", device)], |_| ())
}

impl TestServer {
    /// A client in the transmission phase.
    pub(crate) fn client(&self, style: Style) -> Client {
        let mut client = self.raw();
        client.agree(style);
        client.go("disk");
        client
    }

    /// A client that has only exchanged the greeting.
    pub(crate) fn raw(&self) -> Client {
        Client::hello(UnixStream::connect(&self.path).expect("the server listens"), 3)
    }

    /// Waits until this many connections are left.
    pub(crate) fn wait_for_connections(&self, count: u64) {
        wait_until(&format!("{count} connections"), || self.server.metrics().connections == count);
    }
}

pub(crate) use sawmill_testkit::wait_until;

pub(crate) struct Client {
    pub(crate) stream: UnixStream,
    pub(crate) style: Style,
    cookie: u64,
    reads: HashMap<u64, usize>,
}

/// One whole reply.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Answer {
    pub(crate) cookie: u64,
    pub(crate) error: u32,
    pub(crate) text: String,
    pub(crate) data: Vec<u8>,
    /// Length and state of each run.
    pub(crate) runs: Vec<(u64, u64)>,
}

impl Client {
    pub(crate) fn hello(stream: UnixStream, flags: u32) -> Self {
        stream.set_read_timeout(Some(HANG)).expect("a timeout");
        stream.set_write_timeout(Some(HANG)).expect("a timeout");
        let mut client =
            Client { stream, style: Style::Simple, cookie: 100, reads: HashMap::new() };
        let greeting = client.bytes(18);
        assert_eq!(&greeting[..16], b"NBDMAGICIHAVEOPT");
        assert_eq!(&greeting[16..], [0, 3], "fixed newstyle, no zeroes");
        client.send(&flags.to_be_bytes());
        client
    }

    pub(crate) fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).expect("the server takes what is sent");
    }

    pub(crate) fn bytes(&mut self, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        self.stream.read_exact(&mut bytes).expect("the server sends this much");
        bytes
    }

    pub(crate) fn u16(&mut self) -> u16 {
        u16::from_be_bytes(self.bytes(2).try_into().expect("two"))
    }

    pub(crate) fn u32(&mut self) -> u32 {
        u32::from_be_bytes(self.bytes(4).try_into().expect("four"))
    }

    pub(crate) fn u64(&mut self) -> u64 {
        u64::from_be_bytes(self.bytes(8).try_into().expect("eight"))
    }

    /// Fails unless the server has closed the connection without another byte.
    pub(crate) fn expect_closed(&mut self) {
        let mut rest = Vec::new();
        match self.stream.read_to_end(&mut rest) {
            Ok(_) => assert_eq!(rest, [0; 0], "bytes before the end"),
            Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset),
        }
    }

    pub(crate) fn send_option(&mut self, number: u32, data: &[u8]) {
        self.send(&option_bytes(number, data));
    }

    /// The replies to one option, up to the acknowledgment or error.
    pub(crate) fn option_replies(&mut self, number: u32) -> Vec<(u32, Vec<u8>)> {
        let mut replies = Vec::new();
        loop {
            assert_eq!(self.u64(), 0x0003_e889_0455_65a9);
            assert_eq!(self.u32(), number);
            let kind = self.u32();
            let length = self.u32() as usize;
            replies.push((kind, self.bytes(length)));
            if kind == ACK || kind >> 31 == 1 {
                return replies;
            }
        }
    }

    pub(crate) fn option(&mut self, number: u32, data: &[u8]) -> Vec<(u32, Vec<u8>)> {
        self.send_option(number, data);
        self.option_replies(number)
    }

    /// The type of the last reply to an option.
    pub(crate) fn verdict(&mut self, number: u32, data: &[u8]) -> u32 {
        self.option(number, data).last().expect("at least one reply").0
    }

    /// Agrees on the style and, where there can be one, on the context `base:allocation` of `disk`.
    pub(crate) fn agree(&mut self, style: Style) {
        self.style = style;
        let option = match style {
            Style::Simple => return,
            Style::Structured => STRUCTURED_REPLY,
            Style::Extended => EXTENDED_HEADERS,
        };
        assert_eq!(self.verdict(option, b""), ACK);
        assert_eq!(self.verdict(SET_META_CONTEXT, &meta("disk", &["base:allocation"])), ACK);
    }

    pub(crate) fn go(&mut self, name: &str) {
        assert_eq!(self.verdict(GO, &info(name, &[])), ACK);
    }

    /// The bytes of a request's header; the cookie counts up.
    pub(crate) fn header(&mut self, flags: u16, command: u16, offset: u64, length: u64) -> Vec<u8> {
        self.cookie += 1;
        let extended = self.style == Style::Extended;
        let magic: u32 = if extended { 0x21e4_1c71 } else { 0x2560_9513 };
        let mut bytes = magic.to_be_bytes().to_vec();
        bytes.extend(flags.to_be_bytes());
        bytes.extend(command.to_be_bytes());
        bytes.extend(self.cookie.to_be_bytes());
        bytes.extend(offset.to_be_bytes());
        if extended {
            bytes.extend(length.to_be_bytes());
        } else {
            bytes.extend(u32::try_from(length).expect("32 bits").to_be_bytes());
        }
        if command == READ {
            self.reads.insert(self.cookie, length as usize);
        }
        bytes
    }

    /// The cookie of the newest request.
    pub(crate) fn last_cookie(&self) -> u64 {
        self.cookie
    }

    /// Sends a request without waiting; returns its cookie.
    pub(crate) fn request(&mut self, flags: u16, command: u16, offset: u64, length: u64) -> u64 {
        let bytes = self.header(flags, command, offset, length);
        self.send(&bytes);
        self.cookie
    }

    pub(crate) fn write_bytes(&mut self, flags: u16, offset: u64, data: &[u8]) -> Vec<u8> {
        let own = if self.style == Style::Extended { PAYLOAD_LEN } else { 0 };
        let mut bytes = self.header(flags | own, WRITE, offset, data.len() as u64);
        bytes.extend(data);
        bytes
    }

    pub(crate) fn call(&mut self, flags: u16, command: u16, offset: u64, length: u64) -> Answer {
        let cookie = self.request(flags, command, offset, length);
        let answer = self.answer();
        assert_eq!(answer.cookie, cookie);
        answer
    }

    pub(crate) fn write(&mut self, flags: u16, offset: u64, data: &[u8]) -> Answer {
        let bytes = self.write_bytes(flags, offset, data);
        self.send(&bytes);
        self.answer()
    }

    pub(crate) fn write_ok(&mut self, offset: u64, data: &[u8]) {
        let answer = self.write(0, offset, data);
        assert_eq!(answer.error, 0, "{}", answer.text);
    }

    pub(crate) fn read_ok(&mut self, offset: u64, length: u64) -> Vec<u8> {
        let answer = self.call(0, READ, offset, length);
        assert_eq!(answer.error, 0, "{}", answer.text);
        answer.data
    }

    /// Receives one whole reply in the style agreed on.
    pub(crate) fn answer(&mut self) -> Answer {
        let magic = self.u32();
        let mut answer =
            Answer { cookie: 0, error: 0, text: String::new(), data: vec![], runs: vec![] };
        if magic == 0x6744_6698 {
            assert_ne!(self.style, Style::Extended, "a simple reply after extended headers");
            answer.error = self.u32();
            answer.cookie = self.u64();
            if let Some(length) = self.reads.remove(&answer.cookie).filter(|_| answer.error == 0) {
                assert_eq!(self.style, Style::Simple, "a simple reply to a read");
                answer.data = self.bytes(length);
            }
            return answer;
        }
        let extended = self.style == Style::Extended;
        let expected = if extended { 0x6e8a_278c } else { 0x668e_33ef };
        assert_eq!(magic, expected, "magic {magic:#x} in {:?}", self.style);
        assert_eq!(self.u16(), 1, "one chunk, done");
        let kind = self.u16();
        answer.cookie = self.u64();
        let length = if extended {
            self.u64();
            self.u64() as usize
        } else {
            self.u32() as usize
        };
        let payload = self.bytes(length);
        let read_length = self.reads.remove(&answer.cookie);
        match kind {
            0 => assert_eq!(length, 0),
            1 => {
                answer.data = payload[8..].to_vec();
                assert_eq!(Some(answer.data.len()), read_length);
            }
            5 | 6 => {
                assert_eq!(kind == 6, extended);
                let (head, width) = if extended { (8, 16) } else { (4, 8) };
                let number =
                    |bytes: &[u8]| bytes.iter().fold(0, |sum, byte| sum << 8 | u64::from(*byte));
                let run = |run: &[u8]| (number(&run[..width / 2]), number(&run[width / 2..]));
                assert_eq!((length - head) % width, 0);
                answer.runs = payload[head..].chunks(width).map(run).collect();
            }
            0x8001 => {
                answer.error = u32::from_be_bytes(payload[..4].try_into().expect("four"));
                answer.text = String::from_utf8(payload[6..].to_vec()).expect("UTF-8");
                assert_eq!(
                    usize::from(payload[4]) << 8 | usize::from(payload[5]),
                    answer.text.len()
                );
            }
            other => panic!("chunk type {other}"),
        }
        answer
    }
}

pub(crate) fn option_bytes(number: u32, data: &[u8]) -> Vec<u8> {
    let mut bytes = b"IHAVEOPT".to_vec();
    bytes.extend(number.to_be_bytes());
    bytes.extend((data.len() as u32).to_be_bytes());
    bytes.extend(data);
    bytes
}

fn string(text: &str) -> Vec<u8> {
    let mut bytes = (text.len() as u32).to_be_bytes().to_vec();
    bytes.extend(text.as_bytes());
    bytes
}

/// The data of `INFO` and `GO`.
pub(crate) fn info(name: &str, kinds: &[u16]) -> Vec<u8> {
    let mut bytes = string(name);
    bytes.extend((kinds.len() as u16).to_be_bytes());
    bytes.extend(kinds.iter().flat_map(|kind| kind.to_be_bytes()));
    bytes
}

/// The data of `LIST_META_CONTEXT` and `SET_META_CONTEXT`.
pub(crate) fn meta(name: &str, queries: &[&str]) -> Vec<u8> {
    let mut bytes = string(name);
    bytes.extend((queries.len() as u32).to_be_bytes());
    bytes.extend(queries.iter().flat_map(|query| string(query)));
    bytes
}

/// Bytes that depend on their position and a seed.
pub(crate) fn pattern(seed: u64, length: usize) -> Vec<u8> {
    let mix = |at: u64| {
        (at ^ seed.rotate_left(32)).wrapping_add(seed).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    };
    (0..length as u64).map(|at| (mix(at) >> 56) as u8).collect()
}
