//! ram [SIZE]: a disk in memory; a new driver begins with zeroes.

use std::io;
use std::sync::{PoisonError, RwLock};

use sawmill_driver::client::{Abilities, Driver, Options, parse_size, serve};

struct Ram(RwLock<Vec<u8>>);

impl Driver for Ram {
    fn abilities(&self) -> Abilities {
        Abilities {
            discard: true,
            write_zeroes: true,
            any_byte: true,
            flush: false,
            ..Abilities::default()
        }
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        let disk = self.0.read().unwrap_or_else(PoisonError::into_inner);
        into.copy_from_slice(&disk[offset as usize..offset as usize + into.len()]);
        Ok(())
    }

    fn write(&self, offset: u64, bytes: &[u8], _fua: bool) -> io::Result<()> {
        let mut disk = self.0.write().unwrap_or_else(PoisonError::into_inner);
        disk[offset as usize..offset as usize + bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        // Memory does not outlive its process: there is nothing to make durable.
        Ok(())
    }

    fn discard(&self, offset: u64, length: u64) -> io::Result<()> {
        self.write_zeroes(offset, length, false)
    }

    fn write_zeroes(&self, offset: u64, length: u64, _keep_space: bool) -> io::Result<()> {
        let mut disk = self.0.write().unwrap_or_else(PoisonError::into_inner);
        disk[offset as usize..(offset + length) as usize].fill(0);
        Ok(())
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let size = std::env::args().nth(1).unwrap_or_else(|| "64M".to_owned());
    let size = parse_size(&size).ok_or("usage: ram [SIZE], SIZE like 64M")?;
    serve(Ram(RwLock::new(vec![0; size as usize])), &[], &Options::sized(size).threads(2))?;
    Ok(())
}
