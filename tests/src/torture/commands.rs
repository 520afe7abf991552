//! What users do to a volume besides serving it: commands between two lives, of which some are
//! killed, reads of the past, a check, a planned hand-off under load.
//!
//! What must hold: a command at rest finds journal and memory that a killed server left, and loses
//! nothing; a snapshot and a stored moment stay what they were, byte for byte; `check` finds no
//! damage while nothing was damaged; no client notices a hand-off.
//!
//! Not here: a server that is taken over without its consent (`rivals`).

use super::Torture;
use super::volume::{SavedState, VOLUME_BYTES, Volume, digest};
use crate::machine;
use crate::nbd::Client;
use crate::server::Server;

/// The volume grows by a mebibyte at a time up to this size.
const GROWN_BYTES_MAX: u64 = VOLUME_BYTES + (8 << 20);
/// A command is killed within this.
const KILL_DELAY_US_MAX: u64 = 150_000;

impl Torture {
    pub(super) fn commands_at_rest(&mut self, volume: &mut Volume) {
        self.proxy.stop_faults();
        for _ in 0..=self.dice.below(3) {
            if !self.report.violations.is_empty() {
                return;
            }
            match self.dice.below(6) {
                0 | 1 => self.snapshot(volume),
                2 => self.at_rest(volume, "set at rest", &["set", "disk", "--retention", "24h"]),
                3 => {
                    let share = ["0.5", "0.7", "1"][self.dice.below(3) as usize];
                    self.at_rest(volume, "gc at rest", &["gc", "disk", "--threshold", share]);
                }
                4 => self.grow(volume),
                _ => {
                    self.only_looks(volume, "info at rest", &["info", "disk", "--json"]);
                    self.only_looks(volume, "snapshot list at rest", &["snapshot", "list", "disk"]);
                }
            }
        }
    }

    /// Takes a snapshot; the next check of the volume shows what it must hold.
    pub(super) fn snapshot(&mut self, volume: &mut Volume) {
        let name = volume.next_snapshot();
        self.at_rest(volume, "snapshot at rest", &["snapshot", "create", "disk", &name]);
        let size_bytes = volume.commits.size_bytes();
        volume.past.push(SavedState { state: name, size_bytes, digest: None });
    }

    fn grow(&mut self, volume: &mut Volume) {
        let size_bytes = volume.commits.size_bytes() + (1 << 20);
        if size_bytes <= GROWN_BYTES_MAX {
            self.at_rest(volume, "grown at rest", &["resize", "disk", &size_bytes.to_string()]);
            volume.commits.grow(size_bytes);
        }
    }

    /// Runs a command that attaches the volume; sometimes the same kind is killed first.
    fn at_rest(&mut self, volume: &mut Volume, name: &'static str, words: &[&str]) {
        let journal = volume.journal_option();
        let words: Vec<&str> =
            words.iter().copied().chain(journal.iter().map(String::as_str)).collect();
        if self.dice.one_in(4) {
            let mut killed = words.clone();
            let other = volume.next_snapshot();
            // A snapshot or size that it leaves would block the same command.
            match killed[0] {
                "snapshot" => killed[3] = &other,
                "resize" => killed = ["gc", "disk", "--threshold", "1"].to_vec(),
                _ => {}
            }
            let within = self.dice.below(KILL_DELAY_US_MAX);
            machine::kill_after(
                volume.bed.command(&killed),
                std::time::Duration::from_micros(within),
            );
            self.report.did("command at rest killed");
        }
        let moment = volume.commits.log.clock.tick();
        let done = volume.bed.sawmill(&words);
        if done.code == Some(0) {
            self.report.did(name);
            // It released the volume with everything stored. One that was killed before it may have
            // left memory in a second folder.
            volume.stored = moment;
            volume.may_be_clean = true;
        } else {
            self.violation(volume, &format!("`{}`: {:?}: {}", done.line, done.code, done.stderr));
        }
    }

