//! Mutation testing: each deliberate bug is put into a copy of the engine, and the simulation must
//! catch it.
//!
//!     cargo run --release -p sawmill-sim --bin mutants [NAME...]
//!
//! NAME is part of a bug's name, or the beginning of its file's path (`driver/`: all of the batch
//! layer). Prints one line per bug: caught by which story or seed, or by the small worlds, or NOT
//! CAUGHT. Exit code 0 only when all are caught. Bugs of the batch layer of drivers are caught by
//! the tests of hazards in `sawmill-driver`, those of the link by the simulation in `sawmill-link`,
//! those of `check` by its tests in `sawmill-volume`, those of `findings` by a test each.
//!
//! Invariant: bugs are put into the copy in `target/mutants` alone, which has one at a time: each
//! trial first puts back what the last one changed. Not here: the bugs (`list`, `edges`,
//! `findings`, `driver`, `link`).
#![forbid(unsafe_code)]

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

mod driver;
mod edges;
mod findings;
mod link;
mod list;

use list::{Mutant, Test};

/// The trials in order: the first one catches most bugs.
const TRIALS: &[(&str, &[&str])] = &[
    ("stories", &["--stories"]),
    ("seeds", &["--seeds", "4000", "--stop-at", "1"]),
    ("edges", &["--from", "30000000", "--seeds", "4000", "--stop-at", "1"]),
    ("small worlds", &["--small-worlds"]),
    ("more seeds", &["--from", "4001", "--seeds", "40000", "--stop-at", "1"]),
];

/// Bugs that the tests of another package catch.
struct PackageMutants {
    /// The beginning of their files' paths.
    folder: &'static str,
    package: &'static str,
    /// Its tests in order: files, and the tests in them.
    tests: &'static [(&'static str, &'static str)],
    /// Seeds to try.
    seeds: &'static str,
}

const ELSEWHERE: &[PackageMutants] = &[
    // First the single-threaded test that a seed reproduces, then the multi-threaded ones.
    PackageMutants {
        folder: "driver/",
        package: "sawmill-driver",
        tests: &[("hazards", "reads_flushes"), ("threads", "")],
        seeds: "40",
    },
    PackageMutants {
        folder: "volume/src/check/",
        package: "sawmill-volume",
        tests: &[("engine", "checking::")],
        seeds: "1",
    },
    PackageMutants {
        folder: "link/",
        package: "sawmill-link",
        tests: &[("simulation", "")],
        seeds: "300",
    },
];

