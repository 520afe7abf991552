//! The path of this process's own program, to start it again: a mount holder, a successor.
//!
//! Invariant: after an upgrade this is the new program in the old one's place. Not here: what is
//! started.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use sawmill_device::{Error, ErrorKind};

use crate::command::KEEP;

/// The kernel's suffix for a program that was removed from the disk or replaced there.
const GONE: &[u8] = b" (deleted)";

/// The path of the running program, or of the one that replaced it on the disk.
pub(crate) fn own() -> io::Result<PathBuf> {
    std::env::current_exe().map(without_mark)
}

/// The command of a process that holds a FUSE mount while no server serves it.
pub(crate) fn mount_holder() -> sawmill_device::Result<Vec<OsString>> {
    let own = own().map_err(|error| {
        Error::caused(ErrorKind::Unavailable, "fuse: cannot find the sawmill program", error)
    })?;
    Ok(vec![own.into(), KEEP.into()])
}

fn without_mark(path: PathBuf) -> PathBuf {
    match path.as_os_str().as_bytes().strip_suffix(GONE) {
        Some(replaced) => OsStr::from_bytes(replaced).into(),
        None => path,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_was_replaced_is_the_new_one_at_its_place() {
        assert_eq!(
            without_mark("/usr/bin/sawmill (deleted)".into()),
            PathBuf::from("/usr/bin/sawmill")
        );
        assert_eq!(without_mark("/usr/bin/sawmill".into()), PathBuf::from("/usr/bin/sawmill"));
        let odd = OsStr::from_bytes(b"/opt/\xff/sawmill (deleted)");
        assert_eq!(
            without_mark(odd.into()),
            PathBuf::from(OsStr::from_bytes(b"/opt/\xff/sawmill"))
        );
    }
}
