//! Both ends of a link for `bench/link.py`: a target of a null or memory device, and a load of it.
//!
//!     link_bench target --listen udp:10.0.0.1 --device null:1073741824 [--insecure]
//!         [--receivers 1] [--spin-us 0]
//!     link_bench load --to udp:10.0.0.1 --op read --bytes 4096 --depth 64 --seconds 2
//!         [--insecure] [--spin-us 0]
//!
//! The target prints `ready` and serves until its input ends. The load prints `begin` after its
//! warm-up, and one line of JSON at its end. The completion of each request submits the next one,
//! so only the threads of the link wait. Without `--insecure`, both have the key in this file: only
//! for measurements.
//!
//! Not here: what is compared, and where (`bench/link.py`).

use std::collections::HashMap;
use std::error::Error;
use std::io::{Read, Write};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};
use sawmill_device::{
    BlockDevice, Exchange, Flags, MemoryDevice, NullDevice, Operation, Outcome, Request,
};
use sawmill_link::carrier::LinkAddress;
use sawmill_link::clock::SteadyClock;
use sawmill_link::initiator::{Initiator, InitiatorOptions, OpenMode, RemoteDevice};
use sawmill_link::session::{PreSharedKey, Security, unguessable};
use sawmill_link::target::{Target, TargetOptions};
use sawmill_link::threads::{InitiatorThreads, Listener};
use sawmill_link::{ConnectionStatus, LinkStatus, Unpacker};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const EXPORT: &str = "disk";
const ANSWER_TIME_MAX: Duration = Duration::from_secs(20);

fn main() -> Result<()> {
    let mut words = std::env::args().skip(1);
    let command = words.next().unwrap_or_default();
    let mut options = HashMap::new();
    while let Some(name) = words.next() {
        let value =
            if name == "--insecure" { String::new() } else { words.next().unwrap_or_default() };
        options.insert(name, value);
    }
    let options = Options(options);
    match command.as_str() {
        "target" => target(&options),
        "load" => load(&options),
        _ => Err("link_bench target | load; its source says more".into()),
    }
}

struct Options(HashMap<String, String>);

impl Options {
    /// How long receivers look for packets before they sleep, in microseconds.
    fn spin_time_max(&self) -> Result<Duration> {
        match self.0.get("--spin-us") {
            Some(text) => Ok(Duration::from_micros(text.parse()?)),
            None => Ok(Duration::ZERO),
        }
    }

    fn get(&self, name: &str) -> Result<&str> {
        Ok(self.0.get(name).ok_or_else(|| format!("{name} is missing"))?)
    }

    fn number<T: std::str::FromStr<Err: Error + 'static>>(&self, name: &str) -> Result<T> {
        Ok(self.get(name)?.parse()?)
    }

    fn security(&self) -> Security {
        match self.0.contains_key("--insecure") {
            true => Security::Insecure,
            false => Security::Key(PreSharedKey::from_bytes([7; 32])),
        }
    }
}

fn device(words: &str) -> Result<Arc<dyn BlockDevice>> {
    let (kind, size) = words.split_once(':').ok_or("--device null:BYTES or memory:BYTES")?;
    let size_bytes = size.parse()?;
    match kind {
        "null" => Ok(Arc::new(NullDevice::new(size_bytes))),
        "memory" => Ok(Arc::new(MemoryDevice::new(size_bytes))),
        _ => Err("a device is null or memory".into()),
    }
}

fn target(options: &Options) -> Result<()> {
    let spin_time_max = options.spin_time_max()?;
    let target = Target::new(
        TargetOptions { spin_time_max, ..TargetOptions::default() },
        options.security(),
        Arc::new(SteadyClock),
        unguessable(),
    );
    target.add(EXPORT, Arc::new(Unpacker::new(device(options.get("--device")?)?)), None)?;
    let addresses = LinkAddress::list(options.get("--listen")?)?;
    let receivers = options.get("--receivers").map_or(Ok(1), str::parse)?;
    let _listener = Listener::new(target, &addresses, receivers)?;
    println!("ready");
    std::io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}

/// What all requests of a load share.
struct Load {
    device: RemoteDevice,
    operation: Operation,
    bytes: u64,
    ranges: u64,
    next: AtomicU64,
    done: AtomicU64,
    failure_count: AtomicU64,
    stops: AtomicBool,
    under_way: AtomicUsize,
    end_sender: mpsc::Sender<()>,
}

impl Load {
    fn submit(&self, exchange: Box<RepeatExchange>) {
        let address = self.next.fetch_add(1, Relaxed) % self.ranges * self.bytes;
        self.device.submit(Request::new(
            self.operation,
            address,
            self.bytes,
            Flags::default(),
            exchange,
        ));
    }
}

