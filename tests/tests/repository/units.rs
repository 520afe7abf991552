//! The units for systemd have no more rights than they use, are restarted, and dump no core.
//!
//! What systemd makes of them is asked of `systemd-analyze`, where it is installed.

use std::path::PathBuf;
use std::process::Command;

use sawmill_tests::machine::repository;

/// A unit, ten times the exposure that `systemd-analyze security` may find at most, and the exit
/// codes after which it is not restarted.
const UNITS: [(&str, u32, Option<&str>); 4] = [
    ("sawmill-nbd@.service", 40, Some("6")),
    // It may have other disks than the one that was taken over.
    ("sawmill-target@.service", 40, None),
    // ublk, FUSE and loop devices: mounts and device nodes of the whole machine.
    ("sawmill@.service", 55, Some("6")),
    ("sawmill-attach@.service", 55, Some("2 6")),
];

/// What each of them says.
const LINES: [&str; 12] = [
    "StartLimitIntervalSec=0",
    "RestartSec=",
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
    let mut names = UNITS.map(|(unit, ..)| unit);
    names.sort_unstable();
    assert_eq!(files, names, "each is in the list here");
    for (unit, most, codes) in UNITS {
        let text = std::fs::read_to_string(path(unit)).expect("readable");
        for line in LINES.iter().chain(&KEYS) {
            assert!(text.lines().any(|has| has.starts_with(line)), "{unit} lacks {line}");
        }
        assert!(
            ["Restart=always", "Restart=on-failure"].iter().any(|line| text.contains(line)),
            "{unit} is not restarted"
        );
        let prevented =
            text.lines().find_map(|line| line.strip_prefix("RestartPreventExitStatus="));
        assert_eq!(prevented, codes, "{unit}");
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
    for (unit, most, _) in UNITS {
        let mut analyze = Command::new("systemd-analyze");
        analyze.args(["security", "--no-pager", "--offline=true", &format!("--threshold={most}")]);
        let Ok(output) = analyze.arg(path(unit)).output() else {
            return sawmill_tests::machine::skip("systemd-analyze is not installed");
        };
        let report = String::from_utf8_lossy(&output.stdout);
        assert!(
            output.status.success(),
            "{unit} is above {most}: {}",
            report.lines().last().unwrap_or_default()
        );
    }
}
