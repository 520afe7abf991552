//! BASS's workloads on the link (SoCC'16, section 5.1): small writes through the byte-granular
//! cache, and through a cache of whole pages as operating systems have it, on the same connection.
//!
//!     bass target ADDRESS SIZE_BYTES            exports a disk in memory until its input ends
//!     bass relay LISTEN TO DELAY_US             forwards UDP packets, delayed in each direction
//!     bass load ADDRESS STACK WORKLOAD BYTES WRITES
//!     bass replay ADDRESS STACK FILE            a trace: see `replay`
//!     bass lock THREADS CACHES BYTES REQUESTS [hits|reads|writes]   no link at all: see `lock`
//!
//! STACK: `bytes` (ours) or `pages` (read-modify-write, flush of whole pages). WORKLOAD: `random`,
//! `holes` (each page's front, in order), `cached` (random, the pages were read before),
//! `read-after` (random, then each page is read). One request at a time; the time ends when
//! everything is flushed. Prints `ready`, waits for a line, and prints a line of JSON.

#![forbid(unsafe_code)]

mod lock;
mod replay;
mod stacks;

use std::error::Error;
use std::io::Read;
use std::net::{SocketAddr, UdpSocket};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use sawmill_device::{BlockDevice, MemoryDevice};
use sawmill_link::Unpacker;
use sawmill_link::carrier::LinkAddress;
use sawmill_link::clock::SteadyClock;
use sawmill_link::initiator::{Initiator, InitiatorOptions, OpenMode, RemoteDevice};
use sawmill_link::session::{PreSharedKey, Security, unguessable};
use sawmill_link::target::{Target, TargetOptions};
use sawmill_link::threads::{InitiatorThreads, Listener};

use lock::Mix;
use stacks::{Bytes, Pages, Stack};

type Result<T = ()> = std::result::Result<T, Box<dyn Error>>;

const PAGE: u64 = 4096;
const ANSWER_TIME_MAX: Duration = Duration::from_secs(10);

fn key() -> Security {
    Security::Key(PreSharedKey::from_bytes([0x5a; 32]))
}

fn main() -> Result {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        ["target", address, size] => target(&address.parse()?, size.parse()?),
        ["relay", listen, to, delay_us] => {
            relay(listen, to, Duration::from_micros(delay_us.parse()?))
        }
        ["load", address, stack, workload, bytes, writes] => {
            load(&address.parse()?, stack, workload, bytes.parse()?, writes.parse()?)
        }
        ["replay", address, stack, file] => {
            let (_attached, device) = attach(&address.parse()?)?;
            replay::replay(&mut *stack_on(device, stack)?, std::path::Path::new(file))
        }
        ["lock", threads, caches, bytes, requests] => {
            let (threads, caches) = (threads.parse()?, caches.parse()?);
            lock::measure(threads, caches, bytes.parse()?, requests.parse()?, Mix::Turns)
        }
        ["lock", threads, caches, bytes, requests, mix] => {
            let (threads, caches) = (threads.parse()?, caches.parse()?);
            lock::measure(threads, caches, bytes.parse()?, requests.parse()?, Mix::named(mix)?)
        }
        _ => Err("usage: see the head of examples/bass/main.rs".into()),
    }
}

fn target(address: &LinkAddress, size_bytes: u64) -> Result {
    let clock = Arc::new(SteadyClock);
    let target = Target::new(TargetOptions::default(), key(), clock, unguessable());
    target.add("disk", Arc::new(Unpacker::new(MemoryDevice::new(size_bytes))), None)?;
    let _listener = Listener::new(target, std::slice::from_ref(address), 1)?;
    println!("ready");
    std::io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}

