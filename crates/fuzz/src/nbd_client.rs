//! Passes an NBD server's bytes to the client: a handshake, a list of exports, answers to requests.
//!
//! Invariants: whatever the server sends, each request has one outcome, no thread of the client
//! panics, and every result was sent: the size and flags of an export, the names of a list, each
//! byte of a read, each run of a block status, each error. The client understands a server that
//! follows the protocol in full.
//!
//! Not here: the server (`nbd`), and a client whose network fails (`crates/nbd-client`).

use std::io::{self, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixListener;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, channel, sync_channel};
use std::time::Duration;

use sawmill_nbd_client::{Client, Command, Export, Extent, Failure, Reply, Style, list};
use sawmill_nbd_proto::{
    BASE_ALLOCATION, EXTENDED_REPLY_MAGIC, GREETING_MAGIC, OPTION_MAGIC, OPTION_REPLY_MAGIC,
    Reader, SIMPLE_REPLY_MAGIC, STRUCTURED_REPLY_MAGIC, chunk, info, option, push_option_reply,
    reply,
};

use crate::nbd::{no_thread_panicked, watch_for_panics};

/// A wait that ends this late is a hang.
const HANG: Duration = Duration::from_secs(60);
const GREETING_BYTES: usize = 18;
const REPLY_HEAD_BYTES: usize = 20;

struct TestListener {
    listener: UnixListener,
    uri: String,
    _folder: tempfile::TempDir,
}

thread_local! {
    static LISTENING: TestListener = {
        watch_for_panics();
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("server.sock");
        let listener = UnixListener::bind(&path).expect("a socket");
        let uri = format!("nbd+unix:///disk?socket={}", path.display());
        TestListener { listener, uri, _folder: folder }
    };
}

/// Runs a client against a server that sends `first` when the client connects, `then` when the
/// client's sender is used or dropped, and nothing more.
fn served<T>(first: &[u8], then: &[u8], client: impl FnOnce(&str, SyncSender<()>) -> T) -> T {
    let outcome = LISTENING.with(|listening| {
        std::thread::scope(|scope| {
            let (go, receiver) = sync_channel(1);
            scope.spawn(move || send_bytes(&listening.listener, [first, then], &receiver));
            client(&listening.uri, go)
        })
    });
    no_thread_panicked();
    outcome
}

fn send_bytes(listener: &UnixListener, output: [&[u8]; 2], go: &Receiver<()>) {
    let (mut stream, _) = listener.accept().expect("the client comes");
    // The client may have received enough at any time and closed.
    let _ = stream.write_all(output[0]);
    // An answer before its request would rightly be taken for a violation.
    let _ = go.recv();
    let _ = stream.write_all(output[1]);
    let _ = stream.shutdown(Shutdown::Write);
    let _ = io::copy(&mut stream, &mut io::sink());
}

/// The first byte chooses the style of the rest, and the request that it answers.
pub(crate) fn run(bytes: &[u8]) {
    let Some((&choice, output)) = bytes.split_first() else { return };
    let style = [Style::Simple, Style::Structured, Style::Extended][usize::from(choice) % 3];
    match choice >> 6 {
        0 => handshake(style, output),
        1 => names(output),
        _ => {
            answers(style, output);
            answers(style, &mended_answers(style, output));
            legal_answers(style, output);
        }
    }
}

/// An export that the client accepts can be encoded again.
fn handshake(style: Style, output: &[u8]) {
    let options: &[u32] = match style {
        Style::Simple => &[option::GO],
        Style::Structured => &[option::STRUCTURED_REPLY, option::SET_META_CONTEXT, option::GO],
        Style::Extended => &[option::EXTENDED_HEADERS, option::SET_META_CONTEXT, option::GO],
    };
    let connect = |output: &[u8]| {
        served(output, &[], |uri, go| {
            drop(go);
            Client::connect(uri, style).map(|client| client.export().clone())
        })
    };
    for output in [output.to_vec(), mended_options(output, options)] {
        let Ok(export) = connect(&output) else { continue };
        assert!(style != Style::Simple || export.allocation_context.is_none());
        let again = connect(&opening(style, &export)).expect("all is agreed on");
        assert_eq!(again, export, "it is the same when it is said again");
    }
}

