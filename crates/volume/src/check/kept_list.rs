//! The objects that are kept, and why: the list a check works through.
//!
//! Each thing that must be servable is a *state*: a checkpoint, and how far to roll forward from
//! it. A state needs its checkpoint's map parts, the segments that its table lists as live, and
//! every segment of the log up to its end. The states are the present, the fallback to the
//! checkpoint before, each snapshot, the moments behind each retained checkpoint, and each clone of
//! the volume (only what it needs here).
//!
//! Invariants: each object is in the list once, with all states that need it. Only one checkpoint
//! is held at a time, so memory is that of the newest state, plus one row for each segment and part
//! that is needed.
//!
//! Not here: reading segments and parts (`verify`), and the report about them (`mod`).

use std::collections::{BTreeMap, HashSet};

use sawmill_format::checkpoint::{
    Checkpoint, CheckpointIdentity, PartEntry, SegmentEntry, checkpoint_key, checkpoint_prefix,
    kept_key, parse_checkpoint_key,
};
use sawmill_format::ids::{PutId, VolumeId};
use sawmill_format::kept_block::{CutEntry, CutKind};
use sawmill_format::map_part::{PartIdentity, part_key};
use sawmill_format::segment::segment_key;
use sawmill_format::volume_record::VolumeRecord;
use sawmill_store::{Blocking, Class, ObjectStore};

use super::damage::{DamageList, Verified, undecodable};
use crate::cuts::{CutBook, Lineage};
use crate::recovery::Reporter;
use crate::recovery::checkpoint;
use crate::recovery::end::start_of;
use crate::recovery::roll_forward::{RollForwardLimit, roll_forward_until};
use crate::recovery::stored;
use crate::recovery::stored::StoredVolume;
use crate::replicate::role;
use crate::segment::table::SegmentInfo;
use crate::store_calls::{self, store_error};
use crate::world::RealWorld;
use crate::{ErrorKind, Result};

/// Which states need an object: ranges of indices, as neighbors mostly need the same objects.
pub(super) type StateRanges = Vec<(usize, usize)>;

/// A segment that some state needs, as the first of them records it.
pub(super) struct KeptSegment {
    pub(super) epoch: u64,
    pub(super) header_bytes: u64,
    pub(super) data_bytes: u64,
    pub(super) state_ranges: StateRanges,
}

/// A map part that some state needs.
pub(super) struct KeptPart {
    pub(super) length_bytes: u32,
    pub(super) crc: u32,
    /// Whether every state has a newer delta or part over some of it.
    pub(super) is_covered: bool,
    pub(super) state_ranges: StateRanges,
}

/// The objects that a volume must be able to serve, each with the states that need it.
pub(super) struct KeptList {
    pub(super) volume_id: VolumeId,
    /// The names of the states, for people.
    pub(super) states: Vec<String>,
    pub(super) segments: BTreeMap<(VolumeId, u64), KeptSegment>,
    pub(super) parts: BTreeMap<(u64, u64, PutId), KeptPart>,
    /// The present; `None` when it cannot be read.
    pub(super) stored: Option<StoredVolume>,
    pub(super) lineage: Lineage,
    /// The highest checkpoint number that was listed before anything was read.
    number_max: u64,
    /// The first free sequence, as far as is known.
    pub(super) next_sequence: u64,
    /// What was found while the list was made.
    pub(super) damage: DamageList,
    pub(super) notes: Vec<String>,
    /// In what a copier left, no state goes beyond this sequence.
    copied_through: Option<u64>,
    /// The newest checkpoint, if it can be read.
    pub(super) newest: Option<Checkpoint>,
}

