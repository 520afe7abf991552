//! file PATH [SIZE]: the bytes of a file or a block device; a flush makes them durable.

use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::FileExt;

use sawmill_driver::client::{Abilities, Driver, Options, parse_size, serve};

struct Passthrough(File);

impl Driver for Passthrough {
    fn abilities(&self) -> Abilities {
        Abilities { any_byte: true, ..Abilities::default() }
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        self.0.read_exact_at(into, offset)
    }

    fn write(&self, offset: u64, bytes: &[u8], _fua: bool) -> io::Result<()> {
        self.0.write_all_at(bytes, offset)
    }

    fn flush(&self) -> io::Result<()> {
        self.0.sync_data()
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().ok_or("usage: file PATH [SIZE], SIZE like 64M")?;
    let mut file =
        File::options().read(true).write(true).create(true).truncate(false).open(&path)?;
    // The end of a block device is its size. A file grows to the size that is asked for, and is
    // never cut: another driver may serve it still.
    let mut size = file.seek(SeekFrom::End(0))?;
    if let Some(text) = arguments.next() {
        size = parse_size(&text).ok_or("SIZE is a number like 64M")?;
        if file.metadata()?.is_file() && file.metadata()?.len() < size {
            file.set_len(size)?;
        }
    }
    serve(Passthrough(file), &[], &Options::sized(size).threads(4))?;
    Ok(())
}
