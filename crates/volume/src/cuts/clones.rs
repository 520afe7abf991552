//! Clones: a volume that begins from a cut of another, and shares its segments.
//!
//! A clone has an id, a map and a log of its own. Its sequences continue behind those of its base,
//! so a sequence shows which volume owns a segment; the clone's first checkpoint records each
//! volume's range (the lineage). Only the map is copied.
//!
//! Order, and why: pins first (in the base, and in the ancestors whose data the cut uses), then a
//! check that the cut is still kept and the base still exists, then the clone's map and checkpoint,
//! its name last. A process that gives up a cut or a volume first makes that durable, then looks
//! for pins (`engine::pins`, `removal`). So either it sees our pin, or we see that the cut is gone.
//! A creation that crashes midway leaves pins and objects without a name; `check` of the base lists
//! them.
//!
//! Invariants: pin numbers have no gaps, so they can be read by name. Once the name may have been
//! put, nothing that the clone needs is deleted.
//!
//! Not here: how pins are released (`removal`), and how a clone gets rid of its ancestors
//! (`flatten`).

use std::collections::HashMap;

use bytes::Bytes;
use sawmill_format::checkpoint::{Checkpoint, PartEntry, checkpoint_key};
use sawmill_format::ids::{PutId, VolumeId};
use sawmill_format::kept_block::{
    KeptBlock, LineageEntry, Pin, parse_pin_number, pin_key, pin_prefix, released_key,
};
use sawmill_format::map_part::{PartIdentity, part_key};
use sawmill_format::volume_record::VolumeRecord;
use sawmill_store::{Blocking, Class, ObjectStore, PutOutcome};

use super::cut::Cut;
use super::find::stored_cut;
use super::{CutBook, PinHolder, release_pins};
use crate::fencing::{Fencing, require_fencing};
use crate::map::part::MapPart;
use crate::recovery::stored::StoredVolume;
use crate::recovery::{Reporter, checkpoint};
use crate::replicate::role::require_primary;
use crate::store_calls::{self, cannot_encode, store_error};
use crate::world::{RealWorld, World};
use crate::{Error, ErrorKind, Result, limits, names};

/// How often a clone of the present is retried because the base advanced meanwhile.
const TRIES_MAX: u32 = 8;

/// How many clones have pins and no name yet: a crash leaves the pins.
const PINNED_MAX: usize = 16;

/// Makes volume `name` from the state of volume `base` at `cut`, or from all of it that is stored.
pub fn clone(
    store: &dyn ObjectStore,
    base: &str,
    cut: Option<&Cut>,
    name: &str,
    fencing: Fencing,
) -> Result<VolumeRecord> {
    one(name, |names, made| clone_each(store, base, cut, names, fencing, made))
}

/// Makes a volume of each name, as [`clone`] does; the base is read once for all. `made` gets each
/// as soon as it has its name; those that were made before a failure stay.
pub fn clone_each(
    store: &dyn ObjectStore,
    base: &str,
    cut: Option<&Cut>,
    names: &[String],
    fencing: Fencing,
    made: &mut dyn FnMut(VolumeRecord),
) -> Result<()> {
    for (index, name) in names.iter().enumerate() {
        names::check_name(name)?;
        if names[..index].contains(name) {
            return Err(Error::new(ErrorKind::Invalid, format!("{name} is named twice")));
        }
        names::require_free(store, name)?;
    }
    if fencing == Fencing::Demanded {
        require_fencing(store)?;
    }
    let run = CloneRun { world: &RealWorld::default(), store, base, cut };
    run.make_all(names, made)
}

/// As [`clone`] in a given world, without a probe of the store.
pub fn clone_in(
    world: &dyn World,
    store: &dyn ObjectStore,
    base: &str,
    cut: Option<&Cut>,
    name: &str,
) -> Result<VolumeRecord> {
    names::check_name(name)?;
    let run = CloneRun { world, store, base, cut };
    one(name, |names, made| run.make_all(names, made))
}

/// Makes one clone with `make_all`.
fn one(
    name: &str,
    make_all: impl FnOnce(&[String], &mut dyn FnMut(VolumeRecord)) -> Result<()>,
) -> Result<VolumeRecord> {
    let mut made = None;
    make_all(&[name.to_owned()], &mut |record| made = Some(record))?;
    made.ok_or_else(|| Error::new(ErrorKind::Internal, format!("clone {name} was not reported")))
}

