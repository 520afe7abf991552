//! `sawmill verify-crash`: checks a block device, and what is on it, after a power failure at any
//! time or a crash of its server.
//!
//! Invariant: a finding comes with the command that repeats it, and what that command needs is
//! kept. Not here: recording, cutting, judging (`crates/verify`).

mod crash;
mod document;
mod plan;
mod self_test;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::{Args, ValueEnum};
use sawmill_device::BlockDevice;
use sawmill_verify::cut_check::CutCheck;
use sawmill_verify::power_cut::PowerCut;
use sawmill_verify::recorded_run::RecordedRun;
use sawmill_verify::recording::SECTOR_BYTES;
use sawmill_verify::run;
use sawmill_verify::subject::{RecoveryMode, Subject};
use sawmill_verify::target::{FileTarget, NbdTarget};

use self::document::Document;
use crate::SEED_DEFAULT;
use sawmill_console::Console;
use sawmill_console::exit::{Exit, Failure, Result};
use sawmill_console::output::{self, Progress};
use sawmill_console::units::parse_size;

/// Requests of the workload with stamps, unless the user chooses.
const REQUESTS_DEFAULT: u64 = 600;
/// Files of the workload in a file system, unless the user chooses.
const FILES_DEFAULT: u64 = 60;
/// Crashes of a server, unless the user chooses.
const ROUNDS_DEFAULT: u64 = 20;

/// Check what a block device holds after a power failure at any time.
///
/// Records every write, flush, FUA and discard while a workload runs. Cuts the recording at every
/// legal point (--images limits their number) and makes an image of what a disk may hold there.
/// Then a judge checks each image: the stamps of the workload, a file system (mount, then fsck), or
/// a script. Exit code 0: no findings; 1: findings, each with the command that repeats it.
///
/// Choose what to check: --device, --sawmill, --target, --write-log or --self-test. Everything runs
/// on this machine. --device and --sawmill need nbdfuse; file systems need root.
///
/// With --target and --crash, nothing is recorded: a load with stamps runs, the command crashes the
/// device's server again and again, and the check judges what is on the device afterwards.
#[derive(Args)]
pub struct Arguments {
    #[command(flatten)]
    subject: SubjectArguments,

    #[command(flatten)]
    work: WorkArguments,

    /// Check at most this many images. Default: 500; for file systems 60.
    #[arg(long, value_name = "N")]
    images: Option<usize>,

    /// Tear writes at multiples of 512 or 4096 bytes; 0: never.
    #[arg(long, value_name = "BYTES", value_parser = parse_tear, default_value_t = SECTOR_BYTES)]
    tear: u64,

    #[command(flatten)]
    crash: CrashArguments,

    /// Seed of the random choices. The same seed gives the same workload and the same cuts.
    #[arg(long, value_name = "N", default_value_t = SEED_DEFAULT)]
    seed: u64,

    /// Keep the recording, and all that a finding needs to be repeated, in this folder. It must be
    /// empty or new.
    #[arg(long, value_name = "FOLDER")]
    keep: Option<PathBuf>,

    /// With --write-log: check only this cut, as a finding names it.
    #[arg(long, value_name = "CUT", requires = "write_log")]
    cut: Option<PowerCut>,

    /// With --cut: how the journal comes back: kept, lost, stale or elsewhere.
    #[arg(long = "way", value_name = "WAY", requires = "cut", default_value = "kept")]
    mode: RecoveryMode,

    /// With --way stale: the entry before which the stale disk was saved.
    #[arg(long, value_name = "ENTRY", requires = "cut")]
    stale_of: Option<usize>,
}

#[derive(Args)]
#[command(next_help_heading = "What is checked")]
struct SubjectArguments {
    /// Command line of an NBD server that stays in the foreground, with {backing} (its disk) and
    /// {socket}: 'nbdkit -f -U {socket} file {backing}'. The check records and cuts its disk.
    #[arg(long, value_name = "COMMAND", conflicts_with_all = ["sawmill", "target", "self_test"])]
    device: Option<String>,

    /// Check this binary itself: record and cut its journal. The volume comes back with the journal
    /// kept, lost, stale and elsewhere, each time with the store of that time.
    #[arg(long, conflicts_with_all = ["target", "self_test"])]
    sawmill: bool,

    /// With --sawmill: what a completed flush guarantees on the volume.
    #[arg(long, value_name = "MODE", value_enum, default_value = "logged")]
    flush: FlushMeans,

    /// A file, a block device or an NBD URI. The check records what is written to it, and makes the
    /// images from the recording, so it judges the workload and its file system. OVERWRITES the
    /// target.
    #[arg(long, value_name = "PATH|URI", conflicts_with = "self_test")]
    target: Option<String>,

