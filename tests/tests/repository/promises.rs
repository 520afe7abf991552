//! Pages and contracts that name their tests: each promise, each bug of others, each clause of a
//! door, and what each durable device tests itself, name tests that exist.
//!
//! Not here: clauses whose tests are called by their numbers (in `conformance` of `device` and
//! `store`, in `disk_contract` of `sim`).

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use sawmill_tests::machine::repository;

use super::tidy::{files, none};

/// Tests by the name of the module or test program they are in; scripts that run in a guest by
/// their topic. A function is a test by its attribute, by the block of `proptest!` it is in, or
/// because a macro (`on_each_store!`, `stories!`) gets its name on a line of its own.
fn functions() -> BTreeMap<String, BTreeSet<String>> {
    let mut found: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for (path, text) in files(&[".rs"]) {
        for module in module_names(&path) {
            let names = found.entry(module).or_default();
            let (mut is_test, mut in_proptest) = (false, false);
            for line in text.lines().map(str::trim) {
                in_proptest |= line.starts_with("proptest!");
                is_test |= line == "#[test]" || line.starts_with("#[tokio::test");
                let Some((name, _)) = line
                    .trim_start_matches("async ")
                    .strip_prefix("fn ")
                    .and_then(|rest| rest.split_once(['(', '<']))
                else {
                    continue;
                };
                let in_a_list = || {
                    let (row, alone) = (format!("{name},"), format!("on_each_store!({name});"));
                    text.lines().map(str::trim).any(|line| line == row || line == alone)
                };
                if is_test || in_proptest || in_a_list() {
                    names.insert(name.to_owned());
                }
                is_test = false;
            }
        }
    }
    let in_guests = |(path, _): &&(PathBuf, String)| path.starts_with("tests/vm");
    for (path, _) in files(&[".sh", ".py"]).iter().filter(in_guests) {
        if let [name, topic] = &module_names(path)[..] {
            found.entry(topic.clone()).or_default().insert(name.clone());
        }
    }
    found
}

/// Names of files that say nothing of what is in them: a name of a test says the folder too.
const NAMELESS: [&str; 3] = ["lib", "main", "tests"];

/// `a/b/tests.rs` is known as `b` and as `tests`, `a/b.rs` as `b`, `a/src/lib.rs` as `a` too.
fn module_names(path: &Path) -> Vec<String> {
    let above = path.ancestors().skip(1);
    let names = above.filter_map(Path::file_name).map(|name| name.to_string_lossy().into_owned());
    let stem = path.file_stem().map(|stem| stem.to_string_lossy().into_owned());
    let count = 1 + usize::from(path.ends_with("src/lib.rs"));
    stem.into_iter().chain(names.take(count)).collect()
}

/// The `module::function` names in backquotes of a line; of `b::tests::function` the module is `b`.
fn names_in(line: &str) -> Vec<(String, String)> {
    line.split('`')
        .skip(1)
        .step_by(2)
        .filter_map(|quoted| quoted.rsplit_once("::"))
        .map(|(module, function)| {
            let mut parts = module.rsplit("::");
            let last = parts.next().unwrap_or(module);
            let module = parts.next().filter(|_| NAMELESS.contains(&last)).unwrap_or(last);
            (module.to_owned(), function.to_owned())
        })
        .collect()
}

/// What a row of a table names that is not there.
fn missing_in(row: &str, functions: &BTreeMap<String, BTreeSet<String>>) -> Vec<String> {
    let exists = |module: &str, function: &str| {
        functions.get(module).is_some_and(|names| names.contains(function))
    };
    let named = names_in(row);
    let nameless = named.iter().filter(|(module, _)| NAMELESS.contains(&module.as_str()));
    let nameless = nameless.map(|(module, function)| {
        format!("{module}::{function} does not say where: write the folder before it")
    });
    let nameless: Vec<String> = nameless.collect();
    let named = named.into_iter();
    named
        .filter(|(module, function)| !exists(module, function))
        .map(|(module, function)| format!("{module}::{function} does not exist"))
        .chain(nameless)
        .collect()
}

