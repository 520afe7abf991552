//! The initiators' side of the soak: a connection by UDP and one by TCP, each with two devices, and
//! workers that use them when told to.
//!
//! Invariant: at rest there are no workers' threads and no requests, so all that is counted then
//! belongs to the link. Not here: what a worker does (`worker`), when (`bench/soak.py`).

use std::io::BufRead;
use std::thread;
use std::time::{Duration, Instant};

use sawmill_device::ErrorKind;
use sawmill_link::carrier::LinkAddress;
use sawmill_link::clock::SteadyClock;
use sawmill_link::initiator::{Initiator, InitiatorOptions, OpenMode, RemoteDevice};
use sawmill_link::session::unguessable;
use sawmill_link::threads::InitiatorThreads;
use sawmill_sys::CountingAllocator;

use crate::worker::{Counts, Worker};
use crate::{Options, Result, key, print_line};

const ANSWER_TIME_MAX: Duration = Duration::from_secs(60);
/// Workers of one device.
const WORKERS: u64 = 4;
/// Few and small, so that requests wait for places.
const PLACES: u16 = 8;
const PLACE_BYTES: u32 = 32 << 10;

/// One connection and its devices.
struct LinkAttachment {
    // Dropped in this order.
    devices: Vec<RemoteDevice>,
    attached: InitiatorThreads,
}

struct Load {
    attachments: Vec<LinkAttachment>,
    addresses: Vec<Vec<LinkAddress>>,
    exports: Vec<Vec<String>>,
    /// By connection, device, worker.
    workers: Vec<Vec<Vec<Worker>>>,
    every: Duration,
}

impl LinkAttachment {
    fn new(addresses: &[LinkAddress], exports: &[String]) -> Result<Self> {
        let options = InitiatorOptions {
            name: "soak".into(),
            places: PLACES,
            place_bytes: PLACE_BYTES,
            ..InitiatorOptions::default()
        };
        let clock = std::sync::Arc::new(SteadyClock);
        let initiator = Initiator::new(options, key(), addresses.len(), clock, unguessable());
        let attached = InitiatorThreads::new(initiator, addresses)?;
        let devices =
            exports.iter().map(|export| open(&attached, export)).collect::<Result<_>>()?;
        Ok(LinkAttachment { devices, attached })
    }

    /// Waits until all links and places are back after a fault.
    fn wait_for_links(&self) -> Result<()> {
        let most = Instant::now() + ANSWER_TIME_MAX;
        loop {
            let status = self.attached.initiator().status();
            let calm =
                status.connected && status.pending == 0 && status.places_free == status.places;
            if calm && status.links.iter().all(|link| link.open && !link.silent) {
                return Ok(());
            }
            if Instant::now() > most {
                return Err(format!("links or places do not come back: {status:?}").into());
            }
            thread::sleep(Duration::from_millis(20));
        }
    }
}

fn open(attached: &InitiatorThreads, export: &str) -> Result<RemoteDevice> {
    let (mode, most) = (OpenMode::default(), Instant::now() + ANSWER_TIME_MAX);
    loop {
        let initiator = attached.initiator();
        match initiator.request_open(export, mode).wait(ANSWER_TIME_MAX) {
            Ok(answer) => return Ok(initiator.opened(export, mode, &answer)?),
            // The connection that we closed still has it, because the close may have been lost.
            Err(error) if error.kind() == ErrorKind::InUse && Instant::now() < most => {
                thread::sleep(Duration::from_millis(200));
            }
            Err(error) => return Err(error.into()),
        }
    }
}

