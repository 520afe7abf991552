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

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use sawmill_format::preamble::{Kind, Preamble};
use sawmill_format::segment::segment_key;
use sawmill_store::{Class, StoreErrorKind};

use super::context::Context;
use super::log_tail::LogTail;
use super::messages::{Event, Look, Purpose};
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

/// What a look before a delete has found.
pub(super) enum Found {
    NoFence,
    /// Something that is not ours, perhaps a fence.
    Odd,
    /// The store did not answer.
    Failed(String),
}

/// Looks for fences before anything is deleted by checkpoint `number`.
pub(super) fn look_before_delete(context: &Arc<Context>, log: &LogTail, number: u64) {
    begin_look(context, log, Purpose::Delete(number));
}

fn begin_look(context: &Arc<Context>, log: &LogTail, purpose: Purpose) {
    let own = log.puts().map(|(sequence, put_id)| (sequence, Some(put_id)));
    let left = own.chain([(log.next_sequence(), None)]).collect();
    ask(context, Box::new(Look { left, purpose }));
}

/// Asks for the last place that is left to look at.
fn ask(context: &Arc<Context>, look: Box<Look>) {
    let Some((sequence, _)) = look.left.last() else { return };
    let key = segment_key(context.attachment.record.volume_id, *sequence);
    // Somebody may wait for a watch.
    let class = if matches!(look.purpose, Purpose::Watch(_)) { Class::Read } else { Class::Background };
    let get = want(key, Some(0..HEAD_BYTES), class);
    let answered = context.clone();
    let tell = move |outcome| answered.mailbox.push_event(Event::FenceLooked { look, outcome });
    context.attachment.store.get(get, Box::new(tell));
}

impl FenceCheck {
    /// Returns what was found, when the look was for a delete and has ended, and of which checkpoint.
    pub(super) fn hear(
        &mut self,
        context: &Arc<Context>,
        log: &LogTail,
        mut look: Box<Look>,
        outcome: &sawmill_store::Result<Bytes>,
        now: Duration,
    ) -> Option<(u64, Found)> {
        let (sequence, own) = look.left.pop()?;
        let is_free = match outcome {
            Err(error) if error.kind() == StoreErrorKind::NotFound => true,
            Err(error) => {
                let what = format!("looking for fences: {error}");
                return match look.purpose {
                    Purpose::Delete(number) => Some((number, Found::Failed(what))),
                    Purpose::Watch(_) => {
                        self.hear_no_answer(context, what, now);
                        None
                    }
                };
            }
            Ok(bytes) => {
                // It may have become ours since we asked.
                let own = own.or_else(|| log.puts().find(|(sent, _)| *sent == sequence).map(|(_, put)| put));
                let found = bytes.get(PUT_ID_AT..HEAD_BYTES as usize);
                own.is_some_and(|own| found == Some(own.0.as_slice())) || sequence <= log.stored_sequence()
            }
        };
        match (is_free, look.purpose, outcome) {
            (true, ..) if !look.left.is_empty() => ask(context, look),
            (true, Purpose::Delete(number), _) => return Some((number, Found::NoFence)),
            (true, Purpose::Watch(began), _) => self.hear_still_ours(context, began),
            // If it is a fence, our next put meets it.
            (false, Purpose::Delete(number), _) => return Some((number, Found::Odd)),
            (false, Purpose::Watch(_), Ok(found)) => self.hear_odd(context, log, (sequence, found), now),
            (false, Purpose::Watch(_), Err(_)) => {}
        }
        None
    }

    /// Looks for fences when it is time, and lets flushes go that have waited for that for long enough.
    pub(super) fn step(&mut self, context: &Arc<Context>, log: &LogTail, now: Duration) {
        let watch = &context.write.watch;
        // Once something odd was seen, it is to be known what it is.
        let impatient = self.patience_ends(context, now).is_some_and(|at| at <= now);
        if impatient && !watch.set_deaf(true) {
            let what = format!("the check for other writers had no answer within {} s", PATIENCE.as_secs());
            context.attachment.state.store_failed(now, what);
        }
        if watch.lets_flush(now) {
            flush::resume(&context.write);
        }
        if self.wait(context, now).is_some_and(|wait| wait.is_zero()) && !self.is_looking {
            self.is_looking = true;
            self.not_before = now + LOOK_EVERY;
            begin_look(context, log, Purpose::Watch(now));
        }
    }

    /// How long until there is something to do for [`step`](Self::step).
    pub(super) fn wait(&self, context: &Context, now: Duration) -> Option<Duration> {
        let watch = &context.write.watch;
        let patience = self.patience_ends(context, now);
        let looks = watch.is_in_use(now) && !self.is_looking && context.journal.is_some();
        let look = looks.then(|| (watch.news() + LOOK_EVERY).max(self.not_before));
        Some(patience.into_iter().chain(look).min()?.saturating_sub(now))
    }

    /// When a flush will have waited for a look for long enough, if one does.
    fn patience_ends(&self, context: &Context, now: Duration) -> Option<Duration> {
        let watch = &context.write.watch;
        if self.odd.is_some() || watch.lets_flush(now) {
            return None;
        }
        watch.patience_ends()
    }

    fn hear_still_ours(&mut self, context: &Context, began: Duration) {
        self.is_looking = false;
        (self.odd, self.agreeing) = (None, 0);
        context.write.watch.has_news(began);
        if context.write.watch.set_deaf(false) {
            context.attachment.state.store_answered();
        }
    }

    fn hear_no_answer(&mut self, context: &Context, what: String, now: Duration) {
        self.is_looking = false;
        context.write.watch.set_deaf(true);
        context.attachment.state.store_failed(now, what);
    }

    /// Something that is not ours stands where our next segment would.
    fn hear_odd(
        &mut self,
        context: &Context,
        log: &LogTail,
        (sequence, found): (u64, &Bytes),
        now: Duration,
    ) {
        self.is_looking = false;
        self.not_before = now + AGAIN_AFTER;
        let is_segment = Preamble::decode(found).is_ok_and(|head| head.kind == Kind::Segment as u16)
            && found.get(VOLUME_ID_AT..PUT_ID_AT) == Some(context.attachment.record.volume_id.0.as_slice());
        let odd = Some((sequence, found.clone())).filter(|_| is_segment);
        self.agreeing = if odd.is_some() && odd == self.odd { self.agreeing + 1 } else { 1 };
        self.odd = odd;
        if is_segment && self.agreeing >= AGREEING_LOOKS {
            let key = segment_key(context.attachment.record.volume_id, sequence);
            context.write.fence(format!(
                "volume {}: another writer has taken it over (it wrote {key}); writes after position {} are \
                 not in the store, only in the journal: see `sawmill inspect journal`",
                context.attachment.name,
                log.stored_position()
            ));
        }
    }
}
