//! BASS's workloads on the link (SoCC'16, section 5.1): small writes through the byte-granular cache, and
//! through a cache of whole pages as operating systems have it, on the same connection.
//!
//!     bass target ADDRESS SIZE_BYTES            shows a disk in memory, until its standard input ends
//!     bass relay LISTEN TO DELAY_US             hands UDP packets on, each way so much later
//!     bass load ADDRESS STACK WORKLOAD BYTES WRITES
//!
//! STACK: `bytes` (ours) or `pages` (read-modify-write, flush of whole pages). WORKLOAD: `random`, `holes`
//! (each page's front, in order), `cached` (random, the pages were read before), `read-after` (random, then
//! each page is read). One request at a time; the time ends when everything is flushed. Prints `begins`, then
//! a line of JSON.

#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::error::Error;
use std::io::Read;
use std::net::{SocketAddr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use sawmill_device::{
    BlockDevice, BlockDeviceExt, Exchange, Flags, MemoryDevice, Operation, Outcome, Request,
};
use sawmill_link::Unpack;
use sawmill_link::cache::{Cache, Options};
use sawmill_link::carrier::LinkAddress;
use sawmill_link::clock::SteadyClock;
use sawmill_link::initiator::{Initiator, InitiatorOptions, OpenMode, RemoteDevice};
use sawmill_link::session::{PreSharedKey, Security, unguessable};
use sawmill_link::target::{Target, TargetOptions};
use sawmill_link::threads::{Attached, Listener};

type Result<T = ()> = std::result::Result<T, Box<dyn Error>>;

const PAGE: u64 = 4096;
const PATIENCE: Duration = Duration::from_secs(10);

fn key() -> Security {
    Security::Key(PreSharedKey::from_bytes([0x5a; 32]))
}

fn main() -> Result {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        ["target", address, size] => target(&address.parse()?, size.parse()?),
        ["relay", listen, to, delay_us] => relay(listen, to, Duration::from_micros(delay_us.parse()?)),
        ["load", address, stack, workload, bytes, writes] => {
            load(&address.parse()?, stack, workload, bytes.parse()?, writes.parse()?)
        }
        _ => Err("usage: bass target ADDRESS SIZE | bass load ADDRESS STACK WORKLOAD BYTES WRITES".into()),
    }
}

fn target(address: &LinkAddress, size_bytes: u64) -> Result {
    let clock = Arc::new(SteadyClock);
    let target = Target::new(TargetOptions::default(), key(), clock, unguessable());
    target.add("disk", Arc::new(Unpack::new(MemoryDevice::new(size_bytes))), None)?;
    let _listener = Listener::new(target, std::slice::from_ref(address), 1)?;
    println!("ready");
    std::io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}

/// One initiator's packets to a target and back, later. Ends with its standard input.
fn relay(listen: &str, to: &str, delay: Duration) -> Result {
    let (near, far) = (Arc::new(UdpSocket::bind(listen)?), Arc::new(UdpSocket::bind("0.0.0.0:0")?));
    far.connect(to)?;
    for socket in [&near, &far] {
        // A delay is a queue: it must hold what is on its way.
        rustix::net::sockopt::set_socket_recv_buffer_size_force(socket, 16 << 20)?;
    }
    let client: Arc<Mutex<Option<SocketAddr>>> = Arc::default();
    for (from, there) in [(&near, true), (&far, false)] {
        let (tell, hear) = std::sync::mpsc::channel::<(Instant, Vec<u8>)>();
        let (from, near, far) = (Arc::clone(from), Arc::clone(&near), Arc::clone(&far));
        let clients = Arc::clone(&client);
        std::thread::spawn(move || {
            let mut packet = vec![0; 65536];
            // A packet that cannot be taken or told of is lost, as packets are.
            while let Ok((bytes, peer)) = from.recv_from(&mut packet) {
                if there {
                    *clients.lock() = Some(peer);
                }
                let _ = tell.send((Instant::now() + delay, packet[..bytes].to_vec()));
            }
        });
        let clients = Arc::clone(&client);
        std::thread::spawn(move || {
            for (due, packet) in hear {
                while let Some(left) = due.checked_duration_since(Instant::now()) {
                    std::thread::sleep(left);
                }
                let to = *clients.lock();
                let _ = match (there, to) {
                    (true, _) => far.send(&packet),
                    (false, Some(to)) => near.send_to(&packet, to),
                    (false, None) => Ok(0),
                };
            }
        });
    }
    println!("ready");
    std::io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}

/// What a workload needs of a stack.
trait Stack {
    fn write(&mut self, address: u64, bytes: &[u8]) -> Result;
    fn read(&mut self, address: u64, length: usize) -> Result<Vec<u8>>;
    fn flush(&mut self) -> Result;
    /// Bytes that were read from below.
    fn fetched(&self) -> u64;
}

struct Bytes {
    cache: Cache<RemoteDevice>,
}

impl Stack for Bytes {
    fn write(&mut self, address: u64, bytes: &[u8]) -> Result {
        Ok(self.cache.write_at(address, bytes)?)
    }

    fn read(&mut self, address: u64, length: usize) -> Result<Vec<u8>> {
        Ok(self.cache.read_at(address, length)?)
    }

    fn flush(&mut self) -> Result {
        Ok(self.cache.flush()?)
    }

    fn fetched(&self) -> u64 {
        self.cache.stats().fetched_bytes.load(Ordering::Relaxed)
    }
}

