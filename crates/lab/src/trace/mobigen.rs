//! MobiGen: the system calls of a program on its files, `THREAD MICROSECONDS CALL ARGUMENTS`.
//!
//! The file has one thread after the other. The calls are replayed by time, as the tool itself
//! does, so the file is read into memory. A descriptor refers to the file of its oldest open that
//! is not closed yet. Each open whose path the tool left out is a file of its own. `read` and
//! `write` continue where the last one ended. The device of a request is the number of its file.
//!
//! Invariants: calls of the same time keep the order of the file. A line without thread, time and
//! call is reported before the first request.
//!
//! Not here: widening calls to whole pages, as a page cache does (`crate::simulate`).

use std::collections::{HashMap, VecDeque};

use super::number::whole;
use super::source::TraceSource;
use super::{Operation, Request, Requests, TraceError};
use sawmill_console::exit::Result;

const EXPECTED: &str = "'THREAD MICROSECONDS CALL ARGUMENTS'";

/// One call: where it stands in the trace, when it was made, and its words.
struct Call {
    line: u64,
    at_ns: u64,
    words: Vec<String>,
}

struct OpenFile {
    number: u64,
    offset: u64,
}

/// The reader of a MobiGen trace: follows descriptors to files, and the offset of each.
pub(super) struct Mobigen {
    skip_bad_lines: bool,
    /// Bounded by the calls of one trace, which is read as a whole.
    calls: Option<VecDeque<Call>>,
    /// Bounded by the lines of one trace.
    errors: VecDeque<TraceError>,
    names: HashMap<String, u64>,
    /// Bounded by the files that the trace has open.
    open: HashMap<i64, VecDeque<OpenFile>>,
    files: u64,
    /// The line of the last request.
    line: u64,
}

/// Whether a line is one of this format, with a call that moves data.
pub(super) fn is_call(line: &str) -> bool {
    let words: Vec<&str> = line.split_whitespace().collect();
    let [thread, time, call, _, _, ..] = words[..] else { return false };
    let moves = matches!(call, "open" | "write" | "read" | "pwrite" | "pread");
    whole(thread).is_some() && whole(time).is_some() && moves
}

impl Mobigen {
    pub(super) fn new(skip_bad_lines: bool) -> Self {
        Mobigen {
            skip_bad_lines,
            calls: None,
            errors: VecDeque::new(),
            names: HashMap::new(),
            open: HashMap::new(),
            files: 0,
            line: 0,
        }
    }

    fn load(&mut self, source: &mut TraceSource) -> Result<VecDeque<Call>> {
        let mut calls = Vec::new();
        let mut line = Vec::new();
        let mut number = 0;
        while source.line(&mut line)? {
            number += 1;
            let text = String::from_utf8_lossy(&line);
            let words: Vec<String> = text.split_whitespace().map(str::to_owned).collect();
            if words.is_empty() {
                continue;
            }
            let at_ns = words.get(1).and_then(|word| whole(word)?.checked_mul(1000));
            match at_ns {
                Some(at_ns) if words.len() > 2 && whole(&words[0]).is_some() => {
                    calls.push(Call { line: number, at_ns, words: words[2..].to_vec() });
                }
                _ => {
                    self.errors.push_back(bad(number, text.into_owned()));
                    if !self.skip_bad_lines {
                        break;
                    }
                }
            }
        }
        // Stable: the order inside a thread is kept.
        calls.sort_by_key(|call| call.at_ns);
        Ok(calls.into())
    }

    fn new_file(&mut self) -> u64 {
        self.files += 1;
        self.files - 1
    }

    fn note_open(&mut self, words: &[String]) -> Option<()> {
        let (path, descriptor) = (words.get(1)?, words.get(3)?.parse().ok()?);
        let number = match self.names.get(path) {
            Some(number) => *number,
            None => self.new_file(),
        };
        // Without quotes, this is not a path: the tool left the path out.
        if path.starts_with('"') {
            self.names.insert(path.clone(), number);
        }
        self.open.entry(descriptor).or_default().push_back(OpenFile { number, offset: 0 });
        Some(())
    }

    /// None: the line is invalid; `Some(None)`: it moves no data.
    fn replay(&mut self, call: &Call) -> Option<Option<Request>> {
        let words = &call.words;
        let number = |at: usize| words.get(at)?.parse::<i64>().ok();
        let operation = match words[0].as_str() {
            "open" => return self.note_open(words).map(|()| None),
            "close" => {
                self.open.get_mut(&number(1)?).and_then(VecDeque::pop_front);
                return Some(None);
            }
            "write" | "pwrite" => Operation::Write,
            "read" | "pread" => Operation::Read,
            "fsync" | "fdatasync" => Operation::Flush,
            _ => return Some(None),
        };
        let descriptor = number(1)?;
        let is_open = self.open.get(&descriptor).is_some_and(|files| !files.is_empty());
        if !is_open {
            // Opened before the recording started.
            let number = self.new_file();
            self.open.entry(descriptor).or_default().push_back(OpenFile { number, offset: 0 });
        }
        let file = self.open.get_mut(&descriptor)?.front_mut()?;
        let (address, length) = match words[0].as_str() {
            // Failed calls have a negative count.
            "write" | "read" => {
                let length = u64::try_from(number(2)?).unwrap_or(0);
                let address = file.offset;
                file.offset = address.checked_add(length)?;
                (address, length)
            }
            "pwrite" | "pread" => {
                (u64::try_from(number(2)?).ok()?, u64::try_from(number(3)?).unwrap_or(0))
            }
            _ => (0, 0),
        };
        Some(Some(Request { at_ns: call.at_ns, operation, device: file.number, address, length }))
    }
}

fn bad(line: u64, found: String) -> TraceError {
    TraceError::Line { place: format!("line {line}"), expected: EXPECTED.to_owned(), found }
}

impl Requests for Mobigen {
    fn next(&mut self, source: &mut TraceSource) -> Result<Option<Request>, TraceError> {
        if self.calls.is_none() {
            // The file is ordered by thread. Requests in the order of time need all of it.
            self.calls = Some(self.load(source)?);
        }
        if let Some(bad) = self.errors.pop_front() {
            return Err(bad);
        }
        while let Some(call) = self.calls.as_mut().and_then(VecDeque::pop_front) {
            self.line = call.line;
            match self.replay(&call) {
                Some(Some(request)) => return Ok(Some(request)),
                Some(None) => {}
                None => return Err(bad(call.line, call.words.join(" "))),
            }
        }
        Ok(None)
    }

    fn place(&self, _source: &TraceSource) -> String {
        format!("line {}", self.line)
    }
}
