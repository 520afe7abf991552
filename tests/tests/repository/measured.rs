//! Figures have a date: each page of measurements states when, on what code, where and by which
//! command it was measured, and a document that cites the page names that date. Each fuzz target
//! has a run on the page of runs, and a night's page says which part failed.
//!
//! Not here: the figures. `fuzz.md` and `nights.md` are lists of runs, each with its own date.

use std::collections::BTreeMap;
use std::process::Command;

use sawmill_tests::machine::repository;

use super::tidy::{files, none};

const STAMP: [&str; 5] = ["Measured on ", ", on the code of ", ", on ", " cores of ", ", with `"];
const FOLDER: &str = "docs/measurements";

/// The date of each page by its name, and the pages without a whole line about their making.
fn dates() -> (BTreeMap<String, String>, Vec<String>) {
    let (mut dates, mut faults) = (BTreeMap::new(), Vec::new());
    for (path, text) in files(&[".md"]) {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if !path.starts_with(FOLDER) || matches!(&*name, "fuzz.md" | "nights.md") {
            continue;
        }
        let line = text.lines().nth(2).unwrap_or_default();
        let date = line.strip_prefix(STAMP[0]).and_then(|rest| rest.split_once(','));
        match date {
            Some((date, _)) if STAMP.iter().all(|part| line.contains(part)) => {
                dates.insert(name, date.to_owned());
            }
            _ => faults.push(format!("{}: {line}", path.display())),
        }
    }
    (dates, faults)
}

#[test]
fn every_page_of_measurements_states_its_making_and_is_cited_with_its_date() {
    let (dates, mut faults) = dates();
    assert!(dates.len() >= 10 || !faults.is_empty(), "{FOLDER} has {} pages", dates.len());
    for (path, text) in files(&[".md"]) {
        // `[text](../measurements/page.md)`
        let parts: Vec<&str> = text.split("](../measurements/").collect();
        for pair in parts.windows(2) {
            let cited = pair[0].rsplit('[').next().unwrap_or_default();
            let name = pair[1].split([')', '#']).next().unwrap_or_default();
            if dates.get(name).is_some_and(|date| !cited.contains(date)) {
                let (path, date) = (path.display(), &dates[name]);
                faults.push(format!("{path} cites {name} as {cited:?} without {date}"));
            }
        }
    }
    none(&faults);
}

#[test]
fn every_fuzz_target_has_a_run_on_the_page_of_runs() {
    let read = |path: &str| std::fs::read_to_string(repository().join(path)).expect(path);
    let page = read("docs/measurements/fuzz.md");
    let code = read("crates/fuzz/src/lib.rs");
    let names =
        code.split("FuzzTarget { name: \"").skip(1).filter_map(|rest| rest.split('"').next());
    let names: Vec<&str> = names.collect();
    assert!(names.len() >= 32, "the list of targets is not where it was");
    let has_run = |name: &&str| page.lines().any(|line| line.starts_with(&format!("| {name} | ")));
    let missing = names.into_iter().filter(|name| !has_run(name));
    none(&missing.map(|name| format!("{name} is on no run of the page")).collect::<Vec<_>>());
}

#[test]
fn a_part_of_a_night_that_fails_is_recorded_as_failed() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = |path: &str| folder.path().join(path);
    for path in [".ci", "docs/measurements"] {
        std::fs::create_dir_all(at(path)).expect(path);
    }
    std::fs::copy(repository().join(".ci/nightly"), at(".ci/nightly")).expect("the script");
    let parts = "good: ; @echo 3 of 3\nbad: ; @echo 2 of 3; exit 1\n";
    std::fs::write(at("Makefile"), parts).expect("the parts");
    let run = Command::new(at(".ci/nightly")).args(["good", "bad"]).output().expect("a run");
    assert!(!run.status.success(), "{}", String::from_utf8_lossy(&run.stdout));
    let page = std::fs::read_to_string(at("docs/measurements/nights.md")).expect("the page");
    // The part that failed has what make says of it last.
    for row in ["| `make good` | passed | 0 | 3 of 3 |", "| `make bad` | **failed** | 0 | 2 of 3 |"]
    {
        assert!(page.contains(row), "{row} is not in:\n{page}");
    }
}
