//! One life of a volume: a start, perhaps after one that died, a check of every byte, a load, a
//! action, a death.
//!
//! Invariants: without faults a start succeeds or is refused, with its exit code, exactly as it
//! must. After each check the log has the volume's content, and the loss is settled.

use rustix::process::Signal;

use super::commits::{LoadCounts, SESSIONS_MAX};
use super::volume::{AttachOptions, Loss, NextAttach, Volume, digest};
use super::{Action, Torture};
use crate::nbd::{Client, Failure};
use crate::proxy::FaultRates;
use crate::server::Server;
use crate::stamp::Verdict;
use crate::test_bed::CommandOutput;
use sawmill_testkit::Dice;

/// The exit code of an attach that could hide a loss.
pub(super) const REFUSED: i32 = 5;

impl Torture {
    pub(super) fn life(&mut self, volume: &mut Volume, action: Action) {
        self.choose_faults();
        let options = match action {
            Action::Contained => self.contained(volume),
            Action::WrongClock => self.wrong_clock(volume),
            Action::StateCopied => self.copied_options(volume),
            _ => self.attach_options(volume),
        };
        let Some(options) = options else { return };
        if action != Action::Contained && self.dice.one_in(5) {
            volume.serve_as_it_is(&options).die_while_starting(&mut self.dice);
            self.report.kills += 1;
            // The attach may have continued with the loss.
            volume.must_refuse = false;
        }
        let Some(mut server) = self.start(volume, &options) else { return };
        self.report.lives += 1;
        let sessions = 1 + self.dice.below(SESSIONS_MAX as u64);
        let clients: Vec<Client> = (0..sessions).map(|_| server.connect()).collect();
        self.check_content(volume, &clients[0]);
        if self.dice.one_in(3) {
            let groups = 1 + self.dice.below(30);
            let counts = volume.commits.drive(&clients, groups, || ());
            self.note(volume, counts);
            self.wait_stored(volume);
            self.keep_a_moment(volume, &clients[0]);
        }
        self.outage(volume, &clients);
        match action {
            Action::HandOff => self.hand_off(volume, &mut server, &clients),
            Action::OneJournal => self.one_journal(volume),
            Action::StateCopied => self.state_copied(volume),
            Action::Rival => return self.rival(volume, server, &clients),
            Action::Contained => return self.end_contained(volume, server, &clients),
            _ => {}
        }
        // The checks after these actions require a volume that was not closed.
        let is_open = [Action::MemoryLost, Action::StoreCopied].contains(&action);
        volume.may_be_clean = !is_open && self.dice.one_in(6);
        self.load_and_kill(volume, server, &clients);
        drop(clients);
        if self.report.violations.is_empty() {
            self.between(volume, action);
        }
    }

    /// Does an action while no process serves the volume.
    fn between(&mut self, volume: &mut Volume, action: Action) {
        match action {
            Action::JournalLost => self.lose_the_journal(volume),
            Action::MemoryLost => self.lose_memory(volume),
            Action::AtRest => self.commands_at_rest(volume),
            Action::StoreCopied => self.store_copied(volume),
            Action::StorePutBack => self.store_put_back(volume),
            Action::WrongClock => self.after_a_wrong_clock(volume),
            _ => {}
        }
        if self.dice.one_in(3) && self.report.violations.is_empty() {
            self.check(volume);
            self.check_past(volume, 1);
        }
    }

    fn choose_faults(&mut self) {
        if self.dice.one_in(4) {
            self.proxy.stop_faults();
        } else {
            let fault_once_in = 3 + self.dice.below(30);
            self.proxy
                .inject_by_chance(FaultRates { dice: Dice::new(self.dice.word()), fault_once_in });
        }
    }

    /// A user's way to run: memory at a given place, or at the default one.
    pub(super) fn attach_options(&mut self, volume: &Volume) -> Option<AttachOptions> {
        let staging = self.dice.one_in(2).then(|| volume.bed.memory().display().to_string());
        Some(AttachOptions { staging, ..AttachOptions::default() })
    }

    /// With faults of the store a start may give up; without it must not.
    pub(super) fn start(&mut self, volume: &mut Volume, options: &AttachOptions) -> Option<Server> {
        if volume.must_refuse && !self.is_refused(volume, options) {
            return None;
        }
        match volume.serve_as_it_is(options).attempt() {
            Ok(server) => return Some(server),
            Err(refused) => self.refused_start(&refused),
        }
        self.proxy.stop_faults();
        match volume.serve_as_it_is(options).attempt() {
            Ok(server) => Some(server),
            Err(ended) => {
                self.violation(
                    volume,
                    &format!("does not open: {:?}: {}", ended.code, ended.stderr),
                );
                None
            }
        }
    }

    fn refused_start(&mut self, refused: &CommandOutput) {
        *self.report.refused_starts.entry(refused.code.unwrap_or(-1)).or_default() += 1;
        if refused.code == Some(REFUSED) {
            let message = refused.stderr.lines().last().unwrap_or_default();
            self.report.refusals.push(format!("life {}: {message}", self.report.lives));
        }
    }

    /// Something is lost: an attach without the flag for it must be refused.
    fn is_refused(&mut self, volume: &Volume, options: &AttachOptions) -> bool {
        let flag = if volume.loss == Loss::Memory {
            "--accept-memory-loss"
        } else {
            "--accept-journal-loss"
        };
        for is_faultless in [false, true] {
            if is_faultless {
                self.proxy.stop_faults();
            }
            match volume.serve(options).attempt() {
                Ok(server) => {
                    server.kill();
                    self.violation(
                        volume,
                        &format!("attached without a word; {flag} was to be asked for"),
                    );
                    return false;
                }
                Err(ended) if ended.code == Some(REFUSED) && ended.stderr.contains(flag) => {
                    self.report.did(if volume.loss == Loss::Memory {
                        "attach refused for lost memory"
                    } else {
                        "attach refused for a foreign journal"
                    });
                    return true;
                }
                Err(ended) if !is_faultless => self.refused_start(&ended),
                Err(ended) => self.violation(
                    volume,
                    &format!("{flag} was to be asked for: {:?}: {}", ended.code, ended.stderr),
                ),
            }
        }
        false
    }