impl KeptList {
    /// Reads what a volume keeps for itself.
    pub(super) fn make(store: &dyn ObjectStore, record: &VolumeRecord) -> Result<KeptList> {
        let mut list = KeptList {
            volume_id: record.volume_id,
            states: Vec::new(),
            segments: BTreeMap::new(),
            parts: BTreeMap::new(),
            stored: None,
            lineage: Lineage::default(),
            number_max: numbers(store, record.volume_id)?.pop().unwrap_or_default(),
            next_sequence: 0,
            damage: DamageList::default(),
            notes: Vec::new(),
            copied_through: None,
            newest: None,
        };
        let Some((newest, cuts)) = list.add_present(store, record)? else { return Ok(list) };
        list.lineage = Lineage::new(&newest.kept.lineage);
        list.next_sequence = list.next_sequence.max(newest.next_sequence);
        let readable = list.add_checkpoints(store, &newest)?;
        list.add_cuts(store, &cuts, &readable)?;
        list.newest = Some(newest);
        Ok(list)
    }

    /// Adds the volume's present state. Returns its checkpoint and its cuts, or `None` when nothing
    /// can be read.
    fn add_present(
        &mut self,
        store: &dyn ObjectStore,
        record: &VolumeRecord,
    ) -> Result<Option<(Checkpoint, Vec<CutEntry>)>> {
        let state = self.begin("the volume as it is".to_owned());
        let world = RealWorld::default();
        let stored = match stored::stored_of(store, record.clone(), &mut Reporter::new(&world)) {
            Ok(stored) => stored,
            Err(error) if error.kind() == ErrorKind::Corrupt => {
                if !self.add_damaged_checkpoints(store)? {
                    self.damage.add_error(&record.name, &error, &[self.states[state].as_str()]);
                }
                // The past may still be whole.
                let newest = match checkpoint::newest(store, record.volume_id) {
                    Err(error) if error.kind() == ErrorKind::Corrupt => return Ok(None),
                    newest => newest?.checkpoint,
                };
                let cuts = CutBook::of(&newest).cuts;
                return Ok(Some((newest, cuts)));
            }
            Err(error) => return Err(error),
        };
        let root = stored.newest.checkpoint.clone();
        if role::is_copied(store, record.volume_id, root.number)? {
            self.copied_through = Some(stored.end.stored_sequence);
        }
        self.notes.extend(stored.newest.notes.iter().cloned());
        self.next_sequence = stored.end.next_sequence;
        self.need_root(state, &root);
        let lineage = stored.view.lineage.clone();
        for (sequence, info) in stored.view.segments.snapshot() {
            // Behind a rollback, also the segments that its root calls dead.
            let sequence = u64::from(sequence);
            if info.live_bytes > 0 || sequence > root.through_sequence {
                self.need_info(state, lineage.owner(root.volume_id, sequence), sequence, &info);
            }
        }
        let cuts = stored.view.cuts.lock().cuts.clone();
        self.stored = Some(stored);
        Ok(Some((root, cuts)))
    }

    /// Records the checkpoints that cannot be read. False: one can be read, or there is none.
    fn add_damaged_checkpoints(&mut self, store: &dyn ObjectStore) -> Result<bool> {
        let id = self.volume_id;
        let mut damaged = Vec::new();
        for number in numbers(store, id)? {
            let key = checkpoint_key(id, number);
            match read_root(store, &key, id, number)? {
                Some(Verified::Intact(_)) => return Ok(false),
                Some(Verified::Damaged(error)) => damaged.push((key, error)),
                None => {}
            }
        }
        let costs = self.states.iter().map(String::as_str).collect::<Vec<_>>();
        for (key, error) in &damaged {
            self.damage.add(key, error, &costs);
        }
        Ok(!damaged.is_empty())
    }

    /// Whether a writer has put a checkpoint since the list was begun: then a missing object may no
    /// longer be needed. The writer may have put many, and deleted all but the last.
    pub(super) fn has_moved_on(&self, store: &dyn ObjectStore) -> Result<bool> {
        match checkpoint::newest(store, self.volume_id) {
            Err(error) if error.kind() == ErrorKind::Corrupt => Ok(false),
            newest => Ok(newest?.number_max > self.number_max),
        }
    }

