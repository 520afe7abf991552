//! A second store: a copier that works beside the writing process, dies anywhere and is restarted;
//! readers of the replica meanwhile; its promotion while the primary lives; and the fail-back.
//!
//! Invariants checked: the replica can always be opened and is a prefix that never shrinks. A
//! promoted volume stays what the replica was, whatever lands late, and no copier changes it. After
//! a fail-back the first store has the second's content alone.

use std::sync::Arc;

use sawmill_device::{BlockDevice, ErrorKind};
use sawmill_volume::replicate::{Copier, CopyOptions, VolumeAt, promote};
use sawmill_volume::{OpenOptions, SteppedVolume};

use super::{JournalLoss, NAME, ROUNDS_MAX, SeedRun, Verdict, journal_path};
use crate::client::Client;
use crate::death::{Life, live};
use crate::disk::DiskFaults;
use crate::oracle::payload;
use crate::store::{SimBucket, SimStore, StoreFaults};
use crate::world::{MachineMedia, SimWorld};

/// A process of the copier or of a promoter: a world and both stores.
struct CopierProcess {
    life: Arc<Life>,
    world: SimWorld,
    first: SimStore,
    second: SimStore,
}

fn copy_back(copier_process: &CopierProcess) -> Result<(), (ErrorKind, String)> {
    let error_parts = |error: sawmill_volume::Error| (error.kind(), error.to_string());
    let options = CopyOptions { fail_back: true, ..CopyOptions::default() };
    let (from, to) =
        (VolumeAt::new(&copier_process.second, NAME), VolumeAt::new(&copier_process.first, NAME));
    let mut copier =
        Copier::begin(&copier_process.world, from, to, &options).map_err(error_parts)?;
    copier.round(&mut |_| ()).map(drop).map_err(error_parts)
}

impl SeedRun {
    fn faults_of(&self, is_troubled: bool) -> StoreFaults {
        if is_troubled { self.settings.store } else { StoreFaults::default() }
    }

    fn copier_process(&mut self, is_troubled: bool) -> CopierProcess {
        let life = Arc::new(Life::default());
        let faults = self.faults_of(is_troubled);
        let mut store = |bucket: &Arc<SimBucket>, salt| {
            let dice = self.dice.split(salt);
            SimStore::new(bucket.clone(), life.clone(), self.trace.clone(), faults, dice)
        };
        let (first, second) = (store(&self.bucket, 10), store(&self.second, 11));
        let (clock, trace, dice) = (self.clock.clone(), self.trace.clone(), self.dice.split(12));
        let world = SimWorld::new(
            clock,
            MachineMedia::default(),
            life.clone(),
            trace,
            DiskFaults::default(),
            dice,
        );
        CopierProcess { life, world, first, second }
    }

    /// A copier does a round beside the writing process, and may die in it. Then the replica is
    /// checked.
    pub(super) fn copy(&mut self) -> Verdict {
        let copier_process = self.copier_process(true);
        if self.dice.one_in(2) {
            copier_process.life.dies_after(1 + self.dice.below(80));
        }
        self.log("copy", || "a copier begins a round".into());
        let mut verdict = Ok(());
        let outcome = live(|| self.copy_with(&copier_process, &mut verdict));
        copier_process.life.die();
        verdict?;
        self.story.copies += u64::from(matches!(outcome, Some(Ok(()))));
        self.log("copied", || format!("  the copier: {outcome:?}"));
        if self.dice.one_in(2) {
            self.land_late_at_second();
        }
        self.check_second()
    }

    fn copy_with(
        &mut self,
        copier_process: &CopierProcess,
        verdict: &mut Verdict,
    ) -> Result<(), (ErrorKind, String)> {
        let error_parts = |error: sawmill_volume::Error| (error.kind(), error.to_string());
        let options = CopyOptions::default();
        let (from, to) = (
            VolumeAt::new(&copier_process.first, NAME),
            VolumeAt::new(&copier_process.second, NAME),
        );
        let mut copier =
            Copier::begin(&copier_process.world, from, to, &options).map_err(error_parts)?;
        for _ in 0..2 {
            let round = copier.round(&mut |_| {
                for _ in 0..self.dice.below(5) {
                    let step_verdict = self.step_beside();
                    if verdict.is_ok() {
                        *verdict = step_verdict;
                    }
                }
            });
            round.map_err(error_parts)?;
        }
        Ok(())
    }

