//! `sawmill verify-crash`: what a block device, and what is on it, is after power failed at any moment, or
//! after its server was crashed.
//!
//! Invariant: a finding comes with the command that shows it again, and what that command needs is kept.
//! Not here: recording, cutting, judging (`crates/verify`).

mod crash;
mod document;
mod plan;
mod self_test;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::{Args, ValueEnum};
use sawmill_device::BlockDevice;
use sawmill_verify::cut::Cut;
use sawmill_verify::look::Look;
use sawmill_verify::run;
use sawmill_verify::session::Recorded;
use sawmill_verify::subject::{Subject, Way};
use sawmill_verify::target::{FileTarget, NbdTarget};

use self::document::Document;
use sawmill_console::Console;
use sawmill_console::exit::{Exit, Failure, Result};
use sawmill_console::output::{self, Progress};
use sawmill_console::units::parse_size;

/// Find out what a block device holds after power failed at any moment.
///
/// Records every write, flush, FUA and discard while a workload runs, cuts the recording at every legal
/// point (or as many as --images allows), makes the image of what a disk may hold then, and has it judged:
/// by the workload's own stamps, by a file system (mount, then fsck), or by a script. Exit code 0: nothing
/// was found; 1: findings, each with the command that shows it again.
///
/// One of --device, --sawmill, --target, --write-log, --self-test says what is checked. Everything runs on
/// this machine; --device and --sawmill need nbdfuse, file systems need root.
///
/// With --target and --crash nothing is recorded: the device's server is really crashed under the stamped
/// workload, again and again, and what is there then is judged.
#[derive(Args)]
pub struct Arguments {
    #[command(flatten)]
    subject: SubjectArguments,

    #[command(flatten)]
    work: WorkArguments,

    /// Images to check at most. Without it 500, of file systems 60.
    #[arg(long, value_name = "N")]
    images: Option<usize>,

    /// Tear writes at multiples of 512 or 4096 bytes; 0: never.
    #[arg(long, value_name = "BYTES", value_parser = parse_tear, default_value = "512")]
    tear: u64,

    #[command(flatten)]
    crash: CrashArguments,

    /// Where chance comes from: the same seed, the same workload and the same cuts.
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,

    /// Keep the recording and all it takes to repeat a finding in this folder, which must be empty or new.
    #[arg(long, value_name = "FOLDER")]
    keep: Option<PathBuf>,

    /// With --write-log: check this one cut, as a finding names it.
    #[arg(long, value_name = "CUT", requires = "write_log")]
    cut: Option<Cut>,

    /// With --cut: how the device comes back: kept, lost, stale or elsewhere.
    #[arg(long, value_name = "WAY", requires = "cut", default_value = "kept")]
    way: Way,

    /// With --way stale: the entry before which the stale disk was kept.
    #[arg(long, value_name = "ENTRY", requires = "cut")]
    stale_of: Option<usize>,
}

#[derive(Args)]
#[command(next_help_heading = "What is checked")]
struct SubjectArguments {
    /// An NBD server's command line, in the foreground, with {backing} (its disk) and {socket} in it:
    /// 'nbdkit -f -U {socket} file {backing}'. Its disk is recorded and cut.
    #[arg(long, value_name = "COMMAND", conflicts_with_all = ["sawmill", "target", "self_test"])]
    device: Option<String>,

    /// Sawmill itself, by this binary: its journal is recorded and cut; it comes back with the journal kept,
    /// lost, stale, and elsewhere, each with the store as it was then.
    #[arg(long, conflicts_with_all = ["target", "self_test"])]
    sawmill: bool,

    /// With --sawmill: what a completed flush means on the volume.
    #[arg(long, value_name = "MODE", value_enum, default_value = "logged")]
    flush: FlushMeans,

    /// A file, a block device or an NBD URI: what is written to it is recorded, and the images are made of
    /// the recording. This judges the workload and its file system. The target is overwritten.
    #[arg(long, value_name = "PATH|URI", conflicts_with = "self_test")]
    target: Option<String>,