    /// Adds the newest two readable checkpoints: one alone is not safe. Returns their numbers.
    fn add_checkpoints(
        &mut self,
        store: &dyn ObjectStore,
        newest: &Checkpoint,
    ) -> Result<Vec<u64>> {
        let id = newest.volume_id;
        let mut numbers = numbers(store, id)?;
        // The list may lag.
        numbers.extend([newest.number, newest.number.saturating_sub(1)]);
        numbers.sort_unstable();
        numbers.dedup();
        let is_newest_whole = numbers.last().is_none_or(|last| *last == newest.number);
        let (mut readable, mut passed_over) = (Vec::new(), Vec::new());
        while let Some(number) = numbers.pop().filter(|number| *number > 0 && readable.len() < 2) {
            match read_root(store, &checkpoint_key(id, number), id, number)? {
                Some(Verified::Intact(root)) => {
                    readable.push(number);
                    if number != newest.number || self.stored.is_none() {
                        self.add_state(
                            store,
                            fallback_name(number),
                            &root,
                            RollForwardLimit::END,
                            None,
                        )?;
                    }
                }
                Some(Verified::Damaged(error)) if number > newest.number => {
                    let key = checkpoint_key(id, number);
                    let what = format!("{error}; the one before is used instead");
                    self.damage.add(&key, &what, &[]);
                }
                Some(Verified::Damaged(error)) => passed_over.push((number, error)),
                None => {}
            }
        }
        let is_alone = readable.len() < 2;
        for (number, error) in &passed_over {
            let key = checkpoint_key(id, *number);
            if is_alone {
                self.damage.add(
                    &key,
                    format!(
                        "{error}; if the newest checkpoint is lost too, the volume cannot be opened"
                    ),
                    &[],
                );
            } else {
                self.notes.push(format!("{key}: {error}; two other checkpoints are intact"));
            }
        }
        if is_alone
            && passed_over.is_empty()
            && is_newest_whole
            && newest.number > 1
            && role::newest(store, id)?.is_none()
        {
            let key = checkpoint_key(id, newest.number - 1);
            let what =
                "it is gone; if the newest checkpoint is lost too, the volume cannot be opened";
            self.damage.add(&key, what, &[]);
        }
        Ok(readable)
    }

    /// Adds snapshots and moments.
    fn add_cuts(
        &mut self,
        store: &dyn ObjectStore,
        cuts: &[CutEntry],
        readable: &[u64],
    ) -> Result<()> {
        let mut cuts: Vec<&CutEntry> = cuts.iter().filter(|cut| cut.kind != CutKind::Pin).collect();
        cuts.sort_by_key(|cut| (cut.number, cut.put_id, cut.through_sequence));
        let mut root: Option<Checkpoint> = None;
        for (index, cut) in cuts.iter().enumerate() {
            let why = name_of(cut);
            if root
                .as_ref()
                .is_none_or(|root| (root.number, root.put_id) != (cut.number, cut.put_id))
            {
                root = self.kept_root(store, cut, &why, readable)?;
            }
            let Some(root) = &root else {
                let key = kept_key(self.volume_id, cut.number, cut.put_id);
                self.damage.add(&key, "it is gone", &[&why]);
                continue;
            };
            let (until, last) = match cut.kind {
                CutKind::Snapshot => {
                    let through = cut.through_sequence;
                    (RollForwardLimit { sequence: through, ..RollForwardLimit::END }, Some(through))
                }
                // Later moments are reached from the next retained checkpoint. It may stand behind
                // a rollback whose own cut may be gone, so no roll-forward passes that rollback.
                _ => {
                    let next = cuts[index + 1..].iter().find(|next| next.kind == CutKind::Retained);
                    (until_next(root, next.copied()), None)
                }
            };
            self.add_state(store, why, root, until, last)?;
        }
        Ok(())
    }