    /// The writing process takes a step while the copier copies.
    fn step_beside(&mut self) -> Verdict {
        let Some(mut process) = self.process.take() else { return Ok(()) };
        let mut verdict = Ok(());
        if !process.life.is_dead() {
            match live(|| self.step(&mut process)) {
                Some(stepped) if !process.life.is_dead() => {
                    verdict = stepped.and_then(|()| self.receive_answers(&mut process));
                }
                _ => process.life.die(),
            }
        }
        self.process = Some(process);
        verdict
    }

    fn land_late_at_second(&mut self) {
        let late = self.second.late() as u64;
        if late > 0 {
            let index = self.dice.below(late) as usize;
            self.second.land(index, &self.trace);
        }
    }

    /// Checks that the replica, once it has its name, is a prefix with all that it had before.
    fn check_second(&mut self) -> Verdict {
        if !self.second.objects().keys().any(|key| key.starts_with("names/")) {
            return Ok(());
        }
        let found = self.read_second()?;
        self.copied = self
            .oracle
            .check_replica(self.copied, &found)
            .map_err(|text| format!("replica: {text}"))?;
        let copied = self.copied;
        self.log("replica", || format!("  the replica has {copied} operations"));
        if self.dice.one_in(4) { self.refuse_writer() } else { Ok(()) }
    }

    /// Checks that a replica refuses writers.
    fn refuse_writer(&mut self) -> Verdict {
        let copier_process = self.copier_process(false);
        let options = self.options(0, JournalLoss::Accepted);
        match SteppedVolume::open(
            Arc::new(copier_process.world),
            Arc::new(copier_process.second),
            NAME,
            &options,
        ) {
            Err(error) if error.kind() == ErrorKind::Refused => Ok(()),
            Err(error) => Err(format!("a writer of the replica hears: {error}")),
            Ok(_) => Err("the replica was attached for writing".into()),
        }
    }

    fn read_second(&mut self) -> Result<Vec<u8>, String> {
        let copier_process = self.copier_process(false);
        let store = Arc::new(copier_process.second);
        let mut options = OpenOptions::new(journal_path());
        options.read_only = true;
        let mut stepped =
            SteppedVolume::open(Arc::new(copier_process.world), store.clone(), NAME, &options)
                .map_err(|error| format!("the replica cannot be opened: {error}"))?;
        self.read_through(&mut stepped, &store)
    }

    fn read_through(
        &mut self,
        stepped: &mut SteppedVolume,
        store: &SimStore,
    ) -> Result<Vec<u8>, String> {
        let mut client = Client::default();
        client.read_whole(stepped.volume());
        for _ in 0..ROUNDS_MAX {
            if let Some(found) = client.padded_answer(self.settings.size_bytes) {
                return found;
            }
            stepped.step_engine(self.clock.now());
            for _ in 0..store.waiting() {
                store.happen(0);
            }
        }
        Err("who reads the replica gets no answer".into())
    }

    /// The replica is promoted while the primary lives, by promoters that may die; late calls take
    /// effect; a copier meets it. Its content stays that of the replica.
    pub(super) fn promote_second(&mut self) -> Verdict {
        self.check_second()?;
        if !self.second.objects().keys().any(|key| key.starts_with("names/")) {
            return Ok(());
        }
        for attempt in 0..3 {
            let is_last = attempt == 2;
            let copier_process = self.copier_process(!is_last);
            // A replica's checkpoints skip numbers: promotions rely on the list (decision 0015).
            copier_process
                .second
                .set_faults(StoreFaults { lag_odds: 0, ..self.faults_of(!is_last) });
            if !is_last {
                copier_process.life.dies_after(1 + self.dice.below(40));
            }
            let outcome =
                live(|| promote(&copier_process.world, &copier_process.second, NAME).map(drop));
            copier_process.life.die();
            self.log("promoted", || format!("somebody promotes the replica: {outcome:?}"));
            let is_done =
                matches!(&outcome, Some(Err(error)) if error.kind() == ErrorKind::Refused);
            if is_last && !is_done && !matches!(outcome, Some(Ok(()))) {
                return Err(format!("the replica cannot be promoted: {outcome:?}"));
            }
        }
        self.story.promotions += 1;
        let before = self.read_second()?;
        self.oracle
            .check_replica(self.copied, &before)
            .map_err(|text| format!("promoted: {text}"))?;
        while self.second.late() > 0 {
            self.land_late_at_second();
        }
        let copier_process = self.copier_process(false);
        let mut verdict = Ok(());
        let copied = self.copy_with(&copier_process, &mut verdict);
        copier_process.life.die();
        verdict?;
        if !matches!(&copied, Err((ErrorKind::Refused | ErrorKind::Fenced, _))) {
            return Err(format!("a copier goes on although the replica was promoted: {copied:?}"));
        }
        self.attach_at_second(before)
    }

