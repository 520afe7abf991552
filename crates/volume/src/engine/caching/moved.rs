//! Data that was cached before it moved stays cached: its frames enter the read cache under their
//! new name before the map uses that name.
//!
//! The cache is checked twice: when the data was gathered, so that most of the work runs in
//! parallel to the put, and again before the map changes, for frames that readers fetched in
//! between. Best effort: frames that were fetched and are not in the cache yet are missed.
//!
//! Invariant: while an insert is running, the map does not name the segment; nothing later in the
//! log enters the map before it either.
//!
//! Not here: which frames were cached when the data was gathered (`gc::gather`), and eviction
//! (`cache`).

use std::sync::Arc;

use bytes::Bytes;
use sawmill_format::segment::{FRAME_HEAD_BYTES, SegmentHeader};

use crate::engine::context::Context;
use crate::engine::messages::Event;
use crate::engine::upload::Upload;
use crate::stored_data::FrameName;
use crate::view::View;

/// Inserts these frames of a moved segment into the read cache, on the collector's thread.
pub(in crate::engine) fn keep_cached(
    context: &Arc<Context>,
    upload: &mut Upload,
    frames: Vec<bool>,
) {
    if context.stored.has_cache() && frames.contains(&true) {
        insert(context, upload, &frames);
        upload.cached.is_inserting = true;
    }
    upload.cached.frames = frames;
}

fn insert(context: &Arc<Context>, upload: &Upload, wanted: &[bool]) {
    let (header, object) = upload.contents();
    let (sequence, epoch) = (header.sequence, header.epoch);
    let frames = frames_of(header, object, wanted);
    let cached = context.clone();
    context.collector.run(move || {
        for (frame, data) in &frames {
            let name = FrameName { sequence: sequence as u32, epoch, frame: *frame };
            if let Some((cache, key)) = cached.stored.cached(name) {
                cache.insert(key, data);
            }
        }
        cached.mailbox.push_event(Event::Kept { sequence });
    });
}

/// Whether the map may name this moved segment now. If not, an event will report it.
pub(in crate::engine) fn is_kept_cached(context: &Arc<Context>, upload: &mut Upload) -> bool {
    if !upload.cached.is_inserting && upload.is_moved() {
        let late = late_frames(context, upload);
        if late.contains(&true) {
            insert(context, upload, &late);
            upload.cached.is_inserting = true;
            for (frame, late) in upload.cached.frames.iter_mut().zip(late) {
                *frame |= late;
            }
        }
    }
    !upload.cached.is_inserting
}

/// The data of the wanted frames of an object.
pub(super) fn frames_of(
    header: &SegmentHeader,
    object: &Bytes,
    wanted: &[bool],
) -> Vec<(u32, Bytes)> {
    let header_bytes = header.header_bytes() as usize;
    let frames = header.frames.iter().zip(wanted).zip(0..);
    let wanted = frames.filter(|((_, wanted), _)| **wanted);
    wanted
        .map(|((entry, _), frame)| {
            let start = header_bytes + entry.body_offset as usize;
            (frame, object.slice(start + FRAME_HEAD_BYTES..start + entry.stored_bytes as usize))
        })
        .collect()
}

/// Frames with data that entered the read cache, under its old name, after it was gathered.
fn late_frames(context: &Context, upload: &Upload) -> Vec<bool> {
    let (header, _) = upload.contents();
    let mut late = vec![false; header.frames.len()];
    if !context.stored.has_cache() {
        return late;
    }
    let (view, frame_bytes) = (context.stored.view(), u64::from(header.frame_bytes));
    let mut last_lookup = None;
    for (extent, origin) in header.extents.iter().zip(&header.origins) {
        let (start, end) =
            (u64::from(extent.data_offset), u64::from(extent.data_offset) + extent.length);
        let (first, last) = (start / frame_bytes, (end - 1) / frame_bytes);
        if upload.cached.has_all(first, last) {
            continue;
        }
        let from = u64::from(origin.data_offset);
        for frame in from / frame_bytes..=(from + extent.length - 1) / frame_bytes {
            // Adjacent extents mostly come from one frame.
            let old_frame = OldFrame { sequence: origin.sequence as u32, frame: frame as u32 };
            let is_cached = match last_lookup {
                Some((name, is_cached)) if name == old_frame => is_cached,
                _ => is_cached(context, &view, old_frame),
            };
            last_lookup = Some((old_frame, is_cached));
            if !is_cached {
                continue;
            }
            // The part of that frame in this extent, at its new place.
            let part = from.max(frame * frame_bytes)
                ..(from + extent.length).min((frame + 1) * frame_bytes);
            let (first, last) = (start + part.start - from, start + part.end - 1 - from);
            for frame in first / frame_bytes..=last / frame_bytes {
                late[frame as usize] = !upload.cached.frames[frame as usize];
            }
        }
    }
    late
}

/// A frame of the segment that data was moved from.
#[derive(Clone, Copy, PartialEq, Eq)]
struct OldFrame {
    sequence: u32,
    frame: u32,
}

fn is_cached(context: &Context, view: &View, OldFrame { sequence, frame }: OldFrame) -> bool {
    let Some(info) = view.segments.get(sequence) else { return false };
    let name = FrameName { sequence, epoch: info.epoch, frame };
    context.stored.cached(name).is_some_and(|(cache, key)| cache.contains(key))
}
