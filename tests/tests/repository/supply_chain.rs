//! Enforces `deny.toml` without the network: the licenses, the sources and the doubled versions of
//! all that a build for Linux on x86-64 takes in. Not here: advisories (`cargo deny check
//! advisories`).

use std::collections::{BTreeMap, BTreeSet};

use sawmill_tests::machine::{repository, run};
use serde_json::Value;

/// Every package that the workspace resolves to on this platform.
fn packages() -> Vec<Value> {
    let mut cargo = std::process::Command::new(env!("CARGO"));
    cargo.args(["metadata", "--format-version", "1", "--locked"]);
    cargo.args(["--filter-platform", "x86_64-unknown-linux-gnu"]).current_dir(repository());
    let mut metadata: Value = serde_json::from_str(&run(&mut cargo)).expect("cargo prints JSON");
    let Value::Array(packages) = metadata["packages"].take() else { panic!("a list of packages") };
    packages
}

fn deny() -> toml::Table {
    let text = std::fs::read_to_string(repository().join("deny.toml")).expect("deny.toml");
    text.parse().expect("deny.toml is TOML")
}

fn text<'a>(package: &'a Value, key: &str) -> &'a str {
    package[key].as_str().unwrap_or_default()
}

/// Whether a license expression can be met with what is allowed: one side of each OR, both of each
/// AND.
fn is_allowed(expression: &str, allowed: &[&str]) -> bool {
    let expression = expression.trim();
    let mut depth = 0;
    for (word, any) in [(" AND ", false), (" OR ", true), ("/", true)] {
        let mut parts = Vec::new();
        let mut begin = 0;
        for (at, letter) in expression.char_indices() {
            match letter {
                '(' => depth += 1,
                ')' => depth -= 1,
                _ if depth == 0 && expression[at..].starts_with(word) => {
                    parts.push(&expression[begin..at]);
                    begin = at + word.len();
                }
                _ => {}
            }
        }
        if !parts.is_empty() {
            parts.push(&expression[begin..]);
            let mut met = parts.iter().map(|part| is_allowed(part, allowed));
            return if any { met.any(|met| met) } else { met.all(|met| met) };
        }
    }
    match expression.strip_prefix('(').and_then(|inner| inner.strip_suffix(')')) {
        Some(inner) => is_allowed(inner, allowed),
        None => allowed.contains(&expression),
    }
}

#[test]
fn every_dependency_has_a_license_that_is_allowed() {
    let deny = deny();
    let allowed = deny["licenses"]["allow"].as_array().expect("a list of licenses");
    let allowed: Vec<&str> = allowed.iter().filter_map(|license| license.as_str()).collect();
    let packages = packages();
    let wrong: Vec<String> = packages
        .iter()
        .filter(|package| !is_allowed(text(package, "license"), &allowed))
        .map(|package| format!("{}: {}", text(package, "name"), text(package, "license")))
        .collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!(packages.len() > 50, "the whole tree was read");
    assert!(
        is_allowed("ISC AND (Apache-2.0 OR GPL-3.0)", &allowed)
            && is_allowed("MIT/GPL-3.0", &allowed)
    );
    assert!(
        !is_allowed("MIT AND GPL-3.0", &allowed) && !is_allowed("(GPL-3.0 OR LGPL-3.0)", &allowed)
    );
}

#[test]
fn every_dependency_comes_from_the_registry() {
    let registry = "registry+https://github.com/rust-lang/crates.io-index";
    let foreign: Vec<String> = packages()
        .iter()
        .filter(|package| {
            !matches!(package["source"].as_str(), None | Some("")) && package["source"] != registry
        })
        .map(|package| format!("{}: {}", text(package, "name"), package["source"]))
        .collect();
    assert!(foreign.is_empty(), "{foreign:#?}");
}

#[test]
fn no_dependency_is_there_twice_but_those_that_deny_toml_names() {
    let deny = deny();
    let skipped = deny["bans"]["skip"].as_array().expect("a list of crates");
    let skipped: BTreeSet<&str> =
        skipped.iter().filter_map(|skip| skip["crate"].as_str()).collect();
    let mut versions: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for package in packages() {
        versions
            .entry(text(&package, "name").into())
            .or_default()
            .insert(text(&package, "version").into());
    }
    let doubled = versions.iter().filter(|(_, versions)| versions.len() > 1);
    let names = |name: &str, version: &str| skipped.contains(format!("{name}@{version}").as_str());
    let wrong: Vec<_> = doubled
        .filter(|(name, versions)| {
            versions.iter().filter(|version| !names(name, version)).count() > 1
        })
        .collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
    for skip in skipped {
        let (name, version) = skip.split_once('@').expect("name@version");
        let is_doubled = versions.get(name).is_some_and(|package_versions| {
            package_versions.len() > 1 && package_versions.contains(version)
        });
        assert!(is_doubled, "{skip} is not there twice any more: take it out of deny.toml");
    }
}

#[test]
fn the_fuzzers_lock_file_knows_what_our_crates_depend_on() {
    let path = "crates/fuzz/libfuzzer/Cargo.lock";
    let lock = std::fs::read_to_string(repository().join(path)).expect("the lock file");
    let lock: toml::Table = lock.parse().expect("a lock file is TOML");
    let locked = lock["package"].as_array().expect("a list of packages");
    let packages = packages();
    let mut faults = Vec::new();
    // A build with --locked stops at the first of these.
    for entry in locked.iter().filter(|entry| entry.get("source").is_none()) {
        let name = entry["name"].as_str().expect("a package has a name");
        let Some(package) = packages.iter().find(|package| text(package, "name") == name) else {
            continue;
        };
        let known: BTreeSet<&str> = entry.get("dependencies").map_or_else(BTreeSet::new, |list| {
            let words = list.as_array().into_iter().flatten().filter_map(toml::Value::as_str);
            words.filter_map(|word| word.split(' ').next()).collect()
        });
        let dependencies = package["dependencies"].as_array().expect("a list of dependencies");
        let is_needed =
            |dependency: &&Value| dependency["kind"] != "dev" && dependency["optional"] == false;
        let unknown = dependencies.iter().filter(is_needed).map(|needed| text(needed, "name"));
        let unknown = unknown.filter(|needed| !known.contains(needed));
        faults.extend(unknown.map(|needed| format!("{name} needs {needed}")));
    }
    assert!(faults.is_empty(), "{path} is old, run `cargo update --workspace` there: {faults:?}");
}
