//! The recording device: passes every request to the device inside and logs what changes it.
//!
//! Invariants: a write, zeroing or discard is logged when the device inside has completed it,
//! before its own answer goes out; a flush is logged when it is submitted, so that it covers
//! exactly the entries before it. A log that cannot be written fails every later request.
//!
//! Limits: a write of part of a sector waits in its submit for the sectors at its edges, and two
//! concurrent ones in one sector may each be logged without the other. Recorded workloads write
//! whole sectors, as the geometry demands.
//!
//! Not here: durability of the log; it need not survive this process.

use std::sync::Arc;

use parking_lot::Mutex;
use sawmill_device::{
    BlockDevice, BlockDeviceExt, Error as DeviceError, ErrorKind, Geometry, Operation, Request,
};
use sawmill_format::write_log::{Entry, Flags};

use crate::Result;
use crate::recording::{LogWriter, Recording, SECTOR_BYTES};
use crate::stamp::{Clock, CutTime};

/// Called under the log's lock with the number of the entry that is about to be added.
pub type Observer = Box<dyn FnMut(usize) + Send>;

struct State {
    log: LogWriter,
    clock: Clock,
    observer: Option<Observer>,
    broken: Option<String>,
}

/// The device `D`, recorded.
pub struct Recorder<D> {
    geometry: Geometry,
    inner: D,
    state: Arc<Mutex<State>>,
}

impl<D: BlockDevice> Recorder<D> {
    /// Records `inner` into `log`. `clock` gives each entry its time.
    #[must_use]
    pub fn new(inner: D, log: LogWriter, clock: Clock) -> Self {
        // One connection at a time, so that the order of completions is the order in the log.
        let geometry =
            Geometry { block_bytes: SECTOR_BYTES as u32, shared_cache: false, ..inner.geometry() };
        let state = State { log, clock, observer: None, broken: None };
        Recorder { geometry, inner, state: Arc::new(Mutex::new(state)) }
    }

    /// Calls `observer` before each entry.
    pub fn observe(&self, observer: Observer) {
        self.state.lock().observer = Some(observer);
    }

    /// How many entries there are.
    #[must_use]
    pub fn entry_count(&self) -> usize {
        self.state.lock().log.len()
    }

    /// Completes the log; what comes later is not recorded.
    pub fn finish(&self) -> Result<Recording> {
        let mut state = self.state.lock();
        state.observer = None;
        if let Some(why) = &state.broken {
            return Err(crate::Error::Subject(why.clone()));
        }
        // Later requests fail, because a change that is not in the log would make every cut wrong.
        state.broken = Some("the recording has ended".into());
        state.log.finish()
    }

    /// The bytes of a write, with those around it up to whole sectors.
    fn widened(&self, request: &mut Request) -> sawmill_device::Result<Change> {
        let (from, end) = (request.address, request.address + request.length);
        let first = from - from % SECTOR_BYTES;
        let last = end.next_multiple_of(SECTOR_BYTES).min(self.geometry.size_bytes);
        let fua = request.flags.fua;
        let zeroes = request.operation == Operation::WriteZeroes;
        // Whole sectors of zeroes need no data in the log.
        if zeroes && first == from && last == end {
            return Ok(Change {
                first,
                length: last - first,
                data: Vec::new(),
                fua,
                discard: false,
            });
        }
        let mut data = vec![0; (last - first) as usize];
        let (head, tail) = ((from - first) as usize, (end - first) as usize);
        if head > 0 {
            data[..head].copy_from_slice(&self.inner.read_at(first, head)?);
        }
        if last > end {
            let after = self.inner.read_at(end, (last - end) as usize)?;
            data[tail..].copy_from_slice(&after);
        }
        if !zeroes {
            request.fill(0, &mut data[head..tail]);
        }
        Ok(Change { first, length: last - first, data, fua, discard: false })
    }
}

/// The change that a request makes.
struct Change {
    first: u64,
    length: u64,
    /// Empty where all are zeroes.
    data: Vec<u8>,
    fua: bool,
    discard: bool,
}

impl Change {
    fn entry(&self) -> Entry {
        let mut flags = Flags::default();
        if self.fua {
            flags = flags.with(Flags::FUA);
        }
        if self.discard {
            flags = flags.with(Flags::DISCARD);
        }
        let sector_count = self.length.div_ceil(SECTOR_BYTES);
        let data_bytes = if self.discard { 0 } else { self.length };
        Entry { sector: self.first / SECTOR_BYTES, sector_count, flags, data_bytes }
    }
}

impl State {
    fn add(&mut self, entry: Entry, data: &[u8]) -> sawmill_device::Result<()> {
        if let Some(why) = &self.broken {
            return Err(DeviceError::new(ErrorKind::Closed, why.clone()));
        }
        // Before the observer runs, which may take a while: what is answered meanwhile is not
        // promised at this cut.
        let promised = self.clock.tick();
        if let Some(observer) = &mut self.observer {
            observer(self.log.len());
        }
        // What was requested while the observer ran may be in what it saw.
        let cut_time = CutTime { promised, visible: self.clock.tick() };
        self.log.add(entry, data, cut_time).map_err(|error| {
            let why = error.to_string();
            self.broken = Some(why.clone());
            DeviceError::new(ErrorKind::Unavailable, why).with_source(error)
        })
    }
}

impl<D: BlockDevice> BlockDevice for Recorder<D> {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn submit(&self, mut request: Request) {
        if let Err(error) = request.check(&self.geometry) {
            return request.fail(error);
        }
        let change = match request.operation {
            Operation::Flush => {
                let entry =
                    Entry { sector: 0, sector_count: 0, flags: Flags::FLUSH, data_bytes: 0 };
                if let Err(error) = self.state.lock().add(entry, &[]) {
                    return request.fail(error);
                }
                return self.inner.submit(request);
            }
            Operation::Read | Operation::Prefetch | Operation::Allocation => {
                return self.inner.submit(request);
            }
            Operation::Write | Operation::WriteZeroes => self.widened(&mut request),
            Operation::Discard => Ok(Change {
                first: request.address.next_multiple_of(SECTOR_BYTES),
                length: inner_sectors(request.address, request.length),
                data: Vec::new(),
                fua: request.flags.fua,
                discard: true,
            }),
        };
        match change {
            Ok(change) => {
                let state = Arc::clone(&self.state);
                // Logged when the device inside has completed it.
                self.inner.submit(request.then(move |outcome, asker| {
                    let logged = outcome.and_then(|reply| {
                        state.lock().add(change.entry(), &change.data)?;
                        Ok(reply)
                    });
                    asker.complete(logged);
                }));
            }
            Err(error) => request.fail(error),
        }
    }
}

/// The bytes of the whole sectors inside a range: what a discard may touch.
fn inner_sectors(address: u64, length: u64) -> u64 {
    let (first, end) = (address.next_multiple_of(SECTOR_BYTES), address + length);
    (end - end % SECTOR_BYTES).saturating_sub(first)
}
