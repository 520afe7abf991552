//! Looks for fences: after a checkpoint is durable and before anything is deleted by it, and every now and
//! then while the volume is in use.
//!
//! Why before a delete: whoever attaches reads the newest checkpoint, fences, and looks at the newest
//! checkpoint again. If ours was durable before its fence, it has seen it. If not, its fence is there when
//! we look, at one of the names that were free for us when our checkpoint became durable; and then we
//! delete nothing.
//!
//! Why while in use: who only reads and flushes puts nothing, and would never meet the fence
//! (`crate::watch`). One odd look fences nobody: the answer may be garbled. Several that find the same
//! object do: our next segment could not be put there.

use std::time::Duration;

use bytes::Bytes;
use sawmill_format::preamble::{Kind, Preamble};
use sawmill_format::segment::segment_key;
use sawmill_store::{Class, StoreErrorKind};

use super::messages::{Look, Purpose};
use super::{Engine, Event};
use crate::ask::want;
use crate::watch::{LOOK_EVERY, PATIENCE};
use crate::write::flush;

/// Bytes of a segment that end behind its put id.
const HEAD_BYTES: u64 = 48;
/// Where the volume's id and the put id begin in them.
const VOLUME_ID_AT: usize = 16;
const PUT_ID_AT: usize = 32;
/// So many looks in turn that find the same object of somebody else's are believed.
const AGREEING_LOOKS: u32 = 3;
/// How soon an odd look is repeated.
const AGAIN_AFTER: Duration = Duration::from_millis(200);

/// The looks while the volume is in use.
#[derive(Default)]
pub(super) struct FenceCheck {
    is_looking: bool,
    /// When it is time for the next.
    not_before: Duration,
    /// What the last one found that is not ours, and how many in turn did.
    odd: Option<(u64, Bytes)>,
    agreeing: u32,
}

impl Engine {
    pub(super) fn look_for_fences(&mut self, number: u64) {
        self.cleaning += 1;
        self.begin_look(Purpose::Delete(number));
    }

    fn begin_look(&mut self, purpose: Purpose) {
        let own = self.uploads.iter().map(|upload| (upload.sequence(), Some(upload.put_id())));
        let left = own.chain([(self.next_sequence, None)]).collect();
        self.look_on(Box::new(Look { left, purpose }));
    }

    fn look_on(&mut self, look: Box<Look>) {
        let Some((sequence, _)) = look.left.last() else {
            return match look.purpose {
                Purpose::Delete(number) => {
                    self.cleaning -= 1;
                    self.hear_no_fence(number);
                }
                Purpose::Watch(began) => self.hear_still_ours(began),
            };
        };
        let key = segment_key(self.context.attachment.record.volume_id, *sequence);
        // Somebody may wait for a watch.
        let class = if matches!(look.purpose, Purpose::Watch(_)) { Class::Read } else { Class::Background };
        let get = want(key, Some(0..HEAD_BYTES), class);
        let answered = self.context.clone();
        let tell = move |outcome| answered.mailbox.push_event(Event::FenceLooked { look, outcome });
        self.context.attachment.store.get(get, Box::new(tell));
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
                let what = format!("looking for fences: {error}");
                return match look.purpose {
                    Purpose::Delete(number) => self.hear_cleanup_failed(number, &what, now),
                    Purpose::Watch(_) => self.hear_no_answer(what, now),
                };
            }
            Ok(bytes) => {
                // It may have become ours since we asked.
                let own = own.or_else(|| {
                    let upload = self.uploads.iter().find(|upload| upload.sequence() == sequence);
                    upload.map(super::Upload::put_id)
                });
                let found = bytes.get(PUT_ID_AT..HEAD_BYTES as usize);
                own.is_some_and(|own| found == Some(own.0.as_slice())) || sequence <= self.stored_sequence
            }
        };
        match (is_free, look.purpose, outcome) {
            (true, ..) => self.look_on(look),
            // If it is a fence, our next put meets it.
            (false, Purpose::Delete(number), _) => self.hear_odd_look(number, now),
            (false, Purpose::Watch(_), Ok(found)) => self.hear_odd_watch(sequence, found, now),
            (false, Purpose::Watch(_), Err(_)) => {}
        }
    }

    /// Looks for fences when it is time, and lets flushes go that have waited for that for long enough.
    pub(super) fn keep_watch(&mut self, now: Duration) {
        let watch = &self.context.write.watch;
        // Once something odd was seen, it is to be known what it is.
        let impatient = self.patience_ends(now).is_some_and(|at| at <= now);
        if impatient && !watch.set_deaf(true) {
            let what = format!("the check for other writers had no answer within {} s", PATIENCE.as_secs());
            self.context.attachment.state.store_failed(now, what);
        }
        if watch.lets_flush(now) {
            flush::resume(&self.context.write);
        }
        if self.watch_in(now).is_some_and(|wait| wait.is_zero()) && !self.fence_check.is_looking {
            self.fence_check.is_looking = true;
            self.fence_check.not_before = now + LOOK_EVERY;
            self.begin_look(Purpose::Watch(now));
        }
    }

    /// How long until there is something to do for [`keep_watch`](Self::keep_watch).
    pub(super) fn watch_in(&self, now: Duration) -> Option<Duration> {
        let watch = &self.context.write.watch;
        let patience = self.patience_ends(now);
        let looks = watch.is_in_use(now) && !self.fence_check.is_looking && self.context.journal.is_some();
        let look = looks.then(|| (watch.news() + LOOK_EVERY).max(self.fence_check.not_before));
        Some(patience.into_iter().chain(look).min()?.saturating_sub(now))
    }

    /// When a flush will have waited for a look for long enough, if one does.
    fn patience_ends(&self, now: Duration) -> Option<Duration> {
        let watch = &self.context.write.watch;
        if self.fence_check.odd.is_some() || watch.lets_flush(now) {
            return None;
        }
        watch.patience_ends()
    }

    fn hear_still_ours(&mut self, began: Duration) {
        self.fence_check.is_looking = false;
        (self.fence_check.odd, self.fence_check.agreeing) = (None, 0);
        self.context.write.watch.has_news(began);
        if self.context.write.watch.set_deaf(false) {
            self.context.attachment.state.store_answered();
        }
    }

    fn hear_no_answer(&mut self, what: String, now: Duration) {
        self.fence_check.is_looking = false;
        self.context.write.watch.set_deaf(true);
        self.context.attachment.state.store_failed(now, what);
    }

    /// Something that is not ours stands where our next segment would.
    fn hear_odd_watch(&mut self, sequence: u64, found: &Bytes, now: Duration) {
        self.fence_check.is_looking = false;
        self.fence_check.not_before = now + AGAIN_AFTER;
        let is_segment = Preamble::decode(found).is_ok_and(|head| head.kind == Kind::Segment as u16)
            && found.get(VOLUME_ID_AT..PUT_ID_AT)
                == Some(self.context.attachment.record.volume_id.0.as_slice());
        let odd = Some((sequence, found.clone())).filter(|_| is_segment);
        self.fence_check.agreeing =
            if odd.is_some() && odd == self.fence_check.odd { self.fence_check.agreeing + 1 } else { 1 };
        self.fence_check.odd = odd;
        if is_segment && self.fence_check.agreeing >= AGREEING_LOOKS {
            let key = segment_key(self.context.attachment.record.volume_id, sequence);
            self.context.write.fence(format!(
                "volume {}: another writer has taken it over (it wrote {key}); writes after position {} are \
                 not in the store, only in the journal: see `sawmill inspect journal`",
                self.context.attachment.name, self.stored_position
            ));
        }
    }
}
