//! Requests in flight and their answers. One thread per connection receives; submitting never waits
//! for an answer, only for room in the socket.
//!
//! Invariant: each request has one outcome, also when the connection ends amid its answer.
//!
//! Not here: what an answer may hold (`answer`), the handshake (`handshake`).

use std::collections::HashMap;
use std::io::{self, Write};
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use sawmill_nbd_proto::{
    EXTENDED_REPLY_MAGIC, SIMPLE_REPLY_MAGIC, STRUCTURED_REPLY_MAGIC, Style, chunk,
};

use super::answer::{Answer, Failure, Reply};
use super::handshake::{Export, Socket, negotiate};
use super::request::{Command, OVERFLOW, encode, is_too_long};
use super::wire::{Address, read_bytes, read_u16, read_u32, read_u64, violation};

type Listener = Box<dyn FnOnce(Result<Reply, Failure>) + Send>;

struct PendingRequest {
    answer: Answer,
    listener: Listener,
}

#[derive(Default)]
struct InFlight {
    next_cookie: u64,
    /// Bounded by nothing here: each caller limits the requests that it submits at once.
    waiting: HashMap<u64, PendingRequest>,
    is_gone: bool,
    why_gone: Option<Arc<io::Error>>,
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
pub struct PendingReply(Receiver<Result<Reply, Failure>>);

impl PendingReply {
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
        Client::over(socket, export, style)
    }

    /// Takes a socket over after the negotiation.
    fn over(socket: Socket, export: Export, style: Style) -> io::Result<Self> {
        // From here on silence is legal: a server may let a writer wait for as long as its store is
        // unreachable.
        socket.limit(None)?;
        let in_flight = Arc::new(Mutex::new(InFlight::default()));
        let listening =
            ReplyReader { in_flight: Arc::clone(&in_flight), socket: socket.duplicate()?, style };
        // A handle of its own: the sender's may be locked by a thread that waits for room in the
        // socket.
        let shut = socket.duplicate()?;
        let builder = std::thread::Builder::new().name("nbd-client".into());
        let listener = Some(builder.spawn(move || listening.run())?);
        Ok(Client { export, style, socket: Mutex::new(socket), in_flight, listener, shut })
    }

    /// The server's facts about the export.
    #[must_use]
    pub fn export(&self) -> &Export {
        &self.export
    }

    /// Sends a command; a length that the style cannot encode fails here. `listener` gets the
    /// outcome on the receiving thread, or on this one if the connection is already gone.
    pub fn submit_then(
        &self,
        command: &Command,
        listener: impl FnOnce(Result<Reply, Failure>) + Send + 'static,
    ) {
        if is_too_long(command, self.style) {
            return listener(Err(Failure::Errno(OVERFLOW)));
        }
        let waiting = PendingRequest { answer: Answer::to(command), listener: Box::new(listener) };
        let cookie = {
            let mut in_flight = lock(&self.in_flight);
            if in_flight.is_gone {
                drop(in_flight);
                // The listener may submit the next request on this thread.
                return (waiting.listener)(Err(Failure::Gone));
            }
            in_flight.next_cookie += 1;
            let cookie = in_flight.next_cookie;
            // Before it is sent: the answer may come before the send returns.
            in_flight.waiting.insert(cookie, waiting);
            cookie
        };
        let message = encode(command, cookie, self.style);
        // The receiving thread also notices a failed send, and then fails all waiting requests.
        let mut socket = lock(&self.socket);
        if socket.write_all(&message).is_err() {
            socket.shut();
        }
    }

    /// Sends a command.
    #[must_use]
    pub fn submit(&self, command: &Command) -> PendingReply {
        let (sender, receiver) = sync_channel(1);
        self.submit_then(command, move |outcome| {
            // The caller may have dropped the receiver.
            let _ = sender.send(outcome);
        });
        PendingReply(receiver)
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
        self.read_first(self.export.size_bytes)
    }

    /// Reads the first `size` bytes of the export, several requests at a time.
    pub fn read_first(&self, size: u64) -> Result<Vec<u8>, Failure> {
        const STEP: u64 = 1 << 20;
        let starts = (0..size).step_by(STEP as usize);
        let pending_replies: Vec<PendingReply> = starts
            .map(|offset| {
                self.submit(&Command::Read { offset, length: STEP.min(size - offset) as u32 })
            })
            .collect();
        let mut image = Vec::with_capacity(size as usize);
        for pending in pending_replies {
            image.extend(pending.wait()?.bytes);
        }
        Ok(image)
    }

