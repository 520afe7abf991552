//! The copier: brings a replica up to what its source has stored, round by round.
//!
//! Order of a round, and why: the fences, roots and parts that the cuts of the source's newest
//! checkpoint need, its own parts, and the segments it needs, in order of sequence; its root, and
//! the first time the name; then the segments after it, one by one by name, and before a rollback
//! what is needed of the cut that it leads to. So a root at the destination is always readable, and
//! what follows it is a prefix of the log. A round can be interrupted anywhere: the next one checks
//! what is there.
//!
//! A segment that knows a newer checkpoint than the destination has ends the round, because it may
//! depend on that checkpoint. What was stored when the round started knew no newer checkpoint than
//! the one the round started with. So a completed round has copied all of that, however fast the
//! source advances.
//!
//! The source deletes at the same time. A newer checkpoint has superseded what is gone, so the
//! copier starts again from that one; without a newer checkpoint it is damage.
//!
//! Invariants: before anything is put, the copier has checked that the destination is still its
//! replica. What it puts after a promotion has a name that the promoted history never uses. No root
//! is put below an existing one, nor before everything it needs was seen there: put by this copier,
//! or compared (`destination_objects`).
//!
//! Not here: whether the store may hold the replica (`destination`), what it holds
//! (`destination_objects`), reading and verifying objects (`objects`), deletes (`sweep`), and when
//! to copy again (the caller).

use std::collections::{HashMap, HashSet};

use bytes::Bytes;
use sawmill_format::checkpoint::{Checkpoint, SegmentEntry, checkpoint_key, kept_key, kept_prefix};
use sawmill_format::ids::PutId;
use sawmill_format::kept_block::Order;
use sawmill_format::map_part::{map_prefix, part_key};
use sawmill_format::role::{Role, RoleKind};
use sawmill_format::segment::{
    SegmentHeader, SegmentKind, parse_segment_key, segment_key, segment_prefix,
};
use sawmill_format::volume_record::VolumeRecord;
use sawmill_store::{Blocking, Class, ObjectStore};

use super::destination::{
    check_names, check_role, require_copyable, require_no_lineage, take_role,
};
use super::destination_objects::{self, DestinationObjects, header_of};
use super::options::{CopyOptions, VolumeAt};
use super::{objects, sweep};
use crate::recovery::checkpoint as checkpoints;
use crate::recovery::end::{LogEnd, start_of};
use crate::recovery::roll_forward::{read_order, take};
use crate::recovery::stored::end_of_log;
use crate::store_calls::{self, store_error};
use crate::world::World;
use crate::{Error, ErrorKind, Result, names};

/// The source deletes faster than it can be copied: after this many restarts the round ends.
const BEGINNINGS_MAX: u32 = 20;

/// The result of a round.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Round {
    /// Objects copied, and their bytes.
    pub objects: u64,
    /// See `objects`.
    pub bytes: u64,
    /// Objects deleted at the destination.
    pub deleted: u64,
    /// All writes before this position of the log are in the replica.
    pub position: u64,
    /// When the newest of its segments was made, in milliseconds since 1970, by the writer's clock.
    pub wall_unix_ms: u64,
    /// How many bytes of log the replica was behind when the round started, measured against what
    /// the source had stored.
    pub behind_bytes: u64,
    /// The same in milliseconds between the newest segments.
    pub behind_ms: u64,
}

/// A run of `sawmill replicate` between one source and one replica.
pub struct Copier<'a> {
    world: &'a dyn World,
    source: &'a dyn ObjectStore,
    destination: &'a dyn ObjectStore,
    record: VolumeRecord,
    name: String,
    role: Role,
    /// Whether the destination has its name.
    is_named: bool,
    /// The end of the replica, once known: its checkpoint, and the log after it.
    position: Option<CopyPosition>,
    /// Position and time of what an earlier copier left.
    found: Option<(u64, u64)>,
    objects: DestinationObjects,
    /// Segments of the source that are in no table and are not fences.
    strays: HashSet<u64>,
    /// Roots of cuts that have been copied, with their parts' keys.
    kept: HashMap<(u64, PutId), Vec<String>>,
}

