//! The stamped workload on a device under test, and the judgement of what it serves after each cut.
//!
//! Invariant: one clock stamps the workload's requests and the entries of the recording, so that a cut knows
//! what its user had been promised at that moment.

use std::path::Path;
use std::sync::Arc;

use crate::campaign::Campaign;
use crate::cut::Cut;
use crate::dice::Dice;
use crate::image::Image;
use crate::load::{Load, Mix};
use crate::nbd::{Client, Command, Failure};
use crate::plan::Budget;
use crate::recorder::Recorder;
use crate::recording::{LogWriter, Recording};
use crate::report::Report;
use crate::stamp::{self, Log, SECTOR_BYTES, Verdict, Violation};
use crate::subject::{Remains, Revived, Subject, Way};
use crate::{Error, Result};

/// What a device promises between two flushes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// Each sector is that of one of the writes since: what a plain disk with a cache promises.
    Sector,
    /// The device is as after all writes up to some moment, each whole.
    Prefix,
}

/// The workload.
#[derive(Clone, Copy, Debug)]
pub struct Workload {
    /// Bytes of the device that are written, from its beginning.
    pub area_bytes: u64,
    /// Requests in all.
    pub requests: u64,
    /// Where chance comes from.
    pub seed: u64,
    /// Whether trims are used, and must read as zeroes afterwards.
    pub trim: bool,
}

impl Default for Workload {
    fn default() -> Self {
        Workload { area_bytes: 1 << 20, requests: 600, seed: 1, trim: false }
    }
}

/// A recording, and what the user of the device knew.
pub struct Recorded {
    /// What was done to the disk under the device.
    pub recording: Recording,
    /// What was done to the device.
    pub log: Log,
    /// Moments at which the device had promised that everything accepted survives the loss of its disk:
    /// what completed before the first is safe once the second has passed.
    pub settled: Vec<(u64, u64)>,
    /// What the disk held before.
    pub before: Image,
    /// The first entry before which power may fail.
    pub first: usize,
}

/// The file beside the log that says what the workload did.
const WORKLOAD: &str = "workload";
/// The file beside the log with what the disk held before.
const BEFORE: &str = "before";

/// Runs the workload on `subject` over a disk of `disk_bytes`, and leaves the recording in `folder`.
pub fn record(
    subject: &dyn Subject,
    disk_bytes: u64,
    workload: &Workload,
    folder: &Path,
) -> Result<Recorded> {
    let mut dice = Dice::new(workload.seed);
    let mut load = Load::new(workload.area_bytes, Dice::new(dice.word()), phases(workload)[0].1);
    let clock = load.log.clock.clone();
    let writer = LogWriter::create(&folder.join("log"))?;
    let before = subject.prepare(disk_bytes, folder)?;
    let disk = Arc::new(Recorder::new(before.to_device()?, writer, clock.clone()));
    let mut running = subject.start(Arc::clone(&disk), folder)?;
    let clients = [running.client()?];
    let size_bytes = clients[0].export().size_bytes;
    if size_bytes < workload.area_bytes {
        let text = format!("the device has {size_bytes} bytes; the workload needs {}", workload.area_bytes);
        return Err(Error::Usage(text));
    }
    let mut settled = Vec::new();
    for (share, mix) in phases(workload) {
        load.mix = mix;
        let tally = load.drive(&clients, workload.requests * share / 10, || ());
        if tally.refused + tally.unanswered > 0 {
            let text = format!(
                "the device did not answer the workload: {} requests refused (last error number {:?}), {} \
                 unanswered",
                tally.refused, tally.last_errno, tally.unanswered
            );
            return Err(Error::Subject(text));
        }
        let before = clock.tick();
        if running.settle()? {
            settled.push((before, clock.tick()));
        }
    }
    drop(clients);
    running.stop()?;
    let recording = disk.finish()?;
    let recorded = Recorded { recording, log: load.log.clone(), settled, before, first: 0 };
    recorded.save(folder)?;
    Ok(recorded)
}

/// Tenths of the requests, and how they behave: many at a time, few, and one by one.
fn phases(workload: &Workload) -> [(u64, Mix); 3] {
    let mix = Mix { trim: workload.trim, flush_once_in: 12, fua_once_in: 12, ..Mix::default() };
    let few = Mix { depth: 4, sectors_max: 24, ..mix };
    [(4, mix), (3, few), (3, Mix { depth: 1, ..few })]
}

