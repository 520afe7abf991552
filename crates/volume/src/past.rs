//! The orders to an open volume about its past: snapshots, retention, rollback.
//!
//! Each call waits until its order is stored, except `begin_...`.
//!
//! Invariant: an order's position is the end of the log when it is queued, so everything accepted
//! before the call comes before the order.
//!
//! Not here: how orders are executed (`engine::orders`), and the cuts that they need (`cuts`).

use std::sync::mpsc::{Receiver, sync_channel};

use sawmill_format::kept_block::Order;

use crate::cuts::{Cut, entry_of, state_at};
use crate::engine::OrderRequest;
use crate::names::check_name;
use crate::recovery::checkpoint;
use crate::view::View;
use crate::volume::Volume;
use crate::{Error, ErrorKind, Result};

/// How a rollback is undone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Undo {
    /// The snapshot of the state before the rollback.
    pub snapshot: String,
}

impl Volume {
    /// Gives the present state a name: everything accepted before this call, and perhaps some of
    /// what is accepted while it runs, all of it stored when it returns. Writes continue meanwhile.
    pub fn create_snapshot(&self, name: &str) -> Result<()> {
        check_name(name)?;
        self.carry_out(Order::CreateSnapshot(name.to_owned()), None)
    }

    /// Deletes a snapshot; data that it alone needs is deleted later.
    pub fn delete_snapshot(&self, name: &str) -> Result<()> {
        self.carry_out(Order::DeleteSnapshot(name.to_owned()), None)
    }

    /// How far back every moment is kept from now on, in seconds; 0: not at all.
    pub fn set_retention(&self, retention_s: u64) -> Result<()> {
        self.carry_out(Order::SetRetention(retention_s), None)
    }

    /// Rolls the disk back to a cut. A snapshot of the state before is made, to undo the rollback.
    /// Writes in flight meanwhile come before or after it.
    pub fn roll_back(&self, cut: &Cut) -> Result<Undo> {
        let now = self.attachment.world.unix_ms();
        let snapshot = format!("before-rollback-{now}");
        let (order, then) = self.find(cut)?;
        let receiver = self.order_with(order, Some(then), Some(snapshot.clone()))?;
        receiver.recv().map_err(|_| {
            Error::new(ErrorKind::Closed, "the volume was closed before this was done")
        })??;
        Ok(Undo { snapshot })
    }

    /// The order that rolls back to a cut, and the cut's map.
    fn find(&self, cut: &Cut) -> Result<(Order, View)> {
        let volume_id = self.attachment.record.volume_id;
        let entry = entry_of(&self.read.stored.view().cuts.lock(), cut)?;
        let root =
            checkpoint::kept_root(&*self.attachment.store, volume_id, entry.number, entry.put_id)?;
        let (then, end) = state_at(&*self.attachment.store, &root, &entry)?;
        let (number, put_id) = (entry.number, entry.put_id);
        Ok((Order::RollBack { number, put_id, through_sequence: end.stored_sequence }, then))
    }

    /// As [`create_snapshot`](Self::create_snapshot), but does not block: the result arrives
    /// through the channel.
    pub fn begin_snapshot(&self, name: &str) -> Result<Receiver<Result<()>>> {
        check_name(name)?;
        self.order(Order::CreateSnapshot(name.to_owned()), None)
    }

    /// As [`set_retention`](Self::set_retention), but does not block.
    pub fn begin_set_retention(&self, retention_s: u64) -> Result<Receiver<Result<()>>> {
        self.order(Order::SetRetention(retention_s), None)
    }

    /// As [`delete_snapshot`](Self::delete_snapshot), but does not block.
    pub fn begin_delete_snapshot(&self, name: &str) -> Result<Receiver<Result<()>>> {
        self.order(Order::DeleteSnapshot(name.to_owned()), None)
    }

    /// As [`roll_back`](Self::roll_back), but without a snapshot of the state before. Waits for the
    /// store to find the cut, but not for the order.
    pub fn begin_roll_back(&self, cut: &Cut) -> Result<Receiver<Result<()>>> {
        let (order, then) = self.find(cut)?;
        self.order(order, Some(then))
    }

    fn carry_out(&self, order: Order, then: Option<View>) -> Result<()> {
        self.order(order, then)?.recv().map_err(|_| {
            Error::new(ErrorKind::Closed, "the volume was closed before this was done")
        })?
    }

    /// Queues an order; the result arrives through the channel.
    fn order(&self, order: Order, then: Option<View>) -> Result<Receiver<Result<()>>> {
        self.order_with(order, then, None)
    }

    /// As `order`, with a snapshot of that name right before it.
    fn order_with(
        &self,
        order: Order,
        then: Option<View>,
        undo: Option<String>,
    ) -> Result<Receiver<Result<()>>> {
        let Some(journal) = &self.write.journal else {
            let text = "the volume is open for reading only";
            return Err(Error::new(ErrorKind::ReadOnly, text));
        };
        if let Some(error) = self.attachment.state.refusal() {
            return Err(error);
        }
        let (sender, receiver) = sync_channel(1);
        let callback = Box::new(move |outcome| {
            // The requester may have given up.
            let _ = sender.send(outcome);
        });
        let position = journal.ring.next();
        self.write.mailbox.push_order(OrderRequest { order, then, undo, position, callback });
        Ok(receiver)
    }
}
