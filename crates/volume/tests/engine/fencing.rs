//! Two writers of one volume: the later attach wins, the earlier one notices, and nothing it
//! writes after the fence is ever visible, however late it lands.

use std::sync::{Arc, Barrier};

use crate::faulty::{
    Machine, SEGMENT, WAIT_TIME_MAX, is_engine, root_put, segment_put, stored, tile_version, until,
    write_tile,
};
use crate::rig::MIB;
use sawmill_device::{BlockDeviceExt, ErrorKind};
use sawmill_store::{CallKind, Fault};
use sawmill_volume::{Health, Safety, Volume};

/// A fenced writer fails every call with `Fenced`.
fn assert_fenced(volume: &Volume) {
    let outcome = volume.wait(Safety::Stored, Some(WAIT_TIME_MAX));
    assert_eq!(outcome.unwrap_err().kind(), ErrorKind::Fenced);
    for outcome in [
        volume.write_at(0, &[1]),
        volume.flush(),
        volume.discard(0, 4096),
        volume.read_at(0, 1).map(drop),
    ] {
        assert_eq!(outcome.unwrap_err().kind(), ErrorKind::Fenced);
    }
    assert!(matches!(volume.status().health, Health::Fenced { .. }));
}

#[test]
fn the_second_attach_wins_and_the_first_is_fenced() {
    let first = Machine::new();
    let a = first.open();
    write_tile(&a, 0, 1);
    stored(&a);
    a.write_at(SEGMENT as u64, &[1; 5000]).unwrap();
    let second = first.successor();
    let b = second.open();
    assert_eq!(b.status().epoch_before, a.status().epoch);
    assert_eq!(tile_version(&b, 0, 9), 1);
    write_tile(&a, 0, 2);
    assert_fenced(&a);
    assert_eq!(a.close().unwrap_err().kind(), ErrorKind::Fenced);
    drop(a);
    write_tile(&b, 2, 3);
    b.close().unwrap();
    let b = second.open();
    assert_eq!([0, 1, 2].map(|tile| tile_version(&b, tile, 9)), [1, 0, 3]);
    b.close().unwrap();
    second.assert_sound("after the second writer");
    let (kind, text) = first.refused();
    assert_eq!(kind, ErrorKind::Refused);
    assert!(text.contains("attached elsewhere"), "{text}");
}

#[test]
fn a_rivals_root_that_arrives_garbled_is_read_again() {
    let first = Machine::new();
    let a = first.open();
    write_tile(&a, 0, 1);
    stored(&a);
    let b = first.successor().open();
    // What took the number of its next root comes cut short, once.
    let mut is_cut = false;
    first.fault(Fault::Truncate, move |call| {
        let is_root = call.kind == CallKind::Get && call.key().contains("/checkpoint/");
        is_root && !std::mem::replace(&mut is_cut, true)
    });
    a.checkpoint(std::time::Duration::from_millis(1));
    until("it has stopped", || !matches!(a.status().health, Health::Serving));
    assert!(matches!(a.status().health, Health::Fenced { .. }), "{:?}", a.status().health);
    b.close().unwrap();
}

#[test]
fn a_fenced_volume_that_is_dropped_gives_its_journal_back() {
    let mut first = Machine::new();
    let a = first.open();
    write_tile(&a, 0, 1);
    stored(&a);
    let b = first.successor().open();
    write_tile(&a, 0, 2);
    assert_fenced(&a);
    drop(a);
    b.close().unwrap();
    first.options.accept_journal_loss = true;
    assert_eq!(tile_version(&first.open(), 0, 9), 1);
}

#[test]
fn puts_that_land_after_the_fence_never_count() {
    let first = Machine::new();
    let a = first.open();
    write_tile(&a, 0, 1);
    stored(&a);
    let gap = a.status().stored_sequence + 1;
    // The first put is late, one further on is slow, the rest land beyond the gap.
    first.faults.script(Box::new(move |call| match segment_put(call) {
        Some(sequence) if sequence == gap => Fault::Late,
        Some(sequence) if sequence == gap + 3 => Fault::Delay,
        _ => Fault::None,
    }));
    for tile in 0..6 {
        write_tile(&a, tile, 2);
    }
    until("two puts held, the others there", || {
        first.faults.held().len() >= 2 && first.keys("/seg/").len() == 6
    });
    let second = first.successor();
    let b = second.open();
    assert_eq!(b.status().stored_sequence, gap, "the fence closes the gap");
    for tile in 6..9 {
        write_tile(&b, tile, 3);
    }
    stored(&b);
    first.faults.release_all();
    until("the slow put landed behind the fence", || {
        second.keys("/seg/").contains(&first.segment_key(gap + 3))
    });
    first.heal();
    assert_fenced(&a);
    let want = [1, 0, 0, 0, 0, 0, 3, 3, 3];
    let versions =
        |volume: &Volume| [0, 1, 2, 3, 4, 5, 6, 7, 8].map(|tile| tile_version(volume, tile, 9));
    assert_eq!(versions(&b), want);
    b.close_now();
    for _ in 0..3 {
        let b = second.open();
        assert_eq!(versions(&b), want);
        b.close_now();
    }
    second.open().close().unwrap();
    assert_eq!(versions(&second.open()), want);
    second.assert_sound("with a stale writer's segments behind the fence");
}

