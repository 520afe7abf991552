//! A client's bytes to the NBD server over a memory device.
//!
//! Invariants: the connection ends or answers: every request that arrives complete is answered
//! exactly once, whatever else the client sends, and no thread of the server panics.
//!
//! Not here: what a request does to the device; a server that was handed over (`hand_over`).

use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Once};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, Shutdown, recv, send, shutdown};
use sawmill_device::MemoryDevice;
use sawmill_frontend::nbd::{Export, Listen, NbdOptions, NbdServer};

/// Small, so that many whole reads of it cost little.
const DEVICE_BYTES: u64 = 64 << 10;
/// A wait that ends this late is a hang.
const HANG: Timespec = Timespec { tv_sec: 60, tv_nsec: 0 };
/// Bytes of the server's answers that are checked.
const KEPT_BYTES: usize = 4 << 20;

const GREETING_BYTES: usize = 18;
const OPTION_REPLY: u64 = 0x0003_e889_0455_65a9;
const ACK: u32 = 1;
const GO: u32 = 7;
const DISCONNECT: u16 = 2;
const WRITE: u16 = 1;
const READ: u16 = 0;
const PAYLOAD_LEN: u16 = 1 << 5;
/// A refused payload beyond this closes the connection.
const DRAIN_BYTES_MAX: u64 = 64 << 20;

struct TestServer {
    server: NbdServer,
    path: PathBuf,
    _folder: tempfile::TempDir,
}

thread_local! {
    static SERVED: TestServer = {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("nbd.sock");
        let options = NbdOptions::new(Listen::Unix(path.clone()));
        let server = NbdServer::start(options).expect("the server starts");
        TestServer { server, path, _folder: folder }
    };
}

/// Whether a thread of a server has panicked. A panic of the fuzzing thread ends the run itself.
pub(crate) static PANICKED: AtomicBool = AtomicBool::new(false);

/// Fails when a thread of a server panicked since this was first called.
pub(super) fn no_thread_panicked() {
    watch_for_panics();
    assert!(!PANICKED.load(Ordering::SeqCst), "a thread of the server panicked");
}

pub(crate) fn watch_for_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            let servers = ["nbd-", "vhost-", "driver"];
            let ours = |name: &str| servers.iter().any(|server| name.starts_with(server));
            if std::thread::current().name().is_some_and(ours) {
                PANICKED.store(true, Ordering::SeqCst);
            }
            before(panic);
        }));
    });
}

/// Sends `bytes` to a server with a fresh device, closes the sending side, and returns what the
/// server sent.
fn converse(bytes: &[u8]) -> Vec<u8> {
    watch_for_panics();
    SERVED.with(|served| {
        let device = Arc::new(MemoryDevice::new(DEVICE_BYTES));
        let export = Export { name: "disk".into(), description: "of the fuzzer".into(), device };
        served.server.add_export(export).expect("the name is free");
        let stream = UnixStream::connect(&served.path).expect("the server listens");
        let output = exchange(&stream, bytes);
        drop(stream);
        served.server.remove_export("disk").expect("it was added");
        no_thread_panicked();
        output
    })
}

