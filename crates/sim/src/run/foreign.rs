//! A machine's memory exists but is foreign: an older image from another attachment, another
//! volume's memory, or that of a copy of the store. It counts as lost: an attach must be refused
//! unless it accepts that loss.
//!
//! Not here: memory that is gone or damaged (`ends`).

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use sawmill_volume::{CreateOptions, OpenOptions, SteppedVolume, create_in};

use super::{JournalLoss, SeedRun, Verdict, journal_path};
use crate::death::Life;
use crate::disk::DiskFaults;
use crate::store::{SimBucket, SimStore, StoreFaults};
use crate::world::{MachineMedia, SimWorld};

/// Memory files as they were in an earlier life.
pub(super) struct Image {
    machine: usize,
    life: u64,
    files: Vec<(PathBuf, Vec<u8>)>,
}

fn files_in(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let mut files: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    files.sort();
    files
}

/// Creates a new file with that name, so that existing mappings of the old one stay intact.
fn put_file(path: &Path, bytes: &[u8]) -> Verdict {
    let _ = std::fs::remove_file(path);
    let written = std::fs::write(path, bytes)
        .and_then(|()| std::fs::set_permissions(path, Permissions::from_mode(0o600)));
    written.map_err(|error| format!("{}: {error}", path.display()))
}

impl SeedRun {
    /// Copies the memory of the attached process.
    pub(super) fn keep_memory(&mut self) {
        let Some(process) = &self.process else { return };
        if self.edges.memory.is_some() {
            return;
        }
        let machine = process.machine;
        let files = files_in(&self.machines[machine].staging).into_iter();
        let files =
            files.filter_map(|path| std::fs::read(&path).ok().map(|bytes| (path, bytes))).collect();
        self.edges.memory = Some(Image { machine, life: self.story.lives, files });
    }

    /// The process has died: gives the next one foreign memory.
    pub(super) fn exchange_memory(&mut self, machine: usize) -> Verdict {
        let files = files_in(&self.machines[machine].staging);
        let manner = self.edges.dice.below(3);
        let has_life_passed =
            |image: &Image| image.machine == machine && image.life < self.story.lives;
        let exchanged = match manner {
            0 if self.edges.memory.as_ref().is_some_and(has_life_passed) => {
                let Some(image) = self.edges.memory.take() else { return Ok(()) };
                // A memory file whose journal no longer exists belongs to no process.
                let kept = image.files.iter().filter(|(path, _)| files.contains(path));
                kept.map(|(path, bytes)| put_file(path, bytes).map(|()| 1))
                    .sum::<Result<usize, _>>()?
            }
            1 => self.put_memory_of_another_volume(machine, &files)?,
            _ => self.put_memory_of_a_copy(&files)?,
        };
        if exchanged > 0 {
            self.story.foreign_memories += 1;
            self.log("foreign memory", || {
                format!("machine {machine} has other memory, manner {manner}")
            });
            self.machines[machine].has_lost_memory = true;
        }
        Ok(())
    }

    fn put_memory_of_another_volume(
        &mut self,
        machine: usize,
        files: &[PathBuf],
    ) -> Result<usize, String> {
        let folder = self.edges.place.join("other");
        std::fs::create_dir_all(&folder).map_err(|error| error.to_string())?;
        let life = Arc::new(Life::default());
        let dice = &mut self.edges.dice;
        let (clock, trace) = (self.clock.clone(), self.trace.clone());
        // In the same boot: only the volume distinguishes the two.
        let media = MachineMedia::default().booted(self.machines[machine].media.boots());
        let world =
            SimWorld::new(clock, media, life.clone(), trace, DiskFaults::default(), dice.split(3));
        let (bucket, faults) = (Arc::<SimBucket>::default(), StoreFaults::default());
        let store = SimStore::new(bucket, life.clone(), self.trace.clone(), faults, dice.split(4));
        let created = CreateOptions {
            block_bytes: 512,
            segment_bytes: self.settings.segment_bytes,
            ..CreateOptions::new(16 << 10)
        };
        create_in(&world, &store, "other", &created).map_err(|error| format!("create: {error}"))?;
        let options = OpenOptions {
            journal_path: journal_path(),
            staging_folder: folder.clone(),
            cache: None,
            ..self.options(machine, JournalLoss::Refused)
        };
        let opened = SteppedVolume::open(Arc::new(world), Arc::new(store), "other", &options);
        let stepped = opened.map_err(|error| format!("another volume is not attached: {error}"))?;
        life.die();
        drop(stepped);
        let count = put_first(&folder, files)?;
        std::fs::remove_dir_all(&folder).map_err(|error| error.to_string())?;
        Ok(count)
    }

    fn put_memory_of_a_copy(&mut self, files: &[PathBuf]) -> Result<usize, String> {
        let folder = self.edges.histories.folder.clone();
        put_first(&folder, files)
    }
}

/// Replaces all of these files by the first file of a folder; returns how many.
fn put_first(folder: &Path, files: &[PathBuf]) -> Result<usize, String> {
    let Some(first) = files_in(folder).into_iter().next() else { return Ok(0) };
    let bytes = std::fs::read(&first).map_err(|error| error.to_string())?;
    files.iter().map(|path| put_file(path, &bytes).map(|()| 1)).sum()
}
