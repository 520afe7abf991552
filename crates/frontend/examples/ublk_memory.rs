//! A ublk server without a volume, for tests and measurements: devices in memory, or that keep
//! nothing.
//!
//! It prints `ready NODE...` on one line once all devices can be opened, and ends when its standard
//! input ends or a command arrives: `stop` removes the devices, `leave` releases them to the next
//! server, `swap` releases them and takes them over itself, `drain` shows that they can quiesce and
//! resume, `counts` prints the counters. Run it without arguments for the options.

use std::fs::File;
use std::io::BufRead;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit};
use sawmill_device::{
    BlockDevice, Error, ErrorKind, Geometry, MemoryDevice, NullDevice, Operation, Operations,
    Reply, Request, Result,
};
use sawmill_frontend::ublk::{self, UblkDoor, UblkOptions, UblkWorkers};
use sawmill_frontend::{Door, QuietDoor, Stop};

const USAGE: &str = "\
ublk_memory [--null] [--size MIB] [--devices N] [--workers N] [--queues N] [--depth N] [--id ID] \
[--link]
            [--recover ID] [--first N] [--file PATH] [--run FOLDER]
            [--unpinned] [--unprivileged]                                  serve devices
ublk_memory list [--run FOLDER]                                        print all ublk devices
ublk_memory delete ID [--run FOLDER]                                   remove one that nobody serves
ublk_memory sweep [--run FOLDER]                                       remove all that nobody serves
";

#[derive(Default)]
struct Arguments {
    null: bool,
    size_mib: Option<u64>,
    devices: Option<u32>,
    workers: Option<usize>,
    queues: Option<u16>,
    depth: Option<u16>,
    id: Option<u32>,
    link: bool,
    recover: Option<u32>,
    first: Option<u32>,
    file: Option<PathBuf>,
    run: Option<PathBuf>,
    unpinned: bool,
    unprivileged: bool,
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let Err(error) = run(&arguments) {
        eprintln!("ublk_memory: {error}");
        std::process::exit(1);
    }
}

fn wrong(text: String) -> Error {
    Error::new(ErrorKind::Invalid, text)
}

fn run(arguments: &[String]) -> Result<()> {
    let (parsed, words) = parse(arguments)?;
    let defaults = UblkOptions::new("none");
    let run_folder = parsed.run.clone().unwrap_or(defaults.run_folder);
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words[..] {
        [] if arguments.is_empty() => {
            print!("{USAGE}");
            Ok(())
        }
        [] => serve(&parsed, run_folder),
        ["list"] => {
            ublk::devices(&run_folder)?.iter().for_each(|device| println!("{device:?}"));
            Ok(())
        }
        ["delete", id] => {
            let id = id.parse().map_err(|_| wrong(format!("{id:?} is not a number")))?;
            ublk::delete(&run_folder, &defaults.symlink_folder, id)
        }
        ["sweep"] => {
            for device in
                ublk::devices(&run_folder)?.into_iter().filter(ublk::DeviceInfo::is_orphan)
            {
                ublk::delete(&run_folder, &defaults.symlink_folder, device.id)?;
                println!("deleted {}", device.id);
            }
            Ok(())
        }
        _ => Err(wrong(format!("{words:?} is not understood\n{USAGE}"))),
    }
}

fn parse(arguments: &[String]) -> Result<(Arguments, Vec<String>)> {
    let mut parsed = Arguments::default();
    let mut words = Vec::new();
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        let mut value = || rest.next().ok_or_else(|| wrong(format!("{argument} wants a value")));
        match argument.as_str() {
            "--null" => parsed.null = true,
            "--link" => parsed.link = true,
            "--unprivileged" => parsed.unprivileged = true,
            "--unpinned" => parsed.unpinned = true,
            "--size" => parsed.size_mib = Some(number(value()?)?),
            "--devices" => parsed.devices = Some(number(value()?)?),
            "--workers" => parsed.workers = Some(number(value()?)?),
            "--queues" => parsed.queues = Some(number(value()?)?),
            "--depth" => parsed.depth = Some(number(value()?)?),
            "--id" => parsed.id = Some(number(value()?)?),
            "--recover" => parsed.recover = Some(number(value()?)?),
            "--first" => parsed.first = Some(number(value()?)?),
            "--file" => parsed.file = Some(value()?.into()),
            "--run" => parsed.run = Some(value()?.into()),
            word if !word.starts_with('-') => words.push(word.to_owned()),
            other => return Err(wrong(format!("{other} is not understood\n{USAGE}"))),
        }
    }
    Ok((parsed, words))
}

fn number<T: std::str::FromStr>(text: &str) -> Result<T> {
    text.parse().map_err(|_| wrong(format!("{text:?} is not a number in range")))
}

