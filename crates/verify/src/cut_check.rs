//! The check of one crash: the device is started on the remains, and the content that it serves is
//! judged by stamps, by a file system, or by a script of the user.
//!
//! Invariant: a check that cannot be carried out (a program is missing, no root) is an error; every
//! other deviation is a finding.
//!
//! Not here: the choice of cuts (`plan`), the loop over them (`campaign`), the rules for stamps
//! (`stamp`), starting devices (`subject`).

use std::path::{Path, PathBuf};

use crate::bridge::NbdFile;
use crate::file_system::FileSystem;
use crate::power_cut::{PowerCut, Replay};
use crate::program;
use crate::recorded_run::{Knowledge, RecordedRun};
use crate::stamp::{self, CutTime, Log, SECTOR_BYTES, Violation};
use crate::subject::{RecoveryMode, Remains, RestartResult, RunningDevice, Subject};
use crate::{Error, Result};

/// The promise of a device for the writes between two flushes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// Each sector has the content of the last flush or of one of the writes since: the promise of
    /// a plain disk with a cache.
    Sector,
    /// The device is as after all writes up to some time, each whole.
    Prefix,
}

/// The judge of the content.
#[derive(Clone, Debug)]
pub enum Judge {
    /// What the workload noted of its own requests.
    Workload,
    /// A file system's own tools.
    FileSystem(FileSystem),
    /// A command line with `{image}`; an exit code other than 0 is a finding.
    Script(String),
}

/// The parameters of a check.
pub struct CutCheck<'a> {
    /// The run whose remains are checked.
    pub recorded: &'a RecordedRun,
    /// The device to start again; with `None`, the images themselves are judged.
    pub subject: Option<&'a dyn Subject>,
    /// What the device promises of writes between two flushes.
    pub rule: Rule,
    /// The judge of the content.
    pub judge: &'a Judge,
    /// The folder for images and sockets.
    pub folder: &'a Path,
}

type Verdict = Result<(), String>;

