//! One volume of the torture: its test bed, what is known of it, what may be lost at the next
//! check.
//!
//! Invariants: the demands on an image are the strictest promises after the actions. With journal
//! and memory, nothing accepted is lost; without memory, nothing flushed and nothing that an attach
//! found; without the journal, the image is a cut with everything stored.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::commits::Commits;
use crate::machine;
use crate::server::ServerBuilder;
use crate::stamp::{
    Flush, Log, Verdict, Violation, check_cut, check_flushed_kept, check_nothing_accepted_lost,
};
use crate::store::StoreUnderTest;
use crate::test_bed::TestBed;
use sawmill_testkit::Dice;

pub(super) const VOLUME_BYTES: u64 = 16 << 20;
const OPTIONS: [&str; 6] =
    ["--journal-bytes", "16M", "--checkpoint-bytes", "2M", "--segment-age", "1s"];

/// The loss since the last judgment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Loss {
    Nothing,
    Memory,
    Journal,
}

/// Whether the attach after a loss must be refused if no option accepts the loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NextAttach {
    MustRefuse,
    MayPass,
}

impl NextAttach {
    pub(super) fn refuses_if(is_needed: bool) -> Self {
        if is_needed { NextAttach::MustRefuse } else { NextAttach::MayPass }
    }
}

/// How a server is run.
#[derive(Clone, Debug, Default)]
pub(super) struct AttachOptions {
    /// The program that starts it.
    pub through: Vec<String>,
    /// Its environment.
    pub environment: Vec<(String, String)>,
    /// The place of its memory, if given.
    pub staging: Option<String>,
}

/// A state of the past that must stay what it is.
#[derive(Clone, Debug)]
pub(super) struct SavedState {
    /// In the form that follows the volume's name.
    pub state: String,
    /// The size of the volume then.
    pub size_bytes: u64,
    /// Its content; `None` until the next check, which sees the same.
    pub digest: Option<u64>,
}

/// A copy of the store, and what is known of it.
pub(super) struct Backup {
    pub folder: PathBuf,
    pub log: Log,
    pub stored: u64,
    pub past: usize,
}

/// One volume and what is known about it.
pub(super) struct Volume {
    pub bed: TestBed,
    pub flush: &'static str,
    /// Journal and cache are given by name.
    pub is_named: bool,
    pub commits: Commits,
    /// The loss since the last judgment.
    pub loss: Loss,
    /// Without a flag the next attach must be refused.
    pub must_refuse: bool,
    /// The store was restored: after an attach that accepted the loss and died immediately, the
    /// next one must accept the older store too.
    pub was_put_back: bool,
    /// The volume may have been closed cleanly, and then needs no memory, although some may have
    /// been left: its last server got SIGTERM before it was killed, or a command released it.
    pub may_be_clean: bool,
    /// Everything completed before this moment is stored.
    pub stored: u64,
    /// Everything completed before this moment is logged.
    pub logged: u64,
    pub past: Vec<SavedState>,
    pub backup: Option<Backup>,
    /// Memory files that are useless once the next attach is over, with their inode numbers.
    pub orphans: Vec<(PathBuf, u64)>,
    /// The volume's id.
    pub id: String,
    /// Histories begun.
    branches: u64,
    snapshots: u64,
}

impl Volume {
    pub(super) fn create(store: &StoreUnderTest, flush: &'static str, dice: Dice) -> Self {
        let bed = TestBed::new(store);
        let mut options = vec!["--segment-bytes", "256K", "--flush", flush];
        if bed.store_folder().is_some() {
            options.extend(["--retention", "24h"]);
        }
        bed.create("disk", "16M", &options);
        let id = bed.info("disk")["id"].as_str().expect("a volume has an id").to_owned();
        Volume {
            bed,
            flush,
            is_named: false,
            commits: Commits::new(VOLUME_BYTES, dice),
            loss: Loss::Nothing,
            must_refuse: false,
            was_put_back: false,
            may_be_clean: false,
            stored: 0,
            logged: 0,
            past: Vec::new(),
            backup: None,
            orphans: Vec::new(),
            id,
            branches: 0,
            snapshots: 0,
        }
    }

