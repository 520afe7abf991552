//! Segments that nothing kept needs: dead ones that wait to be deleted, and those stranded in the
//! window of a fence, which a fenced writer left there. The latter stay forever: nothing reads
//! them.
//!
//! Not here: old map parts and checkpoints, which the next cleanup lists itself
//! (`engine::cleanup`).

use sawmill_format::segment::{
    SegmentKind, encoded_bytes, parse_segment_key, segment_key, segment_prefix,
};
use sawmill_store::{Blocking, Class, ObjectStore};

use super::CheckReport;
use super::kept_list::KeptList;
use crate::recovery::roll_forward::headers;
use crate::store_calls::store_error;
use crate::{ErrorKind, Result, limits};

/// Lists what is stranded, and counts what is unneeded.
pub(super) fn list(
    store: &dyn ObjectStore,
    list: &KeptList,
    report: &mut CheckReport,
) -> Result<()> {
    let id = list.volume_id;
    let listed = Blocking(store).list(&segment_prefix(id), Class::Background);
    // The log may have grown beyond the end since.
    let listed = listed.map_err(|error| store_error(&error))?.into_iter().filter_map(|object| {
        let (_, sequence) = parse_segment_key(&object.key)?;
        let is_unneeded =
            sequence < list.next_sequence && !list.segments.contains_key(&(id, sequence));
        is_unneeded.then_some((sequence, object.size_bytes))
    });
    // No other segment is as small as a fence.
    let fence_bytes = encoded_bytes(0, 0, 0) as u64;
    let (small, mut unneeded): (Vec<_>, Vec<_>) =
        listed.partition(|(_, bytes)| *bytes == fence_bytes);
    let mut windows = Vec::new();
    for chunk in small.chunks(limits::ROLL_FORWARD_PARALLEL_MAX) {
        let sequences: Vec<u64> = chunk.iter().map(|(sequence, _)| *sequence).collect();
        for (sequence, header) in sequences.iter().zip(headers(store, id, &sequences)) {
            match header {
                Ok(Some(header)) if header.kind == SegmentKind::Fence => {
                    windows.push(*sequence + 1..header.next_sequence);
                }
                Err(error) if error.kind() != ErrorKind::Corrupt => return Err(error),
                Ok(None) => {}
                // Not a fence after all, or a head that cannot be read.
                _ => unneeded.push((*sequence, fence_bytes)),
            }
        }
    }
    let is_stranded = |sequence: &u64| windows.iter().any(|window| window.contains(sequence));
    let (stranded, dead): (Vec<u64>, Vec<u64>) =
        unneeded.iter().map(|(sequence, _)| *sequence).partition(is_stranded);
    (report.stranded, report.unneeded) = (stranded.len() as u64, dead.len() as u64);
    for sequence in stranded.iter().take(limits::CHECK_STRANDED_MAX) {
        report.notes.push(format!(
            "{} is stranded in the window of a fence: a fenced writer left it; nothing reads it",
            segment_key(id, *sequence)
        ));
    }
    if stranded.len() > limits::CHECK_STRANDED_MAX {
        let unlisted_count = stranded.len() - limits::CHECK_STRANDED_MAX;
        report
            .notes
            .push(format!("{unlisted_count} more segments are stranded in windows of fences"));
    }
    Ok(())
}
