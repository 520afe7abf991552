//! A guest does not notice that its door's process dies, is stopped, or is replaced by another.

use std::sync::Arc;
use std::time::Duration;

use sawmill_device::{BlockDeviceExt, ErrorKind, MemoryDevice};
use sawmill_frontend::vhost::VhostDoor;
use sawmill_frontend::{Door, Stop};
use vhost::VhostBackend;
use vhost::vhost_user::VhostUserFrontend;

use crate::TestFolder;
use crate::devices::{PausableDevice, SIZE_BYTES};
use crate::guest::*;

/// Long enough for anything that ends at all.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Writes of one sector each, offered on one queue and taken by the door.
fn offer_writes(
    guest: &mut Guest,
    pausable: &PausableDevice,
    sectors: std::ops::Range<u64>,
) -> Vec<u16> {
    let before = pausable.count();
    let mut heads = Vec::new();
    for sector in sectors {
        let head = guest.prepare(0, STORE, sector, &[sector as u8 + 1; 512], 0);
        guest.offer(0, head);
        guest.kick(0);
        heads.push(head);
        pausable.requests(before + heads.len());
    }
    heads
}

#[test]
fn requests_in_flight_are_carried_out_by_the_next_process_in_the_order_they_came() {
    let folder = TestFolder::new();
    let memory = Arc::new(MemoryDevice::new(SIZE_BYTES));
    let mut guest = Guest::new(1);
    let first = PausableDevice::before(memory.clone());
    let door = folder.serve(first.clone());
    let front = guest.connect(&folder.path());
    // Some traffic first, so that heads are not in order of time: these end at 62, and continue at
    // 1.
    for n in 0..103 {
        assert_eq!(guest.execute(0, STORE, n, &[9; 512], 0).0, 0);
    }
    first.close();
    let mut heads = offer_writes(&mut guest, &first, 0..7);
    assert!(!heads.is_sorted());
    // Some are answered, so that the requests in flight are no longer contiguous in the ring.
    first.release_some(&[2, 5]);
    let mut reap = |guest: &mut Guest| {
        let head = guest.wait(0);
        heads.retain(|waiting| *waiting != head);
        assert_eq!(guest.status(head), 0);
        heads.len()
    };
    reap(&mut guest);
    reap(&mut guest);
    // As good as dead: its requests are neither executed nor answered.
    door.stop(Stop::Now);
    drop((door, front));
    assert_eq!(guest.used(0), 105);
    let second = PausableDevice::before(memory.clone());
    let _door = folder.serve(second.clone());
    let _front = guest.connect(&folder.path());
    let sectors: Vec<u64> =
        second.requests(5).iter().map(|(_, address, _)| address / 512).collect();
    assert_eq!(sectors, [0, 1, 3, 4, 6]);
    while reap(&mut guest) > 0 {}
    assert_eq!(guest.used(0), 110);
    assert_eq!(memory.read_at(6 * 512, 512).expect("in range"), [7; 512]);
    assert_eq!(guest.execute(0, STORE, 0, &[1; 512], 0).0, 0, "and the queue goes on");
}

#[test]
fn an_old_write_never_lands_after_a_newer_one() {
    let (folder, pausable) = (TestFolder::new(), PausableDevice::open());
    let _door = folder.serve(pausable.clone());
    let mut guest = Guest::new(1);
    let front = guest.connect(&folder.path());
    pausable.close();
    offer_writes(&mut guest, &pausable, 3..4);
    // The frontend reconnects; the old write is still in the device, which would execute a new one
    // at once.
    drop(front);
    pausable.pass_newer();
    let front = guest.connect(&folder.path());
    let head = guest.prepare(0, STORE, 3, &[0x77; 512], 0);
    guest.offer(0, head);
    guest.kick(0);
    front.get_features().expect("an answer");
    // A door that fails to wait has the time to show it.
    (0..20_000).for_each(|_| std::thread::yield_now());
    pausable.release_all();
    guest.wait(0);
    guest.wait(0);
    assert_eq!(pausable.count(), 3, "the old one, the old one carried out again, and the new one");
    assert_eq!(pausable.memory.read_at(3 * 512, 512).expect("in range"), [0x77; 512]);
}

#[test]
fn a_connection_that_is_gone_leaves_the_guests_memory_alone() {
    let (folder, pausable) = (TestFolder::new(), PausableDevice::open());
    let door = folder.serve(pausable.clone());
    let mut guest = Guest::new(1);
    let front = guest.connect(&folder.path());
    pausable.close();
    let head = guest.prepare(0, READ, 0, &[], 512);
    guest.offer(0, head);
    guest.kick(0);
    pausable.requests(1);
    drop(front);
    while door.counts().connections > 0 {
        std::thread::yield_now();
    }
    // Not before: the queue asks for kicks again after it has submitted what there was.
    let before = guest.get(0, MEMORY_BYTES as usize);
    pausable.release_all();
    while door.counts().in_flight > 0 {
        std::thread::yield_now();
    }
    assert!(guest.get(0, MEMORY_BYTES as usize) == before, "not a byte has changed");
}

