//! The loop of one client after the handshake: receives many requests, submits them, sends their
//! replies.
//!
//! Invariants: a write goes to the device only when its whole payload has arrived. Every submitted
//! request is answered, or the connection is gone. No more is taken from the socket than the limits
//! allow. While the door is quiet, nothing is taken, and a partial request waits. Not here: the
//! handshake, and how replies are sent.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{RecvFlags, recv};
use sawmill_device::{BlockDevice, Flags, Operation, Request};
use sawmill_sys::Spin;

use super::budget::{Account, BudgetBuffer, ConnectionBudget};
use super::intake::{Intake, Payload};
use super::limits::{
    DRAIN_BYTES_MAX, EXTENTS_MAX, IN_FLIGHT_BYTES_MAX, RECEIVE_BYTES_MAX, REQUESTS_IN_FLIGHT_MAX,
};
use super::outbox::{ClientChannel, OutboxState, SocketNews};
use super::protocol::{Command, RequestHeader, RequestIdentity, Violation, command_flag};
use super::server::NbdState;
use super::session::{
    Drain, End, ExportFacts, InputBacklog, PausedConnection, Refusal, Session, payload_bytes_max,
};
use super::ticket::{Body, Ticket};

mod judge;
mod memory;

use memory::ClientProgress;

/// Why parsing stopped.
enum Pause {
    /// More bytes are needed: this many in the receive buffer.
    Hungry(usize),
    /// A limit is reached.
    Full,
    Disconnect,
}

/// The directions of a socket: those to wait for, or those that are ready.
#[derive(Clone, Copy, Default)]
struct Directions {
    read: bool,
    write: bool,
}

/// The result of one receive.
enum ReceiveOutcome {
    Bytes,
    Nothing,
    End(End),
}

/// Clients send the header and payload of a write with two system calls, a microsecond apart.
/// Polling this often before going to sleep saves most of those sleeps; it ends after a few
/// microseconds.
const PAYLOAD_TRIES_MAX: u32 = 12;

/// The thread waits for a client inside `recv` this long, which takes one system call per burst;
/// then in `poll`, which can be woken. A quiescing door does not wait longer for a client.
const RECEIVE_TIME_MAX: Duration = Duration::from_millis(4);

/// Interval at which a connection with memory of the pool checks whether others wait for it.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// The expected size of a queued reply without data; a refusal has a text.
const REPLY_BYTES: u64 = 64;
const REFUSAL_BYTES: u64 = 256;

/// The longest reply to a block status query.
const STATUS_BYTES_MAX: u64 = 16 * EXTENTS_MAX as u64 + 64;

pub(super) struct Connection {
    id: u64,
    shared: Arc<NbdState>,
    channel: Arc<ClientChannel>,
    session: Session,
    /// The socket ends a `recv` after [`RECEIVE_TIME_MAX`].
    has_timeout: bool,
    intake: Intake,
    /// The write whose payload goes into a buffer of its own.
    filling: Option<RequestHeader>,
    draining: Option<Drain>,
    spare_reads: Vec<BudgetBuffer>,
    spin: Spin,
    /// Requests that were taken up to the last receive.
    submitted_before: u64,
    account: Account,
    /// Memory that is missing to continue.
    short_of: Option<u64>,
    /// How far the client was when others began to wait for memory that it keeps.
    wanted_since: Option<ClientProgress>,
    submitted: u64,
    submitted_bytes: u64,
    /// How many more requests and bytes may be submitted before the next check.
    allowance: (u64, u64),
}

impl Connection {
    /// The connection with this number, with what another process received on it.
    pub(super) fn new(
        id: u64,
        shared: Arc<NbdState>,
        channel: Arc<ClientChannel>,
        session: Session,
        backlog: InputBacklog,
        connection_budget: Arc<ConnectionBudget>,
    ) -> Self {
        let woken_channel = channel.clone();
        let account = Account::new(connection_budget, Arc::new(move || woken_channel.waker.wake()));
        let spin = Spin::among(shared.options.lookers.clone());
        let has_timeout =
            set_socket_timeout(&channel.socket, Timeout::Recv, Some(RECEIVE_TIME_MAX)).is_ok();
        Connection {
            id,
            shared,
            channel,
            session,
            has_timeout,
            intake: Intake::with(&backlog.received, account.connection_budget()),
            filling: None,
            draining: backlog.draining,
            spare_reads: Vec::new(),
            spin,
            submitted_before: 0,
            account,
            short_of: None,
            wanted_since: None,
            submitted: 0,
            submitted_bytes: 0,
            allowance: (REQUESTS_IN_FLIGHT_MAX, IN_FLIGHT_BYTES_MAX),
        }
    }