#[test]
fn a_writer_that_wakes_up_after_many_new_segments_is_fenced() {
    let first = Machine::new();
    let a = first.open();
    write_tile(&a, 0, 1);
    stored(&a);
    first.fault(Fault::Delay, |call| segment_put(call).is_some());
    for tile in 0..6 {
        write_tile(&a, tile, 2);
    }
    until("the writer sleeps", || first.faults.held().len() == 6);
    let mut second = first.successor();
    second.options.checkpoint_bytes = 8 * MIB;
    let b = second.open();
    for version in 3..103 {
        write_tile(&b, version % 7, version);
    }
    stored(&b);
    assert!(b.status().stored_sequence > 150);
    assert_eq!(first.faults.release_all(), 6);
    first.heal();
    assert_fenced(&a);
    let want = [98, 99, 100, 101, 102, 96, 97];
    assert_eq!([0, 1, 2, 3, 4, 5, 6].map(|tile| tile_version(&b, tile, 200)), want);
    b.close_now();
    let b = second.open();
    assert_eq!([0, 1, 2, 3, 4, 5, 6].map(|tile| tile_version(&b, tile, 200)), want);
    b.close().unwrap();
    second.assert_sound("after the sleeper woke up");
}

/// A writer whose checkpoint is on its way, and comes late.
fn with_a_late_checkpoint(machine: &mut Machine) -> Arc<Volume> {
    machine.options.checkpoint_bytes = MIB;
    let volume = machine.open();
    machine.fault(Fault::Late, |call| root_put(call).is_some());
    for tile in 0..6 {
        write_tile(&volume, tile, 1);
    }
    stored(&volume);
    until("the root is late", || !machine.faults.held().is_empty());
    volume
}

#[test]
fn an_attach_starts_from_a_checkpoint_that_lands_while_it_fences() {
    let mut first = Machine::new();
    let a = with_a_late_checkpoint(&mut first);
    let roots = first.keys("/checkpoint/").len();
    let second = first.successor();
    second.fault(Fault::Delay, |call| root_put(call).is_some());
    let b = std::thread::scope(|scope| {
        let opening = scope.spawn(|| second.open());
        until("the fence is put", || !second.faults.held().is_empty());
        // Behind the fence, and before anything was accepted there.
        assert!(first.faults.release_all() > 0);
        until("the late root is there", || first.keys("/checkpoint/").len() > roots);
        second.heal();
        assert_eq!(second.faults.release_all(), 1);
        opening.join().unwrap()
    });
    let fences = second.count(|call| segment_put(call).is_some());
    assert_eq!(fences, 2, "the attach began again, behind a fence of its own");
    assert_eq!(b.status().epoch_before, a.status().epoch, "no other writer was in between");
    write_tile(&b, 0, 2);
    b.close().unwrap();
    let b = second.open();
    assert_eq!([0, 1, 5].map(|tile| tile_version(&b, tile, 9)), [2, 1, 1]);
    second.assert_sound("with a root that landed between");
}

#[test]
fn a_checkpoint_that_lands_behind_another_attach_finds_its_number_taken() {
    let mut first = Machine::new();
    let a = with_a_late_checkpoint(&mut first);
    let second = first.successor();
    let b = second.open();
    write_tile(&b, 0, 2);
    b.close().unwrap();
    first.faults.release_all();
    first.heal();
    until("the stale writer notices", || matches!(a.status().health, Health::Fenced { .. }));
    assert_fenced(&a);
    let b = second.open();
    assert_eq!([0, 1, 5].map(|tile| tile_version(&b, tile, 9)), [2, 1, 1]);
    second.assert_sound("after a stale root came too late");
}

