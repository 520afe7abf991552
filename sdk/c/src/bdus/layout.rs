//! The structures of `bdus.h`, and their valid values.
//!
//! Invariant: offsets and sizes are those of libbdus 0.1.2, which a test compares. Not here: the
//! use of the values.

use std::ffi::{c_char, c_int, c_void};

use super::fault::Fault;
use crate::user::UserPointer;

/// `struct bdus_ctx`.
#[repr(C)]
pub(super) struct Context {
    pub(super) id: u64,
    pub(super) path: *const c_char,
    pub(super) ops: &'static Ops,
    pub(super) attrs: &'static Attrs,
    pub(super) is_rerun: bool,
    pub(super) private_data: UserPointer,
    /// Since 0.1.1; older programs do not look here.
    pub(super) major: u32,
    pub(super) minor: u32,
}

pub(super) type OnDevice = Option<unsafe extern "C" fn(*mut Context) -> c_int>;
type OnWrite = Option<unsafe extern "C" fn(*const c_char, u64, u32, *mut Context) -> c_int>;
type OnRange = Option<unsafe extern "C" fn(u64, u32, *mut Context) -> c_int>;

/// `struct bdus_ops`: a program's callbacks.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct Ops {
    pub(super) initialize: OnDevice,
    pub(super) on_device_available: OnDevice,
    pub(super) terminate: OnDevice,
    pub(super) read: Option<unsafe extern "C" fn(*mut c_char, u64, u32, *mut Context) -> c_int>,
    pub(super) write: OnWrite,
    pub(super) write_same: OnWrite,
    pub(super) write_zeros: Option<unsafe extern "C" fn(u64, u32, bool, *mut Context) -> c_int>,
    pub(super) fua_write: OnWrite,
    pub(super) flush: OnDevice,
    pub(super) discard: OnRange,
    pub(super) secure_erase: OnRange,
    pub(super) ioctl: Option<unsafe extern "C" fn(u32, *mut c_void, *mut Context) -> c_int>,
}

/// `struct bdus_attrs`: what a program asks of its device.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Attrs {
    pub(super) logical_block_size: u32,
    pub(super) physical_block_size: u32,
    pub(super) size: u64,
    pub(super) max_concurrent_callbacks: u32,
    pub(super) max_read_write_size: u32,
    pub(super) max_write_same_size: u32,
    pub(super) max_write_zeros_size: u32,
    pub(super) max_discard_erase_size: u32,
    pub(super) disable_partition_scanning: bool,
    pub(super) recoverable: bool,
    pub(super) dont_daemonize: bool,
    pub(super) log: bool,
}

/// `struct bdus_version`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Version {
    pub(super) major: u32,
    pub(super) minor: u32,
    pub(super) patch: u32,
}

/// The limits of `max_read_write_size`, and its default.
const PAGE: u32 = 4096;
const READ_WRITE_MAX: u32 = 1 << 20;
const READ_WRITE_DEFAULT: u32 = 256 << 10;

