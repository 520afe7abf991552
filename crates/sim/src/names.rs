//! Names: several actors in turn create, rename, clone and delete volumes of one store, and die at
//! any call; their lists lag and show deleted objects; their puts and deletes may take effect late.
//!
//! Invariants, checked with a fault-free store: a volume reported as created, and not requested to
//! be deleted, has exactly one name at any time; what was reported done stays done; no name means
//! two volumes; every volume that exists can be opened and checked, and `list` shows all of them.
//!
//! Not here: the content of a volume.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use sawmill_device::ErrorKind;
use sawmill_volume::check::check;
use sawmill_volume::{
    CreateOptions, clone_in, create_in, delete_in, find, list, rename_in, unnamed,
};

use crate::death::{Life, live};
use crate::disk::DiskFaults;
use crate::store::{SimBucket, SimStore, StoreFaults};
use crate::trace::Trace;
use crate::world::{Clock, MachineMedia, SimWorld};
use sawmill_testkit::Dice;

/// Names that are used again and again.
const NAMES: [&str; 5] = ["a", "b", "c", "d", "e"];
const ACTS_MAX: u64 = 24;
/// A death comes within this number of calls.
const IOS_BEFORE_DEATH_MAX: u64 = 30;

type Id = String;

/// What is known of a volume.
#[derive(Debug)]
struct VolumeModel {
    /// The names it may have: exactly one after a success was reported.
    names: BTreeSet<String>,
    /// Its deletion was requested, with an unknown result.
    may_be_gone: bool,
}

/// The model, and the world that it is compared with.
struct Names<'a> {
    dice: &'a mut Dice,
    clock: Arc<Clock>,
    trace: Arc<Trace>,
    bucket: Arc<SimBucket>,
    volumes: BTreeMap<Id, VolumeModel>,
    faults: StoreFaults,
}

/// Plays with these dice in a store of its own; returns the number of acts.
pub fn play(dice: &mut Dice, clock: &Arc<Clock>, trace: &Arc<Trace>) -> Result<u64, String> {
    let faults = StoreFaults {
        fail_odds: *dice.pick(&[0, 20]),
        unheard_odds: *dice.pick(&[0, 12]),
        late_odds: *dice.pick(&[0, 8]),
        lag_odds: *dice.pick(&[0, 2, 3]),
        half_odds: *dice.pick(&[0, 3]),
        ghost_odds: *dice.pick(&[0, 2, 3]),
        garble_odds: 0,
    };
    let acts = 4 + dice.below(ACTS_MAX);
    let mut names = Names {
        dice,
        clock: clock.clone(),
        trace: trace.clone(),
        bucket: Arc::default(),
        volumes: BTreeMap::new(),
        faults,
    };
    for _ in 0..acts {
        names.act()?;
        names.judge().map_err(|text| format!("names: {text}"))?;
    }
    names.land_all();
    names.judge().map_err(|text| format!("names, at the end: {text}"))?;
    Ok(acts)
}

/// The result that an actor received; `None`: the actor died.
type ActorResult<T> = Option<Result<T, (ErrorKind, String)>>;