    /// The same with journal and cache given by name, in a folder of their own.
    pub(super) fn named(mut self) -> Self {
        std::fs::create_dir_all(self.bed.path("state/named")).expect("room for a folder");
        self.is_named = true;
        self
    }

    /// Whether the store is a folder: it can be copied, and does not check the time.
    pub(super) fn is_folder(&self) -> bool {
        self.bed.store_folder().is_some()
    }

    /// Prepares to serve it with its journal.
    pub(super) fn serve(&self, options: &AttachOptions) -> ServerBuilder<'_> {
        let mut serve = self.bed.serve("disk").with(&OPTIONS);
        if self.is_named {
            let (journal, cache) =
                (self.text("state/named/journal"), self.text("state/named/cache"));
            serve = serve.with(&["--journal", &journal, "--cache", &cache]);
        }
        serve = match &options.staging {
            Some(folder) => serve.with(&["--staging", folder]),
            None => serve.with_default_memory(),
        };
        for (name, value) in &options.environment {
            serve = serve.env(name, value);
        }
        let words: Vec<&str> = options.through.iter().map(String::as_str).collect();
        serve.through(&words)
    }

    /// The same with the flag that accepts the loss.
    pub(super) fn serve_as_it_is(&self, options: &AttachOptions) -> ServerBuilder<'_> {
        let serve = match self.loss {
            Loss::Nothing => self.serve(options),
            Loss::Memory => self.serve(options).with(&["--accept-memory-loss"]),
            Loss::Journal => self.serve(options).with(&["--accept-journal-loss"]),
        };
        if self.was_put_back { serve.with(&["--accept-older-store"]) } else { serve }
    }

    /// Prepares to serve it at another machine, which takes it over.
    pub(super) fn serve_elsewhere<'a>(&self, elsewhere: &'a TestBed) -> ServerBuilder<'a> {
        elsewhere.serve("disk").with(&OPTIONS)
    }

    /// Prepares to serve another name here: a copy, or a state of the past.
    pub(super) fn serve_beside(&self, name: &str) -> ServerBuilder<'_> {
        let socket = format!("unix:{}", self.text("beside.sock"));
        self.bed.serve(name).with(&OPTIONS).at(&socket)
    }

    pub(super) fn text(&self, name: &str) -> String {
        self.bed.path(name).display().to_string()
    }

    /// The journal option for a command at rest.
    pub(super) fn journal_option(&self) -> Vec<String> {
        match self.is_named {
            true => vec!["--journal".to_owned(), self.text("state/named/journal")],
            false => Vec::new(),
        }
    }

    pub(super) fn journal(&self) -> PathBuf {
        let mut journals = self.bed.journals().into_iter();
        journals
            .find(|path| path.file_name().is_some_and(|name| name == "journal"))
            .expect("a journal")
    }

    /// The journal or its memory is lost or foreign.
    pub(super) fn note_lost(&mut self, loss: Loss, next: NextAttach) {
        (self.loss, self.must_refuse) = (loss, next == NextAttach::MustRefuse);
        let number = |path: &Path| std::fs::metadata(path).map_or(0, |about| about.ino());
        self.orphans =
            self.memories().into_iter().map(|path| (path.clone(), number(&path))).collect();
    }

    /// The next attach is over: memory lost before it is useless now.
    pub(super) fn loss_is_settled(&mut self) {
        (self.loss, self.must_refuse, self.was_put_back) = (Loss::Nothing, false, false);
        for (orphan, number) in std::mem::take(&mut self.orphans) {
            // A file of the same name may be the current memory.
            if std::fs::metadata(&orphan).is_ok_and(|about| about.ino() == number) {
                std::fs::remove_file(orphan).expect("a file of ours");
            }
        }
    }

    /// The log of the next history that continues from `log`.
    pub(super) fn branch_of(&mut self, log: &Log) -> Log {
        self.branches += 1;
        log.branch(self.branches)
    }

    /// A load of the next history that continues from here.
    pub(super) fn branch(&mut self) -> Commits {
        self.branches += 1;
        self.commits.branch(self.branches)
    }

    pub(super) fn next_snapshot(&mut self) -> String {
        self.snapshots += 1;
        format!("s{}", self.snapshots)
    }

    /// Judges an image by what was lost.
    pub(super) fn judge(&self, image: &[u8]) -> Result<Verdict, Violation> {
        let log = &self.commits.log;
        match self.loss {
            Loss::Nothing => check_nothing_accepted_lost(log, image),
            Loss::Memory => {
                let mut log = log.clone();
                log.flushes.push(Flush { submitted: self.logged, completed: Some(self.logged) });
                check_flushed_kept(&log, image)
            }
            Loss::Journal => self.judge_stored(image),
        }
    }

    /// Judges an image that was read from the store alone.
    pub(super) fn judge_stored(&self, image: &[u8]) -> Result<Verdict, Violation> {
        let log = &self.commits.log;
        if self.flush == "stored" {
            check_flushed_kept(log, image)?;
        }
        if self.stored == 0 {
            return check_cut(log, image);
        }
        check_flushed_kept(&only_stored(log, self.stored), image)
    }

    pub(super) fn each_journal(&self, act: impl Fn(&Path) -> std::io::Result<()>) {
        for journal in self.bed.journals() {
            act(&journal).expect("a journal is a file of ours");
        }
    }

    /// The files of memory that a server of this volume may have left.
    pub(super) fn memories(&self) -> Vec<PathBuf> {
        let mut found = Vec::new();
        let mut folders =
            vec![self.bed.memory().to_owned(), self.bed.path("state"), default_memory()];
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(&folder).into_iter().flatten().flatten() {
                let name = entry.file_name().to_string_lossy().into_owned();
                if entry.path().is_dir() {
                    folders.push(entry.path());
                } else if name.starts_with(&format!("sawmill-{}-", self.id))
                    && name.ends_with(".staging")
                {
                    found.push(entry.path());
                }
            }
        }
        found.sort();
        found
    }

    /// Loses all local state of this machine, including memory at its default place.
    pub(super) fn lose_state(&self) {
        self.bed.lose_state();
        self.forget_memory();
        if self.is_named {
            std::fs::create_dir_all(self.bed.path("state/named")).expect("room for a folder");
        }
    }

    pub(super) fn forget_memory(&self) {
        for memory in self.memories() {
            std::fs::remove_file(memory).expect("a file of ours");
        }
    }
}

impl Drop for Volume {
    /// Files in the folders of the bed are removed with it.
    fn drop(&mut self) {
        for memory in self.memories() {
            let _ = std::fs::remove_file(memory);
        }
    }
}

/// The default place of memory on a machine that is not a container.
fn default_memory() -> PathBuf {
    PathBuf::from(format!("/dev/shm/sawmill-{}", rustix::process::geteuid().as_raw()))
}

/// The log as if there had been a single flush, at `moment`.
fn only_stored(log: &Log, moment: u64) -> Log {
    let mut log = log.clone();
    log.flushes = vec![Flush { submitted: moment, completed: Some(moment) }];
    for write in &mut log.writes {
        write.fua = false;
    }
    log
}

/// Copies a folder as it is; `to` must not exist.
pub(super) fn copy_folder(from: &Path, to: &Path) {
    machine::run(machine::command("cp").args(["--archive", "--sparse=always"]).arg(from).arg(to));
}

/// A digest that distinguishes two images.
pub(super) fn digest(image: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    image.hash(&mut hasher);
    hasher.finish()
}
