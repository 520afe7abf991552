//! Requests in flight and their answers. One thread per connection listens; submitting never waits
//! for an answer, only for room in the socket.
//!
//! Invariant: a listener is called with no lock held, so that it may use the client, or drop it.
//! Not here: the handshake (`handshake`), the bytes of a request (`sawmill_nbd_proto`).

use std::collections::HashMap;
use std::fmt;
use std::io::{self, Write};
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use sawmill_nbd_proto::{
    EXTENDED_REPLY_MAGIC, RequestHeader, SIMPLE_REPLY_MAGIC, STRUCTURED_REPLY_MAGIC, Style,
    command_flag,
};

use super::handshake::{Export, Socket, negotiate};
use super::wire::{Address, read_bytes, read_u16, read_u32, read_u64, violation};

/// What is asked of the server.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(
    missing_docs,
    reason = "the fields say it: where, how much, what bytes, and force unit access"
)]
pub enum Command {
    Read { offset: u64, length: u32 },
    Write { offset: u64, bytes: Vec<u8>, fua: bool },
    Flush,
    Trim { offset: u64, length: u64 },
    WriteZeroes { offset: u64, length: u64 },
    BlockStatus { offset: u64, length: u64 },
}

/// One run of an allocation answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Bytes in the run.
    pub length: u64,
    /// Bit 0: a hole; bit 1: reads as zeroes.
    pub flags: u64,
}

/// A good answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reply {
    /// The bytes of a read.
    pub bytes: Vec<u8>,
    /// The runs of a block status.
    pub extents: Vec<Extent>,
}

/// Why there is no good answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The server answered with this error number.
    Errno(u32),
    /// The connection ended first: whether the request took effect is unknown.
    Gone,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Errno(number) => write!(f, "error {number}"),
            Failure::Gone => f.write_str("the connection ended"),
        }
    }
}

/// The most runs of one allocation answer: a server that sends more does so for ever, and they are
/// all kept.
const EXTENTS_MAX: usize = 1 << 20;

type Listener = Box<dyn FnOnce(Result<Reply, Failure>) + Send>;

struct Waiting {
    offset: u64,
    reply: Reply,
    failure: Option<Failure>,
    listener: Listener,
}

#[derive(Default)]
struct InFlight {
    next_cookie: u64,
    waiting: HashMap<u64, Waiting>,
    gone: bool,
    why_gone: Option<String>,
}

/// A connection. Dropping it breaks the connection off.
pub struct Client {
    export: Export,
    style: Style,
    socket: Mutex<Socket>,
    in_flight: Arc<Mutex<InFlight>>,
    listener: Option<std::thread::JoinHandle<()>>,
    shut: Socket,
}

/// An answer to come.
pub struct Pending(Receiver<Result<Reply, Failure>>);

impl Pending {
    /// Waits for the answer.
    pub fn wait(self) -> Result<Reply, Failure> {
        self.0.recv().unwrap_or(Err(Failure::Gone))
    }
}

impl Client {
    /// Connects and negotiates.
    pub fn connect(uri: &str, style: Style) -> io::Result<Self> {
        let address = Address::parse(uri)?;
        let (Address::Unix(_, name) | Address::Tcp(_, name)) = &address;
        let mut socket = Socket::connect(&address)?;
        let export = negotiate(&mut socket, name, style)?;
        // From here on silence is legal: a server may let a writer wait for as long as its store is
        // away.
        socket.limit(None)?;
        let in_flight = Arc::new(Mutex::new(InFlight::default()));
        let listening =
            Listening { in_flight: Arc::clone(&in_flight), socket: socket.duplicate()?, style };
        let shut = socket.duplicate()?;
        let named = std::thread::Builder::new().name("nbd-client".into());
        let listener = Some(named.spawn(move || listening.run())?);
        Ok(Client { export, style, socket: Mutex::new(socket), in_flight, listener, shut })
    }

    /// What the server said about the export.
    #[must_use]
    pub fn export(&self) -> &Export {
        &self.export
    }

    /// Sends a command; a length that the style has no room for fails here. `listener` hears the
    /// outcome on the listening thread, or here when the connection is gone already.
    pub fn submit_then(
        &self,
        command: &Command,
        listener: impl FnOnce(Result<Reply, Failure>) + Send + 'static,
    ) {
        if is_too_long(command, self.style) {
            return listener(Err(Failure::Errno(OVERFLOW)));
        }
        let mut waiting = Waiting {
            offset: 0,
            reply: Reply::default(),
            failure: None,
            listener: Box::new(listener),
        };
        if let Command::Read { offset, length } = command {
            waiting.offset = *offset;
            waiting.reply.bytes = vec![0; *length as usize];
        }
        let cookie = {
            let mut in_flight = lock(&self.in_flight);
            if in_flight.gone {
                drop(in_flight);
                return (waiting.listener)(Err(Failure::Gone));
            }
            in_flight.next_cookie += 1;
            let cookie = in_flight.next_cookie;
            in_flight.waiting.insert(cookie, waiting);
            cookie
        };
        let message = encode(command, cookie, self.style);
        // A failed send is heard by the listening thread too, which then tells all who wait.
        let mut socket = lock(&self.socket);
        if socket.write_all(&message).is_err() {
            socket.shut();
        }
    }

