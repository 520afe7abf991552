//! Loads what an open left of the map, one group after the other, beside everything else.
//!
//! Invariants: until the map is whole and all that was replaced in it is counted, no checkpoint
//! begins, nothing is collected, and neither the disk's size nor its state changes: each of these
//! needs the whole map. What the table of segments says of live data meanwhile is never too little.
//!
//! The exception are the checkpoints that a close ends with: one, or two where something is due to
//! be deleted. No change follows them, so they need only that those are made and counted that wait.
//! The other groups are as the checkpoint before says.
//!
//! Not here: loading a group (`map::load`), and who has to wait (`Engine`, `orders`).

use std::sync::Arc;

use super::context::Context;
use super::messages::Event;

/// How far the map is loaded.
#[derive(Default)]
pub(super) struct MapLoading {
    /// One group is being loaded.
    pub(super) is_under_way: bool,
    pub(super) is_whole: bool,
    /// All that the last goal asked for is loaded and counted.
    pub(super) is_enough: bool,
}

/// How much of the map is to be loaded.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum LoadGoal {
    WholeMap,
    /// The groups that changes wait for.
    Changes,
}

impl MapLoading {
    /// Has the next group loaded, if one is left and none is being loaded. A map of which a part
    /// cannot be loaded ends the volume.
    pub(super) fn step(&mut self, context: &Arc<Context>, goal: LoadGoal) {
        let view = context.stored.view();
        // Both first: what the changes replaced that were made by now is counted next.
        let are_changes_made = goal == LoadGoal::Changes && !view.map.may_have_changes_waiting();
        let is_whole = view.map.is_whole();
        view.subtract_losses();
        self.is_enough = false;
        if let Some(error) = view.map.broken() {
            return context.write.fail(error);
        }
        self.is_whole = is_whole;
        self.is_enough = is_whole || are_changes_made;
        if self.is_enough || self.is_under_way {
            return;
        }
        self.is_under_way = true;
        let job_context = context.clone();
        context.map_loader.run(move || {
            // A panic must not leave the rest unloaded.
            let _told = ToldWhenDropped(job_context);
            match goal {
                LoadGoal::WholeMap => view.map.load_next(),
                LoadGoal::Changes => view.map.load_next_changed(),
            }
        });
    }
}

struct ToldWhenDropped(Arc<Context>);

impl Drop for ToldWhenDropped {
    fn drop(&mut self) {
        self.0.mailbox.push_event(Event::MapLoaded);
    }
}