    /// Serves the client to the end, then sends the last replies.
    pub(super) fn run(mut self) -> End {
        let end = self.serve();
        // After a violation or an error of the socket nobody reads replies. A stalled client keeps
        // memory that others wait for, and after `LetGo` the socket belongs to another process.
        let should_finish =
            !matches!(end, End::Violation(_) | End::Broken(_) | End::Stalled | End::LetGo);
        if should_finish && self.finish() {
            return End::LetGo;
        }
        end
    }

    fn serve(&mut self) -> End {
        let mut has_room = false;
        loop {
            if self.shared.is_pausing()
                && let Some(end) = self.rest()
            {
                return end;
            }
            // Replies that come while the burst is parsed wait for `settle`, which sends them
            // together: one system call instead of one for each.
            self.channel.begin_burst();
            let pause = match self.parse() {
                Ok(pause) => pause,
                Err(violation) => {
                    // Ends the burst: replies that are ready go out before the connection closes.
                    self.settle(SocketNews { has_room, should_wake: false });
                    return End::Violation(violation);
                }
            };
            let is_full = matches!(pause, Pause::Full) || !self.may_receive();
            let outbox_state = self.settle(SocketNews {
                has_room: std::mem::take(&mut has_room),
                should_wake: is_full,
            });
            if outbox_state.is_closed {
                return if self.channel.is_stopping() {
                    End::Stopping
                } else {
                    End::Broken(Errno::PIPE)
                };
            }
            if self.is_stalled(&outbox_state) {
                return End::Stalled;
            }
            let wanted_bytes = match pause {
                Pause::Disconnect => return End::Disconnect,
                _ if self.channel.is_stopping() => return End::Stopping,
                Pause::Hungry(wanted_bytes) if !is_full => wanted_bytes,
                Pause::Hungry(_) | Pause::Full => {
                    if !self.may_go_on() {
                        let directions =
                            Directions { read: false, write: outbox_state.is_socket_full };
                        has_room = self.wait(directions, None).write;
                    }
                    continue;
                }
            };
            if outbox_state.is_socket_full {
                // Both ways: a client with one thread may send a request's rest before it reads.
                let ready = self.wait(Directions { read: true, write: true }, None);
                has_room = ready.write;
                if !ready.read {
                    continue;
                }
            }
            match self.receive(wanted_bytes, outbox_state.is_idle) {
                ReceiveOutcome::Bytes => (),
                ReceiveOutcome::Nothing => {
                    if outbox_state.is_idle {
                        self.rest_memory();
                    }
                    has_room = self
                        .wait(Directions { read: true, write: outbox_state.is_socket_full }, None)
                        .write;
                }
                ReceiveOutcome::End(end) => return end,
            }
        }
    }

    /// Answers what is in flight, reports what arrived and was not parsed, and waits until the door
    /// resumes. A connection that is ending meets the same end in the process that resumes it.
    /// Returns why this one ends, if it does.
    fn rest(&mut self) -> Option<End> {
        let mut has_room = false;
        while self.shared.is_pausing() && !self.channel.is_released() {
            // Nothing was taken yet, and another process may still send unsent replies.
            if self.shared.is_on_trial.load(Relaxed) {
                self.shared.hold(self.id, &self.channel, self.held());
                if self.channel.is_stopping() && !self.channel.is_released() {
                    return Some(End::Stopping);
                }
                continue;
            }
            let outbox_state = self.settle(SocketNews { has_room, should_wake: true });
            if self.channel.is_stopping() {
                return Some(End::Stopping);
            }
            if outbox_state.is_closed {
                return Some(End::Broken(Errno::PIPE));
            }
            // It is enough that the device has answered everything. Replies that the client has
            // not read yet move with the connection to the process that takes over (P57).
            if outbox_state.is_still {
                self.shared.hold(self.id, &self.channel, self.held());
                has_room = false;
            } else {
                has_room = self
                    .wait(Directions { read: false, write: outbox_state.is_socket_full }, None)
                    .write;
            }
        }
        self.channel.is_released().then_some(End::LetGo)
    }

