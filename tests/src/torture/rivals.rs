//! Two servers: one takes over while the other runs, is suspended and resumed, or is cut off from
//! its store; and two on one journal, by another path, a link, or without its lock file.
//!
//! What must hold: the winner has everything stored and keeps what it accepts; no write of the
//! loser after the fence is ever visible; the loser acknowledges no flush once it could know of the
//! fence, fails its door, and exits with that code. Of two servers on one journal the second is
//! refused.
//!
//! Not here: a hand-off, which the first server agrees to (`commands`); a second server on a copy
//! of the state (`copies`).

use std::fs;
use std::os::unix::fs::symlink;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use super::Torture;
use super::commits::Commits;
use super::volume::{Loss, NextAttach, Volume};
use crate::nbd::Client;
use crate::server::Server;
use crate::stamp::check_nothing_accepted_lost;
use crate::store::{self, StoreUnderTest};
use crate::test_bed::TestBed;

const FENCED: i32 = 6;
const IN_USE: i32 = 11;
/// A flush submitted this long after its server could reach its store again must not succeed: an
/// ownership check is valid for five seconds, a flush waits one second for a newer one, and this
/// machine may be busy.
const NOTICE_TIME_MAX: Duration = Duration::from_secs(9);
/// The same for a server that was cut off from its store, which has to try again first.
const NOTICE_AGAIN_TIME_MAX: Duration = Duration::from_secs(20);
/// By then its door must have failed.
const FAIL_TIME_MAX: Duration = Duration::from_secs(50);

/// What happens to the first server during the takeover.
#[derive(Clone, Copy, PartialEq, Eq)]
enum RivalFate {
    Used,
    Stopped,
    CutOff,
}

impl Torture {
    /// Ends the life of `first`.
    pub(super) fn rival(&mut self, volume: &mut Volume, first: Server, clients: &[Client]) {
        self.proxy.stop_faults();
        let (rival_store, meanwhile): (StoreUnderTest, _) = match volume.is_folder() {
            true => (
                store::folder(),
                [RivalFate::Used, RivalFate::Stopped][self.dice.below(2) as usize],
            ),
            false => {
                let all = [RivalFate::Used, RivalFate::Stopped, RivalFate::CutOff];
                (store::minio(), all[self.dice.below(3) as usize])
            }
        };
        self.report.did(match meanwhile {
            RivalFate::Used => "taken over while it is used",
            RivalFate::Stopped => "taken over while it is stopped",
            RivalFate::CutOff => "taken over while it is cut off",
        });
        let elsewhere = volume.bed.neighbor_by(&rival_store);
        let Some((second, since)) = self.take_over(volume, &elsewhere, &first, clients, meanwhile)
        else {
            return;
        };
        let winner = [second.connect()];
        let mut stale = volume.branch();
        // For a while it may show writes that it accepted and the winner never had.
        stale.forget();
        self.win(volume, &winner);
        self.until_fenced(volume, &mut stale, clients, since);
        self.win(volume, &winner);
        let ended = first.stop();
        if ended.code != Some(FENCED) {
            let what = format!("who was fenced ended with {:?}: {}", ended.code, ended.stderr);
            self.violation(volume, &what);
        }
        let Ok(image) = winner[0].read_all() else {
            return self.violation(volume, "the winner cannot be read");
        };
        match check_nothing_accepted_lost(&volume.commits.log, &image) {
            Ok(_) => volume.commits.observe_accepted(&image),
            Err(violation) => self.violation(volume, &format!("the winner: {violation}")),
        }
        self.leave_the_winner(volume, second, &image);
        // The first machine has a journal of an older epoch.
        volume.note_lost(Loss::Journal, NextAttach::MustRefuse);
    }

