//! What a stored segment changes in the map. A served volume, recovery and a forecast all use it.
//!
//! Invariant: segments are applied in order of sequence, each after it was added to the table of
//! segments.
//!
//! Not here: adding it (`roll_forward`, `engine::log_tail`).

use std::collections::HashMap;

use sawmill_format::segment::{ExtentKind, SegmentHeader, SegmentKind};

use crate::map::Location;
use crate::view::View;

/// Enters a segment's extents into the map, and takes the bytes that they cover from the segments
/// that held them. A moved extent counts only where the map still points at its origin: anything
/// else there is newer.
pub(crate) fn apply_extents(view: &View, header: &SegmentHeader) {
    let mut losses: HashMap<u32, u64> = HashMap::new();
    let sequence = header.sequence as u32;
    let mut replaced = |sequence: u32, bytes: u64| *losses.entry(sequence).or_default() += bytes;
    if header.kind == SegmentKind::Moved {
        for (extent, origin) in header.extents.iter().zip(&header.origins) {
            let (address, length) = (extent.address, extent.length);
            // A sequence beyond 32 bits is in no map: nothing moves.
            let moved_bytes = u32::try_from(origin.sequence).map_or(0, |from| {
                let from = Location { sequence: from, data_offset: origin.data_offset };
                let to = Location { sequence, data_offset: extent.data_offset };
                let moved = view.map.move_if(address, length, from, to);
                replaced(from.sequence, moved.moved_bytes);
                // The map counts the latter when it loads those groups.
                moved.moved_bytes + moved.held_bytes
            });
            replaced(sequence, length - moved_bytes);
        }
    } else {
        for extent in &header.extents {
            let (address, length) = (extent.address, extent.length);
            match extent.kind {
                ExtentKind::Data => {
                    view.map.insert(address, length, sequence, extent.data_offset, &mut replaced);
                }
                ExtentKind::Zero | ExtentKind::Discard => {
                    view.map.remove(address, length, &mut replaced)
                }
            }
        }
    }
    let losses: Vec<_> = losses.into_iter().collect();
    view.segments.lose(&losses);
}