    fn held(&self) -> PausedConnection {
        let style = self.session.style;
        let mut received = Vec::new();
        // The process that resumes the door parses it again, with the same result.
        if let Some(header) = &self.filling {
            received.extend_from_slice(&header.encode(style));
            received.extend_from_slice(self.intake.filled());
        }
        received.extend_from_slice(self.intake.bytes());
        PausedConnection {
            style,
            block_status: self.session.block_status,
            facts: ExportFacts::of(&self.session.geometry, style),
            backlog: InputBacklog { received, draining: self.draining.clone() },
        }
    }

    /// Answers what is in flight and sends what is queued, as long as the client reads. Returns
    /// whether another process does that instead.
    fn finish(&mut self) -> bool {
        let linger_time_max = self.shared.options.linger_time_max;
        let mut has_room = false;
        let mut last = (u64::MAX, Instant::now());
        loop {
            if self.shared.is_pausing() && matches!(self.rest(), Some(End::LetGo)) {
                return true;
            }
            let outbox_state = self.settle(SocketNews { has_room, should_wake: true });
            if outbox_state.is_closed || outbox_state.is_idle || self.is_stalled(&outbox_state) {
                return false;
            }
            let mut patience = None;
            if outbox_state.in_flight == 0 {
                // The clock runs only while nothing is in flight, and starts again with each byte
                // taken: the time of a slow device is not the client's.
                if outbox_state.queued_bytes != last.0 {
                    last = (outbox_state.queued_bytes, Instant::now());
                }
                let remaining_time = linger_time_max.saturating_sub(last.1.elapsed());
                if remaining_time.is_zero() {
                    let bytes = outbox_state.queued_bytes;
                    self.shared.complaints.log(|left_out| {
                        tracing::warn!(
                            bytes,
                            left_out,
                            "nbd: the client does not read its last replies"
                        );
                    });
                    return false;
                }
                patience = Some(remaining_time);
            }
            has_room = self
                .wait(Directions { read: false, write: outbox_state.is_socket_full }, patience)
                .write;
        }
    }

    fn settle(&mut self, news: SocketNews) -> OutboxState {
        let outbox_state = self.channel.settle(self.submitted, self.submitted_bytes, news);
        self.allowance = (
            REQUESTS_IN_FLIGHT_MAX.saturating_sub(outbox_state.in_flight),
            IN_FLIGHT_BYTES_MAX.saturating_sub(outbox_state.held_bytes),
        );
        self.account.settle(outbox_state.small_bytes);
        outbox_state
    }

    fn may_submit(&self) -> bool {
        self.allowance.0 > 0 && self.allowance.1 > 0
    }

    /// Sleeps until the client has sent something (if `read`), the socket accepts more (if
    /// `write`), or another thread wakes this one. Returns whether the socket is readable and
    /// whether it is writable.
    fn wait(&mut self, directions: Directions, time_max: Option<Duration>) -> Directions {
        let mut time_max = time_max;
        // The budget wakes those to which it grants memory, not those who have it: a holder has to
        // look from time to time whether others wait.
        if self.account.holds_pool() {
            time_max = Some(time_max.map_or(LOOK_EVERY, |time| time.min(LOOK_EVERY)));
        }
        let mut interest = PollFlags::empty();
        interest.set(PollFlags::IN, directions.read);
        interest.set(PollFlags::OUT, directions.write);
        let mut fds = [
            PollFd::new(&self.channel.waker, PollFlags::IN),
            PollFd::new(&self.channel.socket, interest),
        ];
        // A socket with no requested events would still report a hang-up, again and again.
        let fd_count = if interest.is_empty() { 1 } else { 2 };
        let timeout = time_max.and_then(|time| Timespec::try_from(time).ok());
        if poll(&mut fds[..fd_count], timeout.as_ref()).is_err() {
            return Directions::default();
        }
        let (wake_events, socket_events) = (fds[0].revents(), fds[1].revents());
        if wake_events.contains(PollFlags::IN) {
            // The waker carries no data: it only signals.
            self.channel.waker.clear();
        }
        let has_hung_up = socket_events.intersects(PollFlags::ERR | PollFlags::HUP);
        Directions {
            read: directions.read && (has_hung_up || socket_events.contains(PollFlags::IN)),
            write: directions.write && (has_hung_up || socket_events.contains(PollFlags::OUT)),
        }
    }

