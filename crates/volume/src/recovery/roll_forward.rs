//! Roll forward: the segments after the checkpoint, in order of sequence, until one is definitely
//! not there.
//!
//! Segments are read one by one by name, never listed, so a lagging list cannot hide a tail. A gap
//! is the end of the log only if no segment beyond it implies that it was stored: each segment
//! records how far everything was stored when it was made. After a fence the sequences it covers
//! are skipped: only late puts of older epochs can be there. An order in the log is carried out
//! where it stands. A fence records the size of the disk from there on, because the checkpoint with
//! that size may be lost. A fence whose attach began from an older checkpoint than the one rolled
//! from knew of no later size, so its size is ignored.
//!
//! In what a copier left (`replicate`), the log also ends at a segment that knows a newer
//! checkpoint than the one rolled from: that segment may depend on a size or a cut that only the
//! newer checkpoint has, and waits for it.
//!
//! Invariants: a segment is taken only if it is of the log's epoch and begins at the position where
//! the log ends; a fence only if its epoch is higher. Anything else at that name is damage, and is
//! never skipped.
//!
//! Not here: where the log begins (`checkpoint`), what an extent changes in the map (`apply`), and
//! the records of the journal (`open::journal`).

use sawmill_format::FormatError;
use sawmill_format::ids::{PutId, VolumeId};
use sawmill_format::kept_block::Order;
use sawmill_format::segment::{
    FrameIdentity, SegmentHeader, SegmentIdentity, SegmentKind, frame_open, header_bytes_of,
    raw_frame_range, segment_key,
};
use sawmill_store::{Class, Get, ObjectStore};

use super::apply::apply_extents;
use super::checkpoint::sequence32;
use super::end::{LogEnd, RollbackRecord, start_of};
use crate::cuts::LogPosition;
use crate::replicate::role;
use crate::segment::table::SegmentInfo;
use crate::store_calls;
use crate::view::View;
use crate::{Error, ErrorKind, Result, limits};

/// How far to roll forward: as long as the next segment exceeds none of these.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RollForwardLimit {
    pub(crate) sequence: u64,
    pub(crate) wall_unix_ms: u64,
    /// The highest end position of a segment.
    pub(crate) position: u64,
}

impl RollForwardLimit {
    /// To the end of the log.
    pub(crate) const END: RollForwardLimit =
        RollForwardLimit { sequence: u64::MAX, wall_unix_ms: u64::MAX, position: u64::MAX };

    /// To the end of the log, wherever that is: no cut.
    fn is_end(self) -> bool {
        (self.sequence, self.wall_unix_ms, self.position) == (u64::MAX, u64::MAX, u64::MAX)
    }
}

/// Applies the segments after `end` to `view`, and moves `end` on.
pub(crate) fn roll_forward(
    store: &dyn ObjectStore,
    volume_id: VolumeId,
    view: Option<&mut View>,
    end: &mut LogEnd,
) -> Result<()> {
    roll_forward_until(store, volume_id, view, end, RollForwardLimit::END)
}

/// As [`roll_forward`], with the first headers asked for before.
pub(crate) fn roll_forward_asked(
    store: &dyn ObjectStore,
    view: Option<&mut View>,
    end: &mut LogEnd,
    asked: AskedHeaders,
) -> Result<()> {
    let volume_id = asked.volume_id;
    roll(store, volume_id, view, end, RollForwardLimit::END, Some(asked))
}

/// As [`roll_forward`], but not past `limit`.
pub(crate) fn roll_forward_until(
    store: &dyn ObjectStore,
    volume_id: VolumeId,
    view: Option<&mut View>,
    end: &mut LogEnd,
    limit: RollForwardLimit,
) -> Result<()> {
    roll(store, volume_id, view, end, limit, None)
}

/// Rolls forward from `end`. Its first headers may be on their way.
fn roll(
    store: &dyn ObjectStore,
    volume_id: VolumeId,
    mut view: Option<&mut View>,
    end: &mut LogEnd,
    limit: RollForwardLimit,
    mut asked: Option<AskedHeaders>,
) -> Result<()> {
    let mut copier = CopierOrigin::Unknown;
    while end.next_sequence <= limit.sequence {
        let ahead = match asked.take() {
            Some(asked) => asked,
            None => ask_headers(store, volume_id, end)?,
        };
        let sequences = ahead.sequences.clone();
        for (sequence, header) in sequences.iter().zip(ahead.wait(store)) {
            if *sequence != end.next_sequence {
                // A fence was met: what is left of `ahead` lies in its window and is ignored,
                // whether it exists or not.
                break;
            }
            if *sequence > limit.sequence {
                return Ok(());
            }
            let header = match header? {
                Some(header) if is_beyond(&header, limit) => return Ok(()),
                Some(header) => header,
                None if is_end(store, volume_id, end, limit)? => return Ok(()),
                None => break,
            };
            if limit.is_end()
                && header.checkpoint_number > end.checkpoint_number
                && copier.is_left(store, volume_id, end)?
            {
                return Ok(());
            }
            take(view.as_deref(), end, &header)?;
            if let (SegmentKind::Order, Some(view)) = (header.kind, view.as_deref_mut()) {
                carry_out(store, view, end, &header)?;
            }
        }
    }
    Ok(())
}

