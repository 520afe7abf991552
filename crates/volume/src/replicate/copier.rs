//! The copier: brings a replica up to what its source has stored, round by round.
//!
//! Order of a round, and why: the segments that the source's newest checkpoint needs, in order of sequence;
//! the roots and parts of its cuts and its own parts; its root; then the segments after it, one by one by
//! name. So a root at the destination can be read whenever it is there, and whatever comes after it is a
//! prefix of the log. The name goes last the first time. A round can be broken off anywhere: the next one
//! looks at what is there.
//!
//! The source deletes meanwhile. What is gone was superseded by a newer checkpoint, so the copier begins anew
//! from that; without one it is damage.
//!
//! Invariant: before anything is put the copier has seen that the destination is still its replica; what it
//! puts after somebody promoted it has a name that the promoted history never uses.

use std::collections::HashSet;

use bytes::Bytes;
use sawmill_format::checkpoint::{Checkpoint, checkpoint_key, checkpoint_prefix, kept_key, kept_prefix};
use sawmill_format::ids::PutId;
use sawmill_format::map_part::{map_prefix, part_key};
use sawmill_format::role::Role;
use sawmill_format::segment::{SegmentRole, parse_segment_key, segment_key, segment_prefix};
use sawmill_format::volume_record::{VolumeRecord, volume_key};
use sawmill_store::{Blocking, Class, ObjectStore, PutOutcome};

use super::destination::{demand_copyable, demand_no_lineage, see_names, see_role, take_role};
use super::{objects, sweep};
use crate::ask::{self, store_error};
use crate::open::{end_of_log, start_of};
use crate::recovery::checkpoint as checkpoints;
use crate::recovery::roll_forward::{LogEnd, headers, take};
use crate::world::World;
use crate::{Error, ErrorKind, Result, names};

/// A source that deletes faster than it can be copied: past so many new beginnings the round ends.
const BEGINNINGS_MAX: u32 = 20;

/// What a copier may be told.
#[derive(Clone, Debug, Default)]
pub struct CopyOptions {
    /// What the destination is called a replica of, for people.
    pub source_text: String,
    /// The destination is a primary of before, or a promoted one: it becomes a replica, and what it wrote
    /// that the source has not is lost.
    pub fail_back: bool,
}

/// What a round did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Round {
    /// Objects copied, and their bytes.
    pub objects: u64,
    /// See `objects`.
    pub bytes: u64,
    /// Objects deleted at the destination.
    pub deleted: u64,
    /// All writes below this position of the log are in the replica.
    pub position: u64,
    /// When the newest of its segments was made, in milliseconds since 1970, by the writer's clock.
    pub wall_unix_ms: u64,
    /// How many bytes of log the replica was behind when the round began, as far as the source had stored.
    pub behind_bytes: u64,
    /// The same in milliseconds between the newest segments.
    pub behind_ms: u64,
}

/// See the head of this file.
pub struct Copier<'a> {
    world: &'a dyn World,
    source: &'a dyn ObjectStore,
    destination: &'a dyn ObjectStore,
    record: VolumeRecord,
    name: String,
    role: Role,
    /// The destination has its name.
    is_named: bool,
    /// Where the replica ends, once known: the checkpoint there, and the log behind it.
    reached: Option<Reached>,
    /// Position and time of what an earlier copier left.
    found: Option<(u64, u64)>,
    /// Segments at the destination.
    segments: HashSet<u64>,
    /// Segments of the source that are in no table and are no fences.
    strays: HashSet<u64>,
    /// Roots of cuts that have been copied with their parts.
    kept: HashSet<(u64, PutId)>,
}

struct Reached {
    number: u64,
    end: LogEnd,
    wall_unix_ms: u64,
}

/// Something the source named is not there any more.
enum Stop {
    Gone(String),
    Failed(Error),
}

impl From<Error> for Stop {
    fn from(error: Error) -> Self {
        Stop::Failed(error)
    }
}

type Step<T> = std::result::Result<T, Stop>;

