//! An error that repeats the words of the error that caused it also keeps that error as its source.
//!
//! Read is where a caught error has a name of [`CAUGHT`]: the body of a closure or function that
//! takes it, the arm of `Err(error)`, the block of `if let Err(error)`. Who says its words there
//! (`{error}`, `error.to_string()`) and makes an error there, also through a function or closure of
//! the same file, must keep the cause there. Words of a log line do not count, nor does an error
//! that is lent to a function (`&Failure::new(...)`): it is shown, and goes no further. Text that
//! is no error has another name: `what`, `why`.
//!
//! Not here: causes that are dropped without a word (`|_|`), and what a peer did against a
//! protocol, which is text (`Violation`).

use std::collections::BTreeSet;
use std::iter;
use std::ops::Range;

use super::nesting::quoted;
use super::rules::production;
use super::tidy::{files, none};

/// What a caught error is called.
const CAUGHT: [&str; 7] = ["error", "err", "e", "failure", "source", "cause", "reason"];

/// The code of the product, and its examples, which people copy.
fn sources() -> Vec<(String, Vec<String>)> {
    let mut found = production();
    for (path, text) in files(&[".rs"]) {
        let path = path.display().to_string();
        if path.starts_with("crates/") && path.contains("/examples/") {
            found.push((path, text.lines().map(ToOwned::to_owned).collect()));
        }
    }
    found
}

/// What keeps the cause of an error.
const KEEPERS: [&str; 6] =
    [".with_source(", "caused(", ".caused_by(", "Failure::io(", "Error::io(", "source }"];

/// What writes a line into the log.
const LOGS: [&str; 5] =
    ["tracing::error!(", "tracing::warn!(", "tracing::info!(", "tracing::debug!(", "panic!("];

/// A file, and the same bytes without what is in comments and quotes.
struct Source<'a> {
    whole: &'a str,
    code: String,
    /// What makes errors in this file: its own functions and closures.
    makers: Vec<String>,
}

impl<'a> Source<'a> {
    fn new(whole: &'a str) -> Self {
        let mut source = Source { whole, code: without_texts(whole), makers: Vec::new() };
        source.makers = source.find_makers();
        source
    }

    /// Functions that return an error, and closures that make one.
    fn find_makers(&self) -> Vec<String> {
        let mut found = Vec::new();
        for (at, _) in words(&self.code, "fn") {
            let Some(begin) = self.code[at..].find('(').map(|open| at + open) else { continue };
            let behind = &self.code[self.end_of_brackets(begin)..];
            let returned = behind.split(['{', ';']).next().unwrap_or_default();
            let returned = returned.split("where").next().unwrap_or_default().trim();
            if returned.ends_with("Error") || returned.ends_with("Failure") {
                let name = self.code[at..begin].trim_start_matches("fn").trim();
                found.push(name.split('<').next().unwrap_or_default().to_owned());
            }
        }
        for (at, _) in words(&self.code, "let") {
            let Some((name, rest)) = self.code[at + 3..].split_once('=') else { continue };
            let Some(parameters) = rest.trim_start().strip_prefix('|') else { continue };
            let Some((_, body)) = parameters.split_once('|') else { continue };
            let begin = self.code.len() - body.len();
            if makes_error(&self.code[begin..self.end_of_expression(begin)], &[]) {
                found.push(name.trim().to_owned());
            }
        }
        found
    }

    /// Behind the bracket that closes the one at `begin`.
    fn end_of_brackets(&self, begin: usize) -> usize {
        let mut depth = 0;
        for (at, letter) in self.code[begin..].char_indices() {
            match letter {
                '(' | '[' | '{' => depth += 1,
                ')' | ']' | '}' => depth -= 1,
                _ => continue,
            }
            if depth == 0 {
                return begin + at + 1;
            }
        }
        self.code.len()
    }

    /// The end of the block or expression at `begin`.
    fn end_of_expression(&self, begin: usize) -> usize {
        let mut at = begin + self.blanks(begin);
        if self.code[at..].starts_with('{') {
            return self.end_of_brackets(at);
        }
        while let Some(letter) = self.code[at..].chars().next() {
            match letter {
                '(' | '[' | '{' => at = self.end_of_brackets(at),
                ')' | ']' | '}' | ',' | ';' => break,
                _ => at += letter.len_utf8(),
            }
        }
        at
    }

    fn blanks(&self, at: usize) -> usize {
        self.code[at..].len() - self.code[at..].trim_start().len()
    }

    /// Where the errors that are called `name` have that name.
    fn scopes(&self, name: &str) -> Vec<Range<usize>> {
        let ranges = words(&self.code, name).filter_map(|(at, end)| {
            let begin =
                self.body_of_pattern(at, end).or_else(|| self.body_of_parameter(at, end))?;
            Some(begin..self.end_of_expression(begin))
        });
        ranges.collect()
    }

