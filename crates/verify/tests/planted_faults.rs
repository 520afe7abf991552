//! The checker checked: every planted fault is found, and a healthy device has none.

use std::sync::Arc;

use sawmill_verify::cut_check::{CutCheck, Judge, Rule};
use sawmill_verify::faulty::{Fault, Faulty};
use sawmill_verify::plan::Budget;
use sawmill_verify::recorded_run::RecordedRun;
use sawmill_verify::report::Report;
use sawmill_verify::run::{self, Work};
use sawmill_verify::subject::{InProcess, RecoveryMode, Subject};

const DISK_BYTES: u64 = 8 << 20;

fn device(fault: Fault) -> InProcess {
    InProcess::new(fault.name(), Box::new(move |disk| Arc::new(Faulty::new(disk, fault))))
}

fn check(fault: Fault, rule: Rule, images_max: usize) -> Report {
    let folder = tempfile::tempdir().unwrap();
    let subject = device(fault);
    let work = Work::Stamps { area_bytes: 1 << 20, requests: 600, trim: true };
    run::below(&subject, DISK_BYTES, &work, 1, folder.path()).unwrap();
    let recorded = RecordedRun::open(folder.path()).unwrap();
    let budget = Budget { images_max, tear_bytes: Some(512), seed: 1 };
    let (subject, judge) = (Some(&subject as &dyn Subject), &Judge::Workload);
    let cut_check = CutCheck { recorded: &recorded, subject, rule, judge, folder: folder.path() };
    let campaign = recorded.campaign(&[RecoveryMode::DiskKept], budget);
    let report = campaign.run(|_, _| (), |remains| cut_check.check(remains)).unwrap();
    println!(
        "{fault}: {} entries, {} legal cuts, {} points, {} images, {} findings; the first: {:?}",
        report.entries,
        report.legal,
        report.points,
        report.images,
        report.findings.len(),
        report.findings.first()
    );
    report
}

#[test]
fn a_healthy_device_has_no_findings() {
    let report = check(Fault::None, Rule::Sector, 400);
    assert!(report.images >= 400 && report.flushes > 20 && report.fua > 20, "{report:?}");
    assert_eq!(report.findings, []);
}

#[test]
fn every_planted_fault_is_found() {
    for fault in Fault::ALL.into_iter().filter(|fault| *fault != Fault::None) {
        let report = check(fault, Rule::Sector, 200);
        assert!(!report.findings.is_empty(), "{fault} was not found in {} images", report.images);
    }
}

#[test]
fn a_plain_disk_is_found_not_to_keep_a_prefix() {
    let report = check(Fault::None, Rule::Prefix, 100);
    assert!(!report.findings.is_empty());
}
