//! The checker checked: every planted fault is found, and a healthy device has none.

use std::sync::Arc;

use sawmill_verify::faulty::{Fault, Faulty};
use sawmill_verify::plan::Budget;
use sawmill_verify::report::Report;
use sawmill_verify::stamped::{Recorded, Rule, Workload, record};
use sawmill_verify::subject::InProcess;

const DISK_BYTES: u64 = 8 << 20;

fn device(fault: Fault) -> InProcess {
    InProcess::new(fault.name(), Box::new(move |disk| Arc::new(Faulty::new(disk, fault))))
}

fn check(fault: Fault, rule: Rule, images_max: usize) -> Report {
    let folder = tempfile::tempdir().unwrap();
    let subject = device(fault);
    let workload = Workload { trim: true, ..Workload::default() };
    record(&subject, DISK_BYTES, &workload, folder.path()).unwrap();
    let recorded = Recorded::open(folder.path()).unwrap();
    let budget = Budget { images_max, tear_bytes: Some(512), seed: 1 };
    let report = recorded.check(&subject, rule, &budget, folder.path(), |_, _| ()).unwrap();
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