fn serve(parsed: &Arguments, run_folder: PathBuf) -> Result<()> {
    let size_bytes = parsed.size_mib.unwrap_or(256) << 20;
    allow_many_files();
    let workers = parsed.workers.map(UblkWorkers::start).transpose()?;
    let began = Instant::now();
    let mut devices = Vec::new();
    for n in 0..parsed.devices.unwrap_or(1) {
        let device: Arc<dyn BlockDevice> = match &parsed.file {
            Some(path) => Arc::new(FileDevice::open(path, n, size_bytes)?),
            None if parsed.null => Arc::new(NullDevice::new(size_bytes)),
            None => Arc::new(MemoryDevice::new(size_bytes)),
        };
        let mut options = UblkOptions::new(format!("memory {}", parsed.first.unwrap_or(0) + n));
        options.id = parsed.id.map(|id| id + n);
        options.symlink = parsed.link.then(|| format!("memory{n}"));
        options.queues = parsed.queues;
        options.queue_depth = parsed.depth.unwrap_or(options.queue_depth);
        options.workers = workers.clone();
        options.pin = !parsed.unpinned;
        options.unprivileged = parsed.unprivileged;
        options.run_folder = run_folder.clone();
        let door = match parsed.recover {
            Some(id) => UblkDoor::recover(id + n, options.clone(), device.clone())?,
            None => UblkDoor::start(options.clone(), device.clone())?,
        };
        devices.push(OpenDevice { door, options, device });
    }
    let nodes: Vec<String> = devices.iter().map(|device| device.door.address()).collect();
    eprintln!("{} devices in {} ms", devices.len(), began.elapsed().as_millis());
    println!("ready {}", nodes.join(" "));
    listen(&mut devices)
}

/// A device, and what is needed to take it over again.
struct OpenDevice {
    door: UblkDoor,
    options: UblkOptions,
    device: Arc<dyn BlockDevice>,
}

fn quiesce(devices: &[OpenDevice]) -> Result<Vec<Box<dyn QuietDoor>>> {
    devices.iter().map(|device| device.door.quiesce(Duration::from_secs(10))).collect()
}

/// Gives every device to a server in the same process, and prints how long users had to wait.
fn swap(devices: &mut [OpenDevice]) -> Result<()> {
    let began = Instant::now();
    let doors = quiesce(devices)?;
    let quiesce_time = began.elapsed();
    doors.into_iter().for_each(|door| door.release());
    let release_time = began.elapsed();
    for OpenDevice { door, options, device } in devices {
        *door = UblkDoor::recover(door.id(), options.clone(), device.clone())?;
    }
    let takeover_time = began.elapsed();
    let ms = |time: Duration| time.as_millis();
    println!(
        "swapped: quiet {} ms, let go {} ms, taken over {} ms",
        ms(quiesce_time),
        ms(release_time),
        ms(takeover_time)
    );
    Ok(())
}

/// Each device takes two descriptors: more than a process has by default, for hundreds of devices.
fn allow_many_files() {
    let limit = rustix::process::getrlimit(Resource::Nofile);
    let _ =
        rustix::process::setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}

/// Executes the commands on standard input until one of them ends the server, or the input ends.
fn listen(devices: &mut [OpenDevice]) -> Result<()> {
    for line in std::io::stdin().lock().lines().map_while(std::io::Result::ok) {
        match line.trim() {
            "stop" => break,
            "drain" => {
                quiesce(devices)?.into_iter().for_each(|door| door.resume());
                println!("drained");
            }
            "swap" => swap(devices)?,
            "leave" => {
                quiesce(devices)?.into_iter().for_each(|door| door.release());
                println!("left");
                return Ok(());
            }
            "counts" => devices.iter().for_each(|device| println!("{:?}", device.door.counts())),
            other => println!("{other:?} is not understood"),
        }
    }
    let began = Instant::now();
    devices.iter().for_each(|device| device.door.stop(Stop::Drained));
    eprintln!("stopped in {} ms", began.elapsed().as_millis());
    Ok(())
}

/// A device in a file: written data survive the death of this process, but not of the machine.
struct FileDevice {
    file: File,
    geometry: Geometry,
}

impl FileDevice {
    fn open(path: &Path, number: u32, size_bytes: u64) -> Result<Self> {
        let path = PathBuf::from(format!("{}.{number}", path.display()));
        let mut options = File::options();
        let file = options.read(true).write(true).create(true).truncate(false).open(&path);
        let file = file.and_then(|file| file.set_len(size_bytes).map(|()| file));
        let what = path.display().to_string();
        let file = file.map_err(|error| Error::caused(ErrorKind::of_io(&error), what, error))?;
        let operations = Operations { discard: true, write_zeroes: true, allocation: false };
        let geometry = Geometry { operations, ..MemoryDevice::new(size_bytes).geometry() };
        Ok(FileDevice { file, geometry })
    }

    fn carry_out(&self, request: &mut Request) -> std::io::Result<()> {
        let (address, length) = (request.address, request.length);
        match request.operation {
            Operation::Read => self.file.read_exact_at(request.buffer(), address),
            Operation::Write => {
                let mut bytes = vec![0; length as usize];
                request.fill(0, &mut bytes);
                self.file.write_all_at(&bytes, address)
            }
            Operation::WriteZeroes => {
                let zeroes = vec![0; 1 << 20];
                let (mut at, end) = (address, address + length);
                while at < end {
                    let part = (end - at).min(zeroes.len() as u64);
                    self.file.write_all_at(&zeroes[..part as usize], at)?;
                    at += part;
                }
                Ok(())
            }
            Operation::Flush | Operation::Discard | Operation::Prefetch | Operation::Allocation => {
                Ok(())
            }
        }
    }
}

impl BlockDevice for FileDevice {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn submit(&self, mut request: Request) {
        if let Err(error) = request.check(&self.geometry) {
            return request.fail(error);
        }
        match self.carry_out(&mut request) {
            Ok(()) => request.complete(Ok(Reply::Done)),
            Err(error) => {
                let kind = ErrorKind::of_io(&error);
                request.fail(Error::caused(kind, "the file failed", error));
            }
        }
    }
}
