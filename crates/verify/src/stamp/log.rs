//! The client's log: every write and flush with the times of its submission and its completion.
//!
//! Invariant: times come from one clock that only increases. They are taken before a request is
//! sent and after its answer is read, so "completed before submitted" in the log was also true for
//! the device.
//!
//! Not here: sending the requests (`load`), and which images a log allows (`judge`).

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::{SECTOR_BYTES, Sector, Stamp};

/// The time of a cut, on the clock of the workload. Recording the state takes a while, so the
/// time has two bounds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CutTime {
    /// Every answer before this is a promise.
    pub promised: u64,
    /// Every request before this may have had its effect.
    pub visible: u64,
}

impl CutTime {
    /// The time after everything, when each answer was a promise.
    pub const END: CutTime = CutTime { promised: u64::MAX, visible: u64::MAX };
}

/// A logical clock: each time is later than all before.
#[derive(Clone, Debug, Default)]
pub struct Clock(Arc<AtomicU64>);

impl Clock {
    /// The next time. The first is 1.
    #[must_use]
    pub fn tick(&self) -> u64 {
        // One order for all threads, because the judge compares times of different threads.
        self.0.fetch_add(1, Ordering::SeqCst) + 1
    }
}

/// The content that a write leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Data of which each sector has a stamp.
    Data,
    /// Zeroes: a write-zeroes, or a discard.
    Zero,
}

/// One write in the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Write {
    /// Its number in the run, as in its stamps.
    pub id: u64,
    /// The content that it leaves.
    pub kind: Kind,
    /// Its first sector, of 512 bytes.
    pub sector: u64,
    /// Its length in sectors.
    pub count: u32,
    /// Whether it has FUA: it must be durable when completed.
    pub fua: bool,
    /// When it was submitted.
    pub submitted: u64,
    /// When it was completed; none when no good answer came.
    pub completed: Option<u64>,
}

/// One flush in the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flush {
    /// When it was submitted.
    pub submitted: u64,
    /// When it was completed; none when no good answer came.
    pub completed: Option<u64>,
}

/// The writes and flushes of a volume since its last inspection, and its content then.
#[derive(Clone, Debug)]
pub struct Log {
    /// The run, as in the stamps.
    pub run: u64,
    /// The clock of the run.
    pub clock: Clock,
    /// The writes, in order of submission.
    pub writes: Vec<Write>,
    /// The flushes, in order of submission.
    pub flushes: Vec<Flush>,
    /// The content of each sector before the writes of this log: the number of an older write, or
    /// `None` for zeroes.
    pub base: Vec<Option<u64>>,
    by_id: HashMap<u64, usize>,
    next_id: u64,
}

impl Log {
    /// The log of an empty volume.
    #[must_use]
    pub fn new(run: u64, sectors: u64) -> Self {
        Log {
            run,
            clock: Clock::default(),
            writes: Vec::new(),
            flushes: Vec::new(),
            base: vec![None; sectors as usize],
            by_id: HashMap::new(),
            next_id: 1,
        }
    }

    /// Records a write that is about to be submitted; returns its place in the log.
    pub fn submit(&mut self, kind: Kind, sector: u64, count: u32) -> usize {
        let id = self.next_id;
        self.next_id += 1;
        let submitted = self.clock.tick();
        self.add(Write { id, kind, sector, count, fua: false, submitted, completed: None })
    }

    /// As [`Log::submit`], for a write with FUA.
    pub fn submit_fua(&mut self, kind: Kind, sector: u64, count: u32) -> usize {
        let place = self.submit(kind, sector, count);
        self.writes[place].fua = true;
        place
    }

    /// Adds a write unchanged; returns its place in the log.
    pub fn add(&mut self, write: Write) -> usize {
        self.by_id.insert(write.id, self.writes.len());
        self.writes.push(write);
        self.writes.len() - 1
    }

    /// Records a flush that is about to be submitted; returns its place in the log.
    pub fn submit_flush(&mut self) -> usize {
        self.flushes.push(Flush { submitted: self.clock.tick(), completed: None });
        self.flushes.len() - 1
    }

    /// The bytes of a write in the log.
    #[must_use]
    pub fn bytes_of(&self, place: usize) -> Vec<u8> {
        let write = &self.writes[place];
        match write.kind {
            Kind::Data => Stamp::write_bytes(self.run, write.id, write.sector, write.count),
            Kind::Zero => vec![0; write.count as usize * SECTOR_BYTES],
        }
    }