    /// With --target: yes, overwrite what it holds.
    #[arg(long, requires = "target")]
    overwrite: bool,

    /// A write log made before: a folder that --keep left, or a log of dm-log-writes or QEMU's blklogwrites.
    #[arg(long, value_name = "PATH", conflicts_with_all = ["target", "self_test"])]
    write_log: Option<PathBuf>,

    /// The checker itself: plants faults in a device of its own and demands that each is found.
    #[arg(long)]
    self_test: bool,

    /// What the device promises between two flushes: that of a plain disk with a cache (each sector by
    /// itself), or that it is as after all writes up to some moment. With --sawmill prefix.
    #[arg(long, value_name = "RULE", value_enum)]
    rule: Option<Promise>,

    /// Size of the recorded disk; for a foreign log of the image. Without it 64M, for file systems 512M.
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    disk_size: Option<u64>,
}

#[derive(Args)]
#[command(next_help_heading = "What is done to it, and who judges")]
struct WorkArguments {
    /// stamps (sectors that say who wrote them), ext4, xfs, btrfs (files whose content proves itself), or a
    /// command line with {device}, the block device.
    #[arg(long, value_name = "WORK", default_value = "stamps")]
    workload: String,

    /// Who judges: ext4, xfs, btrfs (mount, unmount, fsck), or a command line with {image} whose exit code
    /// says it. Without it the workload itself.
    #[arg(long, value_name = "WHO")]
    check: Option<String>,

    /// Requests of the stamped workload.
    #[arg(long, value_name = "N", default_value_t = 600)]
    requests: u64,

    /// Files made, replaced and removed in a file system.
    #[arg(long, value_name = "N", default_value_t = 60)]
    files: u64,

    /// Also trim, and demand that what was trimmed reads as zeroes. On with --sawmill.
    #[arg(long)]
    trim: bool,

    /// The first entry before which power may fail. Until then the device was still being made. Without it
    /// the first, of file systems the first after mkfs.
    #[arg(long, value_name = "ENTRY")]
    first: Option<usize>,
}

#[derive(Args)]
#[command(next_help_heading = "A server that is really crashed")]
struct CrashArguments {
    /// With --target: a command line that crashes the server of that device and returns when it serves again
    /// ('systemctl kill -s KILL ...', a hand-off). It runs with requests in flight; on a block device each of
    /// them must still succeed.
    #[arg(long, value_name = "COMMAND", requires = "target")]
    crash: Option<String>,

    /// How often. --requests are answered before each.
    #[arg(long, value_name = "N", requires = "crash", default_value_t = 20)]
    rounds: u64,

    /// What must be there afterwards: everything that was answered, or only what was flushed.
    #[arg(long, value_name = "WHAT", value_enum, requires = "crash", default_value = "answered")]
    keeps: Kept,
}

/// What survives a crash, as words of the command line.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Kept {
    Answered,
    Flushed,
}

/// What a flush means on a volume of the check, as words of the command line.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum FlushMeans {
    Logged,
    Stored,
}

/// The rules as words of the command line.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Promise {
    Sector,
    Prefix,
}

fn parse_tear(text: &str) -> Result<u64, String> {
    match text.parse() {
        Ok(bytes @ (0 | 512 | 4096)) => Ok(bytes),
        _ => Err(format!("'{text}' is no size to tear at; write 512, 4096, or 0 for never")),
    }
}

