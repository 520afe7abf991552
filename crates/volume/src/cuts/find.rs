//! A cut by name, time or position: which checkpoint it begins from, and how far to roll forward.
//! Also lists the cuts with their bytes.
//!
//! Invariants: the returned state is exactly that at a boundary of segments; a cut that is no
//! longer kept is an error, never another cut.
//!
//! Not here: what is kept (`book`), rolling forward (`recovery::roll_forward`), and rollback
//! (`crate::past`, `engine::orders`).

use sawmill_format::checkpoint::Checkpoint;
use sawmill_format::ids::PutId;
use sawmill_format::kept_block::{CutEntry, CutKind};
use sawmill_format::volume_record::VolumeRecord;
use sawmill_store::ObjectStore;

use super::book::CutBook;
use super::cut::{Cut, rfc3339};
use crate::names;
use crate::recovery::checkpoint::{self, NewestCheckpoint};
use crate::recovery::end::start_of;
use crate::recovery::map_load;
use crate::recovery::roll_forward::{RollForwardLimit, roll_forward_until};
use crate::recovery::stored::StoredVolume;
use crate::recovery::{RecoveryStep, Reporter};
use crate::replicate::role::is_copied;
use crate::view::View;
use crate::world::{RealWorld, World};
use crate::{Error, ErrorKind, Result};

/// How often a cut is looked up again while the volume advances.
const TRIES_MAX: u32 = 8;

/// Where a cut begins and ends.
pub(crate) struct Entry {
    pub(crate) number: u64,
    pub(crate) put_id: PutId,
    pub(crate) limit: RollForwardLimit,
    /// For a cut that names its last segment: that segment, which must be found.
    pub(crate) last: Option<u64>,
}

/// Finds a cut among what a volume keeps.
pub(crate) fn entry_of(book: &CutBook, cut: &Cut) -> Result<Entry> {
    if let Cut::Snapshot(name) = cut {
        let entry = book.snapshot(name).ok_or_else(|| {
            let text = format!("there is no snapshot {name:?}: `sawmill snapshot list` shows them");
            Error::new(ErrorKind::NotFound, text)
        })?;
        let through = entry.through_sequence;
        let until = RollForwardLimit { sequence: through, ..RollForwardLimit::END };
        return Ok(Entry {
            number: entry.number,
            put_id: entry.put_id,
            limit: until,
            last: Some(through),
        });
    }
    let (wall, position) = match cut {
        Cut::Time(unix_ms) => (*unix_ms, u64::MAX),
        Cut::Position(position) => (u64::MAX, *position),
        Cut::Snapshot(_) => (u64::MAX, u64::MAX),
    };
    let fits = |entry: &&CutEntry| entry.wall_unix_ms <= wall && entry.position <= position;
    // The nearest before that time. An entry made while a clock was behind is not nearer.
    let nearness = |entry: &&CutEntry| match cut {
        Cut::Time(_) => (entry.wall_unix_ms, entry.number),
        _ => (0, entry.number),
    };
    let Some(found) = book.retained().filter(fits).max_by_key(nearness) else {
        let oldest = book.retained().map(|entry| (entry.wall_unix_ms, entry.position)).min();
        let text = match oldest {
            None => format!(
                "{cut} is not kept: the volume has no retention; `sawmill set --retention 24h` \
                 keeps every moment from then on, and `sawmill snapshot list` shows what else \
                 there is"
            ),
            Some((wall, position)) => format!(
                "{cut} is before what is kept: the oldest is position {position}, from {}; see \
                 `sawmill log`",
                rfc3339(wall)
            ),
        };
        return Err(Error::new(ErrorKind::NotFound, text));
    };
    // Not only up to the next checkpoint: writes that were in flight when that was frozen are older
    // than it, and not in it.
    let until = RollForwardLimit { sequence: u64::MAX, wall_unix_ms: wall, position };
    Ok(Entry { number: found.number, put_id: found.put_id, limit: until, last: None })
}

/// Reads a volume's state at a cut. An attach may repeat the checkpoint that the cut begins from,
/// and delete it: then the cut is looked up again.
pub(crate) fn stored_cut(
    store: &dyn ObjectStore,
    name: &str,
    cut: &Cut,
    reporter: &mut Reporter<'_>,
) -> Result<StoredVolume> {
    for _ in 1..TRIES_MAX {
        let now = names::stored(store, name, reporter)?;
        let (volume_id, number_max) = (now.record.volume_id, now.newest.number_max);
        match cut_of(store, now, cut, reporter) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                if checkpoint::newest(store, volume_id)?.number_max == number_max {
                    return Err(error);
                }
            }
            read => return read,
        }
    }
    cut_of(store, names::stored(store, name, reporter)?, cut, reporter)
}

