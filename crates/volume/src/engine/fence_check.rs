//! Checks for fences: after a checkpoint is durable and before it deletes anything, and
//! periodically while the volume is in use.
//!
//! Why before a delete: an attach reads the newest checkpoint, fences, and then checks the newest
//! checkpoint again. If our checkpoint was durable before that fence, the attach has seen it. If
//! not, its fence is there when we check, at one of the names that were free for us when our
//! checkpoint became durable; then we delete nothing.
//!
//! Why while in use: a volume with only reads and flushes puts nothing, and would never meet the
//! fence (`crate::watch`). A single odd result fences nothing, because an answer may be garbled.
//! Several that find the same object do, because our next segment could not be put there.
//!
//! Invariant: a delete goes on only after a check found every place free or ours. An odd answer, or
//! none, holds it up.
//!
//! Not here: putting a fence (`crate::fencing`), the flushes that wait for a check
//! (`crate::watch`), and the deletes (`cleanup`).

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use sawmill_format::preamble::{Kind, Preamble};
use sawmill_format::segment::segment_key;
use sawmill_store::{Class, StoreErrorKind};

use super::context::Context;
use super::log_tail::LogTail;
use super::messages::{Event, FenceCheckPurpose, FenceCheckState};
use crate::store_calls::want;
use crate::watch::{FENCE_CHECK_EVERY, STORE_ANSWER_TIME_MAX};
use crate::write::flush;

/// The start of a segment, up to the end of its put id.
const HEAD_BYTES: u64 = 48;
/// The places of the volume's id and the put id in it.
const VOLUME_ID_AT: usize = 16;
const PUT_ID_AT: usize = 32;
/// After this many consecutive checks that find the same foreign object, it is believed.
const AGREEING_CHECKS_MIN: u32 = 3;
/// The wait before an odd result is checked again.
const RECHECK_AFTER: Duration = Duration::from_millis(200);

/// The checks while the volume is in use.
#[derive(Default)]
pub(super) struct FenceCheck {
    is_checking: bool,
    /// When the next check is due.
    not_before: Duration,
    /// The foreign object that the last check found, and the number of consecutive checks that did.
    odd: Option<(u64, Bytes)>,
    agreeing: u32,
}

/// The result of a check before a delete.
pub(super) enum FenceCheckResult {
    NoFence,
    /// A foreign object, perhaps a fence.
    Odd,
    /// The store did not answer.
    Failed(String),
}

/// Checks for fences before checkpoint `number` deletes anything.
pub(super) fn check_before_delete(context: &Arc<Context>, log: &LogTail, number: u64) {
    begin_check(context, log, FenceCheckPurpose::Delete(number));
}

fn begin_check(context: &Arc<Context>, log: &LogTail, purpose: FenceCheckPurpose) {
    let own = log.puts().map(|(sequence, put_id)| (sequence, Some(put_id)));
    let places_left = own.chain([(log.next_sequence(), None)]).collect();
    request_next(context, Box::new(FenceCheckState { places_left, purpose }));
}

/// Requests the last place that is left to check.
fn request_next(context: &Arc<Context>, check: Box<FenceCheckState>) {
    let Some((sequence, _)) = check.places_left.last() else { return };
    let key = segment_key(context.attachment.record.volume_id, *sequence);
    // A user may wait for a periodic check.
    let class = if matches!(check.purpose, FenceCheckPurpose::Watch(_)) {
        Class::Read
    } else {
        Class::Background
    };
    let get = want(key, Some(0..HEAD_BYTES), class);
    let callback_context = context.clone();
    let callback =
        move |outcome| callback_context.mailbox.push_event(Event::FenceChecked { check, outcome });
    context.attachment.store.get(get, Box::new(callback));
}

