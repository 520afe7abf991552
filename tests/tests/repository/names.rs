//! What the name of a function promises, what its comment names, and types that share a name.
//!
//! Not here: words that are retired, and names of modules (`tidy`).

use std::collections::{BTreeMap, BTreeSet};

use super::rules::production;
use super::tidy::{files, none};

/// How the name of a function begins that answers a question.
const QUESTIONS: [&str; 6] = ["is_", "has_", "can_", "may_", "was_", "are_"];

/// Words in a function's comment that its file does not have: values, and names of other programs
/// and of other files.
const FOREIGN_NAMES: [&str; 10] = [
    "cacophony",
    "cbf43926",
    "connections",
    "fail",
    "false",
    "flush_interval_s",
    "in_flight",
    "insecure_listen",
    "logged",
    "ublk_drv",
];

/// The line and name of each function of a file, and what it returns.
fn functions(text: &str) -> Vec<(usize, &str, &str)> {
    let mut found = Vec::new();
    for (at, _) in text.match_indices("fn ") {
        if !text[..at].ends_with([' ', '\n', '(']) {
            continue;
        }
        let after = &text[at + 3..];
        let name_bytes = after.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(0);
        let name = &after[..name_bytes];
        let Some(open) = after.find('(').filter(|_| !name.is_empty()) else { continue };
        let mut depth = 0;
        let close = after[open..].char_indices().find_map(|(index, letter)| {
            depth += i32::from(letter == '(') - i32::from(letter == ')');
            (depth == 0).then_some(open + index + 1)
        });
        let Some(close) = close else { continue };
        let returned = after[close..].split(['{', ';']).next().unwrap_or_default();
        found.push((text[..at].lines().count(), name, returned.trim()));
    }
    found
}

#[test]
fn a_function_that_is_named_as_a_question_answers_with_a_bool() {
    let mut faults = Vec::new();
    for (path, text) in files(&[".rs"]) {
        for (line, name, returned) in functions(&text) {
            let is_question = QUESTIONS.iter().any(|question| name.starts_with(question));
            // A test's name is a sentence.
            let before: Vec<&str> = text.lines().take(line.saturating_sub(1)).collect();
            let is_test = before.last().is_some_and(|above| above.trim().starts_with("#["));
            if is_question && !is_test && !returned.contains("bool") {
                faults.push(format!("{}:{line}: {name} returns {returned:?}", path.display()));
            }
        }
    }
    none(&faults);
}

/// The words in backticks of a comment that could be a parameter or a local.
fn named_in(comment: &str) -> Vec<&str> {
    let quoted = comment.split('`').skip(1).step_by(2);
    let is_name = |word: &&str| {
        word.starts_with(|c: char| c.is_ascii_lowercase())
            && word.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')
    };
    quoted.filter(is_name).collect()
}

/// The words that a function's comment names and that its file does not have, with their lines.
fn stale_names<'a>(lines: &[&'a str]) -> Vec<(usize, &'a str)> {
    let is_letter = |c: char| c.is_alphanumeric() || c == '_';
    let code = lines.iter().map(|line| line.split("//").next().unwrap_or_default());
    let words: BTreeSet<&str> = code.flat_map(|code| code.split(|c| !is_letter(c))).collect();
    let (mut stale, mut comment) = (Vec::new(), Vec::new());
    for (at, line) in lines.iter().enumerate() {
        let line = line.trim();
        if let Some(text) = line.strip_prefix("///") {
            comment.push((at + 1, text));
        } else if !line.starts_with("#[") {
            let comment = std::mem::take(&mut comment);
            if line.contains("fn ") {
                let names = comment
                    .into_iter()
                    .flat_map(|(at, text)| named_in(text).into_iter().map(move |name| (at, name)));
                stale.extend(names.filter(|(_, name)| !words.contains(name)));
            }
        }
    }
    stale
}

