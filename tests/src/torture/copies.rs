//! Copies: of a store, served beside the original; of an earlier store, restored while journal,
//! memory and cache survive; of the state folder of a running server.
//!
//! What must hold: each history shows only its own bytes, whatever the shared cache has; a restored
//! store is refused until the loss of the journal is accepted, and then is a cut of what it had; an
//! attach with a copy of a running server's state is refused.
//!
//! Not here: a store that is copied with puts in flight, which the simulation has (`crates/sim`).

use std::fs;

use super::Torture;
use super::life::REFUSED;
use super::volume::{AttachOptions, Backup, Loss, NextAttach, Volume, copy_folder};
use crate::stamp::{Verdict, Violation, check_nothing_accepted_lost};
use crate::test_bed::TestBed;

const BESIDE_THE_JOURNAL: &str = "state/memory";
/// Held by another process.
const IN_USE: i32 = 11;

impl Torture {
    /// A way to run in which the state folder is copied, sometimes with the memory in it.
    pub(super) fn copied_options(&mut self, volume: &Volume) -> Option<AttachOptions> {
        if self.dice.one_in(2) {
            return self.attach_options(volume);
        }
        fs::create_dir_all(volume.bed.path(BESIDE_THE_JOURNAL)).expect("room for a folder");
        Some(AttachOptions {
            staging: Some(volume.text(BESIDE_THE_JOURNAL)),
            ..AttachOptions::default()
        })
    }

    /// Copies the state folder of a running server, and starts another one on the copy.
    pub(super) fn state_copied(&mut self, volume: &mut Volume) {
        self.proxy.stop_faults();
        let elsewhere = volume.bed.neighbor();
        copy_folder(&volume.bed.path("state"), &elsewhere.path("state"));
        let mut serve = volume.serve_elsewhere(&elsewhere);
        let text = |name: &str| elsewhere.path(name).display().to_string();
        let (journal, memory) = (text("state/named/journal"), text(BESIDE_THE_JOURNAL));
        if fs::read_dir(&memory).is_ok_and(|mut files| files.next().is_some()) {
            serve = serve.with(&["--staging", &memory]);
            self.report.did("state folder copied with memory in it");
        }
        if volume.is_named {
            serve = serve.with(&["--journal", &journal]);
        }
        match serve.attempt() {
            Err(ended) if [Some(REFUSED), Some(IN_USE)].contains(&ended.code) => {
                self.report.did("state folder copied");
            }
            Err(ended) => {
                let what = format!("on a copied state folder: {:?}: {}", ended.code, ended.stderr);
                self.violation(volume, &what);
            }
            Ok(_) => self.violation(volume, "a copy of the state of a living server was taken"),
        }
    }

    /// Keeps a copy of the store the first time, and restores it the next.
    pub(super) fn store_put_back(&mut self, volume: &mut Volume) {
        let Some(backup) = volume.backup.take() else { return self.back_up(volume) };
        let store = volume.bed.store_folder().expect("the store is a folder").to_owned();
        fs::remove_dir_all(&store).expect("a folder of ours");
        fs::rename(&backup.folder, &store).expect("a folder of ours");
        self.report.did("store put back");
        volume.commits.log = volume.branch_of(&backup.log);
        volume.stored = backup.stored;
        volume.past.truncate(backup.past);
        volume.note_lost(Loss::Journal, NextAttach::MustRefuse);
        volume.was_put_back = true;
    }

    fn back_up(&mut self, volume: &mut Volume) {
        if self.dice.one_in(2) {
            // Then the volume in the copy counts as closed cleanly.
            self.snapshot(volume);
        }
        let store = volume.bed.store_folder().expect("the store is a folder").to_owned();
        let folder = volume.bed.path("backup");
        copy_folder(&store, &folder);
        self.report.did("store backed up");
        let (log, stored, past) = (volume.commits.log.clone(), volume.stored, volume.past.len());
        volume.backup = Some(Backup { folder, log, stored, past });
    }