/// Names of exports that the client accepts can be encoded again.
fn names(output: &[u8]) {
    let receiver = |output: &[u8]| {
        served(output, &[], |uri, go| {
            drop(go);
            list(uri)
        })
    };
    for output in [output.to_vec(), mended_options(output, &[option::LIST])] {
        let Ok(names) = receiver(&output) else { continue };
        // A byte that is not UTF-8 becomes three.
        assert!(names.iter().map(String::len).sum::<usize>() <= 3 * output.len());
        let mut again = greeting();
        for name in &names {
            let data = [&(name.len() as u32).to_be_bytes()[..], name.as_bytes()].concat();
            push_option_reply(&mut again, option::LIST, reply::SERVER, &data);
        }
        push_option_reply(&mut again, option::LIST, reply::ACK, &[]);
        let again = receiver(&again);
        // A name of bytes that are not UTF-8 may have become too long for a reply.
        let is_short = names.iter().all(|name| name.len() < 60 << 10);
        assert!(!is_short || again.is_ok_and(|again| again == names), "the same, said again");
    }
}

/// A greeting in front, and replies to the client's requests, one option after the other.
fn mended_options(output: &[u8], options: &[u32]) -> Vec<u8> {
    let mut output = output.to_vec();
    output.resize(output.len().max(GREETING_BYTES), 0);
    output[..16].copy_from_slice(&greeting()[..16]);
    output[17] |= 1;
    let (mut at, mut options) = (GREETING_BYTES, options.iter().copied().peekable());
    while let (Some(option), Some(head)) =
        (options.peek(), output.get_mut(at..at + REPLY_HEAD_BYTES))
    {
        head[..8].copy_from_slice(&OPTION_REPLY_MAGIC.to_be_bytes());
        head[8..12].copy_from_slice(&option.to_be_bytes());
        let kind = u32::from_be_bytes([head[12], head[13], head[14], head[15]]);
        let length = u32::from_be_bytes([head[16], head[17], head[18], head[19]]) as usize;
        let is_last = kind == reply::ACK || kind >= 1 << 31;
        at += REPLY_HEAD_BYTES;
        let length = length.min(output.len() - at);
        output[at - 4..at].copy_from_slice(&(length as u32).to_be_bytes());
        at += length;
        if is_last {
            options.next();
        }
    }
    output
}

fn greeting() -> Vec<u8> {
    [&GREETING_MAGIC.to_be_bytes()[..], &OPTION_MAGIC.to_be_bytes(), &[0, 3]].concat()
}

/// The server's part of a handshake that agrees on this export.
fn opening(style: Style, export: &Export) -> Vec<u8> {
    let mut output = greeting();
    let header_option = match style {
        Style::Simple => None,
        Style::Structured => Some(option::STRUCTURED_REPLY),
        Style::Extended => Some(option::EXTENDED_HEADERS),
    };
    if let Some(header_option) = header_option {
        push_option_reply(&mut output, header_option, reply::ACK, &[]);
        if let Some(context) = export.allocation_context {
            let data = [&context.to_be_bytes()[..], BASE_ALLOCATION.as_bytes()].concat();
            push_option_reply(&mut output, option::SET_META_CONTEXT, reply::META_CONTEXT, &data);
        }
        push_option_reply(&mut output, option::SET_META_CONTEXT, reply::ACK, &[]);
    }
    let size = [
        &info::EXPORT.to_be_bytes()[..],
        &export.size_bytes.to_be_bytes(),
        &export.flags.to_be_bytes(),
    ];
    let blocks = [export.block_bytes_min, export.block_bytes_preferred, export.block_bytes_max];
    let blocks = blocks.map(u32::to_be_bytes).concat();
    let blocks = [&info::BLOCK_SIZE.to_be_bytes()[..], &blocks];
    push_option_reply(&mut output, option::GO, reply::INFO, &size.concat());
    push_option_reply(&mut output, option::GO, reply::INFO, &blocks.concat());
    push_option_reply(&mut output, option::GO, reply::ACK, &[]);
    output
}

/// The requests before the server answers anything; the cookie of each is its index, from 1.
fn requests() -> [Command; 7] {
    [
        Command::Read { offset: 0, length: 512 },
        Command::Write { offset: 512, bytes: vec![7; 16], fua: true },
        Command::Read { offset: 1 << 40, length: 1500 },
        Command::Flush,
        Command::Trim { offset: 4096, length: 4096, fua: true },
        Command::WriteZeroes { offset: 8192, length: 1 << 20, fua: false, no_hole: true },
        Command::BlockStatus { offset: 0, length: 1 << 30 },
    ]
}