/// Whether a copier put the checkpoint rolled from: looked up once, when it matters.
enum CopierOrigin {
    Unknown,
    Known(bool),
}

impl CopierOrigin {
    fn is_left(
        &mut self,
        store: &dyn ObjectStore,
        volume_id: VolumeId,
        end: &LogEnd,
    ) -> Result<bool> {
        if let CopierOrigin::Known(is_left) = *self {
            return Ok(is_left);
        }
        let is_left = is_left_by_copier(store, volume_id, end)?;
        *self = CopierOrigin::Known(is_left);
        Ok(is_left)
    }
}

fn is_beyond(header: &SegmentHeader, limit: RollForwardLimit) -> bool {
    header.sequence > limit.sequence
        || header.wall_unix_ms > limit.wall_unix_ms
        || header.position_end > limit.position
}

/// Carries out the order at this place of the log.
fn carry_out(
    store: &dyn ObjectStore,
    view: &mut View,
    end: &mut LogEnd,
    header: &SegmentHeader,
) -> Result<()> {
    let order = read_order(store, header)?;
    let place = LogPosition {
        sequence: header.sequence,
        position: header.position_end,
        wall_unix_ms: header.wall_unix_ms,
        ..end.place
    };
    view.cuts.lock().apply(&order, &place);
    if let Order::RollBack { number, put_id, through_sequence } = order {
        // A cut behind the checkpoint rolled from also begins there. The checkpoint that the order
        // names may be gone, because an attach has repeated it.
        let (number, put_id) = match through_sequence >= end.place.root_sequence {
            true => (end.place.number, end.place.put_id),
            false => (number, put_id),
        };
        let then = cut_view(store, header.volume_id, number, put_id, through_sequence)?;
        *view = view.rolled_back_to(then);
        let (sequence, wall_unix_ms) = (header.sequence, header.wall_unix_ms);
        let (cut_number, cut_through) = (number, through_sequence);
        end.rolled_back = Some(RollbackRecord { sequence, wall_unix_ms, cut_number, cut_through });
    }
    Ok(())
}

/// The order that a segment holds.
pub(crate) fn read_order(store: &dyn ObjectStore, header: &SegmentHeader) -> Result<Order> {
    let key = segment_key(header.volume_id, header.sequence);
    let damaged = |what: String| {
        Error::new(
            ErrorKind::Corrupt,
            format!("{key}: {what}; nothing was changed; run `sawmill check`"),
        )
    };
    let range = raw_frame_range(header.header_bytes(), header.data_bytes, header.frame_bytes, 0);
    let (volume_id, sequence, epoch) = (header.volume_id, header.sequence, header.epoch);
    let identity = FrameIdentity { volume_id, sequence, epoch, frame: 0 };
    store_calls::again_if_damaged(|| {
        let bytes = store_calls::get(store, &key, Some(range.clone()), Class::Read)?;
        let bytes = bytes.ok_or_else(|| damaged("it is gone".into()))?;
        let unreadable = |error: FormatError| damaged(error.to_string()).with_source(error);
        let data = frame_open(&identity, &bytes).map_err(unreadable)?;
        Order::decode(data).map_err(unreadable)
    })
}

/// The state at a cut that a rollback names.
pub(crate) fn cut_view(
    store: &dyn ObjectStore,
    volume_id: VolumeId,
    number: u64,
    put_id: PutId,
    through_sequence: u64,
) -> Result<View> {
    let root =
        super::checkpoint::kept_root(store, volume_id, number, put_id).map_err(
            |error| match error.kind() {
                // The log needs this object, even if a newer checkpoint does not.
                ErrorKind::NotFound => {
                    Error::new(ErrorKind::Corrupt, error.to_string()).with_source(error)
                }
                _ => error,
            },
        )?;
    let mut view = super::map_load::load(store, &root)?;
    let mut end = start_of(&root);
    let until = RollForwardLimit { sequence: through_sequence, ..RollForwardLimit::END };
    roll_forward_until(store, volume_id, Some(&mut view), &mut end, until)?;
    if end.stored_sequence != through_sequence {
        let text = format!(
            "segment {through_sequence} of the cut that a rollback names is gone: the log goes to \
            {}",
            end.stored_sequence
        );
        return Err(Error::new(ErrorKind::Corrupt, text));
    }
    Ok(view)
}

