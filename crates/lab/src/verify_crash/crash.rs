//! `verify-crash --target DEVICE --crash COMMAND`: crashes the server of a device and checks what
//! the device then holds.
//!
//! Invariants: a target is overwritten only with `--overwrite`. A device or file stays locked until
//! the command ends, so no mounted file system is overwritten.
//!
//! Not here: the load and the rounds (`crates/verify/src/crash.rs`).

use std::path::Path;
use std::sync::Arc;

use sawmill_device::BlockDevice;
use sawmill_sys::FileLock;
use sawmill_verify::crash::{Crashes, Guarantee};
use sawmill_verify::target::{FileTarget, NbdTarget};
use serde::Serialize;

use super::plan::STAMPED_BYTES;
use super::{Arguments, GuaranteeOption, is_uri};
use sawmill_console::Console;
use sawmill_console::exit::{Exit, Failure, Result};
use sawmill_console::output::{self, Progress};
use sawmill_console::units::human_count;

/// What `--json` prints; its names are an interface, so they stay.
#[derive(Serialize)]
struct Document {
    ok: bool,
    rounds: u64,
    answered: u64,
    unanswered: u64,
    demanded: u64,
    seed: u64,
    /// The crash after which something was wrong.
    round: Option<u64>,
    found: Option<String>,
}

pub(super) fn run(
    console: &Console,
    arguments: &Arguments,
    command: &str,
    target: &str,
) -> Result<Exit> {
    if arguments.work.workload != "stamps" || arguments.work.check.is_some() {
        let text = "--crash judges by stamps only; omit --workload and --check";
        return Err(Failure::usage(text));
    }
    // Before anything is opened.
    arguments.require_overwrite(target)?;
    // Otherwise a file system that is mounted on it would be overwritten.
    let _held = if is_uri(target) { None } else { Some(hold(target)?) };
    let folder =
        tempfile::tempdir().map_err(|error| Failure::io("cannot make a folder", &error))?;
    let crashes = Crashes {
        command,
        rounds: arguments.crash.rounds,
        requests: arguments.work.requests,
        area_bytes: STAMPED_BYTES,
        trim: arguments.work.trim,
        seed: arguments.seed,
        guarantee: match arguments.crash.keeps {
            GuaranteeOption::Answered => Guarantee::Answered,
            GuaranteeOption::Flushed => Guarantee::Flushed,
        },
        rule: arguments.rule(),
        // The connection to an export ends with its server. Users of a block device wait for the
        // next one.
        may_go: is_uri(target),
    };
    let mut progress = Progress::new("crashes");
    let survey =
        crashes.run(|| open(target), folder.path(), |done| progress.show(done, crashes.rounds))?;
    drop(progress);
    let (round, found) = survey.found.unzip();
    let ok = found.is_none();
    let (rounds, answered, unanswered) = (survey.rounds, survey.answered, survey.unanswered);
    let (demanded, seed) = (survey.demanded, arguments.seed);
    let document = Document { ok, rounds, answered, unanswered, demanded, seed, round, found };
    if console.json {
        output::json(&document)?
    } else {
        document.print()?
    }
    Ok(if ok { Exit::Ok } else { Exit::Negative })
}

/// The right to overwrite a device or a file that nothing else uses.
fn hold(target: &str) -> Result<FileLock> {
    FileLock::take(Path::new(target)).map_err(|error| match error.kind() {
        std::io::ErrorKind::WouldBlock => {
            let text = format!(
                "{target} is mounted, or another process uses it; unmount it, or stop that process"
            );
            Failure::new(Exit::InUse, text).caused_by(error)
        }
        _ => Failure::io(format!("cannot open {target}"), &error),
    })
}

fn open(target: &str) -> sawmill_verify::Result<Arc<dyn BlockDevice>> {
    Ok(if is_uri(target) {
        Arc::new(NbdTarget::connect(target)?)
    } else {
        Arc::new(FileTarget::direct(Path::new(target))?)
    })
}

impl Document {
    fn print(&self) -> Result<()> {
        let (answered, unanswered) = (human_count(self.answered), human_count(self.unanswered));
        let demanded = human_count(self.demanded);
        output::facts(&[
            ("crashes", human_count(self.rounds)),
            ("requests", format!("{answered} answered, {unanswered} ended with their connection")),
            ("checked", format!("{demanded} writes that had to survive; seed {}", self.seed)),
            ("found", self.found.as_ref().map_or("nothing", |_| "a loss").to_owned()),
        ])?;
        match (&self.round, &self.found) {
            (Some(round), Some(found)) => output::line(&format!("\nafter crash {round}: {found}")),
            _ => Ok(()),
        }
    }
}
