//! Both ends of a link for `bench/soak.py`: a target with disks, and users that know every byte of
//! them.
//!
//!     link_soak target --listen udp:10.98.0.1,tcp:10.98.0.1 --exports a,b,c,d --bytes 8388608
//!         --silence-s 20
//!     link_soak load --udp udp:10.98.0.1 --tcp tcp:10.98.0.1 --exports a,b,c,d --bytes 8388608
//!         --rate 2000 --seed 1
//!
//! Each prints `"ready"` and then answers each line of its input with a line of JSON. The target
//! accepts `restart` (replaces everything but the disks) and `rest`; the load accepts
//! `run SECONDS`, `verify`, `attach` (replaces its connections) and `rest`. Both end with their
//! input. They have the key in this file: only for measurements.
//!
//! Not here: faults, samples, the verdict (`bench/soak.py`).

mod disk;
mod load;
mod worker;

use std::collections::HashMap;
use std::error::Error;
use std::io::{BufRead, Write};
use std::sync::Arc;

use sawmill_link::Unpacker;
use sawmill_link::carrier::LinkAddress;
use sawmill_link::clock::SteadyClock;
use sawmill_link::session::{PreSharedKey, Security, unguessable};
use sawmill_link::target::{Target, TargetOptions};
use sawmill_link::threads::Listener;
use sawmill_sys::CountingAllocator;

use disk::Disk;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

fn main() -> Result<()> {
    let mut words = std::env::args().skip(1);
    let command = words.next().unwrap_or_default();
    let mut options = HashMap::new();
    while let Some(name) = words.next() {
        options.insert(name, words.next().unwrap_or_default());
    }
    let options = Options(options);
    match command.as_str() {
        "target" => target(&options),
        "load" => load::load(&options),
        _ => Err("link_soak target | load; its source says more".into()),
    }
}

struct Options(HashMap<String, String>);

impl Options {
    fn get(&self, name: &str) -> Result<&str> {
        Ok(self.0.get(name).ok_or_else(|| format!("{name} is missing"))?)
    }

    fn number<T: std::str::FromStr<Err: Error + 'static>>(&self, name: &str) -> Result<T> {
        Ok(self.get(name)?.parse()?)
    }

    fn exports(&self) -> Result<Vec<String>> {
        Ok(self.get("--exports")?.split(',').map(str::to_owned).collect())
    }
}

fn key() -> Security {
    Security::Key(PreSharedKey::from_bytes([7; 32]))
}

/// Prints a line for the script that runs us. When it no longer reads, our input ends too.
fn print_line(line: &str) {
    let mut out = std::io::stdout().lock();
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}

fn target(options: &Options) -> Result<()> {
    let addresses = LinkAddress::list(options.get("--listen")?)?;
    let size_bytes = options.number("--bytes")?;
    let silence_max_s = options.number("--silence-s")?;
    let exports = options.exports()?;
    let disks: Vec<_> =
        exports.into_iter().map(|name| (name, Arc::new(Disk::new(size_bytes)))).collect();
    let listen = || -> Result<Listener> {
        let limits = TargetOptions { silence_max_s, ..TargetOptions::default() };
        let target = Target::new(limits, key(), Arc::new(SteadyClock), unguessable());
        for (name, disk) in &disks {
            // The disks outlive the target, and keep what was not flushed.
            target.add(name, Arc::new(Unpacker::new(Arc::clone(disk))), Some([1; 16]))?;
        }
        Ok(Listener::new(target, &addresses, 1)?)
    };
    let mut listener = Some(listen()?);
    print_line("\"ready\"");
    for line in std::io::stdin().lock().lines() {
        match line?.as_str() {
            "restart" => {
                drop(listener.take());
                listener = Some(listen()?);
                print_line("\"done\"");
            }
            "rest" => {
                let connections = listener.as_ref().map_or(0, |each| each.target().status().len());
                let bytes = CountingAllocator::bytes_in_use();
                print_line(&format!(
                    "{{\"bytes_in_use\": {bytes}, \"connections\": {connections}}}"
                ));
            }
            other => return Err(format!("what is {other:?}?").into()),
        }
    }
    Ok(())
}