impl Names<'_> {
    fn actor(&mut self, faults: StoreFaults) -> (Arc<Life>, SimWorld, SimStore) {
        let life = Arc::new(Life::default());
        let (clock, trace) = (self.clock.clone(), self.trace.clone());
        let dice = self.dice.split(1);
        let world = SimWorld::new(
            clock,
            MachineMedia::default(),
            life.clone(),
            trace.clone(),
            DiskFaults::default(),
            dice,
        );
        let store =
            SimStore::new(self.bucket.clone(), life.clone(), trace, faults, self.dice.split(2));
        (life, world, store)
    }

    /// One actor does one thing, and may die in it.
    fn actor_does<T>(
        &mut self,
        act: impl FnOnce(&SimWorld, &SimStore) -> Result<T, sawmill_volume::Error>,
    ) -> ActorResult<T> {
        let (life, world, store) = self.actor(self.faults);
        if self.dice.one_in(3) {
            life.dies_after(1 + self.dice.below(IOS_BEFORE_DEATH_MAX));
        }
        let result = live(|| act(&world, &store));
        life.die();
        self.trace.note("names heard", [u64::from(result.is_some()), 0], || match &result {
            None => "  and dies".into(),
            Some(Ok(_)) => "  done".into(),
            Some(Err(error)) => format!("  {error}"),
        });
        result.map(|outcome| outcome.map_err(|error| (error.kind(), error.to_string())))
    }

    fn log(&self, text: impl FnOnce() -> String) {
        self.trace.note("names", [0, 0], text);
    }

    fn any_name(&mut self) -> &'static str {
        NAMES[self.dice.below(NAMES.len() as u64) as usize]
    }

    fn land_all(&mut self) {
        while self.bucket.late() > 0 {
            self.bucket.land(0, &self.trace);
        }
    }

    fn act(&mut self) -> Result<(), String> {
        if self.dice.one_in(3) {
            let late = self.bucket.late() as u64;
            if late > 0 {
                let index = self.dice.below(late) as usize;
                self.bucket.land(index, &self.trace);
            }
        }
        self.clock.pass(1_000);
        match self.dice.below(9) {
            0..3 => self.create(),
            3..6 => self.rename(),
            6 => self.make_clone(),
            _ => self.delete(),
        }
    }

    fn create(&mut self) -> Result<(), String> {
        let name = self.any_name();
        self.log(|| format!("an actor creates {name}"));
        let options = CreateOptions { block_bytes: 512, ..CreateOptions::new(16 << 10) };
        let outcome = self.actor_does(|world, store| {
            create_in(world, store, name, &options).map(|record| record.volume_id.to_string())
        });
        self.note_created(name, outcome)
    }

    fn make_clone(&mut self) -> Result<(), String> {
        let (base, name) = (self.any_name(), self.any_name());
        self.log(|| format!("an actor clones {base} as {name}"));
        let outcome = self.actor_does(|world, store| {
            clone_in(world, store, base, None, name).map(|record| record.volume_id.to_string())
        });
        self.note_created(name, outcome)
    }

    /// A volume whose creation has an unknown result may exist: it counts as known once it is seen.
    fn note_created(&mut self, name: &str, result: ActorResult<Id>) -> Result<(), String> {
        let Some(Ok(id)) = result else { return Ok(()) };
        let others = self.volumes.iter().find(|(_, known)| {
            known.names.len() == 1 && known.names.contains(name) && !known.may_be_gone
        });
        if let Some((other, _)) = others.filter(|(other, _)| **other != id) {
            return Err(format!("{name} was made, and means volume {other}"));
        }
        let names = BTreeSet::from([name.to_owned()]);
        self.volumes.insert(id, VolumeModel { names, may_be_gone: false });
        Ok(())
    }

    /// The volume that a name means, read through a fault-free store.
    fn meant_by(&mut self, name: &str) -> Result<Option<Id>, String> {
        let (_, _, store) = self.actor(StoreFaults::default());
        match find(&store, name) {
            Ok(record) => Ok(Some(record.volume_id.to_string())),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(format!("{name} cannot be looked up: {error}")),
        }
    }

    fn rename(&mut self) -> Result<(), String> {
        let (old, new) = (self.any_name(), self.any_name());
        let Some(id) = self.meant_by(old)? else { return Ok(()) };
        self.log(|| format!("an actor renames {old} to {new}"));
        match self.actor_does(|world, store| rename_in(world, store, old, new)) {
            // A late put may have bound the name before; then it names another volume.
            Some(Ok(record)) => {
                if let Some(known) = self.volumes.get_mut(&record.volume_id.to_string()) {
                    known.names = BTreeSet::from([new.to_owned()]);
                }
            }
            _ => {
                if let Some(known) = self.volumes.get_mut(&id) {
                    known.names.insert(new.to_owned());
                }
            }
        }
        Ok(())
    }

    fn delete(&mut self) -> Result<(), String> {
        let name = self.any_name();
        let Some(id) = self.meant_by(name)? else { return Ok(()) };
        self.log(|| format!("an actor deletes {name}"));
        match self.actor_does(|world, store| delete_in(world, store, name).map(drop)) {
            Some(Ok(())) => {
                self.volumes.remove(&id);
                if self.meant_by(name)?.is_some_and(|meant| meant == id) {
                    return Err(format!("{name} was deleted, and means volume {id}"));
                }
            }
            _ => {
                if let Some(known) = self.volumes.get_mut(&id) {
                    known.may_be_gone = true;
                }
            }
        }
        Ok(())
    }

    /// Checks that every known volume has one name and is intact.
    fn judge(&mut self) -> Result<(), String> {
        let mut named = BTreeMap::<Id, Vec<String>>::new();
        for name in NAMES {
            if let Some(id) = self.meant_by(name)? {
                named.entry(id).or_default().push(name.to_owned());
            }
        }
        for (id, names) in &named {
            if names.len() > 1 {
                return Err(format!("volume {id} has the names {names:?}"));
            }
        }
        let mut deleted_ids = Vec::new();
        for (id, known) in &self.volumes {
            match named.get(id) {
                Some(names) if known.names.contains(&names[0]) => {}
                Some(names) => {
                    return Err(format!("volume {id} is {names:?} and was {:?}", known.names));
                }
                None if known.may_be_gone => deleted_ids.push(id.clone()),
                None => {
                    return Err(format!("volume {id}, which was {:?}, has no name", known.names));
                }
            }
        }
        for id in deleted_ids {
            self.volumes.remove(&id);
        }
        self.judge_lists(&named)
    }

    fn judge_lists(&mut self, named: &BTreeMap<Id, Vec<String>>) -> Result<(), String> {
        let (_, _, store) = self.actor(StoreFaults::default());
        let listed = list(&store).map_err(|error| format!("no list: {error}"))?;
        let mut listed_names = BTreeMap::<Id, Vec<String>>::new();
        for listed in listed {
            let record =
                listed.record.map_err(|error| format!("{} is listed: {error}", listed.name))?;
            listed_names.entry(record.volume_id.to_string()).or_default().push(listed.name.clone());
            let report = check(&store, &record, &mut |_, _| ());
            let report =
                report.map_err(|error| format!("{} cannot be checked: {error}", listed.name))?;
            if let Some(damage) = report.damage.first() {
                return Err(format!("{} is damaged: {damage}", listed.name));
            }
        }
        if listed_names != *named {
            return Err(format!("a list shows {listed_names:?}, and names mean {named:?}"));
        }
        // The remains of a dead creator are unnamed; a known volume never exists without a name.
        for unnamed in
            unnamed(&store).map_err(|error| format!("no list of the unnamed: {error}"))?
        {
            if self.volumes.contains_key(&unnamed.volume_id.to_string()) && !unnamed.is_deleted {
                return Err(format!("volume {} has no name and is not deleted", unnamed.volume_id));
            }
        }
        Ok(())
    }
}
