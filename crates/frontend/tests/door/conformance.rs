//! The contract of `Door` as tests that any door can run: one function or more per clause, Q1 to
//! Q8.
//!
//! Each opens doors of its own over a device that can hold writes back, and panics with the
//! clause's number when the clause is broken. What only a protocol knows it gives as a
//! [`DoorSubject`]. A wait for what must not happen shows a fault, not its absence.
//!
//! Not here: what a clause means for one protocol alone (the tests of that protocol).

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use parking_lot::Mutex;
use sawmill_device::{BlockDevice, ErrorKind, Geometry, MemoryDevice, Operation, Request};
use sawmill_frontend::{Door, DoorPiece, QuietDoor, Stop};
use sawmill_testkit::wait_until;

/// The length of each read and write.
pub(crate) const BLOCK_BYTES: usize = 4096;
/// Longer than anything takes that ends at all.
const PATIENCE: Duration = Duration::from_secs(60);
/// The size of the device at first; later it has twice as much.
const SIZE_BYTES: u64 = 4 << 20;

/// A user of an open door, with one write in flight at most.
pub(crate) trait DoorUser {
    /// Begins to write this byte over a block.
    fn begin_write(&mut self, block: u64, byte: u8);

    /// Whether the answer to the write has come.
    fn is_answered(&self) -> bool;

    /// Waits for the answer, which must be a success.
    fn finish_write(&mut self);

    /// Reads a block, also while a write is in flight.
    fn read(&mut self, block: u64) -> Vec<u8>;
}

/// A door and its user.
pub(crate) struct OpenDoor {
    pub(crate) door: Arc<dyn Door>,
    pub(crate) user: Box<dyn DoorUser>,
}

/// What a protocol gives: doors of one kind, one at a time.
pub(crate) trait DoorSubject {
    fn open(&self, device: Arc<dyn BlockDevice>) -> OpenDoor;

    /// Takes a door over as another process does, and has the old one released on the way.
    fn take_over(&self, old: Box<dyn QuietDoor>, device: Arc<dyn BlockDevice>) -> Arc<dyn Door>;

    /// Goes as far with the pieces as another process can that then fails.
    fn fail_to_take_over(&self, pieces: Vec<DoorPiece>, device: Arc<dyn BlockDevice>);

    /// The size that a user sees who opens the device now, or as a refusal of
    /// [`Door::resized`] says.
    fn reopened_size(&self, door: Arc<dyn Door>, device: Arc<dyn BlockDevice>) -> u64;
}

/// One test of the contract.
#[derive(Clone, Copy)]
pub(crate) struct Clause {
    /// The name of its function, which begins with the clause's number.
    name: &'static str,
    test: fn(&dyn DoorSubject),
}

macro_rules! clauses {
    ($($test:ident),* $(,)?) => { &[$(Clause { name: stringify!($test), test: $test }),*] };
}

/// Every clause.
const CLAUSES: &[Clause] = clauses![
    q1_a_quiet_door_has_answered_all_and_accepts_nothing,
    q2_a_quiet_door_stays_quiet_until_it_is_resumed,
    q3_a_door_that_is_not_quiet_in_time_resumes,
    q4_a_hand_over_can_be_taken_back,
    q5_a_release_ends_nothing_for_users,
    q6_a_quiet_door_is_stale_once_the_door_has_resumed,
    q7_a_drained_stop_answers_what_was_accepted,
    q7_stop_now_does_not_wait_for_the_device,
    q7_a_quiet_door_can_be_stopped,
    q8_a_new_size_is_seen_or_refused,
];

/// Runs every clause, each on a subject of its own.
pub(crate) fn keep_every_clause<S: DoorSubject>(subject: impl Fn() -> S) {
    for clause in CLAUSES {
        println!("{}", clause.name);
        (clause.test)(&subject());
    }
}

fn q1_a_quiet_door_has_answered_all_and_accepts_nothing(subject: &dyn DoorSubject) {
    let device = HoldingDevice::new();
    let OpenDoor { door, mut user } = subject.open(device.clone());
    device.hold();
    begin_held_write(&device, &mut *user);
    let quiet_door = thread::scope(|scope| {
        let quiescing = scope.spawn(|| door.quiesce(PATIENCE));
        wait_in_vain();
        let is_early = quiescing.is_finished();
        device.release();
        assert!(!is_early, "Q1: a door is quiet before it has answered all");
        quiescing.join().expect("no panic").expect("Q1: all is answered")
    });
    user.finish_write();
    assert_eq!(door.counts().in_flight, 0, "Q1: requests in flight at a quiet door");
    user.begin_write(1, 2);
    expect_waiting("Q1", &device, &*user, 1);
    quiet_door.resume();
    user.finish_write();
    expect_block("Q1", &mut *user, 1, 2);
}

