//! Measures the candidates for the unwritten end of the journal on this disk.
//!
//! `cargo run --release -p sawmill-sys --example journal_candidates [FOLDER] [ROUND_MS] [ROUNDS]`
//!
//! Each candidate appends records of 4 KiB of data and a header to a preallocated, written file in
//! `FOLDER` (here, if none is given; not a tmpfs), in two ways: with a sync after every record, and
//! without. The candidates take turns; medians are printed. All guarantee that an appended record
//! survives the death of the process at once, through the page cache or a tmpfs. The files are read
//! once before: a record that ends inside a page that is not cached would cost the buffered
//! candidates a read.
//!
//! It has `unsafe` of its own, for the mapping that is one of the candidates: this crate is the
//! only one that may.
//!
//! Not here: the threads of the engine. One thread does everything, so that only the path to the
//! disk is compared.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use sawmill_sys::{BLOCK_BYTES, Consumer, DirectFile, OpenMode, Ring, Span, StagingFile};

const MIB: u64 = 1 << 20;
const FILE_BYTES: u64 = 512 * MIB;
const DATA_BYTES: u64 = 4096;
/// A journal record: its header and 4 KiB of data.
const RECORD_BYTES: u64 = DATA_BYTES + 80;
/// What the engine uses: the ring, and the size of a write to the journal when no flush waits.
const STAGING_BYTES: u64 = 32 * MIB;
const SPAN_BYTES: u64 = 256 << 10;

/// One way to keep the end of the journal.
trait Candidate {
    /// Appends one record: from now on it survives the process.
    fn append(&mut self, record: &[u8]) -> io::Result<()>;
    /// Makes everything appended survive power loss.
    fn sync(&mut self) -> io::Result<()>;
}

/// (a) The journal file itself, mapped shared.
struct SharedMapping {
    file: File,
    start: *mut u8,
    at: usize,
}

impl SharedMapping {
    fn open(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a null hint lets the kernel choose an unused range; nothing existing is replaced.
        let start = unsafe {
            mmap(std::ptr::null_mut(), FILE_BYTES as usize, prot, MapFlags::SHARED, &file, 0)?
        };
        Ok(SharedMapping { file, start: start.cast(), at: 0 })
    }
}

impl Candidate for SharedMapping {
    fn append(&mut self, record: &[u8]) -> io::Result<()> {
        if self.at + record.len() > FILE_BYTES as usize {
            self.at = 0;
        }
        // SAFETY: `at` and the record's end lie inside the mapping; nobody else uses it.
        unsafe {
            std::ptr::copy_nonoverlapping(record.as_ptr(), self.start.add(self.at), record.len())
        };
        self.at += record.len();
        Ok(())
    }

    fn sync(&mut self) -> io::Result<()> {
        Ok(rustix::fs::fdatasync(&self.file)?)
    }
}

impl Drop for SharedMapping {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by `open` and nothing refers to it. A failure leaks
        // addresses.
        let _ = unsafe { munmap(self.start.cast(), FILE_BYTES as usize) };
    }
}

/// (b) Buffered writes.
struct BufferedJournal {
    file: File,
    at: u64,
}

impl Candidate for BufferedJournal {
    fn append(&mut self, record: &[u8]) -> io::Result<()> {
        if self.at + record.len() as u64 > FILE_BYTES {
            self.at = 0;
        }
        self.file.write_all_at(record, self.at)?;
        self.at += record.len() as u64;
        Ok(())
    }

    fn sync(&mut self) -> io::Result<()> {
        Ok(rustix::fs::fdatasync(&self.file)?)
    }
}

/// (c) Staging memory in a tmpfs and direct writes of whole blocks, as the engine does it.
struct StagingJournal {
    disk: DirectFile,
    ring: std::sync::Arc<Ring>,
    consumer: Consumer,
    span: Span,
}

impl StagingJournal {
    fn open(path: &Path, staging_path: &Path) -> io::Result<Self> {
        let disk = DirectFile::open(path, OpenMode::Direct)?;
        if !disk.is_direct() {
            return Err(io::Error::other(
                "this file system has no direct I/O: choose another folder",
            ));
        }
        let (ring, consumer) = StagingFile::create(staging_path, STAGING_BYTES)?.into_ring(0, &[]);
        let span = put(&ring, &vec![0; BLOCK_BYTES as usize])?;
        Ok(StagingJournal { disk, ring, consumer, span })
    }

    /// Writes the whole blocks of the span.
    fn write(&mut self) -> io::Result<()> {
        while self.span.end() / BLOCK_BYTES > self.span.start() / BLOCK_BYTES {
            let start = self.span.start();
            // A write is at most four of the engine's spans, and does not cross the end of the
            // file.
            let seam = (start / FILE_BYTES + 1) * FILE_BYTES;
            let end =
                (self.span.end() / BLOCK_BYTES * BLOCK_BYTES).min(start + 4 * SPAN_BYTES).min(seam);
            let part = self.span.split_to(end);
            self.disk.write_at(start % FILE_BYTES, self.consumer.bytes(&part))?;
            self.consumer.declare_written(part);
        }
        Ok(())
    }
}

