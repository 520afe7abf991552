//! From the command line to a subject, a workload, a judge and a budget.
//!
//! Invariant: nothing here opens or changes a device.
//!
//! Not here: which cuts are checked within the budget (`sawmill_verify::plan`).

use std::path::{Path, PathBuf};

use sawmill_verify::cut_check::{Judge, Rule};
use sawmill_verify::file_system::FileSystem;
use sawmill_verify::plan::Budget;
use sawmill_verify::run::Work;
use sawmill_verify::subject::{CommandLine, Sawmill, Subject};

use super::{Arguments, FlushMeans, Promise};
use sawmill_console::exit::{Exit, Failure, Result};

const MIB: u64 = 1 << 20;
/// This check as a program of its own, without the engine.
const SMALL_CHECKER: &str = "sawmill-verify-crash";
/// Size of the device for the workload with stamps. It is small, so that writes overlap.
pub(super) const STAMPED_BYTES: u64 = MIB;
/// Sizes of the checked volume, with stamps and with a file system.
const VOLUME_BYTES: u64 = 8 * MIB;
const FILE_SYSTEM_BYTES: u64 = 512 * MIB;
const DISK_BYTES: u64 = 64 * MIB;

/// The command line that starts this check.
pub(super) fn own_command() -> Vec<String> {
    let own = std::env::current_exe().unwrap_or_default();
    match is_small_checker(&own) {
        true => vec![SMALL_CHECKER.to_owned()],
        false => vec!["sawmill".to_owned(), "verify-crash".to_owned()],
    }
}

fn is_small_checker(program: &Path) -> bool {
    program.file_name().is_some_and(|name| name == SMALL_CHECKER)
}

/// The program that serves volumes: this one, or the `sawmill` beside the small checker.
fn serving_binary() -> Result<PathBuf> {
    let own = std::env::current_exe()
        .map_err(|error| Failure::io("cannot find the path of this binary", &error))?;
    if !is_small_checker(&own) {
        return Ok(own);
    }
    // Beside it and not on the PATH: a package has both, and they are of one version.
    let beside = own.with_file_name("sawmill");
    if beside.is_file() {
        return Ok(beside);
    }
    Err(Failure::usage(format!(
        "--sawmill checks the program sawmill, which {SMALL_CHECKER} does not contain: put it at \
         {}, or run `sawmill verify-crash --sawmill`",
        beside.display()
    )))
}

impl Arguments {
    /// The device under test, if there is one.
    pub(super) fn subject(&self) -> Result<Option<Box<dyn Subject>>> {
        if let Some(line) = &self.subject.device {
            return Ok(Some(Box::new(CommandLine::new(line)?)));
        }
        if !self.subject.sawmill {
            return Ok(None);
        }
        let binary = serving_binary()?;
        let volume_bytes = if self.on_files() { FILE_SYSTEM_BYTES } else { VOLUME_BYTES };
        let flush = if self.subject.flush == FlushMeans::Stored { "stored" } else { "logged" };
        Ok(Some(Box::new(Sawmill::new(&binary, volume_bytes, flush))))
    }

    /// The workload that the options choose.
    pub(super) fn work(&self) -> Result<Work> {
        let word = self.work.workload.as_str();
        if word == "stamps" {
            // A volume of ours reads as zeroes after a discard. Other devices may keep the bytes
            // (D9).
            let trim = self.work.trim || self.subject.sawmill;
            return Ok(Work::Stamps {
                area_bytes: STAMPED_BYTES,
                requests: self.work.requests,
                trim,
            });
        }
        if let Ok(kind) = word.parse() {
            return Ok(Work::Files { kind, steps: self.work.files });
        }
        if word.contains("{device}") {
            return Ok(Work::Command(word.to_owned()));
        }
        Err(Failure::usage(format!(
            "'{word}' is not a workload; write stamps, ext4, xfs, btrfs, or a command line with \
             {{device}} in it"
        )))
    }

    /// What the device promises.
    pub(super) fn rule(&self) -> Rule {
        match self.subject.rule {
            Some(Promise::Sector) => Rule::Sector,
            Some(Promise::Prefix) => Rule::Prefix,
            None if self.subject.sawmill => Rule::Prefix,
            None => Rule::Sector,
        }
    }

    /// Returns `Refused` unless the user allowed the target to be overwritten.
    pub(super) fn require_overwrite(&self, target: &str) -> Result<()> {
        if self.subject.overwrite {
            return Ok(());
        }
        let text = format!("the workload overwrites {target}; add --overwrite to allow that");
        Err(Failure::new(Exit::Refused, text))
    }

    /// The judge that the options choose; without one, the workload judges.
    pub(super) fn judge(&self) -> Result<Judge> {
        match self.work.check.as_deref() {
            None => Ok(Judge::Workload),
            Some(word) if word.contains("{image}") => Ok(Judge::Script(word.to_owned())),
            Some(word) => word.parse::<FileSystem>().map(Judge::FileSystem).map_err(|_| {
                Failure::usage(format!(
                    "'{word}' is not a judge; write ext4, xfs, btrfs, or a command line with \
                    {{image}} in it"
                ))
            }),
        }
    }

    /// Whether images are of file systems, which take a second each.
    fn on_files(&self) -> bool {
        let known = |word: &str| word.parse::<FileSystem>().is_ok();
        known(&self.work.workload) || self.work.check.as_deref().is_some_and(known)
    }

    pub(super) fn budget(&self) -> Budget {
        let images_max = self.images.unwrap_or(if self.on_files() { 60 } else { 500 });
        Budget {
            images_max,
            tear_bytes: Some(self.tear).filter(|&bytes| bytes > 0),
            seed: self.seed,
        }
    }

    /// The size of the recorded disk.
    pub(super) fn disk_bytes(&self) -> u64 {
        let usual =
            if self.on_files() && !self.subject.sawmill { FILE_SYSTEM_BYTES } else { DISK_BYTES };
        self.subject.disk_size.unwrap_or(usual)
    }
}
