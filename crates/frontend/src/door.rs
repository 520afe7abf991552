//! The interface of every door, whatever its protocol.
//!
//! A door is *quiet* from [`Door::quiesce`] to [`QuietDoor::resume`]. Only a quiet door can be
//! handed over to another process, which needs a few facts and the descriptors of the door.
//!
//! Invariants: the clauses Q1 to Q8 of [`Door`]. Nothing but [`QuietDoor::resume`] resumes a quiet
//! door: a process that fails in the middle of a hand-off must not serve what another may have. Not
//! here: how the pieces travel between processes.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::time::Duration;

use sawmill_device::Result;

/// A running door.
///
/// # The contract
///
/// Each clause has functions of its number in `tests/door/conformance.rs`, for doors of any
/// protocol. These run all of them:
///
/// | door | run by |
/// |---|---|
/// | nbd | `nbd::a_server_keeps_every_clause_of_a_door` |
/// | fuse | `fuse::a_mount_keeps_every_clause_of_a_door` |
/// | vhost-user | `vhost::a_vhost_user_door_keeps_every_clause_of_a_door` |
/// | ublk | `ublk::clauses` |
/// | buse | `buse::clauses` |
///
/// A door that cannot show a clause has its row here, and its subject says where it stops:
///
/// | clause | door | what it cannot show |
/// |---|---|---|
/// | Q4 | fuse | cannot: a process that has the mount serves it, so one that fails never had it |
/// | Q4 | ublk | cannot: the kernel gives a device to one server at a time |
/// | Q4 | buse | cannot: the kernel gives a port to one server at a time |
/// | Q8 | ublk | cannot: before Linux 6.16 a device is stopped and started again to be larger |
///
/// The tests that a clause names show more of it on one door.
///
/// - **Q1** A quiet door accepts no request and has answered each that it accepted. Its users wait,
///   and notice nothing else.
///   `nbd::a_door_is_quiet_only_when_what_it_took_is_answered`,
///   `nbd::a_quiet_door_takes_nothing_and_goes_on_when_resumed`
/// - **Q2** A door stays quiet until it is resumed, released or stopped. A [`QuietDoor`] that is
///   dropped changes nothing; another `quiesce` returns another one.
///   `nbd::a_quiet_server_can_be_stopped_and_its_exports_removed`
/// - **Q3** If a door is not quiet within `patience`, it resumes, and `quiesce` returns
///   `Unavailable`.
///   `nbd::a_door_that_cannot_become_quiet_says_so_and_goes_on`,
///   `fuse::a_door_that_cannot_be_quiet_in_time_resumes`,
///   `vhost::a_door_that_cannot_be_quiet_goes_on`
/// - **Q4** A door that was handed over can resume until it is released. Whatever the other process
///   has done with the pieces by then, users notice nothing of it.
///   `nbd::a_server_on_trial_leaves_everything_as_it_was`,
///   `fuse::what_is_not_this_mount_is_not_taken_over`,
///   `vhost::a_door_on_trial_leaves_everything_as_it_was`
/// - **Q5** `release` ends no connection, device or mount that was handed over.
///   `nbd::a_door_let_go_ends_nothing_for_clients_that_were_handed_over`,
///   `fuse::a_door_changes_hands_twenty_times_under_load_and_no_write_is_lost`,
///   `vhost::a_door_is_handed_over_with_its_connection`, `ublk::handoff`
/// - **Q6** Once the door has resumed, an older [`QuietDoor`] is stale: its `hand_over` fails.
///   `nbd::a_door_that_is_not_quiet_is_neither_handed_over_nor_let_go`
/// - **Q7** [`Stop::Drained`] answers each request that the door accepted. [`Stop::Now`] does not
///   wait for the device. A quiet door can be stopped.
///   `nbd::stop_answers_what_is_in_flight_and_takes_no_more`,
///   `fuse::a_stop_answers_what_is_in_flight`, `vhost::stopping_a_door_answers_what_it_took`,
///   `nbd::a_quiet_server_can_be_stopped_and_its_exports_removed`
/// - **Q8** A user who opens the device after `resized` sees its new size. Where those who have it
///   open cannot see it, `resized` returns `Refused`.
///   `fuse::a_new_size_is_seen_by_openers_and_by_the_loop_device`,
///   `vhost::a_new_size_is_announced_and_so_is_any_size_to_a_frontend_that_comes_back`,
///   `nbd::a_disk_that_has_grown_is_shown_to_old_clients_as_it_was`
pub trait Door: Send + Sync {
    /// The protocol: `nbd`, `ublk`, `vhost-user`, `fuse` or `buse`.
    fn kind(&self) -> &'static str;

