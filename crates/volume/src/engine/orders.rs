//! Orders: snapshots, retention, rollback. Each becomes a segment of its own behind everything that was
//! accepted when it was given, and is done when that segment is stored: then no fence stands before it, and
//! every recovery meets it.
//!
//! Invariants: one order at a time is on its way, and with a rollback, right in front of it, the snapshot
//! that undoes it; what an order needs of the past is not given up meanwhile. Nothing that users wrote is
//! sealed between a rollback and the checkpoint that has it: so no moment of the past has its way through the
//! cut that was rolled back to, which may be given up some day.

use bytes::Bytes;
use sawmill_format::kept::Order;
use sawmill_format::segment::{
    FRAME_HEAD_BYTES, FrameIdentity, SegmentHeader, SegmentRole, frame_seal, raw_frames,
};

use super::{Engine, is_padding};
use crate::cuts::Place;
use crate::recovery::end::RolledBack;
use crate::segment::builder::Built;
use crate::view::View;
use crate::{Error, ErrorKind, Result, limits};

impl Engine {
    pub(super) fn take_orders(&mut self) {
        self.orders.extend(self.context.mailbox.take_orders());
    }

    /// The volume has ended: whoever ordered something is told why.
    pub(super) fn refuse_orders(&mut self) {
        self.take_orders();
        let ended = || Error::new(ErrorKind::Closed, "the volume was stopped before the order was stored");
        let error = self.context.attachment.state.refusal().unwrap_or_else(ended);
        for ordered in self.ordered.take().into_iter().chain(self.orders.drain(..)) {
            (ordered.tell)(Err(error.clone()));
        }
    }

    /// Sends the next order when everything before it is on its way.
    pub(super) fn carry_out_orders(&mut self) {
        while self.ordered.is_none() && self.uploads.len() < self.options.uploads_max {
            let Some(front) = self.orders.front() else { return };
            if self.crossed().is_some() {
                // A cut must never begin before a rollback: its way would go through the cut of that one.
                return;
            }
            if front.then.as_ref().is_some_and(|then| then.segments.newest() > self.stored_sequence) {
                // The store had more than we had heard of when the cut was read there.
                return;
            }
            let before = |record: &&std::sync::Arc<crate::record::Record>| record.position < front.position;
            let sealed = self.received_end >= front.position
                && self.pending.iter().take_while(before).all(|record| is_padding(record));
            if !sealed {
                return;
            }
            let Some(ordered) = self.orders.pop_front() else { return };
            let undo = ordered.undo.clone().map(Order::CreateSnapshot);
            let orders = || undo.iter().chain([&ordered.order]);
            let checked = orders().try_for_each(|order| self.check_order(order));
            let checked = checked.and_then(|()| self.check_then(ordered.then.as_ref()));
            if let Err(error) = checked {
                (ordered.tell)(Err(error));
                continue;
            }
            for order in orders() {
                match self.build_order(order) {
                    Ok(built) => self.send_batch(built, Vec::new()),
                    Err(error) => {
                        (ordered.tell)(Err(error.clone()));
                        return self.context.write.fail(error);
                    }
                }
            }
            self.ordered = Some(ordered);
        }
    }

    /// Whether a rollback is on its way, or in no durable checkpoint yet.
    pub(super) fn is_rolling_back(&self) -> bool {
        self.ordered.as_ref().is_some_and(|ordered| ordered.then.is_some()) || self.crossed().is_some()
    }

    /// Whether every segment that the map of a cut names is there.
    fn check_then(&self, then: Option<&View>) -> Result<()> {
        let (Some(then), view) = (then, self.context.stored.view()) else { return Ok(()) };
        let gone = then
            .segments
            .snapshot()
            .into_iter()
            .find(|(sequence, info)| info.live_bytes > 0 && view.segments.get(*sequence).is_none());
        gone.map_or(Ok(()), |_| Err(given_up()))
    }

    /// Whether an order can be carried out, given all orders before it.
    fn check_order(&self, order: &Order) -> Result<()> {
        let view = self.context.stored.view();
        let book = view.cuts.lock();
        match order {
            Order::CreateSnapshot(name) if book.snapshot(name).is_some() => {
                let text = format!("there is a snapshot {name:?} already: choose another name, or delete it");
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
            _ if self.next_sequence >= limits::SEQUENCE_MAX => {
                let text = "the volume has used up its segment sequences; copy it to a new one";
                Err(Error::new(ErrorKind::Full, text))
            }
            _ => Ok(()),
        }
    }

    /// The segment that holds an order.
    fn build_order(&self, order: &Order) -> Result<Built> {
        let data = order.encode();
        let data_bytes = data.len() as u64;
        let mut header =
            SegmentHeader { data_bytes, ..self.header(SegmentRole::Order, self.sealed_position)? };
        header.frames = raw_frames(data_bytes, header.frame_bytes).map_err(|error| {
            Error::new(ErrorKind::Internal, format!("an order does not fit a segment: {error}"))
        })?;
        let mut object = header.encode();
        let header_bytes = object.len() as u32;
        let SegmentHeader { volume_id, sequence, epoch, .. } = header;
        let mut head = [0; FRAME_HEAD_BYTES];
        frame_seal(&FrameIdentity { volume_id, sequence, epoch, frame: 0 }, &data, &mut head);
        object.extend_from_slice(&head);
        object.extend_from_slice(&data);
        let (object, resident, coalesced_bytes) = (Bytes::from(object), Vec::new(), 0);
        Ok(Built { header, object, header_bytes, resident, coalesced_bytes })
    }

    /// The segment of the order under way, or of the snapshot in front of it, is stored, and all before it.
    pub(super) fn finish_order(&mut self, header: &SegmentHeader) {
        let Some(mut ordered) = self.ordered.take() else { return };
        let view = self.context.stored.view();
        let place =
            Place::behind(&self.newest_root, header.sequence, header.position_end, header.wall_unix_ms);
        if let Some(undo) = ordered.undo.take() {
            view.cuts.lock().apply(&Order::CreateSnapshot(undo), &place);
            self.ordered = Some(ordered);
            return;
        }
        view.cuts.lock().apply(&ordered.order, &place);
        if let (Some(then), Order::RollBack { number, through_sequence, .. }) = (ordered.then, &ordered.order)
        {
            self.context.stored.replace_view(view.rolled_back_to(then));
            let (sequence, wall_unix_ms) = (header.sequence, header.wall_unix_ms);
            let (cut_number, cut_through) = (*number, *through_sequence);
            self.rolled_back = Some(RolledBack { sequence, wall_unix_ms, cut_number, cut_through });
            // Recovery shall not have to go through the cut again for long.
            self.log_bytes = self.log_bytes.max(self.options.checkpoint_bytes);
        }
        if matches!(ordered.order, Order::DeleteSnapshot(_) | Order::SetRetention(_)) {
            // What it alone needed goes also when nothing else happens any more.
            self.want_deletes();
        }
        (ordered.tell)(Ok(()));
    }
}

fn given_up() -> Error {
    Error::new(ErrorKind::NotFound, "the cut to roll back to is no longer kept: nothing was changed")
}
