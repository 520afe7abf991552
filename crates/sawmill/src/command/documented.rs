//! Checks that this program understands every `sawmill` command line in the documents. Tests only.
//!
//! Invariant: the test fails if it finds few command lines, so it cannot pass because it finds
//! none.
//!
//! Not here: whether a command does what the document says; the tour of `demo/` and the tests of
//! `tests/` run those.

use std::fs;
use std::path::{Path, PathBuf};

use clap::Parser;
use clap::error::ErrorKind;

use super::Cli;

/// Command lines in the fenced blocks of a document: line number and words.
fn commands(text: &str) -> Vec<(usize, Vec<String>)> {
    let (mut found, mut is_block, mut before) = (Vec::new(), false, String::new());
    for (number, line) in text.lines().enumerate() {
        if line.trim_start().starts_with("```") {
            is_block = !is_block;
            continue;
        }
        let line = format!("{before}{}", line.trim());
        if is_block && let Some(continued) = line.strip_suffix('\\') {
            before = continued.to_owned();
            continue;
        }
        before.clear();
        if is_block {
            found.extend(simple_commands(&line).into_iter().map(|words| (number + 1, words)));
        }
    }
    found
}

/// Command lines in running text, between backticks. Forms with `[`, `|` or `...` are descriptions
/// and are skipped.
fn mentions(text: &str) -> Vec<(usize, Vec<String>)> {
    let (mut found, mut is_block) = (Vec::new(), false);
    for (number, line) in text.lines().enumerate() {
        is_block ^= line.trim_start().starts_with("```");
        let spans = line.split('`').skip(1).step_by(2).filter(|_| !is_block);
        let lines = spans.filter(|span| !["[", "|", "..."].iter().any(|sign| span.contains(sign)));
        found.extend(lines.flat_map(simple_commands).map(|words| (number + 1, words)));
    }
    found
}

/// The calls of `sawmill` in one line of shell.
fn simple_commands(line: &str) -> Vec<Vec<String>> {
    let mut calls = vec![Vec::new()];
    for word in shell_words(line) {
        match word.as_str() {
            "|" | "&&" | ";" | "&" | "$(" => calls.push(Vec::new()),
            _ => calls.last_mut().expect("never empty").push(word),
        }
    }
    let is_prefix = |word: &String| {
        word == "sudo"
            || word == "!"
            || word == "$"
            || word.split_once('=').is_some_and(|(name, _)| {
                !name.is_empty()
                    && name.chars().all(|letter| letter.is_ascii_uppercase() || letter == '_')
            })
    };
    let calls = calls.into_iter().map(|call| {
        let call: Vec<String> = call.into_iter().skip_while(is_prefix).collect();
        let end = call.iter().position(|word| word.starts_with('>') || word.starts_with("2>"));
        call[..end.unwrap_or(call.len())].to_vec()
    });
    calls.filter(|call| call.len() > 1 && call[0] == "sawmill").collect()
}

/// The words of a line as a shell takes them, without its comment.
fn shell_words(line: &str) -> Vec<String> {
    let (mut words, mut word, mut quote) = (Vec::new(), None::<String>, None);
    for letter in line.chars() {
        match (quote, letter) {
            (Some(open), _) if letter == open => quote = None,
            (None, '\'' | '"') => {
                quote = Some(letter);
                word.get_or_insert_default();
            }
            (None, ' ') => words.extend(word.take()),
            (None, '#') if word.is_none() => break,
            _ => word.get_or_insert_default().push(letter),
        }
    }
    words.extend(word);
    words
}

fn documents() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut found: Vec<PathBuf> = Vec::new();
    for folder in
        ["", "docs", "docs/guide", "bench", "packaging/systemd", "sdk/go/sawmill", "sdk/python"]
    {
        let Ok(entries) = fs::read_dir(root.join(folder)) else { continue };
        let paths = entries.filter_map(|entry| entry.ok().map(|entry| entry.path()));
        found.extend(paths.filter(|path| path.extension().is_some_and(|ending| ending == "md")));
    }
    found.sort();
    found
}

#[test]
fn every_command_line_that_a_document_shows_is_understood() {
    use ErrorKind::{
        DisplayHelp, DisplayVersion, InvalidValue, MissingRequiredArgument, ValueValidation,
    };
    let (mut faults, mut line_count) = (Vec::new(), 0);
    for path in documents() {
        let text = fs::read_to_string(&path).expect("a document");
        let whole = commands(&text).into_iter().map(|found| (found, true));
        let named = mentions(&text).into_iter().map(|found| (found, false));
        for ((number, words), is_whole) in whole.chain(named) {
            line_count += 1;
            let Err(error) = Cli::try_parse_from(&words) else { continue };
            let is_fine = match error.kind() {
                DisplayHelp | DisplayVersion => true,
                // Text names a command without its required arguments, or with a word for a value.
                MissingRequiredArgument | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
                    !is_whole
                }
                InvalidValue | ValueValidation => !is_whole,
                _ => false,
            };
            if !is_fine {
                let why = error.to_string().lines().next().unwrap_or_default().to_owned();
                faults.push(format!("{}:{number}: {}: {why}", path.display(), words.join(" ")));
            }
        }
    }
    assert!(line_count > 200, "only {line_count} command lines were found");
    assert!(faults.is_empty(), "{} of {line_count}:\n{}", faults.len(), faults.join("\n"));
}

#[test]
fn a_command_line_is_found_behind_a_prefix_and_before_a_pipe() {
    let text = "```\nsudo A_B=1 sawmill list \\\n  --store 'a b' | jq . # all\n```\nsawmill \
        not-in-a-block\n";
    assert_eq!(
        commands(text),
        [(3, ["sawmill", "list", "--store", "a b"].map(String::from).to_vec())]
    );
}