#[test]
fn a_queue_is_stopped_only_when_all_is_answered() {
    let (folder, pausable) = (TestFolder::new(), PausableDevice::open());
    let _door = folder.serve(pausable.clone());
    let mut guest = Guest::new(1);
    let mut front = guest.connect(&folder.path());
    pausable.close();
    offer_writes(&mut guest, &pausable, 0..3);
    let stopping = front.clone();
    let base_reader = std::thread::spawn(move || stopping.get_vring_base(0).expect("an answer"));
    pausable.release_all();
    assert_eq!(base_reader.join().expect("no panic"), 3);
    assert_eq!(guest.used(0), 3, "a look finds all of it answered");
    // And it can be started again where it was.
    guest.start(&mut front, 0);
    (0..3).for_each(|_| {
        guest.wait(0);
    });
    assert_eq!(guest.execute(0, STORE, 9, &[1; 512], 0).0, 0);
}

#[test]
fn a_door_is_handed_over_with_its_connection() {
    let folder = TestFolder::new();
    let memory = Arc::new(MemoryDevice::new(SIZE_BYTES));
    let mut guest = Guest::new(2);
    let mut door = folder.serve(memory.clone());
    let front = guest.connect(&folder.path());
    for round in 0..5u8 {
        assert_eq!(guest.execute(0, STORE, 0, &[round; 512], 0).0, 0);
        let quiet_door = door.quiesce(PATIENCE).expect("nothing is slow");
        // Offered while no door serves the queue: the next door finds it.
        let head = guest.prepare(1, READ, 0, &[], 512);
        guest.offer(1, head);
        guest.kick(1);
        let pieces = quiet_door.hand_over().expect("it is quiet");
        quiet_door.release();
        let (next, quiet_door) =
            VhostDoor::take_over(folder.options(), memory.clone(), pieces).expect("it is whole");
        drop(door);
        assert_eq!(guest.used(1), u16::from(round), "nothing is served before the word");
        quiet_door.resume();
        assert_eq!(guest.wait(1), head);
        assert_eq!((guest.status(head), guest.get(data_at(head), 512)), (0, vec![round; 512]));
        door = next;
    }
    // The connection is the same one, and its messages still take effect.
    front.get_features().expect("an answer");
    assert_eq!(front.get_vring_base(1).expect("an answer"), 5);
    assert_eq!(door.counts().connections_total, 0);
    drop(front);
    door.stop(Stop::Drained);
    assert!(!folder.path().exists(), "the last one removes the socket");
}

#[test]
fn a_hand_over_can_be_taken_back() {
    let (folder, pausable) = (TestFolder::new(), PausableDevice::open());
    let door = folder.serve(pausable.clone());
    let mut guest = Guest::new(1);
    let _front = guest.connect(&folder.path());
    assert_eq!(guest.execute(0, STORE, 0, &[1; 512], 0).0, 0);
    let quiet_door = door.quiesce(PATIENCE).expect("nothing is slow");
    drop(quiet_door.hand_over().expect("it is quiet"));
    quiet_door.resume();
    assert_eq!(guest.execute(0, STORE, 0, &[2; 512], 0).0, 0);
}

#[test]
fn a_door_on_trial_leaves_everything_as_it_was() {
    let (folder, pausable) = (TestFolder::new(), PausableDevice::open());
    let door = folder.serve(pausable.clone());
    let mut guest = Guest::new(1);
    let front = guest.connect(&folder.path());
    let quiet_door = door.quiesce(PATIENCE).expect("nothing is slow");
    for ending in ["dropped", "stopped", "released"] {
        let pieces = quiet_door.hand_over().expect("it is quiet");
        let (next, next_quiet) =
            VhostDoor::take_over(folder.options(), pausable.clone(), pieces).expect("it is whole");
        match ending {
            "dropped" => drop(next),
            "stopped" => next.stop(Stop::Drained),
            _ => next_quiet.release(),
        }
        assert!(folder.path().exists(), "{ending}: the socket belongs to the other door");
    }
    quiet_door.resume();
    front.get_features().expect("an answer on the same connection");
    assert_eq!(guest.execute(0, STORE, 0, &[1; 512], 0).0, 0);
    drop(door);
    assert!(!folder.path().exists());
}

