//! What commands print: tables for people, JSON for programs, one error line.
//!
//! Invariants: results go to stdout, everything else to stderr; a reader that goes away (`| head`) ends the
//! command quietly instead of with a panic.

use std::io::{self, IsTerminal, Write};

use comfy_table::presets::NOTHING;
use comfy_table::{ContentArrangement, Table};
use serde::Serialize;

use crate::exit::{Exit, Failure, Result};

/// Prints one line of text to stdout.
pub(crate) fn line(text: &str) -> Result<()> {
    let mut stdout = io::stdout().lock();
    writeln!(stdout, "{text}").and_then(|()| stdout.flush()).map_err(|error| gone(&error))
}

fn gone(error: &io::Error) -> Failure {
    Failure::io("cannot write to standard output", error)
}

/// Prints a value as indented JSON.
pub(crate) fn json(value: &impl Serialize) -> Result<()> {
    let text = serde_json::to_string_pretty(value).map_err(unserialisable)?;
    line(&text)
}

/// Prints a value as JSON on one line: an event of a stream.
pub(crate) fn json_event(value: &impl Serialize) -> Result<()> {
    let text = serde_json::to_string(value).map_err(unserialisable)?;
    line(&text)
}

fn unserialisable(error: serde_json::Error) -> Failure {
    Failure::new(Exit::Internal, format!("cannot put the result into JSON: {error}"))
}

/// Prints a table with a header; columns are separated by space alone.
pub(crate) fn table(header: &[&str], rows: Vec<Vec<String>>) -> Result<()> {
    let mut table = plain_table();
    table.set_header(header.to_vec());
    table.add_rows(rows);
    show(table)
}

/// Prints rows without a header.
pub(crate) fn rows(rows: Vec<Vec<String>>) -> Result<()> {
    let mut table = plain_table();
    table.add_rows(rows);
    show(table)
}

/// Prints facts as two columns: label and value.
pub(crate) fn facts(rows: &[(&str, String)]) -> Result<()> {
    let mut table = plain_table();
    table.add_rows(rows.iter().map(|(label, value)| vec![(*label).to_owned(), value.clone()]));
    show(table)
}

fn show(mut table: Table) -> Result<()> {
    // The first column begins at the margin.
    table.column_iter_mut().for_each(|column| {
        column.set_padding((0, 2));
    });
    line(&table.trim_fmt())
}

fn plain_table() -> Table {
    let mut table = Table::new();
    table.load_style(NOTHING);
    table.set_content_arrangement(ContentArrangement::Disabled);
    table
}

/// Writes the error line of a failed command.
pub(crate) fn error(failure: &Failure) {
    // With stderr gone nobody is left to tell.
    let _ = writeln!(io::stderr(), "sawmill: error: {failure}");
}

/// A line that is rewritten in place while something long runs; silent where stderr is no terminal.
pub(crate) struct Progress {
    label: &'static str,
    shown: bool,
    permille: u64,
}

impl Progress {
    /// Progress of what `label` names.
    pub(crate) fn new(label: &'static str) -> Self {
        Progress { label, shown: io::stderr().is_terminal(), permille: u64::MAX }
    }

    /// Shows that `done` of `total` are done, at most a thousand times.
    pub(crate) fn show(&mut self, done: u64, total: u64) {
        let permille = (done * 1000).checked_div(total).unwrap_or(0);
        if self.shown && permille != self.permille {
            self.permille = permille;
            let percent = permille / 10;
            // Progress is a courtesy: a failure to show it changes nothing.
            let _ = write!(io::stderr(), "\r{} {done} of {total} ({percent} %)\x1b[K", self.label);
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if self.shown && self.permille != u64::MAX {
            let _ = write!(io::stderr(), "\r\x1b[K");
        }
    }
}
