//! Clones, and clones of clones: written, made larger, renamed, flattened and deleted in any order.
//!
//! Invariants: a clone always holds its first content plus the writes to it since, whatever happens
//! to its base, its ancestors and the volume they come from. Work on clones uses a fault-free
//! store; the volume's writers do not.

use std::sync::Arc;

use sawmill_device::BlockDevice;
use sawmill_volume::limits::{STAGING_BYTES_MIN, journal_bytes_min};
use sawmill_volume::{
    OpenOptions, SteppedVolume, clone_in, delete_in, release_ancestors_in, rename_in,
};

use super::past::{STATES_KEPT_MAX, SavedImage};
use super::{NAME, ROUNDS_MAX, SeedRun, Verdict, journal_path};
use crate::client::Client;
use crate::oracle::payload;

/// Attachments until neither of the newest two checkpoints lists an ancestor, plus a spare one.
const FLATTEN_ROUNDS_MAX: u32 = 4;
const WRITE_BYTES: usize = 8 << 10;

impl SeedRun {
    /// Does something with a clone, chosen by chance.
    pub(super) fn act_on_clones(&mut self) -> Verdict {
        match self.dice.below(7) {
            0..2 => self.make_clone(),
            2..4 => self.write_to_clone(),
            4 => self.rename_clone(),
            5 => self.flatten_clone(),
            _ => self.delete_clone(),
        }
    }

    fn make_clone(&mut self) -> Verdict {
        if self.past.clones.len() >= STATES_KEPT_MAX {
            return Ok(());
        }
        let moment = if self.dice.one_in(4) { self.read_moment()? } else { None };
        let base = match moment {
            Some((cut, image)) => Some((NAME.into(), Some(cut), image)),
            None => self.any_kept(false),
        };
        let Some((base, cut, image)) = base else { return Ok(()) };
        let name = self.name("clone-");
        self.log("clone", || format!("  {name} is cloned from {base} at {cut:?}"));
        let (world, store) = self.faultless_process();
        clone_in(&*world, &*store, &base, cut.as_ref(), &name)
            .map_err(|error| format!("{base} at {cut:?} cannot be cloned: {error}"))?;
        self.story.clones += 1;
        self.past.clones.push(SavedImage { name, image });
        Ok(())
    }

    pub(super) fn delete_clone(&mut self) -> Verdict {
        if self.past.clones.is_empty() {
            return Ok(());
        }
        let index = self.dice.below(self.past.clones.len() as u64) as usize;
        let clone = self.past.clones.swap_remove(index);
        self.log("delete clone", || format!("  {} is deleted", clone.name));
        let (world, store) = self.faultless_process();
        delete_in(&*world, &*store, &clone.name)
            .map(drop)
            .map_err(|error| format!("{} cannot be deleted: {error}", clone.name))
    }

    /// One of the clones, by its index.
    fn any_clone(&mut self) -> Option<usize> {
        let count = self.past.clones.len() as u64;
        (count > 0).then(|| self.dice.below(count) as usize)
    }

    fn rename_clone(&mut self) -> Verdict {
        let Some(index) = self.any_clone() else { return Ok(()) };
        let (old, new) = (self.past.clones[index].name.clone(), self.name("renamed-"));
        self.log("rename", || format!("  {old} is renamed to {new}"));
        let (world, store) = self.faultless_process();
        rename_in(&*world, &*store, &old, &new)
            .map_err(|error| format!("{old} cannot be renamed: {error}"))?;
        self.past.clones[index].name = new;
        Ok(())
    }

    fn attach_clone(&mut self, name: &str) -> Result<SteppedVolume, String> {
        let (world, store) = self.faultless_process();
        let options = OpenOptions {
            journal_bytes: journal_bytes_min(self.settings.segment_bytes),
            staging_bytes: STAGING_BYTES_MIN,
            staging_folder: self.machines[0].staging.clone(),
            no_fencing: true,
            checkpoint_bytes: self.settings.checkpoint_bytes.min(32 << 10),
            uploads_max: 1,
            ..OpenOptions::new(journal_path())
        };
        SteppedVolume::open(world, store, name, &options)
            .map_err(|error| format!("{name} cannot be attached: {error}"))
    }