#[test]
fn a_door_that_cannot_be_quiet_goes_on() {
    let (folder, pausable) = (TestFolder::new(), PausableDevice::open());
    let door = folder.serve(pausable.clone());
    let mut guest = Guest::new(1);
    let _front = guest.connect(&folder.path());
    let stale = door.quiesce(PATIENCE).expect("nothing is slow");
    door.quiesce(PATIENCE).expect("it stays quiet").resume();
    assert_eq!(stale.hand_over().expect_err("it is not quiet").kind(), ErrorKind::Internal);
    pausable.close();
    offer_writes(&mut guest, &pausable, 0..2);
    let error = door.quiesce(Duration::ZERO).err().expect("two requests are in flight");
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    pausable.release_all();
    guest.wait(0);
    guest.wait(0);
    assert_eq!(guest.execute(0, STORE, 0, &[2; 512], 0).0, 0);
    drop(door.quiesce(PATIENCE).expect("nothing is in flight"));
}

#[test]
fn pieces_that_are_not_whole_are_refused() {
    let (folder, pausable) = (TestFolder::new(), PausableDevice::open());
    let door = folder.serve(pausable.clone());
    let mut guest = Guest::new(1);
    let _front = guest.connect(&folder.path());
    let quiet_door = door.quiesce(PATIENCE).expect("nothing is slow");
    let refused = |spoil: &dyn Fn(&mut Vec<sawmill_frontend::DoorPiece>)| {
        let mut pieces = quiet_door.hand_over().expect("it is quiet");
        spoil(&mut pieces);
        let outcome = VhostDoor::take_over(folder.options(), pausable.clone(), pieces);
        assert_eq!(outcome.err().expect("refused").kind(), ErrorKind::Invalid);
    };
    refused(&|pieces| pieces.clear());
    for fact in ["features", "regions", "region.0", "queue.0", "queues"] {
        refused(&|pieces| {
            pieces[1].facts.remove(fact).expect("a fact");
        });
        refused(&|pieces| {
            pieces[1].facts.insert(fact.into(), "many".into());
        });
    }
    refused(&|pieces| {
        pieces[1].descriptors.pop();
    });
    // An unknown fact comes from a newer version, and is ignored.
    let mut pieces = quiet_door.hand_over().expect("it is quiet");
    pieces[1].facts.insert("color".into(), "green".into());
    quiet_door.release();
    let (_next, quiet_door) =
        VhostDoor::take_over(folder.options(), pausable.clone(), pieces).expect("it is whole");
    quiet_door.resume();
    assert_eq!(guest.execute(0, STORE, 0, &[2; 512], 0).0, 0);
}

#[test]
fn a_second_frontend_waits_for_the_first_to_go() {
    let (folder, pausable) = (TestFolder::new(), PausableDevice::open());
    let door = folder.serve(pausable.clone());
    let mut guest = Guest::new(1);
    let front = guest.connect(&folder.path());
    let path = folder.path();
    let second = std::thread::spawn(move || {
        let mut guest = Guest::new(1);
        let _front = guest.connect(&path);
        guest.execute(0, STORE, 0, &[1; 512], 0).0
    });
    assert_eq!(guest.execute(0, STORE, 0, &[2; 512], 0).0, 0);
    assert_eq!(door.counts().connections, 1);
    drop(front);
    assert_eq!(second.join().expect("no panic"), 0);
}

#[test]
fn stopping_a_door_answers_what_it_took() {
    let (folder, pausable) = (TestFolder::new(), PausableDevice::open());
    let door = Arc::new(folder.serve(pausable.clone()));
    let mut guest = Guest::new(1);
    let _front = guest.connect(&folder.path());
    pausable.close();
    let heads = offer_writes(&mut guest, &pausable, 0..3);
    let stopping = door.clone();
    let stopper = std::thread::spawn(move || stopping.stop(Stop::Drained));
    pausable.release_all();
    stopper.join().expect("no panic");
    assert_eq!(guest.used(0), 3);
    assert!(heads.iter().all(|head| guest.status(*head) == 0));
    assert_eq!(door.counts().connections, 0);
}

#[test]
fn a_queue_starts_again_after_a_reset() {
    let (folder, pausable) = (TestFolder::new(), PausableDevice::open());
    let _door = folder.serve(pausable.clone());
    let mut guest = Guest::new(1);
    let mut front = guest.connect(&folder.path());
    assert_eq!(guest.execute(0, STORE, 9, &[1; 512], 0).0, 0);
    front.reset_device().expect("an answer");
    let head = guest.prepare(0, STORE, 9, &[2; 512], 0);
    guest.offer(0, head);
    guest.kick(0);
    front.get_features().expect("an answer");
    assert_eq!(pausable.count(), 1, "a queue that was reset serves nothing");
    guest.start(&mut front, 0);
    assert_eq!(guest.wait(0), head);
}
