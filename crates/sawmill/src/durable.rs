//! Small files that are replaced as a whole.
//!
//! Not here: what is in them.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

/// Replaces the content of the file at `path` with `bytes`. A crash leaves the old content or the
/// new one; when this returns, the new content survives a crash.
pub(crate) fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut new = path.as_os_str().to_owned();
    new.push(".new");
    let mut file = File::create(&new)?;
    file.write_all(bytes)?;
    // Before the rename: otherwise a power cut may leave the new name without content.
    file.sync_all()?;
    fs::rename(&new, path)?;
    // The rename itself is durable only with its folder.
    path.parent().map_or(Ok(()), |folder| File::open(folder)?.sync_all())
}
