//! A checkpoint is only a short cut: whatever the history and wherever it was frozen, the
//! checkpoint and the segments after it give the same volume as all segments from the first.

use bytes::Bytes;
use proptest::prelude::*;
use sawmill_format::checkpoint::{Checkpoint, checkpoint_key};
use sawmill_format::ids::PutId;
use sawmill_format::map_part::PartIdentity;
use sawmill_format::segment::{
    ExtentKind, FENCE_WINDOW, SegmentExtent, SegmentHeader, SegmentKind, raw_frames, segment_key,
};
use sawmill_format::volume_record::VolumeRecord;
use sawmill_store::{Blocking, Class, ObjectStore, StoreOptions};

use super::Reporter;
use super::end::LogEnd;
use crate::map::GROUP_BYTES;
use crate::map::part::MapPart;
use crate::names::stored;
use crate::recovery::stored::StoredVolume;
use crate::segment::table::SegmentInfo;
use crate::world::RealWorld;
use crate::{CreateOptions, limits, names};

/// Two groups and a bit, so that parts have borders to cross.
const SIZE_BYTES: u64 = 2 * GROUP_BYTES + (64 << 20);

/// One segment: a fence, or writes, zeroes and discards at places that meet often.
#[derive(Clone, Debug)]
enum LogStep {
    Fence,
    Extents(Vec<(u64, u64, u8)>),
}

fn histories() -> impl Strategy<Value = (Vec<LogStep>, usize)> {
    let place = prop_oneof![
        4 => 0u64..2000,
        2 => (GROUP_BYTES - 1000)..(GROUP_BYTES + 1000),
        1 => (2 * GROUP_BYTES)..(2 * GROUP_BYTES + 5000),
    ];
    let extent = (place, prop_oneof![5 => 1u64..700, 1 => 1u64 << 20..32 << 20], 0u8..5);
    let step = prop_oneof![
        1 => Just(LogStep::Fence),
        6 => prop::collection::vec(extent, 0..8).prop_map(LogStep::Extents),
    ];
    (prop::collection::vec(step, 1..24), any::<prop::sample::Index>()).prop_map(|(history, at)| {
        let frozen = at.index(history.len() + 1);
        (history, frozen)
    })
}

/// Extents as a segment has them: sorted, apart from one another; data small enough for any
/// segment.
fn laid_out(wanted: &[(u64, u64, u8)]) -> (Vec<SegmentExtent>, u64) {
    let mut wanted = wanted.to_vec();
    wanted.sort_unstable();
    let (mut extents, mut free_from, mut data_bytes) = (Vec::new(), 0, 0);
    for (address, length, kind) in wanted {
        let address = address.max(free_from);
        if address + length > SIZE_BYTES {
            // No write goes past the end.
            break;
        }
        let kind = match kind {
            0 => ExtentKind::Discard,
            1 => ExtentKind::Zero,
            _ => ExtentKind::Data,
        };
        let data_offset = if kind == ExtentKind::Data { data_bytes as u32 } else { 0 };
        data_bytes += if kind == ExtentKind::Data { length } else { 0 };
        free_from = address + length;
        extents.push(SegmentExtent { address, length, data_offset, kind });
    }
    (extents, data_bytes)
}

struct World {
    store: std::sync::Arc<dyn ObjectStore>,
    record: VolumeRecord,
}

impl World {
    fn new() -> Self {
        let store = sawmill_store::open("memory:", StoreOptions::default()).expect("memory");
        let record = names::create_in(
            &RealWorld::default(),
            &*store,
            "disk",
            &CreateOptions::new(SIZE_BYTES),
        );
        World { store, record: record.expect("a fresh store") }
    }

    fn put(&self, key: &str, body: Vec<u8>) {
        Blocking(&*self.store).put(key, Bytes::from(body), Class::Upload).expect("memory takes it");
    }

    fn delete(&self, key: String) {
        Blocking(&*self.store).delete(vec![key], Class::Background).expect("memory forgets it");
    }

    fn recover(&self) -> StoredVolume {
        stored(&*self.store, "disk", &mut Reporter::new(&RealWorld::default()))
            .expect("it is whole")
    }

