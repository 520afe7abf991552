//! Serves a file's bytes through FUSE, on threads of its own that answer late: shows how a server's
//! death and a hand-off affect users of the door.
//!
//! `fuse_memory BYTES_FILE SIZE MOUNTPOINT [--loop] [--mount-holder SOCKET] [--standby]` shows
//! `MOUNTPOINT/disk` and prints its address. `--standby` waits for a line on its input before it
//! opens the door. Then it reads commands: `let-go` ends and leaves the mount to the mount holder,
//! printing how long it took to quiesce; `counts` prints the counters; `stop`, or the end of the
//! input, stops. `fuse_memory keep` is the mount holder.

use std::fs::{File, OpenOptions};
use std::io::BufRead;
use std::os::unix::fs::FileExt;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::fs::{FallocateFlags, fallocate};
use sawmill_device::{
    Allocation, BlockDevice, Error, ErrorKind, Geometry, Operation, Outcome, Reply, Request,
};
use sawmill_frontend::fuse::{FuseDoor, FuseOptions, MountHolderOptions};
use sawmill_frontend::{Door, Stop};

const THREADS: usize = 3;

/// Bytes in a file: they outlive the process as long as the machine runs.
struct FileDevice {
    geometry: Geometry,
    queue: Mutex<Sender<Request>>,
}

impl FileDevice {
    fn open(path: &str, size_bytes: u64) -> std::io::Result<Self> {
        let file =
            OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)?;
        file.set_len(size_bytes)?;
        let geometry = Geometry::of_size(size_bytes);
        let (queue, receiver) = channel();
        let (receiver, file) = (Arc::new(Mutex::new(receiver)), Arc::new(file));
        for _ in 0..THREADS {
            let (receiver, file) = (receiver.clone(), file.clone());
            std::thread::spawn(move || carry_out_all(&receiver, &file));
        }
        Ok(FileDevice { geometry, queue: Mutex::new(queue) })
    }
}

impl BlockDevice for FileDevice {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn submit(&self, request: Request) {
        if let Err(error) = request.check(&self.geometry) {
            return request.fail(error);
        }
        if let Ok(queue) = self.queue.lock() {
            // A request that cannot be sent answers itself.
            let _ = queue.send(request);
        }
    }
}

fn carry_out_all(receiver: &Mutex<Receiver<Request>>, file: &File) {
    loop {
        let next = receiver.lock().map(|receiver| receiver.recv());
        let Ok(Ok(mut request)) = next else { return };
        let outcome = carry_out(&mut request, file);
        request.complete(outcome);
    }
}

fn carry_out(request: &mut Request, file: &File) -> Outcome {
    let (address, length) = (request.address, request.length);
    let failed =
        |error: std::io::Error| Error::caused(ErrorKind::of_io(&error), "the file failed", error);
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    match request.operation {
        Operation::Read => file.read_exact_at(request.buffer(), address).map_err(failed)?,
        Operation::Write => {
            let mut bytes = vec![0; length as usize];
            request.fill(0, &mut bytes);
            file.write_all_at(&bytes, address).map_err(failed)?;
        }
        Operation::Discard | Operation::WriteZeroes => {
            fallocate(file, punch, address, length).map_err(|error| failed(error.into()))?;
        }
        Operation::Allocation => {
            return Ok(Reply::Allocation(vec![Allocation { length, data: true }]));
        }
        Operation::Flush | Operation::Prefetch => (),
    }
    Ok(Reply::Done)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if arguments.first().is_some_and(|first| first == "keep") {
        return Ok(sawmill_frontend::mount_holder::keep()?);
    }
    let [bytes, size, mountpoint, rest @ ..] = arguments.as_slice() else {
        return Err(
            "usage: fuse_memory BYTES_FILE SIZE MOUNTPOINT [--loop] [--mount-holder SOCKET] \
            [--standby]"
                .into(),
        );
    };
    let device = Arc::new(FileDevice::open(bytes, size.parse()?)?);
    let mut options = FuseOptions::new(mountpoint, "disk");
    options.attach_loop = rest.iter().any(|word| word == "--loop");
    if let Some(at) = rest.iter().position(|word| word == "--mount-holder") {
        let socket = rest.get(at + 1).ok_or("--mount-holder needs a socket's path")?.into();
        let command = vec![std::env::current_exe()?.into(), "keep".into()];
        options.mount_holder = Some(MountHolderOptions { socket, command });
    }
    let mut lines = std::io::stdin().lock().lines();
    if rest.iter().any(|word| word == "--standby") {
        println!("standing by");
        lines.next().transpose()?;
    }
    let began = Instant::now();
    let door = FuseDoor::mount(options, device)?;
    println!("{}", door.address());
    eprintln!("open after {:?}", began.elapsed());
    while let Some(line) = lines.next().transpose()? {
        match line.as_str() {
            "let-go" => {
                let began = Instant::now();
                door.quiesce(Duration::from_secs(5))?.release();
                println!("let go after {:?}", began.elapsed());
                return Ok(());
            }
            "counts" => println!("{:?}", door.metrics()),
            "stop" => break,
            other => println!("unknown: {other}"),
        }
    }
    door.stop(Stop::Drained);
    println!("stopped");
    Ok(())
}
