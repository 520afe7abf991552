//! A process hands over to the next one, as `sawmill handoff` does: its doors are quiet, everything
//! accepted is logged, and it releases the volume as if it had died. The successor attaches on the
//! same machine; if it dies, the predecessor resumes.
//!
//! Invariant checked: everything answered before survives, even if memory or power is lost while no
//! process has the volume.

use std::time::Duration;

use sawmill_device::BlockDevice as _;
use sawmill_volume::{Health, Safety};

use super::{ROUNDS_MAX, SeedRun, Verdict};
use crate::store::CallFate;

impl SeedRun {
    pub(super) fn hand_off(&mut self) -> Verdict {
        let Some(mut process) = self.process.take() else { return Ok(()) };
        let is_whole =
            !process.life.is_dead() && process.replaced_at.is_none() && process.order.is_none();
        if is_whole {
            // Cancels a planned death: ordinary lives already cover those.
            process.life.lives_on();
        }
        let is_quiet = is_whole && self.is_quiet(&mut process)?;
        let volume = process.stepped.volume().clone();
        let is_logged = is_quiet && volume.status().health == Health::Serving && {
            let _ = volume.wait(Safety::Logged, Some(Duration::ZERO));
            while process.stepped.step_journal() {}
            matches!(volume.wait(Safety::Logged, Some(Duration::ZERO)), Ok(true))
        };
        if !is_logged {
            self.process = Some(process);
            return Ok(());
        }
        self.receive_answers(&mut process)?;
        let accepted = self.oracle.flush_covers();
        self.oracle.note_logged(accepted);
        let machine = process.machine;
        self.log("hand-off", || {
            format!("machine {machine} hands over, {accepted} operations are accepted")
        });
        self.story.hand_offs += 1;
        if let Some(cache) = &process.cache {
            let _ = cache.save_index();
            cache.release();
        }
        volume.close_now();
        process.life.die();
        let dice = &mut self.edges.dice;
        process.store.end_calls(|_| CallFate::roll(dice));
        drop((volume, process));
        match self.edges.dice.below(6) {
            0 => self.lose_memory_alone(machine),
            1 => self.cut_power(machine),
            _ => {}
        }
        if self.edges.dice.one_in(2) {
            // The successor dies in its attach, and the predecessor resumes.
            self.dies_next = 1 + self.edges.dice.below(30);
        }
        self.attach(machine)
    }

    /// The doors accept nothing, and every request is answered.
    fn is_quiet(&mut self, process: &mut super::Process) -> Result<bool, String> {
        let _ = process.stepped.volume().geometry();
        for _ in 0..ROUNDS_MAX / 10 {
            if process.client.waiting() == 0 {
                return Ok(true);
            }
            self.round(process);
            self.receive_answers(process)?;
        }
        Ok(false)
    }
}
