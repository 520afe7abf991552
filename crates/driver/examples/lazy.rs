//! lazy URL FILE: a copy on read of what an http:// server has. FILE keeps what was read or
//! written, in blocks of 64 KiB; FILE.map has a byte for each block, 1 when FILE has it.
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, PoisonError};

use sawmill_driver::client::{Abilities, Driver, Options, serve};
/// URL, size, FILE, and FILE.map: the thread that has locked it fetches.
struct Lazy(String, u64, File, Mutex<File>);
impl Driver for Lazy {
    fn abilities(&self) -> Abilities {
        Abilities::default()
    }
    fn read(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        let map = self.3.lock().unwrap_or_else(PoisonError::into_inner);
        for block in offset >> 16..(offset + into.len() as u64).div_ceil(1 << 16) {
            let (mut has, from) = ([0], block << 16);
            map.read_exact_at(&mut has, block)?;
            if has == [0] {
                let reply = get(&self.0, from, self.1.min(from + (1 << 16)));
                self.2.write_all_at(&reply.ok_or(io::ErrorKind::NotConnected)?.1, from)?;
                self.2.sync_data()?; // a map that survives a power cut is never ahead of the bytes
                map.write_all_at(&[1], block)?;
            }
        }
        self.2.read_exact_at(into, offset)
    }
    fn write(&self, offset: u64, bytes: &[u8], _fua: bool) -> io::Result<()> {
        self.read(offset, &mut vec![0; bytes.len()])?; // fetches the rest of its blocks
        self.2.write_all_at(bytes, offset)
    }
    fn flush(&self) -> io::Result<()> {
        self.2.sync_data()?;
        self.3.lock().unwrap_or_else(PoisonError::into_inner).sync_data()
    }
}
/// How many bytes there are in all, and those from `from` to `end`.
fn get(url: &str, from: u64, end: u64) -> Option<(u64, Vec<u8>)> {
    let (host, path) = url.strip_prefix("http://")?.split_once('/')?;
    let (mut server, mut answer) = (std::net::TcpStream::connect(host).ok()?, Vec::new());
    let range = format!("Range: bytes={from}-{}", end - 1);
    write!(server, "GET /{path} HTTP/1.0\r\nHost: {host}\r\n{range}\r\n\r\n").ok()?;
    server.read_to_end(&mut answer).ok()?;
    let at = answer.windows(4).position(|four| four == b"\r\n\r\n")? + 4;
    let head = String::from_utf8_lossy(&answer[..at]).to_ascii_lowercase();
    let size = head.split_once("content-range: bytes ")?.1.lines().next()?.rsplit_once('/')?.1;
    ((answer.len() - at) as u64 == end - from).then_some((size.parse().ok()?, answer.split_off(at)))
}
fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (url, path) = (std::env::args().nth(1), std::env::args().nth(2));
    let (url, path) = url.zip(path).ok_or("usage: lazy http://HOST:PORT/PATH FILE")?;
    let size = get(&url, 0, 1).ok_or("the server does not answer a range of bytes")?.0;
    let mut open = File::options();
    open.read(true).write(true).create(true).truncate(false);
    let (file, map) = (open.open(&path)?, open.open(path + ".map")?);
    file.set_len(size).and_then(|()| map.set_len(size.div_ceil(1 << 16)))?;
    Ok(serve(Lazy(url, size, file, Mutex::new(map)), &[], &Options::sized(size)).map(|_| ())?)
}