    /// Why the connection ended, once it has: a protocol violation or a system error.
    #[must_use]
    pub fn why_gone(&self) -> Option<Arc<io::Error>> {
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
        // An answer on the receiving thread may drop this client, and no thread can wait for
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

/// The receiving side of a connection.
struct ReplyReader {
    in_flight: Arc<Mutex<InFlight>>,
    socket: Socket,
    style: Style,
}

impl ReplyReader {
    fn run(mut self) {
        let why = loop {
            if let Err(why) = self.receive_reply() {
                break why;
            }
        };
        self.socket.shut();
        let requests: Vec<PendingRequest> = {
            let mut in_flight = lock(&self.in_flight);
            // Set under the lock with the last look: a request that is submitted later fails at
            // once, and none is forgotten in between.
            in_flight.is_gone = true;
            in_flight.why_gone = Some(Arc::new(why));
            in_flight.waiting.drain().map(|(_, waiting)| waiting).collect()
        };
        for waiting in requests {
            (waiting.listener)(Err(Failure::Gone));
        }
    }

    fn receive_reply(&mut self) -> io::Result<()> {
        match read_u32(&mut self.socket)? {
            // In every style: after structured replies were agreed on, only data must come in
            // chunks.
            SIMPLE_REPLY_MAGIC => self.receive_simple(),
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

    /// A chunk's payload: no longer than what was requested, or than any text or list of runs may
    /// be.
    fn payload(&mut self, cookie: u64, length: u64) -> io::Result<Vec<u8>> {
        const REST_BYTES_MAX: u64 = 4 << 20;
        let requested_bytes = lock(&self.in_flight)
            .waiting
            .get(&cookie)
            .map_or(0, |waiting| waiting.answer.requested_bytes());
        if length > requested_bytes as u64 + REST_BYTES_MAX {
            return Err(violation(format!(
                "a chunk of {length} bytes in the answer to a request of {requested_bytes}"
            )));
        }
        read_bytes(&mut self.socket, length as usize)
    }

    fn receive_simple(&mut self) -> io::Result<()> {
        let error = read_u32(&mut self.socket)?;
        let cookie = read_u64(&mut self.socket)?;
        let mut waiting = self.take(cookie)?;
        // Out of the map while the rest is read from the socket, so that other threads can submit.
        let outcome = self.take_simple(error, &mut waiting.answer);
        self.settle(cookie, waiting, outcome.map(|()| true))
    }

    fn take_simple(&mut self, error: u32, answer: &mut Answer) -> io::Result<()> {
        match answer.requested_bytes() {
            _ if error != 0 => answer.fail(error),
            0 => {}
            _ if self.style != Style::Simple => {
                return Err(violation(
                    "a read was answered with a simple reply after structured replies",
                ));
            }
            count => answer.take_whole(read_bytes(&mut self.socket, count)?)?,
        }
        Ok(())
    }

    fn chunk(&mut self, flags: u16, kind: u16, cookie: u64, payload: &[u8]) -> io::Result<()> {
        let mut waiting = self.take(cookie)?;
        let is_last = flags & chunk::DONE != 0;
        let outcome = waiting.answer.take_chunk(kind, payload).map(|()| is_last);
        self.settle(cookie, waiting, outcome)
    }

    /// Delivers the outcome if the answer has ended. Otherwise the request keeps waiting: for the
    /// rest or, after a violation, for the end of the connection.
    fn settle(
        &self,
        cookie: u64,
        request: PendingRequest,
        completion: io::Result<bool>,
    ) -> io::Result<()> {
        let completion = match completion {
            Ok(true) => request.answer.check_whole().map(|()| true),
            other => other,
        };
        if let Ok(true) = completion {
            (request.listener)(request.answer.outcome());
        } else {
            lock(&self.in_flight).waiting.insert(cookie, request);
        }
        completion.map(drop)
    }

    fn take(&self, cookie: u64) -> io::Result<PendingRequest> {
        let waiting = lock(&self.in_flight).waiting.remove(&cookie);
        waiting.ok_or_else(|| {
            violation(format!("an answer to a request that is not in flight: {cookie}"))
        })
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    /// A client whose server has sent nothing yet, and the server's end.
    fn connected(style: Style) -> (Client, UnixStream) {
        let (near, far) = UnixStream::pair().unwrap();
        let client = Client::over(Socket::Unix(near), Export::default(), style).unwrap();
        (client, far)
    }

    #[test]
    fn a_request_whose_answer_breaks_off_fails_once() {
        let simple = [&SIMPLE_REPLY_MAGIC.to_be_bytes()[..], &[0; 4], &1u64.to_be_bytes(), b"half"];
        let chunk = [&STRUCTURED_REPLY_MAGIC.to_be_bytes()[..], &[0, 1, 0, 77], &[0; 7], &[1]];
        for (style, server_bytes) in [
            (Style::Simple, simple.concat()),
            (Style::Structured, [&chunk.concat()[..], &[0; 4]].concat()),
        ] {
            let (client, mut far) = connected(style);
            let (sender, receiver) = sync_channel(2);
            client.submit_then(&Command::Read { offset: 0, length: 512 }, move |outcome| {
                sender.send(outcome).unwrap();
            });
            far.write_all(&server_bytes).unwrap();
            far.shutdown(std::net::Shutdown::Write).unwrap();
            assert_eq!(receiver.recv(), Ok(Err(Failure::Gone)), "{style:?}");
            assert!(receiver.recv().is_err(), "it has one outcome");
        }
    }

    #[test]
    fn a_read_that_the_server_ends_without_its_bytes_is_no_success() {
        let (client, mut far) = connected(Style::Structured);
        let pending = client.submit(&Command::Read { offset: 0, length: 512 });
        let none =
            [&STRUCTURED_REPLY_MAGIC.to_be_bytes()[..], &[0, 1, 0, 0], &[0; 7], &[1], &[0; 4]];
        far.write_all(&none.concat()).unwrap();
        assert_eq!(pending.wait(), Err(Failure::Gone));
        let why = client.why_gone().unwrap();
        assert_eq!(why.kind(), io::ErrorKind::InvalidData);
        assert!(why.to_string().contains("ended before"), "{why}");
    }
}
