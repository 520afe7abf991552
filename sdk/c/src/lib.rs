//! libsawmill: the driver's side for C (`include/sawmill.h`), and for programs that were written
//! for BDUS (`include/bdus.h`).
//!
//! Besides `crates/sys`, this is the only place with unsafe code: it handles the pointers of a C
//! program, which follows the headers. Invariants: no pointer of a caller is kept after the call
//! that got it; a panic of ours does not cross into C: Rust aborts the program at the edge of an
//! `extern "C"` function. Each `no_mangle` is sound because the names begin with `sawmill_` or
//! `bdus_` and occur once in the program; the test `prototypes` compares them with the headers.
//! Files: `driver` (a table of functions as a driver), `options`, `text` (strings, errors), `user`
//! (a pointer of the program), `bdus/`. Not here: what a driver is (`sawmill_driver::client`).
#![cfg_attr(not(test), warn(clippy::unwrap_used))]

pub mod bdus;
mod driver;
mod options;
mod text;
mod user;

use std::ffi::{c_char, c_int};
use std::sync::Arc;

use sawmill_device::{Error, ErrorKind, Result};
use sawmill_driver::client::{self, Device, Outcome};

pub use driver::{DriverTable, WriteChunk};
pub use user::UserPointer;

use crate::driver::CDriver;
use crate::text::{borrowed, fail, remember};

/// `sawmill_serve`.
///
/// # Safety
/// As in `include/sawmill.h`: `driver` and `options` are tables of that layout, valid during the
/// call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sawmill_serve(
    driver: *const DriverTable,
    user: UserPointer,
    options: *const *const c_char,
) -> c_int {
    // SAFETY: `driver` and `options` are tables of the header, valid during this call.
    ended(unsafe { serve(None, driver, user, options) })
}

/// `sawmill_rerun`.
///
/// # Safety
/// As `sawmill_serve`; `name` is a string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sawmill_rerun(
    name: *const c_char,
    driver: *const DriverTable,
    user: UserPointer,
    options: *const *const c_char,
) -> c_int {
    // SAFETY: `name` is null or a string that lives during this call.
    let name = unsafe { borrowed(name) };
    // SAFETY: `driver` and `options` are tables of the header, valid during this call.
    ended(name.and_then(|name| unsafe { serve(Some(name), driver, user, options) }))
}

/// # Safety
/// As `sawmill_serve`.
unsafe fn serve(
    name: Option<&str>,
    driver: *const DriverTable,
    user: UserPointer,
    options: *const *const c_char,
) -> Result<Outcome> {
    // SAFETY: `driver` and `options` are tables of the header, valid during this call.
    let (driver, mut options) = unsafe { (CDriver::new(driver, user)?, options::read(options)?) };
    if let Some(name) = name {
        options.options = client::replacing(name, &options.options)?;
    }
    let doors: Vec<&str> = options.doors.iter().map(String::as_str).collect();
    match driver.wants_chunks() {
        true => client::serve_chunks(&driver, &doors, &options.options),
        // Ours lives until the call returns, and with it the device that the program has a pointer
        // to.
        false => {
            let driver = Arc::new(driver);
            client::serve(Arc::clone(&driver), &doors, &options.options)
        }
    }
}

fn ended(outcome: Result<Outcome>) -> c_int {
    match outcome {
        Ok(Outcome::Ended) => 0,
        Ok(Outcome::Replaced) => 1,
        Err(error) => fail(&error),
    }
}

/// `sawmill_ask`.
///
/// # Safety
/// Both are strings.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sawmill_ask(name: *const c_char, what: *const c_char) -> c_int {
    // SAFETY: `name` and `what` are null or strings that live during this call.
    let (name, what) = unsafe { (borrowed(name), borrowed(what)) };
    let outcome = name.and_then(|name| client::query(&client::find(name)?, what?));
    outcome.map_or_else(|error| fail(&error), |_| 0)
}

/// `sawmill_device_end`.
///
/// # Safety
/// `device` is null or what `attached` was handed, and `sawmill_serve` has not returned.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sawmill_device_end(device: Option<&Device>) {
    if let Some(device) = device {
        device.end();
    }
}

/// `sawmill_device_fail`.
///
/// # Safety
/// As `sawmill_device_end`; `message` is a string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sawmill_device_fail(device: Option<&Device>, message: *const c_char) {
    // SAFETY: `message` is null or a string that lives during this call.
    let message = unsafe { borrowed(message) };
    if let Some(device) = device {
        device.fail(message.unwrap_or("the driver does not say why"));
    }
}

/// `sawmill_device_option`.
///
/// # Safety
/// As `sawmill_device_end`; `name` is a string, and `length` bytes can be written at `into`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sawmill_device_option(
    device: Option<&Device>,
    name: *const c_char,
    into: *mut c_char,
    length: usize,
) -> usize {
    // SAFETY: `name` is null or a string that lives during this call.
    let name = unsafe { borrowed(name) };
    let value =
        device.zip(name.ok()).and_then(|(device, name)| device.option(name)).unwrap_or_default();
    if length > 0 && !into.is_null() {
        let copied_bytes = value.len().min(length - 1);
        // SAFETY: `copied_bytes` + 1 <= `length` bytes can be written at `into`, which is the
        // caller's, so that they do not overlap our string.
        unsafe {
            std::ptr::copy_nonoverlapping(value.as_ptr(), into.cast(), copied_bytes);
            into.add(copied_bytes).write(0);
        }
    }
    value.len()
}

/// `sawmill_error`.
#[unsafe(no_mangle)]
pub extern "C" fn sawmill_error() -> *const c_char {
    text::remembered()
}

/// `sawmill_parse_size`.
///
/// # Safety
/// `text` is a string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sawmill_parse_size(text: *const c_char) -> u64 {
    // SAFETY: `text` is null or a string that lives during this call.
    let text = unsafe { borrowed(text) };
    let size = text.ok().and_then(client::parse_size);
    size.unwrap_or_else(|| {
        remember(&Error::new(ErrorKind::Invalid, "a size is a number like 4096 or 64M"));
        0
    })
}

/// `sawmill_version`.
#[unsafe(no_mangle)]
pub extern "C" fn sawmill_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::process::Command;

    /// Set in the child process, which panics.
    const CHILD_VARIABLE: &str = "SAWMILL_C_TEST_PANICS";

    /// A function as C programs call them, with a bug. It stands for the exported ones: what ends
    /// the process is their `extern "C"`, which the test `prototypes` demands of each.
    extern "C" fn with_a_bug() {
        panic!("a bug of ours");
    }

    #[test]
    fn a_panic_ends_the_process_at_the_edge_to_c() {
        if std::env::var_os(CHILD_VARIABLE).is_some() {
            // What stands in for C sees whether the panic goes on.
            let passed = std::panic::catch_unwind(|| with_a_bug());
            println!("the panic passed: {passed:?}");
            std::process::exit(0);
        }
        let own = std::env::current_exe().expect("the test program");
        let mut child = Command::new(own);
        child.args(["--exact", "--nocapture", "tests::a_panic_ends_the_process_at_the_edge_to_c"]);
        let output = child.env(CHILD_VARIABLE, "1").output().expect("a child process");
        let (out, err) =
            (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert_eq!(output.status.signal(), Some(libc::SIGABRT), "{out}{err}");
        assert!(err.contains("a bug of ours") && !out.contains("the panic passed"), "{out}{err}");
    }
}