fn q2_a_quiet_door_stays_quiet_until_it_is_resumed(subject: &dyn DoorSubject) {
    let device = HoldingDevice::new();
    let OpenDoor { door, mut user } = subject.open(device.clone());
    drop(quiesce("Q2", &*door));
    user.begin_write(0, 1);
    expect_waiting("Q2", &device, &*user, 0);
    drop(quiesce("Q2", &*door));
    expect_waiting("Q2", &device, &*user, 0);
    quiesce("Q2", &*door).resume();
    user.finish_write();
    expect_block("Q2", &mut *user, 0, 1);
}

fn q3_a_door_that_is_not_quiet_in_time_resumes(subject: &dyn DoorSubject) {
    let device = HoldingDevice::new();
    let OpenDoor { door, mut user } = subject.open(device.clone());
    device.hold();
    begin_held_write(&device, &mut *user);
    let error = door.quiesce(Duration::from_millis(1)).err();
    let kind = error.map(|error| error.kind());
    assert_eq!(kind, Some(ErrorKind::Unavailable), "Q3: the device has not answered");
    expect_block("Q3", &mut *user, 1, 0);
    device.release();
    user.finish_write();
    expect_block("Q3", &mut *user, 0, 1);
    quiesce("Q3", &*door).resume();
}

fn q4_a_hand_over_can_be_taken_back(subject: &dyn DoorSubject) {
    let device = HoldingDevice::new();
    let OpenDoor { door, mut user } = subject.open(device.clone());
    let quiet_door = quiesce("Q4", &*door);
    user.begin_write(0, 1);
    drop(quiet_door.hand_over().expect("Q4: a quiet door can be handed over"));
    let pieces = quiet_door.hand_over().expect("Q4: it can be handed over again");
    subject.fail_to_take_over(pieces, device.clone());
    expect_waiting("Q4", &device, &*user, 0);
    quiet_door.resume();
    user.finish_write();
    expect_block("Q4", &mut *user, 0, 1);
}

fn q5_a_release_ends_nothing_for_users(subject: &dyn DoorSubject) {
    let device = HoldingDevice::new();
    let OpenDoor { door, mut user } = subject.open(device.clone());
    user.begin_write(0, 1);
    user.finish_write();
    let quiet_door = quiesce("Q5", &*door);
    user.begin_write(1, 2);
    let next = subject.take_over(quiet_door, device.clone());
    // The old door has ended, and its end ends nothing.
    door.stop(Stop::Drained);
    drop(door);
    user.finish_write();
    expect_block("Q5", &mut *user, 0, 1);
    expect_block("Q5", &mut *user, 1, 2);
    next.stop(Stop::Drained);
}

fn q6_a_quiet_door_is_stale_once_the_door_has_resumed(subject: &dyn DoorSubject) {
    let device = HoldingDevice::new();
    let OpenDoor { door, mut user } = subject.open(device.clone());
    let stale = quiesce("Q6", &*door);
    quiesce("Q6", &*door).resume();
    assert!(stale.hand_over().is_err(), "Q6: a door is handed over while it serves its users");
    drop(stale);
    user.begin_write(0, 1);
    user.finish_write();
    expect_block("Q6", &mut *user, 0, 1);
}

fn q7_a_drained_stop_answers_what_was_accepted(subject: &dyn DoorSubject) {
    let device = HoldingDevice::new();
    let OpenDoor { door, mut user } = subject.open(device.clone());
    device.hold();
    begin_held_write(&device, &mut *user);
    thread::scope(|scope| {
        let stopping = scope.spawn(|| door.stop(Stop::Drained));
        wait_in_vain();
        let is_early = stopping.is_finished();
        device.release();
        assert!(!is_early, "Q7: a drained stop leaves a request unanswered");
    });
    user.finish_write();
}