    /// Attaches the promoted volume, checks that it holds the same, writes to it, and closes it.
    fn attach_at_second(&mut self, mut image: Vec<u8>) -> Verdict {
        let copier_process = self.copier_process(false);
        let store = Arc::new(copier_process.second);
        let options = self.options(0, JournalLoss::Refused);
        let mut stepped =
            SteppedVolume::open(Arc::new(copier_process.world), store.clone(), NAME, &options)
                .map_err(|error| format!("the promoted volume cannot be attached: {error}"))?;
        store.set_at_once(false);
        let found = self.read_through(&mut stepped, &store)?;
        if found != image {
            return Err("the promoted volume changed by itself".into());
        }
        let size_bytes = stepped.volume().geometry().size_bytes;
        let mut client = Client::default();
        for _ in 0..self.dice.below(6) {
            let length = (1 + self.dice.below(9_000)).min(size_bytes);
            let address = self.dice.below(size_bytes - length + 1);
            self.stamp += 1;
            let bytes = payload(self.stamp, address, length);
            image[address as usize..][..length as usize].copy_from_slice(&bytes);
            client.write_blindly(stepped.volume(), address, bytes);
        }
        stepped.begin_close();
        for _ in 0..ROUNDS_MAX {
            while stepped.step_journal() {}
            stepped.step_journal_quietly();
            stepped.step_engine(self.clock.now());
            for _ in 0..store.waiting() {
                store.happen(0);
            }
            self.clock.pass(20_000);
            if stepped.is_settled() {
                self.promoted = Some(image);
                return stepped
                    .finish_close()
                    .map_err(|error| format!("the promoted volume: {error}"));
            }
        }
        Err("closing the promoted volume does not end".into())
    }

    /// The first store becomes a replica of the promoted volume, by copiers that may die, and is
    /// then promoted.
    pub(super) fn fail_back(&mut self) -> Verdict {
        let Some(image) = self.promoted.take() else { return Ok(()) };
        // A fail-back puts objects that the old primary had deleted, under the same names. So its
        // writers must be known dead, with no call in flight, before the last copier ends (as the
        // guide says): their late puts may take effect at any time, their late deletes only until
        // then.
        let deletes = self.bucket.late_deletes();
        for attempt in 0..4 {
            let is_last = attempt == 3;
            if is_last {
                self.bucket.land_deletes(&deletes, &self.trace);
            }
            let copier_process = self.copier_process(!is_last);
            if !is_last {
                copier_process.life.dies_after(1 + self.dice.below(120));
            }
            let outcome = live(|| copy_back(&copier_process));
            copier_process.life.die();
            self.log("copied back", || format!("a copier to the first store: {outcome:?}"));
            if is_last && !matches!(outcome, Some(Ok(()))) {
                return Err(format!("the first store cannot be made a replica: {outcome:?}"));
            }
            self.land_late();
        }
        self.judge_first_store(&image)?;
        let copier_process = self.copier_process(false);
        promote(&copier_process.world, &copier_process.first, NAME)
            .map_err(|error| format!("promoted back: {error}"))?;
        while self.bucket.late() > 0 {
            self.land_late();
        }
        self.story.fail_backs += 1;
        self.judge_first_store(&image)
    }

    fn judge_first_store(&mut self, image: &[u8]) -> Verdict {
        self.judge(NAME, None, image).map_err(|text| format!("after the fail-back: {text}"))
    }
}