/// Takes the next segment of the log.
pub(crate) fn take(view: Option<&View>, end: &mut LogEnd, header: &SegmentHeader) -> Result<()> {
    end.clean = false;
    match header.kind {
        SegmentKind::Fence => take_fence(view, end, header)?,
        SegmentKind::Data | SegmentKind::Moved | SegmentKind::Order => {
            take_extents(view, end, header)?;
        }
    }
    end.stored_sequence = header.sequence;
    end.next_sequence = header.next_sequence;
    Ok(())
}

/// A segment that cannot stand at its place in the log.
fn misplaced(header: &SegmentHeader, what: &str) -> Error {
    let key = segment_key(header.volume_id, header.sequence);
    let text = format!("{key}: {what}; nothing was changed; run `sawmill check`");
    Error::new(ErrorKind::Corrupt, text)
}

/// Takes a fence: from here on the log belongs to another attachment.
fn take_fence(view: Option<&View>, end: &mut LogEnd, header: &SegmentHeader) -> Result<()> {
    if header.epoch <= end.epoch {
        let what = format!("it is a fence of epoch {} in epoch {}", header.epoch, end.epoch);
        return Err(misplaced(header, &what));
    }
    if header.size_bytes > limits::SIZE_BYTES_MAX {
        let what = format!("{} bytes are not a valid volume size", header.size_bytes);
        return Err(misplaced(header, &what));
    }
    if header.size_bytes > 0 && header.checkpoint_number >= end.state_number {
        end.size_bytes = header.size_bytes;
        if let Some(view) = view {
            view.resize(header.size_bytes);
        }
    }
    end.epoch_before = end.epoch;
    end.epoch = header.epoch;
    end.fence_put_id = Some(header.put_id);
    Ok(())
}

/// Takes a segment of the attachment whose log this is.
fn take_extents(view: Option<&View>, end: &mut LogEnd, header: &SegmentHeader) -> Result<()> {
    if header.epoch != end.epoch {
        let what = format!("it is of epoch {} in the log of epoch {}", header.epoch, end.epoch);
        return Err(misplaced(header, &what));
    }
    if header.position_start != end.position {
        let (start, position) = (header.position_start, end.position);
        let what = format!("it begins at position {start}, and the log ends at {position}");
        return Err(misplaced(header, &what));
    }
    if let Some(view) = view {
        add_segment(view, header)?;
    }
    end.position = header.position_end;
    end.log_bytes += header.object_bytes();
    end.segments += 1;
    end.extents += header.extents.len() as u64;
    Ok(())
}

/// Enters a segment and its extents into the view.
fn add_segment(view: &View, header: &SegmentHeader) -> Result<()> {
    // Moved extents count only where the map points at their origin.
    let written = if header.kind == SegmentKind::Data { &header.extents[..] } else { &[] };
    let reach = written.iter().map(|extent| extent.address.saturating_add(extent.length));
    let (reach, size_bytes) = (reach.max().unwrap_or(0), view.map.size_bytes());
    if reach > size_bytes {
        let what = format!(
            "it has writes up to byte {reach}, past the end of the disk ({size_bytes} bytes): the \
             disk had grown, and the checkpoint that recorded it cannot be read"
        );
        return Err(misplaced(header, &what));
    }
    let info = SegmentInfo {
        epoch: header.epoch,
        header_bytes: header.header_bytes() as u32,
        data_bytes: header.data_bytes,
        live_bytes: live_bytes_of(header),
        object_bytes: header.object_bytes(),
        wall_unix_ms: header.wall_unix_ms,
        dead_since: 0,
        is_settled: false,
    };
    view.segments.add(sequence32(header.sequence)?, info);
    apply_extents(view, header);
    Ok(())
}

/// How much of a new segment's data the map will name: none of an order's.
pub(crate) fn live_bytes_of(header: &SegmentHeader) -> u64 {
    if header.kind == SegmentKind::Order { 0 } else { header.data_bytes }
}

/// Whether the log ends at the missing segment `end.next_sequence`. If a later one implies that it
/// was stored, that is damage, unless a writer has put it since: then the log continues.
fn is_end(
    store: &dyn ObjectStore,
    volume_id: VolumeId,
    end: &LogEnd,
    limit: RollForwardLimit,
) -> Result<bool> {
    let gap = end.next_sequence;
    let beyond: Vec<u64> = (gap + 1..=gap + limits::FENCE_WINDOW).collect();
    for header in headers(store, volume_id, &beyond) {
        let Some(header) = header? else { continue };
        let was_known = header.stored_through >= gap || header.epoch > end.epoch;
        if was_known {
            if headers(store, volume_id, &[gap]).pop().unwrap_or(Ok(None))?.is_some() {
                return Ok(false);
            }
            if limit.sequence == u64::MAX && is_left_by_copier(store, volume_id, end)? {
                // What a copier put beyond the gap waits for the checkpoint that it comes with.
                return Ok(true);
            }
            let text = format!(
                "{} is gone although it was stored: {} was made after it; nothing was changed; \
                 restore it from a copy of the store",
                segment_key(volume_id, gap),
                segment_key(volume_id, header.sequence)
            );
            return Err(Error::new(ErrorKind::Corrupt, text));
        }
    }
    Ok(true)
}