    fn only_looks(&mut self, volume: &Volume, name: &'static str, words: &[&str]) {
        let done = volume.bed.sawmill(words);
        self.report.did(name);
        if done.code != Some(0) {
            self.violation(volume, &format!("`{}`: {:?}: {}", done.line, done.code, done.stderr));
        }
    }

    /// Nothing was damaged.
    pub(super) fn check(&mut self, volume: &Volume) {
        self.proxy.stop_faults();
        let done = volume.bed.sawmill(&["check", "disk"]);
        self.report.did("check");
        if done.code != Some(0) {
            let what = format!("`check` says {:?}: {}{}", done.code, done.stdout, done.stderr);
            self.violation(volume, &what);
        }
    }

    /// Everything accepted is stored now, and there are no writes: with a retention, this is a
    /// moment.
    pub(super) fn keep_a_moment(&mut self, volume: &mut Volume, client: &Client) {
        if !volume.is_folder() {
            return;
        }
        let log = volume.bed.sawmill(&["log", "disk", "--json"]).into_ok().unwrap_or_default();
        let log: serde_json::Value = serde_json::from_str(&log).unwrap_or_default();
        let (Some(position), Ok(image)) = (log["position"].as_u64(), client.read_all()) else {
            return self.violation(volume, "neither its log nor its bytes can be read");
        };
        self.report.did("moment noted");
        let (state, size_bytes) = (format!("position:{position}"), volume.commits.size_bytes());
        volume.past.push(SavedState { state, size_bytes, digest: Some(digest(&image)) });
    }

    /// Looks at `count` states of the past, chosen by chance.
    pub(super) fn check_past(&mut self, volume: &mut Volume, count: u64) {
        for _ in 0..count {
            let moments: Vec<SavedState> =
                volume.past.iter().filter(|moment| moment.digest.is_some()).cloned().collect();
            if moments.is_empty() || !self.report.violations.is_empty() {
                return;
            }
            let moment = &moments[self.dice.below(moments.len() as u64) as usize];
            self.proxy.stop_faults();
            let name = format!("disk@{}", moment.state);
            match volume.serve_beside(&name).with(&["--read-only"]).attempt() {
                Ok(server) => {
                    let image = server.connect().read_all();
                    self.report.did("look at the past");
                    let is_same = image.as_ref().is_ok_and(|image| {
                        image.len() as u64 == moment.size_bytes
                            && Some(digest(image)) == moment.digest
                    });
                    if !is_same {
                        let size_bytes = image.map(|image| image.len());
                        let what = format!(
                            "{name} is not what it was; it has {size_bytes:?} bytes: {moment:?}"
                        );
                        self.violation(volume, &what);
                    }
                }
                Err(ended) => {
                    let what = format!("{name} cannot be had: {:?}: {}", ended.code, ended.stderr);
                    self.violation(volume, &what);
                }
            }
        }
    }

    /// Replaces the server under load; sometimes its memory is lost before.
    pub(super) fn hand_off(
        &mut self,
        volume: &mut Volume,
        server: &mut Server,
        clients: &[Client],
    ) {
        self.proxy.stop_faults();
        let is_memory_gone = self.dice.one_in(3);
        for _ in 0..=self.dice.below(2) {
            if is_memory_gone {
                volume.forget_memory();
            }
            let groups = 1 + self.dice.below(20);
            let (bed, mut output) = (&volume.bed, None);
            let words = ["handoff", "disk", "--json", "--timeout", "60s", "--stall-max", "30s"];
            let counts =
                volume.commits.drive(clients, groups, || output = Some(bed.sawmill(&words)));
            self.note(volume, counts);
            let Some(output) = output else { return };
            match output.code {
                Some(0) => {
                    self.report.did(match (is_memory_gone, volume.is_named) {
                        (true, _) => "hand-off without the memory of before",
                        (false, true) => "hand-off of named files",
                        (false, false) => "hand-off",
                    });
                    server.follow(&output.json());
                }
                _ if is_memory_gone && server.is_running() => {
                    self.report.did("hand-off taken back")
                }
                code => {
                    return self
                        .violation(volume, &format!("no hand-off: {code:?}: {}", output.stderr));
                }
            }
        }
    }
}
