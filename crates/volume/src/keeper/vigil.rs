//! A look for fences, after a checkpoint is durable and before anything is deleted by it.
//!
//! Why: whoever attaches reads the newest checkpoint, fences, and looks at the newest checkpoint again. If
//! ours was durable before its fence, it has seen it. If not, its fence is there when we look, at one of the
//! names that were free for us when our checkpoint became durable; and then we delete nothing.

use std::time::Duration;

use bytes::Bytes;
use sawmill_format::ids::PutId;
use sawmill_format::segment::segment_key;
use sawmill_store::{Class, Get, StoreErrorKind};

use super::{Event, Keeper};

/// Bytes of a segment that end behind its put id.
const HEAD_BYTES: u64 = 48;
/// Where the put id begins in them.
const PUT_ID_AT: usize = 32;

/// What is still to be looked at.
pub(crate) struct Look {
    /// Sequences, and our own put of each that is on its way.
    left: Vec<(u64, Option<PutId>)>,
    /// The checkpoint by which something is to be deleted.
    number: u64,
}

impl Keeper {
    pub(super) fn look_for_fences(&mut self, number: u64) {
        self.cleaning += 1;
        let own = self.uploads.iter().map(|upload| (upload.sequence(), Some(upload.put_id())));
        // As they are now: under load the end moves on for ever.
        let left = own.chain([(self.next_sequence, None)]).collect();
        self.look_on(Box::new(Look { left, number }));
    }

    fn look_on(&mut self, look: Box<Look>) {
        let Some((sequence, _)) = look.left.last() else {
            self.cleaning -= 1;
            return self.hear_no_fence(look.number);
        };
        let key = segment_key(self.shared.record.volume_id, *sequence);
        let get = Get { key, range: Some(0..HEAD_BYTES), class: Class::Background };
        let answered = self.shared.clone();
        let tell = move |outcome| answered.inbox.push_event(Event::FenceLooked { look, outcome });
        self.shared.store.get(get, Box::new(tell));
    }

    pub(super) fn hear_fence_look(
        &mut self,
        mut look: Box<Look>,
        outcome: &sawmill_store::Result<Bytes>,
        now: Duration,
    ) {
        let Some((sequence, own)) = look.left.pop() else { return };
        let is_free = match outcome {
            Err(error) if error.kind() == StoreErrorKind::NotFound => true,
            Err(error) => {
                let what = format!("a look for fences: {error}");
                return self.hear_cleanup_failed(look.number, &what, now);
            }
            Ok(bytes) => {
                // It may have become ours since we asked.
                let own = own.or_else(|| {
                    let upload = self.uploads.iter().find(|upload| upload.sequence() == sequence);
                    upload.map(super::Upload::put_id)
                });
                let found = bytes.get(PUT_ID_AT..HEAD_BYTES as usize);
                own.is_some_and(|own| found == Some(own.0.as_slice()))
                    || (own.is_none() && sequence <= self.stored_sequence)
            }
        };
        if is_free {
            self.look_on(look);
        } else {
            // If it is a fence, our next put meets it.
            self.hear_odd_look(look.number, now);
        }
    }
}