impl Ops {
    /// Callbacks by name, and whether each is present.
    pub(super) fn named(&self) -> [(&'static str, bool); 9] {
        [
            ("read", self.read.is_some()),
            ("write", self.write.is_some()),
            ("write_same", self.write_same.is_some()),
            ("write_zeros", self.write_zeros.is_some()),
            ("fua_write", self.fua_write.is_some()),
            ("flush", self.flush.is_some()),
            ("discard", self.discard.is_some()),
            ("secure_erase", self.secure_erase.is_some()),
            ("ioctl", self.ioctl.is_some()),
        ]
    }

    /// Whether anything changes the device; else it is read-only.
    pub(super) fn changes(&self) -> bool {
        self.write.is_some()
            || self.fua_write.is_some()
            || self.write_zeros.is_some()
            || self.discard.is_some()
    }

    pub(super) fn check(&self) -> Result<(), Fault> {
        if self.fua_write.is_some() && self.flush.is_none() {
            return Err(Fault::invalid("callback fua_write() is there and flush() is not"));
        }
        let carried = self.read.is_some() || self.changes();
        let has_unsupported =
            self.write_same.is_some() || self.secure_erase.is_some() || self.ioctl.is_some();
        if has_unsupported && !carried {
            let text = "this kernel's devices support neither write_same, secure_erase nor \
                ioctl, and the driver has no other callback: add read() or write()";
            return Err(Fault::new(libc::ENOTSUP, text));
        }
        Ok(())
    }
}

impl Attrs {
    /// The attributes with the values in effect.
    pub(super) fn completed(mut self) -> Result<Self, Fault> {
        let attribute = |name: &str, rule: &str| {
            Err(Fault::invalid(&format!("attribute {name} must be {rule}")))
        };
        let block = self.logical_block_size;
        if !block.is_power_of_two() || !(512..=PAGE).contains(&block) {
            return attribute("logical_block_size", "a power of two from 512 to the page size");
        }
        let physical = self.physical_block_size;
        if physical != 0 && (!physical.is_power_of_two() || !(block..=PAGE).contains(&physical)) {
            return attribute(
                "physical_block_size",
                "0, or a power of two from logical_block_size to the page size",
            );
        }
        self.physical_block_size = physical.max(block);
        if self.size == 0 || !self.size.is_multiple_of(u64::from(self.physical_block_size)) {
            return attribute(
                "size",
                "a positive multiple of physical_block_size, or of logical_block_size",
            );
        }
        self.max_concurrent_callbacks = self.max_concurrent_callbacks.max(1);
        if self.max_read_write_size != 0 && self.max_read_write_size < PAGE {
            return attribute("max_read_write_size", "0, or the page size or more");
        }
        if self.max_read_write_size == 0 {
            self.max_read_write_size = READ_WRITE_DEFAULT;
        }
        self.max_read_write_size = self.max_read_write_size.min(READ_WRITE_MAX) / PAGE * PAGE;
        for (name, value) in [
            ("max_write_same_size", &mut self.max_write_same_size),
            ("max_write_zeros_size", &mut self.max_write_zeros_size),
            ("max_discard_erase_size", &mut self.max_discard_erase_size),
        ] {
            if *value != 0 && *value < block {
                return attribute(name, "0, or logical_block_size or more");
            }
            *value =
                if *value == 0 { u32::MAX } else { *value } / PAGE.max(block) * PAGE.max(block);
            *value = (*value).max(block);
        }
        if !matches!(block, 512 | PAGE) && !self.size.is_multiple_of(u64::from(PAGE)) {
            let text = format!(
                "a logical_block_size of {block} becomes one of {PAGE} here, and the size is no \
                multiple"
            );
            return Err(Fault::new(libc::ENOTSUP, &text));
        }
        Ok(self)
    }