fn requested_bytes(command: &Command) -> usize {
    if let Command::Read { length, .. } = command { *length as usize } else { 0 }
}

type Outcome = Result<Reply, Failure>;

/// The outcomes of the requests if the server sends `output` once all of them are sent.
fn outcomes(style: Style, output: &[u8]) -> Vec<Outcome> {
    let context = (style != Style::Simple).then_some(1);
    let export = Export { size_bytes: 1 << 41, allocation_context: context, ..Export::default() };
    let results = served(&opening(style, &export), output, |uri, go| {
        let client = Client::connect(uri, style).expect("all is agreed on");
        assert_eq!(*client.export(), export);
        let (sender, receiver) = channel();
        for (place, command) in requests().iter().enumerate() {
            let sender = sender.clone();
            client.submit_then(command, move |outcome| {
                // A failed check has ended the receiver.
                let _ = sender.send((place, outcome));
            });
        }
        // Without the sender, the server goes on. Without this copy, the receiver ends with the
        // last listener.
        drop((sender, go));
        let mut results: [Option<Outcome>; 7] = Default::default();
        loop {
            match receiver.recv_timeout(HANG) {
                Ok((place, outcome)) => {
                    assert!(results[place].replace(outcome).is_none(), "a request has one outcome");
                }
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => panic!("a request is never heard of"),
            }
        }
        assert_eq!(client.in_flight(), 0);
        results
    });
    results.into_iter().map(|outcome| outcome.expect("a request has an outcome")).collect()
}

/// The client's result of an answer is what the server sent.
fn answers(style: Style, output: &[u8]) {
    let server_replies = decoded(style, output);
    for (outcome, server_reply) in outcomes(style, output).into_iter().zip(server_replies) {
        match outcome {
            Ok(reply) => {
                assert!(
                    server_reply.is_done && server_reply.errno.is_none(),
                    "a good answer that was not given"
                );
                let bytes: Option<Vec<u8>> = server_reply.bytes.into_iter().collect();
                assert_eq!(Some(reply.bytes), bytes, "each byte was said");
                assert_eq!(reply.extents, server_reply.extents);
            }
            Err(Failure::Errno(errno)) => {
                assert_eq!((server_reply.is_done, server_reply.errno), (true, Some(errno)));
            }
            Err(Failure::Gone) => {}
        }
    }
}

/// What the server sent about one request, valid or not.
#[derive(Clone)]
struct ServerReply {
    bytes: Vec<Option<u8>>,
    extents: Vec<Extent>,
    errno: Option<u32>,
    is_done: bool,
}

/// The server's bytes, decoded as far as they are valid.
fn decoded(style: Style, output: &[u8]) -> Vec<ServerReply> {
    let nothing = |command: &Command| ServerReply {
        bytes: vec![None; requested_bytes(command)],
        extents: Vec::new(),
        errno: None,
        is_done: false,
    };
    let mut replies: Vec<ServerReply> = requests().iter().map(nothing).collect();
    let mut rest = Reader(output);
    while listen(style, &mut rest, &mut replies).is_some() {}
    replies
}

/// Reads one reply or chunk; none where the bytes end or are invalid.
fn listen(style: Style, rest: &mut Reader<'_>, replies: &mut [ServerReply]) -> Option<()> {
    let is_extended = match rest.u32()? {
        SIMPLE_REPLY_MAGIC => {
            let (errno, cookie) = (rest.u32()?, rest.u64()?);
            let server_reply = of(replies, cookie).filter(|server_reply| !server_reply.is_done)?;
            if errno != 0 {
                server_reply.errno = Some(errno);
            } else {
                let bytes = rest.take(server_reply.bytes.len())?;
                server_reply.bytes = bytes.iter().copied().map(Some).collect();
            }
            server_reply.is_done = true;
            return Some(());
        }
        STRUCTURED_REPLY_MAGIC if style == Style::Structured => false,
        EXTENDED_REPLY_MAGIC if style == Style::Extended => true,
        _ => return None,
    };
    let (flags, kind, cookie) = (rest.u16()?, rest.u16()?, rest.u64()?);
    let length = if is_extended {
        rest.u64()?;
        rest.u64()?
    } else {
        u64::from(rest.u32()?)
    };
    let payload = rest.take(usize::try_from(length).ok()?)?;
    let place = cookie.checked_sub(1)?;
    let server_reply = of(replies, cookie).filter(|server_reply| !server_reply.is_done)?;
    note(server_reply, requests().get(place as usize)?, kind, payload)?;
    server_reply.is_done = flags & chunk::DONE != 0;
    Some(())
}

