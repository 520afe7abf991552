//! A sealed segment in flight to the store and into the map. Not here: puts and their repetition
//! (`log_tail`), and the objects of a checkpoint (`outgoing`).

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use sawmill_format::ids::PutId;
use sawmill_format::segment::{SegmentHeader, SegmentKind};

use crate::record::Record;
use crate::segment::resident::ResidentPiece;

/// The progress of a segment.
pub(super) enum Stage {
    UnderWay,
    RepeatAt(Duration),
    Stored,
}

/// Which frames of a moved segment are cached.
#[derive(Default)]
pub(super) struct CachedFrames {
    /// By frame: whether it is in the read cache, or on its way there.
    pub(super) frames: Vec<bool>,
    /// Whether frames are on their way there.
    pub(super) is_inserting: bool,
}

impl CachedFrames {
    pub(super) fn has_all(&self, first: u64, last: u64) -> bool {
        self.frames
            .get(first as usize..=last as usize)
            .is_some_and(|frames| !frames.contains(&false))
    }
}

/// A sealed segment that is not in the map yet.
pub(super) struct Upload {
    pub(super) header: SegmentHeader,
    pub(super) header_bytes: u32,
    pub(super) object_bytes: u64,
    /// Kept until stored, for repeated puts; for moved data, until it is in the map.
    pub(super) object: Bytes,
    pub(super) resident: Vec<ResidentPiece>,
    pub(super) records: Vec<Arc<Record>>,
    pub(super) stage: Stage,
    /// When it was first put.
    pub(super) put_at: Duration,
    pub(super) cached: CachedFrames,
}

impl Upload {
    pub(super) fn moved(header: SegmentHeader, header_bytes: u32, object: Bytes) -> Self {
        let (object_bytes, stage) = (object.len() as u64, Stage::UnderWay);
        let (resident, records, cached) = (Vec::new(), Vec::new(), CachedFrames::default());
        let put_at = Duration::ZERO;
        Upload {
            header,
            header_bytes,
            object_bytes,
            object,
            resident,
            records,
            stage,
            put_at,
            cached,
        }
    }

    pub(super) fn is_moved(&self) -> bool {
        self.header.kind == SegmentKind::Moved
    }

    /// The object; for moved data also after it is stored.
    pub(super) fn contents(&self) -> (&SegmentHeader, &Bytes) {
        (&self.header, &self.object)
    }

    pub(super) fn sequence(&self) -> u64 {
        self.header.sequence
    }

    pub(super) fn put_id(&self) -> PutId {
        self.header.put_id
    }

    pub(super) fn repeat_at(&self) -> Option<Duration> {
        match self.stage {
            Stage::RepeatAt(at) => Some(at),
            _ => None,
        }
    }
}