    /// Receives once; with `is_patient`, waits a little for bytes: awake where more are expected
    /// soon.
    fn receive(&mut self, wanted_bytes: usize, is_patient: bool) -> ReceiveOutcome {
        // With a header there, its payload is on its way. Without one, the client may be silent for
        // hours, and turning the CPU would be for nothing.
        let inside_request = wanted_bytes > self.session.style.request_bytes();
        let tries = if is_patient && inside_request { PAYLOAD_TRIES_MAX } else { 0 };
        // Neither the rest of a request nor what is dropped: a client could trickle either.
        let is_inside = self.intake.is_partial() || self.draining.is_some();
        let is_next_awaited = is_patient && !is_inside;
        let socket = &self.channel.socket;
        let space = self.intake.space(wanted_bytes);
        let mut received = Err(Errno::AGAIN);
        let mut has_received = || {
            received = recv(socket, &mut *space, RecvFlags::DONTWAIT);
            received != Err(Errno::AGAIN)
        };
        for _ in 0..tries {
            if has_received() {
                break;
            }
            (0..16).for_each(|_| std::hint::spin_loop());
        }
        let requests =
            self.submitted - std::mem::replace(&mut self.submitted_before, self.submitted);
        if is_next_awaited {
            let is_found = self.spin.look(None, || self.shared.is_pausing(), has_received);
            if is_found && received.is_ok_and(|(_, length)| length > 0) {
                self.channel.counters.received_awake();
            }
        }
        if received == Err(Errno::AGAIN) {
            let flags = if is_patient && self.has_timeout {
                RecvFlags::empty()
            } else {
                RecvFlags::DONTWAIT
            };
            received = recv(socket, space, flags);
        }
        if is_next_awaited {
            // How many requests these are is not known yet: as many as the last time.
            let messages = if received.is_ok() { requests.max(1) as usize } else { 0 };
            self.spin.received(messages);
        }
        match received {
            // `ClientChannel::stop` shuts the receiving side down, which looks here as if the
            // client had left.
            Ok((_, 0)) if self.channel.is_stopping() => ReceiveOutcome::End(End::Stopping),
            Ok((_, 0)) if self.intake.is_partial() || self.draining.is_some() => {
                ReceiveOutcome::End(End::Died)
            }
            Ok((_, 0)) => ReceiveOutcome::End(End::Closed),
            Ok((_, length)) => {
                self.channel.counters.bytes_in.fetch_add(length as u64, Relaxed);
                self.intake.received(length);
                ReceiveOutcome::Bytes
            }
            Err(Errno::AGAIN | Errno::INTR) => ReceiveOutcome::Nothing,
            Err(_) if self.channel.is_stopping() => ReceiveOutcome::End(End::Stopping),
            Err(error) => ReceiveOutcome::End(End::Broken(error)),
        }
    }

    /// Submits every complete request, as far as the limits allow.
    fn parse(&mut self) -> Result<Pause, Violation> {
        let style = self.session.style;
        loop {
            if self.filling.is_some() {
                let Some(payload) = self.intake.take_filled() else { return Ok(Pause::Hungry(0)) };
                if let Some(header) = self.filling.take() {
                    self.channel.counters.request(Some(Command::Write));
                    self.submit(Operation::Write, &header, Some(payload));
                }
            }
            if self.draining.is_some() && !self.drain() {
                return Ok(Pause::Hungry(0));
            }
            let head_bytes = style.request_bytes();
            let Some(header) = RequestHeader::parse(style, self.intake.bytes())? else {
                return Ok(Pause::Hungry(head_bytes));
            };
            // The header stays in the receive buffer, and is parsed again when there is room:
            // nothing has to be remembered for a request that is not taken yet.
            if !self.may_submit() {
                return Ok(Pause::Full);
            }
            let command = Command::from_number(header.command);
            if command == Some(Command::Disconnect) {
                return Ok(Pause::Disconnect);
            }
            let payload_bytes = header.payload_bytes(style);
            let judged = self.judge(&header);
            if let Ok(operation) = judged
                && !self.has_memory(operation, header.length)
            {
                return Ok(Pause::Full);
            }
            match judged {
                Err(_) if payload_bytes > DRAIN_BYTES_MAX => {
                    let text = format!("a payload of {payload_bytes} bytes exceeds every limit");
                    return Err(Violation(text.into()));
                }
                Err(refusal) => {
                    self.channel.counters.request(command);
                    self.intake.consume(head_bytes);
                    let (cookie, offset) = (header.cookie, header.offset);
                    self.draining =
                        Some(Drain { left_bytes: payload_bytes, cookie, offset, refusal });
                }
                Ok(Operation::Write) => {
                    if let Some(missing) = self.take_write(header) {
                        return Ok(missing);
                    }
                }
                Ok(operation) => {
                    self.channel.counters.request(command);
                    self.intake.consume(head_bytes);
                    self.submit(operation, &header, None);
                }
            }
        }
    }