    /// What a user opens: an address, a device node, a socket, a file.
    fn address(&self) -> String;

    /// The export with this name. A door with one device has one export, whatever the name.
    fn export(&self, name: &str) -> ExportStatus;

    /// The counters since the start.
    fn counts(&self) -> DoorCounts;

    /// Accepts no more requests and waits until the accepted ones are answered, for `patience` at
    /// most. Of a door whose users have ended it (an unmounted folder, a deleted device), this or
    /// [`QuietDoor::hand_over`] returns `Closed`.
    fn quiesce(&self, patience: Duration) -> Result<Box<dyn QuietDoor>>;

    /// Announces the device's new size to those who have it open. Returns `Refused` where this door
    /// or kernel cannot; the text says how they come to see it.
    fn resized(&self) -> Result<()>;

    /// Closes the door, which may be quiet.
    fn stop(&self, how: Stop);
}

/// A door that accepts no request and has answered all that it accepted.
///
/// If the door has resumed or ended through another value in the meantime, this one is stale.
#[must_use = "the users of a quiet door wait until it is resumed"]
pub trait QuietDoor: Send {
    /// What another process needs to take over this door. Descriptors are duplicates. Returns an
    /// error if this value is stale.
    fn hand_over(&self) -> Result<Vec<DoorPiece>>;

    /// Releases everything that was handed over to its new owner, without ending any connection.
    /// The door has ended then.
    fn release(self: Box<Self>);

    /// Accepts requests again.
    fn resume(self: Box<Self>);
}

/// How a door closes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// It accepts no more requests and answers the accepted ones first.
    Drained,
    /// Immediately. Requests in flight continue in their devices, without an answer to the user.
    Now,
}

/// An export of a door, as its users see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportStatus {
    /// What a user opens.
    pub address: String,
    /// The connected peers, if the door knows them, the oldest first.
    pub peers: Vec<String>,
}

/// One piece of a door for another process: a listening socket, a connection, a device.
#[derive(Debug, Default)]
pub struct DoorPiece {
    /// The kind of piece, as its door names it.
    pub what: String,
    /// Facts by name. A reader ignores unknown names, and fails if one is missing.
    pub facts: BTreeMap<String, String>,
    /// Bytes that were received and not parsed yet.
    pub bytes: Vec<u8>,
    /// Open files, in the order that the door documents.
    pub descriptors: Vec<OwnedFd>,
}

/// The counters that all doors have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DoorCounts {
    /// Connections (or queues, or mounts) open now.
    pub connections: u64,
    /// Connections ever made.
    pub connections_total: u64,
    /// Connections closed at once because a limit was reached. Zero for doors with one user.
    pub connections_refused: u64,
    /// Connections closed in favor of others: the client did not read its replies, or did not
    /// finish its handshake.
    pub connections_cut: u64,
    /// Read requests that were accepted since the start, whatever became of them.
    pub reads: u64,
    /// See `reads`.
    pub writes: u64,
    /// See `reads`.
    pub flushes: u64,
    /// See `reads`.
    pub discards: u64,
    /// See `reads`.
    pub write_zeroes: u64,
    /// See `reads`.
    pub others: u64,
    /// Bytes of writes' payload.
    pub bytes_in: u64,
    /// Bytes of reads' data.
    pub bytes_out: u64,
    /// Requests answered with an error.
    pub errors: u64,
    /// Accepted requests without an answer.
    pub in_flight: u64,
    /// Protocol violations of peers.
    pub protocol_violations: u64,
    /// Receives that a look before a sleep found (NBD).
    pub receives_awake: u64,
}
