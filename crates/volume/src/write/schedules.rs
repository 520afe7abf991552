//! Stalled writes under random schedules, as `journal::schedules` does for the journal's path.
//!
//! Not here: what makes room; a number stands for it.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use sawmill_device::{Flags, Operation, Request};
use sawmill_format::journal::RecordOperation;
use sawmill_sys::ReserveError;
use sawmill_sys::sync::{AtomicU64, switch_point};
use shuttle::thread;

use super::stalled::{NoRoom, PartialWrite, StalledWrites};
use crate::journal::schedules::{is_caught, under_schedules};

/// Stalled writes, room for so many, and the addresses of those that have finished.
#[derive(Default)]
struct Stage {
    stalled: StalledWrites,
    room: AtomicU64,
    finished: parking_lot::Mutex<Vec<u64>>,
}

impl Stage {
    fn try_append(&self, _: &mut PartialWrite) -> Result<(), NoRoom> {
        let took_room =
            self.room.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |room| room.checked_sub(1));
        switch_point();
        took_room.map(drop).map_err(|_| NoRoom::Ring(ReserveError::Staging))
    }

    fn finish(&self, partial: PartialWrite) {
        self.finished.lock().push(partial.request.address);
        partial.request.done();
    }

    fn resume(&self) {
        self.stalled.resume(
            |partial| self.try_append(partial),
            |_| (),
            |partial| self.finish(partial),
        );
    }

    fn resume_unless_busy(&self) {
        self.stalled
            .resume_unless_busy(|partial| self.try_append(partial), |partial| self.finish(partial));
    }
}

/// One thread queues writes, two make room for them; each then resumes.
fn queue_and_make_room(resume: impl Fn(&Stage) + Copy + Send + Sync + 'static) {
    const WRITES: u64 = 4;
    let stage = Arc::new(Stage::default());
    let makers: Vec<_> = (0..2)
        .map(|_| {
            let stage = stage.clone();
            thread::spawn(move || {
                for _ in 0..WRITES / 2 {
                    stage.room.fetch_add(1, Ordering::SeqCst);
                    resume(&stage);
                }
            })
        })
        .collect();
    for address in 0..WRITES {
        let request = Request::bare(Operation::Discard, address, 1, Flags::default(), |_| ());
        let operation = RecordOperation::Discard;
        stage.stalled.push(PartialWrite { request, operation, done_bytes: 0, end_position: 0 });
        resume(&stage);
    }
    makers.into_iter().for_each(|maker| maker.join().expect("a maker of room"));
    assert_eq!(*stage.finished.lock(), (0..WRITES).collect::<Vec<_>>());
    assert_eq!(stage.stalled.count(), 0);
}

#[test]
fn a_stalled_write_never_misses_its_room_nor_its_turn() {
    under_schedules(|| queue_and_make_room(Stage::resume));
}

#[test]
fn a_resumer_that_does_not_look_again_is_caught() {
    assert!(is_caught(|| queue_and_make_room(Stage::resume_unless_busy)));
}