    /// Submits a write whose payload is in the inbox, or begins to receive a long payload apart.
    /// Returns what to wait for, if neither is possible.
    fn take_write(&mut self, header: RequestHeader) -> Option<Pause> {
        let head_bytes = self.session.style.request_bytes();
        let length = header.length as usize;
        // Such a payload can never be complete in the receive buffer.
        if head_bytes + length > RECEIVE_BYTES_MAX {
            self.intake.consume(head_bytes);
            self.intake.fill_apart(length);
            self.filling = Some(header);
            return None;
        }
        if self.intake.bytes().len() < head_bytes + length {
            return Some(Pause::Hungry(head_bytes + length));
        }
        self.channel.counters.request(Some(Command::Write));
        self.intake.consume(head_bytes);
        let payload = self.intake.take_payload(length);
        self.submit(Operation::Write, &header, Some(payload));
        None
    }

    /// Drops the payload of a refused request. Returns true when it is gone and the refusal is
    /// queued.
    fn drain(&mut self) -> bool {
        let Some(drain) = &mut self.draining else { return true };
        let dropped_bytes =
            self.intake.bytes().len().min(usize::try_from(drain.left_bytes).unwrap_or(usize::MAX));
        self.intake.consume(dropped_bytes);
        drain.left_bytes -= dropped_bytes as u64;
        if drain.left_bytes > 0 {
            return false;
        }
        if let Some(Drain { cookie, offset, refusal: Refusal(errno, text), .. }) =
            self.draining.take()
        {
            self.channel.counters.errors.fetch_add(1, Relaxed);
            self.count(0);
            self.account.expect_small(REFUSAL_BYTES);
            let identity = RequestIdentity { style: self.session.style, cookie, offset };
            self.channel.answer(0, |out| identity.push_error(out, errno, &text));
        }
        true
    }

    fn identity_of(&self, header: &RequestHeader) -> RequestIdentity {
        RequestIdentity { style: self.session.style, cookie: header.cookie, offset: header.offset }
    }

    fn submit(&mut self, operation: Operation, header: &RequestHeader, payload: Option<Payload>) {
        let (charged_bytes, body) = match (operation, payload) {
            (_, Some(payload)) => {
                self.channel.counters.written(header.length);
                (header.length, Body::Write(payload))
            }
            (Operation::Read, None) => (header.length, self.read_body(header.length as usize)),
            (Operation::Allocation, None) => {
                let room = BudgetBuffer::room(self.account.connection_budget(), STATUS_BYTES_MAX);
                let runs_max = match header.flags & command_flag::REQ_ONE {
                    0 => EXTENTS_MAX,
                    _ => 1,
                };
                (STATUS_BYTES_MAX, Body::Status { runs_max, room })
            }
            (_, None) => (0, Body::Empty),
        };
        self.count(charged_bytes);
        self.account.expect_small(REPLY_BYTES);
        let changes =
            matches!(operation, Operation::Write | Operation::Discard | Operation::WriteZeroes);
        let flags = Flags {
            fua: changes && header.flags & command_flag::FUA != 0,
            no_unmap: header.flags & command_flag::NO_HOLE != 0,
        };
        let (address, length) =
            // The range of a flush means nothing in NBD, and a device takes none.
            if operation == Operation::Flush { (0, 0) } else { (header.offset, header.length) };
        let channel = self.channel.clone();
        let ticket =
            Box::new(Ticket { channel, identity: self.identity_of(header), charged_bytes, body });
        self.session.device.submit(Request::new(operation, address, length, flags, ticket));
    }

    /// Counts a request that will be answered.
    fn count(&mut self, charged_bytes: u64) {
        // Before the device has the request: `ClientChannel::in_flight` must never miss one that it
        // has, or a door that is handed over would look quiet.
        self.submitted += 1;
        self.submitted_bytes += charged_bytes;
        self.channel.counters.submitted.store(self.submitted, Relaxed);
        self.allowance.0 = self.allowance.0.saturating_sub(1);
        self.allowance.1 = self.allowance.1.saturating_sub(charged_bytes);
    }
}
