//! The rules of CONTRIBUTING.md that a test can check: names, words, where `unsafe` lives. A rule
//! that nothing checks is no rule.
//!
//! Not here: lengths (`lengths.rs`), crate dependencies (`arrows.rs`), nesting, circles, promises.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use sawmill_tests::machine::repository;

/// Source files directly in one folder. A list of documents, each of which stands for itself
/// (`docs/decisions`), is no folder of sources.
const FOLDER_FILES_MAX: usize = 25;
/// Endings of what people write in lines: all but Markdown, whose lines are paragraphs and tables.
pub(crate) const WRITTEN_IN_LINES: [&str; 13] = [
    ".rs", ".py", ".go", ".c", ".h", ".cpp", ".sh", ".toml", ".yml", "Makefile", ".html", ".css",
    ".js",
];
const FORBIDDEN_MODULES: [&str; 10] =
    ["utils", "util", "common", "misc", "helpers", "helper", "base", "manager", "mgr", "stuff"];

/// The only places of the tests that sleep: for a moment between two looks at a condition, or
/// because the time itself is the fault or the chance. Nobody sleeps and then takes something for
/// done.
const SLEEPERS: [&str; 9] = [
    "tests/src/machine.rs",
    "tests/src/server.rs",
    "tests/src/bad_disk.rs",
    "tests/src/proxy/relay.rs",
    "tests/tests/drivers/run.rs",
    "tests/tests/idle.rs",
    "crates/store/src/client/tests.rs",
    "crates/store/src/cloud/tests/slow.rs",
    "crates/volume/tests/engine/crash_between.rs",
];

/// Words of our own that the field's words replaced, and the field's word. Neither code nor
/// documents use them. A space stands for an underscore and for the end of a line too.
const RETIRED: [(&str, &str); 67] = [
    ("lay up", "preallocate"),
    ("laid up", "preallocated"),
    ("lays up", "preallocates"),
    ("vigil", "fence check"),
    ("burial", "removal"),
    ("buried", "removed"),
    ("buries", "removes"),
    ("corridor", "path"),
    ("the rooms", "the modules"),
    ("passenger", "handed connection"),
    ("at hand", "cached, in memory"),
    ("rooms:", "modules:"),
    ("rooms.", "modules."),
    ("bereave", "driver died"),
    ("time-out", "timeout"),
    ("time outs", "timeouts"),
    ("hand-shake", "handshake"),
    ("hand shake", "handshake"),
    ("tenure", "reservation"),
    ("answered well", "succeeds"),
    ("front door", "door"),
    ("front-door", "door"),
    // Words of others, from the right column of the glossary.
    ("backing chain", "lineage"),
    ("credit", "place"),
    ("driver manager", "host"),
    ("extent map", "map"),
    ("fencing token", "epoch"),
    ("front end", "door"),
    ("front-end", "door"),
    ("ftl", "map"),
    ("lease", "attachment"),
    ("log buffer", "staging ring"),
    ("log record", "record"),
    ("lsn", "position"),
    ("queue pair", "lane"),
    ("timeline", "history"),
    ("write coalescing", "batch mode"),
    // The spelling of the style guide.
    ("behaviour", "behavior"),
    ("neighbour", "neighbor"),
    ("analyse", "analyze"),
    ("cancelled", "canceled"),
    ("catalogue", "catalog"),
    ("centre", "center"),
    ("colour", "color"),
    ("favour", "favor"),
    ("grey", "gray"),
    ("honour", "honor"),
    ("initialise", "initialize"),
    ("initialised", "initialized"),
    ("judgement", "judgment"),
    ("labelled", "labeled"),
    ("learnt", "learned"),
    ("licence", "license"),
    ("modelled", "modeled"),
    ("organise", "organize"),
    ("organised", "organized"),
    ("recognise", "recognize"),
    ("recognised", "recognized"),
    ("serialisation", "serialization"),
    ("spelt", "spelled"),
    ("summarise", "summarize"),
    ("summarised", "summarized"),
    ("synchronise", "synchronize"),
    ("synchronised", "synchronized"),
    ("travelled", "traveled"),
    ("utilisation", "utilization"),
    ("for ever", "forever"),
];

/// Files that may have a retired word, because readers may know it, and the word. The glossary may
/// have all of them.
const EXPLAINED: [(&str, &str); 3] =
    [("CHANGELOG.md", "credit"), ("README.md", "lease"), ("docs/format/link.md", "credit")];

/// How unsafe code begins.
const UNSAFE: [&str; 6] =
    ["unsafe {", "unsafe fn ", "unsafe impl", "unsafe extern", "unsafe trait ", "unsafe("];