    fn close_clone(&mut self, mut stepped: SteppedVolume, name: &str) -> Verdict {
        stepped.begin_close();
        for _ in 0..ROUNDS_MAX {
            if stepped.is_settled() {
                break;
            }
            self.run_aside(&mut stepped);
        }
        stepped.finish_close().map_err(|error| format!("{name} cannot be closed: {error}"))
    }

    fn run_aside(&mut self, stepped: &mut SteppedVolume) {
        while stepped.step_journal() {}
        stepped.step_journal_quietly();
        stepped.step_engine(self.clock.now());
    }

    /// Attaches a clone, sometimes enlarges it, writes a little, and closes it.
    fn write_to_clone(&mut self) -> Verdict {
        let Some(index) = self.any_clone() else { return Ok(()) };
        let SavedImage { name, image } = &self.past.clones[index];
        let (name, mut image) = (name.clone(), image.to_vec());
        self.log("write to clone", || format!("  somebody writes to {name}"));
        let mut stepped = self.attach_clone(&name)?;
        if self.dice.one_in(4) {
            self.grow_clone(&mut stepped, &name)?;
        }
        let size_bytes = stepped.volume().geometry().size_bytes;
        let mut client = Client::default();
        for _ in 0..1 + self.dice.below(12) {
            let length = (1 + self.dice.below(12_000)).min(size_bytes);
            let address = self.dice.below(size_bytes - length + 1);
            self.stamp += 1;
            let bytes = payload(self.stamp, address, length);
            image[address as usize..][..length as usize].copy_from_slice(&bytes);
            client.write_blindly(stepped.volume(), address, bytes);
            self.run_aside(&mut stepped);
        }
        self.close_clone(stepped, &name)?;
        let image: Arc<[u8]> = image.into();
        self.past.clones[index].image = image.clone();
        self.judge(&name, None, &image)
    }

    fn grow_clone(&mut self, stepped: &mut SteppedVolume, name: &str) -> Verdict {
        let wanted = self.settings.size_bytes;
        let refused = |error| format!("{name} cannot grow to {wanted} bytes: {error}");
        let answer = stepped.volume().begin_grow(wanted).map_err(refused)?;
        for _ in 0..ROUNDS_MAX {
            self.run_aside(stepped);
            if let Ok(outcome) = answer.try_recv() {
                outcome.map_err(refused)?;
                let found = stepped.volume().geometry().size_bytes;
                return if found == wanted {
                    Ok(())
                } else {
                    Err(format!("{name} has {found} bytes"))
                };
            }
        }
        Err(format!("{name} does not grow"))
    }

    /// Flattens a clone, so that it needs no ancestor.
    fn flatten_clone(&mut self) -> Verdict {
        let Some(index) = self.any_clone() else { return Ok(()) };
        let SavedImage { name, image } = &self.past.clones[index];
        let (name, image) = (name.clone(), image.clone());
        self.log("flatten", || format!("  {name} is flattened"));
        for round in 0..FLATTEN_ROUNDS_MAX {
            let mut stepped = self.attach_clone(&name)?;
            let size_bytes = stepped.volume().geometry().size_bytes as usize;
            let mut client = Client::default();
            for (number, bytes) in image[..size_bytes].chunks(WRITE_BYTES).enumerate() {
                if round == 0 {
                    client.write_blindly(
                        stepped.volume(),
                        (number * WRITE_BYTES) as u64,
                        bytes.to_vec(),
                    );
                    self.run_aside(&mut stepped);
                }
            }
            self.close_clone(stepped, &name)?;
            let (world, store) = self.faultless_process();
            let released = release_ancestors_in(&*world, &*store, &name);
            if released.map_err(|error| format!("{name} does not let go: {error}"))? {
                self.story.flattened += 1;
                return self.judge(&name, None, &image);
            }
        }
        Err(format!("{name} needs its ancestors although all of it was written again"))
    }
}
