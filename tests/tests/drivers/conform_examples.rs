//! `sawmill conform` on the five examples of each language: what a newcomer copies keeps the
//! contract.
//!
//! The ordinary tests take short clauses without a door. All clauses, through every door that this
//! machine has, are one command, which takes long: `cargo test -p sawmill-tests --test drivers
//! conform_examples -- --ignored --nocapture` (`SAWMILL_ONLY="C ram nbd"` takes what has these
//! words alone). Not here: wrong drivers (`conform`).

use std::process::{Command, Stdio};

use sawmill_tests::compiled::{self, c_example, rust_example};
use sawmill_tests::examples::Source;
use sawmill_tests::golang::{go_example, require_go};
use sawmill_tests::machine::repository;
use sawmill_tests::store;
use sawmill_tests::test_bed::{CommandOutput, TestBed};
use serde_json::Value;

const SIZE_BYTES: usize = 32 << 20;
const EXAMPLES: [&str; 5] = ["null", "ram", "file", "mirror", "lazy"];

type Language = (&'static str, fn(&str, &[&str]) -> Command, Result<(), String>);

fn python_example(name: &str, arguments: &[&str]) -> Command {
    let mut python = Command::new("python3");
    python.env("PYTHONPATH", repository().join("sdk/python")).stdin(Stdio::null());
    python.arg(repository().join(format!("sdk/python/examples/{name}.py"))).args(arguments);
    python
}

fn languages() -> [Language; 4] {
    [
        ("Rust", rust_example, Ok(())),
        ("C", c_example, compiled::require_compiler()),
        ("Go", go_example, require_go()),
        ("Python", python_example, Ok(())),
    ]
}

/// Judges an example on files of its own.
fn judge((_, example, _): &Language, name: &str, options: &[&str]) -> CommandOutput {
    let bed = TestBed::new(&store::folder());
    let file = |name: &str| bed.path(name).display().to_string();
    let (one, other) = (file("one"), file("other"));
    // Kept until the end: the driver asks it for what was never written.
    let source = (name == "lazy").then(|| Source::start(vec![0x5a; SIZE_BYTES]));
    let arguments = match name {
        "file" => vec![one.as_str(), "32M"],
        "mirror" => {
            std::fs::write(&one, vec![0; SIZE_BYTES]).expect("a side");
            std::fs::write(&other, vec![0xff; SIZE_BYTES]).expect("a side");
            vec![one.as_str(), other.as_str()]
        }
        "lazy" => vec![source.as_ref().map_or("", |source| &source.url), one.as_str()],
        _ => vec!["32M"],
    };
    let driver = example(name, &arguments);
    let kind = if name == "null" { "null" } else { "full" };
    let mut command =
        bed.command(&[&["--json", "conform", "--kind", kind], options, &["--"]].concat());
    command.arg(driver.get_program()).args(driver.get_args());
    command.envs(driver.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let output = command.output().expect("the binary under test starts");
    CommandOutput::new(format!("{command:?}"), &output)
}

/// How many clauses were kept and left out; what was broken, or what else went wrong.
fn counts(finished: &CommandOutput) -> (usize, usize, Vec<String>) {
    let Ok(document) = serde_json::from_str::<Value>(&finished.stdout) else {
        return (0, 0, vec![finished.stderr.clone()]);
    };
    let rows = document["clauses"].as_array().expect("a list");
    let with = |outcome| {
        let found = rows.iter().filter(|row| row["outcome"] == outcome);
        found.map(Value::to_string).collect::<Vec<_>>()
    };
    (with("ok").len(), with("left out").len(), with("FAIL"))
}

fn keeps_short_clauses(language: &Language) {
    if let Err(why) = &language.2 {
        return sawmill_tests::machine::skip(&format!("for {}: {why}", language.0));
    }
    for name in EXAMPLES {
        let clauses = ["--clause", "d1_", "--clause", "d6_", "--clause", "driver_ends"];
        let (kept, _, broken) = counts(&judge(language, name, &clauses));
        assert!(
            broken.is_empty() && kept >= 3,
            "{name} in {}: {kept} kept, {broken:?}",
            language.0
        );
    }
}

#[test]
fn the_examples_in_c_keep_the_contract() {
    keeps_short_clauses(&languages()[1]);
}

#[test]
fn the_examples_in_go_keep_the_contract() {
    keeps_short_clauses(&languages()[2]);
}

#[test]
fn the_examples_in_rust_and_python_keep_the_contract() {
    keeps_short_clauses(&languages()[0]);
    keeps_short_clauses(&languages()[3]);
}

#[test]
#[ignore = "the whole matrix takes long: docs/guide/driver-tools.md has the command"]
fn every_example_in_every_language_keeps_every_clause_through_every_door() {
    let only = std::env::var("SAWMILL_ONLY").unwrap_or_default();
    let (mut wrong, mut judged) = (Vec::new(), 0);
    for door in ["direct", "nbd", "fuse"] {
        for language in &languages() {
            for name in EXAMPLES {
                let line = format!("{} {name} {door}", language.0);
                let words: Vec<&str> = line.split(' ').collect();
                if !only.split_whitespace().all(|word| words.contains(&word)) {
                    continue;
                }
                if let Err(why) = &language.2 {
                    println!("{line}: skipped: {why}");
                    continue;
                }
                let (kept, left_out, broken) = counts(&judge(language, name, &["--door", door]));
                println!(
                    "{line}: {kept} kept, {left_out} left out, {} broken {broken:?}",
                    broken.len()
                );
                judged += 1;
                if kept == 0 || !broken.is_empty() {
                    wrong.push(line);
                }
            }
        }
    }
    println!("{judged} judged, {} wrong", wrong.len());
    assert!(judged > 0 && wrong.is_empty(), "{wrong:?}");
}