/// A page cache: a partial write to a page that is not there reads it first; pages are flushed whole,
/// neighbours as one request, many at a time. Written back at the same bound as ours.
struct Pages {
    device: RemoteDevice,
    pages: BTreeMap<u64, (Vec<u8>, bool)>,
    dirty: usize,
    fetched: u64,
}

/// A write of [`Pages`] on its way.
struct Sent(Vec<u8>, std::sync::mpsc::Sender<Outcome>);

impl Exchange for Sent {
    fn fill(&mut self, offset: u64, into: &mut [u8]) {
        let start = offset as usize;
        into.copy_from_slice(&self.0[start..start + into.len()]);
    }

    fn buffer(&mut self) -> &mut [u8] {
        &mut []
    }

    fn complete(self: Box<Self>, outcome: Outcome) {
        // The flush that sent it waits.
        let _ = self.1.send(outcome);
    }
}

impl Pages {
    fn page(&mut self, page: u64) -> Result<&mut (Vec<u8>, bool)> {
        if !self.pages.contains_key(&page) {
            self.fetched += PAGE;
            let bytes = self.device.read_at(page * PAGE, PAGE as usize)?;
            self.pages.insert(page, (bytes, false));
        }
        self.pages.get_mut(&page).ok_or_else(|| "a page that was put in is not there".into())
    }

    fn write_back(&mut self) -> Result {
        let dirty: Vec<u64> =
            self.pages.iter().filter(|(_, (_, dirty))| *dirty).map(|(page, _)| *page).collect();
        let (tell, hear) = std::sync::mpsc::channel();
        let mut under_way = 0;
        for run in dirty.chunk_by(|a, b| *b == *a + 1).flat_map(|run| run.chunks(64)) {
            let mut bytes = Vec::with_capacity(run.len() * PAGE as usize);
            for page in run {
                let (page, dirty) = self.pages.get_mut(page).ok_or("a dirty page is gone")?;
                bytes.extend_from_slice(page);
                *dirty = false;
            }
            let length = bytes.len() as u64;
            let exchange = Box::new(Sent(bytes, tell.clone()));
            let (address, flags) = (run[0] * PAGE, Flags::default());
            self.device.submit(Request::new(Operation::Write, address, length, flags, exchange));
            under_way += 1;
            if under_way == 64 {
                hear.recv()??;
                under_way -= 1;
            }
        }
        for _ in 0..under_way {
            hear.recv()??;
        }
        self.dirty = 0;
        Ok(())
    }
}

impl Stack for Pages {
    fn write(&mut self, address: u64, bytes: &[u8]) -> Result {
        let (page, inside) = (address / PAGE, (address % PAGE) as usize);
        let whole = bytes.len() == PAGE as usize;
        if whole {
            self.pages.entry(page).or_insert_with(|| (vec![0; PAGE as usize], false));
        }
        let (held, dirty) = self.page(page)?;
        held[inside..inside + bytes.len()].copy_from_slice(bytes);
        let newly = !std::mem::replace(dirty, true);
        self.dirty += usize::from(newly);
        if self.dirty * PAGE as usize >= (Options::default().dirty_bytes_max / 2) as usize {
            self.write_back()?;
        }
        Ok(())
    }

    fn read(&mut self, address: u64, length: usize) -> Result<Vec<u8>> {
        let inside = (address % PAGE) as usize;
        Ok(self.page(address / PAGE)?.0[inside..inside + length].to_vec())
    }

    fn flush(&mut self) -> Result {
        self.write_back()?;
        Ok(self.device.flush()?)
    }

    fn fetched(&self) -> u64 {
        self.fetched
    }
}

fn load(address: &LinkAddress, stack: &str, workload: &str, bytes: usize, writes: u64) -> Result {
    let initiator =
        Initiator::new(InitiatorOptions::default(), key(), 1, Arc::new(SteadyClock), unguessable());
    let attached = Attached::new(initiator, std::slice::from_ref(address))?;
    let mode = OpenMode::default();
    let answer = attached.initiator().ask_open("disk", mode).wait(PATIENCE)?;
    let device = attached.initiator().opened("disk", mode, &answer)?;
    let pages = device.geometry().size_bytes / PAGE;
    let mut stack: Box<dyn Stack> = match stack {
        "bytes" => Box::new(Bytes { cache: Cache::new(device, &Options::default())? }),
        "pages" => Box::new(Pages { device, pages: BTreeMap::new(), dirty: 0, fetched: 0 }),
        _ => return Err(format!("no stack {stack:?}: bytes or pages").into()),
    };
    // Each page once: none is in the cache unless it was read before.
    let step = if workload == "holes" { 1 } else { 0x9e37_79b1 };
    let address_of = |index: u64| index.wrapping_mul(step) % pages * PAGE;
    if workload == "cached" {
        for index in 0..writes {
            stack.read(address_of(index), PAGE as usize)?;
        }
    }
    let data = vec![0xb5; bytes];
    println!("begins");
    let began = Instant::now();
    for index in 0..writes {
        stack.write(address_of(index), &data)?;
    }
    let taken = began.elapsed();
    if workload == "read-after" {
        for index in 0..writes {
            let page = stack.read(address_of(index), PAGE as usize)?;
            assert_eq!(page[..bytes], data, "what was written is read");
        }
    }
    stack.flush()?;
    let all = began.elapsed();
    println!(
        "{{\"writes\": {writes}, \"taken_s\": {:.6}, \"seconds\": {:.6}, \"fetched_bytes\": {}}}",
        taken.as_secs_f64(),
        all.as_secs_f64(),
        stack.fetched()
    );
    Ok(())
}
