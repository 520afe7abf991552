//! A process that dies between any two of its steps, with puts under way that land whenever they
//! like, is followed by one that has every accepted write; and so on for many lives.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::faulty::{
    Machine, is_engine, root_put, seed, segment_put, stored, tile_version, until, write_tile,
};
use crate::rig::{Dice, MIB, Model};
use sawmill_device::BlockDeviceExt;
use sawmill_store::{Call, CallKind, Fault, StoreErrorKind};

/// Six tiles of version 1 stored and checkpointed, then six of version 2; `fault` meets the calls
/// that `chosen` picks. The process dies when `reached` says so; held calls land after its death,
/// or during the next life, or never.
fn dies_at(
    what: &str,
    fault: Fault,
    chosen: impl Fn(&Call) -> bool + Send + Clone + 'static,
    reached: impl Fn(&Machine) -> bool,
) {
    for landing in ["before", "during", "never"] {
        let what = format!("{what}, held calls land {landing}");
        let mut machine = Machine::new();
        machine.options.checkpoint_bytes = MIB;
        let volume = machine.open();
        for tile in 0..6 {
            write_tile(&volume, tile, 1);
        }
        stored(&volume);
        until("the first checkpoint", || volume.status().counters.checkpoints >= 1);
        machine.fault(fault.clone(), chosen.clone());
        for round in 0..3 {
            for tile in 0..6 {
                write_tile(&volume, tile, 2 + round);
            }
        }
        until(&what, || reached(&machine));
        volume.close_now();
        drop(volume);
        machine.heal();
        if landing == "before" {
            machine.faults.release_all();
        }
        let volume = machine.open();
        if landing == "during" {
            machine.faults.release_all();
        }
        assert!((0..6).all(|tile| tile_version(&volume, tile, 9) == 4), "{what}");
        write_tile(&volume, 0, 5);
        volume.close().unwrap();
        let volume = machine.open();
        assert_eq!([0, 1, 5].map(|tile| tile_version(&volume, tile, 9)), [5, 4, 4], "{what}");
        machine.assert_sound(&what);
    }
}

fn held(machine: &Machine, chosen: impl Fn(&Call) -> bool) -> bool {
    machine.faults.held().iter().any(chosen)
}

#[test]
fn a_death_between_a_put_and_the_map_update_loses_nothing() {
    // The first of several puts is held, so the others are stored and not in the map.
    let first = |call: &Call| segment_put(call).is_some_and(|sequence| sequence % 5 == 1);
    dies_at("a gap among the puts", Fault::Delay, first, move |machine| held(machine, first));
    dies_at("a late put", Fault::Late, first, move |machine| held(machine, first));
    let any = |call: &Call| segment_put(call).is_some();
    dies_at("no answer to any put", Fault::LoseAnswer, any, |machine| {
        machine.keys("/seg/").len() > 10
    });
}

#[test]
fn a_death_between_the_parts_of_a_checkpoint_and_its_root_loses_nothing() {
    let part = |call: &Call| call.kind == CallKind::Put && call.key().contains("/map/");
    dies_at("parts under way", Fault::Delay, part, move |machine| held(machine, part));
    dies_at("parts late", Fault::Late, part, move |machine| held(machine, part));
    let root = |call: &Call| root_put(call).is_some();
    dies_at("root under way", Fault::Delay, root, move |machine| held(machine, root));
    dies_at("root late", Fault::Late, root, move |machine| held(machine, root));
    dies_at("root unheard", Fault::LoseAnswer, root, |machine| {
        machine.keys("/checkpoint/").len() > 2
    });
}

#[test]
fn a_death_between_a_root_and_the_deletes_loses_nothing() {
    let delete = |call: &Call| call.kind == CallKind::Delete && is_engine(call);
    dies_at("deletes under way", Fault::Delay, delete, move |machine| held(machine, delete));
    dies_at("deletes late", Fault::Late, delete, move |machine| held(machine, delete));
    dies_at("deletes unheard", Fault::LoseAnswer, delete, move |machine| machine.count(delete) > 0);
    let list = |call: &Call| call.kind == CallKind::List;
    dies_at("lists under way", Fault::Delay, list, move |machine| held(machine, list));
}

/// Seed 8051613: a younger root was gone and an older one was not, and a list that showed the older
/// one alone led an attach back to it.
#[test]
fn old_roots_are_deleted_one_by_one_the_oldest_first() {
    let mut machine = Machine::new();
    machine.options.checkpoint_bytes = MIB;
    let volume = machine.open();
    let is_old_root =
        |call: &Call| call.kind == CallKind::Delete && call.key().contains("/checkpoint/");
    machine.fault(Fault::Fail(StoreErrorKind::Unavailable), is_old_root);
    let write = |rounds: std::ops::Range<u64>| {
        for round in rounds {
            write_tile(&volume, round % 4, round);
            stored(&volume);
        }
    };
    write(0..40);
    let old = machine.keys("/checkpoint/").len();
    assert!(old > 4, "only {old} roots");
    let deleted = Arc::new(Mutex::new(Vec::<Vec<String>>::new()));
    let noted = deleted.clone();
    machine.fault(Fault::Delay, move |call| {
        if is_old_root(call) {
            noted.lock().unwrap().push(call.keys.clone());
        }
        false
    });
    write(40..60);
    until("old roots are gone", || machine.keys("/checkpoint/").len() <= 3);
    // What the cleanup of one checkpoint still deletes, that of the next deletes once more.
    let mut seen = HashSet::new();
    let deleted = deleted.lock().unwrap();
    let first: Vec<_> = deleted.iter().filter(|keys| seen.insert(*keys)).collect();
    assert!(first.len() >= old - 2, "{deleted:?}");
    assert!(first.iter().all(|keys| keys.len() == 1), "{deleted:?}");
    assert!(first.is_sorted(), "{deleted:?}");
}