fn of(replies: &mut [ServerReply], cookie: u64) -> Option<&mut ServerReply> {
    replies.get_mut(usize::try_from(cookie.checked_sub(1)?).ok()?)
}

fn note(reply: &mut ServerReply, command: &Command, kind: u16, payload: &[u8]) -> Option<()> {
    let mut payload = Reader(payload);
    match kind {
        chunk::NONE => {}
        chunk::OFFSET_DATA | chunk::OFFSET_HOLE => {
            let Command::Read { offset, .. } = command else { return Some(()) };
            let from = usize::try_from(payload.u64()?.checked_sub(*offset)?).ok()?;
            let bytes = match kind {
                chunk::OFFSET_DATA => payload.0.iter().copied().map(Some).collect(),
                _ => vec![Some(0); (payload.u32()? as usize).min(reply.bytes.len() + 1)],
            };
            reply.bytes.get_mut(from..from.checked_add(bytes.len())?)?.copy_from_slice(&bytes);
        }
        chunk::BLOCK_STATUS => {
            payload.u32()?;
            while let (Some(length), Some(flags)) = (payload.u32(), payload.u32()) {
                reply.extents.push(Extent { length: length.into(), flags: flags.into() });
            }
        }
        chunk::BLOCK_STATUS_EXT => {
            payload.u32()?;
            for _ in 0..payload.u32()? {
                reply.extents.push(Extent { length: payload.u64()?, flags: payload.u64()? });
            }
        }
        _ => reply.errno = Some(payload.u32()?),
    }
    Some(())
}

/// The style's magic where a reply begins, the cookie of a request, and a length that is available.
fn mended_answers(style: Style, output: &[u8]) -> Vec<u8> {
    let (magic, head_bytes, cookie_at) = match style {
        Style::Simple => (SIMPLE_REPLY_MAGIC, 16, 8),
        Style::Structured => (STRUCTURED_REPLY_MAGIC, 20, 8),
        Style::Extended => (EXTENDED_REPLY_MAGIC, 32, 8),
    };
    let (mut output, mut at) = (output.to_vec(), 0);
    while let Some(head) = output.get_mut(at..at + head_bytes) {
        head[..4].copy_from_slice(&magic.to_be_bytes());
        let cookie = 1 + head[cookie_at + 7].wrapping_sub(1) % requests().len() as u8;
        head[cookie_at..cookie_at + 8].copy_from_slice(&u64::from(cookie).to_be_bytes());
        let is_error = head[4..8] != [0; 4];
        let length = &mut head[head_bytes - 4..];
        let long = u32::from_be_bytes([length[0], length[1], length[2], length[3]]) as usize;
        at += head_bytes;
        if style == Style::Simple {
            let bytes = requested_bytes(&requests()[usize::from(cookie) - 1]);
            at += if is_error { 0 } else { bytes };
            continue;
        }
        let long = long.min(output.len() - at);
        output[at - 4..at].copy_from_slice(&(long as u32).to_be_bytes());
        if style == Style::Extended {
            output[at - 8..at - 4].fill(0);
        }
        at += long;
    }
    output
}

/// A correct server that follows `choices`: the client understands all of its answers.
fn legal_answers(style: Style, choices: &[u8]) {
    let mut server = ValidServer { style, choices, output: Vec::new() };
    let requests = requests();
    let mut expected: Vec<Option<Outcome>> = vec![None; requests.len()];
    let first = server.choose(requests.len());
    for place in (first..requests.len()).chain(0..first) {
        expected[place] = Some(server.answer(place as u64 + 1, &requests[place]));
    }
    let expected: Vec<Outcome> = expected.into_iter().flatten().collect();
    assert_eq!(outcomes(style, &server.output), expected, "the answers of a valid server are read");
}

/// A server that keeps the protocol; the input makes its choices.
struct ValidServer<'a> {
    style: Style,
    choices: &'a [u8],
    output: Vec<u8>,
}