fn cut_of(
    store: &dyn ObjectStore,
    now: StoredVolume,
    cut: &Cut,
    reporter: &mut Reporter<'_>,
) -> Result<StoredVolume> {
    let mut entry = entry_of(&now.view.cuts.lock(), cut)?;
    if is_copied(store, now.record.volume_id, now.newest.checkpoint.number)? {
        // A copier may be writing beyond that. Before it a gap is damage, as in a primary.
        entry.limit.sequence = entry.limit.sequence.min(now.end.stored_sequence);
    }
    let root = checkpoint::kept_root(store, now.record.volume_id, entry.number, entry.put_id)?;
    let (view, end) = state_at(store, &root, &entry).map_err(|error| gone(cut, error))?;
    reporter.step(
        RecoveryStep::Cut,
        format!("{cut}: through segment {}, position {}", end.stored_sequence, end.position),
    );
    let number_max = now.newest.number_max;
    // The size at the cut, not the present one.
    let record = VolumeRecord { size_bytes: end.size_bytes, ..now.record };
    let newest = NewestCheckpoint { checkpoint: root, number_max, notes: Vec::new() };
    Ok(StoredVolume { record, newest, view, end })
}

/// The map at a cut that begins from `root`.
pub(crate) fn state_at(
    store: &dyn ObjectStore,
    root: &Checkpoint,
    entry: &Entry,
) -> Result<(View, crate::recovery::end::LogEnd)> {
    let mut view = map_load::load(store, root)?;
    let mut end = start_of(root);
    roll_forward_until(store, root.volume_id, Some(&mut view), &mut end, entry.limit)?;
    // Rolling forward does not apply a checkpoint's own last segment again.
    if entry.last.is_some_and(|last| last != end.stored_sequence) {
        let text = format!("the segments of the cut end at {}", end.stored_sequence);
        return Err(Error::new(ErrorKind::Corrupt, text));
    }
    Ok((view, end))
}

fn gone(cut: &Cut, error: Error) -> Error {
    if error.kind() != ErrorKind::Corrupt {
        return error;
    }
    let text = format!(
        "{cut} is not available: it is no longer kept, or its objects are damaged ({error})"
    );
    Error::new(ErrorKind::NotFound, text).with_source(error)
}

/// One cut, for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CutInfo {
    /// The reason why it is kept.
    pub kind: CutKind,
    /// The name of a snapshot.
    pub name: String,
    /// Its checkpoint.
    pub number: u64,
    /// All writes below this position are in it.
    pub position: u64,
    /// When it was.
    pub wall_unix_ms: u64,
    /// Bytes of objects that would be deleted if only this cut were given up.
    pub unique_bytes: u64,
    /// Bytes of segment objects that this cut shares with others.
    pub shared_bytes: u64,
}

/// What a volume keeps of its past.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PastReport {
    /// How far back every moment is kept; 0: not at all.
    pub retention_s: u64,
    /// The end of what is stored.
    pub position: u64,
    /// When the newest stored segment or checkpoint was made, as far as is known.
    pub wall_unix_ms: u64,
    /// The cuts, by kind, then oldest first.
    pub cuts: Vec<CutInfo>,
}

/// What a volume keeps, according to the store.
pub fn past(store: &dyn ObjectStore, name: &str) -> Result<PastReport> {
    let world = RealWorld::default();
    let stored = names::stored(store, name, &mut Reporter::new(&world))?;
    let book = stored.view.cuts.lock().clone();
    let segments = stored.view.segments.snapshot();
    let now_number = stored.newest.checkpoint.number + 1;
    let info = |cut: &CutEntry| {
        let alone = std::slice::from_ref(cut);
        let others: Vec<_> = book.cuts.iter().filter(|other| *other != cut).cloned().collect();
        let (mut unique_bytes, mut shared_bytes) = (0, 0);
        for (sequence, info) in &segments {
            let since = match (info.live_bytes, info.dead_since) {
                (1.., _) => u64::MAX,
                (0, 0) => now_number,
                (0, since) => since,
            };
            if !super::book::needs(alone, u64::from(*sequence), since) {
                continue;
            }
            let lives =
                info.live_bytes > 0 || super::book::needs(&others, u64::from(*sequence), since);
            *(if lives { &mut shared_bytes } else { &mut unique_bytes }) += info.object_bytes;
        }
        CutInfo {
            kind: cut.kind,
            name: cut.name.clone(),
            number: cut.number,
            position: cut.position,
            wall_unix_ms: cut.wall_unix_ms,
            unique_bytes,
            shared_bytes,
        }
    };
    let newest = segments.iter().map(|(_, info)| info.wall_unix_ms).max().unwrap_or_default();
    Ok(PastReport {
        retention_s: book.retention_s,
        position: stored.end.position,
        wall_unix_ms: newest.max(stored.newest.checkpoint.wall_unix_ms).min(world.unix_ms()),
        cuts: book.cuts.iter().map(info).collect(),
    })
}
