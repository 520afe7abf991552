//! How a process opens the volumes that it serves: options of `serve` and `target`.
//!
//! Invariant: contradictory options (a journal for a reader, one name twice) are refused before
//! anything is opened.
//!
//! Not here: the doors (`door_options`), carrying the plan out (`wiring`), default sizes (`sizes`).

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use sawmill_doors::NbdShare;
use sawmill_volume::{GcChoice, GcPolicy, OpenOptions, limits};

use crate::config::{Paths, VolumeAddress};
use crate::fencing::FencingOption;
use crate::folders;
use crate::memory::StagingOption;
use crate::plan::{CachePlan, JournalPlan, ServePlan};
use crate::sizes::JournalSize;
use sawmill_console::exit::{Failure, Result};
use sawmill_console::units::{exact_duration, exact_size, parse_duration, parse_size};

/// Where the local parts of volumes are, and which losses are accepted.
#[derive(Args)]
pub(super) struct OpenArguments {
    /// The journal: a file (created if absent) or a block device; with several volumes, a folder.
    #[arg(long, value_name = "PATH")]
    journal: Option<PathBuf>,

    /// Size of each new journal. Default: 1G, or less: all volumes of this command share a quarter
    /// of what is free on the disk. A journal that exists keeps its size.
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    journal_bytes: Option<u64>,

    /// The read cache: a file (created if absent) or a block device.
    #[arg(long, value_name = "PATH")]
    cache: Option<PathBuf>,

    /// Size of the read cache, which all volumes of this command share; 0 for none. Default: that
    /// of the cache if it exists; otherwise 4G, or a quarter of what is free on the disk if that is
    /// less.
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    cache_bytes: Option<u64>,

    /// Serve read-only: no journal, no new attachment, no writes. Can run alongside a writer.
    #[arg(long)]
    pub(super) read_only: bool,

    /// Accept the loss of a missing or unusable journal: the newest writes are lost, and the volume
    /// rolls back to an earlier cut.
    #[arg(long, conflicts_with = "read_only")]
    accept_journal_loss: bool,

    /// Accept the loss of memory that holds accepted writes and that the journal requires.
    /// Flushed writes are kept.
    #[arg(long, conflicts_with = "read_only")]
    accept_memory_loss: bool,

    /// Accept a store that is older than this machine has seen it: one that was restored from a
    /// backup.
    #[arg(long, conflicts_with = "read_only")]
    accept_older_store: bool,

    #[command(flatten)]
    fencing: FencingOption,
}

/// Options that few users need to change.
#[derive(Args)]
#[command(next_help_heading = "Tuning")]
pub(super) struct Tuning {
    /// Store a segment at this age, even if it is small; 0: never by age.
    #[arg(long, value_name = "DURATION", value_parser = parse_duration,
          default_value = exact_duration(defaults().segment_age_max))]
    segment_age: Duration,

    /// Sync the journal when an accepted write is this old, even without a flush; 0: never.
    #[arg(long, value_name = "DURATION", value_parser = parse_duration,
          default_value = exact_duration(defaults().log_age_max))]
    log_age: Duration,

    /// Make writes and flushes wait while an accepted write of this age is not stored, at least 1s;
    /// 0: never.
    #[arg(long, value_name = "DURATION", value_parser = parse_age,
          default_value = exact_duration(defaults().unstored_age_max.unwrap_or_default()))]
    unstored_age_max: Duration,

    /// Write a checkpoint after this much log.
    #[arg(long, value_name = "SIZE", value_parser = parse_size,
          default_value = exact_size(limits::CHECKPOINT_BYTES_DEFAULT))]
    checkpoint_bytes: u64,

    /// Segments to upload in parallel, at most 32.
    #[arg(long, value_name = "N", default_value_t = limits::UPLOADS_DEFAULT,
          value_parser = clap::value_parser!(u32).range(1..=limits::UPLOADS_MAX as i64))]
    uploads: u32,

    #[command(flatten)]
    staging: StagingOption,

    /// Memory in that folder for one volume.
    #[arg(long, value_name = "SIZE", value_parser = parse_size,
          default_value = exact_size(limits::STAGING_BYTES_DEFAULT))]
    staging_bytes: u64,

    /// The most bytes in flight ahead of a volume's sequential readers, and as many in memory; 0:
    /// none.
    #[arg(long, value_name = "SIZE", value_parser = parse_size,
          default_value = exact_size(limits::PREFETCH_BYTES_DEFAULT))]
    prefetch: u64,

    /// How much of its boot set a volume fetches into the read cache once it is open; 0: nothing.
    #[arg(long, value_name = "SIZE", value_parser = parse_size,
          default_value = exact_size(limits::BOOT_SET_FETCH_BYTES_DEFAULT))]
    boot_set_bytes: u64,

    /// Collect garbage when less than this share of all data is live, 0 to 0.95; 0: never.
    #[arg(long, value_name = "SHARE", default_value_t = GcPolicy::default().start)]
    gc_start: f64,

    /// Stop collecting when at least this share is live. Default: 0.02 above --gc-start.
    #[arg(long, value_name = "SHARE")]
    gc_stop: Option<f64>,

    /// What to collect first: greedy (the emptiest) or cost-benefit (also by age).
    #[arg(
        long, value_name = "CHOICE", default_value = "greedy", value_parser = ["greedy",
        "cost-benefit"],
    )]
    gc_choice: String,

    /// Live data to move per second at most; 0: no limit. With a limit, garbage has no bound.
    #[arg(long, value_name = "SIZE", value_parser = parse_size,
          default_value = exact_size(GcPolicy::default().bytes_per_second_max))]
    gc_rate: u64,
}

