//! A load like that of a database: sessions that write a few small pieces, commit them by a flush
//! or a write with FUA, and read back known data.
//!
//! Invariants: each session has its own part of the volume and writes no place twice in a group, so
//! that it can read back all its finished writes byte for byte. The log has all requests, for the
//! judge.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use crate::machine::PATIENCE;
use crate::nbd::{Client, Command, Failure, Reply};
use crate::stamp::{Kind, Log, SECTOR_BYTES, Sector};
use sawmill_testkit::Dice;

/// The most concurrent sessions.
pub(super) const SESSIONS_MAX: usize = 4;
/// A piece is 512 bytes to 16 KiB.
const SECTORS_MAX: u64 = 32;
const GROUP_MAX: u64 = 8;
/// If only reads have been pending for this long, they wait for the store.
const READS_WAIT: Duration = Duration::from_secs(2);

/// The requests, and their results.
#[derive(Clone, Debug, Default)]
pub struct LoadCounts {
    /// Writes with a good answer.
    pub writes: u64,
    /// Flushes with a good answer, and writes with FUA.
    pub commits: u64,
    /// Reads with correct bytes.
    pub reads: u64,
    /// Reads that were refused.
    pub read_errors: u64,
    /// Writes and flushes that were refused while that was allowed.
    pub refused: u64,
    /// When the last commit with a good answer was submitted.
    pub last_commit: Option<Instant>,
    /// Violations: refused writes, wrong bytes.
    pub violations: Vec<String>,
}

/// The load, and its log.
pub(super) struct Commits {
    /// The requests since the volume was last checked.
    pub log: Log,
    /// The source of chance.
    pub dice: Dice,
    /// Writes and flushes may be refused: another has taken the volume over.
    pub may_be_refused: bool,
    sessions: Vec<Session>,
    /// The content of each sector, as far as it is certain: the number of a write, or 0 for zeroes.
    known: Vec<Option<u64>>,
    sender: Sender<CommitCompletion>,
    receiver: Receiver<CommitCompletion>,
}

#[derive(Clone, Debug, Default)]
struct Session {
    in_flight: usize,
    /// The request in flight is a read.
    is_reading: bool,
    /// Sectors of the current group.
    group: Vec<u64>,
    next: Next,
    is_broken: bool,
}

/// The next step of a session when all its requests are answered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Next {
    #[default]
    Group,
    Commit,
    Read,
}

enum CommitRequest {
    Write(usize),
    Flush(usize),
    Read { sector: u64, count: u64 },
}

struct CommitCompletion {
    session: usize,
    request: CommitRequest,
    since: Instant,
    at: u64,
    outcome: Result<Reply, Failure>,
}

impl Commits {
    /// A load on an empty volume of `size_bytes`.
    #[must_use]
    pub(super) fn new(size_bytes: u64, mut dice: Dice) -> Self {
        let sectors = size_bytes / SECTOR_BYTES as u64;
        let (sender, receiver) = channel();
        let log = Log::new(dice.word(), sectors);
        let sessions = vec![Session::default(); SESSIONS_MAX];
        let known = vec![Some(0); sectors as usize];
        Commits { log, dice, may_be_refused: false, sessions, known, sender, receiver }
    }

    /// A load of another history that continues from here; see [`Log::branch`].
    #[must_use]
    pub(super) fn branch(&mut self, number: u64) -> Self {
        let mut branch = Commits::new(SECTOR_BYTES as u64, Dice::new(self.dice.word()));
        branch.log = self.log.branch(number);
        branch.known.clone_from(&self.known);
        branch
    }

    /// Forgets the known content, so that any read is legal.
    pub(super) fn forget(&mut self) {
        self.known.fill(None);
    }

    /// The volume is larger from now on.
    pub(super) fn grow(&mut self, size_bytes: u64) {
        let sectors = size_bytes / SECTOR_BYTES as u64;
        self.log.grow(sectors);
        self.known.resize(sectors as usize, Some(0));
    }

    /// Bytes of the volume, as far as is known.
    #[must_use]
    pub(super) fn size_bytes(&self) -> u64 {
        (self.known.len() * SECTOR_BYTES) as u64
    }

    /// Learns the volume's current content, of which nothing can be lost any more: the log starts
    /// over.
    pub(super) fn observe_stored(&mut self, image: &[u8]) {
        self.know(image);
        self.log.rebase(image);
    }

