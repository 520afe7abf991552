//! Orders: snapshots, retention, rollback. Each becomes a segment of its own after everything that
//! was accepted before it, and is done when that segment is stored: then no fence precedes it, and
//! every recovery meets it.
//!
//! Invariants: one order at a time is in flight; a rollback together with the snapshot right before
//! it that undoes it. What an order needs of the past is not dropped in the meantime. No user data
//! is sealed between a rollback and the checkpoint that includes it. So no moment of the past
//! depends on the cut that was rolled back to, which may be dropped some day.
//!
//! Not here: requests for orders (`crate::past`), what is kept of the past (`cuts::book`), and
//! orders that recovery meets (`recovery::roll_forward`).

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::Bytes;
use sawmill_format::kept_block::Order;
use sawmill_format::segment::{
    FRAME_HEAD_BYTES, FrameIdentity, SegmentHeader, SegmentKind, frame_seal, raw_frames,
};

use super::EngineOptions;
use super::checkpoint::Checkpoints;
use super::context::Context;
use super::log_tail::LogTail;
use super::map_loading::MapLoading;
use super::messages::OrderRequest;
use crate::cuts::LogPosition;
use crate::recovery::end::RollbackRecord;
use crate::segment::builder::BuiltSegment;
use crate::store_calls::cannot_encode;
use crate::view::View;
use crate::{Error, ErrorKind, Result};

/// The orders that wait, and the one that is in flight.
#[derive(Default)]
pub(super) struct Orders {
    /// Bounded by `limits::ORDERS_WAITING_MAX`.
    waiting: VecDeque<OrderRequest>,
    /// The order whose segment is in flight.
    under_way: Option<OrderRequest>,
}

impl Orders {
    pub(super) fn take(&mut self, context: &Context) {
        self.waiting.extend(context.mailbox.take_orders());
    }

    /// Whether no order waits to be sent.
    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    pub(super) fn is_under_way(&self) -> bool {
        self.under_way.is_some()
    }

    /// The volume has ended: the requesters of orders get the reason.
    pub(super) fn refuse(&mut self, context: &Context) {
        self.take(context);
        let closed_error =
            || Error::new(ErrorKind::Closed, "the volume was stopped before the order was stored");
        let error = context.attachment.state.refusal().unwrap_or_else(closed_error);
        for ordered in self.under_way.take().into_iter().chain(self.waiting.drain(..)) {
            (ordered.callback)(Err(error.clone()));
        }
    }

    /// Sends the next order when everything before it is in flight.
    pub(super) fn carry_out(
        &mut self,
        context: &Arc<Context>,
        options: &EngineOptions,
        log: &mut LogTail,
        checkpoints: &Checkpoints,
        map_loading: &MapLoading,
    ) {
        while self.under_way.is_none() && log.has_room(options) {
            let Some(front) = self.waiting.front() else { return };
            if checkpoints.crossed().is_some() {
                // A cut must never start before a rollback: its recovery would need the cut of that
                // rollback.
                return;
            }
            if front
                .then
                .as_ref()
                .is_some_and(|then| then.segments.newest() > log.stored_sequence())
            {
                // When the cut was read, the store had more than this engine knew.
                return;
            }
            if !log.is_sealed_through(front.position) {
                return;
            }
            if front.then.is_some() && !map_loading.is_whole {
                // The present is counted before it is replaced.
                return;
            }
            let Some(ordered) = self.waiting.pop_front() else { return };
            let undo = ordered.undo.clone().map(Order::CreateSnapshot);
            let orders = || undo.iter().chain([&ordered.order]);
            let view = context.stored.view();
            let verdict = orders().try_for_each(|order| check_order(&view, log, order));
            let verdict = verdict.and_then(|()| check_then(&view, ordered.then.as_ref()));
            if let Err(error) = verdict {
                (ordered.callback)(Err(error));
                continue;
            }
            let sent: Result<()> = orders().try_for_each(|order| {
                let built = build_order(context, log, order)?;
                log.send_segment(context, built, Vec::new());
                Ok(())
            });
            if let Err(error) = sent {
                (ordered.callback)(Err(error.clone()));
                return context.write.fail(error);
            }
            self.under_way = Some(ordered);
        }
    }

    /// Whether a rollback is in flight, or not yet in a durable checkpoint.
    pub(super) fn is_rolling_back(&self, checkpoints: &Checkpoints) -> bool {
        self.under_way.as_ref().is_some_and(|ordered| ordered.then.is_some())
            || checkpoints.crossed().is_some()
    }

