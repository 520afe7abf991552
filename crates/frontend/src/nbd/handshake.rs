//! Option haggling: what client and server agree on before the first request.
//!
//! Invariants: a client has bounded time, options and bytes. An option that cannot be granted is
//! answered with an error and changes nothing. Nothing after the last option is taken from the
//! socket. Not here: requests.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};
use sawmill_device::Geometry;

use super::limits::{HANDSHAKE_BYTES_MAX, HANDSHAKE_OPTIONS_MAX};
use super::outbox::ClientChannel;
use super::protocol::{
    BASE_ALLOCATION, BASE_ALLOCATION_ID, GREETING_MAGIC, OPTION_MAGIC, Style, Violation, hello,
    info, option, parse_info_request, parse_meta_request, parse_option_header, push_option_reply,
    reply,
};
use super::server::{Export, Exports};
use super::session::{End, Session, payload_bytes_max, transmission_flags};

/// Negotiates with the client until it has chosen an export.
pub(super) fn negotiate(
    channel: &ClientChannel,
    exports: &Exports,
    time_max: Duration,
) -> Result<(Arc<Export>, Session), End> {
    let mut handshake = Handshake {
        channel,
        exports,
        time_max,
        // One deadline for all options: a client that sends a byte now and then must not keep
        // others out forever (P191).
        deadline: Instant::now() + time_max,
        style: Style::Simple,
        context: None,
        fixed: false,
        no_zeroes: false,
    };
    handshake.greet()?;
    handshake.haggle()
}

struct Handshake<'a> {
    channel: &'a ClientChannel,
    exports: &'a Exports,
    time_max: Duration,
    deadline: Instant,
    style: Style,
    /// The export for which the client chose `base:allocation`, found by name.
    context: Option<Arc<Export>>,
    fixed: bool,
    no_zeroes: bool,
}

fn violation(text: impl Into<std::borrow::Cow<'static, str>>) -> End {
    End::Violation(Violation(text.into()))
}

/// The result of an option.
enum Step {
    /// Send this reply and continue.
    Reply(Vec<u8>),
    /// Send this reply and start the transmission phase.
    Begin(Vec<u8>, Arc<Export>),
}