impl<'a> Copier<'a> {
    /// Makes the destination a replica of volume `name` of `source`, under `destination_name`, or takes up
    /// what an earlier copier left.
    ///
    /// Errors: `Exists` when another volume has that name; `Refused` when the destination is no replica (see
    /// [`CopyOptions::fail_back`]), when it is ahead of the source, has another name there, or is the source
    /// itself; `Refused` also for a clone, which shares segments with its base.
    pub fn begin(
        world: &'a dyn World,
        (source, name): (&'a dyn ObjectStore, &str),
        (destination, destination_name): (&'a dyn ObjectStore, &str),
        options: &CopyOptions,
    ) -> Result<Self> {
        names::check_name(destination_name)?;
        let record = names::find(source, name)?;
        let newest = checkpoints::newest(source, record.volume_id)?;
        demand_copyable(source, &record, &newest.checkpoint)?;
        let is_named = see_names(destination, &record, destination_name)?;
        let role = take_role(world, source, destination, &record, options)?;
        let found = match Blocking(destination).list(&checkpoint_prefix(record.volume_id), Class::Read) {
            Ok(roots) if roots.is_empty() => None,
            Ok(_) => {
                let end = end_of_log(destination, &record)?;
                Some((end.position, end.place.wall_unix_ms))
            }
            Err(error) => return Err(store_error(&error)),
        };
        let listed = Blocking(destination).list(&segment_prefix(record.volume_id), Class::Read);
        let listed = listed.map_err(|error| store_error(&error))?;
        let segments = listed.iter().filter_map(|object| Some(parse_segment_key(&object.key)?.1)).collect();
        Ok(Copier {
            world,
            source,
            destination,
            record,
            name: destination_name.to_owned(),
            role,
            is_named,
            reached: None,
            found,
            segments,
            strays: HashSet::new(),
            kept: HashSet::new(),
        })
    }

    /// Brings the replica up to the end of what the source has stored. `pace` hears of the bytes of each
    /// object before it is copied, and may wait.
    ///
    /// Errors: `Fenced` when the replica was promoted or deleted: nothing more is changed.
    pub fn round(&mut self, pace: &mut dyn FnMut(u64)) -> Result<Round> {
        let mut round = Round::default();
        let before = self.reached.as_ref().map(|reached| (reached.end.position, reached.wall_unix_ms));
        let before = before.or(self.found);
        self.see_role()?;
        if !self.is_something_new()? {
            self.report(&mut round, before);
            return Ok(round);
        }
        for _ in 0..BEGINNINGS_MAX {
            match self.try_round(&mut round, pace) {
                Ok(()) => {
                    self.report(&mut round, before);
                    return Ok(round);
                }
                Err(Stop::Failed(error)) => return Err(error),
                Err(Stop::Gone(what)) => tracing::debug!("{what} is gone; beginning anew"),
            }
        }
        let text = "the source deletes faster than it can be copied: allow more bandwidth, or try again";
        Err(Error::new(ErrorKind::Unavailable, text))
    }

    fn report(&self, round: &mut Round, before: Option<(u64, u64)>) {
        let Some(reached) = &self.reached else { return };
        round.position = reached.end.position;
        round.wall_unix_ms = reached.wall_unix_ms;
        let (position, wall) = before.unwrap_or((0, reached.wall_unix_ms));
        round.behind_bytes = round.position.saturating_sub(position);
        round.behind_ms = round.wall_unix_ms.saturating_sub(wall);
    }

    /// A few small requests tell that nothing happened since the last round.
    fn is_something_new(&self) -> Result<bool> {
        let Some(reached) = &self.reached else { return Ok(true) };
        let id = self.record.volume_id;
        let keys = [
            checkpoint_key(id, reached.number),
            checkpoint_key(id, reached.number + 1),
            segment_key(id, reached.end.next_sequence),
        ];
        let wanted = keys.into_iter().map(|key| (key, Some(0..16))).collect();
        let answers = ask::get_all(self.source, wanted, Class::Background);
        let there = answers.into_iter().map(|answer| Ok(answer?.is_some())).collect::<Result<Vec<_>>>()?;
        Ok(there != [true, false, false])
    }

    fn try_round(&mut self, round: &mut Round, pace: &mut dyn FnMut(u64)) -> Step<()> {
        let newest = checkpoints::newest(self.source, self.record.volume_id)?.checkpoint;
        if self.reached.as_ref().is_none_or(|reached| reached.number < newest.number) {
            self.copy_checkpoint(&newest, round, pace).map_err(|stop| self.judge(stop, &newest))?;
        }
        self.copy_tail(round, pace)?;
        if !self.is_named {
            self.put_name()?;
        }
        Ok(())
    }

    /// What is gone is fine if the source has a newer checkpoint by now; else it is lost.
    fn judge(&self, stop: Stop, root: &Checkpoint) -> Stop {
        let Stop::Gone(what) = &stop else { return stop };
        match checkpoints::newest(self.source, root.volume_id) {
            Ok(newest) if newest.number_max == root.number => {
                let text = format!(
                    "{what} is gone from the source, and checkpoint {} needs it: run `sawmill check` \
                     there; the replica stays as it is",
                    root.number
                );
                Stop::Failed(Error::new(ErrorKind::Corrupt, text))
            }
            Ok(_) => stop,
            Err(error) => Stop::Failed(error),
        }
    }

    /// A checkpoint with everything it needs; the root last.
    fn copy_checkpoint(
        &mut self,
        root: &Checkpoint,
        round: &mut Round,
        pace: &mut dyn FnMut(u64),
    ) -> Step<()> {
        demand_no_lineage(&self.record, root)?;
        let id = root.volume_id;
        for entry in objects::needed(root) {
            if !self.segments.contains(&entry.sequence) {
                self.copy_segment(entry.sequence, round, pace)?;
            }
        }
        let cuts = objects::cuts(root);
        if !cuts.is_empty() {
            self.copy_fences(root, round, pace)?;
        }
        let (parts, copies) = (self.keys_at(&map_prefix(id))?, self.keys_at(&kept_prefix(id))?);
        for cut in cuts.iter().map(|cut| (cut.number, cut.put_id)) {
            if cut == (root.number, root.put_id) || self.kept.contains(&cut) {
                continue;
            }
            let key = kept_key(id, cut.0, cut.1);
            let found = objects::kept_root(self.source, id, cut)?;
            let (kept, bytes) = found.ok_or_else(|| Stop::Gone(key.clone()))?;
            self.copy_parts(&kept, &parts, round, pace)?;
            if !copies.contains(&key) {
                self.copy(&key, bytes, round, pace)?;
            }
            self.kept.insert(cut);
        }
        self.copy_parts(root, &parts, round, pace)?;
        let key = checkpoint_key(id, root.number);
        let found = objects::root(self.source, id, root.number, root.put_id)?;
        let (_, bytes) = found.ok_or_else(|| Stop::Gone(key.clone()))?;
        self.copy(&key, bytes, round, pace)?;
        let (number, wall_unix_ms) = (root.number, root.wall_unix_ms);
        let end = start_of(root);
        self.reached = Some(Reached { number, end, wall_unix_ms });
        let (destination, role) = (self.destination, &self.role);
        round.deleted += sweep::sweep(destination, root, &|| see_role(destination, role))?;
        Ok(())
    }

    /// The segments behind the checkpoint, in order, up to the first that is not there.
    fn copy_tail(&mut self, round: &mut Round, pace: &mut dyn FnMut(u64)) -> Step<()> {
        loop {
            let Some(reached) = &self.reached else { return Ok(()) };
            let sequence = reached.end.next_sequence;
            let header = if self.segments.contains(&sequence) {
                // It is there from before: only where it leads to is asked for.
                headers(self.destination, self.record.volume_id, &[sequence]).pop().unwrap_or(Ok(None))?
            } else {
                None
            };
            let header = match header {
                Some(header) => header,
                None => match objects::segment(self.source, self.record.volume_id, sequence)? {
                    Some((header, bytes)) => {
                        let key = segment_key(self.record.volume_id, sequence);
                        self.copy(&key, bytes, round, pace)?;
                        self.segments.insert(sequence);
                        header
                    }
                    None => return self.see_end(sequence),
                },
            };
            let Some(reached) = &mut self.reached else { return Ok(()) };
            take(None, &mut reached.end, &header)?;
            reached.wall_unix_ms = reached.wall_unix_ms.max(header.wall_unix_ms);
        }
    }

    /// A segment that is not there is the end of the log, unless a newer checkpoint says that it is behind
    /// us.
    fn see_end(&self, sequence: u64) -> Step<()> {
        let Some(reached) = &self.reached else { return Ok(()) };
        let next = checkpoint_key(self.record.volume_id, reached.number + 1);
        if ask::get(self.source, &next, Some(0..16), Class::Background)?.is_some() {
            return Err(Stop::Gone(segment_key(self.record.volume_id, sequence)));
        }
        Ok(())
    }

    fn copy_segment(&mut self, sequence: u64, round: &mut Round, pace: &mut dyn FnMut(u64)) -> Step<()> {
        let key = segment_key(self.record.volume_id, sequence);
        let found = objects::segment(self.source, self.record.volume_id, sequence)?;
        let (_, bytes) = found.ok_or_else(|| Stop::Gone(key.clone()))?;
        self.copy(&key, bytes, round, pace)?;
        self.segments.insert(sequence);
        Ok(())
    }

    /// Whoever rolls forward from a cut's checkpoint meets the fences after it, which no table names.
    fn copy_fences(&mut self, root: &Checkpoint, round: &mut Round, pace: &mut dyn FnMut(u64)) -> Step<()> {
        let id = root.volume_id;
        let named: HashSet<u64> = root.segments.iter().map(|entry| entry.sequence).collect();
        let listed = Blocking(self.source).list(&segment_prefix(id), Class::Background);
        let listed = listed.map_err(|error| store_error(&error))?;
        let mut unnamed: Vec<u64> =
            listed.iter().filter_map(|object| Some(parse_segment_key(&object.key)?.1)).collect();
        unnamed.retain(|sequence| {
            *sequence < root.next_sequence
                && !named.contains(sequence)
                && !self.segments.contains(sequence)
                && !self.strays.contains(sequence)
        });
        unnamed.sort_unstable();
        for sequence in unnamed {
            let header = headers(self.source, id, &[sequence]).pop().unwrap_or(Ok(None))?;
            match header {
                Some(header) if header.role == SegmentRole::Fence => {
                    self.copy_segment(sequence, round, pace)?;
                }
                _ => drop(self.strays.insert(sequence)),
            }
        }
        Ok(())
    }

    fn copy_parts(
        &self,
        root: &Checkpoint,
        there: &HashSet<String>,
        round: &mut Round,
        pace: &mut dyn FnMut(u64),
    ) -> Step<()> {
        for entry in &root.parts {
            let key = part_key(&objects::part_identity(root.volume_id, entry));
            if there.contains(&key) {
                continue;
            }
            let found = objects::part(self.source, root.volume_id, entry)?;
            let ((), bytes) = found.ok_or_else(|| Stop::Gone(key.clone()))?;
            self.copy(&key, bytes, round, pace)?;
        }
        Ok(())
    }

    fn copy(&self, key: &str, bytes: Bytes, round: &mut Round, pace: &mut dyn FnMut(u64)) -> Result<()> {
        let size_bytes = bytes.len() as u64;
        pace(size_bytes);
        self.see_role()?;
        objects::put(self.destination, key, bytes)?;
        round.objects += 1;
        round.bytes += size_bytes;
        Ok(())
    }

    fn put_name(&mut self) -> Result<()> {
        self.see_role()?;
        let put_id = PutId(self.world.random()?);
        let record = VolumeRecord { name: self.name.clone(), put_id, ..self.record.clone() };
        let encoded = record.encode().map_err(|error| Error::new(ErrorKind::Invalid, error.to_string()))?;
        let put =
            Blocking(self.destination).put(&volume_key(&self.name), Bytes::from(encoded), Class::Upload);
        if put.map_err(|error| store_error(&error))? == PutOutcome::Taken {
            // Another copier of the same volume may have been faster.
            see_names(self.destination, &self.record, &self.name)?;
        }
        self.is_named = true;
        Ok(())
    }

    fn keys_at(&self, prefix: &str) -> Result<HashSet<String>> {
        let listed = Blocking(self.destination).list(prefix, Class::Background);
        let listed = listed.map_err(|error| store_error(&error))?;
        Ok(listed.into_iter().map(|object| object.key).collect())
    }

    fn see_role(&self) -> Result<()> {
        see_role(self.destination, &self.role)
    }
}