    /// The segment of the current order, or of the snapshot before it, is stored, and so is
    /// everything before it.
    pub(super) fn finish(
        &mut self,
        context: &Context,
        options: &EngineOptions,
        checkpoints: &mut Checkpoints,
        header: &SegmentHeader,
    ) {
        let Some(mut ordered) = self.under_way.take() else { return };
        let view = context.stored.view();
        let place = LogPosition::behind(
            &checkpoints.newest_root,
            header.sequence,
            header.position_end,
            header.wall_unix_ms,
        );
        if let Some(undo) = ordered.undo.take() {
            view.cuts.lock().apply(&Order::CreateSnapshot(undo), &place);
            self.under_way = Some(ordered);
            return;
        }
        view.cuts.lock().apply(&ordered.order, &place);
        if let (Some(then), Order::RollBack { number, through_sequence, .. }) =
            (ordered.then, &ordered.order)
        {
            context.stored.replace_view(view.rolled_back_to(then));
            let (sequence, wall_unix_ms) = (header.sequence, header.wall_unix_ms);
            let (cut_number, cut_through) = (*number, *through_sequence);
            let rollback = RollbackRecord { sequence, wall_unix_ms, cut_number, cut_through };
            checkpoints.note_rollback(rollback, options);
        }
        if matches!(ordered.order, Order::DeleteSnapshot(_) | Order::SetRetention(_)) {
            // What only that snapshot needed is deleted even if nothing else happens any more.
            checkpoints.want_deletes();
        }
        (ordered.callback)(Ok(()));
    }
}

/// Whether every segment that the map of a cut names exists.
fn check_then(view: &View, then: Option<&View>) -> Result<()> {
    let Some(then) = then else { return Ok(()) };
    let missing_segment = then
        .segments
        .snapshot()
        .into_iter()
        .find(|(sequence, info)| info.live_bytes > 0 && view.segments.get(*sequence).is_none());
    missing_segment.map_or(Ok(()), |_| Err(given_up()))
}

/// Whether an order can be executed after all orders before it.
fn check_order(view: &View, log: &LogTail, order: &Order) -> Result<()> {
    let book = view.cuts.lock();
    match order {
        Order::CreateSnapshot(name) if book.snapshot(name).is_some() => {
            let text =
                format!("there is a snapshot {name:?} already: choose another name, or delete it");
            Err(Error::new(ErrorKind::Exists, text))
        }
        Order::DeleteSnapshot(name) if book.snapshot(name).is_none() => {
            let text = format!("there is no snapshot {name:?}: `sawmill snapshot list` shows them");
            Err(Error::new(ErrorKind::NotFound, text))
        }
        Order::RollBack { number, put_id, through_sequence }
            if !book.begins(*number, *put_id, *through_sequence) =>
        {
            Err(given_up())
        }
        _ if log.is_used_up() => {
            let text = "the volume has used up its segment sequences; copy it to a new one";
            Err(Error::new(ErrorKind::Full, text))
        }
        _ => Ok(()),
    }
}

/// The segment of an order.
fn build_order(context: &Context, log: &LogTail, order: &Order) -> Result<BuiltSegment> {
    let data = order.encode().map_err(cannot_encode)?;
    let data_bytes = data.len() as u64;
    let mut header = SegmentHeader {
        data_bytes,
        ..log.header(context, SegmentKind::Order, log.sealed_position())?
    };
    header.frames = raw_frames(data_bytes, header.frame_bytes).map_err(|error| {
        Error::caused(ErrorKind::Internal, "an order does not fit a segment", error)
    })?;
    let mut object = header.encode().map_err(cannot_encode)?;
    let header_bytes = object.len() as u32;
    let SegmentHeader { volume_id, sequence, epoch, .. } = header;
    let mut head = [0; FRAME_HEAD_BYTES];
    frame_seal(&FrameIdentity { volume_id, sequence, epoch, frame: 0 }, &data, &mut head);
    object.extend_from_slice(&head);
    object.extend_from_slice(&data);
    let (object, resident, coalesced_bytes) = (Bytes::from(object), Vec::new(), 0);
    Ok(BuiltSegment { header, object, header_bytes, resident, coalesced_bytes })
}

fn given_up() -> Error {
    Error::new(
        ErrorKind::NotFound,
        "the cut to roll back to is no longer kept: nothing was changed",
    )
}