    /// All attributes as numbers.
    pub(super) fn named(&self) -> [(&'static str, u64); 12] {
        [
            ("logical_block_size", self.logical_block_size.into()),
            ("physical_block_size", self.physical_block_size.into()),
            ("size", self.size),
            ("max_concurrent_callbacks", self.max_concurrent_callbacks.into()),
            ("max_read_write_size", self.max_read_write_size.into()),
            ("max_write_same_size", self.max_write_same_size.into()),
            ("max_write_zeros_size", self.max_write_zeros_size.into()),
            ("max_discard_erase_size", self.max_discard_erase_size.into()),
            ("disable_partition_scanning", self.disable_partition_scanning.into()),
            ("recoverable", self.recoverable.into()),
            ("dont_daemonize", self.dont_daemonize.into()),
            ("log", self.log.into()),
        ]
    }

    /// Replaces zeroes by the values that the device was made with, except for attributes of the
    /// driver.
    pub(super) fn filled(mut self, original: impl Fn(&str) -> u64) -> Self {
        let number =
            |value: u32, name: &str| if value == 0 { original(name) as u32 } else { value };
        self.logical_block_size = number(self.logical_block_size, "logical_block_size");
        self.physical_block_size = number(self.physical_block_size, "physical_block_size");
        self.size = if self.size == 0 { original("size") } else { self.size };
        self.max_concurrent_callbacks =
            number(self.max_concurrent_callbacks, "max_concurrent_callbacks");
        self.max_read_write_size = number(self.max_read_write_size, "max_read_write_size");
        self.max_write_same_size = number(self.max_write_same_size, "max_write_same_size");
        self.max_write_zeros_size = number(self.max_write_zeros_size, "max_write_zeros_size");
        self.max_discard_erase_size = number(self.max_discard_erase_size, "max_discard_erase_size");
        self.disable_partition_scanning |= original("disable_partition_scanning") != 0;
        self.recoverable |= original("recoverable") != 0;
        self
    }

    /// The block size of the device: it has whole pages in place of blocks of 1024 and 2048 bytes.
    pub(super) fn device_block(&self) -> u32 {
        if self.logical_block_size == 512 { 512 } else { PAGE }
    }
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;

    use super::*;

    #[test]
    fn structures_have_the_places_of_libbdus() {
        assert_eq!((size_of::<Context>(), size_of::<Ops>(), size_of::<Attrs>()), (56, 96, 40));
        assert_eq!((offset_of!(Context, is_rerun), offset_of!(Context, private_data)), (32, 40));
        assert_eq!((offset_of!(Context, major), offset_of!(Context, minor)), (48, 52));
        assert_eq!(
            (offset_of!(Ops, read), offset_of!(Ops, flush), offset_of!(Ops, ioctl)),
            (24, 64, 88)
        );
        assert_eq!((offset_of!(Attrs, size), offset_of!(Attrs, max_concurrent_callbacks)), (8, 16));
        assert_eq!(
            (offset_of!(Attrs, disable_partition_scanning), offset_of!(Attrs, log)),
            (36, 39)
        );
    }

    #[test]
    fn attributes_are_valid_as_in_libbdus() {
        let good = Attrs { logical_block_size: 512, size: 1 << 20, ..Attrs::default() };
        let with = |change: fn(&mut Attrs)| {
            let mut attrs = good;
            change(&mut attrs);
            attrs.completed()
        };
        let full = good.completed().unwrap_or_else(|fault| panic!("{}", fault.message));
        assert_eq!((full.physical_block_size, full.max_concurrent_callbacks), (512, 1));
        assert_eq!(full.max_read_write_size, 256 << 10);
        type Change = fn(&mut Attrs);
        let bad: [(&str, Change); 9] = [
            ("logical_block_size", |attrs| attrs.logical_block_size = 0),
            ("logical_block_size", |attrs| attrs.logical_block_size = 768),
            ("logical_block_size", |attrs| attrs.logical_block_size = 8192),
            ("physical_block_size", |attrs| attrs.physical_block_size = 256),
            ("physical_block_size", |attrs| attrs.physical_block_size = 3072),
            ("size", |attrs| attrs.size = 0),
            ("size", |attrs| attrs.size = 1000),
            ("max_read_write_size", |attrs| attrs.max_read_write_size = 4095),
            ("max_write_zeros_size", |attrs| attrs.max_write_zeros_size = 511),
        ];
        for (name, change) in bad {
            let fault = with(change).err().unwrap_or_else(|| panic!("{name} was taken"));
            assert_eq!(fault.errno, libc::EINVAL);
            assert!(fault.message.contains(name), "{}", fault.message);
        }
        assert!(with(|attrs| attrs.physical_block_size = 4096).is_ok());
        assert!(with(|attrs| attrs.max_read_write_size = u32::MAX).is_ok());
        assert!(with(|attrs| attrs.logical_block_size = 1024).is_ok());
        let odd = with(|attrs| (attrs.logical_block_size, attrs.size) = (1024, 3072)).err();
        assert_eq!(odd.map(|fault| fault.errno), Some(libc::ENOTSUP));
    }

    #[test]
    fn a_driver_of_what_cannot_be_carried_alone_is_refused() {
        // SAFETY: it touches nothing. It is unsafe because the functions of a table are.
        unsafe extern "C" fn erase(_: u64, _: u32, _: *mut Context) -> c_int {
            0
        }
        // SAFETY: it touches nothing. It is unsafe because the functions of a table are.
        unsafe extern "C" fn write(_: *const c_char, _: u64, _: u32, _: *mut Context) -> c_int {
            0
        }
        let errno = |ops: Ops| ops.check().err().map(|fault| fault.errno);
        assert_eq!(errno(Ops { secure_erase: Some(erase), ..Ops::default() }), Some(libc::ENOTSUP));
        assert_eq!(
            errno(Ops { secure_erase: Some(erase), write: Some(write), ..Ops::default() }),
            None
        );
        assert_eq!(errno(Ops { fua_write: Some(write), ..Ops::default() }), Some(libc::EINVAL));
        assert_eq!(errno(Ops::default()), None, "a device that cannot even be read is one");
    }
}