/// Relays one initiator's packets to a target and back with a delay, until its standard input ends.
fn relay(listen: &str, to: &str, delay: Duration) -> Result {
    let (near, far) = (Arc::new(UdpSocket::bind(listen)?), Arc::new(UdpSocket::bind("0.0.0.0:0")?));
    far.connect(to)?;
    for socket in [&near, &far] {
        // A delay is a queue: it must hold what is in flight.
        rustix::net::sockopt::set_socket_recv_buffer_size_force(socket, 16 << 20)?;
    }
    let client: Arc<Mutex<Option<SocketAddr>>> = Arc::default();
    for (from, is_forward) in [(&near, true), (&far, false)] {
        let (sender, receiver) = std::sync::mpsc::channel::<(Instant, Vec<u8>)>();
        let (from, near, far) = (Arc::clone(from), Arc::clone(&near), Arc::clone(&far));
        let clients = Arc::clone(&client);
        std::thread::spawn(move || {
            let mut packet = vec![0; 65536];
            // A packet that cannot be received or forwarded is lost, as in any network.
            while let Ok((bytes, peer)) = from.recv_from(&mut packet) {
                if is_forward {
                    *clients.lock() = Some(peer);
                }
                let _ = sender.send((Instant::now() + delay, packet[..bytes].to_vec()));
            }
        });
        let clients = Arc::clone(&client);
        std::thread::spawn(move || {
            for (due, packet) in receiver {
                while let Some(remaining) = due.checked_duration_since(Instant::now()) {
                    std::thread::sleep(remaining);
                }
                let to = *clients.lock();
                let _ = match (is_forward, to) {
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

fn attach(address: &LinkAddress) -> Result<(InitiatorThreads, RemoteDevice)> {
    let initiator =
        Initiator::new(InitiatorOptions::default(), key(), 1, Arc::new(SteadyClock), unguessable());
    let attached = InitiatorThreads::new(initiator, std::slice::from_ref(address))?;
    let mode = OpenMode::default();
    let answer = attached.initiator().request_open("disk", mode).wait(ANSWER_TIME_MAX)?;
    let device = attached.initiator().opened("disk", mode, &answer)?;
    Ok((attached, device))
}

fn stack_on(device: RemoteDevice, stack: &str) -> Result<Box<dyn Stack>> {
    match stack {
        "bytes" => Ok(Box::new(Bytes::new(device)?)),
        "pages" => Ok(Box::new(Pages::new(device))),
        _ => Err(format!("no stack {stack:?}: bytes or pages").into()),
    }
}

/// Prints that it is ready, and waits for a line, which starts the measurements of others.
fn wait_for_go() -> Result {
    println!("ready");
    std::io::stdin().read_line(&mut String::new())?;
    Ok(())
}

/// Processor time of all threads of this process, in seconds.
fn processor_s() -> Result<f64> {
    let mut ns = 0;
    for thread in std::fs::read_dir("/proc/self/task")? {
        let stat = std::fs::read_to_string(thread?.path().join("schedstat"))?;
        ns += stat.split(' ').next().unwrap_or_default().parse::<u64>()?;
    }
    Ok(ns as f64 / 1e9)
}

fn load(address: &LinkAddress, stack: &str, workload: &str, bytes: usize, writes: u64) -> Result {
    let (_attached, device) = attach(address)?;
    let pages = device.geometry().size_bytes / PAGE;
    let mut stack = stack_on(device, stack)?;
    // Each page once: none is in the cache unless it was read before.
    let step = if workload == "holes" { 1 } else { 0x9e37_79b1 };
    let address_of = |index: u64| index.wrapping_mul(step) % pages * PAGE;
    if workload == "cached" {
        for index in 0..writes {
            stack.read(address_of(index), PAGE as usize)?;
        }
    }
    let data: Arc<[u8]> = vec![0xb5; bytes].into();
    wait_for_go()?;
    let (began, used) = (Instant::now(), processor_s()?);
    for index in 0..writes {
        stack.write(address_of(index), &data, bytes)?;
    }
    let write_time = began.elapsed();
    if workload == "read-after" {
        for index in 0..writes {
            let page = stack.read(address_of(index), PAGE as usize)?;
            assert_eq!(page[..bytes], *data, "what was written is read");
        }
    }
    stack.flush()?;
    let all = began.elapsed();
    println!(
        "{{\"writes\": {writes}, \"taken_s\": {:.6}, \"seconds\": {:.6}, \"processor_s\": {:.6}, \
         \"fetched_bytes\": {}}}",
        write_time.as_secs_f64(),
        all.as_secs_f64(),
        processor_s()? - used,
        stack.fetched()
    );
    Ok(())
}
