//! An export's reservation: who is admitted, who is fenced, what outlives a process.
//!
//! Not here: the same over a wire, with initiators that come back (`tests/simulation`).

use super::*;
use sawmill_device::{MemoryDevice, Reply};
use std::sync::mpsc::{Receiver, Sender, channel};

const CHANGE: Effects = Effects { changes: true, syncs: false };

/// A standing in memory that the next target starts with.
#[derive(Clone, Default)]
struct MemoryStanding(Arc<Mutex<Standing>>);

impl StandingStore for MemoryStanding {
    fn keep(&self, standing: &Standing) -> Result<()> {
        *self.0.lock() = *standing;
        Ok(())
    }
}

fn export(standing: Option<&MemoryStanding>) -> (Exports, Arc<Export>) {
    let exports = Exports::default();
    let device = Arc::new(crate::Unpacker::new(MemoryDevice::new(4096)));
    let lasting =
        standing.map(|store| (*store.0.lock(), Box::new(store.clone()) as Box<dyn StandingStore>));
    exports.add("disk", device, [0; 16], lasting).expect("the first");
    let export = exports.find("disk", &Rights::all()).expect("just added");
    (exports, export)
}

fn admit(export: &Export, connection: u64, flags: u8, reservation: u64, random: u64) -> Result<()> {
    let instance = [connection as u8; 16];
    export.admit(
        connection,
        OpenRequest { instance, flags, reservation, ..OpenRequest::default() },
        || random,
    )
}

fn reservation(export: &Export) -> u64 {
    export.opened(0).reservation
}

/// Storage that stores a standing only when the test allows it.
struct SlowStandingStore {
    begin_sender: Mutex<Sender<()>>,
    end_receiver: Mutex<Receiver<()>>,
}

impl StandingStore for SlowStandingStore {
    fn keep(&self, _: &Standing) -> Result<()> {
        self.begin_sender.lock().send(()).expect("the test waits");
        self.end_receiver.lock().recv().expect("the test lets it end");
        Ok(())
    }
}

#[test]
fn requests_do_not_wait_for_a_reservation_to_be_made_durable() {
    let ((begin_sender, begin_receiver), (end_sender, end_receiver)) = (channel(), channel());
    let slow = SlowStandingStore {
        begin_sender: Mutex::new(begin_sender),
        end_receiver: Mutex::new(end_receiver),
    };
    let exports = Exports::default();
    let device = Arc::new(crate::Unpacker::new(MemoryDevice::new(4096)));
    let lasting: Box<dyn StandingStore> = Box::new(slow);
    exports.add("disk", device, [0; 16], Some((Standing::default(), lasting))).expect("the first");
    let export = exports.find("disk", &Rights::all()).expect("just added");
    end_sender.send(()).expect("kept");
    export.admit(1, OpenRequest::default(), || 7).expect("it is free");
    begin_receiver.recv().expect("the first reservation");
    std::thread::scope(|scope| {
        let taking = scope.spawn(|| {
            export.admit(2, OpenRequest { flags: OPEN_TAKE_OVER, ..OpenRequest::default() }, || 8)
        });
        begin_receiver.recv().expect("the takeover");
        drop(export.begin(1, CHANGE).expect("it has the export until the takeover is durable"));
        end_sender.send(()).expect("kept");
        taking.join().expect("no panic").expect("nothing is in flight");
    });
    let fenced = export.begin(1, CHANGE).err().map(|error| error.kind());
    assert_eq!(fenced, Some(ErrorKind::Fenced));
    export.begin(2, CHANGE).expect("its own");
}

#[test]
fn no_initiator_is_admitted_while_the_device_has_requests_of_one_that_is_gone() {
    let (exports, export) = export(None);
    admit(&export, 1, 0, 0, 11).expect("free");
    let work = export.begin(1, CHANGE).expect("its owner");
    assert_eq!(export.leave(1).expect_err("it is under way").kind(), ErrorKind::Invalid);
    exports.forget(1, None);
    assert!(export.begin(1, Effects::default()).is_err());
    let early = admit(&export, 2, 0, 0, 22).expect_err("1 has requests at the device");
    assert_eq!(early.kind(), ErrorKind::Unavailable);
    drop(work);
    admit(&export, 2, 0, 0, 33).expect("1 has no requests left");
    assert_eq!(export.state.lock().users.len(), 1, "the one that is gone is forgotten");
    assert_eq!(reservation(&export), 22, "asking again begins no new reservation");
}

#[test]
fn a_fenced_initiator_may_reopen_and_does_not_block_itself() {
    let (_, export) = export(None);
    admit(&export, 1, 0, 0, 11).expect("free");
    let _work = export.begin(1, CHANGE).expect("its owner");
    let early = admit(&export, 2, OPEN_TAKE_OVER, 0, 22).expect_err("1 has requests at the device");
    assert_eq!(early.kind(), ErrorKind::Unavailable);
    assert_eq!(export.begin(1, CHANGE).err().expect("cut off").kind(), ErrorKind::Fenced);
    admit(&export, 1, OPEN_TAKE_OVER, 0, 33).expect("its own request is under way");
    drop(export.begin(1, CHANGE).expect("its owner again"));
}

#[test]
fn an_initiator_that_opened_to_read_does_not_write() {
    let (_, export) = export(None);
    let changes = |connection| export.begin(connection, CHANGE).map(drop);
    admit(&export, 1, OPEN_READ_ONLY, 0, 11).expect("free");
    assert_eq!(changes(1).expect_err("a change").kind(), ErrorKind::ReadOnly);
    admit(&export, 1, 0, 0, 12).expect("no other initiator is there");
    changes(1).expect("opened to be written");
    assert!(admit(&export, 2, 0, 0, 22).is_err(), "1 is alone now");
}

