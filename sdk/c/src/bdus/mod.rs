//! Programs that were written for BDUS: `include/bdus.h`.
//!
//! Files: `layout` (structures, validity), `run` (a driver's life), `driver` (callbacks), `daemon`,
//! `device_file` (numbers and facts of devices), `command` (the program `bdus`), `fault` (errors).
//! What differs from BDUS: `docs/guide/bdus.md`.
//!
//! Invariant: a null pointer in place of a table or a path is a fault with EINVAL; it is never
//! read.
//!
//! Not here: the interface of `include/sawmill.h` (`crate::driver`, `crate::options`).

mod command;
mod daemon;
mod device_file;
mod driver;
mod fault;
mod layout;
mod run;

use std::ffi::c_char;
use std::ptr::NonNull;

pub use command::command;
pub use layout::{Attrs, Ops, Version};

use self::fault::Fault;
use crate::text::{borrowed, remembered};
use crate::user::UserPointer;

static VERSION: Version = Version { major: 0, minor: 1, patch: 2 };

/// The tables of a program.
///
/// # Safety
/// Both are null, or point to structures of `bdus.h`.
unsafe fn tables(
    ops: Option<NonNull<Ops>>,
    attrs: Option<NonNull<Attrs>>,
) -> Result<(Ops, Attrs), Fault> {
    let (Some(ops), Some(attrs)) = (ops, attrs) else {
        return Err(Fault::invalid("NULL where callbacks or attributes are wanted"));
    };
    // SAFETY: both point to structures of `bdus.h`. (A C program's `bool` is 0 or 1, as ours.)
    Ok(unsafe { (ops.read(), attrs.read()) })
}

/// `bdus_run`, for programs that require 0.1.1 or later.
///
/// # Safety
/// As in `bdus.h`: tables of that layout, valid during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bdus_run_0_1_1_(
    ops: Option<NonNull<Ops>>,
    attrs: Option<NonNull<Attrs>>,
    private_data: UserPointer,
) -> bool {
    // SAFETY: `ops` and `attrs` are null or structures of `bdus.h`, valid during this call.
    let tables = unsafe { tables(ops, attrs) };
    Fault::report(tables.and_then(|(ops, attrs)| run::run(&ops, &attrs, private_data)))
}

/// `bdus_run`, for programs that require 0.1.0: their context is a prefix of ours.
///
/// # Safety
/// As `bdus_run_0_1_1_`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bdus_run_0_1_0_(
    ops: Option<NonNull<Ops>>,
    attrs: Option<NonNull<Attrs>>,
    private_data: UserPointer,
) -> bool {
    // SAFETY: `ops` and `attrs` are null or structures of `bdus.h`, valid during this call.
    unsafe { bdus_run_0_1_1_(ops, attrs, private_data) }
}

/// `bdus_rerun`, for programs that require 0.1.1 or later.
///
/// # Safety
/// As `bdus_run_0_1_1_`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bdus_rerun_0_1_1_(
    dev_id: u64,
    ops: Option<NonNull<Ops>>,
    attrs: Option<NonNull<Attrs>>,
    private_data: UserPointer,
) -> bool {
    // SAFETY: `ops` and `attrs` are null or structures of `bdus.h`, valid during this call.
    let tables = unsafe { tables(ops, attrs) };
    Fault::report(tables.and_then(|(ops, attrs)| run::rerun(dev_id, &ops, &attrs, private_data)))
}

/// `bdus_rerun`, for programs that require 0.1.0.
///
/// # Safety
/// As `bdus_run_0_1_1_`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bdus_rerun_0_1_0_(
    dev_id: u64,
    ops: Option<NonNull<Ops>>,
    attrs: Option<NonNull<Attrs>>,
    private_data: UserPointer,
) -> bool {
    // SAFETY: `ops` and `attrs` are null or structures of `bdus.h`, valid during this call.
    unsafe { bdus_rerun_0_1_1_(dev_id, ops, attrs, private_data) }
}

/// `bdus_get_dev_id_from_path`.
///
/// # Safety
/// `dev_path` is a string; a number can be written at `out_dev_id`, or it is null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bdus_get_dev_id_from_path_0_1_0_(
    out_dev_id: Option<NonNull<u64>>,
    dev_path: *const c_char,
) -> bool {
    // SAFETY: `dev_path` is null or a string that lives during this call.
    let path = unsafe { borrowed(dev_path) };
    let number = path.map_err(Fault::from).and_then(device_file::find_by_path);
    Fault::report(number.map(|number| {
        if let Some(out) = out_dev_id {
            // SAFETY: a number can be written at `out_dev_id`, unless it is null.
            unsafe { out.write(number) }
        }
    }))
}

/// `bdus_flush_dev`.
#[unsafe(no_mangle)]
pub extern "C" fn bdus_flush_dev_0_1_0_(dev_id: u64) -> bool {
    Fault::report(command::flush(dev_id))
}

/// `bdus_destroy_dev`.
#[unsafe(no_mangle)]
pub extern "C" fn bdus_destroy_dev_0_1_0_(dev_id: u64) -> bool {
    Fault::report(command::destroy(dev_id, command::DeviceEnd::Flushed))
}

/// `bdus_get_error_message`.
#[unsafe(no_mangle)]
pub extern "C" fn bdus_get_error_message_0_1_0_() -> *const c_char {
    remembered()
}

/// `bdus_get_libbdus_version`.
#[unsafe(no_mangle)]
pub extern "C" fn bdus_get_libbdus_version_0_1_0_() -> &'static Version {
    &VERSION
}

/// `bdus_get_kbdus_version`: there is no module whose version could differ.
///
/// # Safety
/// `out_kbdus_version` is null, or a version can be written there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bdus_get_kbdus_version_0_1_0_(
    out_kbdus_version: Option<NonNull<Version>>,
) -> bool {
    if let Some(out) = out_kbdus_version {
        // SAFETY: a version can be written at `out_kbdus_version`, unless it is null.
        unsafe { out.write(VERSION) }
    }
    true
}