/// Whether the checkpoint rolled from was put by a copier.
fn is_left_by_copier(store: &dyn ObjectStore, volume_id: VolumeId, end: &LogEnd) -> Result<bool> {
    role::is_copied(store, volume_id, end.place.number)
}

/// The headers of consecutive segments, on their way.
pub(crate) struct AskedHeaders {
    volume_id: VolumeId,
    sequences: Vec<u64>,
    answers: store_calls::PendingAnswers,
}

/// Asks for the headers that follow `end`, for [`roll_forward_asked`].
///
/// Not also for those beyond, which say whether a gap is damage: they count only if they are read
/// after the gap was. Otherwise a live writer could put one there and delete what is missing in the
/// meantime, and an older state would be taken for the newest.
pub(crate) fn ask_headers(
    store: &dyn ObjectStore,
    volume_id: VolumeId,
    end: &LogEnd,
) -> Result<AskedHeaders> {
    let first = u64::from(sequence32(end.next_sequence)?);
    let sequences: Vec<u64> = (first..first + limits::ROLL_FORWARD_PARALLEL_MAX as u64).collect();
    let answers = store_calls::ask_each(store, header_gets(volume_id, &sequences));
    Ok(AskedHeaders { volume_id, sequences, answers })
}

impl AskedHeaders {
    fn wait(self, store: &dyn ObjectStore) -> Vec<HeaderAnswer> {
        read_headers(store, self.volume_id, &self.sequences, self.answers.wait())
    }
}

/// A header, or `None` where the store reports that there is no such segment.
type HeaderAnswer = Result<Option<SegmentHeader>>;

fn header_gets(volume_id: VolumeId, sequences: &[u64]) -> Vec<Get> {
    let probe = |sequence: &u64| {
        let range = Some(0..limits::HEADER_PROBE_BYTES);
        store_calls::want(segment_key(volume_id, *sequence), range, Class::Read)
    };
    sequences.iter().map(probe).collect()
}

/// The headers of segments, in parallel; `None` where the store reports that there is none.
pub(crate) fn headers(
    store: &dyn ObjectStore,
    volume_id: VolumeId,
    sequences: &[u64],
) -> Vec<HeaderAnswer> {
    let answers = store_calls::get_each(store, header_gets(volume_id, sequences));
    read_headers(store, volume_id, sequences, answers)
}

/// Reads headers in the first answers to [`header_gets`], and asks again where one is damaged or
/// too short.
fn read_headers(
    store: &dyn ObjectStore,
    volume_id: VolumeId,
    sequences: &[u64],
    answers: Vec<store_calls::Answer>,
) -> Vec<HeaderAnswer> {
    let key = |sequence: u64| segment_key(volume_id, sequence);
    let probe = Some(0..limits::HEADER_PROBE_BYTES);
    let decode = |sequence: u64, answer: store_calls::Answer| {
        let answer = answer.map_err(|error| match error.kind() {
            // The object is empty: not one byte could be read.
            ErrorKind::Invalid => Error::caused(ErrorKind::Corrupt, key(sequence), error),
            _ => error,
        });
        let Some(mut bytes) = answer? else { return Ok(None) };
        let damaged = |error: FormatError| {
            let text =
                format!("{}: {error}; nothing was changed; run `sawmill check`", key(sequence));
            Error::new(ErrorKind::Corrupt, text).with_source(error)
        };
        let header_bytes = header_bytes_of(&bytes).map_err(damaged)?;
        if header_bytes > bytes.len() as u64 && bytes.len() as u64 >= limits::HEADER_PROBE_BYTES {
            match store_calls::get(store, &key(sequence), Some(0..header_bytes), Class::Read)? {
                Some(more) => bytes = more,
                None => return Ok(None),
            }
        }
        SegmentHeader::decode(&bytes, &SegmentIdentity { volume_id, sequence })
            .map(Some)
            .map_err(damaged)
    };
    let read = |(sequence, answer): (&u64, store_calls::Answer)| {
        let mut first = Some(answer);
        store_calls::again_if_damaged(|| {
            let again = || store_calls::get(store, &key(*sequence), probe.clone(), Class::Read);
            decode(*sequence, first.take().unwrap_or_else(again))
        })
    };
    sequences.iter().zip(answers).map(read).collect()
}