/// What an attachment does if its user chooses nothing.
fn defaults() -> OpenOptions {
    OpenOptions::new(PathBuf::new())
}

impl Tuning {
    fn gc(&self) -> Result<GcPolicy> {
        let policy = GcPolicy {
            start: self.gc_start,
            stop: self.gc_stop.unwrap_or(self.gc_start + 0.02),
            choice: if self.gc_choice == "greedy" {
                GcChoice::Greedy
            } else {
                GcChoice::CostBenefit
            },
            bytes_per_second_max: self.gc_rate,
        };
        policy.fault().map_or(Ok(policy), |fault| {
            Err(Failure::usage(format!("--gc-start, --gc-stop: {fault}")))
        })
    }
}

impl OpenArguments {
    /// What to open and how, without doors.
    pub(super) fn plan(
        &self,
        paths: &Paths,
        tuning: &Tuning,
        volumes: Vec<VolumeAddress>,
    ) -> Result<ServePlan> {
        for (index, address) in volumes.iter().enumerate() {
            if volumes[..index].iter().any(|other| other.display_name() == address.display_name()) {
                return Err(Failure::usage(format!(
                    "two volumes have the name {}; exports need different names: serve one of them \
                     from another process",
                    address.name
                )));
            }
        }
        if let Some(address) =
            volumes.iter().find(|address| address.cut.is_some() && !self.read_only)
        {
            return Err(Failure::usage(format!(
                "{} is a past state: add --read-only, or write to a clone: sawmill clone {} NEW",
                address.display_name(),
                address.display_name()
            )));
        }
        if self.read_only && self.journal.is_some() {
            return Err(Failure::usage(
                "--journal has no effect with --read-only; drop one of them",
            ));
        }
        let cache = match &self.cache {
            // First: `--cache-bytes 0` means no cache, also where a file is named.
            _ if self.cache_bytes == Some(0) => CachePlan::None,
            Some(path) => CachePlan::At(path.clone()),
            None => CachePlan::Default(paths.cache_path()?),
        };
        let gc = tuning.gc()?;
        // May make a folder: everything else is checked by now.
        let journal = plan_journal(self.journal.as_ref(), volumes.len())?;
        let place = journal.place(paths)?;
        Ok(ServePlan {
            journal,
            journal_size: JournalSize::new(self.journal_bytes, &place, volumes.len()),
            options: OpenOptions {
                staging_folder: tuning.staging.folder(),
                staging_bytes: tuning.staging_bytes,
                read_only: self.read_only,
                accept_journal_loss: self.accept_journal_loss,
                accept_memory_loss: self.accept_memory_loss,
                accept_older_store: self.accept_older_store,
                no_fencing: self.fencing.no_fencing,
                segment_age_max: tuning.segment_age,
                log_age_max: tuning.log_age,
                unstored_age_max: Some(tuning.unstored_age_max).filter(|age| !age.is_zero()),
                checkpoint_bytes: tuning.checkpoint_bytes,
                uploads_max: tuning.uploads,
                prefetch_bytes: tuning.prefetch,
                gc,
                ..defaults()
            },
            doors: Vec::new(),
            nbd: NbdShare::default(),
            volumes,
            cache,
            cache_bytes: self.cache_bytes,
            boot_set_bytes: tuning.boot_set_bytes,
            admin: None,
        })
    }
}

/// Parses the maximum age of unstored writes. Nothing is stored in less than a second.
fn parse_age(text: &str) -> std::result::Result<Duration, String> {
    let age = parse_duration(text)?;
    if age.is_zero() || age >= Duration::from_secs(1) {
        return Ok(age);
    }
    Err("an age below 1s would make every write wait; give 1s or more, or 0".to_owned())
}

fn plan_journal(journal: Option<&PathBuf>, volumes: usize) -> Result<JournalPlan> {
    match journal {
        None => Ok(JournalPlan::State),
        Some(path) if path.is_dir() => Ok(JournalPlan::Folder(path.clone())),
        // A path that does not exist yet is a file to make for one volume, a folder for several.
        Some(path) if volumes == 1 => Ok(JournalPlan::At(path.clone())),
        Some(path) if path.exists() => Err(Failure::usage(format!(
            "--journal {} is one file for {volumes} volumes; give a folder, or serve them one by \
            one",
            path.display()
        ))),
        Some(path) => {
            folders::make_folder(path)?;
            Ok(JournalPlan::Folder(path.clone()))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sawmill_console::exit::Exit;

    #[test]
    fn one_journal_file_cannot_be_shared_by_two_volumes() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("journal");
        std::fs::write(&file, "").unwrap();
        assert_eq!(plan_journal(Some(&file), 1).unwrap(), JournalPlan::At(file.clone()));
        assert_eq!(plan_journal(Some(&file), 2).unwrap_err().exit(), Exit::Usage);
        let inside = folder.path().to_path_buf();
        assert_eq!(plan_journal(Some(&inside), 2).unwrap(), JournalPlan::Folder(inside.clone()));
        let absent = folder.path().join("journals");
        assert_eq!(plan_journal(Some(&absent), 2).unwrap(), JournalPlan::Folder(absent.clone()));
        assert!(absent.is_dir());
    }
}
