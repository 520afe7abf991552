//! Detects the format of a file by its first bytes: binary formats by their magic numbers, formats
//! of lines by which can parse most of them. File names do not matter.
//!
//! Not here: decompression, which comes before (`source`); a format that the user names, which
//! skips this file (`super`).

use std::path::Path;

use super::lines::LineReader;
use super::number::whole;
use super::records::{SRT_MAGIC, VSCSI_RECORD_BYTES, is_vscsi};
use super::{Format, csv, mobigen, octf};
use sawmill_console::exit::{Failure, Result};

/// Formats of lines. If two can parse the same number of lines, the earlier one wins.
const LINES: [Format; 8] = [
    Format::Blkparse,
    Format::Blkreplay,
    Format::Msr,
    Format::Systor,
    Format::Tencent,
    Format::Fiu,
    Format::Wiscsee,
    Format::AsciiMs,
];
/// Maximum of lines and records to look at.
const CHECKS_MAX: usize = 1000;

/// The format of the file at `path` that begins with `sample`.
pub(super) fn format_of(path: &Path, sample: &[u8]) -> Result<Format> {
    let unknown = || {
        let text = "is not in a known trace format; name its format with --format";
        Failure::usage(format!("{} {text}", path.display()))
    };
    if sample.is_empty() {
        return Err(Failure::usage(format!("{} is empty", path.display())));
    }
    // Formats with a magic first: nothing about them is a guess.
    if sample.starts_with(SRT_MAGIC) {
        return Ok(Format::Srt);
    }
    let is_tar = sample.get(257..262) == Some(b"ustar");
    if is_tar && sample.windows(octf::MEMBER.len()).any(|window| window == octf::MEMBER.as_bytes())
    {
        return Ok(Format::Octf);
    }
    let text = String::from_utf8_lossy(sample);
    let is_comment = |line: &&str| line.starts_with('#') || line.trim().is_empty();
    if text.lines().find(|line| !is_comment(line)).is_some_and(csv::is_header) {
        return Ok(Format::Csv);
    }
    let lines: Vec<&str> = text.lines().take(CHECKS_MAX).collect();
    let readable = |format: Format| {
        let mut reader = LineReader::new(format, &text);
        let readable = lines.iter().filter(|line| matches!(reader.read(line), Ok(Some(_)))).count();
        (readable, format)
    };
    let calls = lines.iter().filter(|line| mobigen::is_call(line)).count();
    let mut best = (calls, Format::Mobigen);
    for format in LINES {
        let found = readable(format);
        if found.0 > best.0 {
            best = found;
        }
    }
    match best {
        // These records have no magic, so they are considered only where no line makes sense.
        (0, _) if is_records(sample) => Ok(Format::Vscsi),
        (0, _) => Err(unknown()),
        (_, Format::AsciiMs) => Ok(which_ascii(&lines)),
        (_, format) => Ok(format),
    }
}

fn is_records(sample: &[u8]) -> bool {
    let mut records = sample.chunks_exact(VSCSI_RECORD_BYTES).take(CHECKS_MAX).peekable();
    records.peek().is_some() && records.all(is_vscsi)
}

/// Tells the three ASCII forms apart: milliseconds have a decimal point and nanoseconds do not;
/// lengths that are all multiples of 512 are bytes, because in sectors all requests would be
/// multiples of 256 KiB, which no real trace has.
fn which_ascii(lines: &[&str]) -> Format {
    let fields: Vec<Vec<&str>> =
        lines.iter().map(|line| line.split_whitespace().collect()).collect();
    let with_point =
        fields.iter().any(|words| words.first().is_some_and(|time| time.contains('.')));
    let lengths = fields.iter().filter_map(|words| whole(words.get(3)?));
    let in_bytes = lengths.into_iter().all(|length| length.is_multiple_of(512));
    match (with_point, in_bytes) {
        (true, true) => Format::AsciiMsBytes,
        (true, false) => Format::AsciiMs,
        (false, _) => Format::AsciiNs,
    }
}