/// Sends and receives, whichever is possible, until the server has closed.
pub(crate) fn exchange(stream: &UnixStream, mut bytes: &[u8]) -> Vec<u8> {
    stream.set_nonblocking(true).expect("a socket");
    let (mut output, mut sending) = (Vec::new(), true);
    let mut space = vec![0; 64 << 10];
    loop {
        if sending && bytes.is_empty() {
            // The server may have closed already.
            let _ = shutdown(stream, Shutdown::Write);
            sending = false;
        }
        // Both ways: a server may wait for its replies to be read before it takes more.
        let interest = if sending { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
        let mut descriptors = [PollFd::new(stream, interest)];
        match poll(&mut descriptors, Some(&HANG)) {
            // A fuzzer has its own alarms.
            Err(Errno::INTR) => continue,
            ready => assert!(ready.expect("poll works") > 0, "the server neither answers nor ends"),
        }
        match recv(stream, &mut space[..], RecvFlags::DONTWAIT) {
            Ok((_, 0)) | Err(Errno::CONNRESET) => return output,
            Ok((_, length)) => {
                // The rest is received and dropped: a server that cannot send would be taken for
                // one that hangs.
                let kept_bytes = length.min(KEPT_BYTES - output.len());
                output.extend_from_slice(&space[..kept_bytes]);
            }
            Err(Errno::AGAIN | Errno::INTR) => {}
            Err(error) => panic!("receiving failed: {error}"),
        }
        if sending {
            match send(stream, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Ok(length) => bytes = &bytes[length..],
                Err(Errno::AGAIN | Errno::INTR) => {}
                // The server has closed; what it sent before is still to be received.
                Err(_) => sending = false,
            }
        }
    }
}

/// A number at the front of `bytes`, which is taken off.
fn take<const N: usize>(bytes: &mut &[u8]) -> Option<[u8; N]> {
    let (head, rest) = bytes.split_first_chunk()?;
    *bytes = rest;
    Some(*head)
}

fn skip(bytes: &mut &[u8], length: u64) -> Option<()> {
    *bytes = bytes.get(usize::try_from(length).ok()?..)?;
    Some(())
}

/// Skips the greeting and the replies to options; `None` when the client never got to send
/// requests.
fn after_go<'a>(output: &'a [u8]) -> Option<&'a [u8]> {
    let mut rest: &'a [u8] = output.get(GREETING_BYTES..)?;
    loop {
        let magic = u64::from_be_bytes(take(&mut rest)?);
        assert_eq!(magic, OPTION_REPLY, "a reply to an option begins with its magic");
        let option = u32::from_be_bytes(take(&mut rest)?);
        let kind = u32::from_be_bytes(take(&mut rest)?);
        let length = u32::from_be_bytes(take(&mut rest)?);
        skip(&mut rest, length.into())?;
        if (option, kind) == (GO, ACK) {
            return Some(rest);
        }
    }
}

/// The client's first bytes of a handshake, and any bytes after them.
pub(crate) fn handshake(bytes: &[u8]) {
    let output = converse(bytes);
    assert!(output.len() >= GREETING_BYTES && output.starts_with(b"NBDMAGICIHAVEOPT"));
    let mended = mended_options(bytes);
    if mended != bytes {
        let output = converse(&mended);
        assert!(output.len() >= GREETING_BYTES && output.starts_with(b"NBDMAGICIHAVEOPT"));
    }
}