    /// The checkpoint of a cut. Its copy has to be whole, or not made yet.
    fn kept_root(
        &mut self,
        store: &dyn ObjectStore,
        cut: &CutEntry,
        why: &str,
        readable: &[u64],
    ) -> Result<Option<Checkpoint>> {
        let (id, number) = (self.volume_id, cut.number);
        let of_cut = |root: &Checkpoint| root.put_id == cut.put_id;
        let kept = kept_key(id, number, cut.put_id);
        let copy = read_root(store, &kept, id, number)?;
        match copy {
            Some(Verified::Intact(root)) if of_cut(&root) => return Ok(Some(root)),
            Some(Verified::Intact(_)) => {
                self.damage.add(&kept, "another checkpoint has its name", &[why]);
            }
            Some(Verified::Damaged(error)) => self.damage.add(&kept, error, &[why]),
            None if readable.contains(&number) => {}
            None => self.damage.add(&kept, "it is gone", &[why]),
        }
        let root = read_root(store, &checkpoint_key(id, number), id, number)?;
        Ok(root.and_then(Verified::intact).filter(of_cut))
    }

    /// Adds a state with everything that it needs.
    fn add_state(
        &mut self,
        store: &dyn ObjectStore,
        why: String,
        root: &Checkpoint,
        mut limit: RollForwardLimit,
        last: Option<u64>,
    ) -> Result<()> {
        let state = self.begin(why.clone());
        self.need_root(state, root);
        if let Some(through) = self.copied_through {
            limit.sequence = limit.sequence.min(through);
        }
        let mut end = start_of(root);
        let rolled = checkpoint::without_map(root).and_then(|mut view| {
            let rolled =
                roll_forward_until(store, root.volume_id, Some(&mut view), &mut end, limit);
            for (sequence, info) in view.segments.snapshot() {
                if u64::from(sequence) > root.through_sequence {
                    self.need_info(state, root.volume_id, u64::from(sequence), &info);
                }
            }
            rolled
        });
        match rolled {
            Err(error) if error.kind() == ErrorKind::Corrupt => {
                self.damage.add_error(
                    &segment_key(root.volume_id, end.next_sequence),
                    &error,
                    &[&why],
                );
            }
            Ok(()) if last.is_some_and(|last| last != end.stored_sequence) => {
                let what = format!("it is gone: the log ends at segment {}", end.stored_sequence);
                self.damage.add(&segment_key(root.volume_id, end.next_sequence), &what, &[&why]);
            }
            outcome => outcome?,
        }
        Ok(())
    }

    /// A new state; returns its index.
    pub(super) fn begin(&mut self, why: String) -> usize {
        self.states.push(why);
        self.states.len() - 1
    }

    /// A state needs the map of its checkpoint, and each segment that this map names, even one
    /// whose bytes were all overwritten since.
    fn need_root(&mut self, state: usize, root: &Checkpoint) {
        let lineage = Lineage::new(&root.kept.lineage);
        for entry in root.segments.iter().filter(|entry| entry.live_bytes > 0) {
            self.need_entry(state, lineage.owner(root.volume_id, entry.sequence), entry);
        }
        let newest_delta = root.parts.iter().filter(|part| part.is_delta()).map(|part| part.number);
        let newest_delta = newest_delta.max().unwrap_or(0);
        let newest_part = root.parts.iter().map(|part| part.number).max().unwrap_or(0);
        for entry in &root.parts {
            let PartEntry { group, number, put_id, bytes, crc, .. } = entry;
            let covered_by = if entry.is_delta() { newest_part } else { newest_delta };
            let part = self.parts.entry((*group, *number, *put_id)).or_insert_with(|| KeptPart {
                length_bytes: *bytes,
                crc: *crc,
                is_covered: true,
                state_ranges: StateRanges::new(),
            });
            part.is_covered &= covered_by > *number;
            add_needer(&mut part.state_ranges, state);
        }
    }

    /// Adds a segment that a state needs, as a checkpoint's table records it.
    pub(super) fn need_entry(&mut self, state: usize, owner: VolumeId, entry: &SegmentEntry) {
        let SegmentEntry { sequence, epoch, header_bytes, data_bytes, .. } = *entry;
        self.need(state, (owner, sequence), epoch, u64::from(header_bytes), data_bytes);
    }

