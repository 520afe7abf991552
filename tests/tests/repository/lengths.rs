//! How long files, functions and lines may be, in every language that is written in lines.
//!
//! Not here: how deep blocks may nest (`nesting.rs`), and how many files a folder may have.

use std::path::Path;

use super::tidy::{WRITTEN_IN_LINES, files, files_of_the_root, none};

const FILE_LINES_MAX: usize = 600;
const FUNCTION_LINES_MAX: usize = 70;
const LINE_COLUMNS_MAX: usize = 100;

#[test]
fn no_file_is_longer_than_a_reader_can_hold() {
    let long = files(&WRITTEN_IN_LINES);
    let long = long.iter().map(|(path, text)| (path, text.lines().count()));
    let faults: Vec<String> = long
        .filter(|(_, lines)| *lines > FILE_LINES_MAX)
        .map(|(path, lines)| format!("{}: {lines} lines", path.display()))
        .collect();
    none(&faults);
}

/// The functions of a formatted file and how many lines each has, from its signature to its last
/// brace.
fn functions_of(text: &str) -> Vec<(String, usize)> {
    let lines: Vec<&str> = text.lines().collect();
    let mut found = Vec::new();
    for (first, line) in lines.iter().enumerate() {
        let indent = &line[..line.len() - line.trim_start().len()];
        let before =
            ["pub(crate) ", "pub(super) ", "pub ", "const ", "async ", "unsafe ", "extern \"C\" "];
        let mut signature = line.trim_start();
        while let Some(rest) = before.iter().find_map(|word| signature.strip_prefix(word)) {
            signature = rest;
        }
        let Some(rest) = signature.strip_prefix("fn ").filter(|_| !line.ends_with(';')) else {
            continue;
        };
        let name = rest.split(['(', '<']).next().unwrap_or_default();
        // In a macro it may end with more than the brace.
        let is_end =
            |line: &&str| line.strip_prefix(indent).is_some_and(|end| end == "}" || end == "})+");
        let body = lines[first..].iter().position(is_end);
        found.extend(body.map(|body| (name.to_owned(), body + 1)));
    }
    found
}

/// The same of a text in another language: a Python function ends before the next line that is not
/// deeper than its `def`; one of Go, C or shell begins at the margin, and so does its last brace.
fn functions_elsewhere(path: &Path, text: &str) -> Vec<(String, usize)> {
    let lines: Vec<&str> = text.lines().collect();
    let depth = |line: &str| line.len() - line.trim_start().len();
    let is_python = path.extension().is_some_and(|ending| ending == "py");
    let mut found = Vec::new();
    for (first, line) in lines.iter().enumerate() {
        let after = &lines[first + 1..];
        let length = if is_python {
            let starts = line.trim_start().trim_start_matches("async ").starts_with("def ");
            let is_past = |next: &&str| {
                !next.trim().is_empty()
                    && depth(next) <= depth(line)
                    && !next.trim_start().starts_with(')')
            };
            let end = after.iter().position(is_past).unwrap_or(after.len());
            let body = after[..end].iter().rposition(|line| !line.trim().is_empty());
            starts.then(|| body.map_or(1, |last| last + 2))
        } else {
            let opens = line.ends_with('{') && (depth(line) == 0) && line.contains('(')
                || *line == "{" && first > 0;
            let end = after.iter().position(|next| next.starts_with('}'));
            end.filter(|_| opens).map(|end| end + 2)
        };
        found.extend(length.map(|length| ((*line).trim().to_owned(), length)));
    }
    found
}

#[test]
fn no_function_is_longer_than_a_screen() {
    let mut faults = Vec::new();
    for (path, text) in files(&[".rs", ".py", ".go", ".c", ".h", ".cpp", ".sh"]) {
        let is_rust = path.extension().is_some_and(|ending| ending == "rs");
        let all = if is_rust { functions_of(&text) } else { functions_elsewhere(&path, &text) };
        let long = all.into_iter().filter(|(_, lines)| *lines > FUNCTION_LINES_MAX);
        faults.extend(
            long.map(|(name, lines)| format!("{}: {name} has {lines} lines", path.display())),
        );
    }
    none(&faults);
    let counted =
        functions_of("fn one() {\n    two();\n}\n    pub(crate) fn three<T>(\n    ) {\n    }\n");
    assert_eq!(counted, [("one".to_owned(), 3), ("three".to_owned(), 3)]);
    let lengths = |path: &str, text: &str| -> Vec<usize> {
        let found = functions_elsewhere(Path::new(path), text);
        found.into_iter().map(|(_, lines)| lines).collect()
    };
    let python = "def one():\n    two()\n\n\nclass A:\n    def b(\n    ):\n        c()\nd()\n";
    assert_eq!(lengths("a.py", python), [2, 3]);
    assert_eq!(lengths("a.go", "func one() {\n\tif a {\n\t}\n}\nvar x = []int{\n}\n"), [4]);
    assert_eq!(lengths("a.c", "int\none(void)\n{\n\treturn 1;\n}\n"), [3]);
    assert_eq!(lengths("a.sh", "one() {\n    two\n}\n"), [3]);
}

#[test]
fn no_line_is_wider_than_the_page() {
    let mut faults = Vec::new();
    for (path, text) in
        files(&WRITTEN_IN_LINES).into_iter().chain(files_of_the_root(&WRITTEN_IN_LINES))
    {
        for (n, line) in text.lines().enumerate() {
            // A tab of Go is four columns.
            let columns: usize = line.chars().map(|c| if c == '\t' { 4 } else { 1 }).sum();
            if columns > LINE_COLUMNS_MAX {
                faults.push(format!("{}:{}: {columns} columns", path.display(), n + 1));
            }
        }
    }
    none(&faults);
}