impl ValidServer<'_> {
    /// A number below `below`; 0 when no choices are left.
    fn choose(&mut self, below: usize) -> usize {
        let Some((choice, rest)) = self.choices.split_first_chunk() else { return 0 };
        self.choices = rest;
        usize::from(u16::from_le_bytes(*choice)) % below
    }

    /// Answers a request; returns the outcome that the client must report.
    fn answer(&mut self, cookie: u64, command: &Command) -> Outcome {
        if self.choose(8) == 7 {
            let errno = 1 + self.choose(200) as u32;
            match self.style {
                Style::Simple => self.simple(errno, cookie, &[]),
                _ => {
                    let data = [&errno.to_be_bytes()[..], &[0, 3], b"why"].concat();
                    self.chunk(chunk::DONE, chunk::ERROR, cookie, &data);
                }
            }
            return Err(Failure::Errno(errno));
        }
        let mut reply = Reply::default();
        match command {
            Command::Read { offset, length } => {
                reply.bytes = self.bytes(cookie, *offset, *length as usize);
            }
            Command::BlockStatus { .. } if self.style != Style::Simple => {
                reply.extents = self.extents(cookie);
            }
            _ if self.style == Style::Extended => {
                self.chunk(chunk::DONE, chunk::NONE, cookie, &[]);
            }
            _ => self.simple(0, cookie, &[]),
        }
        Ok(reply)
    }

    fn simple(&mut self, errno: u32, cookie: u64, bytes: &[u8]) {
        self.output.extend(SIMPLE_REPLY_MAGIC.to_be_bytes());
        self.output.extend(errno.to_be_bytes());
        self.output.extend(cookie.to_be_bytes());
        self.output.extend(bytes);
    }

    fn chunk(&mut self, flags: u16, kind: u16, cookie: u64, payload: &[u8]) {
        let is_extended = self.style == Style::Extended;
        let magic = if is_extended { EXTENDED_REPLY_MAGIC } else { STRUCTURED_REPLY_MAGIC };
        self.output.extend(magic.to_be_bytes());
        self.output.extend(flags.to_be_bytes());
        self.output.extend(kind.to_be_bytes());
        self.output.extend(cookie.to_be_bytes());
        if is_extended {
            self.output.extend([0; 12]);
        }
        self.output.extend((payload.len() as u32).to_be_bytes());
        self.output.extend(payload);
    }

    /// The bytes of a read, in pieces from the end or from the front; some of them holes.
    fn bytes(&mut self, cookie: u64, offset: u64, length: usize) -> Vec<u8> {
        let mut bytes: Vec<u8> = (0..length).map(|place| place as u8 | 1).collect();
        if self.style == Style::Simple {
            self.simple(0, cookie, &bytes);
            return bytes;
        }
        let (middle, is_backwards) = (self.choose(length + 1), self.choose(2) == 1);
        let mut pieces = [(0, middle), (middle, length)];
        if is_backwards {
            pieces.reverse();
        }
        for (from, end) in pieces {
            let place = (offset + from as u64).to_be_bytes();
            if self.choose(3) == 2 {
                bytes[from..end].fill(0);
                let data = [&place[..], &((end - from) as u32).to_be_bytes()].concat();
                self.chunk(0, chunk::OFFSET_HOLE, cookie, &data);
            } else {
                let data = [&place[..], &bytes[from..end]].concat();
                self.chunk(0, chunk::OFFSET_DATA, cookie, &data);
            }
        }
        self.chunk(chunk::DONE, chunk::NONE, cookie, &[]);
        bytes
    }

    fn extents(&mut self, cookie: u64) -> Vec<Extent> {
        let count = 1 + self.choose(20);
        let extents: Vec<Extent> = (0..count)
            .map(|_| Extent { length: 512 * (1 + self.choose(256) as u64), flags: 3 })
            .collect();
        let mut data = 1u32.to_be_bytes().to_vec();
        if self.style == Style::Extended {
            data.extend((count as u32).to_be_bytes());
        }
        for extent in &extents {
            let numbers = [extent.length, extent.flags];
            match self.style {
                Style::Extended => data.extend(numbers.map(u64::to_be_bytes).concat()),
                _ => data.extend(numbers.map(|number| (number as u32).to_be_bytes()).concat()),
            }
        }
        let kind = match self.style {
            Style::Extended => chunk::BLOCK_STATUS_EXT,
            _ => chunk::BLOCK_STATUS,
        };
        self.chunk(chunk::DONE, kind, cookie, &data);
        extents
    }
}