    /// Judges every byte, and continues from there.
    pub(super) fn check_content(&mut self, volume: &mut Volume, client: &Client) {
        let mut image = client.read_all();
        if let Err(Failure::Errno(_)) = image {
            self.report.counts.read_errors += 1;
            self.proxy.stop_faults();
            image = client.read_all();
        }
        let Ok(image) = image else {
            return self.violation(volume, "the volume cannot be read although the store is well");
        };
        match volume.judge(&image) {
            Ok(Verdict { kept, lost, demanded }) => {
                self.report.verdict.kept += kept;
                self.report.verdict.lost += lost;
                self.report.verdict.demanded += demanded;
            }
            Err(violation) => return self.violation(volume, &violation.to_string()),
        }
        for saved_state in volume.past.iter_mut().filter(|saved_state| saved_state.digest.is_none())
        {
            // The volume may have grown since.
            saved_state.digest = image.get(..saved_state.size_bytes as usize).map(digest);
        }
        if volume.loss == Loss::Memory {
            // From here on the current content counts as stored: the store must have it.
            self.proxy.stop_faults();
            self.wait_stored(volume);
        }
        // Without its journal, a volume has only what the store has.
        match volume.loss {
            Loss::Nothing => volume.commits.observe_accepted(&image),
            _ => volume.commits.observe_stored(&image),
        }
        if volume.loss != Loss::Nothing {
            volume.stored = 0;
        }
        volume.logged = volume.commits.log.clock.tick();
        volume.loss_is_settled();
    }

    pub(super) fn wait_stored(&mut self, volume: &mut Volume) {
        let moment = volume.commits.log.clock.tick();
        let waited = volume.bed.sawmill(&["wait", "disk", "--stored", "--timeout", "50s"]);
        if waited.code == Some(0) {
            volume.stored = moment;
        } else {
            self.violation(volume, &format!("never stored: {}", waited.stderr));
        }
    }

    /// Sometimes the store is unreachable during a short load. A flush that goes to the store would
    /// wait forever.
    fn outage(&mut self, volume: &mut Volume, clients: &[Client]) {
        if volume.flush == "logged" && !volume.is_folder() && self.dice.one_in(6) {
            self.proxy.shut();
            let proxy = &self.proxy;
            let counts = volume.commits.drive_beside(clients, 10, || proxy.open(), || ());
            self.proxy.open();
            self.note(volume, counts);
        }
    }

    pub(super) fn load_and_kill(
        &mut self,
        volume: &mut Volume,
        mut server: Server,
        clients: &[Client],
    ) {
        let groups = 1 + self.dice.below(60);
        let may_be_clean = volume.may_be_clean;
        let mut ended = None;
        let counts = volume.commits.drive(clients, groups, || {
            if !server.is_running() {
                ended = Some(server.stderr());
            }
            if may_be_clean {
                server.signal(Signal::TERM);
            }
            server.kill();
        });
        self.report.kills += 1;
        if may_be_clean {
            self.report.did("stopped, and killed at once");
        }
        self.note(volume, counts);
        if let Some(message) = ended {
            self.violation(volume, &format!("the server ended by itself: {message}"));
        }
    }

    fn lose_the_journal(&mut self, volume: &mut Volume) {
        volume.note_lost(Loss::Journal, NextAttach::MayPass);
        match self.dice.below(3) {
            0 => {
                volume.lose_state();
                self.report.did("journal and memory gone");
            }
            1 => {
                volume.each_journal(|path| std::fs::remove_file(path));
                self.report.did("journal deleted");
            }
            _ => {
                volume.each_journal(|path| std::fs::write(path, ""));
                self.report.did("journal emptied");
            }
        }
    }

    /// A clean end: another machine finds every byte in the store.
    pub(super) fn end(&mut self, volume: &mut Volume) {
        self.proxy.stop_faults();
        let options = self.attach_options(volume).unwrap_or_default();
        let Some(server) = self.start(volume, &options) else { return };
        let client = server.connect();
        self.check_content(volume, &client);
        let image = client.read_all();
        let stopped = server.stop();
        if stopped.code != Some(0) {
            return self.violation(
                volume,
                &format!("no orderly end: {:?}: {}", stopped.code, stopped.stderr),
            );
        }
        self.proxy.deliver_late();
        let elsewhere = volume.bed.neighbor();
        let server = elsewhere.serve("disk").start();
        if server.connect().read_all() != image {
            self.violation(volume, "the store has another state than its writer had");
        }
        let stopped = server.stop();
        if stopped.code != Some(0) {
            self.violation(volume, &format!("no orderly end elsewhere: {}", stopped.stderr));
        }
        let all = volume.past.len() as u64;
        self.check_past(volume, all.min(4));
        self.check(volume);
        self.report.faults = self.proxy.counts();
    }

    pub(super) fn note(&mut self, volume: &Volume, counts: LoadCounts) {
        let sum = &mut self.report.counts;
        sum.writes += counts.writes;
        sum.commits += counts.commits;
        sum.reads += counts.reads;
        sum.read_errors += counts.read_errors;
        sum.refused += counts.refused;
        for wrong in counts.violations {
            self.violation(volume, &wrong);
        }
    }
}
