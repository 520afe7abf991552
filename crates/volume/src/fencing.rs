//! One writer at a time: the segment that begins an attachment and ends the one before it.
//!
//! Invariant: a fence is put by conditional create and never replaces an object, so of two writers
//! at the end of the log one is fenced. Not here: how a writer learns that it was fenced
//! ([`crate::watch`]).

use bytes::Bytes;
use sawmill_format::ids::PutId;
use sawmill_format::segment::{SegmentHeader, SegmentKind, segment_key};
use sawmill_format::volume_record::VolumeRecord;
use sawmill_store::{Blocking, Bodies, Class, ObjectStore, PutOutcome, probe_conditional_create};

use crate::recovery::end::LogEnd;
use crate::store_calls::{cannot_encode, store_error};
use crate::world::World;
use crate::{Error, ErrorKind, Result, limits};

/// An attempt to put a fence, and with it to own an epoch.
///
/// Epochs grow by random steps. Where histories diverge (a store was copied, or restored from a
/// backup), each continues from the same epoch to a different one. So equal epochs mean one
/// history: what an epoch identifies (frames in the read cache, a journal, its memory) is never
/// mistaken for another history's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FenceAttempt {
    pub(crate) epoch: u64,
    pub(crate) put_id: PutId,
}

impl FenceAttempt {
    /// A new attempt, with an epoch above `after`.
    pub(crate) fn after(after: u64, world: &dyn World) -> Result<Self> {
        let [a, b, c, d, ..] = world.random()?;
        let step = 1 + u64::from(u32::from_le_bytes([a, b, c, d]));
        let Some(epoch) = after.checked_add(step) else {
            let text = "the volume has used up its epochs; copy it to a new one";
            return Err(Error::new(ErrorKind::Full, text));
        };
        Ok(FenceAttempt { epoch, put_id: PutId(world.random()?) })
    }
}

/// Puts the fence of `attempt` at the end of the log, and moves `end` past it. Returns its
/// sequence. If another writer's segment is there already, the log has grown: this attach starts
/// over.
pub(crate) fn fence(
    store: &dyn ObjectStore,
    record: &VolumeRecord,
    end: &mut LogEnd,
    attempt: FenceAttempt,
    world: &dyn World,
) -> Result<u64> {
    let FenceAttempt { epoch, put_id } = attempt;
    let sequence = end.next_sequence;
    if sequence >= limits::SEQUENCE_MAX {
        let text = "the volume has used up its segment sequences; copy it to a new one";
        return Err(Error::new(ErrorKind::Full, text));
    }
    let header = SegmentHeader {
        volume_id: record.volume_id,
        put_id,
        sequence,
        epoch,
        previous_sequence: end.stored_sequence,
        stored_through: end.stored_sequence,
        checkpoint_number: end.checkpoint_number,
        position_start: end.position,
        position_end: end.position,
        wall_unix_ms: world.unix_ms(),
        next_sequence: sequence + limits::FENCE_WINDOW,
        kind: SegmentKind::Fence,
        frame_bytes: record.frame_bytes,
        data_bytes: 0,
        extents: Vec::new(),
        frames: Vec::new(),
        origins: Vec::new(),
        size_bytes: end.size_bytes,
    };
    let key = segment_key(record.volume_id, sequence);
    let body = Bytes::from(header.encode().map_err(cannot_encode)?);
    let outcome = Blocking(store).put(&key, body, Class::Upload);
    match outcome.map_err(|error| store_error(&error))? {
        PutOutcome::Created => {
            end.epoch_before = end.epoch;
            end.epoch = epoch;
            end.fence_put_id = Some(put_id);
            end.stored_sequence = sequence;
            end.next_sequence = header.next_sequence;
            end.clean = false;
            Ok(sequence)
        }
        PutOutcome::Taken => {
            Err(Error::new(ErrorKind::Exists, format!("another writer wrote {key}")))
        }
    }
}

/// Whether a store must be able to keep two writers apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fencing {
    /// It must, and a probe has to prove it.
    Demanded,
    /// The user guarantees that there is one writer.
    Waived,
}

/// Refuses a store that cannot keep two writers apart.
pub(crate) fn require_fencing(store: &dyn ObjectStore) -> Result<()> {
    let probe = probe_conditional_create(store, 1, 8, Bodies::InHalves)
        .map_err(|error| store_error(&error))?;
    if probe.is_honest() {
        return Ok(());
    }
    let text = format!(
        "this store cannot fence a second writer ({}): `sawmill doctor` says more; if no other \
         process can ever attach this volume, pass --no-fencing",
        probe.summary()
    );
    Err(Error::new(ErrorKind::Refused, text))
}
