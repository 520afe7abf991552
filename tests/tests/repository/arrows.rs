//! Which crate names which: the list of arrows, the crates of others that are kept out, and the
//! rows of ARCHITECTURE.md.
//!
//! Invariant: an arrow that no crate has is a fault too. Not here: circles between the files of a
//! crate (`circles`).

use std::collections::BTreeMap;

use sawmill_tests::machine::{repository, run};

use super::tidy::none;

/// Which of our crates each of them may name. Only the fuzz targets point to the
/// binary, and nothing to the tests.
const ARROWS: [(&str, &[&str]); 21] = [
    // Chance by seed and waiting, for tests, workloads and conformance suites.
    ("sawmill-testkit", &[]),
    ("sawmill-device", &["sawmill-testkit"]),
    ("sawmill-format", &["sawmill-testkit"]),
    ("sawmill-store", &["sawmill-testkit"]),
    ("sawmill-sys", &[]),
    (
        "sawmill-volume",
        &["sawmill-device", "sawmill-format", "sawmill-store", "sawmill-sys", "sawmill-testkit"],
    ),
    ("sawmill-volume-small", &["sawmill-device", "sawmill-format", "sawmill-store", "sawmill-sys"]),
    (
        "sawmill-frontend",
        &["sawmill-device", "sawmill-nbd-proto", "sawmill-sys", "sawmill-testkit"],
    ),
    // The crash checker knows devices by their doors: neither the engine nor the stores.
    (
        "sawmill-verify",
        &[
            "sawmill-device",
            "sawmill-format",
            "sawmill-frontend",
            "sawmill-nbd-client",
            "sawmill-sys",
            "sawmill-testkit",
        ],
    ),
    ("sawmill-nbd-proto", &[]),
    ("sawmill-nbd-client", &["sawmill-nbd-proto"]),
    // How programs speak; of the others only the errors, those of store and verify by features.
    ("sawmill-console", &["sawmill-device", "sawmill-store", "sawmill-verify"]),
    (
        "sawmill-lab",
        &[
            "sawmill-console",
            "sawmill-device",
            "sawmill-nbd-client",
            "sawmill-sys",
            "sawmill-testkit",
            "sawmill-verify",
            "sawmill-volume",
        ],
    ),
    ("sawmill-doors", &["sawmill-device", "sawmill-format", "sawmill-frontend", "sawmill-sys"]),
    (
        "sawmill-driver",
        &["sawmill-device", "sawmill-doors", "sawmill-frontend", "sawmill-sys", "sawmill-testkit"],
    ),
    ("sawmill-link", &["sawmill-device", "sawmill-format", "sawmill-sys", "sawmill-testkit"]),
    ("sawmill-c", &["sawmill-device", "sawmill-driver"]),
    // For tests: nobody may name it.
    (
        "sawmill-sim",
        &["sawmill-device", "sawmill-store", "sawmill-testkit", "sawmill-volume-small"],
    ),
    (
        "sawmill-fuzz",
        // The program too, because it has parsers of its own.
        &[
            "sawmill",
            "sawmill-console",
            "sawmill-device",
            "sawmill-driver",
            "sawmill-format",
            "sawmill-frontend",
            "sawmill-lab",
            "sawmill-link",
            "sawmill-nbd-client",
            "sawmill-nbd-proto",
            "sawmill-store",
            "sawmill-sys",
            "sawmill-testkit",
            "sawmill-verify",
            "sawmill-volume",
        ],
    ),
    (
        "sawmill",
        &[
            "sawmill-console",
            "sawmill-device",
            "sawmill-doors",
            "sawmill-driver",
            "sawmill-format",
            "sawmill-frontend",
            "sawmill-lab",
            "sawmill-link",
            "sawmill-nbd-client",
            "sawmill-store",
            "sawmill-sys",
            "sawmill-volume",
        ],
    ),
    // The store's client for its suite before a real server; everything else is the binary.
    ("sawmill-tests", &["sawmill-store", "sawmill-testkit", "sawmill-verify"]),
];

/// Crates of others that a crate must not even reach for: an engine without a runtime, a waist
/// without I/O.
const FOREIGN_TO: [(&str, &[&str]); 9] = [
    ("sawmill-device", &["tokio", "object_store", "rustix", "libc"]),
    ("sawmill-format", &["tokio", "object_store", "rustix", "libc", "serde"]),
    ("sawmill-volume", &["tokio", "object_store", "hyper", "clap"]),
    ("sawmill-frontend", &["object_store", "clap"]),
    ("sawmill-sys", &["tokio", "object_store", "clap", "serde"]),
    ("sawmill-doors", &["tokio", "object_store", "clap"]),
    ("sawmill-driver", &["tokio", "object_store", "clap"]),
    ("sawmill-link", &["tokio", "object_store", "clap"]),
    ("sawmill-verify", &["tokio", "object_store", "clap"]),
];