    /// Where the body begins of which `Err(name)` is the pattern.
    fn body_of_pattern(&self, at: usize, end: usize) -> Option<usize> {
        let before = self.code[..at].trim_end_matches("ref ");
        let open = before.strip_suffix("Err(").map(|rest| rest.len() + 3)?;
        let close = self.end_of_brackets(open);
        let is_whole = self.code[end..].starts_with(')') || self.code[end..].starts_with(" @");
        let behind = self.code[close..].trim_start_matches([',', ' ', '_', ')', '\n']);
        let begin = self.code.len() - behind.len();
        if !is_whole {
            return None;
        }
        if behind.starts_with("=>") {
            return Some(begin + 2);
        }
        if behind.starts_with("if ") {
            return behind.find("=>").map(|arrow| begin + arrow + 2);
        }
        let is_let = behind.starts_with("= ") && before.contains("let ");
        behind.find('{').filter(|_| is_let).map(|brace| begin + brace)
    }

    /// Where the body begins of the closure or function that has a parameter at `at`.
    fn body_of_parameter(&self, at: usize, end: usize) -> Option<usize> {
        let behind = &self.code[end..];
        if !behind.starts_with('|') && !behind.starts_with(": ") {
            return None;
        }
        let line = self.code[..at].rsplit('\n').next().unwrap_or_default();
        let is_first = line.ends_with('|');
        let is_later = line.ends_with(", ") && line.contains('|') && !line.contains("fn ");
        if is_first || is_later {
            let bar = behind.find('|').filter(|bar| !behind[..*bar].contains([';', '{']))?;
            let body = end + bar + 1;
            // `-> Type {`
            let typed = self.code[body..].trim_start().starts_with("->");
            let brace = self.code[body..].find('{').filter(|_| typed).unwrap_or(0);
            return Some(body + brace);
        }
        let open = self.open_bracket(at)?;
        let head = self.code[..open].rsplit(['\n', ';', '}']).next().unwrap_or_default();
        let behind = self.end_of_brackets(open);
        let brace = self.code[behind..].find(['{', ';'])?;
        let has_body = head.contains("fn ") && self.code[behind + brace..].starts_with('{');
        has_body.then_some(behind + brace)
    }

    /// The round bracket that is open at `at`.
    fn open_bracket(&self, at: usize) -> Option<usize> {
        let mut depth = 0;
        for (index, letter) in self.code[..at].char_indices().rev() {
            match letter {
                ')' => depth += 1,
                '(' if depth == 0 => return Some(index),
                '(' => depth -= 1,
                ';' | '{' | '}' => return None,
                _ => (),
            }
        }
        None
    }

    /// The arms of matches in a range.
    fn arms(&self, range: &Range<usize>) -> Vec<Range<usize>> {
        let arrows = self.code[range.clone()].match_indices("=>");
        let bodies = arrows.map(|(at, _)| range.start + at + 2);
        bodies.map(|begin| begin..self.end_of_expression(begin)).collect()
    }

    /// What writes log lines in a range.
    fn logs(&self, range: &Range<usize>) -> Vec<Range<usize>> {
        let calls = LOGS.iter().flat_map(|log| self.code[range.clone()].match_indices(log));
        let calls = calls.map(|(at, log)| (range.start + at, range.start + at + log.len() - 1));
        calls.map(|(begin, open)| begin..self.end_of_brackets(open)).collect()
    }

    /// The lines on which an error is made that repeats another and drops it. An arm of a match
    /// keeps the cause for itself.
    fn faults(&self) -> Vec<usize> {
        let mut found = BTreeSet::new();
        for name in CAUGHT {
            let scopes = self.scopes(name);
            for scope in &scopes {
                for range in iter::once(scope.clone()).chain(self.arms(scope)) {
                    let is_inner =
                        |one: &&Range<usize>| **one != range && range.contains(&one.start);
                    let mut others: Vec<_> = scopes.iter().filter(is_inner).cloned().collect();
                    others.extend(self.logs(&range));
                    if self.drops(name, &range, &others) {
                        found.insert(self.whole[..range.start].lines().count());
                    }
                }
            }
        }
        found.into_iter().collect()
    }

    /// Whether a range without some of its parts repeats the error `name` and drops it.
    fn drops(&self, name: &str, range: &Range<usize>, others: &[Range<usize>]) -> bool {
        let code = cut(&self.code, range, others);
        let keeps = KEEPERS.iter().any(|keeper| code.contains(keeper));
        !keeps && makes_error(&code, &self.makers) && says(&cut(self.whole, range, others), name)
    }
}

