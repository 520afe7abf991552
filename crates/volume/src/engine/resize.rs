//! Another size for the disk: checkpoints that say so. What lies beyond a new, smaller end leaves the map
//! with the first.
//!
//! Invariants: the map reaches as far as the doors see before they see it, and they see a new size only when
//! two checkpoints that say so are durable: should the newest ever be damaged, the one before says the same.
//! So nothing is ever written past the end that recovery would find.

use super::checkpoint::Checkpoints;
use super::context::Context;
use super::log_tail::LogTail;
use super::messages::Resize;
use crate::{Error, ErrorKind};

/// The resize under way, if there is one.
#[derive(Default)]
pub(super) struct Resizes {
    under_way: Option<Resizing>,
}

struct Resizing {
    resize: Resize,
    /// The first durable checkpoint that says the new size.
    first_number: Option<u64>,
}

impl Resizes {
    /// Takes up a resize that was asked for, between two checkpoints. Says whether it did: then a checkpoint
    /// is to begin.
    pub(super) fn begin(&mut self, context: &Context, log: &LogTail, checkpoints: &mut Checkpoints) -> bool {
        if checkpoints.is_writing() || self.under_way.is_some() {
            return false;
        }
        let Some(size_bytes) = context.mailbox.next_resize() else { return false };
        let current = checkpoints.size_bytes;
        if size_bytes < current && !log.is_empty() {
            // What is on its way may lie beyond the new end.
            return false;
        }
        let Some(resize) = context.mailbox.take_resize() else { return false };
        if size_bytes < current && size_bytes >= resize.from_bytes {
            // It was to grow; another came first, and users may have written up to its end.
            let text = format!(
                "the disk already has {current} bytes: {size_bytes} would shrink it; nothing was changed"
            );
            (resize.tell)(Err(Error::new(ErrorKind::Refused, text)));
            return false;
        }
        context.stored.view().resize(size_bytes);
        checkpoints.size_bytes = size_bytes;
        self.under_way = Some(Resizing { resize, first_number: None });
        true
    }

    /// The volume has ended: who waits for another size hears why.
    pub(super) fn refuse(&mut self, why: &Error) {
        if let Some(resizing) = self.under_way.take() {
            (resizing.resize.tell)(Err(why.clone()));
        }
    }

    /// Checkpoint `number` is durable: the first one since the new size was taken up says so.
    pub(super) fn note_durable(&mut self, number: u64) {
        if let Some(resizing) = &mut self.under_way {
            resizing.first_number.get_or_insert(number);
        }
    }

    /// Checkpoint `number` is durable, and no fence stood before it.
    pub(super) fn finish(&mut self, context: &Context, checkpoints: &mut Checkpoints, number: u64) {
        let Some(resizing) = &self.under_way else { return };
        if resizing.first_number.is_none_or(|first| number <= first) {
            return checkpoints.want_one();
        }
        let Some(Resizing { resize, .. }) = self.under_way.take() else { return };
        context.attachment.geometry.resize(resize.size_bytes);
        (resize.tell)(Ok(()));
    }
}
