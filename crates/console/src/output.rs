//! What commands print: tables for people, JSON for programs, one error line.
//!
//! Invariants: results go to stdout, everything else to stderr; a reader that goes away (`| head`)
//! ends the command with a failure of its own kind ([`Failure::has_no_reader`]), not with a panic.
//!
//! Not here: how sizes and durations are written (`units`), what an exit code means (`exit`).

use std::io::{self, IsTerminal, Write};
use std::time::{Duration, Instant};

use comfy_table::presets::NOTHING;
use comfy_table::{ContentArrangement, Table};
use serde::Serialize;

use crate::exit::{Exit, Failure, Result};
use crate::units::{human_duration, human_size};

/// Prints one line of text to stdout.
pub fn line(text: &str) -> Result<()> {
    raw(format!("{text}\n").as_bytes())
}

/// Prints bytes to stdout as they are.
pub fn raw(bytes: &[u8]) -> Result<()> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(bytes).and_then(|()| stdout.flush()).map_err(Failure::output)
}

/// Prints a value as indented JSON.
pub fn json(value: &impl Serialize) -> Result<()> {
    let text = serde_json::to_string_pretty(value).map_err(unserializable)?;
    line(&text)
}

/// Prints a value as JSON on one line: an event of a stream.
pub fn json_event(value: &impl Serialize) -> Result<()> {
    let text = serde_json::to_string(value).map_err(unserializable)?;
    line(&text)
}

fn unserializable(error: serde_json::Error) -> Failure {
    Failure::caused(Exit::Internal, "cannot put the result into JSON", error)
}

/// Prints a table with a header; columns are separated by space alone.
pub fn table(header: &[&str], rows: Vec<Vec<String>>) -> Result<()> {
    let mut table = plain_table();
    table.set_header(header.to_vec());
    table.add_rows(rows);
    show(table)
}

/// Prints rows without a header.
pub fn rows(rows: Vec<Vec<String>>) -> Result<()> {
    let mut table = plain_table();
    table.add_rows(rows);
    show(table)
}

/// Prints facts as two columns: label and value.
pub fn facts(rows: &[(&str, String)]) -> Result<()> {
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
pub fn error(failure: &Failure) {
    // If stderr is closed, the error cannot be reported.
    let _ = writeln!(io::stderr(), "sawmill: error: {failure}");
}

/// A line that is rewritten in place while something long runs; silent if stderr is not a terminal.
pub struct Progress {
    label: &'static str,
    is_visible: bool,
    permille: u64,
}

impl Progress {
    /// Progress of what `label` names.
    pub fn new(label: &'static str) -> Self {
        Progress { label, is_visible: io::stderr().is_terminal(), permille: u64::MAX }
    }

    /// Shows that `done` of `total` are done, at most a thousand times.
    pub fn show(&mut self, done: u64, total: u64) {
        let permille = (done * 1000).checked_div(total).unwrap_or(0);
        if self.is_visible && permille != self.permille {
            self.permille = permille;
            let percent = permille / 10;
            // Progress is optional: a failure to show it is ignored.
            let _ = write!(io::stderr(), "\r{} {done} of {total} ({percent} %)\x1b[K", self.label);
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if self.is_visible && self.permille != u64::MAX {
            let _ = write!(io::stderr(), "\r\x1b[K");
        }
    }
}

/// Progress of a long operation, on stderr: a bar on a terminal, a plain line now and then
/// elsewhere, nothing in the first second. [`Bar::end`] reports a failure to show it.
pub struct Bar {
    what: String,
    terminal: bool,
    began: Instant,
    /// When it was shown last, and how much was done at the first look.
    last_output_at: Option<Instant>,
    first: Option<u64>,
    write_error: Option<io::Error>,
}

/// Cells of a bar.
const BAR_CELLS: u64 = 24;
/// Shorter operations show no progress.
const BAR_AFTER: Duration = Duration::from_secs(1);
/// Interval of lines where there is no terminal.
const LINE_EVERY: Duration = Duration::from_secs(5);

impl Bar {
    /// Progress of `what`, for example `importing disk1`.
    pub fn new(what: impl Into<String>) -> Self {
        let terminal = io::stderr().is_terminal();
        Bar {
            what: what.into(),
            terminal,
            began: Instant::now(),
            last_output_at: None,
            first: None,
            write_error: None,
        }
    }

    /// Shows that `done` of `total` bytes are done.
    pub fn show(&mut self, done: u64, total: u64) {
        // What an earlier attempt moved counts as done, but must not count in the rate.
        let first = *self.first.get_or_insert(done);
        let took = self.began.elapsed();
        let rests =
            !self.terminal && self.last_output_at.is_some_and(|at| at.elapsed() < LINE_EVERY);
        // After a failed write nothing more is shown: `end` reports that first failure.
        if took < BAR_AFTER || rests || self.write_error.is_some() {
            return;
        }
        self.last_output_at = Some(Instant::now());
        let text = progress_text(&self.what, first, done, total, took);
        let outcome = if self.terminal {
            let cells = (done * BAR_CELLS).checked_div(total).unwrap_or(BAR_CELLS) as usize;
            let bar = format!("{}{}", "#".repeat(cells), ".".repeat(BAR_CELLS as usize - cells));
            write!(io::stderr(), "\r[{bar}] {text}\x1b[K")
        } else {
            writeln!(io::stderr(), "{text}")
        };
        self.write_error = outcome.err();
    }

    /// Removes the progress bar. Returns an error if output failed earlier, so that the command
    /// does not exit with 0.
    pub fn end(self) -> Result<()> {
        match &self.write_error {
            None => Ok(()),
            Some(error) => {
                Err(Failure::io("all is done, but its progress could not be printed", error))
            }
        }
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        if self.terminal && self.last_output_at.is_some() {
            let _ = write!(io::stderr(), "\r\x1b[K");
        }
    }
}

/// `importing disk1: 42 %, 1.2 GiB of 3 GiB, 120 MiB a second, 15s left`.
fn progress_text(what: &str, first: u64, done: u64, total: u64, took: Duration) -> String {
    // Wide, because the bytes of a large disk times 100 may not fit 64 bits.
    let percent = (u128::from(done) * 100).checked_div(u128::from(total)).unwrap_or(100);
    let mut text = format!("{what}: {percent} %, {} of {}", human_size(done), human_size(total));
    let moved = done.saturating_sub(first);
    let rate = moved as f64 / took.as_secs_f64();
    // Without a rate the time left would be infinite.
    if moved > 0 && done < total {
        let remaining = Duration::from_secs(((total - done) as f64 / rate) as u64);
        text.push_str(&format!(
            ", {} a second, {} left",
            human_size(rate as u64),
            human_duration(remaining)
        ));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_tells_share_rate_and_time_left() {
        let text =
            progress_text("importing disk1", 1 << 30, 2 << 30, 4 << 30, Duration::from_secs(8));
        assert_eq!(text, "importing disk1: 50 %, 2 GiB of 4 GiB, 128 MiB a second, 16.0 s left");
        let text = progress_text("x", 0, 0, 0, Duration::from_secs(2));
        assert_eq!(text, "x: 100 %, 0 B of 0 B");
    }

    #[test]
    fn what_takes_less_than_a_second_says_nothing() {
        let mut bar = Bar::new("x");
        bar.show(1, 2);
        assert!(bar.last_output_at.is_none());
        assert!(bar.end().is_ok());
    }
}
