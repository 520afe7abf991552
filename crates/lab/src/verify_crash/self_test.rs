//! The checker checks itself: it must find the faults planted in a device of its own, and nothing
//! on a healthy device. Not here: the faults (`sawmill_verify::faulty`).

use std::sync::Arc;

use sawmill_verify::cut_check::{CutCheck, Judge, Rule};
use sawmill_verify::faulty::{Fault, Faulty};
use sawmill_verify::plan::Budget;
use sawmill_verify::report::Report;
use sawmill_verify::run::{self, Work};
use sawmill_verify::subject::{InProcess, RecoveryMode, Subject};
use serde::Serialize;

use sawmill_console::Console;

use super::Arguments;
use sawmill_console::exit::{Exit, Failure, Result};
use sawmill_console::output;

const DISK_BYTES: u64 = 8 << 20;
const STAMPED_BYTES: u64 = 1 << 20;
/// Images for each fault, unless --images says otherwise.
const IMAGES: usize = 200;

#[derive(Serialize)]
struct Row {
    fault: &'static str,
    images: usize,
    findings: usize,
    /// True if the fault was found, or if a healthy device gave no finding.
    ok: bool,
}

pub(super) fn run(console: &Console, arguments: &Arguments) -> Result<Exit> {
    let mut rows = Vec::new();
    for fault in Fault::ALL {
        let report = check(fault, arguments)?;
        let findings = report.findings.len();
        // A false alarm on the healthy device is as bad as a fault that is missed.
        let ok = (findings > 0) == (fault != Fault::None);
        rows.push(Row { fault: fault.name(), images: report.images, findings, ok });
    }
    let ok = rows.iter().all(|row| row.ok);
    if console.json {
        output::json(&serde_json::json!({ "ok": ok, "faults": rows }))?;
    } else {
        let line = |row: &Row| {
            let verdict = match (row.ok, row.findings) {
                (true, 0) => "as expected",
                (true, _) => "found",
                (false, 0) => "NOT FOUND",
                (false, _) => "FALSE ALARM",
            };
            let fault = row.fault.to_owned();
            vec![fault, row.images.to_string(), row.findings.to_string(), verdict.to_owned()]
        };
        output::table(
            &["planted fault", "images", "findings", ""],
            rows.iter().map(line).collect(),
        )?;
    }
    Ok(if ok { Exit::Ok } else { Exit::Negative })
}

fn check(fault: Fault, arguments: &Arguments) -> Result<Report> {
    let folder =
        tempfile::tempdir().map_err(|error| Failure::io("cannot make a folder", &error))?;
    let subject =
        InProcess::new(fault.name(), Box::new(move |disk| Arc::new(Faulty::new(disk, fault))));
    let work =
        Work::Stamps { area_bytes: STAMPED_BYTES, requests: arguments.work.requests, trim: true };
    let recorded = run::below(&subject, DISK_BYTES, &work, arguments.seed, folder.path())?;
    let cut_check = CutCheck {
        recorded: &recorded,
        subject: Some(&subject as &dyn Subject),
        // A plain disk promises no more, and the planted faults break even that.
        rule: Rule::Sector,
        judge: &Judge::Workload,
        folder: folder.path(),
    };
    let budget = Budget {
        images_max: arguments.images.unwrap_or(IMAGES),
        tear_bytes: Some(512),
        seed: arguments.seed,
    };
    let campaign = recorded.campaign(&[RecoveryMode::DiskKept], budget);
    Ok(campaign.run(|_, _| (), |remains| cut_check.check(remains))?)
}