    /// Puts the next segment after `end`, and moves `end` behind it.
    fn grow(&self, end: &mut LogEnd, step: &LogStep) {
        let sequence = end.next_sequence;
        let (kind, wanted) = match step {
            LogStep::Fence => (SegmentKind::Fence, &[][..]),
            LogStep::Extents(extents) if end.epoch > 0 => (SegmentKind::Data, &extents[..]),
            // Before the first attachment there is no writer.
            LogStep::Extents(_) => (SegmentKind::Fence, &[][..]),
        };
        let (extents, data_bytes) = laid_out(wanted);
        let is_fence = kind == SegmentKind::Fence;
        let header = SegmentHeader {
            volume_id: self.record.volume_id,
            put_id: PutId(u128::from(sequence).to_be_bytes()),
            sequence,
            epoch: end.epoch + u64::from(is_fence),
            previous_sequence: end.stored_sequence,
            stored_through: end.stored_sequence,
            checkpoint_number: 0,
            position_start: end.position,
            position_end: end.position + if is_fence { 0 } else { data_bytes + 80 },
            wall_unix_ms: sequence,
            next_sequence: sequence + if is_fence { FENCE_WINDOW } else { 1 },
            kind,
            frame_bytes: 1 << 16,
            data_bytes,
            extents,
            frames: raw_frames(data_bytes, 1 << 16).expect("it fits a segment"),
            origins: Vec::new(),
            size_bytes: 0,
        };
        // Only headers are read here.
        self.put(&segment_key(self.record.volume_id, sequence), header.encode().unwrap());
        (end.epoch, end.position) = (header.epoch, header.position_end);
        (end.stored_sequence, end.next_sequence) = (sequence, header.next_sequence);
    }

    /// The checkpoint that an engine would write of this state, as number 2.
    fn freeze(&self, state: &StoredVolume) {
        let (volume_id, number, put_id) = (self.record.volume_id, 2, PutId([2; 16]));
        let mut parts = Vec::new();
        for group in state.view.map.groups() {
            let extents = state.view.map.export_group(group);
            let identity = PartIdentity { volume_id, group, number, put_id };
            let part = MapPart::encode(&identity, extents, limits::MAP_PART_BYTES_MAX)
                .expect("a map can be written");
            parts.push(part.entry);
            self.put(&part.key, part.bytes);
        }
        let (segments, _) = state.view.segments.freeze(number, &|_, _| false);
        let root = Checkpoint {
            volume_id,
            put_id,
            number,
            epoch: state.end.epoch,
            through_sequence: state.end.stored_sequence,
            next_sequence: state.end.next_sequence,
            position: state.end.position,
            wall_unix_ms: 0,
            attached_ms: 0,
            repeats: 0,
            size_bytes: SIZE_BYTES,
            clean: false,
            extent_total: state.view.map.extents(),
            live_bytes: state.view.map.mapped_bytes(),
            segments,
            parts,
            kept: sawmill_format::kept_block::KeptBlock::default(),
        };
        self.put(&checkpoint_key(volume_id, number), root.encode().unwrap());
    }
}

/// Everything about a recovered state that is visible later.
fn seen(state: &StoredVolume) -> (Vec<String>, Vec<(u32, SegmentInfo)>, [u64; 4]) {
    let mut pieces = Vec::new();
    state.view.map.lookup(0, SIZE_BYTES, &mut |piece| pieces.push(format!("{piece:?}")));
    let table = state.view.segments.snapshot();
    let alive =
        table.into_iter().map(|(sequence, info)| (sequence, SegmentInfo { dead_since: 0, ..info }));
    let end = &state.end;
    (pieces, alive.collect(), [end.epoch, end.next_sequence, end.stored_sequence, end.position])
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn any_checkpoint_and_the_segments_after_it_equal_all_segments(
        (history, frozen) in histories(),
    ) {
        let world = World::new();
        let mut end = world.recover().end;
        let mut at_freeze = None;
        for number in 0..=history.len() {
            if number == frozen {
                at_freeze = Some(world.recover());
            }
            history.get(number).into_iter().for_each(|step| world.grow(&mut end, step));
        }
        let whole = world.recover();
        prop_assert_eq!(whole.newest.number_max, 1);
        let at_freeze = at_freeze.expect("it lies within the history");
        world.freeze(&at_freeze);
        // Segments that the checkpoint includes are not read again: they may even be gone.
        let included = at_freeze.view.segments.snapshot().into_iter().map(|(sequence, _)| sequence);
        for sequence in included {
            world.delete(segment_key(world.record.volume_id, sequence.into()));
        }
        let short = world.recover();
        prop_assert_eq!(short.newest.number_max, 2);
        prop_assert_eq!(seen(&short), seen(&whole));
        prop_assert_eq!(short.view.segments.totals(), whole.view.segments.totals());
        let rolled = short.end.segments + at_freeze.end.segments;
        prop_assert_eq!(rolled, whole.end.segments, "each segment counts once");
    }
}