pub(crate) fn load(options: &Options) -> Result<()> {
    let addresses = [options.get("--udp")?, options.get("--tcp")?].map(LinkAddress::list);
    let addresses = addresses.into_iter().collect::<std::result::Result<Vec<_>, _>>()?;
    let (bytes, rate): (u64, f64) = (options.number("--bytes")?, options.number("--rate")?);
    let exports: Vec<String> = options.exports()?;
    let exports: Vec<Vec<String>> = exports.chunks(2).map(<[String]>::to_vec).collect();
    let region = bytes / WORKERS;
    let seed: u64 = options.number("--seed")?;
    let of_device =
        |device: u64| (0..WORKERS).map(move |each| (seed ^ (device * WORKERS + each), each));
    let workers_of = |device| {
        of_device(device)
            .map(|(seed, each)| Worker::new(seed, each * region, region))
            .collect::<Vec<_>>()
    };
    let workers: Vec<Vec<Vec<Worker>>> = (0..exports.len() as u64)
        .map(|connection| (0..2).map(|device| workers_of(connection * 2 + device)).collect())
        .collect();
    let count = (exports.len() as u64 * 2 * WORKERS) as f64;
    let every = Duration::from_secs_f64(count / rate);
    let mut load = Load { attachments: Vec::new(), addresses, exports, workers, every };
    load.attach()?;
    print_line("\"ready\"");
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        match line.split_whitespace().collect::<Vec<_>>()[..] {
            ["run", seconds] => load.run(Duration::from_secs_f64(seconds.parse()?)),
            ["verify"] => load.each(Worker::verify),
            ["attach"] => load.attach()?,
            ["rest"] => {
                load.attachments.iter().try_for_each(LinkAttachment::wait_for_links)?;
                print_line(&load.report());
                load.workers
                    .iter_mut()
                    .flatten()
                    .flatten()
                    .for_each(|worker| worker.counts.longest_us = 0);
                continue;
            }
            _ => return Err(format!("what is {line:?}?").into()),
        }
        print_line("\"done\"");
    }
    Ok(())
}

impl Load {
    /// Ends the existing connections, and makes new ones.
    fn attach(&mut self) -> Result<()> {
        self.attachments.clear();
        for (addresses, exports) in self.addresses.iter().zip(&self.exports) {
            self.attachments.push(LinkAttachment::new(addresses, exports)?);
        }
        Ok(())
    }

    fn run(&mut self, long: Duration) {
        let every = self.every;
        self.each(move |worker, device| worker.run(device, every, long));
    }

    /// Runs `what` on every worker, all at the same time.
    fn each(&mut self, what: impl Fn(&mut Worker, &RemoteDevice) + Sync) {
        thread::scope(|scope| {
            for (attachment, workers_of_devices) in self.attachments.iter().zip(&mut self.workers) {
                for (device, workers) in attachment.devices.iter().zip(workers_of_devices) {
                    for worker in workers {
                        scope.spawn(|| what(worker, device));
                    }
                }
            }
        });
    }

    fn report(&self) -> String {
        let mut sum = Counts::default();
        self.workers.iter().flatten().flatten().for_each(|worker| sum.add(&worker.counts));
        let status: Vec<_> = self
            .attachments
            .iter()
            .map(|attachment| attachment.attached.initiator().status())
            .collect();
        let places: usize = status.iter().map(|each| each.places).sum();
        let free: usize = status.iter().map(|each| each.places_free).sum();
        let pending: usize = status.iter().map(|each| each.pending).sum();
        let numbers = [
            ("bytes_in_use", CountingAllocator::bytes_in_use()),
            ("places", places as u64),
            ("places_free", free as u64),
            ("pending", pending as u64),
            ("reads", sum.reads),
            ("writes", sum.writes),
            ("packed", sum.packed),
            ("discards", sum.discards),
            ("zeroes", sum.zeroes),
            ("flushes", sum.flushes),
            ("bytes", sum.bytes),
            ("mismatches", sum.mismatches),
            ("errors", sum.errors),
            ("longest_us", sum.longest_us),
        ];
        let fields: Vec<String> =
            numbers.iter().map(|(name, number)| format!("\"{name}\": {number}")).collect();
        format!("{{{}}}", fields.join(", "))
    }
}
