//! null [SIZE]: takes every write, and reads as zeroes.

use std::io;

use sawmill_driver::client::{Abilities, Driver, Options, parse_size, serve};

struct Null;

impl Driver for Null {
    fn abilities(&self) -> Abilities {
        Abilities {
            discard: true,
            write_zeroes: true,
            any_byte: true,
            flush: false,
            ..Abilities::default()
        }
    }

    fn read(&self, _offset: u64, into: &mut [u8]) -> io::Result<()> {
        into.fill(0);
        Ok(())
    }

    fn write(&self, _offset: u64, _bytes: &[u8], _fua: bool) -> io::Result<()> {
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        // It keeps nothing that could be made durable.
        Ok(())
    }

    fn discard(&self, _offset: u64, _length: u64) -> io::Result<()> {
        Ok(())
    }

    fn write_zeroes(&self, _offset: u64, _length: u64, _keep_space: bool) -> io::Result<()> {
        Ok(())
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let size = std::env::args().nth(1).unwrap_or_else(|| "64M".to_owned());
    let size = parse_size(&size).ok_or("usage: null [SIZE], SIZE like 64M")?;
    serve(Null, &[], &Options::sized(size))?;
    Ok(())
}