/// Files of the repository with one of these endings, with their texts.
pub(crate) fn files(endings: &[&str]) -> Vec<(PathBuf, String)> {
    let root = repository();
    let mut found = Vec::new();
    let mut folders: Vec<PathBuf> =
        ["crates", "kernel", "tests", "bench", "demo", "docs", "sdk", ".ci"]
            .iter()
            .map(|name| root.join(name))
            .collect();
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).into_iter().flatten().flatten() {
            let path = entry.path();
            let name = entry.file_name().to_string_lossy().into_owned();
            if path.is_dir() {
                // `crates/link/src/target` is ours; a folder of what was built says so of itself.
                let is_built = path.join("CACHEDIR.TAG").exists();
                if !is_built && !["results", "__pycache__"].contains(&name.as_str()) {
                    folders.push(path);
                }
            } else if endings.iter().any(|ending| name.ends_with(ending)) {
                let text = std::fs::read_to_string(&path).expect("a text file");
                let path = path.strip_prefix(&root).expect("below the root").to_owned();
                found.push((path, text));
            }
        }
    }
    found.sort();
    assert!(!found.is_empty(), "no files end with {endings:?}");
    found
}

/// Files with one of `endings` that lie in the root itself, such as the Makefile, with their texts.
pub(crate) fn files_of_the_root(endings: &[&str]) -> Vec<(PathBuf, String)> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(repository()).expect("the repository").flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if endings.iter().any(|ending| name.ends_with(ending)) {
            let text = std::fs::read_to_string(entry.path()).expect("a text file");
            found.push((PathBuf::from(name), text));
        }
    }
    assert!(!found.is_empty(), "no files of the root end with {endings:?}");
    found
}

pub(crate) fn none(faults: &[String]) {
    assert!(faults.is_empty(), "{} untidy:\n{}", faults.len(), faults.join("\n"));
}

#[test]
fn no_retired_word_is_used() {
    let mut faults = Vec::new();
    let written: Vec<&str> = WRITTEN_IN_LINES.into_iter().chain([".md"]).collect();
    for (path, text) in files(&written).into_iter().chain(files_of_the_root(&written)) {
        if path.ends_with("tidy.rs") {
            continue;
        }
        let (words, line_ends) = words_of(&text);
        let glossary = glossary_lines(&path, &text);
        for (word, now) in RETIRED {
            for at in places_of(&words, word) {
                let line = line_ends.partition_point(|end| *end <= at) + 1;
                let is_explained =
                    EXPLAINED.iter().any(|(file, of)| path == Path::new(file) && *of == word);
                if is_explained || glossary.contains(&line) {
                    continue;
                }
                let place = format!("{}:{line}", path.display());
                faults.push(format!("{place}: {word:?} is called {now:?} here"));
            }
        }
    }
    none(&faults);
}

/// The lines of the glossary, which says what readers may know a word as; none in other files.
fn glossary_lines(path: &Path, text: &str) -> Range<usize> {
    if !path.ends_with("ARCHITECTURE.md") {
        return 0..0;
    }
    let line_of = |head: &str| {
        let at = text.lines().position(|line| line == head);
        at.unwrap_or_else(|| panic!("ARCHITECTURE.md has no {head:?}")) + 1
    };
    line_of("## Words")..line_of("## Crates")
}

/// `text` in lower case as one line, without the marks of comments, and where in it each line ends.
/// Underscores are spaces. A blank line or comment keeps its paragraphs apart.
fn words_of(text: &str) -> (String, Vec<usize>) {
    let (mut words, mut line_ends) = (String::new(), Vec::new());
    for line in text.lines() {
        let line = line.trim_start_matches([' ', '\t', '/', '!', '*', '#', '>']);
        words.push_str(&line.trim_end().to_lowercase().replace('_', " "));
        words.push(if line.trim().is_empty() { '\n' } else { ' ' });
        line_ends.push(words.len());
    }
    (words, line_ends)
}

/// Where `word` or its plural is in `words`, and is not the end or the beginning of a longer word.
fn places_of(words: &str, word: &str) -> Vec<usize> {
    let is_letter = |c: char| c.is_alphabetic();
    let is_alone = |at: usize| {
        let after = &words[at + word.len()..];
        let after = after.strip_prefix('s').unwrap_or(after);
        !words[..at].ends_with(is_letter) && !after.starts_with(is_letter)
    };
    words.match_indices(word).map(|(at, _)| at).filter(|at| is_alone(*at)).collect()
}