#[test]
fn deaths_in_recovery_again_and_again_lose_nothing() {
    let machine = Machine::new();
    let volume = machine.open();
    for tile in 0..4 {
        write_tile(&volume, tile, 1);
    }
    stored(&volume);
    write_tile(&volume, 0, 2);
    volume.write_at(9 * MIB, &[7; 777]).unwrap();
    volume.close_now();
    drop(volume);
    for life in 0..12 {
        // Some die at the fence, some right after it, one with a put of what it replayed under way.
        if life % 3 == 0 {
            let fault = if life % 2 == 0 {
                Fault::LoseAnswer
            } else {
                Fault::Fail(StoreErrorKind::Unavailable)
            };
            machine.fault(fault, |call| segment_put(call).is_some());
            assert!(machine.try_open().is_err());
            machine.heal();
        }
        if life % 4 == 1 {
            // Not a fence: those are short.
            machine
                .fault(Fault::Late, |call| segment_put(call).is_some() && call.size_bytes > 1000);
        }
        let volume = machine.open();
        crate::faulty::holds(&volume, 9 * MIB, &[7; 777]);
        assert_eq!(
            [0, 1, 2, 3].map(|tile| tile_version(&volume, tile, 9)),
            [2, 1, 1, 1],
            "life {life}"
        );
        volume.close_now();
        machine.heal();
        machine.faults.release_all();
    }
    let volume = machine.open();
    volume.close().unwrap();
    machine.assert_sound("after many lives");
}

/// One random fault for one call.
fn misfortune(dice: &mut Dice, call: &Call) -> Fault {
    if !is_engine(call) {
        return Fault::None;
    }
    // A get that fails makes a reader wait: few of them, so that there is time for much else.
    let odds = if call.kind == CallKind::Get { 100 } else { 12 };
    match (dice.below(odds), call.kind) {
        (0, _) => Fault::Fail(StoreErrorKind::Unavailable),
        (1, _) => Fault::LoseAnswer,
        (2, CallKind::Put | CallKind::Delete) => Fault::Late,
        (3, CallKind::Put) => Fault::Delay,
        _ => Fault::None,
    }
}

#[test]
fn many_lives_with_a_store_that_does_everything_wrong_but_lie_lose_nothing() {
    let seed = seed();
    for round in 0..4 {
        let mut dice = Dice::new((seed + round) * 2 + 1);
        let mut machine = Machine::new();
        machine.options.checkpoint_bytes = 512 << 10;
        let mut model = Model::new(6 * MIB, seed + round);
        for life in 0..12 {
            let what = format!("seed {seed}, round {round}, life {life}");
            if dice.below(3) == 0 {
                die_in_recovery(&machine, &mut dice);
            }
            machine.heal();
            let volume = machine.open();
            model.compare_all(&volume);
            let end = dice.below(3);
            let mut at_call = Dice::new(dice.below(1 << 40) * 2 + 1);
            machine.faults.script(Box::new(move |call| misfortune(&mut at_call, call)));
            let over = AtomicBool::new(false);
            std::thread::scope(|scope| {
                let _over = SetOnDrop(&over);
                scope.spawn(|| release_held_calls(&machine, &over));
                for _ in 0..dice.below(120) {
                    model.act(&volume);
                }
                match end {
                    0 => volume.close().unwrap_or_else(|error| panic!("{what}: {error}")),
                    1 => stored(&volume),
                    _ => {}
                }
            });
            volume.close_now();
            drop(volume);
            if dice.below(2) == 0 {
                machine.faults.release(|_| dice.below(2) == 0);
            }
        }
        machine.heal();
        machine.faults.release_all();
        let volume = machine.open();
        model.compare_all(&volume);
        volume.close().unwrap();
        machine.assert_sound(&format!("seed {seed}, round {round}"));
    }
}

/// An attach whose store goes wrong from some call on, and which dies. Some of what was held before
/// lands meanwhile.
fn die_in_recovery(machine: &Machine, dice: &mut Dice) {
    let mut left = 1 + dice.below(150);
    let mut at_call = Dice::new(dice.below(1 << 40) * 2 + 1);
    machine.faults.script(Box::new(move |call| {
        left = left.saturating_sub(1);
        match misfortune(&mut at_call, call) {
            // Nobody is there to let it go.
            Fault::Delay => Fault::Late,
            fault if left == 0 => fault,
            _ => Fault::None,
        }
    }));
    if let Ok(volume) = machine.try_open() {
        volume.close_now();
    }
    machine.faults.release(|_| dice.below(2) == 0);
}

/// Lets held calls go now and then, until it is over.
fn release_held_calls(machine: &Machine, over: &AtomicBool) {
    let mut dice = Dice::new(7);
    while !over.load(Ordering::Acquire) {
        machine.faults.release(|_| dice.below(4) == 0);
        std::thread::sleep(Duration::from_millis(2));
    }
}

struct SetOnDrop<'a>(&'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}