impl Handshake<'_> {
    fn greet(&mut self) -> Result<(), End> {
        let mut greeting = Vec::with_capacity(18);
        greeting.extend_from_slice(&GREETING_MAGIC.to_be_bytes());
        greeting.extend_from_slice(&OPTION_MAGIC.to_be_bytes());
        greeting.extend_from_slice(&(hello::FIXED_NEWSTYLE | hello::NO_ZEROES).to_be_bytes());
        self.send(&greeting)?;
        let mut flags = [0; 4];
        self.receive(&mut flags)?;
        let flags = u32::from_be_bytes(flags);
        // The protocol tells a server to drop a client with flags it does not know: what they ask
        // for may change the meaning of all that follows.
        if flags & !u32::from(hello::FIXED_NEWSTYLE | hello::NO_ZEROES) != 0 {
            return Err(violation(format!("the client's flags {flags:#x} are unknown")));
        }
        self.fixed = flags & u32::from(hello::FIXED_NEWSTYLE) != 0;
        self.no_zeroes = flags & u32::from(hello::NO_ZEROES) != 0;
        Ok(())
    }

    fn haggle(mut self) -> Result<(Arc<Export>, Session), End> {
        let mut bytes_left = HANDSHAKE_BYTES_MAX;
        for _ in 0..HANDSHAKE_OPTIONS_MAX {
            let mut header = [0; 16];
            self.receive(&mut header)?;
            let (number, length) = parse_option_header(&header).map_err(End::Violation)?;
            // Before the allocation: the length is the claim of a peer that nobody has
            // authenticated.
            let Some(remaining_bytes) = bytes_left.checked_sub(length) else {
                let text = format!("more than {HANDSHAKE_BYTES_MAX} bytes of options");
                return Err(violation(text));
            };
            bytes_left = remaining_bytes;
            let mut data = vec![0; length as usize];
            self.receive(&mut data)?;
            match self.answer(number, &data)? {
                Step::Reply(bytes) => self.send(&bytes)?,
                Step::Begin(bytes, export) => {
                    self.send(&bytes)?;
                    let session = self.session(&export);
                    return Ok((export, session));
                }
            }
        }
        Err(violation(format!("more than {HANDSHAKE_OPTIONS_MAX} options")))
    }

    fn session(&self, export: &Arc<Export>) -> Session {
        Session {
            device: export.device.clone(),
            geometry: export.device.geometry(),
            style: self.style,
            // A client may choose the context for one export and then another export, or the name
            // may mean a new export by now. In both cases nothing was agreed on.
            block_status: self.context.as_ref().is_some_and(|chosen| Arc::ptr_eq(chosen, export)),
        }
    }

    fn answer(&mut self, number: u32, data: &[u8]) -> Result<Step, End> {
        if number == option::EXPORT_NAME {
            return self.begin_by_name(data);
        }
        // Without fixed newstyle, a client expects no reply to an option; it understands only a
        // closed connection.
        if !self.fixed {
            return Err(violation(format!("option {number} from a client without fixed newstyle")));
        }
        let mut out = Vec::new();
        match number {
            option::ABORT => {
                push_option_reply(&mut out, number, reply::ACK, &[]);
                // The client may be gone already; that is no error.
                let _ = self.send(&out);
                return Err(End::Disconnect);
            }
            option::LIST if data.is_empty() => {
                for export in self.exports.all() {
                    let mut server = (export.name.len() as u32).to_be_bytes().to_vec();
                    server.extend_from_slice(export.name.as_bytes());
                    server.extend_from_slice(export.description.as_bytes());
                    push_option_reply(&mut out, number, reply::SERVER, &server);
                }
                push_option_reply(&mut out, number, reply::ACK, &[]);
            }
            option::INFO | option::GO => {
                if let Some(export) = self.push_info(&mut out, number, data)
                    && number == option::GO
                {
                    return Ok(Step::Begin(out, export));
                }
            }
            option::STRUCTURED_REPLY if self.style == Style::Extended => {
                let text = b"extended headers are already agreed on";
                push_option_reply(&mut out, number, reply::ERR_EXT_HEADER_REQD, text);
            }
            option::STRUCTURED_REPLY if data.is_empty() => {
                self.style = Style::Structured;
                push_option_reply(&mut out, number, reply::ACK, &[]);
            }
            option::EXTENDED_HEADERS if data.is_empty() && self.style != Style::Extended => {
                self.style = Style::Extended;
                push_option_reply(&mut out, number, reply::ACK, &[]);
            }
            option::LIST_META_CONTEXT | option::SET_META_CONTEXT => {
                self.push_contexts(&mut out, number, data)
            }
            option::LIST | option::STRUCTURED_REPLY | option::EXTENDED_HEADERS => {
                let text = b"the option takes no data and is sent once";
                push_option_reply(&mut out, number, reply::ERR_INVALID, text);
            }
            _ => push_option_reply(
                &mut out,
                number,
                reply::ERR_UNSUP,
                b"this option is not supported",
            ),
        }
        Ok(Step::Reply(out))
    }

    /// `EXPORT_NAME`: the old way to choose; the only refusal is to close the connection.
    fn begin_by_name(&mut self, data: &[u8]) -> Result<Step, End> {
        let name =
            std::str::from_utf8(data).map_err(|_| violation("an export name is not UTF-8"))?;
        let Some(export) = self.exports.find(name) else {
            return Err(violation(format!("no export is named {name:?}")));
        };
        let geometry = export.device.geometry();
        let mut out = geometry.size_bytes.to_be_bytes().to_vec();
        out.extend_from_slice(&transmission_flags(&geometry, self.style).to_be_bytes());
        if !self.no_zeroes {
            out.extend_from_slice(&[0; 124]);
        }
        Ok(Step::Begin(out, export))
    }

    /// Appends the replies to `INFO` or `GO`; returns the export if it was found.
    fn push_info(&self, out: &mut Vec<u8>, number: u32, data: &[u8]) -> Option<Arc<Export>> {
        let Some((name, info_kinds)) = parse_info_request(data) else {
            push_option_reply(out, number, reply::ERR_INVALID, b"the option's data is malformed");
            return None;
        };
        let Some(export) = self.exports.find(name) else {
            let text = format!("no export is named {name:?}");
            push_option_reply(out, number, reply::ERR_UNKNOWN, text.as_bytes());
            return None;
        };
        let geometry = export.device.geometry();
        let mut push = |kind: u16, value: &[u8]| {
            let data = [&kind.to_be_bytes()[..], value].concat();
            push_option_reply(out, number, reply::INFO, &data);
        };
        let flags = transmission_flags(&geometry, self.style);
        push(
            info::EXPORT,
            &[&geometry.size_bytes.to_be_bytes()[..], &flags.to_be_bytes()].concat(),
        );
        let sizes = block_sizes(&geometry).map(u32::to_be_bytes);
        push(info::BLOCK_SIZE, sizes.as_flattened());
        if info_kinds.contains(&info::NAME) {
            push(info::NAME, export.name.as_bytes());
        }
        if info_kinds.contains(&info::DESCRIPTION) && !export.description.is_empty() {
            push(info::DESCRIPTION, export.description.as_bytes());
        }
        push_option_reply(out, number, reply::ACK, &[]);
        Some(export)
    }

    /// Appends the replies to `LIST_META_CONTEXT` or `SET_META_CONTEXT`.
    fn push_contexts(&mut self, out: &mut Vec<u8>, number: u32, data: &[u8]) {
        let is_set = number == option::SET_META_CONTEXT;
        if is_set {
            // A failed choice also cancels the previous one.
            self.context = None;
        }
        if self.style == Style::Simple {
            let text = b"agree on structured replies or extended headers first";
            return push_option_reply(out, number, reply::ERR_INVALID, text);
        }
        let Some((name, queries)) = parse_meta_request(data) else {
            return push_option_reply(
                out,
                number,
                reply::ERR_INVALID,
                b"the option's data is malformed",
            );
        };
        let Some(export) = self.exports.find(name) else {
            let text = format!("no export is named {name:?}");
            return push_option_reply(out, number, reply::ERR_UNKNOWN, text.as_bytes());
        };
        let is_wildcard = !is_set && (queries.is_empty() || queries.contains(&"base:"));
        let is_named = is_wildcard || queries.contains(&BASE_ALLOCATION);
        if is_named && export.device.geometry().operations.allocation {
            // In a list, the field is reserved: no context is chosen yet that the id could stand
            // for.
            let id = if is_set { BASE_ALLOCATION_ID } else { 0 };
            let context = [&id.to_be_bytes()[..], BASE_ALLOCATION.as_bytes()].concat();
            push_option_reply(out, number, reply::META_CONTEXT, &context);
            if is_set {
                self.context = Some(export);
            }
        }
        push_option_reply(out, number, reply::ACK, &[]);
    }

    /// Receives exactly `into`.
    fn receive(&self, into: &mut [u8]) -> Result<(), End> {
        let mut filled_bytes = 0;
        while filled_bytes < into.len() {
            match recv(&self.channel.socket, &mut into[filled_bytes..], RecvFlags::DONTWAIT) {
                Ok((_, 0)) if self.channel.is_stopping() => return Err(End::Stopping),
                Ok((_, 0)) => return Err(End::Closed),
                Ok((_, length)) => filled_bytes += length,
                Err(Errno::AGAIN) => self.wait(PollFlags::IN)?,
                Err(Errno::INTR) => (),
                Err(error) => return Err(End::Broken(error)),
            }
        }
        Ok(())
    }

    fn send(&self, mut bytes: &[u8]) -> Result<(), End> {
        while !bytes.is_empty() {
            match send(&self.channel.socket, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Ok(length) => bytes = &bytes[length..],
                Err(Errno::AGAIN) => self.wait(PollFlags::OUT)?,
                Err(Errno::INTR) => (),
                // A client that only looks (a scan of ports) may leave in the middle. That is no
                // failure to log.
                Err(Errno::PIPE | Errno::CONNRESET) => return Err(End::Closed),
                Err(error) => return Err(End::Broken(error)),
            }
        }
        Ok(())
    }

    /// Waits for the socket, the server's stop or the deadline.
    fn wait(&self, interest: PollFlags) -> Result<(), End> {
        let remaining_time = self.deadline.saturating_duration_since(Instant::now());
        if self.channel.is_stopping() {
            return Err(End::Stopping);
        }
        if remaining_time.is_zero() {
            return Err(violation(format!("the handshake took longer than {:?}", self.time_max)));
        }
        let mut fds = [
            PollFd::new(&self.channel.socket, interest),
            PollFd::new(&self.channel.waker, PollFlags::IN),
        ];
        // Whatever ended the wait, the caller retries and finds out.
        let _ = poll(&mut fds, Timespec::try_from(remaining_time).ok().as_ref());
        // A pause of the door wakes everybody. What it wants of a handshake is in the flags.
        self.channel.waker.clear();
        Ok(())
    }
}

/// The minimum, preferred and maximum block size. The preferred one is a power of two of at least
/// 512 bytes.
pub(super) fn block_sizes(geometry: &Geometry) -> [u32; 3] {
    let maximum = payload_bytes_max(geometry);
    let preferred = geometry.preferred_bytes.clamp(512, maximum.max(512));
    // The protocol demands a power of two, and a device may prefer anything.
    let preferred = 1 << preferred.ilog2();
    [1, preferred, maximum]
}