#[test]
fn every_promise_names_a_test_that_exists() {
    let promises = std::fs::read_to_string(repository().join("PROMISES.md")).expect("PROMISES.md");
    let mut numbers = BTreeSet::new();
    let rows = promises.lines().filter(|row| row.starts_with("| P"));
    let twice = |row: &&str| !numbers.insert(row.split(' ').nth(1).unwrap_or_default().to_owned());
    let rows = rows.filter(twice).map(|row| format!("the number stands twice: {row:.40}"));
    none(&rows.collect::<Vec<_>>());
    let functions = functions();
    let mut faults = Vec::new();
    // A promise is a table row that begins with its number.
    let rows: Vec<&str> = promises.lines().filter(|line| line.starts_with("| P")).collect();
    assert!(rows.len() >= 140, "the tables of promises are not where they were");
    for row in rows {
        if names_in(row).is_empty() {
            faults.push(format!("no test named: {row}"));
        }
        faults.extend(missing_in(row, &functions));
    }
    none(&faults);
}

/// Numbers of promises, such as P23, that a text names.
fn promise_numbers(text: &str) -> BTreeSet<&str> {
    let words = text.split(|letter: char| !letter.is_ascii_alphanumeric());
    let is_number =
        |digits: &str| !digits.is_empty() && digits.bytes().all(|digit| digit.is_ascii_digit());
    words.filter(|word| word.strip_prefix('P').is_some_and(is_number)).collect()
}

#[test]
fn each_promise_of_the_readme_has_its_number() {
    let read = |name| std::fs::read_to_string(repository().join(name)).expect(name);
    let (readme, promises) = (read("README.md"), read("PROMISES.md"));
    let rows = promises.lines().filter_map(|row| row.strip_prefix("| ")?.split(' ').next());
    let known: BTreeSet<&str> = rows.flat_map(promise_numbers).collect();
    let unknown = promise_numbers(&readme).into_iter().filter(|number| !known.contains(number));
    let mut faults: Vec<String> = unknown.map(|number| format!("no promise {number}")).collect();
    let section = readme.split("\n## What happens to your data\n").nth(1).expect("the section");
    let promised = section.split("**Not promised.**").next().unwrap_or_default();
    // A promise is a paragraph that begins with its name in italics.
    let paragraphs = promised.split("\n\n").filter(|paragraph| paragraph.starts_with('*'));
    let paragraphs: Vec<&str> = paragraphs.collect();
    assert!(paragraphs.len() >= 5, "the promises of the README are not where they were");
    let nameless = paragraphs.into_iter().filter(|one| promise_numbers(one).is_empty());
    faults.extend(nameless.map(|one| format!("no number of a promise: {one:.40}")));
    none(&faults);
}

#[test]
fn every_bug_of_others_names_what_would_show_ours() {
    let bugs = std::fs::read_to_string(repository().join("docs/upstream-bugs.md"))
        .expect("the page of bugs");
    let sown: String = files(&[".rs"])
        .into_iter()
        .filter(|(path, _)| path.starts_with("crates/sim/src/bin/mutants"))
        .map(|(_, text)| text)
        .collect();
    let functions = functions();
    let mut faults = Vec::new();
    let rows: Vec<&str> = bugs.lines().filter(|line| line.starts_with("| ")).collect();
    let rows: Vec<&str> = rows.into_iter().filter(|row| !row.starts_with("| bug |")).collect();
    assert!(rows.len() >= 40, "the tables of bugs are not where they were");
    for row in rows {
        let mutants = row.split("sim mutant: \"").skip(1).filter_map(|rest| rest.split_once('"'));
        let mutants: Vec<&str> = mutants.map(|(name, _)| name).collect();
        let open = row.ends_with("| no test yet |") || row.contains("| with that part (");
        if open != (names_in(row).is_empty() && mutants.is_empty()) {
            faults.push(format!("neither held nor open, or both: {row}"));
        }
        faults.extend(missing_in(row, &functions));
        let unknown_mutants =
            mutants.into_iter().filter(|name| !sown.contains(&format!("\"{name}\"")));
        faults.extend(unknown_mutants.map(|name| format!("no mutant {name:?} is sown")));
    }
    let ours =
        std::fs::read_to_string(repository().join("docs/crash-consistency.md")).expect("the page");
    let (_, ours) = ours.split_once("## Bugs found this way").expect("our own bugs");
    for row in ours.lines().filter(|row| row.starts_with("| ")) {
        faults.extend(missing_in(row, &functions));
        let named = row.split("mutant: ").skip(1).filter_map(|rest| rest.split(['|', ';']).next());
        let unknown_mutants =
            named.map(str::trim).filter(|name| !sown.contains(&format!("\"{name}\"")));
        faults.extend(unknown_mutants.map(|name| format!("no mutant {name:?} is sown")));
    }
    none(&faults);
}