#[test]
fn the_arrows_between_crates_are_those_of_the_design() {
    let mut cargo = std::process::Command::new(env!("CARGO"));
    cargo
        .args(["metadata", "--format-version", "1", "--no-deps", "--locked"])
        .current_dir(repository());
    let metadata: serde_json::Value =
        serde_json::from_str(&run(&mut cargo)).expect("cargo prints JSON");
    let mut faults = Vec::new();
    for package in metadata["packages"].as_array().expect("a list of packages") {
        let name = package["name"].as_str().expect("a package has a name");
        let Some((_, allowed)) = ARROWS.iter().find(|(known, _)| *known == name) else {
            faults.push(format!("{name} is a new crate: say here what it may name"));
            continue;
        };
        let foreign =
            FOREIGN_TO.iter().find(|(known, _)| *known == name).map_or(&[][..], |(_, not)| not);
        let dependencies = package["dependencies"].as_array().expect("a list of dependencies");
        let is_used =
            |arrow: &&str| dependencies.iter().any(|dependency| dependency["name"] == **arrow);
        let unused = allowed.iter().filter(|arrow| !is_used(arrow));
        faults.extend(
            unused.map(|arrow| format!("{name} does not name {arrow}: take it from the list")),
        );
        for dependency in dependencies {
            let named = dependency["name"].as_str().expect("a dependency has a name");
            let ours = named == "sawmill" || named.starts_with("sawmill-");
            let in_tests = dependency["kind"] == "dev";
            if (ours && !allowed.contains(&named)) || (foreign.contains(&named) && !in_tests) {
                faults.push(format!("{name} must not name {named}"));
            }
        }
    }
    none(&faults);
}

#[test]
fn the_crash_checker_builds_without_the_engine_and_the_store() {
    let mut cargo = std::process::Command::new(env!("CARGO"));
    cargo.args(["tree", "--locked", "--package", "sawmill-lab", "--no-default-features"]);
    cargo.args(["--edges", "normal", "--prefix", "none"]).current_dir(repository());
    let tree = run(&mut cargo);
    let named = |name: &str| tree.lines().any(|line| line.starts_with(name));
    assert!(named("sawmill-verify ") && named("sawmill-console "), "{tree}");
    assert!(!named("sawmill-volume ") && !named("sawmill-store ") && !named("tokio "), "{tree}");
}

/// The row of each crate in the picture of ARCHITECTURE.md, from the top.
fn rows_of_the_picture() -> BTreeMap<String, usize> {
    let page = std::fs::read_to_string(repository().join("ARCHITECTURE.md")).expect("the page");
    let (_, section) = page.split_once("\n## Crates\n").expect("the section of the crates");
    let picture = section.split("```").nth(1).expect("the picture");
    let mut rows = BTreeMap::new();
    for (row, line) in picture.lines().enumerate() {
        // What a row is called, then at least two blanks, then its crates.
        let Some((_, crates)) = line.trim_start().split_once("  ") else { continue };
        for name in crates.split_whitespace() {
            let name = match name {
                "sawmill" => name.to_owned(),
                "sdk/c" => "sawmill-c".to_owned(),
                _ => format!("sawmill-{name}"),
            };
            rows.insert(name, row);
        }
    }
    rows
}

#[test]
fn every_arrow_goes_to_a_lower_row_of_the_picture() {
    let rows = rows_of_the_picture();
    let mut faults = Vec::new();
    for (name, allowed) in ARROWS {
        let Some(row) = rows.get(name) else {
            faults.push(format!("{name} is not in the picture"));
            continue;
        };
        let is_lower = |arrow: &&&str| rows.get(**arrow).is_some_and(|other| other > row);
        let others = allowed.iter().filter(|arrow| !is_lower(arrow));
        faults.extend(others.map(|arrow| format!("{name} stands above {arrow} in the list alone")));
    }
    let known = |name: &&String| ARROWS.iter().any(|(known, _)| known == name);
    let unknown = rows.keys().filter(|name| !known(name));
    faults.extend(unknown.map(|name| format!("there is no crate {name}")));
    none(&faults);
}
