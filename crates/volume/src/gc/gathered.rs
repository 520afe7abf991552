//! The result of gathering: the body of a moved segment, or why there is none. Not here: gathering
//! it (`gather`), and sealing its frames (`segment::builder`).

use sawmill_format::segment::{Origin, SegmentExtent};
use sawmill_store::StoreError;

use super::sweep::MovePlan;
use crate::Error;
use crate::segment::buffers::Buffer;
use crate::segment::builder::body_spans;

/// The body of a moved segment, and what its header records about it.
pub(crate) struct MovedSegment {
    pub(crate) extents: Vec<SegmentExtent>,
    pub(crate) origins: Vec<Origin>,
    pub(crate) data_bytes: u64,
    pub(crate) header_bytes: usize,
    /// Room for the header, then the body: data in place, frames not sealed.
    pub(crate) buffer: Buffer,
    /// Frames with data that was cached before it moved: they are cached again afterwards.
    pub(crate) cached: Vec<bool>,
}

/// Why a whole gathering failed; what is wrong with one of its runs is `gather::GatherTrouble`.
pub(crate) enum GatherFailure {
    /// Nothing of the plan is live any more.
    NothingLeft,
    /// The store is unavailable: the same pieces are gathered later.
    Unavailable { plan: MovePlan, error: StoreError },
    /// A segment cannot be read: it is left alone.
    Damaged { sequence: u32, error: Error },
}

/// How a gathering ended, and what is left of the plan.
pub(crate) type GatherOutcome = Result<(MovedSegment, MovePlan), GatherFailure>;

impl MovedSegment {
    /// Puts bytes at `data_offset` of the new segment's data.
    pub(super) fn place(&mut self, frame_bytes: u32, data_offset: u64, mut bytes: &[u8]) {
        let body = &mut self.buffer.bytes_mut()[self.header_bytes..];
        for span in body_spans(frame_bytes, data_offset, bytes.len() as u64) {
            let (part, rest) = bytes.split_at(span.len());
            body[span].copy_from_slice(part);
            bytes = rest;
        }
    }

    pub(super) fn note_cached(&mut self, frame_bytes: u32, data_offset: u64, length: u64) {
        let frame_bytes = u64::from(frame_bytes);
        let (first, last) = (data_offset / frame_bytes, (data_offset + length - 1) / frame_bytes);
        for frame in first..=last {
            self.cached[frame as usize] = true;
        }
    }
}