    /// The place of the write with this number, when it is in this log.
    #[must_use]
    pub fn find(&self, id: u64) -> Option<usize> {
        self.by_id.get(&id).copied()
    }

    /// Clears the log and takes `image`, the volume's content now, as the base: a write that is
    /// missing there must not reappear.
    pub fn rebase(&mut self, image: &[u8]) {
        self.writes.clear();
        self.flushes.clear();
        self.by_id.clear();
        for (base, sector) in self.base.iter_mut().zip(image.chunks(SECTOR_BYTES)) {
            *base = match Sector::read(sector) {
                Sector::Stamped(stamp) => Some(stamp.write),
                // Damaged sectors do not come here: the judge has refused the image before.
                Sector::Empty | Sector::Damaged => None,
            };
        }
    }

    /// A log that continues from here as another history. Its new writes have numbers in a range of
    /// their own, given by `number`, so that no write of one history is mistaken for one of
    /// another.
    #[must_use]
    pub fn branch(&self, number: u64) -> Self {
        Log { next_id: (number << 40) + 1, ..self.clone() }
    }

    /// Grows the volume to `sectors`; the added sectors hold zeroes.
    pub fn grow(&mut self, sectors: u64) {
        self.base.resize(sectors as usize, None);
    }

    /// The log as of `cut_time`: operations submitted by then, completed only if they were by then.
    #[must_use]
    pub fn as_of(&self, cut_time: CutTime) -> Self {
        let done = |completed: Option<u64>| completed.filter(|&done| done < cut_time.promised);
        let mut log = Log { clock: Clock::default(), by_id: HashMap::new(), ..self.clone() };
        log.writes.clear();
        // A write that was submitted later cannot be in the image, and one that is found there
        // nevertheless is reported as never made.
        for write in self.writes.iter().filter(|write| write.submitted < cut_time.visible) {
            log.add(Write { completed: done(write.completed), ..*write });
        }
        log.flushes.retain_mut(|flush| {
            flush.completed = done(flush.completed);
            flush.submitted < cut_time.visible
        });
        log
    }

    /// The log as lines of text, for [`Log::from_text`]. The base must be empty: it is not written.
    #[must_use]
    pub fn to_text(&self) -> String {
        let time =
            |completed: Option<u64>| completed.map_or("-".to_owned(), |done| done.to_string());
        let mut text = format!("stamps {} {}\n", self.run, self.base.len());
        for write in &self.writes {
            let kind = if write.kind == Kind::Zero { "zero" } else { "data" };
            let Write { id, sector, count, fua, submitted, .. } = *write;
            let fua = u8::from(fua);
            let completed = time(write.completed);
            text.push_str(&format!("{kind} {id} {sector} {count} {fua} {submitted} {completed}\n"));
        }
        for flush in &self.flushes {
            text.push_str(&format!("flush {} {}\n", flush.submitted, time(flush.completed)));
        }
        text
    }

    /// Parses the output of [`Log::to_text`]; `None` for any other text.
    #[must_use]
    pub fn from_text(text: &str) -> Option<Self> {
        let mut lines = text.lines();
        let head = lines.next()?.strip_prefix("stamps ")?;
        let (run, sectors) = head.split_once(' ')?;
        let mut log = Log::new(run.parse().ok()?, sectors.parse().ok()?);
        for line in lines {
            let words: Vec<&str> = line.split(' ').collect();
            let time =
                |word: &str| if word == "-" { Some(None) } else { word.parse().ok().map(Some) };
            match words[..] {
                ["flush", submitted, completed] => {
                    let (submitted, completed) = (submitted.parse().ok()?, time(completed)?);
                    log.flushes.push(Flush { submitted, completed });
                }
                [kind @ ("data" | "zero"), id, sector, count, fua, submitted, completed] => {
                    log.add(Write {
                        id: id.parse().ok()?,
                        kind: if kind == "zero" { Kind::Zero } else { Kind::Data },
                        sector: sector.parse().ok()?,
                        count: count.parse().ok()?,
                        fua: fua == "1",
                        submitted: submitted.parse().ok()?,
                        completed: time(completed)?,
                    });
                }
                _ => return None,
            }
        }
        Some(log)
    }
}