/// The number of its checkpoint is free again when it wakes up.
#[test]
fn an_attach_that_slept_while_another_took_over_accepts_nothing() {
    let first = Machine::new();
    first.open().close().unwrap();
    let (sleeper, mut second) = (first.successor(), first.successor());
    second.options.checkpoint_bytes = MIB;
    sleeper.fault(Fault::Delay, |call| root_put(call).is_some());
    std::thread::scope(|scope| {
        let opening = scope.spawn(|| sleeper.try_open().map(drop));
        until("its fence stands", || !sleeper.faults.held().is_empty());
        let taken = sleeper.faults.held()[0].key().to_owned();
        let b = second.open();
        until("the number was used and is free", || {
            (0..4).for_each(|tile| write_tile(&b, tile, 3));
            stored(&b);
            first.keys("/checkpoint/").iter().all(|key| *key > taken)
        });
        sleeper.heal();
        assert_eq!(sleeper.faults.release_all(), 1);
        assert_eq!(opening.join().unwrap().unwrap_err().kind(), ErrorKind::Fenced);
        b.close().unwrap();
    });
    let b = second.open();
    assert_eq!([0, 1, 2, 3].map(|tile| tile_version(&b, tile, 9)), [3; 4]);
    second.assert_sound("after the sleeper woke up");
}

#[test]
fn of_two_attaches_that_fence_at_the_same_moment_one_wins() {
    let first = Machine::new();
    first.open().close().unwrap();
    for _ in 0..5 {
        let machines = [first.successor(), first.successor()];
        for machine in &machines {
            machine.fault(Fault::Delay, |call| segment_put(call).is_some());
        }
        let outcomes = std::thread::scope(|scope| {
            let opens = machines.each_ref().map(|machine| scope.spawn(|| machine.try_open()));
            until("both fences are on their way", || {
                machines.iter().all(|machine| machine.faults.held().len() == 1)
            });
            for machine in &machines {
                machine.heal();
                machine.faults.release_all();
            }
            opens.map(|open| open.join().unwrap())
        });
        let won: Vec<_> = outcomes.iter().filter_map(|outcome| outcome.as_ref().ok()).collect();
        let lost: Vec<_> = outcomes.iter().filter_map(|outcome| outcome.as_ref().err()).collect();
        assert_eq!((won.len(), lost.len()), (1, 1));
        assert_eq!(lost[0].kind(), ErrorKind::Fenced);
        write_tile(won[0], 0, 1);
        won[0].close().unwrap();
    }
}

#[test]
fn of_two_racing_attaches_exactly_one_can_store() {
    let first = Machine::new();
    first.open().close().unwrap();
    for round in 1..=10 {
        let machines = [first.successor(), first.successor()];
        let together = Barrier::new(2);
        let outcomes = std::thread::scope(|scope| {
            let opens = machines.each_ref().map(|machine| {
                scope.spawn(|| {
                    together.wait();
                    machine.try_open()
                })
            });
            opens.map(|open| open.join().unwrap())
        });
        let mut winners: Vec<Arc<Volume>> = Vec::new();
        for (tile, outcome) in outcomes.into_iter().enumerate() {
            match outcome {
                Ok(volume) => {
                    write_tile(&volume, tile as u64, round);
                    match volume.wait(Safety::Stored, Some(WAIT_TIME_MAX)) {
                        Ok(in_time) => {
                            assert!(in_time);
                            winners.push(volume);
                        }
                        Err(error) => assert_eq!(error.kind(), ErrorKind::Fenced),
                    }
                }
                Err(error) => assert_eq!(error.kind(), ErrorKind::Fenced),
            }
        }
        assert_eq!(winners.len(), 1, "round {round}");
        winners[0].close().unwrap();
    }
    first.assert_sound("after the races");
}

#[test]
fn lost_answers_do_not_fence_the_writer_itself() {
    let mut machine = Machine::new();
    machine.options.checkpoint_bytes = 2 * MIB;
    let volume = machine.open();
    let mut seen = std::collections::HashSet::new();
    // Every put takes effect, and the answer to the first of each is lost.
    machine.fault(Fault::LoseAnswer, move |call| {
        call.kind == CallKind::Put && is_engine(call) && seen.insert(call.key().to_owned())
    });
    for version in 1..=24 {
        write_tile(&volume, version % 5, version);
    }
    volume.close().unwrap();
    assert!(volume.status().counters.checkpoints >= 2);
    machine.heal();
    let volume = machine.open();
    assert_eq!([0, 1, 2, 3, 4].map(|tile| tile_version(&volume, tile, 99)), [20, 21, 22, 23, 24]);
    machine.assert_sound("after lost answers");
}

#[test]
fn deleting_a_volume_fences_its_writer() {
    let machine = Machine::new();
    let volume = machine.open();
    write_tile(&volume, 0, 1);
    stored(&volume);
    let fences = machine.keys("/seg/").len();
    sawmill_volume::delete(&*machine.plain, "disk").unwrap();
    write_tile(&volume, 1, 1);
    assert_fenced(&volume);
    assert!(fences >= 2);
    let mut left = machine.keys("");
    // And what was said of the volume and its name.
    left.retain(|key| !key.contains("/word/") && !key.starts_with("names/"));
    assert_eq!(left.len(), 1, "only the last fence stays: {left:?}");
}