    /// Learns the volume's current content. The loss of the journal may still restore an earlier
    /// state.
    pub(super) fn observe_accepted(&mut self, image: &[u8]) {
        self.know(image);
        // An unanswered write that is visible has been accepted: from now on it must stay.
        let now = self.log.clock.tick();
        for id in self.known.iter().flatten() {
            if let Some(place) = self.log.find(*id) {
                self.log.writes[place].completed.get_or_insert(now);
            }
        }
    }

    fn know(&mut self, image: &[u8]) {
        let write_number = |bytes: &[u8]| match Sector::read(bytes) {
            Sector::Stamped(stamp) => stamp.write,
            Sector::Empty | Sector::Damaged => 0,
        };
        self.known = image.chunks(SECTOR_BYTES).map(|bytes| Some(write_number(bytes))).collect();
    }

    /// Runs until `groups` more groups were begun, then calls `cut` with requests in flight, and
    /// waits until each has its answer or its connection is gone.
    ///
    /// # Panics
    /// When an answer does not come for too long.
    pub(super) fn drive(
        &mut self,
        clients: &[Client],
        groups: u64,
        cut: impl FnOnce(),
    ) -> LoadCounts {
        self.drive_beside(clients, groups, || (), cut)
    }

    /// The same while the store is unreachable: `give_back` is called repeatedly while only reads
    /// are pending. Uncached data is read when the store is back; writes and flushes never need the
    /// store.
    pub(super) fn drive_beside(
        &mut self,
        clients: &[Client],
        groups: u64,
        give_back: impl Fn(),
        cut: impl FnOnce(),
    ) -> LoadCounts {
        let mut counts = LoadCounts::default();
        let count = clients.len().min(SESSIONS_MAX);
        self.sessions.fill(Session::default());
        let mut left = groups;
        for (session, client) in clients.iter().enumerate().take(count) {
            self.step(session, client, &mut left);
        }
        while left > 0 && self.sessions[..count].iter().any(|session| !session.is_broken) {
            let session = self.note_one(&mut counts, &give_back);
            self.step(session, &clients[session], &mut left);
        }
        cut();
        while self.sessions.iter().any(|session| session.in_flight > 0) {
            self.note_one(&mut counts, &give_back);
        }
        counts
    }

    /// Takes a session's next step if it has nothing in flight.
    fn step(&mut self, session: usize, client: &Client, left: &mut u64) {
        let state = &self.sessions[session];
        if state.in_flight > 0 || state.is_broken {
            return;
        }
        match state.next {
            Next::Group => {
                *left = left.saturating_sub(1);
                self.sessions[session].group.clear();
                for _ in 0..=self.dice.below(GROUP_MAX) {
                    self.write(session, client, false);
                }
                self.sessions[session].next = Next::Commit;
            }
            Next::Commit => {
                if self.dice.one_in(3) {
                    self.write(session, client, true);
                } else {
                    let place = self.log.submit_flush();
                    self.send(session, client, &Command::Flush, CommitRequest::Flush(place));
                }
                self.sessions[session].next =
                    if self.dice.one_in(3) { Next::Read } else { Next::Group };
            }
            Next::Read => {
                let (sector, count) = self.choose(session);
                let (offset, length) =
                    (sector * SECTOR_BYTES as u64, count as u32 * SECTOR_BYTES as u32);
                self.sessions[session].next = Next::Group;
                self.send(
                    session,
                    client,
                    &Command::Read { offset, length },
                    CommitRequest::Read { sector, count },
                );
            }
        }
    }

    /// A piece of a session's own part.
    fn choose(&mut self, session: usize) -> (u64, u64) {
        let part = self.known.len() as u64 / SESSIONS_MAX as u64;
        let count = 1 + self.dice.below(SECTORS_MAX);
        // Half of all writes go to a small area, as with a table's head.
        let reach = if self.dice.one_in(2) { part } else { part.min(16 * SECTORS_MAX) };
        (session as u64 * part + self.dice.below(reach - count + 1), count)
    }