#[test]
fn a_reservation_is_over_once_another_initiator_had_it_in_any_process() {
    let store = MemoryStanding::default();
    let (_, first) = export(Some(&store));
    admit(&first, 1, 0, 0, 11).expect("free");
    first.leave(1).expect("given back");
    admit(&first, 1, 0, 11, 12).expect("no other had it meanwhile");
    admit(&first, 2, OPEN_TAKE_OVER, 0, 22).expect("taken over");
    first.leave(2).expect("given back");
    let (_, second) = export(Some(&store));
    for export in [&first, &second] {
        for flags in [0, OPEN_TAKE_OVER, OPEN_SHARED, OPEN_READ_ONLY] {
            let late = admit(export, 1, flags, 11, 13).expect_err("2 had it");
            assert_eq!(late.kind(), ErrorKind::Fenced);
        }
        admit(export, 2, 0, 22, 23).expect("no other had it since");
        assert_eq!(reservation(export), 22);
        export.leave(2).expect("given back");
    }
}

#[test]
fn initiators_that_share_have_one_reservation_until_one_opens_it_alone() {
    let store = MemoryStanding::default();
    let (_, export) = export(Some(&store));
    admit(&export, 1, OPEN_SHARED, 0, 11).expect("free");
    admit(&export, 2, OPEN_SHARED, 0, 22).expect("by agreement");
    admit(&export, 3, OPEN_READ_ONLY, 0, 33).expect("a reader");
    assert_eq!(reservation(&export), 11);
    admit(&export, 4, OPEN_TAKE_OVER, 0, 44).expect("alone");
    assert_eq!(admit(&export, 2, OPEN_SHARED, 11, 23).expect_err("over").kind(), ErrorKind::Fenced);
    admit(&export, 5, OPEN_SHARED | OPEN_TAKE_OVER, 0, 55).expect("shared again");
    assert_eq!(
        (reservation(&export), *store.0.lock()),
        (55, Standing { reservation: 55, shared: true, failed_syncs: 0 })
    );
}

#[test]
fn the_volatile_cache_identity_changes_once_after_a_failed_sync() {
    let store = MemoryStanding::default();
    let (_, first) = export(Some(&store));
    admit(&first, 1, 0, 0, 11).expect("free");
    let identity = first.opened(0).cache_identity;
    let end = |syncs, outcome: Outcome| {
        first.begin(1, Effects { changes: true, syncs }).expect("its owner").ended(&outcome)
    };
    let failure = |kind| Err(Error::new(kind, "the disk"));
    end(true, Ok(Reply::Done));
    end(false, failure(ErrorKind::Unavailable));
    end(true, failure(ErrorKind::Invalid));
    assert_eq!(first.opened(0).cache_identity, identity, "no sync has failed");
    end(true, failure(ErrorKind::Unavailable));
    end(true, failure(ErrorKind::Unavailable));
    assert_eq!(store.0.lock().failed_syncs, 1, "no identity was reported in between");
    let (_, second) = export(Some(&store));
    assert_ne!(second.opened(0).cache_identity, identity);
    let newer = second.opened(0).cache_identity;
    assert_eq!(first.opened(0).cache_identity, newer, "it changes once");
}

#[test]
fn an_initiator_expected_back_keeps_the_export_for_a_while_and_no_longer() {
    let store = MemoryStanding::default();
    let (exports, export) = export(Some(&store));
    admit(&export, 1, 0, 0, 11).expect("free");
    exports.forget(1, Some(100));
    assert!(export.begin(1, CHANGE).is_err(), "its connection has ended");
    for flags in [0, OPEN_SHARED, OPEN_READ_ONLY] {
        assert_eq!(
            admit(&export, 2, flags, 0, 22).expect_err("the export is initiator 1's").kind(),
            ErrorKind::InUse
        );
    }
    admit(&export, 3, 0, 11, 33).expect("the same initiator, on another connection");
    assert_eq!((reservation(&export), store.0.lock().reservation), (11, 11));
    exports.forget(3, Some(100));
    let late = OpenRequest { flags: OPEN_READ_ONLY, now_ns: 100, ..OpenRequest::default() };
    export.admit(2, late, || 22).expect("it did not come back");
    assert_eq!(admit(&export, 4, 0, 11, 44).expect_err("too late").kind(), ErrorKind::Fenced);
}

#[test]
fn an_open_whose_answer_was_lost_with_its_connection_is_no_bar_to_the_next() {
    let (exports, export) = export(None);
    let again = OpenRequest { instance: [1; 16], ..OpenRequest::default() };
    admit(&export, 1, 0, 0, 11).expect("free");
    exports.forget(1, Some(100));
    assert_eq!(admit(&export, 2, 0, 0, 22).expect_err("another's").kind(), ErrorKind::InUse);
    export.admit(3, again, || 33).expect("the same initiator, which knows of no reservation");
}

#[test]
fn a_guest_ends_no_reservation_and_makes_room_for_its_holder() {
    let store = MemoryStanding::default();
    let (exports, export) = export(Some(&store));
    let reader = OpenRequest { flags: OPEN_READ_ONLY, reads_only: true, ..OpenRequest::default() };
    admit(&export, 1, 0, 0, 11).expect("free");
    assert_eq!(export.admit(2, reader, || 22).expect_err("it is open").kind(), ErrorKind::InUse);
    exports.forget(1, None);
    export.admit(2, reader, || 22).expect("no initiator is there");
    assert_eq!(store.0.lock().reservation, 11);
    admit(&export, 3, 0, 11, 33).expect("initiator 3 continues");
    assert_eq!(
        export.begin(2, Effects::default()).err().expect("it had to go").kind(),
        ErrorKind::Fenced
    );
}