    /// Another machine takes the volume over with requests in flight at the first. Returns when the
    /// first could know.
    fn take_over(
        &mut self,
        volume: &mut Volume,
        elsewhere: &TestBed,
        first: &Server,
        clients: &[Client],
        meanwhile: RivalFate,
    ) -> Option<(Server, Instant)> {
        let is_long = self.dice.one_in(4) && meanwhile != RivalFate::Used;
        let proxy = self.proxy.clone();
        let serve = volume.serve_elsewhere(elsewhere).with(&["--accept-journal-loss"]);
        let (mut second, mut image) = (None, None);
        volume.commits.may_be_refused = true;
        let counts = volume.commits.drive(clients, 1 + self.dice.below(20), || {
            match meanwhile {
                RivalFate::Used => {}
                RivalFate::Stopped => first.signal(Signal::STOP),
                RivalFate::CutOff => proxy.shut(),
            }
            let began = Instant::now();
            let attempt = serve.attempt();
            image = attempt.as_ref().ok().and_then(|second| second.connect().read_all().ok());
            second = Some(attempt);
            if is_long {
                // Longer than an ownership check is valid.
                crate::machine::wait_for("a while is over", || {
                    (began.elapsed() > Duration::from_secs(6)).then_some(())
                });
            }
            first.signal(Signal::CONT);
            proxy.open();
        });
        volume.commits.may_be_refused = false;
        let since = match meanwhile {
            RivalFate::CutOff => Instant::now() + NOTICE_AGAIN_TIME_MAX,
            _ => Instant::now() + NOTICE_TIME_MAX,
        };
        self.note(volume, counts);
        let (second, image) = match (second, image) {
            (Some(Ok(second)), Some(image)) => (second, image),
            (Some(Err(ended)), _) => {
                self.violation(volume, &format!("no takeover: {:?}: {}", ended.code, ended.stderr));
                return None;
            }
            _ => {
                self.violation(volume, "the winner cannot be read");
                return None;
            }
        };
        if let Err(violation) = volume.judge_stored(&image) {
            self.violation(volume, &format!("at the takeover: {violation}"));
            return None;
        }
        volume.commits.observe_stored(&image);
        (volume.stored, volume.logged) = (0, 0);
        Some((second, since))
    }

    fn win(&mut self, volume: &mut Volume, clients: &[Client]) {
        let groups = 1 + self.dice.below(20);
        let counts = volume.commits.drive(clients, groups, || ());
        self.note(volume, counts);
    }

    /// Uses the fenced server until its door fails.
    fn until_fenced(
        &mut self,
        volume: &Volume,
        stale: &mut Commits,
        clients: &[Client],
        knows: Instant,
    ) {
        let deadline = Instant::now() + FAIL_TIME_MAX;
        stale.may_be_refused = true;
        loop {
            let counts = stale.drive(clients, 5, || ());
            let is_over = counts.refused > 0 || counts.writes + counts.commits + counts.reads == 0;
            let last_commit = counts.last_commit;
            self.note(volume, counts);
            if last_commit.is_some_and(|since| since > knows) {
                return self.violation(
                    volume,
                    "a flush was acknowledged by who could know that it is fenced",
                );
            }
            if is_over {
                return;
            }
            if Instant::now() > deadline {
                return self.violation(volume, "the door of who was fenced has not failed");
            }
        }
    }

    /// The volume returns from the winner's machine, after a clean end or not.
    fn leave_the_winner(&mut self, volume: &mut Volume, second: Server, image: &[u8]) {
        if self.dice.one_in(2) {
            self.report.did("winner's machine lost");
            second.kill();
            self.report.kills += 1;
            return;
        }
        let stopped = second.stop();
        if stopped.code != Some(0) {
            let what =
                format!("the winner: no orderly end: {:?}: {}", stopped.code, stopped.stderr);
            return self.violation(volume, &what);
        }
        volume.commits.observe_stored(image);
    }

    /// Starts a second server on the journal of a running one.
    pub(super) fn one_journal(&mut self, volume: &mut Volume) {
        self.proxy.stop_faults();
        let journal = volume.journal();
        let elsewhere = volume.bed.neighbor();
        let (name, path) = match self.dice.below(4) {
            0 => ("one journal by a symbolic link", elsewhere.path("link")),
            1 => ("one journal by a second name", journal.with_file_name("second")),
            2 => ("one journal by another path", volume.bed.path("state/../state")),
            _ => ("one journal without its lock file", journal.clone()),
        };
        let path = match name {
            "one journal by another path" => path
                .join(journal.strip_prefix(volume.bed.path("state")).expect("in the state folder")),
            _ => path,
        };
        match name {
            "one journal by a symbolic link" => symlink(&journal, &path).expect("room for a link"),
            "one journal by a second name" => {
                fs::hard_link(&journal, &path).expect("room for a link")
            }
            "one journal without its lock file" => {
                let mut lock = journal.clone().into_os_string();
                lock.push(".lock");
                fs::remove_file(lock).expect("its lock file");
            }
            _ => {}
        }
        self.report.did(name);
        let text = path.display().to_string();
        match volume.serve_elsewhere(&elsewhere).with(&["--journal", &text]).attempt() {
            Err(ended) if ended.code == Some(IN_USE) => {}
            Err(ended) => {
                self.violation(volume, &format!("{name}: {:?}: {}", ended.code, ended.stderr))
            }
            Ok(_) => self.violation(volume, &format!("{name}: a second server has it")),
        }
        if path != journal && name == "one journal by a second name" {
            fs::remove_file(&path).expect("a link of ours");
            let mut lock = path.into_os_string();
            lock.push(".lock");
            let _ = fs::remove_file(lock);
        }
        debug_assert_eq!(volume.loss, Loss::Nothing, "it was looked at");
    }
}
