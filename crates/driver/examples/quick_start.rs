//! A disk in memory, as a guide begins: `docs/guide/driver-rust.md` has this program.

use std::{io, sync::Mutex};

use sawmill_driver::client::{Abilities, Driver, Options, serve};

struct Ram(Mutex<Vec<u8>>);

impl Driver for Ram {
    fn abilities(&self) -> Abilities {
        Abilities::default() // writes and flushes; no discards, no zeroes
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        into.copy_from_slice(&self.0.lock().unwrap()[offset as usize..][..into.len()]);
        Ok(())
    }

    fn write(&self, offset: u64, bytes: &[u8], _fua: bool) -> io::Result<()> {
        self.0.lock().unwrap()[offset as usize..][..bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        // Memory does not outlive its process: there is nothing to make durable.
        Ok(())
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let size = 64 << 20;
    let ram = Ram(Mutex::new(vec![0; size]));
    serve(ram, &[], &Options::sized(size as u64).name("ram"))?;
    Ok(())
}