    fn need_info(&mut self, state: usize, owner: VolumeId, sequence: u64, info: &SegmentInfo) {
        self.need(
            state,
            (owner, sequence),
            info.epoch,
            u64::from(info.header_bytes),
            info.data_bytes,
        );
    }

    fn need(
        &mut self,
        state: usize,
        name: (VolumeId, u64),
        epoch: u64,
        header_bytes: u64,
        data_bytes: u64,
    ) {
        let segment = self.segments.entry(name);
        let segment = segment.or_insert_with(|| KeptSegment {
            epoch,
            header_bytes,
            data_bytes,
            state_ranges: StateRanges::new(),
        });
        add_needer(&mut segment.state_ranges, state);
    }

    /// The keys of all segments and parts that are needed.
    pub(super) fn keys(&self) -> HashSet<String> {
        let part = |(group, number, put_id): &(u64, u64, PutId)| {
            let (group, number, put_id) = (*group, *number, *put_id);
            part_key(&PartIdentity { volume_id: self.volume_id, group, number, put_id })
        };
        let segments = self.segments.keys().map(|(owner, sequence)| segment_key(*owner, *sequence));
        segments.chain(self.parts.keys().map(part)).collect()
    }

    /// The names, for people, of the states that need something.
    pub(super) fn names<'a>(
        &'a self,
        state_ranges: &'a StateRanges,
    ) -> impl Iterator<Item = &'a str> {
        state_ranges
            .iter()
            .flat_map(|(first, last)| self.states[*first..=*last].iter().map(String::as_str))
    }
}

/// The numbers of the checkpoints that are listed, in order.
fn numbers(store: &dyn ObjectStore, volume_id: VolumeId) -> Result<Vec<u64>> {
    let listed = Blocking(store).list(&checkpoint_prefix(volume_id), Class::Background);
    let listed = listed.map_err(|error| store_error(&error))?;
    let numbers = listed.iter().filter_map(|object| parse_checkpoint_key(&object.key));
    let mut numbers: Vec<u64> =
        numbers.map(|(_, number)| number).filter(|number| *number < u64::MAX).collect();
    numbers.sort_unstable();
    Ok(numbers)
}

/// States come in order.
fn add_needer(state_ranges: &mut StateRanges, state: usize) {
    match state_ranges.last_mut() {
        Some((_, last)) if *last == state => {}
        Some((_, last)) if *last + 1 == state => *last = state,
        _ => state_ranges.push((state, state)),
    }
}

/// How far the moments go that are reached from a checkpoint, and not from the `next` one.
fn until_next(root: &Checkpoint, next: Option<&CutEntry>) -> RollForwardLimit {
    match next {
        None => RollForwardLimit::END,
        Some(next) if next.position > root.position => {
            RollForwardLimit { position: next.position - 1, ..RollForwardLimit::END }
        }
        // Nothing was written between them.
        Some(_) => RollForwardLimit { sequence: root.through_sequence, ..RollForwardLimit::END },
    }
}

fn fallback_name(number: u64) -> String {
    format!("the volume from checkpoint {number}")
}

fn name_of(cut: &CutEntry) -> String {
    match cut.kind {
        CutKind::Snapshot => format!("snapshot {:?}", cut.name),
        _ => format!("the moments from position {} on", cut.position),
    }
}

/// Reads one checkpoint: `None` when it does not exist.
pub(super) fn read_root(
    store: &dyn ObjectStore,
    key: &str,
    volume_id: VolumeId,
    number: u64,
) -> Result<Option<Verified<Checkpoint>>> {
    let read = store_calls::again_if_damaged(|| {
        let Some(bytes) = store_calls::get(store, key, None, Class::Background)? else {
            return Ok(None);
        };
        Checkpoint::decode(&bytes, &CheckpointIdentity { volume_id, number })
            .map(Some)
            .map_err(undecodable)
    });
    Ok(match Verified::of(read)? {
        Verified::Intact(root) => root.map(Verified::Intact),
        Verified::Damaged(error) => Some(Verified::Damaged(error)),
    })
}