/// Each bug changes one file, and most are caught within seconds: building takes most of the time.
const BUILT_OFTEN: [(&str, &str); 4] = [
    ("CARGO_INCREMENTAL", "1"),
    ("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "256"),
    ("CARGO_PROFILE_RELEASE_DEBUG", "false"),
    ("CARGO_PROFILE_RELEASE_OPT_LEVEL", "1"),
];

/// The exit code of `timeout` when the time is up.
const TIMED_OUT: i32 = 124;

fn main() -> ExitCode {
    let wanted: Vec<String> = std::env::args().skip(1).collect();
    let is_wanted = |mutant: &Mutant, name: &String| {
        mutant.name.contains(name) || mutant.file.starts_with(name)
    };
    let chosen = all_mutants()
        .filter(|mutant| wanted.is_empty() || wanted.iter().any(|name| is_wanted(mutant, name)));
    let (mut caught, mut all) = (0, 0);
    for mutant in chosen {
        all += 1;
        match try_mutant(mutant) {
            Ok(Some(how)) => {
                caught += 1;
                println!("caught      {}: {how}", mutant.name);
            }
            Ok(None) => println!("NOT CAUGHT  {}", mutant.name),
            Err(error) => println!("NOT TRIED   {}: {error}", mutant.name),
        }
    }
    println!("{caught} of {all} deliberate bugs are caught");
    if caught == all { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn all_mutants() -> impl Iterator<Item = &'static Mutant> {
    list::MUTANTS
        .iter()
        .chain(edges::MUTANTS)
        .chain(findings::MUTANTS)
        .chain(driver::MUTANTS)
        .chain(link::MUTANTS)
}

fn root() -> PathBuf {
    // Cargo sets this when it runs this program.
    let here = std::env::var_os("CARGO_MANIFEST_DIR").map(PathBuf::from);
    here.unwrap_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR"))).join("../..")
}

fn try_mutant(mutant: &Mutant) -> Result<Option<String>, String> {
    let tree = root().join("target/mutants/tree");
    copy_tree(&tree).map_err(|error| format!("the tree cannot be copied: {error}"))?;
    let file = tree.join("crates").join(mutant.file);
    let text = fs::read_to_string(&file).map_err(|error| format!("{}: {error}", file.display()))?;
    let places = text.matches(mutant.from).count();
    if places != 1 {
        return Err(format!("the text it replaces is {places} times in {}", mutant.file));
    }
    fs::write(&file, text.replace(mutant.from, mutant.to)).map_err(|error| error.to_string())?;
    let target = root().join("target/mutants/build");
    if let Some(test) = mutant.test {
        return judge_test(test, &tree, &target);
    }
    if let Some(there) = ELSEWHERE.iter().find(|there| mutant.file.starts_with(there.folder)) {
        return judge_tests(there, &tree, &target);
    }
    let built = Command::new("cargo")
        .args(["build", "--release", "--quiet", "-p", "sawmill-sim", "--bin", "sawmill-sim"])
        .envs(BUILT_OFTEN)
        .env("CARGO_TARGET_DIR", &target)
        .env("RUSTFLAGS", "-Awarnings")
        .current_dir(&tree)
        .output()
        .map_err(|error| format!("cargo: {error}"))?;
    if !built.status.success() {
        return Err(format!("it does not build: {}", String::from_utf8_lossy(&built.stderr)));
    }
    let binary = target.join("release/sawmill-sim");
    for (how, arguments) in TRIALS {
        let run =
            Command::new(&binary).args(*arguments).output().map_err(|error| error.to_string())?;
        if !run.status.success() {
            let output = String::from_utf8_lossy(&run.stdout);
            let first =
                output.lines().find(|line| line.starts_with("BROKEN")).unwrap_or("it crashed");
            return Ok(Some(format!("by {how}: {}", first.chars().take(150).collect::<String>())));
        }
    }
    Ok(None)
}

/// Runs cargo's tests of a package in the changed tree.
fn cargo_test(
    (tree, target): (&Path, &Path),
    limit_s: &str,
    package: &str,
    seeds: &str,
    arguments: &[&str],
) -> Result<std::process::Output, String> {
    // A bug may make a test wait forever; without it, the tests take seconds.
    let mut cargo = Command::new("timeout");
    cargo.args([limit_s, "cargo", "test", "--quiet", "-p", package]).args(arguments);
    cargo
        .env("CARGO_TARGET_DIR", target)
        .env("RUSTFLAGS", "-Awarnings")
        .env("SAWMILL_SEEDS", seeds);
    cargo.current_dir(tree).output().map_err(|error| format!("cargo: {error}"))
}

/// What a run of tests found, or `None`.
fn finding(test: &str, run: &std::process::Output) -> Option<String> {
    if run.status.code() == Some(TIMED_OUT) {
        return Some(format!("by {test}: somebody waits forever"));
    }
    if run.status.success() {
        return None;
    }
    let output = String::from_utf8_lossy(&run.stdout);
    let mut lines = output.lines().skip_while(|line| !line.contains("panicked at")).skip(1);
    let first = lines.next().unwrap_or("it crashed");
    Some(format!("by {test}: {}", first.chars().take(150).collect::<String>()))
}

fn judge_test(test: &Test, tree: &Path, target: &Path) -> Result<Option<String>, String> {
    let place = (tree, target);
    let built =
        cargo_test(place, "1800", test.package, "1", &[test.program, &["--no-run"]].concat())?;
    if !built.status.success() {
        return Err(format!("it does not build: {}", String::from_utf8_lossy(&built.stderr)));
    }
    let run = cargo_test(place, "400", test.package, "1", &[test.program, &[test.name]].concat())?;
    if run.status.success()
        && !String::from_utf8_lossy(&run.stdout).contains("test result: ok. 1 passed")
    {
        return Err(format!("{} is not one test", test.name));
    }
    Ok(finding(test.name, &run))
}

fn judge_tests(
    there: &PackageMutants,
    tree: &Path,
    target: &Path,
) -> Result<Option<String>, String> {
    let cargo = |limit_s: &str, arguments: &[&str]| {
        cargo_test((tree, target), limit_s, there.package, there.seeds, arguments)
    };
    let mut all: Vec<&str> = there.tests.iter().flat_map(|(test, _)| ["--test", test]).collect();
    all.push("--no-run");
    let built = cargo("1800", &all)?;
    if !built.status.success() {
        return Err(format!("it does not build: {}", String::from_utf8_lossy(&built.stderr)));
    }
    for (test, name) in there.tests {
        if let Some(how) = finding(test, &cargo("400", &["--test", test, name])?) {
            return Ok(Some(how));
        }
    }
    Ok(None)
}

/// Copies the sources of the simulation; unchanged files keep their times, so that little is
/// rebuilt.
fn copy_tree(tree: &Path) -> io::Result<()> {
    for name in ["Cargo.toml", "Cargo.lock", "README.md", "ARCHITECTURE.md"] {
        copy_changed(&root().join(name), &tree.join(name))?;
    }
    // Every member of the workspace, which cargo requires, and the pages in the binary.
    ["crates", "tests", "sdk/c", "docs"]
        .iter()
        .try_for_each(|name| copy_folder(&root().join(name), &tree.join(name)))
}

fn copy_folder(from: &Path, to: &Path) -> io::Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let (source, target) = (entry.path(), to.join(entry.file_name()));
        if entry.file_type()?.is_dir() {
            copy_folder(&source, &target)?;
        } else {
            copy_changed(&source, &target)?;
        }
    }
    Ok(())
}