    /// Sends a command.
    #[must_use]
    pub fn submit(&self, command: &Command) -> Pending {
        let (tell, hear) = sync_channel(1);
        self.submit_then(command, move |outcome| {
            // Nobody may care for the outcome.
            let _ = tell.send(outcome);
        });
        Pending(hear)
    }

    /// Sends a command and waits for its answer.
    pub fn call(&self, command: &Command) -> Result<Reply, Failure> {
        self.submit(command).wait()
    }

    /// Reads.
    pub fn read(&self, offset: u64, length: u32) -> Result<Vec<u8>, Failure> {
        self.call(&Command::Read { offset, length }).map(|reply| reply.bytes)
    }

    /// Writes.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Failure> {
        self.call(&Command::Write { offset, bytes: bytes.to_vec(), fua: false }).map(drop)
    }

    /// Flushes.
    pub fn flush(&self) -> Result<(), Failure> {
        self.call(&Command::Flush).map(drop)
    }

    /// Reads the whole export, several requests at a time.
    pub fn read_all(&self) -> Result<Vec<u8>, Failure> {
        const STEP: u64 = 1 << 20;
        let size = self.export.size_bytes;
        let starts = (0..size).step_by(STEP as usize);
        let asked: Vec<Pending> = starts
            .map(|offset| {
                self.submit(&Command::Read { offset, length: STEP.min(size - offset) as u32 })
            })
            .collect();
        let mut image = Vec::with_capacity(size as usize);
        for pending in asked {
            image.extend(pending.wait()?.bytes);
        }
        Ok(image)
    }

    /// Why the connection ended, once it has: a broken protocol, or what the system said.
    #[must_use]
    pub fn why_gone(&self) -> Option<String> {
        lock(&self.in_flight).why_gone.clone()
    }

    /// Requests sent and not yet answered.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        lock(&self.in_flight).waiting.len()
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.shut.shut();
        // An answer on the listening thread may be what drops this client: no thread can wait for
        // itself.
        let own = std::thread::current().id();
        if let Some(listener) =
            self.listener.take().filter(|listener| listener.thread().id() != own)
        {
            let _ = listener.join();
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The error number of a length that is too large.
const OVERFLOW: u32 = 75;

/// Whether a command's length needs extended headers that there are none of.
fn is_too_long(command: &Command, style: Style) -> bool {
    let length = match command {
        Command::Read { length, .. } => u64::from(*length),
        Command::Write { bytes, .. } => bytes.len() as u64,
        Command::Flush => 0,
        Command::Trim { length, .. }
        | Command::WriteZeroes { length, .. }
        | Command::BlockStatus { length, .. } => *length,
    };
    style != Style::Extended && length > u64::from(u32::MAX)
}

fn encode(command: &Command, cookie: u64, style: Style) -> Vec<u8> {
    use sawmill_nbd_proto::Command as Kind;
    let (kind, fua, offset, length, bytes): (Kind, bool, u64, u64, &[u8]) = match command {
        Command::Read { offset, length } => (Kind::Read, false, *offset, u64::from(*length), &[]),
        Command::Write { offset, bytes, fua } => {
            (Kind::Write, *fua, *offset, bytes.len() as u64, bytes)
        }
        Command::Flush => (Kind::Flush, false, 0, 0, &[]),
        Command::Trim { offset, length } => (Kind::Trim, false, *offset, *length, &[]),
        Command::WriteZeroes { offset, length } => {
            (Kind::WriteZeroes, false, *offset, *length, &[])
        }
        Command::BlockStatus { offset, length } => {
            (Kind::BlockStatus, false, *offset, *length, &[])
        }
    };
    let is_extended = style == Style::Extended;
    let mut flags = if fua { command_flag::FUA } else { 0 };
    if is_extended && kind == Kind::Write {
        flags |= command_flag::PAYLOAD_LEN;
    }
    let mut message =
        RequestHeader { flags, command: kind as u16, cookie, offset, length }.encode(style);
    message.extend_from_slice(bytes);
    message
}

/// The listening side of a connection.
struct Listening {
    in_flight: Arc<Mutex<InFlight>>,
    socket: Socket,
    style: Style,
}

impl Listening {
    fn run(mut self) {
        let why = loop {
            if let Err(why) = self.hear() {
                break why;
            }
        };
        self.socket.shut();
        let left: Vec<Waiting> = {
            let mut in_flight = lock(&self.in_flight);
            in_flight.gone = true;
            in_flight.why_gone = Some(why.to_string());
            in_flight.waiting.drain().map(|(_, waiting)| waiting).collect()
        };
        for waiting in left {
            (waiting.listener)(Err(Failure::Gone));
        }
    }

    fn hear(&mut self) -> io::Result<()> {
        match read_u32(&mut self.socket)? {
            SIMPLE_REPLY_MAGIC => self.hear_simple(),
            STRUCTURED_REPLY_MAGIC if self.style == Style::Structured => {
                let (flags, kind) = (read_u16(&mut self.socket)?, read_u16(&mut self.socket)?);
                let cookie = read_u64(&mut self.socket)?;
                let length = u64::from(read_u32(&mut self.socket)?);
                let payload = self.payload(cookie, length)?;
                self.chunk(flags, kind, cookie, &payload)
            }
            EXTENDED_REPLY_MAGIC if self.style == Style::Extended => {
                let (flags, kind) = (read_u16(&mut self.socket)?, read_u16(&mut self.socket)?);
                let cookie = read_u64(&mut self.socket)?;
                let _offset = read_u64(&mut self.socket)?;
                let length = read_u64(&mut self.socket)?;
                let payload = self.payload(cookie, length)?;
                self.chunk(flags, kind, cookie, &payload)
            }
            other => Err(violation(format!(
                "a reply with magic {other:#x} in the {:?} dialect",
                self.style
            ))),
        }
    }

    /// A chunk's payload: no longer than what was asked for, or than any text or list of runs may
    /// be.
    fn payload(&mut self, cookie: u64, length: u64) -> io::Result<Vec<u8>> {
        const REST_BYTES_MAX: u64 = 4 << 20;
        let asked = self.asked_bytes(cookie);
        if length > asked as u64 + REST_BYTES_MAX {
            return Err(violation(format!(
                "a chunk of {length} bytes in the answer to a request of {asked}"
            )));
        }
        read_bytes(&mut self.socket, length as usize)
    }

    /// How many bytes the request wants; 0 if it is no read, or not in flight.
    fn asked_bytes(&self, cookie: u64) -> usize {
        let in_flight = lock(&self.in_flight);
        in_flight.waiting.get(&cookie).map_or(0, |waiting| waiting.reply.bytes.len())
    }

    fn hear_simple(&mut self) -> io::Result<()> {
        let error = read_u32(&mut self.socket)?;
        let cookie = read_u64(&mut self.socket)?;
        let count = self.asked_bytes(cookie);
        if error == 0 && count > 0 && self.style != Style::Simple {
            return Err(violation(
                "a read was answered with a simple reply after structured replies",
            ));
        }
        let bytes = read_bytes(&mut self.socket, if error == 0 { count } else { 0 })?;
        // Only now: whoever waits hears of it too if the connection ends amid the bytes.
        let mut waiting = self.take(cookie)?;
        waiting.reply.bytes = bytes;
        if error != 0 {
            waiting.failure = Some(Failure::Errno(error));
        }
        finish(waiting);
        Ok(())
    }

    fn chunk(&mut self, flags: u16, kind: u16, cookie: u64, payload: &[u8]) -> io::Result<()> {
        let mut waiting = self.take(cookie)?;
        let noted = note_chunk(&mut waiting, kind, payload);
        if noted.is_ok() && flags & 1 == 1 {
            finish(waiting);
        } else {
            // After an error the connection ends, and all that wait hear of that.
            lock(&self.in_flight).waiting.insert(cookie, waiting);
        }
        noted
    }

    fn take(&self, cookie: u64) -> io::Result<Waiting> {
        let waiting = lock(&self.in_flight).waiting.remove(&cookie);
        waiting.ok_or_else(|| {
            violation(format!("an answer to a request that is not in flight: {cookie}"))
        })
    }
}

fn finish(waiting: Waiting) {
    let Waiting { reply, failure, listener, .. } = waiting;
    listener(failure.map_or(Ok(reply), Err));
}

fn note_chunk(waiting: &mut Waiting, kind: u16, mut payload: &[u8]) -> io::Result<()> {
    match kind {
        0 => {}
        1 => {
            let offset = read_u64(&mut payload)?;
            let (from, bytes) = (offset.wrapping_sub(waiting.offset) as usize, payload);
            let place = from
                .checked_add(bytes.len())
                .and_then(|end| waiting.reply.bytes.get_mut(from..end));
            place
                .ok_or_else(|| violation("data outside what was asked for"))?
                .copy_from_slice(bytes);
        }
        2 => {
            let offset = read_u64(&mut payload)?;
            let length = read_u32(&mut payload)? as usize;
            let from = offset.wrapping_sub(waiting.offset) as usize;
            let place =
                from.checked_add(length).and_then(|end| waiting.reply.bytes.get_mut(from..end));
            place.ok_or_else(|| violation("a hole outside what was asked for"))?.fill(0);
        }
        5 => {
            let _context = read_u32(&mut payload)?;
            while !payload.is_empty() {
                let length = u64::from(read_u32(&mut payload)?);
                let flags = u64::from(read_u32(&mut payload)?);
                note_extent(waiting, Extent { length, flags })?;
            }
        }
        6 => {
            let _context = read_u32(&mut payload)?;
            let count = read_u32(&mut payload)?;
            for _ in 0..count {
                let (length, flags) = (read_u64(&mut payload)?, read_u64(&mut payload)?);
                note_extent(waiting, Extent { length, flags })?;
            }
        }
        0x8001 | 0x8002 => waiting.failure = Some(Failure::Errno(read_u32(&mut payload)?)),
        other => return Err(violation(format!("a chunk of unknown type {other:#x}"))),
    }
    Ok(())
}

fn note_extent(waiting: &mut Waiting, extent: Extent) -> io::Result<()> {
    if waiting.reply.extents.len() == EXTENTS_MAX {
        return Err(violation(format!("an answer of more than {EXTENTS_MAX} extents")));
    }
    waiting.reply.extents.push(extent);
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn a_length_that_the_style_has_no_room_for_is_never_sent_short() {
        let trim = Command::Trim { offset: 0, length: (4 << 30) + 4096 };
        assert!(is_too_long(&trim, Style::Simple) && is_too_long(&trim, Style::Structured));
        assert!(!is_too_long(&trim, Style::Extended));
        let bytes = encode(&trim, 1, Style::Extended);
        assert_eq!(bytes[24..], ((4u64 << 30) + 4096).to_be_bytes());
    }

    /// Whether the listener of a read of 8 bytes hears that the connection ended amid this answer.
    fn hears_the_end(style: Style, answer: &[u8]) -> bool {
        let (near, mut far) = UnixStream::pair().expect("a pair of sockets");
        let (tell, hear) = sync_channel(1);
        let listener: Listener = Box::new(move |outcome| drop(tell.send(outcome.map(drop))));
        let reply = Reply { bytes: vec![0; 8], ..Reply::default() };
        let waiting = Waiting { offset: 0, reply, failure: None, listener };
        let in_flight = InFlight { waiting: HashMap::from([(1, waiting)]), ..InFlight::default() };
        let in_flight = Arc::new(Mutex::new(in_flight));
        far.write_all(answer).expect("it fits");
        drop(far);
        Listening { in_flight, socket: Socket::Unix(near), style }.run();
        matches!(hear.recv(), Ok(Err(Failure::Gone)))
    }

    #[test]
    fn a_request_hears_of_a_connection_that_ends_amid_its_answer() {
        let simple = [&SIMPLE_REPLY_MAGIC.to_be_bytes()[..], &[0; 4], &1u64.to_be_bytes()].concat();
        assert!(hears_the_end(Style::Simple, &[&simple[..], &[7; 3]].concat()), "half the bytes");
        assert!(hears_the_end(Style::Structured, &simple), "an answer of the wrong kind");
        let head = [&STRUCTURED_REPLY_MAGIC.to_be_bytes()[..], &[0, 1, 0x40, 0]].concat();
        let chunk = [&head[..], &1u64.to_be_bytes(), &[0; 4]].concat();
        assert!(hears_the_end(Style::Structured, &chunk), "a chunk of an unknown type");
    }

    #[test]
    fn extents_without_end_are_a_violation_and_take_no_more_memory() {
        let listener: Listener = Box::new(|_| ());
        let mut waiting = Waiting { offset: 0, reply: Reply::default(), failure: None, listener };
        let mut payload = vec![0; 4];
        (0..1 << 16).for_each(|_| payload.extend([0, 0, 0, 1, 0, 0, 0, 0]));
        let noted = (0..1000).map(|_| note_chunk(&mut waiting, 5, &payload)).find(Result::is_err);
        assert!(noted.expect("it has an end").unwrap_err().to_string().contains("extents"));
        assert_eq!(waiting.reply.extents.len(), EXTENTS_MAX);
    }
}
