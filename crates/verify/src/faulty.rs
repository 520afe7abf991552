//! A device with planted faults: what a crash checker must find. Without a fault it is a healthy
//! device with the guarantees of the device inside.
//!
//! It works one request at a time, in the thread that submits it: for testing the checker, not for
//! use.
//!
//! Invariant: while it lives, whole sectors read back as they were written last; only
//! [`Fault::WriteMisplaced`] shows before a crash. Not here: what a power failure leaves of the
//! device inside (`power_cut`).

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use parking_lot::Mutex;
use sawmill_device::{
    BlockDevice, BlockDeviceExt, Flags, Geometry, Operation, Reply, Request, Result,
};

const SECTOR_BYTES: u64 = 512;
/// Faults that hit only some requests hit one in this many.
const HIT_ONCE_IN: u64 = 8;

/// What is wrong with the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// No fault: the control of the self-test.
    None,
    /// Flushes are answered and not carried out.
    FlushIgnored,
    /// Every other flush is answered and not carried out.
    EveryOtherFlushIgnored,
    /// A write with FUA is answered before it is durable.
    FuaIgnored,
    /// Some writes reach the disk only after the flush that should have covered them, with the
    /// next.
    WriteAfterItsFlush,
    /// Some writes never reach the disk; while the device lives it answers them from memory.
    WriteLost,
    /// Some writes go to the sector beside theirs.
    WriteMisplaced,
    /// Writes reach the disk in parts that end inside a sector.
    SectorTorn,
    /// Zeroes and discards are kept only in memory: after a crash the old data are back.
    ZeroesForgotten,
}

impl Fault {
    /// All of them, the healthy device first.
    pub const ALL: [Fault; 9] = [
        Fault::None,
        Fault::FlushIgnored,
        Fault::EveryOtherFlushIgnored,
        Fault::FuaIgnored,
        Fault::WriteAfterItsFlush,
        Fault::WriteLost,
        Fault::WriteMisplaced,
        Fault::SectorTorn,
        Fault::ZeroesForgotten,
    ];

    /// Its name on command lines.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Fault::None => "none",
            Fault::FlushIgnored => "flush-ignored",
            Fault::EveryOtherFlushIgnored => "every-other-flush-ignored",
            Fault::FuaIgnored => "fua-ignored",
            Fault::WriteAfterItsFlush => "write-after-its-flush",
            Fault::WriteLost => "write-lost",
            Fault::WriteMisplaced => "write-misplaced",
            Fault::SectorTorn => "sector-torn",
            Fault::ZeroesForgotten => "zeroes-forgotten",
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Fault {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let names = || Fault::ALL.map(Fault::name).join(", ");
        let found = Fault::ALL.into_iter().find(|fault| fault.name() == text);
        found.ok_or_else(|| format!("'{text}' is no fault; there are {}", names()))
    }
}

#[derive(Default)]
struct State {
    writes: u64,
    flushes: u64,
    /// Sectors that are only in memory.
    volatile: BTreeMap<u64, Vec<u8>>,
    /// How many flushes had come when the first of them was written.
    held_since: Option<u64>,
}

/// The device `D` with a fault.
pub struct Faulty<D> {
    inner: D,
    fault: Fault,
    state: Mutex<State>,
}

impl<D: BlockDevice> Faulty<D> {
    /// Plants `fault` in front of `inner`.
    #[must_use]
    pub fn new(inner: D, fault: Fault) -> Self {
        Faulty { inner, fault, state: Mutex::default() }
    }

    fn read(&self, state: &State, request: &mut Request) -> Result<()> {
        let (from, length) = (request.address, request.length);
        let mut bytes = self.inner.read_at(from, length as usize)?;
        for (sector, held) in
            state.volatile.range(from / SECTOR_BYTES..(from + length).div_ceil(SECTOR_BYTES))
        {
            let first = sector * SECTOR_BYTES;
            let (start, end) = (first.max(from), (first + SECTOR_BYTES).min(from + length));
            bytes[(start - from) as usize..(end - from) as usize]
                .copy_from_slice(&held[(start - first) as usize..(end - first) as usize]);
        }
        request.buffer().copy_from_slice(&bytes);
        Ok(())
    }