    /// With --target: allow the check to overwrite what it holds.
    #[arg(long, requires = "target")]
    overwrite: bool,

    /// An existing write log: a folder that --keep left, or a log of dm-log-writes or of QEMU's
    /// blklogwrites.
    #[arg(long, value_name = "PATH", conflicts_with_all = ["target", "self_test"])]
    write_log: Option<PathBuf>,

    /// Check the checker: plant faults in a device of its own, each of which must be found.
    #[arg(long)]
    self_test: bool,

    /// What the device promises between two flushes. sector: each sector by itself is old or new,
    /// as on a plain disk with a cache. prefix: the state after all writes up to some point.
    /// Default: sector; with --sawmill prefix.
    #[arg(long, value_name = "RULE", value_enum)]
    rule: Option<Promise>,

    /// Size of the recorded disk, or of the image of a log made elsewhere. Default: 64M; for file
    /// systems 512M.
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    disk_size: Option<u64>,
}

#[derive(Args)]
#[command(next_help_heading = "What is done to it, and who judges")]
struct WorkArguments {
    /// The workload: stamps (each sector identifies its write), a file system (ext4, xfs,
    /// btrfs: each file proves its own content), or a command line with {device}, the block device.
    #[arg(long, value_name = "WORK", default_value = "stamps")]
    workload: String,

    /// The judge: ext4, xfs or btrfs (mount, unmount, fsck), or a command line with {image} that
    /// exits with 0 if all is well. Default: the workload judges.
    #[arg(long, value_name = "WHO")]
    check: Option<String>,

    /// Requests of the workload with stamps.
    #[arg(long, value_name = "N", default_value_t = REQUESTS_DEFAULT)]
    requests: u64,

    /// Files to create, replace and remove in a file system.
    #[arg(long, value_name = "N", default_value_t = FILES_DEFAULT)]
    files: u64,

    /// Also trim, and check that trimmed ranges read as zeroes. Always on with --sawmill.
    #[arg(long)]
    trim: bool,

    /// The first entry before which power may fail; before it, the device is still being set up.
    /// Default: the first entry; for file systems the first one after mkfs.
    #[arg(long, value_name = "ENTRY")]
    first: Option<usize>,
}

#[derive(Args)]
#[command(next_help_heading = "A server that is really crashed")]
struct CrashArguments {
    /// With --target: a command line that crashes the device's server and returns when it serves
    /// again ('systemctl kill -s KILL ...', a hand-off). It runs with requests in flight. On a
    /// block device, each of them must still succeed.
    #[arg(long, value_name = "COMMAND", requires = "target")]
    crash: Option<String>,

    /// Number of crashes. Before each, --requests requests are answered.
    #[arg(long, value_name = "N", requires = "crash", default_value_t = ROUNDS_DEFAULT)]
    rounds: u64,

    /// What must be there after a crash: everything that was answered, or only what was flushed.
    #[arg(long, value_name = "WHAT", value_enum, requires = "crash", default_value = "answered")]
    keeps: GuaranteeOption,
}

/// What survives a crash, as values of an option.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum GuaranteeOption {
    Answered,
    Flushed,
}

/// What a flush guarantees on a volume of the check, as values of an option.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum FlushMeans {
    Logged,
    Stored,
}

/// The rules, as values of an option.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Promise {
    Sector,
    Prefix,
}

fn parse_tear(text: &str) -> Result<u64, String> {
    match text.parse() {
        Ok(bytes @ (0 | 512 | 4096)) => Ok(bytes),
        _ => Err(format!("'{text}' is not a size to tear at; write 512, 4096, or 0 for never")),
    }
}

/// Runs the command.
pub fn run(console: &Console, arguments: &Arguments) -> Result<Exit> {
    if arguments.subject.self_test {
        return self_test::run(console, arguments);
    }
    if let (Some(command), Some(target)) = (&arguments.crash.crash, &arguments.subject.target) {
        return crash::run(console, arguments, command, target);
    }
    let place = WorkFolder::new(arguments)?;
    let subject = arguments.subject()?;
    let judge = arguments.judge()?;
    let (mut recorded, wrong) = obtain(arguments, subject.as_deref(), place.path())?;
    if let Some(first) = arguments.work.first {
        recorded.begin_at(first)?;
    }
    let rule = arguments.rule();
    let folder = place.path();
    let cut_check =
        CutCheck { recorded: &recorded, subject: subject.as_deref(), rule, judge: &judge, folder };
    // A single cut needs no plan and no report: it is how a finding is repeated.
    if let Some(cut) = &arguments.cut {
        return check_again(console, &cut_check, cut, arguments);
    }
    let modes = cut_check.modes();
    let mut progress = Progress::new("images checked");
    let campaign = recorded.campaign(&modes, arguments.budget());
    let report = campaign.run(
        |done, total| progress.show(done as u64, total as u64),
        |remains| cut_check.check(remains),
    )?;
    drop(progress);
    let found = wrong.is_some() || !report.findings.is_empty();
    let kept = place.end(found);
    let document = Document::new(arguments, report, wrong, kept.as_deref());
    if console.json {
        output::json(&document)?
    } else {
        document.print()?
    }
    Ok(if found { Exit::Negative } else { Exit::Ok })
}