/// Fills one slot of the ring.
fn put(ring: &Ring, record: &[u8]) -> io::Result<Span> {
    let reserved = ring.reserve(record.len() as u64, |_, _| ());
    let (mut slot, ()) = reserved.map_err(|_| io::Error::other("the staging ring is full"))?;
    slot.copy_from_slice(record);
    Ok(Span::of(&slot.publish()))
}

impl Candidate for StagingJournal {
    fn append(&mut self, record: &[u8]) -> io::Result<()> {
        let reserved = self.ring.reserve(record.len() as u64, |_, _| ());
        let (mut slot, ()) = reserved.map_err(|_| io::Error::other("the staging ring is full"))?;
        slot.copy_from_slice(record);
        self.span.extend(&slot.publish());
        if self.span.end() - self.span.start() >= SPAN_BYTES {
            self.write()?;
        }
        Ok(())
    }

    fn sync(&mut self) -> io::Result<()> {
        let padded = self.ring.reserve_to_block(80, |_, _| ());
        if let Some((mut slot, ())) =
            padded.map_err(|_| io::Error::other("the staging ring is full"))?
        {
            slot.fill(0);
            self.span.extend(&slot.publish());
        }
        self.write()?;
        self.disk.sync()
    }
}

/// The result of one turn of a candidate.
#[derive(Clone, Copy, Default)]
struct Turn {
    synced_per_s: f64,
    append_mb_per_s: f64,
    with_sync_mb_per_s: f64,
}

fn turn(candidate: &mut dyn Candidate, round: Duration) -> io::Result<Turn> {
    let mut record = vec![0u8; RECORD_BYTES as usize];
    let mut turn = Turn::default();
    candidate.sync()?;
    let (start, mut count) = (Instant::now(), 0u32);
    while start.elapsed() < round {
        record.fill(count as u8);
        candidate.append(&record)?;
        candidate.sync()?;
        count += 1;
    }
    turn.synced_per_s = f64::from(count) / start.elapsed().as_secs_f64();

    let records = FILE_BYTES / 2 / RECORD_BYTES;
    let megabytes = (records * DATA_BYTES) as f64 / 1e6;
    let start = Instant::now();
    for _ in 0..records {
        candidate.append(&record)?;
    }
    turn.append_mb_per_s = megabytes / start.elapsed().as_secs_f64();
    candidate.sync()?;
    turn.with_sync_mb_per_s = megabytes / start.elapsed().as_secs_f64();
    Ok(turn)
}

fn median(turns: &[Turn], of: impl Fn(&Turn) -> f64) -> f64 {
    let mut numbers: Vec<f64> = turns.iter().map(of).collect();
    numbers.sort_by(f64::total_cmp);
    numbers[numbers.len() / 2]
}

fn number(index: usize, default: u64) -> u64 {
    std::env::args().nth(index).and_then(|text| text.parse().ok()).unwrap_or(default)
}

fn main() -> io::Result<()> {
    let folder = PathBuf::from(std::env::args().nth(1).unwrap_or_else(|| ".".into()));
    let (round, rounds) = (Duration::from_millis(number(2, 2000)), number(3, 3).max(1));
    let file = |name: &str| folder.join(format!("journal-candidate-{}-{name}", std::process::id()));
    let paths = [file("mapping"), file("buffered"), file("staged")];
    let staging = PathBuf::from(format!("/dev/shm/journal-candidate-{}", std::process::id()));
    let outcome = measure(&paths, &staging, round, rounds);
    for path in paths.iter().chain([&staging]) {
        // A file that does not exist need not be removed.
        let _ = std::fs::remove_file(path);
    }
    outcome
}

fn measure(paths: &[PathBuf; 3], staging: &Path, round: Duration, rounds: u64) -> io::Result<()> {
    for path in paths {
        DirectFile::create(path, FILE_BYTES, OpenMode::Direct)?;
        io::copy(&mut File::open(path)?, &mut io::sink())?;
    }
    let buffered = OpenOptions::new().read(true).write(true).open(&paths[1])?;
    let mut candidates: [(&str, Box<dyn Candidate>); 3] = [
        ("shared mapping of the journal, fdatasync", Box::new(SharedMapping::open(&paths[0])?)),
        ("buffered pwrite, fdatasync", Box::new(BufferedJournal { file: buffered, at: 0 })),
        (
            "tmpfs ring, direct pwrite, fdatasync (ours)",
            Box::new(StagingJournal::open(&paths[2], staging)?),
        ),
    ];
    let mut turns: [Vec<Turn>; 3] = Default::default();
    for _ in 0..rounds {
        for ((_, candidate), turns) in candidates.iter_mut().zip(&mut turns) {
            turns.push(turn(&mut **candidate, round)?);
        }
    }
    println!(
        "| end of the journal | 4 KiB append + sync, one at a time, /s | appends, no sync, MB/s \
         | with one sync at the end, MB/s |"
    );
    println!("|---|---|---|---|");
    for ((name, _), turns) in candidates.iter().zip(&turns) {
        println!(
            "| {name} | {:.0} | {:.0} | {:.0} |",
            median(turns, |turn| turn.synced_per_s),
            median(turns, |turn| turn.append_mb_per_s),
            median(turns, |turn| turn.with_sync_mb_per_s),
        );
    }
    Ok(())
}
