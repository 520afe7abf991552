//! The report of a check, for people and for programs.
//!
//! Invariant: `repeat` names every option on which the verdict about a cut depends. Not here: what
//! `--crash` and `--self-test` print (`crash`, `self_test`).

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use sawmill_verify::report::{Finding, Report};
use sawmill_verify::subject::RecoveryMode;
use serde::Serialize;

use super::{Arguments, FlushMeans, Promise, plan};
use sawmill_console::exit::Result;
use sawmill_console::output;
use sawmill_console::units::human_count;

/// Findings that are printed in full. The others are counted; the JSON has all.
const FINDINGS_SHOWN_MAX: usize = 10;

/// What `--json` prints; its names are an interface, so they stay.
#[derive(Serialize)]
pub(super) struct Document {
    ok: bool,
    entries: usize,
    writes: usize,
    flushes: usize,
    fua: usize,
    discards: usize,
    legal_cuts: usize,
    points: usize,
    images: usize,
    ways: BTreeMap<&'static str, usize>,
    seed: u64,
    kept: Option<PathBuf>,
    /// The target's wrong answers during the recording.
    target: Option<String>,
    findings: Vec<FindingDocument>,
}

#[derive(Serialize)]
struct FindingDocument {
    cut: String,
    way: &'static str,
    what: String,
    repeat: String,
}

impl Document {
    pub(super) fn new(
        arguments: &Arguments,
        report: Report,
        wrong: Option<String>,
        kept: Option<&Path>,
    ) -> Self {
        let findings = report.findings.iter().map(|finding| FindingDocument {
            cut: finding.cut.to_string(),
            way: finding.mode.name(),
            what: finding.what.clone(),
            repeat: repeat(arguments, finding, kept),
        });
        Document {
            ok: wrong.is_none() && report.findings.is_empty(),
            findings: findings.collect(),
            entries: report.entries,
            writes: report.writes,
            flushes: report.flushes,
            fua: report.fua,
            discards: report.discards,
            legal_cuts: report.legal,
            points: report.points,
            images: report.images,
            ways: report.mode_counts,
            seed: arguments.seed,
            kept: kept.map(Path::to_owned),
            target: wrong,
        }
    }

    pub(super) fn print(&self) -> Result<()> {
        let count = |number: usize| human_count(number as u64);
        let mode_counts =
            self.ways.iter().map(|(mode, images)| format!("{mode} {}", count(*images)));
        let mut rows = vec![
            (
                "recorded",
                format!(
                    "{} entries: {} writes ({} with FUA), {} flushes, {} discards",
                    count(self.entries),
                    count(self.writes),
                    count(self.fua),
                    count(self.flushes),
                    count(self.discards)
                ),
            ),
            (
                "checked",
                format!(
                    "{} images at {} points between entries; {} legal cuts of these kinds; seed {}",
                    count(self.images),
                    count(self.points),
                    count(self.legal_cuts),
                    self.seed
                ),
            ),
        ];
        if self.ways.len() > 1 {
            rows.push(("disk", mode_counts.collect::<Vec<_>>().join(", ")));
        }
        if let Some(kept) = &self.kept {
            rows.push(("kept in", kept.display().to_string()));
        }
        let found = match self.findings.len() {
            0 => "nothing".to_owned(),
            1 => "1 image that is not legal".to_owned(),
            many => format!("{} images that are not legal", count(many)),
        };
        rows.push(("found", found));
        output::facts(&rows)?;
        if let Some(wrong) = &self.target {
            output::line(&format!("\nthe target itself answered wrongly: {wrong}"))?;
        }
        for finding in self.findings.iter().take(FINDINGS_SHOWN_MAX) {
            output::line(&format!("\nat {}, disk {}: {}", finding.cut, finding.way, finding.what))?;
            output::line(&format!("  again: {}", finding.repeat))?;
        }
        let unlisted_count = self.findings.len().saturating_sub(FINDINGS_SHOWN_MAX);
        if unlisted_count > 0 {
            output::line(&format!("\nand {unlisted_count} more; --json lists all"))?;
        }
        Ok(())
    }
}

/// The command that repeats a finding.
fn repeat(arguments: &Arguments, finding: &Finding, kept: Option<&Path>) -> String {
    let subject = &arguments.subject;
    let mut words = plan::own_command();
    words.push("--write-log".to_owned());
    // A finding is repeated on the recording. A new run would have other timing, and so another
    // recording.
    let log = subject.write_log.as_deref().or(kept).map(|path| path.display().to_string());
    words.push(quoted(&log.unwrap_or_default()));
    if let Some(line) = &subject.device {
        words.extend(["--device".to_owned(), quoted(line)]);
    }
    if subject.sawmill {
        words.push("--sawmill".to_owned());
        if subject.flush == FlushMeans::Stored {
            words.extend(["--flush".to_owned(), "stored".to_owned()]);
        }
        if arguments.work.workload != "stamps" {
            words.extend(["--workload".to_owned(), quoted(&arguments.work.workload)]);
        }
    }
    match subject.rule {
        Some(Promise::Sector) => words.extend(["--rule".to_owned(), "sector".to_owned()]),
        Some(Promise::Prefix) => words.extend(["--rule".to_owned(), "prefix".to_owned()]),
        None => {}
    }
    if let Some(check) = &arguments.work.check {
        words.extend(["--check".to_owned(), quoted(check)]);
    }
    // The size is in the recording of a run of ours; a log of another program does not say it.
    if let Some(bytes) = subject.disk_size.filter(|_| subject.write_log.is_some()) {
        words.extend(["--disk-size".to_owned(), bytes.to_string()]);
    }
    words.extend(["--cut".to_owned(), finding.cut.to_string()]);
    if finding.mode != RecoveryMode::DiskKept {
        words.extend(["--way".to_owned(), finding.mode.name().to_owned()]);
    }
    if let Some(entry) = finding.stale_of {
        words.extend(["--stale-of".to_owned(), entry.to_string()]);
    }
    words.join(" ")
}

/// A text quoted as one word for a shell.
fn quoted(text: &str) -> String {
    let is_plain =
        |character: char| character.is_ascii_alphanumeric() || "/._-:=,@".contains(character);
    if !text.is_empty() && text.chars().all(is_plain) {
        return text.to_owned();
    }
    format!("'{}'", text.replace('\'', "'\\''"))
}