struct CopyPosition {
    number: u64,
    end: LogEnd,
    wall_unix_ms: u64,
}

/// Why an attempt ended early.
enum Stop {
    /// An object that the source named no longer exists.
    Gone(String),
    /// The destination changed in the meantime.
    Changed(String),
    Failed(Error),
}

impl From<Error> for Stop {
    fn from(error: Error) -> Self {
        Stop::Failed(error)
    }
}

type Step<T> = std::result::Result<T, Stop>;

impl<'a> Copier<'a> {
    /// Makes `to` a replica of `from`, or resumes what an earlier copier left.
    ///
    /// Errors: `Exists` if another volume has that name; `Refused` if the destination is not a
    /// replica (see [`CopyOptions::fail_back`]), is ahead of the source, has another name there, or
    /// is the source itself; `Refused` also for a clone, which shares segments with its base.
    pub fn begin(
        world: &'a dyn World,
        from: VolumeAt<'a>,
        to: VolumeAt<'a>,
        options: &CopyOptions,
    ) -> Result<Self> {
        let (source, destination) = (from.store, to.store);
        names::check_name(to.name)?;
        let record = names::find(source, from.name)?;
        let newest = checkpoints::newest(source, record.volume_id)?;
        require_copyable(source, &record, &newest.checkpoint)?;
        let is_named = check_names(destination, &record, to.name)?;
        let role = take_role(world, source, destination, &record, options)?;
        let found = match destination_objects::roots(destination, record.volume_id)?.is_empty() {
            true => None,
            false => {
                let end = end_of_log(destination, &record)?;
                Some((end.position, end.place.wall_unix_ms))
            }
        };
        let objects = DestinationObjects::read(destination, record.volume_id)?;
        Ok(Copier {
            world,
            source,
            destination,
            record,
            name: to.name.to_owned(),
            role,
            is_named,
            position: None,
            found,
            objects,
            strays: HashSet::new(),
            kept: HashMap::new(),
        })
    }