fn q7_stop_now_does_not_wait_for_the_device(subject: &dyn DoorSubject) {
    let device = HoldingDevice::new();
    let OpenDoor { door, mut user } = subject.open(device.clone());
    device.hold();
    begin_held_write(&device, &mut *user);
    let (sender, receiver) = channel();
    thread::scope(|scope| {
        scope.spawn(|| {
            door.stop(Stop::Now);
            // The other end is gone only if the clause is broken.
            let _ = sender.send(());
        });
        let stopped = receiver.recv_timeout(PATIENCE);
        device.release();
        assert!(stopped.is_ok(), "Q7: a stop waits for the device");
    });
}

fn q7_a_quiet_door_can_be_stopped(subject: &dyn DoorSubject) {
    for how in [Stop::Drained, Stop::Now] {
        let OpenDoor { door, user: _user } = subject.open(HoldingDevice::new());
        drop(quiesce("Q7", &*door));
        door.stop(how);
    }
}

fn q8_a_new_size_is_seen_or_refused(subject: &dyn DoorSubject) {
    let device = HoldingDevice::new();
    let OpenDoor { door, mut user } = subject.open(device.clone());
    expect_block("Q8", &mut *user, 0, 0);
    device.size_bytes.store(2 * SIZE_BYTES, SeqCst);
    match door.resized() {
        Ok(()) => expect_block("Q8", &mut *user, 2 * SIZE_BYTES / BLOCK_BYTES as u64 - 1, 0),
        Err(error) => assert_eq!(error.kind(), ErrorKind::Refused, "Q8: {error}"),
    }
    drop(user);
    let size_bytes = subject.reopened_size(door, device);
    assert_eq!(size_bytes, 2 * SIZE_BYTES, "Q8: the size that a new user sees");
}

fn quiesce(clause: &str, door: &dyn Door) -> Box<dyn QuietDoor> {
    let outcome = door.quiesce(PATIENCE);
    outcome.unwrap_or_else(|error| panic!("{clause}: nothing is slow: {error}"))
}

/// Begins to write 1 over block 0, and waits until the device holds that.
fn begin_held_write(device: &HoldingDevice, user: &mut dyn DoorUser) {
    user.begin_write(0, 1);
    wait_until("the write at the device", || device.write_count.load(SeqCst) == 1);
}

/// Fails if the user's write has reached the device beside this many others, or is answered.
fn expect_waiting(clause: &str, device: &HoldingDevice, user: &dyn DoorUser, write_count: u64) {
    wait_in_vain();
    let found = (user.is_answered(), device.write_count.load(SeqCst));
    assert_eq!(found, (false, write_count), "{clause}: a quiet door has accepted a request");
}

fn expect_block(clause: &str, user: &mut dyn DoorUser, block: u64, byte: u8) {
    assert!(user.read(block) == [byte; BLOCK_BYTES], "{clause}: block {block} is not all {byte}");
}

/// Gives a door that fails to wait the time to show it.
fn wait_in_vain() {
    (0..2_000).for_each(|_| thread::yield_now());
}

/// A device in memory that can hold writes back and can grow.
struct HoldingDevice {
    inner: MemoryDevice,
    size_bytes: AtomicU64,
    /// The held writes, or `None` while none is held.
    held: Mutex<Option<Vec<Request>>>,
    write_count: AtomicU64,
}

impl HoldingDevice {
    fn new() -> Arc<Self> {
        Arc::new(HoldingDevice {
            inner: MemoryDevice::new(2 * SIZE_BYTES),
            size_bytes: SIZE_BYTES.into(),
            held: Mutex::default(),
            write_count: AtomicU64::default(),
        })
    }

    fn hold(&self) {
        *self.held.lock() = Some(Vec::new());
    }

    fn release(&self) {
        let held = self.held.lock().take();
        held.into_iter().flatten().for_each(|request| self.inner.submit(request));
    }
}

impl BlockDevice for HoldingDevice {
    fn geometry(&self) -> Geometry {
        Geometry { size_bytes: self.size_bytes.load(SeqCst), ..self.inner.geometry() }
    }

    fn submit(&self, request: Request) {
        if request.operation == Operation::Write {
            let mut held = self.held.lock();
            self.write_count.fetch_add(1, SeqCst);
            if let Some(requests) = &mut *held {
                return requests.push(request);
            }
        }
        self.inner.submit(request);
    }
}