fn copy_changed(from: &Path, to: &Path) -> io::Result<()> {
    let bytes = fs::read(from)?;
    if fs::read(to).is_ok_and(|there| there == bytes) {
        return Ok(());
    }
    if let Some(folder) = to.parent() {
        fs::create_dir_all(folder)?;
    }
    fs::write(to, bytes)
}

#[cfg(test)]
mod tests {
    use std::collections::{HashMap, HashSet};

    use super::*;

    #[test]
    fn every_deliberate_bug_has_one_place_to_go_to() {
        let (mut names, mut lost) = (HashSet::new(), Vec::new());
        for mutant in all_mutants() {
            let text =
                fs::read_to_string(root().join("crates").join(mutant.file)).unwrap_or_default();
            let places = text.matches(mutant.from).count();
            if places != 1 {
                lost.push(format!("{} in {}: {places} places", mutant.name, mutant.file));
            }
            assert!(mutant.from != mutant.to && names.insert(mutant.name), "{}", mutant.name);
        }
        assert!(lost.is_empty(), "{}", lost.join("\n"));
        assert!(names.len() >= 30, "{} bugs", names.len());
    }

    const OF_LOCKS: &[&str] = &["try_write"];

    /// A field or a local may be renamed, and the bug that used it no longer builds.
    #[test]
    fn a_deliberate_bug_uses_names_that_its_crate_has() {
        let (mut known, mut unknown) = (HashMap::<&str, HashSet<String>>::new(), Vec::new());
        for mutant in all_mutants() {
            let folder = mutant.file.split("/src/").next().unwrap_or_default();
            // Every crate also uses the waist.
            let names = known
                .entry(folder)
                .or_insert_with(|| &names_below(folder) | &names_below("device"));
            // What the bug declares itself.
            let declared = words(mutant.to).zip(words(mutant.to).skip(1));
            let own: HashSet<&str> = declared
                .filter(|(first, _)| matches!(*first, "let" | "mut" | "for" | "fn"))
                .map(|(_, second)| second)
                .collect();
            let is_unknown = |word: &&str| {
                !names.contains(*word) && !own.contains(word) && !OF_LOCKS.contains(word)
            };
            unknown.extend(
                words(mutant.to)
                    .filter(is_unknown)
                    .map(|word| format!("{} in {}: {word}", mutant.name, mutant.file)),
            );
        }
        assert!(unknown.is_empty(), "{}", unknown.join("\n"));
    }

    /// A test may be renamed, and the bug that names it is not tried any more.
    #[test]
    fn the_test_that_catches_a_deliberate_bug_exists() {
        let mut files = Vec::new();
        for folder in ["crates", "tests"] {
            rust_files(&root().join(folder), &mut files).expect("readable");
        }
        let names: HashSet<String> = files
            .iter()
            .flat_map(|file| functions(&fs::read_to_string(file).expect("readable")))
            .collect();
        let tests = all_mutants().filter_map(|mutant| mutant.test);
        let lost: Vec<&str> = tests
            .map(|test| test.name)
            .filter(|name| !name.split("::").last().is_some_and(|name| names.contains(name)))
            .collect();
        assert!(lost.is_empty(), "{}", lost.join("\n"));
    }

    fn names_below(folder: &str) -> HashSet<String> {
        let mut files = Vec::new();
        rust_files(&root().join("crates").join(folder), &mut files).expect("readable");
        let texts: Vec<_> =
            files.iter().map(|file| fs::read_to_string(file).expect("readable")).collect();
        let lines = texts.iter().flat_map(|text| text.lines());
        let code = lines.filter(|line| !line.trim_start().starts_with("//"));
        code.flat_map(words).map(str::to_owned).collect()
    }

    fn functions(text: &str) -> Vec<String> {
        let pairs = words(text).zip(words(text).skip(1));
        pairs.filter(|(first, _)| *first == "fn").map(|(_, second)| second.to_owned()).collect()
    }

    fn rust_files(folder: &Path, files: &mut Vec<PathBuf>) -> io::Result<()> {
        for entry in fs::read_dir(folder)? {
            let path = entry?.path();
            if path.is_dir() {
                rust_files(&path, files)?;
            } else if path.extension().is_some_and(|end| end == "rs") {
                files.push(path);
            }
        }
        Ok(())
    }

    /// Words that begin with a letter.
    fn words(text: &str) -> impl Iterator<Item = &str> {
        text.split(|c: char| !c.is_alphanumeric() && c != '_')
            .filter(|word| word.starts_with(|c: char| c.is_alphabetic()))
    }
}
