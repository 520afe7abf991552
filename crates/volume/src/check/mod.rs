//! Checks a volume: reads and verifies everything that is kept, the present as well as the past.
//! Changes nothing; damage is listed, not repaired.
//!
//! First a list of what is kept and why (`kept_list`, with `kin` for clones), then each segment and
//! map part of it is read once (`verify`); last, what nothing needs is counted (`stray`). Damage
//! names what it costs (`damage`).
//!
//! Invariant: in a served volume, an object counts as missing only if the volume, read again, still
//! needs it.
//!
//! Not here: finding the newest checkpoint and the end of the log (`recovery`), and how a report is
//! printed (the binary).

use sawmill_format::volume_record::VolumeRecord;
use sawmill_store::ObjectStore;

use crate::{Error, ErrorKind, Result};

mod damage;
mod kept_list;
mod kin;
mod stray;
mod verify;

pub use damage::Damage;

use damage::DamageList;
use kept_list::KeptList;

/// How often the list of what is kept is made again while a writer advances.
const LISTINGS_MAX: u32 = 8;

/// What a check found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CheckReport {
    /// Segments read.
    pub segments: u64,
    /// Frames verified.
    pub frames: u64,
    /// Bytes read.
    pub bytes: u64,
    /// Extents of the map compared.
    pub extents: u64,
    /// Map parts read.
    pub parts: u64,
    /// What is kept: the present, the checkpoints it can be had from, snapshots, moments and
    /// clones.
    pub kept: u64,
    /// Segments that nothing kept needs: most wait to be deleted. They were not read.
    pub unneeded: u64,
    /// Segments that lie in the window of a fence, where nobody reads them; see the notes.
    pub stranded: u64,
    /// Epoch and last segment of the log, when its end is known.
    pub end: Option<(u64, u64)>,
    /// What is wrong; empty when the volume is undamaged.
    pub damage: Vec<Damage>,
    /// What is odd but harmless.
    pub notes: Vec<String>,
}

/// Checks a volume. `progress` gets how many segments are done, and of how many.
pub fn check(
    store: &dyn ObjectStore,
    record: &VolumeRecord,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<CheckReport> {
    let mut report = CheckReport::default();
    let mut list = kept_by(store, record)?;
    let (mut damage, mut miscounted) = (DamageList::default(), DamageList::default());
    if let Some(stored) = list.stored.take() {
        report.end = Some((stored.end.epoch, stored.end.stored_sequence));
        verify::counts(&stored, &mut report, &mut miscounted);
    }
    verify::parts(store, &list, &mut damage)?;
    verify::segments(store, &list, &mut report, &mut damage, progress)?;
    (report.parts, report.kept) = (list.parts.len() as u64, list.states.len() as u64);
    if !damage.is_empty() || !list.damage.is_empty() {
        // A writer may have advanced, and deleted what is no longer needed.
        let mut is_overtaken = true;
        for _ in 0..LISTINGS_MAX {
            list = kept_by(store, record)?;
            is_overtaken = !list.damage.is_empty() && list.has_moved_on(store)?;
            if !is_overtaken {
                break;
            }
        }
        let needed = list.keys();
        damage.retain(|object| needed.contains(object));
        if is_overtaken && damage.is_empty() {
            return Err(overtaken(record));
        }
    }
    damage.take(std::mem::take(&mut list.damage));
    damage.take(miscounted);
    report.notes.append(&mut list.notes);
    stray::list(store, &list, &mut report)?;
    report.damage = damage.into_vec();
    Ok(report)
}

fn overtaken(record: &VolumeRecord) -> Error {
    let text = format!(
        "volume {} changed faster than what it keeps could be listed: what was read is intact; \
         check it again when fewer checkpoints are written",
        record.name
    );
    Error::new(ErrorKind::Unavailable, text)
}

/// What a volume keeps, for itself and for its clones.
fn kept_by(store: &dyn ObjectStore, record: &VolumeRecord) -> Result<KeptList> {
    let mut list = KeptList::make(store, record)?;
    if let Some(newest) = list.newest.clone() {
        kin::add_clones(store, &mut list)?;
        kin::check_own_pins(store, &mut list, &newest)?;
    }
    Ok(list)
}
