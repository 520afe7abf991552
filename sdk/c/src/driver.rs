//! A table of C functions as a driver.
//!
//! Invariant: a function is called with memory that is its own until it returns, as the header
//! states. Each call of a function of the table is sound because the header demands that these
//! functions can be called, by several threads at once, until `sawmill_serve` returns; no thread of
//! the library calls one after that. Not here: the callers (`sawmill_driver::client`).

use std::ffi::{CString, c_char, c_int, c_uint};
use std::io;
use std::ptr;

use sawmill_device::{Error, ErrorKind, Result};
use sawmill_driver::client::{Abilities, Chunk, ChunkDriver, Device, Door, Driver};

use crate::user::UserPointer;

const FUA: c_uint = 1;
const ANY_BYTE: c_uint = 2;

/// `struct sawmill_driver`.
#[repr(C)]
#[derive(Clone, Copy)]
#[expect(missing_docs, reason = "include/sawmill.h says what each is")]
pub struct DriverTable {
    pub struct_bytes: usize,
    pub abilities: c_uint,
    pub read: Option<unsafe extern "C" fn(UserPointer, u64, *mut u8, usize) -> c_int>,
    pub write: Option<unsafe extern "C" fn(UserPointer, u64, *const u8, usize, c_int) -> c_int>,
    pub flush: Option<unsafe extern "C" fn(UserPointer) -> c_int>,
    pub discard: Option<unsafe extern "C" fn(UserPointer, u64, u64) -> c_int>,
    pub write_zeroes: Option<unsafe extern "C" fn(UserPointer, u64, u64, c_int) -> c_int>,
    pub write_chunk: Option<unsafe extern "C" fn(UserPointer, &WriteChunk) -> c_int>,
    pub flush_queue: Option<unsafe extern "C" fn(UserPointer, u32) -> c_int>,
    pub attached: Option<unsafe extern "C" fn(UserPointer, &Device)>,
    pub ready: Option<unsafe extern "C" fn(UserPointer, *const *const c_char)>,
}

/// `struct sawmill_chunk`.
#[repr(C)]
#[expect(missing_docs, reason = "include/sawmill.h says what each is")]
pub struct WriteChunk {
    pub bytes: *const u8,
    pub length: usize,
    pub metadata_bytes: usize,
    pub entries: u64,
    pub horizon: u64,
    pub floor: u64,
    pub queue: u32,
    pub again: u32,
}

/// A driver whose methods call the functions of a C table.
pub(crate) struct CDriver {
    table: DriverTable,
    user: UserPointer,
    /// Handed to the program; lives as long as the driver.
    device: std::sync::OnceLock<Box<Device>>,
}

impl CDriver {
    /// # Safety
    /// `table` is null or points to a `struct sawmill_driver`, whose functions are as the header
    /// says.
    pub(crate) unsafe fn new(table: *const DriverTable, user: UserPointer) -> Result<Self> {
        let bad = |text: &'static str| Err(Error::new(ErrorKind::Invalid, text));
        if table.is_null() {
            return bad("expected a driver, got NULL");
        }
        // SAFETY: every version of the structure has this first field.
        let bytes = unsafe { ptr::addr_of!((*table).struct_bytes).read() };
        if bytes != size_of::<DriverTable>() {
            return bad(
                "struct_bytes of the driver is not sizeof(struct sawmill_driver) of this library",
            );
        }
        // SAFETY: it has the size of our structure, so it is of this version.
        let table = unsafe { table.read() };
        if table.read.is_none() {
            return bad("a driver must have read()");
        }
        if table.write_chunk.is_some() != table.flush_queue.is_some() {
            return bad("a driver needs both write_chunk() and flush_queue(), or neither");
        }
        if table.write_chunk.is_some() && (table.write.is_some() || table.flush.is_some()) {
            return bad(
                "a driver has write() and flush(), or write_chunk() and flush_queue(), not both",
            );
        }
        Ok(CDriver { table, user, device: std::sync::OnceLock::new() })
    }

    pub(crate) fn wants_chunks(&self) -> bool {
        self.table.write_chunk.is_some()
    }

    fn can(&self) -> Abilities {
        let table = &self.table;
        Abilities {
            write: table.write.is_some() || self.wants_chunks(),
            flush: table.flush.is_some() || self.wants_chunks(),
            fua: table.abilities & FUA != 0,
            discard: table.discard.is_some(),
            write_zeroes: table.write_zeroes.is_some(),
            any_byte: table.abilities & ANY_BYTE != 0,
        }
    }

    fn read_into(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        let read = self.table.read.ok_or(io::ErrorKind::Unsupported)?;
        // SAFETY: the function can be called while `self` lives (head of this file); `into` is
        // borrowed, so no one else has that memory until it returns.
        errno_result(unsafe { read(self.user, offset, into.as_mut_ptr(), into.len()) })
    }

    fn give_up(&self, offset: u64, length: u64) -> io::Result<()> {
        let discard = self.table.discard.ok_or(io::ErrorKind::Unsupported)?;
        // SAFETY: the function can be called while `self` lives (head of this file).
        errno_result(unsafe { discard(self.user, offset, length) })
    }

    fn zero(&self, offset: u64, length: u64, keep_space: bool) -> io::Result<()> {
        let write_zeroes = self.table.write_zeroes.ok_or(io::ErrorKind::Unsupported)?;
        // SAFETY: the function can be called while `self` lives (head of this file).
        errno_result(unsafe { write_zeroes(self.user, offset, length, c_int::from(keep_space)) })
    }