    /// Writes a piece, if it overlaps no other of its group.
    fn write(&mut self, session: usize, client: &Client, fua: bool) {
        let mut piece = self.choose(session);
        let is_taken =
            |group: &[u64], (sector, count)| (sector..sector + count).any(|at| group.contains(&at));
        while is_taken(&self.sessions[session].group, piece) {
            piece = self.choose(session);
        }
        let (sector, count) = piece;
        self.sessions[session].group.extend(sector..sector + count);
        let (offset, length) = (sector * SECTOR_BYTES as u64, count * SECTOR_BYTES as u64);
        for known in &mut self.known[sector as usize..(sector + count) as usize] {
            *known = None;
        }
        let zeroes = !fua && self.dice.one_in(16);
        let kind = if zeroes { Kind::Zero } else { Kind::Data };
        let submit = if fua { Log::submit_fua } else { Log::submit };
        let place = submit(&mut self.log, kind, sector, count as u32);
        let command = if zeroes {
            Command::Trim { offset, length, fua: false }
        } else {
            Command::Write { offset, bytes: self.log.bytes_of(place), fua }
        };
        self.send(session, client, &command, CommitRequest::Write(place));
    }

    fn send(&mut self, session: usize, client: &Client, command: &Command, request: CommitRequest) {
        self.sessions[session].in_flight += 1;
        self.sessions[session].is_reading = matches!(request, CommitRequest::Read { .. });
        let (sender, clock, since) = (self.sender.clone(), self.log.clock.clone(), Instant::now());
        client.submit_then(command, move |outcome| {
            // The load may have ended.
            let _ = sender.send(CommitCompletion {
                session,
                request,
                since,
                at: clock.tick(),
                outcome,
            });
        });
    }

    fn wait_for_one(&self, give_back: &impl Fn()) -> CommitCompletion {
        let only_reads =
            self.sessions.iter().all(|session| session.in_flight == 0 || session.is_reading);
        if only_reads {
            if let Ok(ended) = self.receiver.recv_timeout(READS_WAIT) {
                return ended;
            }
            give_back();
        }
        let ended = self.receiver.recv_timeout(PATIENCE);
        ended.unwrap_or_else(|_| panic!("no answer for {} s", PATIENCE.as_secs()))
    }

    fn note_one(&mut self, counts: &mut LoadCounts, give_back: &impl Fn()) -> usize {
        let CommitCompletion { session, request, since, at, outcome } =
            self.wait_for_one(give_back);
        self.sessions[session].in_flight -= 1;
        match (outcome, request) {
            (Ok(_), CommitRequest::Write(place)) => {
                let write = &mut self.log.writes[place];
                write.completed = Some(at);
                counts.writes += 1;
                counts.commits += u64::from(write.fua);
                if write.fua {
                    counts.last_commit = counts.last_commit.max(Some(since));
                }
                let holds = if write.kind == Kind::Data { write.id } else { 0 };
                let sectors = write.sector as usize..write.sector as usize + write.count as usize;
                self.known[sectors].fill(Some(holds));
            }
            (Ok(_), CommitRequest::Flush(place)) => {
                self.log.flushes[place].completed = Some(at);
                counts.commits += 1;
                counts.last_commit = counts.last_commit.max(Some(since));
            }
            (Ok(reply), CommitRequest::Read { sector, count }) => {
                match self.compare(sector, count, &reply.bytes) {
                    Ok(()) => counts.reads += 1,
                    Err(wrong) => counts.violations.push(wrong),
                }
            }
            (Err(Failure::Errno(_)), CommitRequest::Read { .. }) => counts.read_errors += 1,
            (Err(Failure::Errno(number)), CommitRequest::Write(_) | CommitRequest::Flush(_)) => {
                self.sessions[session].is_broken = true;
                if self.may_be_refused {
                    counts.refused += 1;
                    return session;
                }
                counts.violations.push(format!("a write or flush was refused with error {number}"));
            }
            (Err(Failure::Gone), _) => self.sessions[session].is_broken = true,
        }
        session
    }

    /// Checks that a read returned the content that its session knows.
    fn compare(&self, sector: u64, count: u64, bytes: &[u8]) -> Result<(), String> {
        if bytes.len() as u64 != count * SECTOR_BYTES as u64 {
            return Err(format!("a read of {count} sectors gave {} bytes", bytes.len()));
        }
        for (at, found) in (sector..).zip(bytes.chunks(SECTOR_BYTES)) {
            let Some(known) = self.known[at as usize] else { continue };
            let found = Sector::read(found);
            let right = match found {
                Sector::Empty => known == 0,
                Sector::Stamped(stamp) => {
                    stamp.run == self.log.run && stamp.sector == at && stamp.write == known
                }
                Sector::Damaged => false,
            };
            if !right {
                return Err(format!("a read of sector {at} gave {found:?} where write {known} is"));
            }
        }
        Ok(())
    }
}
