//! What encoders refuse: no structure is written that its decoder would not read.
//!
//! Not here: the rules themselves (`rules`), and what a volume's and a link's texts may be
//! (`rules`, `link`).

use std::fmt::Debug;

use sawmill_format::FormatError;
use sawmill_format::cache_index::CacheIndex;
use sawmill_format::checkpoint::Checkpoint;
use sawmill_format::journal::{MEMORY_FOLDER_BYTES_MAX, Memory, Superblock};
use sawmill_format::kept_block::{CutKind, Order, Pin};
use sawmill_format::newest_state::NewestState;
use sawmill_format::segment::SegmentHeader;
use sawmill_format::staging::StagingHeader;
use sawmill_format::transfer::TransferProgress;

use crate::newest::VALUE;
use crate::samples::*;
use crate::superblock::superblock_value;

/// The field that an encoder refused.
fn refused<T: Debug>(outcome: Result<T, FormatError>) -> &'static str {
    match outcome.unwrap_err() {
        FormatError::Field { field, .. } => field,
        other => panic!("{other}"),
    }
}

#[test]
fn an_encoder_refuses_what_its_decoder_would_refuse() {
    let long = "é".repeat(65);
    let pin = Pin { name: long.clone(), ..pin_value() };
    assert_eq!(refused(pin.encode()), "name");
    assert_eq!(refused(Order::CreateSnapshot(long.clone()).encode()), "name");
    let mut kept = kept_value();
    let snapshot = kept.cuts.iter_mut().find(|cut| cut.kind == CutKind::Snapshot).unwrap();
    snapshot.name.clone_from(&long);
    let checkpoint = Checkpoint { kept, ..checkpoint_value() };
    assert_eq!(refused(checkpoint.encode()), "name_bytes");
    let checkpoint = Checkpoint { repeats: u64::MAX, ..checkpoint_value() };
    assert_eq!(refused(checkpoint.encode()), "repeats");
    let segment = SegmentHeader { frame_bytes: 0, ..segment_value() };
    assert_eq!(refused(segment.encode()), "frame_bytes");
    let index = CacheIndex { frame_bytes: 0, ..cache_value(2) };
    assert_eq!(refused(index.encode()), "frame_bytes");
    let progress = TransferProgress { done_bytes: u64::MAX, ..transfer_value() };
    assert_eq!(refused(progress.encode()), "done_bytes");
    let staging = StagingHeader { capacity_bytes: 0, ..staging_value() };
    assert_eq!(refused(staging.encode()), "capacity_bytes");
    let state = NewestState { epoch: 0, ..VALUE };
    assert_eq!(refused(state.encode()), "epoch");
    let folder = vec![b'x'; MEMORY_FOLDER_BYTES_MAX + 1];
    let memory = Memory { boot_id: [1; 16], folder };
    let superblock = Superblock { memory: Some(memory), ..superblock_value() };
    assert_eq!(refused(superblock.encode()), "memory_folder");
}