impl CutCheck<'_> {
    /// The modes in which the device can come back and be judged.
    #[must_use]
    pub fn modes(&self) -> Vec<RecoveryMode> {
        let mut modes = self.subject.map_or(&[RecoveryMode::DiskKept][..], Subject::modes).to_vec();
        if !matches!(self.recorded.knowledge, Knowledge::Stamps { .. }) {
            // A file system can replay its journal only on a writable device.
            modes.retain(|mode| *mode != RecoveryMode::Elsewhere);
        }
        modes
    }

    /// Checks one cut on its own, as a report names it.
    pub fn at(
        &self,
        cut: &PowerCut,
        mode: RecoveryMode,
        stale_of: Option<usize>,
    ) -> Result<Verdict> {
        let recorded = self.recorded;
        let mut replay = Replay::new(&recorded.recording, recorded.before.clone());
        let disk_cut = stale_of.map_or_else(|| cut.clone(), PowerCut::whole);
        let disk = replay.image(&disk_cut)?;
        self.check(&Remains { cut, disk: &disk, mode })
    }

    /// Checks the remains of one crash.
    pub fn check(&self, remains: &Remains<'_>) -> Result<Verdict> {
        let cut_time = self.recorded.cut_time(remains.cut);
        let Some(subject) = self.subject else {
            let path = self.folder.join("image");
            remains
                .disk
                .write_file(&path)
                .map_err(|error| Error::io("cannot make", &path, error))?;
            return self.judge_file(&path, cut_time);
        };
        let mut running = match subject.revive(remains, self.folder) {
            Ok(RestartResult::Serving(running)) => running,
            // The device may refuse a disk that is older than its state elsewhere.
            Ok(RestartResult::Refused(_)) if remains.mode == RecoveryMode::DiskStale => {
                return Ok(Ok(()));
            }
            Ok(RestartResult::Refused(why)) => {
                return Ok(Err(format!("it refuses to serve: {why}")));
            }
            Err(why @ (Error::Subject(_) | Error::Device(_))) => {
                return Ok(Err(format!("it does not come back: {why}")));
            }
            Err(error) => return Err(error),
        };
        let client = running.client()?;
        if let (Judge::Workload, Knowledge::Stamps { log, settled }) =
            (self.judge, &self.recorded.knowledge)
        {
            let image = match client.read_first((log.base.len() * SECTOR_BYTES) as u64) {
                Ok(image) => image,
                Err(failure) => return Ok(Err(format!("it cannot be read: {failure}"))),
            };
            let judged = self.judge_stamps(log, settled, remains, &image);
            return Ok(judged.map_err(|violation| violation.0));
        }
        // The file below connects by itself, and some servers accept one connection only.
        drop(client);
        // Without its disk, a device has promised only an earlier state, and any time is early
        // enough.
        let whole = remains.mode == RecoveryMode::DiskKept || subject.flushes_survive_its_disk();
        self.judge_export(&*running, if whole { cut_time } else { CutTime::default() })
    }

    fn judge_export(&self, device: &dyn RunningDevice, cut_time: CutTime) -> Result<Verdict> {
        let path: PathBuf = self.folder.join("shown");
        let file = match NbdFile::new(device.uri(), &path) {
            Err(why @ (Error::Subject(_) | Error::Device(_))) => {
                return Ok(Err(format!("it cannot be used: {why}")));
            }
            file => file?,
        };
        self.judge_file(file.path(), cut_time)
    }

    /// Judges a file. Everything promised before `cut_time` must be there; the default accepts
    /// any earlier state.
    fn judge_file(&self, path: &Path, cut_time: CutTime) -> Result<Verdict> {
        match (self.judge, &self.recorded.knowledge) {
            (Judge::Script(line), _) => {
                let line = line.replace("{image}", &path.display().to_string());
                let ended = program::finish(program::command("sh")?.args(["-c", &line]))?;
                if ended.status.success() {
                    return Ok(Ok(()));
                }
                let (status, output) = (ended.status, program::last_lines(&ended.output));
                Ok(Err(format!("the check says ({status}): {output}")))
            }
            (Judge::FileSystem(kind), Knowledge::Files(files)) if files.kind == *kind => {
                kind.inspect(path, self.folder, |root| files.verify(root, cut_time))
            }
            (Judge::FileSystem(kind), _) => kind.inspect(path, self.folder, |_| Ok(())),
            (Judge::Workload, Knowledge::Files(files)) => {
                files.kind.inspect(path, self.folder, |root| files.verify(root, cut_time))
            }
            (Judge::Workload, Knowledge::Stamps { log, .. }) => {
                let image =
                    std::fs::read(path).map_err(|error| Error::io("cannot read", path, error))?;
                let log = log.as_of(cut_time);
                let area = &image[..(log.base.len() * SECTOR_BYTES).min(image.len())];
                Ok(stamp::check_sectors(&log, area).map(drop).map_err(|violation| violation.0))
            }
            (Judge::Workload, Knowledge::Nothing) => {
                let text = "nothing is known of what this recording should leave; say who judges \
                            with --check ext4|xfs|btrfs, or --check 'COMMAND {image}'";
                Err(Error::Usage(text.into()))
            }
        }
    }

    fn judge_stamps(
        &self,
        log: &Log,
        settled: &[(u64, u64)],
        remains: &Remains<'_>,
        image: &[u8],
    ) -> Result<(), Violation> {
        let cut_time = self.recorded.cut_time(remains.cut);
        let log = log.as_of(cut_time);
        let judged = match (remains.mode, self.rule) {
            (RecoveryMode::DiskKept, Rule::Sector) => stamp::check_sectors(&log, image),
            (RecoveryMode::DiskKept, Rule::Prefix) => stamp::check_flushed_kept(&log, image),
            _ if self.subject.is_some_and(Subject::flushes_survive_its_disk) => {
                stamp::check_flushed_kept(&log, image)
            }
            _ => {
                let settled = settled.iter().filter(|(_, after)| *after < cut_time.promised);
                // The last settling that had ended by then. One that was under way has promised
                // nothing yet.
                let safe = settled.map(|(before, _)| *before).max().unwrap_or(0);
                stamp::check_kept_before(&log, safe, image)
            }
        };
        judged.map(drop)
    }
}