impl Recorded {
    fn save(&self, folder: &Path) -> Result<()> {
        let path = folder.join(BEFORE);
        self.before.write_file(&path).map_err(|error| Error::io("cannot write", &path, &error))?;
        let mut text = self.log.to_text();
        text.push_str(&format!("first {}\n", self.first));
        for (before, after) in &self.settled {
            text.push_str(&format!("settled {before} {after}\n"));
        }
        let path = folder.join(WORKLOAD);
        std::fs::write(&path, text).map_err(|error| Error::io("cannot write", &path, &error))
    }

    /// Opens what [`record`] left in a folder.
    pub fn open(folder: &Path) -> Result<Self> {
        let path = folder.join(WORKLOAD);
        let text = std::fs::read_to_string(&path).map_err(|error| Error::io("cannot read", &path, &error))?;
        let wrong = || Error::Log(format!("{} is not what the stamped workload leaves", path.display()));
        let (mut stamps, mut settled, mut first) = (String::new(), Vec::new(), 0);
        for line in text.lines() {
            let words: Vec<&str> = line.split(' ').collect();
            let number = |word: &str| word.parse::<u64>().map_err(|_| wrong());
            match words[..] {
                ["first", entry] => first = number(entry)? as usize,
                ["settled", before, after] => settled.push((number(before)?, number(after)?)),
                _ => stamps.extend([line, "\n"]),
            }
        }
        let log = Log::from_text(&stamps).ok_or_else(wrong)?;
        let recording = Recording::open(&folder.join("log"))?;
        let path = folder.join(BEFORE);
        let before = Image::read_file(&path).map_err(|error| Error::io("cannot read", &path, &error))?;
        Ok(Recorded { recording, log, settled, before, first })
    }

    /// The moment at which a cut strikes.
    #[must_use]
    pub fn moment(&self, cut: &Cut) -> u64 {
        self.recording.entries.get(cut.entry).map_or(u64::MAX, |next| next.moment)
    }

    /// Checks the cuts that `budget` allows, in every way in which the device can come back.
    pub fn check(
        &self,
        subject: &dyn Subject,
        rule: Rule,
        budget: &Budget,
        folder: &Path,
        progress: impl FnMut(usize, usize),
    ) -> Result<Report> {
        let campaign = Campaign {
            recording: &self.recording,
            before: self.before.clone(),
            first: self.first,
            ways: subject.ways(),
            budget: *budget,
        };
        campaign.run(progress, |remains| {
            let judged = self.check_one(subject, rule, remains, folder)?;
            Ok(judged.map(drop).map_err(|violation| violation.0))
        })
    }

    /// Checks one cut: what does the device serve after it?
    pub fn check_one(
        &self,
        subject: &dyn Subject,
        rule: Rule,
        remains: &Remains<'_>,
        folder: &Path,
    ) -> Result<Result<Verdict, Violation>> {
        let mut running = match subject.revive(remains, folder) {
            Ok(Revived::Serving(running)) => running,
            Ok(Revived::Refused(_)) if remains.way == Way::DiskStale => return Ok(Ok(Verdict::default())),
            Ok(Revived::Refused(why)) => return Ok(Err(Violation(format!("it refuses to serve: {why}")))),
            Err(Error::Subject(why)) => return Ok(Err(Violation(format!("it does not come back: {why}")))),
            Err(error) => return Err(error),
        };
        let client = running.client()?;
        let image = match read_area(&client, (self.log.base.len() * SECTOR_BYTES) as u64) {
            Ok(image) => image,
            Err(failure) => return Ok(Err(Violation(format!("it cannot be read: {failure}")))),
        };
        Ok(self.judge(rule, remains, &image))
    }

    fn judge(&self, rule: Rule, remains: &Remains<'_>, image: &[u8]) -> Result<Verdict, Violation> {
        let moment = self.moment(remains.cut);
        let log = self.log.as_of(moment);
        match (remains.way, rule) {
            (Way::DiskKept, Rule::Sector) => stamp::check_sectors(&log, image),
            (Way::DiskKept, Rule::Prefix) => stamp::check_flushed_kept(&log, image),
            _ => {
                let settled = self.settled.iter().filter(|(_, after)| *after < moment);
                let safe = settled.map(|(before, _)| *before).max().unwrap_or(0);
                stamp::check_kept_before(&log, safe, image)
            }
        }
    }
}

/// The beginning of the device, as it serves it.
fn read_area(client: &Client, area_bytes: u64) -> Result<Vec<u8>, Failure> {
    const STEP: u64 = 1 << 20;
    let starts = (0..area_bytes).step_by(STEP as usize);
    let asked: Vec<_> = starts
        .map(|offset| client.submit(&Command::Read { offset, length: STEP.min(area_bytes - offset) as u32 }))
        .collect();
    let mut image = Vec::with_capacity(area_bytes as usize);
    for pending in asked {
        image.extend(pending.wait()?.bytes);
    }
    Ok(image)
}
