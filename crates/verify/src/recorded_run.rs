//! The files of a recorded run in a folder, from which its cuts can be checked now, or one of them
//! again later.
//!
//! In the folder: `log` and `moments` (the recording), `before` (the disk's content before it,
//! sparse), and `workload` (lines of text with the knowledge of the device's user).
//!
//! Invariant: [`RecordedRun::save`] writes `workload` last, and [`RecordedRun::open`]
//! refuses a folder without it.
//!
//! Not here: writing `log` and `moments` (`recording`), the workload itself (`run`), the check of
//! the cuts (`campaign`).

use std::path::Path;

use crate::campaign::Campaign;
use crate::files::Files;
use crate::image::Image;
use crate::plan::Budget;
use crate::power_cut::{PowerCut, Replay};
use crate::recording::Recording;
use crate::stamp::{CutTime, Log};
use crate::subject::RecoveryMode;
use crate::{Error, Result};

/// The knowledge of the device's user.
#[derive(Clone, Debug)]
pub enum Knowledge {
    /// The stamped workload's log.
    Stamps {
        /// Its requests, with the times of their answers.
        log: Log,
        /// Pairs of times: from the second on, everything that completed before the first
        /// survives the loss of the disk.
        settled: Vec<(u64, u64)>,
    },
    /// The files of a file system.
    Files(Files),
    /// Nothing: only a check of the user can judge.
    Nothing,
}

/// A recording with everything needed to judge its cuts.
#[derive(Debug)]
pub struct RecordedRun {
    /// The recording of the disk.
    pub recording: Recording,
    /// The disk's content before the recording.
    pub before: Image,
    /// The first entry before which power may fail; the entries before it made the device.
    pub first: usize,
    /// What the workload knows of its own requests.
    pub knowledge: Knowledge,
}

const WORKLOAD: &str = "workload";
const BEFORE: &str = "before";

impl RecordedRun {
    /// Writes everything except the recording, which is already there, to `folder`.
    pub fn save(&self, folder: &Path) -> Result<()> {
        let path = folder.join(BEFORE);
        self.before.write_file(&path).map_err(|error| Error::io("cannot write", &path, error))?;
        let mut text = format!("first {}\n", self.first);
        match &self.knowledge {
            Knowledge::Stamps { log, settled } => {
                let line = |(before, after): &(u64, u64)| format!("settled {before} {after}\n");
                text.extend(settled.iter().map(line));
                text.push_str(&log.to_text());
            }
            Knowledge::Files(files) => text.push_str(&files.to_text()),
            Knowledge::Nothing => {}
        }
        let path = folder.join(WORKLOAD);
        std::fs::write(&path, text).map_err(|error| Error::io("cannot write", &path, error))
    }

    /// Opens a folder that [`RecordedRun::save`] wrote.
    pub fn open(folder: &Path) -> Result<Self> {
        let path = folder.join(WORKLOAD);
        let text = std::fs::read_to_string(&path)
            .map_err(|error| Error::io("cannot read", &path, error))?;
        let wrong = || Error::Usage(format!("{} was not written by verify-crash", path.display()));
        let (first, mut rest) = text.split_once('\n').ok_or_else(wrong)?;
        let first = first
            .strip_prefix("first ")
            .and_then(|number| number.parse().ok())
            .ok_or_else(wrong)?;
        let mut settled = Vec::new();
        while let Some((line, remainder)) =
            rest.strip_prefix("settled ").and_then(|text| text.split_once('\n'))
        {
            let (before, after) = line.split_once(' ').ok_or_else(wrong)?;
            let number = |word: &str| word.parse::<u64>().map_err(|_| wrong());
            settled.push((number(before)?, number(after)?));
            rest = remainder;
        }
        // The first line of each kind differs, so the text tells which it is.
        let knowledge = if rest.is_empty() {
            Knowledge::Nothing
        } else if let Some(files) = Files::from_text(rest) {
            Knowledge::Files(files)
        } else {
            Knowledge::Stamps { log: Log::from_text(rest).ok_or_else(wrong)?, settled }
        };
        let path = folder.join(BEFORE);
        let before =
            Image::read_file(&path).map_err(|error| Error::io("cannot read", &path, error))?;
        let recording = Recording::open(&folder.join("log"))?;
        Ok(RecordedRun { recording, before, first, knowledge })
    }

    /// A log of another program, for a device that held zeroes before.
    pub fn foreign(log: &Path, disk_bytes: u64) -> Result<Self> {
        let recording = Recording::open(log)?;
        // At least as long as what is written: a log says nothing about the size of its disk.
        let before = Image::new(disk_bytes.max(recording.end_bytes()));
        Ok(RecordedRun { recording, before, first: 0, knowledge: Knowledge::Nothing })
    }

    /// Lets power fail only before entry `first` or a later one.
    pub fn begin_at(&mut self, first: usize) -> Result<()> {
        let entries = self.recording.entries.len();
        if first > entries {
            let text = format!(
                "the recording has {entries} entries: power cannot first fail before {first}"
            );
            return Err(Error::Usage(text));
        }
        self.first = first;
        Ok(())
    }

    /// The time at which a cut strikes.
    #[must_use]
    pub fn cut_time(&self, cut: &PowerCut) -> CutTime {
        self.recording.entries.get(cut.entry).map_or(CutTime::END, |next| next.cut_time)
    }

    /// A replay of this recording.
    #[must_use]
    pub fn replay(&self) -> Replay<'_> {
        Replay::new(&self.recording, self.before.clone())
    }

    /// A campaign over this recording.
    #[must_use]
    pub fn campaign<'a>(&'a self, modes: &'a [RecoveryMode], budget: Budget) -> Campaign<'a> {
        let before = self.before.clone();
        Campaign { recording: &self.recording, before, first: self.first, modes, budget }
    }
}
