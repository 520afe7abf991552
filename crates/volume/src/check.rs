//! Checking a volume: every segment read, every checksum verified, the map compared with what the segments
//! hold. Changes nothing; damage is listed, not mended.

use std::collections::BTreeMap;

use bytes::Bytes;
use sawmill_format::ids::VolumeId;
use sawmill_format::segment::{FrameIdentity, SegmentHeader, SegmentIdentity, frame_open, segment_key};
use sawmill_format::volume_record::VolumeRecord;
use sawmill_store::{Class, ObjectStore};

use crate::ask;
use crate::cuts::pinned_by;
use crate::names;
use crate::open;
use crate::recovery::Reporter;
use crate::segment::table::SegmentInfo;
use crate::world::RealWorld;
use crate::{Error, ErrorKind, Result};

/// Segments fetched at once.
const PARALLEL: usize = 4;

/// Something wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Damage {
    /// Which object.
    pub object: String,
    /// What is wrong with it.
    pub what: String,
}

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
    /// What is wrong; empty when the volume is well.
    pub damage: Vec<Damage>,
    /// What is odd but harmless.
    pub notes: Vec<String>,
}

/// Checks a volume. `progress` hears how many segments are done, of how many.
pub fn check(
    store: &dyn ObjectStore,
    record: &VolumeRecord,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<CheckReport> {
    let mut report = CheckReport::default();
    let world = RealWorld::default();
    let stored = match open::stored(store, &record.name, &mut Reporter::new(&world)) {
        Ok(stored) => stored,
        Err(error) if error.kind() == ErrorKind::Corrupt => {
            report.damage.push(Damage { object: record.name.clone(), what: error.to_string() });
            return Ok(report);
        }
        Err(error) => return Err(error),
    };
    report.notes.extend(stored.newest.notes.iter().cloned());
    note_pins(store, record, &mut report)?;
    let segments = stored.view.segments.snapshot();
    let mapped = mapped_by_segment(&stored, &mut report);
    let total = segments.len() as u64;
    for chunk in segments.chunks(PARALLEL) {
        let owner = |sequence: u32| stored.view.lineage.owner(record.volume_id, u64::from(sequence));
        let key = |sequence: u32| segment_key(owner(sequence), u64::from(sequence));
        let wanted = chunk.iter().map(|(sequence, _)| (key(*sequence), None)).collect();
        for ((sequence, info), answer) in chunk.iter().zip(ask::get_all(store, wanted, Class::Background)) {
            let damage = match answer {
                Ok(Some(bytes)) => check_segment(owner(*sequence), *sequence, info, &bytes, &mut report),
                // A dead segment may have been deleted after the checkpoint that lists it.
                Ok(None) if info.dead_since > 0 => Ok(()),
                Ok(None) => Err("it is gone".to_owned()),
                Err(error) if error.kind() == ErrorKind::Corrupt => Err(error.to_string()),
                Err(error) => return Err(error),
            };
            if let Err(what) = damage {
                report.damage.push(Damage { object: key(*sequence), what });
            }
            let (bytes, past_end) = mapped.get(sequence).copied().unwrap_or_default();
            if bytes != info.live_bytes || past_end {
                let live = info.live_bytes;
                let what =
                    format!("the map holds {bytes} of its bytes, and its live bytes are counted as {live}");
                report.damage.push(Damage { object: key(*sequence), what });
            }
        }
        report.segments += chunk.len() as u64;
        progress(report.segments, total);
    }
    for sequence in mapped.keys().filter(|sequence| stored.view.segments.get(**sequence).is_none()) {
        let object = segment_key(record.volume_id, u64::from(*sequence));
        report
            .damage
            .push(Damage { object, what: "the map names it, and the table of segments does not".into() });
    }
    Ok(report)
}

/// Pins keep data from being deleted; one whose clone nobody can find does so for ever.
fn note_pins(store: &dyn ObjectStore, record: &VolumeRecord, report: &mut CheckReport) -> Result<()> {
    for name in pinned_by(store, record.volume_id)? {
        match names::find(store, &name) {
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::Invalid) => {
                report.notes.push(format!(
                    "it is pinned for a clone {name:?}, and there is none of that name: its creation died, \
                     or it was renamed; what it needs stays"
                ));
            }
            Err(error) if error.kind() != ErrorKind::Corrupt => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

/// Bytes of each segment that the map holds, and whether any lie past the segment's end.
fn mapped_by_segment(stored: &open::Stored, report: &mut CheckReport) -> BTreeMap<u32, (u64, bool)> {
    let mut mapped: BTreeMap<u32, (u64, bool)> = BTreeMap::new();
    for group in stored.view.map.groups() {
        for extent in stored.view.map.export_group(group) {
            report.extents += 1;
            let entry = mapped.entry(extent.sequence).or_default();
            entry.0 += extent.length;
            let data_bytes = stored.view.segments.get(extent.sequence).map_or(0, |info| info.data_bytes);
            entry.1 |= u64::from(extent.data_offset) + extent.length > data_bytes;
        }
    }
    mapped
}

fn check_segment(
    volume_id: VolumeId,
    sequence: u32,
    info: &SegmentInfo,
    bytes: &Bytes,
    report: &mut CheckReport,
) -> std::result::Result<(), String> {
    report.bytes += bytes.len() as u64;
    let identity = SegmentIdentity { volume_id, sequence: u64::from(sequence) };
    let header = SegmentHeader::decode(bytes, &identity).map_err(|error| error.to_string())?;
    let agrees = header.epoch == info.epoch
        && header.data_bytes == info.data_bytes
        && header.header_bytes() == u64::from(info.header_bytes);
    if !agrees {
        return Err("its header does not agree with the table of segments".into());
    }
    if bytes.len() as u64 != header.object_bytes() {
        return Err(format!("it has {} bytes, and its header says {}", bytes.len(), header.object_bytes()));
    }
    let body = &bytes[header.header_bytes() as usize..];
    for (frame, entry) in header.frames.iter().enumerate() {
        let identity =
            FrameIdentity { volume_id, sequence: header.sequence, epoch: header.epoch, frame: frame as u32 };
        let start = entry.body_offset as usize;
        let part = body.get(start..start + entry.stored_bytes as usize).ok_or("a frame lies past its end")?;
        frame_open(&identity, part).map_err(|error| format!("frame {frame}: {error}"))?;
        report.frames += 1;
    }
    Ok(())
}

impl From<Damage> for Error {
    fn from(damage: Damage) -> Self {
        Error::new(ErrorKind::Corrupt, format!("{}: {}", damage.object, damage.what))
    }
}