    fn notify_attached(&self, device: &Device) {
        let device = self.device.get_or_init(|| Box::new(device.clone()));
        if let Some(attached) = self.table.attached {
            // SAFETY: the function can be called while `self` lives (head of this file). The header
            // lets the program hand the pointer to our functions only, which change nothing there,
            // and only until `sawmill_serve` returns; `self` owns it for that long.
            unsafe { attached(self.user, device) }
        }
    }

    fn notify_ready(&self, doors: &[Door]) {
        let Some(ready) = self.table.ready else { return };
        let lines =
            doors.iter().map(|door| CString::new(format!("{} {}", door.kind, door.address)));
        let lines: Vec<CString> = lines.map(Result::unwrap_or_default).collect();
        let mut list: Vec<*const c_char> = lines.iter().map(|line| line.as_ptr()).collect();
        list.push(ptr::null());
        // SAFETY: the function can be called while `self` lives (head of this file); the strings
        // live until it returns, as the header says.
        unsafe { ready(self.user, list.as_ptr()) }
    }
}

/// The result of a function: 0, or an errno of either sign.
fn errno_result(errno: c_int) -> io::Result<()> {
    if errno == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(errno.saturating_abs())) }
}

impl Driver for CDriver {
    fn abilities(&self) -> Abilities {
        self.can()
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        self.read_into(offset, into)
    }

    fn write(&self, offset: u64, bytes: &[u8], fua: bool) -> io::Result<()> {
        let write = self.table.write.ok_or(io::ErrorKind::Unsupported)?;
        // SAFETY: the function can be called while `self` lives (head of this file); the bytes are
        // borrowed, so they do not change until it returns.
        errno_result(unsafe {
            write(self.user, offset, bytes.as_ptr(), bytes.len(), c_int::from(fua))
        })
    }

    fn flush(&self) -> io::Result<()> {
        let Some(flush) = self.table.flush else { return Ok(()) };
        // SAFETY: the function can be called while `self` lives (head of this file).
        errno_result(unsafe { flush(self.user) })
    }

    fn discard(&self, offset: u64, length: u64) -> io::Result<()> {
        self.give_up(offset, length)
    }

    fn write_zeroes(&self, offset: u64, length: u64, keep_space: bool) -> io::Result<()> {
        self.zero(offset, length, keep_space)
    }

    fn attached(&self, device: &Device) {
        self.notify_attached(device);
    }

    fn ready(&self, doors: &[Door]) {
        self.notify_ready(doors);
    }
}

impl ChunkDriver for CDriver {
    fn abilities(&self) -> Abilities {
        self.can()
    }

    fn write(&self, chunk: &Chunk<'_>) -> io::Result<()> {
        let write_chunk = self.table.write_chunk.ok_or(io::ErrorKind::Unsupported)?;
        let chunk_of_c = WriteChunk {
            bytes: chunk.bytes.as_ptr(),
            length: chunk.bytes.len(),
            metadata_bytes: chunk.metadata_bytes,
            entries: chunk.command.entries,
            horizon: chunk.command.horizon,
            floor: chunk.command.floor,
            queue: u32::try_from(chunk.queue).unwrap_or(u32::MAX),
            again: u32::from(chunk.command.again),
        };
        // SAFETY: the function can be called while `self` lives (head of this file); the bytes are
        // borrowed, so they do not change until it returns.
        errno_result(unsafe { write_chunk(self.user, &chunk_of_c) })
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        self.read_into(offset, into)
    }

    fn flush(&self, queue: usize) -> io::Result<()> {
        let flush_queue = self.table.flush_queue.ok_or(io::ErrorKind::Unsupported)?;
        // SAFETY: the function can be called while `self` lives (head of this file).
        errno_result(unsafe { flush_queue(self.user, u32::try_from(queue).unwrap_or(u32::MAX)) })
    }

    fn discard(&self, offset: u64, length: u64) -> io::Result<()> {
        self.give_up(offset, length)
    }

    fn write_zeroes(&self, offset: u64, length: u64, keep_space: bool) -> io::Result<()> {
        self.zero(offset, length, keep_space)
    }

    fn attached(&self, device: &Device) {
        self.notify_attached(device);
    }

    fn ready(&self, doors: &[Door]) {
        self.notify_ready(doors);
    }
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;

    use super::*;

    /// `tests/layout.c` has the same numbers for C.
    #[test]
    fn structures_have_the_places_of_the_header() {
        let places = [
            offset_of!(DriverTable, struct_bytes),
            offset_of!(DriverTable, abilities),
            offset_of!(DriverTable, read),
            offset_of!(DriverTable, write),
            offset_of!(DriverTable, flush),
            offset_of!(DriverTable, discard),
            offset_of!(DriverTable, write_zeroes),
            offset_of!(DriverTable, write_chunk),
            offset_of!(DriverTable, flush_queue),
            offset_of!(DriverTable, attached),
            offset_of!(DriverTable, ready),
            size_of::<DriverTable>(),
        ];
        assert_eq!(places, [0, 8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 88]);
        let places = [
            offset_of!(WriteChunk, bytes),
            offset_of!(WriteChunk, length),
            offset_of!(WriteChunk, metadata_bytes),
            offset_of!(WriteChunk, entries),
            offset_of!(WriteChunk, horizon),
            offset_of!(WriteChunk, floor),
            offset_of!(WriteChunk, queue),
            offset_of!(WriteChunk, again),
            size_of::<WriteChunk>(),
        ];
        assert_eq!(places, [0, 8, 16, 24, 32, 40, 48, 52, 56]);
    }
}