/// `text` of a range without some of its parts.
fn cut(text: &str, range: &Range<usize>, others: &[Range<usize>]) -> String {
    let stays = |at: &usize| !others.iter().any(|other| other.contains(at));
    let bytes: Vec<u8> = range.clone().filter(stays).map(|at| text.as_bytes()[at]).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Whether the words of the error `name` are said.
fn says(text: &str, name: &str) -> bool {
    let written = [format!("{{{name}}}"), format!("{{{name}:"), format!("{{{name}.")];
    let is_stringified = |(_, end): (usize, usize)| text[end..].starts_with(".to_string()");
    written.iter().any(|form| text.contains(form)) || words(text, name).any(is_stringified)
}

/// Whether code makes an error by a constructor, or by one of `makers`.
fn makes_error(code: &str, makers: &[String]) -> bool {
    let calls = |maker: &String| {
        words(code, maker)
            .any(|(at, end)| code[end..].starts_with('(') && !code[..at].ends_with(['.', ':']))
    };
    let constructs = |(at, class): (usize, &str)| {
        let path = |letter: char| letter.is_alphanumeric() || letter == '_' || letter == ':';
        let is_lent = code[..at].trim_end_matches(path).ends_with('&');
        let called = &code[at + class.len()..];
        let name =
            called.split(|letter: char| !letter.is_alphanumeric()).next().unwrap_or_default();
        // `Error::Log(text)` makes one, as `Error::new` does.
        let is_variant = class == "Error::" && name.starts_with(char::is_uppercase);
        let makes = is_variant || ["new", "usage"].contains(&name);
        makes && !is_lent && called[name.len()..].starts_with('(')
    };
    let classes = ["Error::", "Failure::"].iter();
    classes.flat_map(|class| code.match_indices(class)).any(constructs) || makers.iter().any(calls)
}

/// Where a word begins and ends.
fn words<'a>(text: &'a str, word: &'a str) -> impl Iterator<Item = (usize, usize)> + 'a {
    let is_letter = |letter: char| letter.is_alphanumeric() || letter == '_';
    text.match_indices(word).map(move |(at, _)| (at, at + word.len())).filter(move |(at, end)| {
        !text[..*at].ends_with(is_letter) && !text[*end..].starts_with(is_letter)
    })
}

/// The same bytes with blanks for comments and for what stands in quotes.
fn without_texts(code: &str) -> String {
    let mut blank = String::new();
    while let Some(first) = code[blank.len()..].chars().next() {
        let rest = &code[blank.len()..];
        let length = if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else {
            quoted(rest).unwrap_or(0)
        };
        match length {
            0 => blank.push(first),
            _ => {
                blank.extend(rest.bytes().take(length).map(|b| if b == b'\n' { '\n' } else { ' ' }))
            }
        }
    }
    blank
}

#[test]
fn an_error_that_repeats_its_cause_keeps_it() {
    let (mut faults, mut count) = (Vec::new(), 0);
    for (path, lines) in sources() {
        let text = lines.join("\n");
        let source = Source::new(&text);
        count += CAUGHT.iter().map(|name| source.scopes(name).len()).sum::<usize>();
        faults.extend(source.faults().into_iter().map(|line| {
            format!(
                "{path}:{line}: the new error repeats the one that was caught and drops it: keep \
                 it as its source (Error::caused, with_source, caused_by)"
            )
        }));
    }
    assert!(count > 500, "only {count} caught errors were read");
    none(&faults);
}

#[test]
fn a_dropped_cause_is_found_and_a_kept_one_is_none() {
    let faults = |code: &str| Source::new(&code.replace("NEW", "Error::new(Kind::Full")).faults();
    let dropped = [
        r#"let a = b.map_err(|error| NEW, format!("c: {error}")))?;"#,
        "b.map_err(|error: io::Error| NEW, error.to_string()))",
        r#"match a { Ok(_) => {} Err(e) if c => { let text = format!("{e:?}"); f(NEW, text)) } }"#,
        r#"if let Err(error @ Of::It { .. }) = a { return Err(AnError::It(format!("{error}"))) }"#,
        r#"fn why(path: &Path, error: &Error) -> Error { NEW, format!("{error}; free some")) }"#,
        r#"let bad = |what| NEW, what); a.map_err(|err| bad(err.to_string()))"#,
        r#"let bad = |a: &str, failure: Failure| Failure::usage(format!("{a}: {failure}"));"#,
        r#"fn bad(a: A) -> Error { NEW, a) } fn b() { a.map_err(|error| bad(error.to_string())) }"#,
        r#"a.map_err(|error| match error.kind() { _ => NEW, format!("{error}")), A => error })"#,
        r#"|error| match a { A => Error::caused(b, error), _ => NEW, format!("{error}")) }"#,
    ];
    for code in dropped {
        assert_eq!(faults(&format!("\n\n{code}")), [3], "{code}");
    }
    let kept = [
        r#"b.map_err(|error| NEW, format!("c: {error}")).with_source(error))?;"#,
        r#"b.map_err(|error| Error::caused(Kind::Full, format!("c of {error}"), error))"#,
        r#"b.map_err(|failure| Failure::usage(format!("{failure}")).caused_by(failure))"#,
        r#"b.map_err(|source| Error::Io { what: format!("b"), source })"#,
        r#"b.map_err(|error| { tracing::warn!("{error}"); NEW, "the words of another") })"#,
        r#"match a { Err(error) => show(&Failure::usage(format!("{error}"))), Ok(_) => NEW, b) }"#,
        r#"b.map_err(|error| format!("{error}")); NEW, "no cause")"#,
        r#"b.map_err(|what: String| NEW, format!("{what}: no error, but text")))"#,
        r#"// b.map_err(|error| NEW, format!("{error}")))"#,
    ];
    for code in kept {
        assert!(faults(code).is_empty(), "{code}");
    }
}
