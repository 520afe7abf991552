//! The callbacks of a BDUS program as a driver.
//!
//! Invariants: return values have the meaning in `bdus.h`: ENOLINK, ENOSPC, ETIMEDOUT pass, others
//! become EIO, and after `bdus_abort` only `terminate` is called. The context is changed while one
//! thread serves alone, before the daemon is made. Not here: what is valid (`layout`), start and
//! end (`run`).

use std::ffi::{CString, c_int};
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::ptr::NonNull;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use sawmill_driver::client::{Abilities, Device, Door, Driver};

use super::device_file::{DeviceFacts, DeviceFile};
use super::fault::Fault;
use super::layout::{Attrs, Context, OnDevice, Ops};

/// `bdus_abort`.
const ABORT: c_int = c_int::MIN;

/// A driver whose methods call the callbacks of a BDUS program.
pub(super) struct Callbacks {
    pub(super) ops: Ops,
    pub(super) attrs: Attrs,
    pub(super) context: SharedContext,
    pub(super) device_file: DeviceFile,
    pub(super) facts: Mutex<DeviceFacts>,
    pub(super) log: Option<File>,
    pub(super) becomes_daemon: bool,
    pub(super) device: OnceLock<Device>,
    /// The reason if the program ended the driver itself.
    pub(super) failure: Mutex<Option<Fault>>,
    pub(super) is_over: AtomicBool,
    pub(super) path: OnceLock<CString>,
}

/// The context, which callbacks get and may write into (`private_data`). It is freed in `drop`.
pub(super) struct SharedContext(NonNull<Context>);

// SAFETY: callbacks are called by several threads with the context when the program allows more
// than one; ours changes it only while one thread serves.
unsafe impl Send for SharedContext {}
// SAFETY: a shared reference gives the pointer's value and no access to the context.
unsafe impl Sync for SharedContext {}

impl Drop for SharedContext {
    fn drop(&mut self) {
        // SAFETY: it was made from a box, and no callback gets it any more.
        drop(unsafe { Box::from_raw(self.0.as_ptr()) });
    }
}

impl SharedContext {
    pub(super) fn new(context: Context) -> Self {
        SharedContext(NonNull::from(Box::leak(Box::new(context))))
    }

    /// For a callback: valid as long as `self`.
    fn pointer(&self) -> *mut Context {
        self.0.as_ptr()
    }
}

impl Callbacks {
    /// The result of a request's callback.
    fn result_of(&self, name: &str, what: &str, errno: c_int) -> io::Result<()> {
        self.log_line(&format!("{name}({what}) = {errno}"));
        match errno {
            0 => Ok(()),
            ABORT => {
                self.fail(Fault::new(
                    libc::EIO,
                    &format!("Driver aborted: {name}() returned bdus_abort"),
                ));
                Err(io::Error::from_raw_os_error(libc::EIO))
            }
            libc::ENOLINK | libc::ENOSPC | libc::ETIMEDOUT => {
                Err(io::Error::from_raw_os_error(errno))
            }
            _ => Err(io::Error::from_raw_os_error(libc::EIO)),
        }
    }

    /// Calls no further callback, and ends the device.
    fn fail(&self, fault: Fault) {
        self.is_over.store(true, Ordering::Release);
        if let Some(device) = self.device.get() {
            device.fail(&fault.message);
        }
        self.failure.lock().get_or_insert(fault);
    }

    fn log_line(&self, line: &str) {
        if let Some(mut log) = self.log.as_ref() {
            // A log that cannot be written is ignored.
            let _ = writeln!(log, "{line}");
        }
    }

    /// A callback, unless it is missing or the driver has ended.
    fn callback<F: Copy>(&self, callback: Option<F>) -> io::Result<F> {
        let errno = if self.is_over.load(Ordering::Acquire) { libc::EIO } else { libc::EOPNOTSUPP };
        callback.filter(|_| errno != libc::EIO).ok_or_else(|| io::Error::from_raw_os_error(errno))
    }

    /// Calls a callback about the device. Returns whether it succeeded.
    pub(super) fn call(&self, name: &str, callback: OnDevice) -> Result<(), Fault> {
        let Some(callback) = callback else { return Ok(()) };
        // SAFETY: `bdus.h` demands that callbacks can be called until `bdus_run` returns; the
        // context lives as long as `self`.
        let errno = unsafe { callback(self.context.pointer()) };
        self.log_line(&format!("{name}() = {errno}"));
        match errno {
            0 => Ok(()),
            ABORT => {
                Err(Fault::new(libc::EIO, &format!("Driver aborted: {name}() returned bdus_abort")))
            }
            1..=133 => Err(Fault::new(
                errno,
                &format!("Callback {name}() failed: {}", io::Error::from_raw_os_error(errno)),
            )),
            _ => Err(Fault::new(
                libc::EIO,
                &format!("Callback {name}() failed and returned {errno}"),
            )),
        }
    }

