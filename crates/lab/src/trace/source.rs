//! The file of a trace: decompressed while it is read, by line or in pieces.
//!
//! The usual programs (`gzip`, `zstd`, `xz`, `bzip2`) decompress the file while we read their
//! output. A compressed file that is truncated or damaged is an error, never a shorter trace.
//!
//! Invariant: such a program is ended and waited for when the source is dropped. Not here: which
//! format the bytes have (`detect`).

use std::fs::File;
use std::io::{self, BufRead, BufReader, Cursor, Read, Seek};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use sawmill_console::exit::{Exit, Failure, Result};

/// Bytes to look at to detect the format.
const SAMPLE_BYTES: u64 = 256 << 10;
/// Longer lines are in no format.
const LINE_BYTES_MAX: u64 = 64 << 10;
/// A longer text in front of records is in no format.
const HEADER_BYTES_MAX: u64 = 1 << 20;

/// Magic numbers of compressed files, and the program that decompresses them.
const PACKERS: [(&[u8], &str); 4] = [
    (&[0x1f, 0x8b], "gzip"),
    (&[0x28, 0xb5, 0x2f, 0xfd], "zstd"),
    (&[0xfd, b'7', b'z', b'X', b'Z', 0], "xz"),
    (b"BZh", "bzip2"),
];

/// The bytes of a trace, decompressed if need be, as lines or as records.
pub(super) struct TraceSource {
    path: PathBuf,
    /// Shares its offset with the reader, so it shows the progress.
    file: File,
    file_bytes: u64,
    unpacker: Option<(Child, &'static str)>,
    reader: Option<BufReader<Box<dyn Read>>>,
    sample: Option<Vec<u8>>,
    /// Lines or records taken so far.
    count: u64,
    unit: &'static str,
}

impl TraceSource {
    pub(super) fn open(path: &Path) -> Result<TraceSource> {
        let cannot =
            |error: io::Error| Failure::io(format!("cannot read {}", path.display()), &error);
        let mut file = File::open(path).map_err(cannot)?;
        let metadata = file.metadata().map_err(cannot)?;
        if !metadata.is_file() {
            let text =
                format!("{} is not a regular file, and a trace is read twice", path.display());
            return Err(Failure::usage(text));
        }
        let mut head = Vec::new();
        file.by_ref().take(8).read_to_end(&mut head).map_err(cannot)?;
        file.rewind().map_err(cannot)?;
        // A duplicate has the same offset: also where another program reads it, the progress is
        // known.
        let shared = file.try_clone().map_err(cannot)?;
        let packer =
            PACKERS.iter().find(|(magic, _)| head.starts_with(magic)).map(|(_, program)| *program);
        let (reader, unpacker): (Box<dyn Read>, _) = match packer {
            None => (Box::new(shared), None),
            Some(program) => {
                let (output, child) = unpack(path, program, shared)?;
                (output, Some((child, program)))
            }
        };
        let reader = Some(BufReader::with_capacity(1 << 16, reader));
        let (path, file_bytes) = (path.to_owned(), metadata.len());
        Ok(TraceSource {
            path,
            file,
            file_bytes,
            unpacker,
            reader,
            sample: None,
            count: 0,
            unit: "line",
        })
    }

    /// The first bytes, which are still to be read.
    pub(super) fn sample(&mut self) -> Result<&[u8]> {
        if self.sample.is_none() {
            let mut sample = Vec::new();
            if let Some(mut reader) = self.reader.take() {
                let read = reader.by_ref().take(SAMPLE_BYTES).read_to_end(&mut sample);
                read.map_err(|error| self.cannot(&error))?;
                // A short file ends here, so its decompression is judged here, before a half file
                // is taken for a small trace.
                if (sample.len() as u64) < SAMPLE_BYTES {
                    self.finish()?;
                }
                let again: Box<dyn Read> = Box::new(Cursor::new(sample.clone()).chain(reader));
                self.reader = Some(BufReader::with_capacity(1 << 16, again));
            }
            self.sample = Some(sample);
        }
        Ok(self.sample.as_deref().unwrap_or_default())
    }

    /// The place of the last line or record.
    pub(super) fn place(&self) -> String {
        format!("{} {}", self.unit, self.count)
    }

