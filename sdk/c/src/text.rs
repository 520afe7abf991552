//! Strings between C and Rust: those of callers, and error messages.
//!
//! Invariant: a message belongs to its thread, and stays until the next one. Not here: its text.

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int};

use sawmill_device::{Error, ErrorKind, Result};

thread_local! {
    static REMEMBERED: RefCell<CString> = RefCell::default();
}

/// A string of a caller.
///
/// # Safety
/// It is null, or ends with a NUL and stays as it is for as long as the result is used.
pub(crate) unsafe fn borrowed<'a>(text: *const c_char) -> Result<&'a str> {
    if text.is_null() {
        return Err(Error::new(ErrorKind::Invalid, "expected a string, got NULL"));
    }
    // SAFETY: it is not null, and the caller promises that it ends with a NUL and stays as it is.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str().map_err(|_| {
        Error::new(ErrorKind::Invalid, "expected UTF-8 text; the string has other bytes")
    })
}

/// Remembers an error for this thread.
pub(crate) fn remember(error: &Error) {
    remember_text(&error.to_string());
}

/// As `remember`.
pub(crate) fn remember_text(text: &str) {
    let text = CString::new(text.replace('\0', " ")).unwrap_or_default();
    // No one asks for the error of a thread that ends.
    let _ = REMEMBERED.try_with(|remembered| *remembered.borrow_mut() = text);
}

/// The error that was remembered last.
pub(crate) fn remembered() -> *const c_char {
    REMEMBERED.try_with(|remembered| remembered.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}

/// Remembers an error, and returns it as a negative errno.
pub(crate) fn fail(error: &Error) -> c_int {
    remember(error);
    -error.kind().errno()
}
