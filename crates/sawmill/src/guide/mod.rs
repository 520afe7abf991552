//! Keeps the generated parts of `docs/guide` equal to the tables in the code. Tests only.
//!
//! A page has its generated part between the two markers below; everything else in it is written by
//! hand. `SAWMILL_REGENERATE=1 cargo test -p sawmill` rewrites the generated parts.
//!
//! Not here: the tables, which their modules compare: `admin::metrics`, `command` and its
//! `replicate`, and `answers` for what is of several crates.

mod answers;

use std::fs;
use std::path::PathBuf;

const BEGIN: &str = "<!-- generated: begin -->\n";
const END: &str = "<!-- generated: end -->\n";

/// Fails if the generated part of `docs/guide/<page>` is not `expected`, or writes it if requested.
pub(crate) fn compare(page: &str, expected: &str) {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs/guide").join(page);
    let text =
        fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let begin =
        text.find(BEGIN).unwrap_or_else(|| panic!("{page} lacks the line {BEGIN:?}")) + BEGIN.len();
    let end = text.find(END).unwrap_or_else(|| panic!("{page} lacks the line {END:?}"));
    let actual = &text[begin..end];
    if actual.trim() == expected.trim() {
        return;
    }
    if std::env::var_os("SAWMILL_REGENERATE").is_some() {
        let renewed = format!("{}\n{}\n\n{}", &text[..begin], expected.trim(), &text[end..]);
        fs::write(&path, renewed).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        return;
    }
    let differing =
        actual.trim().lines().zip(expected.trim().lines()).find(|(line, wanted)| line != wanted);
    panic!(
        "docs/guide/{page} has drifted from the code (first difference, page against code: \
         {differing:?}); run: SAWMILL_REGENERATE=1 cargo test -p sawmill"
    );
}