    /// Bytes of the file that were read, and its length.
    pub(super) fn progress(&mut self) -> (u64, u64) {
        (self.file.stream_position().unwrap_or(0).min(self.file_bytes), self.file_bytes)
    }

    /// Reads a line into `line`, without its end. False at the end of the file.
    pub(super) fn line(&mut self, line: &mut Vec<u8>) -> Result<bool> {
        line.clear();
        self.unit = "line";
        let Some(reader) = &mut self.reader else { return Ok(false) };
        // A file without line ends must not be read into memory as one line.
        let read = reader.take(LINE_BYTES_MAX).read_until(b'\n', line);
        let read = read.map_err(|error| self.cannot(&error))?;
        if read == 0 {
            self.finish()?;
            return Ok(false);
        }
        if !line.ends_with(b"\n") && (read as u64) < LINE_BYTES_MAX {
            // The last line. If the file was truncated, report that and not the line.
            self.finish()?;
        }
        self.count += 1;
        while line.last().is_some_and(|byte| matches!(byte, b'\n' | b'\r')) {
            line.pop();
        }
        Ok(true)
    }

    /// Fills `record`. Returns the number of bytes: fewer only at the end of the file.
    pub(super) fn record(&mut self, record: &mut [u8]) -> Result<usize> {
        self.unit = "record";
        let filled = self.more(record)?;
        self.count += u64::from(filled > 0);
        Ok(filled)
    }

    /// As [`record`](Self::record), for the rest of a record.
    pub(super) fn more(&mut self, record: &mut [u8]) -> Result<usize> {
        let mut filled = 0;
        while filled < record.len() {
            let Some(reader) = &mut self.reader else { return Ok(filled) };
            match reader.read(&mut record[filled..]) {
                Ok(0) => {
                    self.finish()?;
                    break;
                }
                Ok(read) => filled += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(self.cannot(&error)),
            }
        }
        Ok(filled)
    }

    /// Reads everything that is left.
    pub(super) fn rest(&mut self) -> Result<Vec<u8>> {
        let mut all = Vec::new();
        if let Some(reader) = &mut self.reader {
            let read = reader.read_to_end(&mut all);
            read.map_err(|error| self.cannot(&error))?;
            self.finish()?;
        }
        Ok(all)
    }

    /// Skips a text header up to and including `end`; its bytes belong to no record. False if it
    /// does not end.
    pub(super) fn skip_past(&mut self, end: u8) -> Result<bool> {
        let mut passed = Vec::new();
        let Some(reader) = &mut self.reader else { return Ok(false) };
        // A file without this byte must not be read into memory as one header.
        let read = reader.take(HEADER_BYTES_MAX).read_until(end, &mut passed);
        read.map_err(|error| self.cannot(&error))?;
        Ok(passed.last() == Some(&end))
    }

    fn cannot(&self, error: &io::Error) -> Failure {
        Failure::io(format!("cannot read {}", self.path.display()), error)
    }

    /// At the end of the file: checks that it is the true end.
    fn finish(&mut self) -> Result<()> {
        self.reader = None;
        let Some((mut child, program)) = self.unpacker.take() else { return Ok(()) };
        let ended = child.wait().map_err(|error| self.cannot(&error))?;
        if ended.success() {
            return Ok(());
        }
        let path = self.path.display();
        Err(Failure::new(
            Exit::Corrupt,
            format!(
                "{path} cannot be decompressed to its end ({program}: {ended}); get a new copy"
            ),
        ))
    }
}

impl Drop for TraceSource {
    fn drop(&mut self) {
        self.reader = None;
        if let Some((child, _)) = &mut self.unpacker {
            // It may have exited by itself; its output is no longer needed.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn unpack(path: &Path, program: &'static str, file: File) -> Result<(Box<dyn Read>, Child)> {
    let mut command = Command::new(program);
    command.arg("-dc").stdin(file).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => {
            let path = path.display();
            Failure::new(
                Exit::NotFound,
                format!("{path} is compressed with {program}: install {program}"),
            )
            .caused_by(error)
        }
        _ => Failure::io(format!("cannot start {program}"), &error),
    })?;
    let output = child.stdout.take();
    let output =
        output.ok_or_else(|| Failure::new(Exit::Internal, format!("{program} has no output")))?;
    Ok((Box::new(output), child))
}
