//! Resizing the disk: checkpoints with the new size. The first one removes what lies beyond a
//! smaller end from the map.
//!
//! Invariants: the map reaches as far as the doors show before they show it. Doors show a new size
//! only when two checkpoints with it are durable: if the newest one is ever damaged, the one before
//! has the same size. So nothing is ever written past the end that recovery would find.

use super::checkpoint::Checkpoints;
use super::context::Context;
use super::log_tail::LogTail;
use super::messages::Resize;
use crate::{Error, ErrorKind};

/// The resize in progress, if there is one.
#[derive(Default)]
pub(super) struct Resizes {
    under_way: Option<PendingResize>,
}

struct PendingResize {
    resize: Resize,
    /// The first durable checkpoint with the new size.
    first_number: Option<u64>,
}

impl Resizes {
    /// Starts a requested resize between two checkpoints. Returns whether it did: then a checkpoint
    /// must start.
    pub(super) fn begin(
        &mut self,
        context: &Context,
        log: &LogTail,
        checkpoints: &mut Checkpoints,
    ) -> bool {
        if checkpoints.is_writing() || self.under_way.is_some() {
            return false;
        }
        let Some(size_bytes) = context.mailbox.next_resize() else { return false };
        let current = checkpoints.size_bytes;
        if size_bytes < current && !log.is_empty() {
            // Data in flight may lie beyond the new end.
            return false;
        }
        let Some(resize) = context.mailbox.take_resize() else { return false };
        if size_bytes < current && size_bytes >= resize.from_bytes {
            // It was meant to grow, but another resize came first, and users may have written up to
            // its end.
            let text = format!(
                "the disk already has {current} bytes: {size_bytes} would shrink it; nothing was \
                changed"
            );
            (resize.callback)(Err(Error::new(ErrorKind::Refused, text)));
            return false;
        }
        context.stored.view().resize(size_bytes);
        checkpoints.size_bytes = size_bytes;
        self.under_way = Some(PendingResize { resize, first_number: None });
        true
    }

    /// The volume has ended: the requesters of resizes get the reason.
    pub(super) fn refuse(&mut self, why: &Error) {
        if let Some(resizing) = self.under_way.take() {
            (resizing.resize.callback)(Err(why.clone()));
        }
    }

    /// Checkpoint `number` is durable: the first one since the resize started has the new size.
    pub(super) fn note_durable(&mut self, number: u64) {
        if let Some(resizing) = &mut self.under_way {
            resizing.first_number.get_or_insert(number);
        }
    }

    /// Checkpoint `number` is durable, and no fence preceded it.
    pub(super) fn finish(&mut self, context: &Context, checkpoints: &mut Checkpoints, number: u64) {
        let Some(resizing) = &self.under_way else { return };
        if resizing.first_number.is_none_or(|first| number <= first) {
            return checkpoints.want_one();
        }
        let Some(PendingResize { resize, .. }) = self.under_way.take() else { return };
        context.attachment.geometry.resize(resize.size_bytes);
        (resize.callback)(Ok(()));
    }
}