impl FenceCheck {
    /// Returns the result of a check before a delete that has completed, with the number of its
    /// checkpoint.
    pub(super) fn handle(
        &mut self,
        context: &Arc<Context>,
        log: &LogTail,
        mut check: Box<FenceCheckState>,
        outcome: &sawmill_store::Result<Bytes>,
        now: Duration,
    ) -> Option<(u64, FenceCheckResult)> {
        let (sequence, own) = check.places_left.pop()?;
        let is_free = match outcome {
            Err(error) if error.kind() == StoreErrorKind::NotFound => true,
            Err(error) => {
                let what = format!("looking for fences: {error}");
                return match check.purpose {
                    FenceCheckPurpose::Delete(number) => {
                        Some((number, FenceCheckResult::Failed(what)))
                    }
                    FenceCheckPurpose::Watch(_) => {
                        self.handle_no_answer(context, what, now);
                        None
                    }
                };
            }
            Ok(bytes) => {
                // It may have become ours since the request.
                let own = own
                    .or_else(|| log.puts().find(|(sent, _)| *sent == sequence).map(|(_, put)| put));
                let found = bytes.get(PUT_ID_AT..HEAD_BYTES as usize);
                own.is_some_and(|own| found == Some(own.0.as_slice()))
                    || sequence <= log.stored_sequence()
            }
        };
        match (is_free, check.purpose, outcome) {
            (true, ..) if !check.places_left.is_empty() => request_next(context, check),
            (true, FenceCheckPurpose::Delete(number), _) => {
                return Some((number, FenceCheckResult::NoFence));
            }
            (true, FenceCheckPurpose::Watch(began), _) => self.handle_still_ours(context, began),
            // If it is a fence, our next put meets it.
            (false, FenceCheckPurpose::Delete(number), _) => {
                return Some((number, FenceCheckResult::Odd));
            }
            (false, FenceCheckPurpose::Watch(_), Ok(found)) => {
                self.handle_odd(context, log, sequence, found, now)
            }
            (false, FenceCheckPurpose::Watch(_), Err(_)) => {}
        }
        None
    }

    /// Starts a check when it is due, and releases flushes that have waited for one long enough.
    pub(super) fn step(&mut self, context: &Arc<Context>, log: &LogTail, now: Duration) {
        let watch = &context.write.watch;
        // After an odd result, the next check must not wait.
        let is_overdue = self.flush_wait_ends(context, now).is_some_and(|at| at <= now);
        if is_overdue && !watch.set_store_silent(true) {
            let what = format!(
                "the check for other writers had no answer within {} s",
                STORE_ANSWER_TIME_MAX.as_secs()
            );
            context.attachment.state.store_failed(now, what);
        }
        if watch.may_answer_flush(now) {
            flush::resume(&context.write);
        }
        if self.wait(context, now).is_some_and(|wait| wait.is_zero()) && !self.is_checking {
            self.is_checking = true;
            self.not_before = now + FENCE_CHECK_EVERY;
            begin_check(context, log, FenceCheckPurpose::Watch(now));
        }
    }

    /// Time until [`step`](Self::step) has something to do.
    pub(super) fn wait(&self, context: &Context, now: Duration) -> Option<Duration> {
        let watch = &context.write.watch;
        let wait_end = self.flush_wait_ends(context, now);
        let may_check = watch.is_in_use(now) && !self.is_checking && context.journal.is_some();
        let check_at =
            may_check.then(|| (watch.confirmed_at() + FENCE_CHECK_EVERY).max(self.not_before));
        Some(wait_end.into_iter().chain(check_at).min()?.saturating_sub(now))
    }

    /// When a flush will have waited long enough for a check, if one does.
    fn flush_wait_ends(&self, context: &Context, now: Duration) -> Option<Duration> {
        let watch = &context.write.watch;
        if self.odd.is_some() || watch.may_answer_flush(now) {
            return None;
        }
        watch.flush_wait_ends()
    }

    fn handle_still_ours(&mut self, context: &Context, began: Duration) {
        self.is_checking = false;
        (self.odd, self.agreeing) = (None, 0);
        context.write.watch.confirm_at(began);
        if context.write.watch.set_store_silent(false) {
            context.attachment.state.store_answered();
        }
    }

    fn handle_no_answer(&mut self, context: &Context, what: String, now: Duration) {
        self.is_checking = false;
        context.write.watch.set_store_silent(true);
        context.attachment.state.store_failed(now, what);
    }

    /// There is a foreign object at the place of our next segment.
    fn handle_odd(
        &mut self,
        context: &Context,
        log: &LogTail,
        sequence: u64,
        found: &Bytes,
        now: Duration,
    ) {
        self.is_checking = false;
        self.not_before = now + RECHECK_AFTER;
        let is_segment = Preamble::decode(found)
            .is_ok_and(|head| head.kind == Kind::Segment as u16)
            && found.get(VOLUME_ID_AT..PUT_ID_AT)
                == Some(context.attachment.record.volume_id.0.as_slice());
        let odd = Some((sequence, found.clone())).filter(|_| is_segment);
        self.agreeing = if odd.is_some() && odd == self.odd { self.agreeing + 1 } else { 1 };
        self.odd = odd;
        if is_segment && self.agreeing >= AGREEING_CHECKS_MIN {
            let key = segment_key(context.attachment.record.volume_id, sequence);
            context.write.fence(format!(
                "volume {}: another writer has taken it over (it wrote {key}); writes after \
                 position {} are not in the store, only in the journal: see `sawmill inspect \
                 journal`",
                context.attachment.name,
                log.stored_position()
            ));
        }
    }
}