/// What clones are made of, and where.
struct CloneRun<'a> {
    world: &'a dyn World,
    store: &'a dyn ObjectStore,
    base: &'a str,
    cut: Option<&'a Cut>,
}

/// A clone that is being made.
#[derive(Clone, Copy)]
struct NewClone<'a> {
    clone_id: VolumeId,
    name: &'a str,
}

/// A clone whose pins are durable and that has no name yet.
struct PinnedClone<'a> {
    name: &'a str,
    clone_id: VolumeId,
    lineage: Vec<LineageEntry>,
}

impl CloneRun<'_> {
    fn make_all(&self, names: &[String], made: &mut dyn FnMut(VolumeRecord)) -> Result<()> {
        let mut base = self.read()?;
        let mut last_pins = LastPins::default();
        for names in names.chunks(PINNED_MAX) {
            let mut pinned = self.pin_each(&base, names, &mut last_pins)?;
            for _ in 1..TRIES_MAX {
                if !pinned.is_empty() {
                    break;
                }
                base = self.read()?;
                pinned = self.pin_each(&base, names, &mut last_pins)?;
            }
            if pinned.is_empty() {
                let text = format!(
                    "volume {} changes faster than it can be cloned: make a snapshot of it, and \
                     clone that instead",
                    self.base
                );
                return Err(Error::new(ErrorKind::Unavailable, text));
            }
            self.name_each(&base, pinned, made)?;
        }
        Ok(())
    }

    fn read(&self) -> Result<StoredVolume> {
        let mut reporter = Reporter::new(self.world);
        let stored = match self.cut {
            None => names::stored(self.store, self.base, &mut reporter)?,
            Some(cut) => stored_cut(self.store, self.base, cut, &mut reporter)?,
        };
        require_primary(self.store, &stored.record, stored.newest.number_max)?;
        Ok(stored)
    }

    /// Pins the cut for each name. Returns none if the base has advanced: what was pinned may not
    /// be whole, and was released.
    fn pin_each<'n>(
        &self,
        base: &StoredVolume,
        names: &'n [String],
        last_pins: &mut LastPins,
    ) -> Result<Vec<PinnedClone<'n>>> {
        let mut pinned = Vec::new();
        let outcome = names
            .iter()
            .try_for_each(|name| {
                let clone_id = VolumeId(self.world.random()?);
                let holder = NewClone { clone_id, name };
                let lineage = pin_all(self.world, self.store, base, holder, last_pins)?;
                pinned.push(PinnedClone { name, clone_id, lineage });
                Ok(())
            })
            .and_then(|()| check_again(self.world, self.store, self.base, base));
        if !matches!(outcome, Ok(true)) {
            pinned.drain(..).for_each(|clone| self.release(&clone));
            // The base may delete released ones.
            last_pins.clear();
        }
        outcome.map(|_| pinned)
    }

    /// Makes the clones, in order. Releases those behind one that fails.
    fn name_each(
        &self,
        base: &StoredVolume,
        pinned: Vec<PinnedClone<'_>>,
        made: &mut dyn FnMut(VolumeRecord),
    ) -> Result<()> {
        let mut pinned = pinned.into_iter();
        while let Some(clone) = pinned.next() {
            match write(self.world, self.store, base, clone) {
                Ok(record) => made(record),
                Err(error) => {
                    pinned.for_each(|clone| self.release(&clone));
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    fn release(&self, clone: &PinnedClone<'_>) {
        release(self.world, self.store, clone.clone_id, &clone.lineage);
    }
}

/// The last pin of each volume that this run has put: the next number needs no list, which grows
/// with the clones of the base.
type LastPins = HashMap<VolumeId, u64>;

/// Pins the cut in the volume and in its ancestors. Returns the clone's lineage.
fn pin_all(
    world: &dyn World,
    store: &dyn ObjectStore,
    stored: &StoredVolume,
    holder: NewClone<'_>,
    last_pins: &mut LastPins,
) -> Result<Vec<LineageEntry>> {
    let mut lineage = needed(stored);
    let base = LineageEntry {
        through_sequence: stored.end.next_sequence - 1,
        volume_id: stored.record.volume_id,
        pin: 0,
        cut_number: stored.newest.checkpoint.number,
        cut_through: stored.end.stored_sequence,
    };
    // A clone that has written nothing owns nothing that a clone of it could need.
    if lineage.last().is_none_or(|last| last.through_sequence < base.through_sequence) {
        lineage.push(base);
    }
    let mut done: Vec<LineageEntry> = Vec::new();
    for entry in &lineage {
        let next = match last_pins.get(&entry.volume_id) {
            Some(last) => Ok(last + 1),
            None => next_pin(store, entry.volume_id),
        };
        match next.and_then(|next| put_pin(world, store, entry, holder, next)) {
            Ok(pin) => {
                last_pins.insert(entry.volume_id, pin);
                done.push(LineageEntry { pin, ..*entry });
            }
            Err(error) => {
                release(world, store, holder.clone_id, &done);
                return Err(error);
            }
        }
    }
    Ok(done)
}

/// The ancestors of the base whose segments the cut still names; after a flatten, none.
fn needed(stored: &StoredVolume) -> Vec<LineageEntry> {
    let live: Vec<_> = stored.view.segments.snapshot();
    let lineage = &stored.view.lineage;
    let is_needed = |index: usize| {
        let mut live = live.iter().filter(|(_, info)| info.live_bytes > 0);
        live.any(|(sequence, _)| {
            lineage.ancestor(u64::from(*sequence)).is_some_and(|(at, _)| at == index)
        })
    };
    let entries = lineage.entries().iter().enumerate();
    entries.filter(|(index, _)| is_needed(*index)).map(|(_, entry)| *entry).collect()
}

/// A number for a pin of that volume: the one before it was seen, or it is the first.
fn next_pin(store: &dyn ObjectStore, volume_id: VolumeId) -> Result<u64> {
    let prefix = pin_prefix(volume_id);
    let listed = Blocking(store).list(&prefix, Class::Read).map_err(|error| store_error(&error))?;
    let mut pin_number =
        listed.iter().filter_map(|object| parse_pin_number(&object.key)).max().unwrap_or(0) + 1;
    // A lagging list may still show the pins of a volume that was deleted.
    while pin_number > 1
        && store_calls::get(store, &pin_key(volume_id, pin_number - 1), None, Class::Read)?
            .is_none()
    {
        pin_number -= 1;
    }
    Ok(pin_number)
}

/// Puts a pin into the first free number from `pin_number` on. Numbers are taken without gaps: a
/// number is tried only after the one before it was seen.
fn put_pin(
    world: &dyn World,
    store: &dyn ObjectStore,
    entry: &LineageEntry,
    holder: NewClone<'_>,
    mut pin_number: u64,
) -> Result<u64> {
    loop {
        let pin = Pin {
            volume_id: entry.volume_id,
            put_id: PutId(world.random()?),
            pin_number,
            clone_id: holder.clone_id,
            number: entry.cut_number,
            through_sequence: entry.cut_through,
            name: holder.name.to_owned(),
        };
        let put = Blocking(store).put(
            &pin_key(entry.volume_id, pin_number),
            Bytes::from(pin.encode().map_err(cannot_encode)?),
            Class::Upload,
        );
        match put.map_err(|error| store_error(&error))? {
            PutOutcome::Created => return Ok(pin_number),
            PutOutcome::Taken => pin_number += 1,
        }
    }
}

/// Checks, after the pins are durable, that the base still has its name and the cut, and still
/// holds its pins on its ancestors.
fn check_again(
    world: &dyn World,
    store: &dyn ObjectStore,
    base: &str,
    stored: &StoredVolume,
) -> Result<bool> {
    let record = names::find(store, base)?;
    let root = &stored.newest.checkpoint;
    if record.volume_id != root.volume_id {
        let text = format!(
            "volume {base} was deleted and created again while it was being cloned: nothing was \
            cloned"
        );
        return Err(Error::new(ErrorKind::NotFound, text));
    }
    for entry in needed(stored) {
        let released = released_key(entry.volume_id, entry.pin);
        if store_calls::get(store, &released, None, Class::Read)?.is_some() {
            let text = format!(
                "volume {base} has released its ancestors while it was being cloned: nothing was \
                cloned"
            );
            return Err(Error::new(ErrorKind::NotFound, text));
        }
    }
    let newest = checkpoint::newest(store, record.volume_id)?.checkpoint;
    if (newest.number, newest.put_id) == (root.number, root.put_id) {
        return Ok(true);
    }
    let through = stored.end.stored_sequence;
    let keeps_cut = |book: &CutBook| book.begins(root.number, root.put_id, through);
    if keeps_cut(&CutBook::of(&newest)) {
        return Ok(true);
    }
    // The cut may have been ordered behind the newest checkpoint.
    let current = names::stored(store, base, &mut Reporter::new(world))?;
    let is_kept = keeps_cut(&current.view.cuts.lock());
    Ok(is_kept && current.record.volume_id == root.volume_id)
}

/// Puts the clone's map; each part is sent while the next is encoded.
fn put_map(
    store: &dyn ObjectStore,
    stored: &StoredVolume,
    clone_id: VolumeId,
    put_id: PutId,
) -> Result<Vec<PartEntry>> {
    let mut parts = Vec::new();
    let map = &stored.view.map;
    let groups = map.groups().into_iter().map(|group| (group, map.export_group(group)));
    let objects = groups.filter(|(_, extents)| !extents.is_empty()).map(|(group, extents)| {
        let identity = PartIdentity { volume_id: clone_id, group, number: 1, put_id };
        let part = MapPart::encode(&identity, extents, limits::MAP_PART_BYTES_MAX)?;
        parts.push(part.entry);
        Ok((part.key, part.bytes))
    });
    store_calls::put_each(store, objects)?;
    Ok(parts)
}

/// Writes the clone's map and first checkpoint, then its name.
fn write(
    world: &dyn World,
    store: &dyn ObjectStore,
    stored: &StoredVolume,
    clone: PinnedClone<'_>,
) -> Result<VolumeRecord> {
    let PinnedClone { name, clone_id, lineage } = clone;
    let put_id = PutId(world.random()?);
    // Without a root no name can lead here: nobody needs the pins.
    let parts = put_map(store, stored, clone_id, put_id)
        .inspect_err(|_| release(world, store, clone_id, &lineage))?;
    let identity = |part: &PartEntry| PartIdentity {
        volume_id: clone_id,
        group: part.group,
        number: 1,
        put_id,
    };
    let mut keys: Vec<_> = parts.iter().map(|part| part_key(&identity(part))).collect();
    let (mut segments, _) = stored.view.segments.freeze(1, &|_, _| true);
    segments.retain(|segment| segment.live_bytes > 0);
    let root = Checkpoint {
        volume_id: clone_id,
        put_id,
        number: 1,
        epoch: 0,
        through_sequence: stored.end.next_sequence - 1,
        next_sequence: stored.end.next_sequence,
        position: stored.end.position,
        wall_unix_ms: world.unix_ms(),
        attached_ms: 0,
        repeats: 0,
        size_bytes: stored.record.size_bytes,
        clean: true,
        extent_total: parts.iter().map(|part| u64::from(part.extents)).sum(),
        live_bytes: segments.iter().map(|segment| segment.live_bytes).sum(),
        segments,
        parts,
        kept: KeptBlock { lineage: lineage.clone(), ..KeptBlock::default() },
    };
    keys.push(checkpoint_key(clone_id, 1));
    let record = VolumeRecord {
        volume_id: clone_id,
        put_id,
        created_unix_ms: world.unix_ms(),
        name: name.to_owned(),
        ..stored.record.clone()
    };
    let root_put = vec![(checkpoint_key(clone_id, 1), root.encode().map_err(cannot_encode)?)];
    let named = store_calls::put_all(store, root_put)
        .and_then(|()| names::ledger::claim(world, store, name, &record));
    match named {
        Ok(Some(record)) => Ok(record),
        Ok(None) => {
            // No other process can have found these objects. A failure leaves small objects behind.
            let _ = Blocking(store).delete(keys, Class::Background);
            release(world, store, clone_id, &lineage);
            Err(names::exists(name))
        }
        // The name may still land, so what it needs stays.
        Err(error) => Err(error),
    }
}

/// Releases pins, as far as the store permits; a pin that stays only keeps data alive.
fn release(
    world: &dyn World,
    store: &dyn ObjectStore,
    clone_id: VolumeId,
    lineage: &[LineageEntry],
) {
    if let Err(error) = release_pins(world, store, &PinHolder { clone_id, lineage }) {
        tracing::warn!("cannot release the pins of a clone that was not made: {error}");
    }
}
