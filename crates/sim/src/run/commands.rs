//! Commands at rest: between two lives a command attaches, orders one thing (a snapshot, a
//! retention, a larger disk, a collection), waits for the answer, closes, and may die at any I/O of
//! this.
//!
//! Invariant checked: a command that closed without an error left everything stored. Not here: the
//! orders, and their required results (`past`).

use super::{Process, ROUNDS_MAX, SeedRun, Verdict};
use crate::death::live;
use crate::store::CallFate;

impl SeedRun {
    pub(super) fn command_at_rest(&mut self, machine: usize) -> Verdict {
        self.log("command", || format!("somebody runs a command on machine {machine}"));
        self.attach(machine)?;
        let Some(mut process) = self.process.take() else { return Ok(()) };
        self.story.commands += 1;
        process.store.heal();
        if self.edges.dice.one_in(2) {
            process.life.dies_after(1 + self.edges.dice.below(40));
        }
        let threshold = *self.edges.dice.pick(&[0.5, 1.0]);
        let collects = self.settings.past_odds == 0 || self.edges.dice.one_in(3);
        let ordered = live(|| {
            if collects {
                // A volume that is being fenced refuses this, which changes nothing.
                let _ = process.stepped.volume().request_collection(threshold, Box::new(|_| ()));
                return Ok(());
            }
            self.act_on_the_past(&mut process)
        });
        ordered.unwrap_or(Ok(()))?;
        for _ in 0..ROUNDS_MAX {
            if live(|| self.round(&mut process)).is_none() || process.life.is_dead() {
                self.process = Some(process);
                self.die();
                return Ok(());
            }
            self.receive_answers(&mut process)?;
            self.process = Some(process);
            self.receive_order_answers(false)?;
            let Some(back) = self.process.take() else { return Ok(()) };
            process = back;
            if process.order.is_none() {
                break;
            }
        }
        self.close_or_die(process)
    }

    fn close_or_die(&mut self, mut process: Process) -> Verdict {
        process.closing = true;
        process.stepped.begin_close();
        for _ in 0..ROUNDS_MAX {
            if process.stepped.is_settled() {
                break;
            }
            if live(|| self.round(&mut process)).is_none() {
                process.life.die();
                self.process = Some(process);
                self.die();
                return Ok(());
            }
        }
        self.receive_answers(&mut process)?;
        if !process.stepped.is_settled() && !process.life.is_dead() {
            return Err(format!("a command does not end: {:?}", process.stepped.volume().status()));
        }
        let Process { stepped, store, life, .. } = process;
        let closed = live(|| stepped.finish_close());
        let has_died = life.is_dead();
        life.die();
        let dice = &mut self.edges.dice;
        store.end_calls(|_| CallFate::roll(dice));
        match closed {
            Some(Ok(())) if !has_died => {
                self.story.closes += 1;
                let count = self.oracle.flush_covers();
                self.oracle.note_stored(count);
                Ok(())
            }
            Some(Err(error)) if !has_died && !self.has_disk_faults() => {
                Err(format!("a command cannot close: {error}"))
            }
            _ => Ok(()),
        }
    }
}