    /// Brings the replica up to what the source had stored when the round started, or further.
    /// Calls `pace` with the bytes of each object before it is copied; it may wait.
    ///
    /// Errors: `Fenced` if the replica was promoted or deleted: nothing more is changed.
    pub fn round(&mut self, pace: &mut dyn FnMut(u64)) -> Result<Round> {
        let mut round = Round::default();
        let before =
            self.position.as_ref().map(|reached| (reached.end.position, reached.wall_unix_ms));
        let before = before.or(self.found);
        self.check_role()?;
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
                Err(Stop::Gone(what)) => tracing::debug!("{what} is gone; starting over"),
                Err(Stop::Changed(what)) => {
                    tracing::info!("{what}; starting over");
                    self.objects =
                        DestinationObjects::read(self.destination, self.record.volume_id)?;
                    self.kept.clear();
                }
            }
        }
        let text = "the source deletes faster than it can be copied, or another process changes \
                    the destination: allow more bandwidth, stop that process, or try again";
        Err(Error::new(ErrorKind::Unavailable, text))
    }

    fn report(&self, round: &mut Round, before: Option<(u64, u64)>) {
        let Some(reached) = &self.position else { return };
        round.position = reached.end.position;
        round.wall_unix_ms = reached.wall_unix_ms;
        let (position, wall) = before.unwrap_or((0, reached.wall_unix_ms));
        round.behind_bytes = round.position.saturating_sub(position);
        round.behind_ms = round.wall_unix_ms.saturating_sub(wall);
    }

    /// A few small requests show whether anything happened since the last round.
    fn is_something_new(&self) -> Result<bool> {
        let Some(reached) = &self.position else { return Ok(true) };
        let id = self.record.volume_id;
        let keys = [
            checkpoint_key(id, reached.number),
            checkpoint_key(id, reached.number + 1),
            segment_key(id, reached.end.next_sequence),
        ];
        let requests = keys.into_iter().map(|key| (key, Some(0..16))).collect();
        let answers = store_calls::get_all(self.source, requests, Class::Background);
        let presence =
            answers.into_iter().map(|answer| Ok(answer?.is_some())).collect::<Result<Vec<_>>>()?;
        Ok(presence != [true, false, false])
    }

    fn try_round(&mut self, round: &mut Round, pace: &mut dyn FnMut(u64)) -> Step<()> {
        let newest = checkpoints::newest(self.source, self.record.volume_id)?.checkpoint;
        if self.position.as_ref().is_none_or(|reached| reached.number < newest.number) {
            self.copy_checkpoint(&newest, round, pace).map_err(|stop| self.judge(stop, &newest))?;
        }
        // The first time, it comes before the log after the checkpoint, which may never end.
        if !self.is_named {
            self.put_name()?;
        }
        self.copy_tail(round, pace)
    }

    /// A missing object is fine if the source has a newer checkpoint by now; otherwise it is lost.
    fn judge(&self, stop: Stop, root: &Checkpoint) -> Stop {
        let Stop::Gone(what) = &stop else { return stop };
        match checkpoints::newest(self.source, root.volume_id) {
            Ok(newest) if newest.number_max == root.number => {
                let text = format!(
                    "{what} is gone from the source, but checkpoint {} needs it: run `sawmill \
                     check` there; the replica was not changed",
                    root.number
                );
                Stop::Failed(Error::new(ErrorKind::Corrupt, text))
            }
            Ok(_) => stop,
            Err(error) => Stop::Failed(error),
        }
    }

    /// A checkpoint with everything it needs; the root comes last.
    fn copy_checkpoint(
        &mut self,
        root: &Checkpoint,
        round: &mut Round,
        pace: &mut dyn FnMut(u64),
    ) -> Step<()> {
        require_no_lineage(&self.record, root)?;
        let id = root.volume_id;
        let needed = objects::needed(root);
        self.objects.compare(self.destination, id, &needed)?;
        let mut wanted: HashSet<String> =
            needed.iter().map(|entry| segment_key(id, entry.sequence)).collect();
        let cuts = objects::cuts(root);
        if !cuts.is_empty() {
            self.copy_fences(root, round, pace)?;
        }
        let (parts, copies) = (self.keys_at(&map_prefix(id))?, self.keys_at(&kept_prefix(id))?);
        for cut in cuts.iter().map(|cut| (cut.number, cut.put_id)) {
            if cut == (root.number, root.put_id) {
                continue;
            }
            let key = kept_key(id, cut.0, cut.1);
            wanted.insert(key.clone());
            if let Some(parts) = self.kept.get(&cut) {
                wanted.extend(parts.iter().cloned());
                continue;
            }
            let found = objects::kept_root(self.source, id, cut)?;
            let (kept, bytes) = found.ok_or_else(|| Stop::Gone(key.clone()))?;
            self.copy_parts(&kept, &parts, round, pace)?;
            if !copies.contains(&key) {
                self.copy(&key, bytes, round, pace)?;
            }
            wanted.extend(objects::part_keys(&kept));
            self.kept.insert(cut, objects::part_keys(&kept).collect());
        }
        self.copy_parts(root, &parts, round, pace)?;
        wanted.extend(objects::part_keys(root));
        for entry in
            needed.iter().filter(|entry| !self.objects.is_sure(entry.sequence)).collect::<Vec<_>>()
        {
            self.copy_named(entry, round, pace)?;
        }
        self.check_all_present(&wanted)?;
        self.require_newest(root)?;
        let key = checkpoint_key(id, root.number);
        let found = objects::root(self.source, id, root.number, root.put_id)?;
        let (_, bytes) = found.ok_or_else(|| Stop::Gone(key.clone()))?;
        self.copy(&key, bytes, round, pace)?;
        let (number, wall_unix_ms) = (root.number, root.wall_unix_ms);
        let end = start_of(root);
        self.position = Some(CopyPosition { number, end, wall_unix_ms });
        let (destination, role) = (self.destination, &self.role);
        round.deleted += sweep::sweep(destination, root, &|| check_role(destination, role))?;
        Ok(())
    }

    /// The segments after the checkpoint, in order, up to the first that does not exist.
    fn copy_tail(&mut self, round: &mut Round, pace: &mut dyn FnMut(u64)) -> Step<()> {
        loop {
            let Some(reached) = &self.position else { return Ok(()) };
            let sequence = reached.end.next_sequence;
            let number = reached.number;
            let Some((header, bytes)) = self.look_up(sequence)? else {
                return self.check_end(sequence);
            };
            if header.checkpoint_number > number {
                return self.check_newer(&header);
            }
            if header.kind == SegmentKind::Order {
                self.copy_rolled_back_to(&header, round, pace)?;
            }
            self.put_segment(sequence, bytes, round, pace)?;
            let Some(reached) = &mut self.position else { return Ok(()) };
            take(None, &mut reached.end, &header)?;
            reached.wall_unix_ms = reached.wall_unix_ms.max(header.wall_unix_ms);
        }
    }

    /// A segment of the source, with its bytes unless the destination has it. What was there before
    /// is not read in full again.
    fn look_up(&mut self, sequence: u64) -> Step<Option<(SegmentHeader, Option<Bytes>)>> {
        if (self.objects.is_sure(sequence) || self.objects.is_unsure(sequence))
            && let Some(header) = header_of(self.source, self.record.volume_id, sequence)?
            && self.objects.compare_one(self.destination, &header)?
        {
            return Ok(Some((header, None)));
        }
        let found = objects::segment(self.source, self.record.volume_id, sequence)?;
        Ok(found.map(|(header, bytes)| (header, Some(bytes))))
    }

    fn put_segment(
        &mut self,
        sequence: u64,
        bytes: Option<Bytes>,
        round: &mut Round,
        pace: &mut dyn FnMut(u64),
    ) -> Step<()> {
        if let Some(bytes) = bytes {
            self.copy(&segment_key(self.record.volume_id, sequence), bytes, round, pace)?;
            self.objects.note(sequence);
        }
        Ok(())
    }

    /// Recovery that meets a rollback in the log reads the cut that it leads to, which the last
    /// copied checkpoint may not name: so all of that is copied before it.
    fn copy_rolled_back_to(
        &mut self,
        header: &SegmentHeader,
        round: &mut Round,
        pace: &mut dyn FnMut(u64),
    ) -> Step<()> {
        let order = read_order(self.source, header)?;
        let Order::RollBack { number, put_id, through_sequence } = order else { return Ok(()) };
        let place = self.position.as_ref().map(|reached| reached.end.place);
        if place.is_some_and(|place| (place.number, place.put_id) == (number, put_id)) {
            return Ok(());
        }
        let id = header.volume_id;
        let key = kept_key(id, number, put_id);
        let found = objects::kept_root(self.source, id, (number, put_id))?;
        let (kept, bytes) = found.ok_or_else(|| Stop::Gone(key.clone()))?;
        let (parts, copies) = (self.keys_at(&map_prefix(id))?, self.keys_at(&kept_prefix(id))?);
        self.copy_parts(&kept, &parts, round, pace)?;
        let live: Vec<_> =
            kept.segments.iter().filter(|entry| entry.live_bytes > 0).copied().collect();
        self.objects.compare(self.destination, id, &live)?;
        for entry in
            live.iter().filter(|entry| !self.objects.is_sure(entry.sequence)).collect::<Vec<_>>()
        {
            self.copy_named(entry, round, pace)?;
        }
        let mut end = start_of(&kept);
        while end.stored_sequence < through_sequence {
            let sequence = end.next_sequence;
            let found = self.look_up(sequence)?;
            let (header, segment) = found.ok_or_else(|| Stop::Gone(segment_key(id, sequence)))?;
            self.put_segment(sequence, segment, round, pace)?;
            take(None, &mut end, &header)?;
        }
        if !copies.contains(&key) {
            self.copy(&key, bytes, round, pace)?;
        }
        Ok(())
    }

    /// A segment that does not exist at the source is the end of the log, unless newer checkpoints
    /// have superseded it. The source keeps its newest two checkpoints. So if the next one does not
    /// exist and, checked after that, this one still does, there is no newer one.
    fn check_end(&self, sequence: u64) -> Step<()> {
        let Some(reached) = &self.position else { return Ok(()) };
        let id = self.record.volume_id;
        let is_there = |number: u64| {
            let key = checkpoint_key(id, number);
            let found = store_calls::get(self.source, &key, Some(0..16), Class::Background);
            found.map(|bytes| bytes.is_some())
        };
        let key = segment_key(id, sequence);
        if is_there(reached.number + 1)? || !is_there(reached.number)? {
            return Err(Stop::Gone(key));
        }
        if self.objects.is_unsure(sequence) && header_of(self.destination, id, sequence)?.is_some()
        {
            let text = format!(
                "{key} is at the destination but not at the source: the source has lost it, or is \
                 an older copy of itself; the replica was not changed; run `sawmill check` on the \
                 source"
            );
            return Err(Stop::Failed(Error::new(ErrorKind::Corrupt, text)));
        }
        Ok(())
    }

    /// The next segment of the log knows a newer checkpoint: the next round starts with that.
    fn check_newer(&self, header: &SegmentHeader) -> Step<()> {
        let newest = checkpoints::newest(self.source, self.record.volume_id)?.checkpoint.number;
        if self.position.as_ref().is_none_or(|reached| newest > reached.number) {
            return Ok(());
        }
        let text = format!(
            "{} follows checkpoint {} of the source, which cannot be read there now: the replica \
             waits for that or a newer one; if this persists, run `sawmill check` on the source",
            segment_key(self.record.volume_id, header.sequence),
            header.checkpoint_number
        );
        Err(Stop::Failed(Error::new(ErrorKind::Unavailable, text)))
    }

    /// Checks that everything a root needs is there. Where another history was, another process may
    /// still delete superseded objects: there it is checked each time, elsewhere once.
    fn check_all_present(&self, keys: &HashSet<String>) -> Step<()> {
        if self.position.is_some() && !matches!(self.role.kind, RoleKind::Returned(_)) {
            return Ok(());
        }
        match destination_objects::missing(self.destination, self.record.volume_id, keys)?.first() {
            None => Ok(()),
            Some(key) => Err(Stop::Changed(format!("{key} disappeared from the destination"))),
        }
    }

    /// No root is put below an existing one.
    fn require_newest(&self, root: &Checkpoint) -> Step<()> {
        let newest_there = destination_objects::roots(self.destination, root.volume_id)?
            .into_iter()
            .max()
            .unwrap_or_default();
        if newest_there <= root.number {
            return Ok(());
        }
        if newest_there <= checkpoints::newest(self.source, root.volume_id)?.number_max {
            return Err(Stop::Changed(format!(
                "another copier has written checkpoint {newest_there}"
            )));
        }
        let text = format!(
            "the destination has checkpoint {newest_there}, but the source only {}: another \
             process copies another history to it; copying stops",
            root.number
        );
        Err(Stop::Failed(Error::new(ErrorKind::Fenced, text)))
    }

    fn copy_named(
        &mut self,
        entry: &SegmentEntry,
        round: &mut Round,
        pace: &mut dyn FnMut(u64),
    ) -> Step<()> {
        let header = self.copy_segment(entry.sequence, round, pace)?;
        if objects::is_named(&header, entry) {
            return Ok(());
        }
        let key = segment_key(header.volume_id, entry.sequence);
        let text = format!(
            "{key} is not the segment that the source's checkpoint names: run `sawmill check` there"
        );
        Err(Stop::Failed(Error::new(ErrorKind::Corrupt, text)))
    }

    fn copy_segment(
        &mut self,
        sequence: u64,
        round: &mut Round,
        pace: &mut dyn FnMut(u64),
    ) -> Step<SegmentHeader> {
        let key = segment_key(self.record.volume_id, sequence);
        let found = objects::segment(self.source, self.record.volume_id, sequence)?;
        let (header, bytes) = found.ok_or_else(|| Stop::Gone(key.clone()))?;
        self.copy(&key, bytes, round, pace)?;
        self.objects.note(sequence);
        Ok(header)
    }

    /// Recovery from a cut's checkpoint meets the fences after it, which no table names.
    fn copy_fences(
        &mut self,
        root: &Checkpoint,
        round: &mut Round,
        pace: &mut dyn FnMut(u64),
    ) -> Step<()> {
        let id = root.volume_id;
        let named: HashSet<u64> = root.segments.iter().map(|entry| entry.sequence).collect();
        let listed = Blocking(self.source).list(&segment_prefix(id), Class::Background);
        let listed = listed.map_err(|error| store_error(&error))?;
        let mut unnamed: Vec<u64> =
            listed.iter().filter_map(|object| Some(parse_segment_key(&object.key)?.1)).collect();
        unnamed.retain(|sequence| {
            *sequence < root.next_sequence
                && !named.contains(sequence)
                && !self.objects.is_sure(*sequence)
                && !self.strays.contains(sequence)
        });
        unnamed.sort_unstable();
        for sequence in unnamed {
            match header_of(self.source, id, sequence)? {
                Some(header) if header.kind == SegmentKind::Fence => {
                    if !self.objects.compare_one(self.destination, &header)? {
                        self.copy_segment(sequence, round, pace)?;
                    }
                }
                _ => drop(self.strays.insert(sequence)),
            }
        }
        Ok(())
    }

    fn copy_parts(
        &self,
        root: &Checkpoint,
        present_keys: &HashSet<String>,
        round: &mut Round,
        pace: &mut dyn FnMut(u64),
    ) -> Step<()> {
        for entry in &root.parts {
            let key = part_key(&objects::part_identity(root.volume_id, entry));
            if present_keys.contains(&key) {
                continue;
            }
            let found = objects::part(self.source, root.volume_id, entry)?;
            let ((), bytes) = found.ok_or_else(|| Stop::Gone(key.clone()))?;
            self.copy(&key, bytes, round, pace)?;
        }
        Ok(())
    }

    fn copy(
        &self,
        key: &str,
        bytes: Bytes,
        round: &mut Round,
        pace: &mut dyn FnMut(u64),
    ) -> Result<()> {
        let size_bytes = bytes.len() as u64;
        pace(size_bytes);
        self.check_role()?;
        objects::put(self.destination, key, bytes)?;
        round.objects += 1;
        round.bytes += size_bytes;
        Ok(())
    }

    fn put_name(&mut self) -> Result<()> {
        self.check_role()?;
        if names::ledger::name_again(self.world, self.destination, &self.name, &self.record)?
            .is_none()
        {
            // Another copier of the same volume may have been faster.
            check_names(self.destination, &self.record, &self.name)?;
        }
        self.is_named = true;
        Ok(())
    }

    fn keys_at(&self, prefix: &str) -> Result<HashSet<String>> {
        destination_objects::keys(self.destination, prefix)
    }

    fn check_role(&self) -> Result<()> {
        check_role(self.destination, &self.role)
    }
}