    /// The longest pieces of a range, for callbacks that count in 32 bits.
    fn pieces(
        &self,
        (mut offset, mut length): (u64, u64),
        piece_max: u32,
        mut call: impl FnMut(u64, u32) -> io::Result<()>,
    ) -> io::Result<()> {
        while length > 0 {
            let piece = u32::try_from(length).unwrap_or(u32::MAX).min(piece_max);
            call(offset, piece)?;
            offset += u64::from(piece);
            length -= u64::from(piece);
        }
        Ok(())
    }

    fn show(&self, address: &str) -> Result<(), Fault> {
        let path = CString::new(address).unwrap_or_default();
        let path = self.path.get_or_init(|| path);
        let number = std::fs::metadata(address).map_or(0, |metadata| metadata.rdev());
        // SAFETY: no other thread reads it: only this thread serves.
        unsafe {
            let context = self.context.pointer();
            (*context).path = path.as_ptr();
            (*context).major = libc::major(number);
            (*context).minor = libc::minor(number);
        }
        let mut facts = self.facts.lock();
        facts.set("path", address);
        self.device_file.write(&facts)
    }
}

/// The length of a request. `run` limits it to 1 MiB (`request_bytes_max`); a host that does not
/// keep to that gets an error.
fn size_of(bytes: &[u8]) -> io::Result<u32> {
    u32::try_from(bytes.len()).map_err(io::Error::other)
}

impl Driver for Callbacks {
    fn abilities(&self) -> Abilities {
        Abilities {
            write: self.ops.changes(),
            flush: self.ops.flush.is_some(),
            fua: self.ops.fua_write.is_some(),
            discard: self.ops.discard.is_some(),
            write_zeroes: self.ops.write_zeros.is_some(),
            any_byte: false,
        }
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        let (read, size) = (self.callback(self.ops.read)?, size_of(into)?);
        // SAFETY: `bdus.h` demands that callbacks can be called until `bdus_run` returns; the
        // context lives as long as `self`. The `size` bytes are borrowed, so no one else has that
        // memory until it returns.
        let errno = unsafe { read(into.as_mut_ptr().cast(), offset, size, self.context.pointer()) };
        self.result_of("read", &format!("{offset}, {size}"), errno)
    }

    fn write(&self, offset: u64, bytes: &[u8], fua: bool) -> io::Result<()> {
        let (name, callback) = match self.ops.write {
            Some(_) if !fua => ("write", self.ops.write),
            _ => ("fua_write", self.ops.fua_write),
        };
        let (write, size) = (self.callback(callback)?, size_of(bytes)?);
        // SAFETY: `bdus.h` demands that callbacks can be called until `bdus_run` returns; the
        // context lives as long as `self`. The `size` bytes are borrowed, so they do not change
        // until it returns.
        let errno = unsafe { write(bytes.as_ptr().cast(), offset, size, self.context.pointer()) };
        self.result_of(name, &format!("{offset}, {size}"), errno)
    }

    fn flush(&self) -> io::Result<()> {
        let flush = self.callback(self.ops.flush)?;
        // SAFETY: `bdus.h` demands that callbacks can be called until `bdus_run` returns; the
        // context lives as long as `self`.
        let errno = unsafe { flush(self.context.pointer()) };
        self.result_of("flush", "", errno)
    }

    fn discard(&self, offset: u64, length: u64) -> io::Result<()> {
        self.pieces((offset, length), self.attrs.max_discard_erase_size, |offset, size| {
            let discard = self.callback(self.ops.discard)?;
            // SAFETY: `bdus.h` demands that callbacks can be called until `bdus_run` returns; the
            // context lives as long as `self`.
            let errno = unsafe { discard(offset, size, self.context.pointer()) };
            self.result_of("discard", &format!("{offset}, {size}"), errno)
        })
    }

    fn write_zeroes(&self, offset: u64, length: u64, keep_space: bool) -> io::Result<()> {
        self.pieces((offset, length), self.attrs.max_write_zeros_size, |offset, size| {
            let write_zeros = self.callback(self.ops.write_zeros)?;
            // SAFETY: `bdus.h` demands that callbacks can be called until `bdus_run` returns; the
            // context lives as long as `self`.
            let errno = unsafe { write_zeros(offset, size, !keep_space, self.context.pointer()) };
            self.result_of("write_zeros", &format!("{offset}, {size}, {}", !keep_space), errno)
        })
    }

    fn attached(&self, device: &Device) {
        // It is called once.
        let _ = self.device.set(device.clone());
    }

    fn ready(&self, doors: &[Door]) {
        let address = doors.first().map_or("", |door| door.address.as_str());
        let available = self.show(address).and_then(|()| match self.ops.on_device_available {
            Some(_) => self.call("on_device_available", self.ops.on_device_available),
            None => {
                let mut out = io::stdout();
                // Standard output may be closed.
                let _ = writeln!(out, "{address}").and_then(|()| out.flush());
                Ok(())
            }
        });
        let served = match available {
            Ok(()) if self.becomes_daemon => super::daemon::begin(),
            other => other,
        };
        if let Err(fault) = served {
            self.fail(fault);
        }
    }
}
