//! The long torture: a database-like load on the real server, on a real S3 server behind the fault proxy;
//! `kill -9` at random moments; between lives the journal is sometimes deleted or emptied. After each life
//! every byte is judged.
//!
//! What must hold: with its journal, nothing accepted is lost. Without it the volume is a cut that holds all
//! that was stored: what `sawmill wait --stored` said, and with `flush = stored` every flush.
//! Chance is seeded; real time and threads are not, so a seed gives a run like the one before, not the same.
//! Rooms: `commits` (the load).

mod commits;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::dice::Dice;
use crate::nbd::{Client, Failure};
use crate::place::Place;
use crate::proxy::{Counts, Proxy, Weather};
use crate::server::{Serve, Server};
use crate::stamp::{
    Flush, Log, Verdict, Violation, check_cut, check_flushed_kept, check_nothing_accepted_lost,
};
use crate::store::shared_minio;

use commits::{Commits, SESSIONS_MAX, Tally};

const VOLUME_BYTES: u64 = 16 << 20;
/// Lives of one volume; then a new one begins.
const LIVES_MAX: u64 = 16;

/// What happened so far.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Volumes begun.
    pub volumes: u64,
    /// Servers that got ready.
    pub lives: u64,
    /// `kill -9`s, also of servers that were still starting.
    pub kills: u64,
    /// Journals deleted or emptied.
    pub journal_losses: u64,
    /// Starts that gave up in bad weather, by exit code; each was tried again in good weather.
    pub refused_starts: BTreeMap<i32, u64>,
    /// The load.
    pub tally: Tally,
    /// Over all judgements: writes that had to survive, that did, and that were lost rightly.
    pub verdict: Verdict,
    /// What went wrong at the store.
    pub faults: Counts,
    /// Broken promises.
    pub violations: Vec<String>,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Report { volumes, lives, kills, journal_losses, refused_starts, tally, verdict, .. } = self;
        writeln!(
            f,
            "{volumes} volumes, {lives} lives, {kills} kills, {journal_losses} journal losses, \
             refused starts by exit code {refused_starts:?}"
        )?;
        writeln!(
            f,
            "{} writes, {} flushes and FUA, {} reads, {} read errors; judged: {} writes demanded, {} kept, \
             {} lost with a journal",
            tally.writes,
            tally.commits,
            tally.reads,
            tally.read_errors,
            verdict.demanded,
            verdict.kept,
            verdict.lost
        )?;
        writeln!(f, "{}", self.faults)?;
        write!(f, "{} violations", self.violations.len())?;
        for violation in &self.violations {
            write!(f, "\n  {violation}")?;
        }
        Ok(())
    }
}

/// One run.
pub struct Torture {
    seed: u64,
    dice: Dice,
    proxy: Arc<Proxy>,
    /// What happened so far.
    pub report: Report,
}

/// One volume and what is known about it.
struct Volume {
    place: Place,
    flush: &'static str,
    commits: Commits,
    /// The journal was lost since the last judgement.
    journal_lost: bool,
    /// Everything completed before this moment is stored.
    stored: u64,
}