/// Known flags in front, and the magic where options begin.
fn mended_options(bytes: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    bytes.resize(bytes.len().max(4), 0);
    bytes[..4].copy_from_slice(&3u32.to_be_bytes());
    let mut at = 4;
    while let Some(head) = bytes.get_mut(at..at + 16) {
        head[..8].copy_from_slice(b"IHAVEOPT");
        let length = u32::from_be_bytes([head[12], head[13], head[14], head[15]]);
        at = at.saturating_add(16).saturating_add(length as usize);
    }
    bytes
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Style {
    Simple,
    Structured,
    Extended,
}

fn option(number: u32, data: &[u8]) -> Vec<u8> {
    [b"IHAVEOPT", &number.to_be_bytes()[..], &(data.len() as u32).to_be_bytes(), data].concat()
}

/// What a correct client sends before its first request.
fn opening(style: Style, block_status: bool) -> Vec<u8> {
    let mut bytes = 3u32.to_be_bytes().to_vec();
    match style {
        Style::Simple => {}
        Style::Structured => bytes.extend(option(8, b"")),
        Style::Extended => bytes.extend(option(11, b"")),
    }
    if block_status {
        bytes.extend(option(10, b"\0\0\0\x04disk\0\0\0\x01\0\0\0\x0fbase:allocation"));
    }
    bytes.extend(option(GO, b"\0\0\0\x04disk\0\0"));
    bytes
}

/// A byte that chooses the style of replies, then requests.
pub(crate) fn transmission(bytes: &[u8]) {
    let Some((&choice, requests)) = bytes.split_first() else { return };
    let style = [Style::Simple, Style::Structured, Style::Extended][usize::from(choice) % 3];
    let opening = opening(style, choice & 0x80 == 0);
    let output = converse(&[&opening, requests].concat());
    assert!(after_go(&output).is_some(), "the opening is agreed on");
    let mut requests = requests.to_vec();
    let request_list = mend_requests(style, &mut requests);
    let output = converse(&[opening, requests].concat());
    let replies = after_go(&output).expect("the opening is agreed on");
    if output.len() < KEPT_BYTES {
        let answered = answers(style, replies, &request_list.whole);
        assert!(answered.len() <= request_list.whole.len());
        assert!(
            request_list.is_broken || answered.len() == request_list.whole.len(),
            "a whole request got no answer"
        );
    }
}

/// The requests to a server.
#[derive(Default)]
struct RequestList {
    /// Command and length of each request that arrives complete; its cookie is its index.
    whole: Vec<(u16, u64)>,
    /// A payload is beyond every limit.
    is_broken: bool,
}

/// Gives each request its magic and its number as the cookie.
fn mend_requests(style: Style, bytes: &mut [u8]) -> RequestList {
    let (magic, head_bytes) = match style {
        Style::Extended => (0x21e4_1c71u32, 32),
        _ => (0x2560_9513, 28),
    };
    let (mut request_list, mut at) = (RequestList::default(), 0);
    while let Some(head) = bytes.get_mut(at..at + head_bytes) {
        head[..4].copy_from_slice(&magic.to_be_bytes());
        head[8..16].copy_from_slice(&(request_list.whole.len() as u64).to_be_bytes());
        let flags = u16::from_be_bytes([head[4], head[5]]);
        let command = u16::from_be_bytes([head[6], head[7]]);
        // 32 bits, or 64 in the extended style.
        let length = head[24..].iter().fold(0, |number, byte| number << 8 | u64::from(*byte));
        if command == DISCONNECT {
            break;
        }
        let follows =
            if style == Style::Extended { flags & PAYLOAD_LEN != 0 } else { command == WRITE };
        let payload_bytes = if follows { length } else { 0 };
        request_list.is_broken |= payload_bytes > DRAIN_BYTES_MAX;
        at += head_bytes;
        if payload_bytes > (bytes.len() - at) as u64 {
            break;
        }
        at += payload_bytes as usize;
        request_list.whole.push((command, length));
    }
    request_list
}

/// The cookies answered, each once. A reply may be cut only where the connection broke.
fn answers(style: Style, mut replies: &[u8], requests: &[(u16, u64)]) -> Vec<u64> {
    let mut answered = Vec::new();
    while let Some(cookie) = answer(style, &mut replies, requests) {
        assert!((cookie as usize) < requests.len(), "an answer to no request");
        assert!(!answered.contains(&cookie), "two answers to one request");
        answered.push(cookie);
    }
    answered
}

/// Takes one whole reply off; every reply of this server has one chunk.
fn answer(style: Style, replies: &mut &[u8], requests: &[(u16, u64)]) -> Option<u64> {
    let magic = u32::from_be_bytes(take(replies)?);
    match magic {
        0x6744_6698 if style != Style::Extended => {
            let errno = u32::from_be_bytes(take(replies)?);
            let cookie = u64::from_be_bytes(take(replies)?);
            let data = match requests.get(cookie as usize) {
                Some((READ, length)) if style == Style::Simple && errno == 0 => *length,
                _ => 0,
            };
            skip(replies, data)?;
            Some(cookie)
        }
        0x668e_33ef if style == Style::Structured => {
            let _flags_and_kind: [u8; 4] = take(replies)?;
            let cookie = u64::from_be_bytes(take(replies)?);
            let length = u32::from_be_bytes(take(replies)?);
            skip(replies, length.into())?;
            Some(cookie)
        }
        0x6e8a_278c if style == Style::Extended => {
            let _flags_and_kind: [u8; 4] = take(replies)?;
            let cookie = u64::from_be_bytes(take(replies)?);
            let _offset: [u8; 8] = take(replies)?;
            let length = u64::from_be_bytes(take(replies)?);
            skip(replies, length)?;
            Some(cookie)
        }
        other => panic!("a reply begins with {other:#010x}"),
    }
}