#[test]
fn a_retired_word_is_found_in_identifiers_in_the_plural_and_over_the_end_of_a_line() {
    let found = |text: &str, word: &str| {
        let (words, line_ends) = words_of(text);
        let lines = places_of(&words, word).into_iter();
        lines.map(|at| line_ends.partition_point(|end| *end <= at) + 1).collect::<Vec<_>>()
    };
    assert_eq!(found("let a;\nlet hand_shakes = 3;", "hand shake"), [2]);
    assert_eq!(found("sawmill_link_time_outs_total", "time outs"), [1]);
    assert_eq!(found("    /// It is kept for\n    /// ever.", "for ever"), [1]);
    assert!(found("It is made for\n\never more people.", "for ever").is_empty());
    assert!(found("a classroom: big", "rooms:").is_empty());
}

#[test]
fn no_module_has_a_name_that_says_nothing() {
    let mut faults = Vec::new();
    for (path, _) in files(&[".rs"]) {
        let mut words = path.iter().map(|part| part.to_string_lossy().replace(".rs", ""));
        if words.any(|word| FORBIDDEN_MODULES.contains(&word.as_str())) {
            faults.push(path.display().to_string());
        }
    }
    none(&faults);
}

#[test]
fn every_source_file_opens_by_saying_what_it_is() {
    let untold = files(&[".rs"]);
    let untold = untold.iter().filter(|(_, text)| !text.starts_with("//!"));
    let faults: Vec<String> = untold.map(|(path, _)| path.display().to_string()).collect();
    none(&faults);
}

#[test]
fn unsafe_code_is_in_its_two_crates() {
    let mut faults = Vec::new();
    for (path, text) in files(&[".rs"]) {
        if path.starts_with("crates/sys") || path.starts_with("sdk/c") || path.ends_with("tidy.rs")
        {
            continue;
        }
        for (n, line) in text.lines().enumerate() {
            let code = line.split("//").next().unwrap_or_default();
            if UNSAFE.iter().any(|form| code.contains(form)) {
                faults.push(format!("{}:{}: {}", path.display(), n + 1, line.trim()));
            }
        }
    }
    for (path, text) in files(&["src/lib.rs", "src/main.rs", "lib.rs", "main.rs"]) {
        let root = path.parent().is_some_and(|folder| folder.ends_with("src"));
        let has_unsafe = path.starts_with("crates/sys") || path.starts_with("sdk/c");
        if root && !has_unsafe && !text.contains("forbid(unsafe_code)") {
            faults.push(format!("{}: does not forbid unsafe code", path.display()));
        }
    }
    none(&faults);
}

#[test]
fn tests_are_named_as_claims_and_nothing_is_allowed_wholesale() {
    let mut faults = Vec::new();
    for (path, text) in files(&[".rs"]) {
        for (n, line) in text.lines().enumerate() {
            let line = line.trim_start();
            let unreasoned =
                line.starts_with(concat!("#![", "allow(")) && !line.contains("reason =");
            if line.starts_with("fn test_") || unreasoned {
                faults.push(format!("{}:{}: {line}", path.display(), n + 1));
            }
        }
    }
    none(&faults);
}

#[test]
fn no_test_sleeps_to_wait_and_the_simulation_has_no_clock() {
    let mut faults = Vec::new();
    for (path, text) in files(&[".rs"]) {
        let path_text = path.display().to_string();
        let calls =
            |word: &str| text.lines().any(|line| line.contains(word) && !line.contains("\"sleep("));
        let in_tests = path_text.starts_with("tests/") || path_text.contains("/tests");
        if in_tests && calls("sleep(") && !SLEEPERS.contains(&path_text.as_str()) {
            faults.push(format!("{path_text} sleeps: wait for what it waits for"));
        }
        let is_world = path_text.starts_with("crates/sim/src/") && !path_text.ends_with("main.rs");
        if is_world && ["Instant", "SystemTime", "sleep("].into_iter().any(calls) {
            faults.push(format!("{path_text} reads a clock that is not the world's"));
        }
    }
    none(&faults);
}

#[test]
fn no_folder_has_more_files_than_a_reader_can_scan() {
    let mut count: BTreeMap<String, usize> = BTreeMap::new();
    for (path, _) in files(&[".rs", ".py", ".go", ".c"]) {
        let folder = path.parent().expect("a file is in a folder");
        *count.entry(folder.display().to_string()).or_default() += 1;
    }
    let full = count.iter().filter(|(_, files)| **files > FOLDER_FILES_MAX);
    none(&full.map(|(folder, files)| format!("{folder} has {files} files")).collect::<Vec<_>>());
}