/// Makes the recording, or opens an existing one. Also returns the target's wrong answers during
/// it.
fn obtain(
    arguments: &Arguments,
    subject: Option<&dyn Subject>,
    folder: &Path,
) -> Result<(RecordedRun, Option<String>)> {
    let disk_bytes = arguments.disk_bytes();
    if let Some(log) = &arguments.subject.write_log {
        let recorded = if log.is_dir() {
            RecordedRun::open(log)?
        } else {
            RecordedRun::foreign(log, arguments.subject.disk_size.unwrap_or(0))?
        };
        return Ok((recorded, None));
    }
    let work = arguments.work()?;
    if let Some(subject) = subject {
        return Ok((run::below(subject, disk_bytes, &work, arguments.seed, folder)?, None));
    }
    let Some(target) = &arguments.subject.target else {
        return Err(Failure::usage(
            "nothing to check; give --device, --sawmill, --target, --write-log or --self-test",
        ));
    };
    // Before the target is opened for writing.
    arguments.require_overwrite(target)?;
    let device: Arc<dyn BlockDevice> = if is_uri(target) {
        Arc::new(NbdTarget::connect(target)?)
    } else {
        Arc::new(FileTarget::open(Path::new(target))?)
    };
    Ok(run::above(device, &work, arguments.seed, folder)?)
}

/// Whether a target is an export, not a file or a device.
fn is_uri(target: &str) -> bool {
    target.starts_with("nbd") && target.contains("://")
}

/// Checks one cut of an existing recording.
fn check_again(
    console: &Console,
    cut_check: &CutCheck<'_>,
    cut: &PowerCut,
    arguments: &Arguments,
) -> Result<Exit> {
    let verdict = cut_check.at(cut, arguments.mode, arguments.stale_of)?;
    let found = verdict.as_ref().err();
    if console.json {
        let ok = found.is_none();
        output::json(&serde_json::json!({ "cut": cut.to_string(), "ok": ok, "found": found }))?;
    } else {
        output::line(&format!("{cut}: {}", found.map_or("nothing is wrong", String::as_str)))?;
    }
    Ok(if found.is_some() { Exit::Negative } else { Exit::Ok })
}

/// Where the recording, the images and the sockets are.
struct WorkFolder {
    folder: PathBuf,
    /// The folder is removed when this is dropped.
    temporary: Option<tempfile::TempDir>,
}

impl WorkFolder {
    fn new(arguments: &Arguments) -> Result<Self> {
        // A restarted device finds its store beside its recording.
        let existing_folder = arguments.keep.as_ref().or(arguments
            .subject
            .write_log
            .as_ref()
            .filter(|log| log.is_dir()));
        let Some(folder) = existing_folder else {
            let mut builder = tempfile::Builder::new();
            builder.prefix("sawmill-verify-");
            // In memory, syncs cost nothing, and a check has many of them.
            let in_memory =
                std::env::var_os("TMPDIR").is_none().then(|| builder.tempdir_in("/dev/shm").ok());
            let temporary = match in_memory.flatten() {
                Some(temporary) => temporary,
                None => builder
                    .tempdir()
                    .map_err(|error| Failure::io("cannot make a folder", &error))?,
            };
            return Ok(WorkFolder {
                folder: temporary.path().to_owned(),
                temporary: Some(temporary),
            });
        };
        let what = || format!("cannot use the folder {}", folder.display());
        std::fs::create_dir_all(folder).map_err(|error| Failure::io(what(), &error))?;
        let folder = folder.canonicalize().map_err(|error| Failure::io(what(), &error))?;
        let is_occupied = std::fs::read_dir(&folder)
            .map_err(|error| Failure::io(what(), &error))?
            .next()
            .is_some();
        if is_occupied && arguments.keep.is_some() {
            let text = format!("{} is not empty; give --keep another folder", folder.display());
            return Err(Failure::new(Exit::Exists, text));
        }
        Ok(WorkFolder { folder, temporary: None })
    }

    fn path(&self) -> &Path {
        &self.folder
    }

    /// Keeps the folder if --keep names it or findings need it.
    fn end(self, found: bool) -> Option<PathBuf> {
        match self.temporary {
            // A finding without its recording cannot be repeated.
            Some(temporary) if found => Some(temporary.keep()),
            Some(_) => None,
            None => Some(self.folder),
        }
    }
}