/// Carries the command out.
pub fn run(console: &Console, arguments: &Arguments) -> Result<Exit> {
    if arguments.subject.self_test {
        return self_test::run(console, arguments);
    }
    if let (Some(command), Some(target)) = (&arguments.crash.crash, &arguments.subject.target) {
        return crash::run(console, arguments, command, target);
    }
    let place = Place::new(arguments)?;
    let subject = arguments.subject()?;
    let judge = arguments.judge()?;
    let (mut recorded, wrong) = obtain(arguments, subject.as_deref(), place.path())?;
    if let Some(first) = arguments.work.first {
        recorded.begin_at(first)?;
    }
    let rule = arguments.rule();
    let folder = place.path();
    let look = Look { recorded: &recorded, subject: subject.as_deref(), rule, judge: &judge, folder };
    if let Some(cut) = &arguments.cut {
        return look_again(console, &look, cut, arguments);
    }
    let ways = look.ways();
    let mut progress = Progress::new("images checked");
    let campaign = recorded.campaign(&ways, arguments.budget());
    let report =
        campaign.run(|done, total| progress.show(done as u64, total as u64), |remains| look.look(remains))?;
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

/// Makes the recording, or opens one; also says what the target itself did wrong meanwhile.
fn obtain(
    arguments: &Arguments,
    subject: Option<&dyn Subject>,
    folder: &Path,
) -> Result<(Recorded, Option<String>)> {
    let disk_bytes = arguments.disk_bytes();
    if let Some(log) = &arguments.subject.write_log {
        let recorded = if log.is_dir() {
            Recorded::open(log)?
        } else {
            Recorded::foreign(log, arguments.subject.disk_size.unwrap_or(0))?
        };
        return Ok((recorded, None));
    }
    let work = arguments.work()?;
    if let Some(subject) = subject {
        return Ok((run::below(subject, disk_bytes, &work, arguments.seed, folder)?, None));
    }
    let Some(target) = &arguments.subject.target else {
        return Err(Failure::usage(
            "nothing is named that could be checked; give --device, --sawmill, --target, --write-log or \
             --self-test",
        ));
    };
    arguments.may_overwrite(target)?;
    let device: Arc<dyn BlockDevice> = if is_uri(target) {
        Arc::new(NbdTarget::connect(target)?)
    } else {
        Arc::new(FileTarget::open(Path::new(target))?)
    };
    Ok(run::above(device, &work, arguments.seed, folder)?)
}

/// Whether a target is an export, rather than a file or a device.
fn is_uri(target: &str) -> bool {
    target.starts_with("nbd") && target.contains("://")
}

/// One cut of an older recording.
fn look_again(console: &Console, look: &Look<'_>, cut: &Cut, arguments: &Arguments) -> Result<Exit> {
    let verdict = look.at(cut, arguments.way, arguments.stale_of)?;
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
struct Place {
    folder: PathBuf,
    /// Goes when dropped.
    temporary: Option<tempfile::TempDir>,
}

impl Place {
    fn new(arguments: &Arguments) -> Result<Self> {
        // A device that comes back finds its store where its recording lies.
        let given =
            arguments.keep.as_ref().or(arguments.subject.write_log.as_ref().filter(|log| log.is_dir()));
        let Some(folder) = given else {
            let mut builder = tempfile::Builder::new();
            builder.prefix("sawmill-verify-");
            // In memory syncs cost nothing, and a check is full of them.
            let in_memory = std::env::var_os("TMPDIR").is_none().then(|| builder.tempdir_in("/dev/shm").ok());
            let temporary = match in_memory.flatten() {
                Some(temporary) => temporary,
                None => builder.tempdir().map_err(|error| Failure::io("cannot make a folder", &error))?,
            };
            return Ok(Place { folder: temporary.path().to_owned(), temporary: Some(temporary) });
        };
        let what = || format!("cannot use the folder {}", folder.display());
        std::fs::create_dir_all(folder).map_err(|error| Failure::io(what(), &error))?;
        let folder = folder.canonicalize().map_err(|error| Failure::io(what(), &error))?;
        let taken = std::fs::read_dir(&folder).map_err(|error| Failure::io(what(), &error))?.next().is_some();
        if taken && arguments.keep.is_some() {
            let text = format!("{} is not empty; give --keep another folder", folder.display());
            return Err(Failure::new(Exit::Exists, text));
        }
        Ok(Place { folder, temporary: None })
    }

    fn path(&self) -> &Path {
        &self.folder
    }

    /// Keeps the folder where somebody wants it, or findings need it.
    fn end(self, found: bool) -> Option<PathBuf> {
        match self.temporary {
            Some(temporary) if found => Some(temporary.keep()),
            Some(_) => None,
            None => Some(self.folder),
        }
    }
}
