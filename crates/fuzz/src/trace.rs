//! Block traces of other tools.
//!
//! Invariants: each request keeps the promises of a trace. Bad lines are counted where that is
//! requested, and no trace has more requests than bytes. A message has one line, without control
//! characters.
//!
//! Not here: what must hold of a request (`sawmill_lab::fuzzing`); packed files, which other
//! programs unpack.

use std::io::Write;

use sawmill_lab::fuzzing;

/// The first byte chooses the format (zero: it is detected) and, with its highest bit, whether bad
/// lines are skipped; the rest is the file.
pub(crate) fn run(bytes: &[u8]) {
    let Some((choice, bytes)) = bytes.split_first() else { return };
    let mut file = tempfile::NamedTempFile::new().expect("a temporary file");
    file.write_all(bytes).expect("a temporary file");
    let format = usize::from(choice & 0x7f) % (1 + fuzzing::formats());
    let read = if choice & 0x80 != 0 { fuzzing::trace_with_bad_lines } else { fuzzing::trace };
    let outcome = read(file.path(), format.checked_sub(1));
    let (count, message) = match outcome {
        Ok(count) => (count, String::new()),
        Err((count, message)) => (count, message),
    };
    assert!(count <= bytes.len() as u64, "{count} requests");
    assert!(!message.contains(char::is_control), "{message:?}");
}