/// The clauses of a contract in the documentation of a trait, each as one line. Links to code are
/// no names of tests and lose their quotes.
fn clauses(code: &str) -> Vec<String> {
    let mut clauses: Vec<String> = Vec::new();
    let mut is_open = false;
    for line in code.lines() {
        let text = line.strip_prefix("/// ").unwrap_or_default();
        let text = text.replace("[`", "[").replace("`]", "]");
        if let Some(clause) = text.strip_prefix("- **") {
            clauses.push(clause.to_owned());
            is_open = true;
        } else if let Some(clause) = clauses.last_mut().filter(|_| is_open && !text.is_empty()) {
            clause.push_str(&text);
        } else {
            is_open = false;
        }
    }
    clauses
}

/// A file that has a contract.
fn contract(path: &str) -> String {
    std::fs::read_to_string(repository().join(path)).expect("a contract")
}

/// The rows of the tables in a documentation comment: what lies between the bars.
fn rows(code: &str) -> Vec<Vec<&str>> {
    let lines = code.lines().filter_map(|line| line.strip_prefix("/// | "));
    lines.map(|line| line.trim_end_matches(" |").split(" | ").collect()).collect()
}

/// The names of the doors, as `Door::kind` has them.
const DOORS: [&str; 5] = ["nbd", "fuse", "vhost-user", "ublk", "buse"];

#[test]
fn every_clause_of_a_door_has_a_test_on_each_door_or_a_reason() {
    let code = contract("crates/frontend/src/door.rs");
    let suite = contract("crates/frontend/tests/door/conformance.rs");
    let functions = functions();
    let rows = rows(&code);
    let mut faults = Vec::new();
    for door in DOORS {
        let runs = rows.iter().filter(|row| row.len() == 2 && row[0] == door);
        let runs: Vec<&str> = runs.map(|row| row[1]).collect();
        match runs[..] {
            [run] if !names_in(run).is_empty() => faults.extend(missing_in(run, &functions)),
            _ => faults.push(format!("one test runs every clause on {door}, not {runs:?}")),
        }
    }
    let clauses = clauses(&code);
    assert!(clauses.len() >= 8, "the clauses of a door are not where they were");
    for (clause, number) in clauses.iter().zip(1..) {
        if !clause.starts_with(&format!("Q{number}**")) {
            faults.push(format!("clause {number} is not Q{number}: {clause:.40}"));
        }
        // In the table of the suite, and not only in its file.
        let in_suite = |line: &str| line.starts_with(&format!("q{number}_")) && line.ends_with(',');
        if !suite.lines().map(str::trim).any(in_suite) {
            faults.push(format!("no function of the suite tests clause Q{number}"));
        }
        faults.extend(missing_in(clause, &functions));
    }
    let reasons = rows.iter().filter(|row| row.len() == 3 && row[0].starts_with('Q'));
    for row in reasons {
        let is_clause = (1..=clauses.len()).any(|number| row[0] == format!("Q{number}"));
        if !is_clause || !DOORS.contains(&row[1]) || !row[2].starts_with("cannot: ") {
            faults.push(format!("no clause, no door or no reason: {row:?}"));
        }
    }
    none(&faults);
}

#[test]
fn every_durable_device_names_what_tests_its_flushes_and_restarts() {
    let code = contract("crates/device/src/contract.rs");
    let head = code.lines().filter_map(|line| line.strip_prefix("//! "));
    let head: String = head.map(|line| format!("/// {line}\n")).collect();
    let functions = functions();
    let rows = clauses(&head);
    let mut faults = Vec::new();
    for number in ["D4", "D8"] {
        for device in ["Volume", "FileDevice", "Target"] {
            let begin = format!("{number}** `{device}`:");
            match rows.iter().find(|row| row.starts_with(&begin)) {
                Some(row) if !names_in(row).is_empty() => {
                    faults.extend(missing_in(row, &functions));
                }
                _ => faults.push(format!("no test named: {number} of {device}")),
            }
        }
    }
    none(&faults);
}

#[test]
fn a_clause_without_its_number_or_its_test_is_read_as_one_line() {
    let code =
        "/// - **Q1** A [`Quiet`]\n///   door. `a::b`\n/// - **Q3** More.\npub trait Door {}";
    assert_eq!(clauses(code), ["Q1** A [Quiet]  door. `a::b`", "Q3** More."]);
}
