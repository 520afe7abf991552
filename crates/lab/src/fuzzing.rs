//! The entry point for fuzzers of trace files. Not for users.
//!
//! Not here: where the bytes come from (`crates/fuzz`).

use std::path::Path;

use clap::ValueEnum;

use crate::trace::{Format, Operation, ReadOptions, Trace};

/// The number of formats.
#[must_use]
pub fn formats() -> usize {
    Format::value_variants().len()
}

/// Reads the file at `path` as a trace; panics if a request breaks a promise of the trace.
/// `format`: which of the formats; none: it is detected. Returns how many requests it has, and the
/// error that ended it.
pub fn trace(path: &Path, format: Option<usize>) -> Result<u64, (u64, String)> {
    read_trace(path, format, false)
}

/// As [`trace`], as with the option `--skip-bad-lines`.
pub fn trace_with_bad_lines(path: &Path, format: Option<usize>) -> Result<u64, (u64, String)> {
    read_trace(path, format, true)
}

fn read_trace(
    path: &Path,
    format: Option<usize>,
    skip_bad_lines: bool,
) -> Result<u64, (u64, String)> {
    let format = format.and_then(|index| Format::value_variants().get(index).copied());
    let options = ReadOptions { format, skip_bad_lines };
    let mut trace = Trace::open(path, options).map_err(|failure| (0, failure.to_string()))?;
    let (mut count, mut last_ns) = (0, 0);
    loop {
        let request = match trace.next() {
            Ok(Some(request)) => request,
            Ok(None) => return Ok(count),
            Err(failure) => return Err((count, failure.to_string())),
        };
        assert!(count > 0 || request.at_ns == 0, "times start at zero: {request:?}");
        assert!(request.at_ns >= last_ns, "times never go back: {request:?}");
        let end = request.address.checked_add(request.length);
        assert!(end.is_some_and(|end| end < 1 << 63), "it fits 63 bits: {request:?}");
        let is_flush = request.operation == Operation::Flush;
        assert_eq!(is_flush, request.length == 0, "only a flush has no length: {request:?}");
        (count, last_ns) = (count + 1, request.at_ns);
    }
}