    /// Copies the store at rest, and continues both histories, in turn and side by side.
    pub(super) fn store_copied(&mut self, volume: &mut Volume) {
        let store = volume.bed.store_folder().expect("the store is a folder").to_owned();
        let copy = volume.bed.path("copy");
        copy_folder(&store, &copy);
        self.report.did("store copied");
        let url = format!("file://{}/disk", copy.display());
        match volume.serve_beside(&url).attempt() {
            Err(ended) if ended.code == Some(REFUSED) => {}
            Err(ended) => {
                self.violation(
                    volume,
                    &format!("a copied store: {:?}: {}", ended.code, ended.stderr),
                );
            }
            Ok(_) => self.violation(volume, "a copied store was attached without its journal"),
        }
        let mut twin = volume.branch();
        let server = volume.serve_beside(&url).with(&["--accept-journal-loss"]).start();
        let client = server.connect();
        let image = client.read_all().expect("readable");
        if let Err(violation) = volume.judge_stored(&image) {
            return self.violation(volume, &format!("a copied store: {violation}"));
        }
        twin.observe_stored(&image);
        let counts = twin.drive(&[client], 1 + self.dice.below(30), || server.kill());
        self.note(volume, counts);
        // In turn: the original finds the cache that the copy used.
        let options = self.attach_options(volume).unwrap_or_default();
        let Some(original) = self.start(volume, &options) else { return };
        let client = original.connect();
        self.check_content(volume, &client);
        let counts = volume.commits.drive(&[client], 1 + self.dice.below(30), || ());
        self.note(volume, counts);
        // Side by side.
        let server = volume.serve_beside(&url).start();
        let client = server.connect();
        let image = client.read_all().expect("readable");
        if let Err(violation) = check_nothing_accepted_lost(&twin.log, &image) {
            return self.violation(volume, &format!("the copy of a store: {violation}"));
        }
        twin.observe_accepted(&image);
        let counts = twin.drive(&[client], 1 + self.dice.below(10), || ());
        self.note(volume, counts);
        let counts = volume
            .commits
            .drive(&[original.connect()], 1 + self.dice.below(10), || original.kill());
        self.note(volume, counts);
        let image = server.connect().read_all().expect("readable");
        if let Err(violation) = check_nothing_accepted_lost(&twin.log, &image) {
            self.violation(volume, &format!("the copy of a store: {violation}"));
        }
        let stopped = server.stop();
        if stopped.code != Some(0) {
            self.violation(
                volume,
                &format!("the copy of a store: no orderly end: {}", stopped.stderr),
            );
        }
        fs::remove_dir_all(&copy).expect("a folder of ours");
        forget_twin(&volume.bed, &volume.id);
    }

    /// The control: restores a store without the judge's knowledge. Returns the judge's result,
    /// which must be a violation.
    ///
    /// # Panics
    /// When the volume is not even a cut.
    pub fn plant_a_store_put_back(&mut self) -> Result<Verdict, Violation> {
        let mut volume = self.begin(true, "stored");
        for _ in 0..2 {
            let server = volume.serve(&AttachOptions::default()).start();
            volume.commits.drive(&[server.connect()], 20, || ());
            self.wait_stored(&mut volume);
            server.kill();
            if volume.backup.is_none() {
                self.store_put_back(&mut volume);
            }
        }
        let newer = (volume.commits.log.clone(), volume.stored);
        self.store_put_back(&mut volume);
        let server = volume.serve_as_it_is(&AttachOptions::default()).start();
        let image = server.connect().read_all().expect("readable");
        volume.judge(&image).expect("a cut of what was put back, when that is known");
        (volume.commits.log, volume.stored) = newer;
        volume.loss = Loss::Journal;
        volume.judge(&image)
    }

    /// The control: a copy of a store shows later writes to the original. The judge must detect it.
    ///
    /// # Panics
    /// When the original does not show it.
    pub fn plant_bytes_of_another_history(&mut self) -> Result<Verdict, Violation> {
        let mut volume = self.begin(true, "logged");
        let twin = volume.branch();
        let server = volume.serve(&AttachOptions::default()).start();
        volume.commits.drive(&[server.connect()], 5, || ());
        let image = server.connect().read_all().expect("readable");
        volume.judge(&image).expect("its own bytes");
        check_nothing_accepted_lost(&twin.log, &image)
    }
}

/// Removes the copy's own files below the state folder.
fn forget_twin(bed: &TestBed, id: &str) {
    for entry in fs::read_dir(bed.path("state/sawmill")).into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().starts_with(&format!("{id}-")) {
            fs::remove_dir_all(entry.path()).expect("a folder of ours");
        }
    }
}