/// One request, over and over.
struct RepeatExchange {
    load: Arc<Load>,
    buffer: Vec<u8>,
}

impl Exchange for RepeatExchange {
    fn fill(&mut self, offset: u64, into: &mut [u8]) {
        let start = offset as usize;
        into.copy_from_slice(&self.buffer[start..start + into.len()]);
    }

    fn buffer(&mut self) -> &mut [u8] {
        &mut self.buffer
    }

    fn complete(self: Box<Self>, outcome: Outcome) {
        let load = Arc::clone(&self.load);
        load.done.fetch_add(1, Relaxed);
        load.failure_count.fetch_add(u64::from(outcome.is_err()), Relaxed);
        if !load.stops.load(Relaxed) {
            load.submit(self);
        } else if load.under_way.fetch_sub(1, Relaxed) == 1 {
            // The receiver is gone only if the process ends.
            let _ = load.end_sender.send(());
        }
    }
}

fn cpu_s() -> f64 {
    let spent = clock_gettime(ClockId::ProcessCPUTime);
    spent.tv_sec as f64 + spent.tv_nsec as f64 / 1e9
}

fn load(options: &Options) -> Result<()> {
    let addresses = LinkAddress::list(options.get("--to")?)?;
    let operation = match options.get("--op")? {
        "read" => Operation::Read,
        "write" => Operation::Write,
        _ => return Err("--op is read or write".into()),
    };
    let (bytes, depth): (u64, usize) = (options.number("--bytes")?, options.number("--depth")?);
    let seconds = Duration::from_secs_f64(options.number("--seconds")?);
    let spin_time_max = options.spin_time_max()?;
    let limits = InitiatorOptions { spin_time_max, ..InitiatorOptions::default() };
    let clock = Arc::new(SteadyClock);
    let initiator =
        Initiator::new(limits, options.security(), addresses.len(), clock, unguessable());
    let attached = InitiatorThreads::new(initiator, &addresses)?;
    let initiator = attached.initiator();
    // Several loads may run at once.
    let mode = OpenMode { shared: true, ..OpenMode::default() };
    let answer = initiator.request_open(EXPORT, mode).wait(ANSWER_TIME_MAX)?;
    let device = initiator.opened(EXPORT, mode, &answer)?;
    let all_open = Instant::now() + ANSWER_TIME_MAX;
    while initiator.status().links.iter().any(|link| !link.open) {
        if Instant::now() > all_open {
            return Err("a link does not open".into());
        }
        thread::sleep(Duration::from_millis(5));
    }
    let ranges = device.geometry().size_bytes / bytes;
    let (end_sender, end) = mpsc::channel();
    let load = Arc::new(Load {
        device,
        operation,
        bytes,
        ranges,
        next: 0.into(),
        done: 0.into(),
        failure_count: 0.into(),
        stops: false.into(),
        under_way: depth.into(),
        end_sender,
    });
    for _ in 0..depth {
        load.submit(Box::new(RepeatExchange {
            load: Arc::clone(&load),
            buffer: vec![0x5A; bytes as usize],
        }));
    }
    thread::sleep((seconds / 4).min(Duration::from_millis(300)));
    println!("begin");
    std::io::stdout().flush()?;
    let (began, done_before, cpu) = (Instant::now(), load.done.load(Relaxed), cpu_s());
    thread::sleep(seconds);
    let (took_s, requests) = (began.elapsed().as_secs_f64(), load.done.load(Relaxed) - done_before);
    let (spent_s, status) = (cpu_s() - cpu, initiator.status());
    load.stops.store(true, Relaxed);
    println!("{}", report(took_s, requests, spent_s, load.failure_count.load(Relaxed), &status));
    end.recv_timeout(ANSWER_TIME_MAX)?;
    Ok(())
}

fn report(
    took_s: f64,
    requests: u64,
    cpu_s: f64,
    failures: u64,
    status: &ConnectionStatus,
) -> String {
    let links: Vec<String> = status.links.iter().map(of_link).collect();
    let all = format!(
        r#""seconds": {took_s}, "requests": {requests}, "cpu_s": {cpu_s}, "failed": {failures}"#
    );
    format!(r#"{{{all}, "links": [{}]}}"#, links.join(", "))
}

fn of_link(link: &LinkStatus) -> String {
    let numbers = [
        ("packets", link.sent.packets),
        ("bytes", link.sent.bytes),
        ("lost", link.sent.lost),
        ("timeouts", link.sent.timeouts),
        ("rtt_us", link.rtt_us),
        ("window_bytes", link.window_bytes as u64),
        ("packet_bytes", link.packet_bytes as u64),
    ];
    let fields: Vec<String> =
        numbers.iter().map(|(name, number)| format!(r#""{name}": {number}"#)).collect();
    format!("{{{}}}", fields.join(", "))
}
