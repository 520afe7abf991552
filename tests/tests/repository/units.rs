//! The units for systemd have no more rights than they use, start again forever, and dump no core.
//!
//! What systemd makes of them is asked of `systemd-analyze`, where it is installed.

use std::path::PathBuf;
use std::process::Command;

use sawmill_tests::machine::repository;

/// A unit, and ten times the exposure that `systemd-analyze security` may find at most.
const UNITS: [(&str, u32); 4] = [
    ("sawmill-nbd@.service", 40),
    ("sawmill-target@.service", 40),
    // ublk, FUSE and loop devices: mounts and device nodes of the whole machine.
    ("sawmill@.service", 55),
    ("sawmill-attach@.service", 55),
];

/// What each of them says.
const LINES: [&str; 11] = [
    "StartLimitIntervalSec=0",
    "LimitCORE=0",
    "UMask=0077",
    "NoNewPrivileges=yes",
    "LockPersonality=yes",
    "MemoryDenyWriteExecute=yes",
    "RestrictSUIDSGID=yes",
    "RestrictNamespaces=yes",
    "SystemCallArchitectures=native",
    "SystemCallErrorNumber=EPERM",
    "TimeoutStopSec=",
];

/// What each of them says, with a value of its own.
const KEYS: [&str; 3] =
    ["SystemCallFilter=@system-service", "CapabilityBoundingSet=CAP_", "RestrictAddressFamilies="];

fn path(unit: &str) -> PathBuf {
    repository().join("packaging/systemd").join(unit)
}

#[test]
fn every_unit_says_what_it_gives_up() {
    let mut files: Vec<String> = std::fs::read_dir(path(""))
        .expect("the folder of units")
        .map(|entry| entry.expect("listed").file_name().into_string().expect("UTF-8"))
        .collect();
    files.sort_unstable();
    let mut names = UNITS.map(|(unit, _)| unit);
    names.sort_unstable();
    assert_eq!(files, names, "each is in the list here");
    for (unit, most) in UNITS {
        let text = std::fs::read_to_string(path(unit)).expect("readable");
        for line in LINES.iter().chain(&KEYS) {
            assert!(text.lines().any(|has| has.starts_with(line)), "{unit} lacks {line}");
        }
        assert!(text.contains("chmod 0600"), "{unit} does not say that its environment holds keys");
        assert_eq!(text.contains("CAP_SYS_ADMIN"), most > 40, "{unit}: administrator's rights");
        assert_eq!(
            text.contains("\nProtectSystem="),
            most <= 40,
            "{unit}: a file system view of its own"
        );
    }
}

#[test]
fn systemd_finds_no_more_exposure_than_is_said() {
    for (unit, most) in UNITS {
        let mut analyze = Command::new("systemd-analyze");
        analyze.args(["security", "--no-pager", "--offline=true", &format!("--threshold={most}")]);
        let Ok(output) = analyze.arg(path(unit)).output() else {
            return println!("skipped: systemd-analyze is not installed");
        };
        let report = String::from_utf8_lossy(&output.stdout);
        assert!(
            output.status.success(),
            "{unit} is above {most}: {}",
            report.lines().last().unwrap_or_default()
        );
    }
}