impl Torture {
    /// A run with this seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        let proxy = Proxy::before(shared_minio());
        Torture { seed, dice: Dice::new(seed), proxy, report: Report::default() }
    }

    /// Runs for so long; `tell` hears of each life. Ends early when a promise is broken.
    pub fn run(&mut self, time: Duration, mut tell: impl FnMut(&Report)) {
        let deadline = Instant::now() + time;
        while Instant::now() < deadline && self.report.violations.is_empty() {
            let flush = if self.dice.once_in(2) { "logged" } else { "stored" };
            let mut volume = self.begin(flush);
            for _ in 0..LIVES_MAX {
                self.life(&mut volume);
                self.report.faults = self.proxy.counts();
                tell(&self.report);
                if Instant::now() > deadline || !self.report.violations.is_empty() {
                    break;
                }
            }
            self.end(&mut volume);
        }
    }

    /// The control: a journal is lost behind the judge's back while nothing is stored. Gives what the judge
    /// says, which must be a violation.
    ///
    /// # Panics
    /// When the volume is not even a cut.
    pub fn plant_a_loss(&mut self) -> Result<Verdict, Violation> {
        let mut volume = self.begin("logged");
        let server = Self::serve(&volume).start();
        self.proxy.shut();
        volume.commits.drive(&[server.connect()], 20, || server.kill());
        self.proxy.open();
        volume.place.lose_state();
        volume.journal_lost = true;
        let server = Self::serve(&volume).start();
        let image = server.connect().read_all().expect("readable");
        volume.judge(&image).expect("a cut, when the loss is known");
        volume.journal_lost = false;
        volume.judge(&image)
    }

    fn begin(&mut self, flush: &'static str) -> Volume {
        self.proxy.calm();
        let place = Place::new(&self.proxy.store());
        place.create("disk", "16M", &["--segment-bytes", "256K", "--flush", flush]);
        self.report.volumes += 1;
        let commits = Commits::new(VOLUME_BYTES, Dice::new(self.dice.word()));
        Volume { place, flush, commits, journal_lost: false, stored: 0 }
    }

    fn life(&mut self, volume: &mut Volume) {
        if self.dice.once_in(4) {
            self.proxy.calm();
        } else {
            let fault_once_in = 3 + self.dice.below(30);
            self.proxy.storm(Weather { dice: Dice::new(self.dice.word()), fault_once_in });
        }
        if self.dice.once_in(5) {
            Self::serve(volume).die_while_starting(&mut self.dice);
            self.report.kills += 1;
        }
        let Some(server) = self.start(volume) else { return };
        self.report.lives += 1;
        let clients: Vec<Client> =
            (0..=self.dice.below(SESSIONS_MAX as u64 - 1)).map(|_| server.connect()).collect();
        self.look(volume, &clients[0]);
        if self.dice.once_in(3) {
            let groups = 1 + self.dice.below(30);
            let tally = volume.commits.drive(&clients, groups, || ());
            self.note(volume, tally);
            self.wait_stored(volume);
        }
        self.outage(volume, &clients);
        let groups = 1 + self.dice.below(60);
        let mut server = server;
        let mut ended = None;
        let tally = volume.commits.drive(&clients, groups, || {
            if !server.is_running() {
                ended = Some(server.stderr());
            }
            server.kill();
        });
        self.report.kills += 1;
        self.note(volume, tally);
        if let Some(said) = ended {
            self.violation(volume, &format!("the server ended by itself: {said}"));
        }
        self.lose_the_journal(volume);
    }

    /// With its journal, or with the flag that says that it is lost.
    fn serve(volume: &Volume) -> Serve<'_> {
        let options = ["--journal-bytes", "16M", "--checkpoint-bytes", "2M", "--segment-age", "1s"];
        let serve = volume.place.serve("disk").with(&options);
        if volume.journal_lost { serve.with(&["--accept-journal-loss"]) } else { serve }
    }

    /// In bad weather a start may give up; in good weather it must not.
    fn start(&mut self, volume: &Volume) -> Option<Server> {
        match Self::serve(volume).attempt() {
            Ok(server) => return Some(server),
            Err(refused) => {
                *self.report.refused_starts.entry(refused.code.unwrap_or(-1)).or_default() += 1;
            }
        }
        self.proxy.calm();
        match Self::serve(volume).attempt() {
            Ok(server) => Some(server),
            Err(ended) => {
                self.violation(volume, &format!("does not open: {:?}: {}", ended.code, ended.stderr));
                None
            }
        }
    }

    /// Judges every byte, and goes on from there.
    fn look(&mut self, volume: &mut Volume, client: &Client) {
        let mut image = client.read_all();
        if let Err(Failure::Errno(_)) = image {
            self.report.tally.read_errors += 1;
            self.proxy.calm();
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
            Err(violation) => self.violation(volume, &violation.to_string()),
        }
        // Without its journal a volume is what the store has, no more.
        volume.commits.see(&image, volume.journal_lost);
        if std::mem::take(&mut volume.journal_lost) {
            volume.stored = 0;
        }
    }

    fn wait_stored(&mut self, volume: &mut Volume) {
        let moment = volume.commits.log.clock.tick();
        let waited = volume.place.sawmill(&["wait", "disk", "--stored", "--timeout", "50s"]);
        if waited.code == Some(0) {
            volume.stored = moment;
        } else {
            self.violation(volume, &format!("never stored: {}", waited.stderr));
        }
    }

    /// Sometimes the store is away for a little load. A flush that goes to the store would wait for ever.
    fn outage(&mut self, volume: &mut Volume, clients: &[Client]) {
        if volume.flush == "logged" && self.dice.once_in(6) {
            self.proxy.shut();
            let proxy = &self.proxy;
            let tally = volume.commits.drive_beside(clients, 10, || proxy.open(), || ());
            self.proxy.open();
            self.note(volume, tally);
        }
    }

    fn lose_the_journal(&mut self, volume: &mut Volume) {
        match self.dice.below(9) {
            0 => volume.place.lose_state(),
            1 => volume.each_journal(|path| std::fs::remove_file(path)),
            2 => volume.each_journal(|path| std::fs::write(path, "")),
            _ => return,
        }
        volume.journal_lost = true;
        self.report.journal_losses += 1;
    }

    /// An orderly end: another machine finds every byte in the store.
    fn end(&mut self, volume: &mut Volume) {
        self.proxy.calm();
        let Some(server) = self.start(volume) else { return };
        let client = server.connect();
        self.look(volume, &client);
        let image = client.read_all();
        let stopped = server.stop();
        if stopped.code != Some(0) {
            return self
                .violation(volume, &format!("no orderly end: {:?}: {}", stopped.code, stopped.stderr));
        }
        self.proxy.deliver_late();
        let elsewhere = volume.place.neighbour();
        let server = elsewhere.serve("disk").start();
        if server.connect().read_all() != image {
            self.violation(volume, "the store has another state than its writer had");
        }
        self.report.faults = self.proxy.counts();
    }

    fn note(&mut self, volume: &Volume, tally: Tally) {
        let sum = &mut self.report.tally;
        sum.writes += tally.writes;
        sum.commits += tally.commits;
        sum.reads += tally.reads;
        sum.read_errors += tally.read_errors;
        for wrong in tally.violations {
            self.violation(volume, &wrong);
        }
    }

    fn violation(&mut self, volume: &Volume, what: &str) {
        let Report { volumes, lives, .. } = self.report;
        let journal = if volume.journal_lost { "lost" } else { "kept" };
        self.report.violations.push(format!(
            "seed {}, volume {volumes}, life {lives}, flush = {}, journal {journal}: {what}",
            self.seed, volume.flush
        ));
    }
}

impl Volume {
    fn judge(&self, image: &[u8]) -> Result<Verdict, Violation> {
        let log = &self.commits.log;
        if !self.journal_lost {
            return check_nothing_accepted_lost(log, image);
        }
        if self.flush == "stored" {
            check_flushed_kept(log, image)?;
        }
        if self.stored == 0 {
            return check_cut(log, image);
        }
        check_flushed_kept(&only_stored(log, self.stored), image)
    }

    fn each_journal(&self, act: impl Fn(&std::path::Path) -> std::io::Result<()>) {
        for journal in self.place.journals() {
            act(&journal).expect("a journal is a file of ours");
        }
    }
}

/// The log as it would be had there been one flush, at `moment`.
fn only_stored(log: &Log, moment: u64) -> Log {
    let mut log = log.clone();
    log.flushes = vec![Flush { submitted: moment, completed: Some(moment) }];
    for write in &mut log.writes {
        write.fua = false;
    }
    log
}
