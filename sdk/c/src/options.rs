//! Options of a C program: strings `name=value`, followed by a null pointer.
//!
//! Not here: those of the protocol, which the host checks.

use std::ffi::c_char;

use sawmill_device::{Error, ErrorKind, Result};
use sawmill_driver::client::Options;

use crate::text::borrowed;

/// The options that a program requests.
pub(crate) struct ProgramOptions {
    pub(crate) options: Options,
    pub(crate) doors: Vec<String>,
}

/// # Safety
/// `strings` is null, or a list of strings that ends with a null pointer.
pub(crate) unsafe fn read(strings: *const *const c_char) -> Result<ProgramOptions> {
    let mut program_options = ProgramOptions { options: Options::new(), doors: Vec::new() };
    if strings.is_null() {
        return Ok(program_options);
    }
    for at in 0.. {
        // SAFETY: the list has not ended before this place.
        let string = unsafe { strings.add(at).read() };
        if string.is_null() {
            break;
        }
        // SAFETY: the list holds strings.
        program_options.take(unsafe { borrowed(string)? })?;
    }
    Ok(program_options)
}

impl ProgramOptions {
    fn take(&mut self, option: &str) -> Result<()> {
        let bad =
            || Error::new(ErrorKind::Invalid, format!("'{option}' is no option; write name=value"));
        let (name, value) = option.split_once('=').ok_or_else(bad)?;
        let options = std::mem::take(&mut self.options);
        self.options = match name {
            "name" => options.name(value),
            "socket" => options.socket(value),
            "threads" => options.threads(value.parse().map_err(|_| bad())?),
            "replace" if value == "1" => options.replace(),
            "replace" if value == "0" => options,
            "replace" => return Err(bad()),
            "host" if value == "none" => options.own_host(),
            "host" => return Err(bad()),
            "door" => {
                self.doors.push(value.to_owned());
                options
            }
            _ => options.option(name, value),
        };
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_option_that_is_none_is_named() {
        let bad = [c"size".as_ptr(), std::ptr::null()];
        // SAFETY: a list of strings with a null pointer at its end.
        let message = unsafe { read(bad.as_ptr()) }.err().unwrap().to_string();
        assert!(message.contains("'size'"), "{message}");
        let bad = [c"threads=many".as_ptr(), std::ptr::null()];
        // SAFETY: a list of strings with a null pointer at its end.
        assert!(unsafe { read(bad.as_ptr()) }.is_err());
        let good = [
            c"door=ublk".as_ptr(),
            c"door=nbd=unix:/a".as_ptr(),
            c"size=4096".as_ptr(),
            std::ptr::null(),
        ];
        // SAFETY: a list of strings with a null pointer at its end.
        assert_eq!(unsafe { read(good.as_ptr()) }.unwrap().doors, ["ublk", "nbd=unix:/a"]);
    }
}