#[test]
fn every_name_in_a_function_s_comment_exists() {
    let modules: BTreeSet<String> = files(&[".rs"])
        .iter()
        .flat_map(|(path, _)| path.iter().map(|part| part.to_string_lossy().replace(".rs", "")))
        .collect();
    let mut faults = Vec::new();
    for (path, lines) in production() {
        let lines: Vec<&str> = lines.iter().map(String::as_str).collect();
        let stale = stale_names(&lines).into_iter();
        let stale =
            stale.filter(|(_, name)| !modules.contains(*name) && !FOREIGN_NAMES.contains(name));
        faults.extend(stale.map(|(line, name)| format!("{path}:{line}: what is `{name}`?")));
    }
    none(&faults);
}

#[test]
fn a_name_that_a_rename_left_behind_is_found() {
    let left = ["/// Calls `told` with `count`.", "#[inline]", "fn call(on_end: F, count: u64) {}"];
    assert_eq!(stale_names(&left), [(1, "told")]);
    assert_eq!(stale_names(&["/// As `A::b` and `x + 1`.", "fn c() {}"]), []);
}

/// Types that share a name within their crate, because they are several of a kind and their module
/// says which.
const OF_A_KIND: [(&str, &[&str]); 4] = [
    // Each door has the same files, and in them the same types.
    ("crates/frontend", &["Body", "Counters", "End", "Message", "Queue", "Refusal", "Ticket"]),
    // Each command has its arguments, and a document that it prints.
    ("crates/lab", &["Arguments", "Document"]),
    ("crates/sawmill", &["Arguments"]),
    // Each format has a module.
    ("crates/format", &["Superblock"]),
];

/// Types that share a name and should not. None is added.
const SHARED: [(&str, &[&str]); 2] =
    [("crates/driver", &["Chunk", "Host", "Plain"]), ("crates/volume", &["Entry"])];

/// The type that a line declares for other files.
fn visible_type(line: &str) -> Option<&str> {
    let rest = line.strip_prefix("pub")?;
    let rest = rest.strip_prefix('(').map_or(Some(rest), |scope| Some(scope.split_once(')')?.1))?;
    let kinds = [" struct ", " enum ", " trait ", " type "];
    let name = kinds.iter().find_map(|kind| rest.strip_prefix(kind))?;
    name.split(|c: char| !c.is_alphanumeric()).next()
}

#[test]
fn no_two_types_of_a_crate_that_other_files_can_name_share_a_name() {
    let mut files_with: BTreeMap<(String, String), Vec<String>> = BTreeMap::new();
    for (path, lines) in production() {
        let of_crate: Vec<&str> = path.splitn(3, '/').take(2).collect();
        for name in lines.iter().filter_map(|line| visible_type(line)) {
            let key = (of_crate.join("/"), name.to_owned());
            files_with.entry(key).or_default().push(path.clone());
        }
    }
    files_with.retain(|_, files| files.len() > 1);
    let listed: BTreeSet<(String, String)> = OF_A_KIND
        .iter()
        .chain(&SHARED)
        .flat_map(|(of, names)| names.iter().map(|name| ((*of).to_owned(), (*name).to_owned())))
        .collect();
    let unlisted = files_with.iter().filter(|(key, _)| !listed.contains(key));
    let mut faults: Vec<String> =
        unlisted.map(|((_, name), files)| format!("{name}: {}", files.join(", "))).collect();
    let gone = listed.iter().filter(|key| !files_with.contains_key(key));
    faults.extend(gone.map(|(of, name)| format!("{of} has one {name}: delete it from the list")));
    none(&faults);
}

#[test]
fn a_type_that_other_files_can_name_is_found() {
    assert_eq!(visible_type("pub(in crate::a) struct B<'a> {"), Some("B"));
    assert_eq!(visible_type("pub type C = u8;"), Some("C"));
    assert_eq!(visible_type("struct D;"), None);
    assert_eq!(visible_type("pub use d::E;"), None);
}
