//! mirror A B: A holds the bytes, B each of them XOR 0xFF. A read that finds them different fails.

use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::FileExt;
use std::sync::{PoisonError, RwLock};

use sawmill_driver::client::{Abilities, Driver, Options, serve};

/// The lock keeps the two halves together: reads side by side, each write alone.
struct Mirror(File, File, RwLock<()>);

impl Driver for Mirror {
    fn abilities(&self) -> Abilities {
        Abilities { any_byte: true, ..Abilities::default() }
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        let _together = self.2.read().unwrap_or_else(PoisonError::into_inner);
        let mut other = vec![0; into.len()];
        self.0.read_exact_at(into, offset)?;
        self.1.read_exact_at(&mut other, offset)?;
        match into.iter().zip(&other).all(|(a, b)| *a == b ^ 0xFF) {
            true => Ok(()),
            false => Err(io::Error::other("the halves differ")),
        }
    }

    fn write(&self, offset: u64, bytes: &[u8], _fua: bool) -> io::Result<()> {
        let _alone = self.2.write().unwrap_or_else(PoisonError::into_inner);
        let other: Vec<u8> = bytes.iter().map(|byte| byte ^ 0xFF).collect();
        self.0.write_all_at(bytes, offset)?;
        self.1.write_all_at(&other, offset)
    }

    fn flush(&self) -> io::Result<()> {
        // Both are tried, even if the first fails.
        let (one, other) = (self.0.sync_data(), self.1.sync_data());
        one.and(other)
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let paths: Vec<String> = std::env::args().skip(1).collect();
    let [a, b] = &paths[..] else { return Err("usage: mirror A B".into()) };
    let open = |path| File::options().read(true).write(true).open(path);
    let (mut a, mut b) = (open(a)?, open(b)?);
    let size = a.seek(SeekFrom::End(0))?;
    if b.seek(SeekFrom::End(0))? != size {
        return Err("A and B are of different sizes".into());
    }
    serve(Mirror(a, b, RwLock::new(())), &[], &Options::sized(size).threads(4))?;
    Ok(())
}