    fn change(&self, state: &mut State, request: &mut Request) -> Result<()> {
        let (from, length, operation) = (request.address, request.length, request.operation);
        let write = operation == Operation::Write;
        let mut bytes = vec![0; length as usize];
        if write {
            request.fill(0, &mut bytes);
            state.writes += 1;
        }
        // Not a write with FUA: its loss is the fault `FuaIgnored`, and each fault is to be found
        // on its own.
        let hit = write && state.writes.is_multiple_of(HIT_ONCE_IN) && !request.flags.fua;
        let aligned = from.is_multiple_of(SECTOR_BYTES) && length.is_multiple_of(SECTOR_BYTES);
        let volatile = match self.fault {
            Fault::WriteLost | Fault::WriteAfterItsFlush => hit,
            Fault::ZeroesForgotten => !write,
            _ => false,
        };
        if volatile && aligned {
            state.held_since.get_or_insert(state.flushes);
            for (sector, bytes) in bytes.chunks(SECTOR_BYTES as usize).enumerate() {
                state.volatile.insert(from / SECTOR_BYTES + sector as u64, bytes.to_vec());
            }
            return Ok(());
        }
        let sectors = from / SECTOR_BYTES..(from + length).div_ceil(SECTOR_BYTES);
        // A newer change of the sector replaces what was held back, which must not appear over it
        // later.
        sectors.for_each(|sector| drop(state.volatile.remove(&sector)));
        let fua = request.flags.fua && self.fault != Fault::FuaIgnored;
        let flags = Flags { fua, ..request.flags };
        if !write {
            return self.inner.call(operation, from, length, flags, Vec::new()).map(drop);
        }
        let beside = from + length + SECTOR_BYTES <= self.geometry().size_bytes;
        let misplaced = hit && beside && self.fault == Fault::WriteMisplaced;
        let place = if misplaced { from + SECTOR_BYTES } else { from };
        let parts = self.fault == Fault::SectorTorn && length > 256;
        let split = if parts { length as usize - 256 } else { 0 };
        for (offset, part) in [(0, &bytes[..split]), (split, &bytes[split..])] {
            if !part.is_empty() {
                let (at, length) = (place + offset as u64, part.len() as u64);
                self.inner.call(Operation::Write, at, length, flags, part.to_vec())?;
            }
        }
        Ok(())
    }

    fn flush(&self, state: &mut State) -> Result<()> {
        state.flushes += 1;
        let ignored = match self.fault {
            Fault::FlushIgnored => true,
            Fault::EveryOtherFlushIgnored => state.flushes.is_multiple_of(2),
            _ => false,
        };
        if ignored {
            return Ok(());
        }
        self.inner.flush()?;
        // One flush later than the one that had to cover them. With that one itself, there would be
        // no fault.
        let late = state.held_since.is_some_and(|since| state.flushes > since + 1);
        if late && self.fault == Fault::WriteAfterItsFlush {
            state.held_since = None;
            for (sector, bytes) in std::mem::take(&mut state.volatile) {
                self.inner.write_at(sector * SECTOR_BYTES, &bytes)?;
            }
        }
        Ok(())
    }
}

impl<D: BlockDevice> BlockDevice for Faulty<D> {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn submit(&self, mut request: Request) {
        if let Err(error) = request.check(&self.geometry()) {
            return request.fail(error);
        }
        // Held to the end, so that requests happen one by one and the faults hit the same ones in
        // each run.
        let mut state = self.state.lock();
        let done = match request.operation {
            Operation::Read => self.read(&state, &mut request),
            Operation::Write | Operation::WriteZeroes | Operation::Discard => {
                self.change(&mut state, &mut request)
            }
            Operation::Flush => self.flush(&mut state),
            Operation::Prefetch => Ok(()),
            Operation::Allocation => {
                drop(state);
                return self.inner.submit(request);
            }
        };
        drop(state);
        request.complete(done.map(|()| Reply::Done));
    }
}

#[cfg(test)]
mod tests {
    use sawmill_device::{MemoryDevice, conformance};

    use super::*;

    #[test]
    fn without_a_fault_it_keeps_the_contract_of_a_device() {
        conformance::all(&|| {
            std::sync::Arc::new(Faulty::new(MemoryDevice::new(64 << 20), Fault::None))
        });
    }

    #[test]
    fn every_fault_has_a_name_that_reads_back() {
        for fault in Fault::ALL {
            assert_eq!(fault.name().parse(), Ok(fault));
        }
        assert!("flush".parse::<Fault>().is_err());
    }
}
