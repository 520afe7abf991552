//! Another size for the disk: checkpoints that say so. What lies beyond a new, smaller end leaves the map
//! with the first.
//!
//! Invariants: the map reaches as far as the doors see before they see it, and they see a new size only when
//! two checkpoints that say so are durable: should the newest ever be damaged, the one before says the same.
//! So nothing is ever written past the end that recovery would find.

use super::Engine;
use super::messages::Resize;
use crate::{Error, ErrorKind};

/// A resize under way.
pub(super) struct Resizing {
    resize: Resize,
    /// The first durable checkpoint that says the new size.
    first_number: Option<u64>,
}

impl Engine {
    /// Takes up a resize that was asked for, between two checkpoints.
    pub(super) fn begin_resize(&mut self) {
        if self.writing.is_some() || self.resizing.is_some() {
            return;
        }
        let Some(size_bytes) = self.context.mailbox.next_resize() else { return };
        if size_bytes < self.size_bytes && !(self.pending.is_empty() && self.uploads.is_empty()) {
            // What is on its way may lie beyond the new end.
            return;
        }
        let Some(resize) = self.context.mailbox.take_resize() else { return };
        if size_bytes < self.size_bytes && size_bytes >= resize.from_bytes {
            // It was to grow; another came first, and users may have written up to its end.
            let text = format!(
                "the disk already has {} bytes: {size_bytes} would shrink it; nothing was changed",
                self.size_bytes
            );
            return (resize.tell)(Err(Error::new(ErrorKind::Refused, text)));
        }
        self.context.stored.view().resize(size_bytes);
        self.size_bytes = size_bytes;
        self.resizing = Some(Resizing { resize, first_number: None });
        if let Err(error) = self.begin_checkpoint(false) {
            self.context.write.fail(error);
        }
    }

    /// The volume has ended: whoever waits for another size is told why.
    pub(super) fn refuse_resize(&mut self, why: &Error) {
        if let Some(resizing) = self.resizing.take() {
            (resizing.resize.tell)(Err(why.clone()));
        }
    }

    /// Checkpoint `number` is durable: the first one since the new size was taken up says so.
    pub(super) fn note_resized(&mut self, number: u64) {
        if let Some(resizing) = &mut self.resizing {
            resizing.first_number.get_or_insert(number);
        }
    }

    /// Checkpoint `number` is durable, and no fence stood before it.
    pub(super) fn finish_resize(&mut self, number: u64) {
        let Some(resizing) = &self.resizing else { return };
        if resizing.first_number.is_none_or(|first| number <= first) {
            self.checkpoints_wanted = self.checkpoints_wanted.max(1);
            return;
        }
        let Some(Resizing { resize, .. }) = self.resizing.take() else { return };
        self.context.attachment.geometry.resize(resize.size_bytes);
        (resize.tell)(Ok(()));
    }
}
