//! Serves a disk over vhost-user-blk on a Unix socket: what the door itself costs, and what it
//! survives.
//!
//! `vhost_memory SOCKET` serves a GiB of memory until its standard input ends. `vhost_memory SOCKET
//! FILE` serves a file that exists, through the page cache, by four threads: what is written
//! survives `kill -9`. With a third word, the path of a control socket, another such process may
//! take over: it says `vhost_memory SOCKET FILE CONTROL take-over`, and from then on it is the one
//! to take over from.

use std::fs::File;
use std::io::{IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::fs::{FallocateFlags, fallocate};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use sawmill_device::{
    BlockDevice, Error, ErrorKind, Geometry, MemoryDevice, Operation, Operations, Request,
};
use sawmill_frontend::vhost::{VhostDoor, VhostOptions};
use sawmill_frontend::{Door, Handed, Stop};

const SIZE_BYTES: u64 = 1 << 30;
const THREADS: usize = 4;
/// Descriptors of one piece.
const DESCRIPTORS_MAX: usize = 253;

type Fallible<T> = Result<T, Box<dyn std::error::Error>>;

/// A file, by a few threads, so that requests are in flight.
struct FileDevice {
    geometry: Geometry,
    requests: Sender<Request>,
}

impl FileDevice {
    fn open(path: &Path) -> Fallible<Self> {
        let file = Arc::new(File::options().read(true).write(true).open(path)?);
        let geometry = Geometry {
            size_bytes: file.metadata()?.len(),
            block_bytes: 512,
            preferred_bytes: 64 << 10,
            request_bytes_max: 4 << 20,
            read_only: false,
            shared_cache: true,
            operations: Operations { discard: true, write_zeroes: true, allocation: false },
        };
        let (requests, work) = channel();
        let work = Arc::new(Mutex::new(work));
        for _ in 0..THREADS {
            let (work, file): (Arc<Mutex<Receiver<Request>>>, _) = (work.clone(), file.clone());
            std::thread::spawn(move || {
                while let Ok(request) = { work.lock().expect("no thread panics").recv() } {
                    carry_out(&file, request);
                }
            });
        }
        Ok(FileDevice { geometry, requests })
    }
}

impl BlockDevice for FileDevice {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn submit(&self, request: Request) {
        match request.check(&self.geometry) {
            // A request that nobody takes answers itself.
            Ok(()) => drop(self.requests.send(request)),
            Err(error) => request.fail(error),
        }
    }
}

fn carry_out(file: &File, mut request: Request) {
    let (address, length) = (request.address, request.length);
    let done = match request.operation {
        Operation::Read => file.read_exact_at(request.buffer(), address),
        Operation::Write => {
            let mut bytes = vec![0; length as usize];
            request.fill(0, &mut bytes);
            let written = file.write_all_at(&bytes, address);
            if request.flags.fua { written.and_then(|()| file.sync_data()) } else { written }
        }
        Operation::Flush => file.sync_data(),
        Operation::Discard | Operation::WriteZeroes => {
            let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            fallocate(file, how, address, length).map_err(Into::into)
        }
        Operation::Prefetch | Operation::Allocation => Ok(()),
    };
    match done {
        Ok(()) => request.done(),
        Err(error) => request.fail(Error::new(ErrorKind::Unavailable, error.to_string())),
    }
}

/// A piece as one message: its facts as lines, its descriptors alongside.
fn send(stream: &UnixStream, piece: &Handed) -> Fallible<()> {
    let mut text = format!("{}\n", piece.what);
    piece.facts.iter().for_each(|(name, value)| text += &format!("{name}={value}\n"));
    let length = (text.len() as u32).to_le_bytes();
    let descriptors: Vec<_> = piece.descriptors.iter().map(AsFd::as_fd).collect();
    let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    ancillary.push(SendAncillaryMessage::ScmRights(&descriptors));
    sendmsg(stream, &[IoSlice::new(&length)], &mut ancillary, SendFlags::empty())?;
    (&mut &*stream).write_all(text.as_bytes())?;
    Ok(())
}

/// The next piece; `None` at the end.
fn receive(stream: &UnixStream) -> Fallible<Option<Handed>> {
    let mut length = [0; 4];
    let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::WAITALL;
    let received = recvmsg(stream, &mut [IoSliceMut::new(&mut length)], &mut ancillary, flags)?;
    if received.bytes == 0 {
        return Ok(None);
    }
    let mut piece = Handed::default();
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(descriptors) = message {
            piece.descriptors.extend(descriptors.collect::<Vec<OwnedFd>>());
        }
    }
    let mut text = vec![0; u32::from_le_bytes(length) as usize];
    (&mut &*stream).read_exact(&mut text)?;
    let text = String::from_utf8(text)?;
    let mut lines = text.lines();
    piece.what = lines.next().unwrap_or_default().into();
    piece
        .facts
        .extend(lines.filter_map(|line| line.split_once('=')).map(|(k, v)| (k.into(), v.into())));
    Ok(Some(piece))
}

/// Takes over from the process behind the control socket.
fn take_over(
    options: VhostOptions,
    device: Arc<dyn BlockDevice>,
    control: &Path,
) -> Fallible<VhostDoor> {
    let stream = UnixStream::connect(control)?;
    let mut pieces = Vec::new();
    while let Some(piece) = receive(&stream)? {
        pieces.push(piece);
    }
    let (door, quiet) = VhostDoor::take_over(options, device, pieces)?;
    quiet.resume();
    Ok(door)
}

/// Waits for somebody to take over, and lets go.
fn give(door: &VhostDoor, control: &UnixListener) -> Fallible<()> {
    let (stream, _) = control.accept()?;
    let start = Instant::now();
    let quiet = door.quiesce(Duration::from_secs(10))?;
    let pieces = quiet.hand_over()?;
    quiet.let_go();
    pieces.iter().try_for_each(|piece| send(&stream, piece))?;
    eprintln!("let go after {:?}", start.elapsed());
    Ok(())
}

fn main() -> Fallible<()> {
    let mut words = std::env::args_os().skip(1).map(PathBuf::from);
    let socket = words.next().ok_or("usage: vhost_memory SOCKET [FILE [CONTROL [take-over]]]")?;
    let (file, control, takes_over) = (words.next(), words.next(), words.next().is_some());
    let device: Arc<dyn BlockDevice> = match &file {
        Some(path) => Arc::new(FileDevice::open(path)?),
        None => Arc::new(MemoryDevice::new(SIZE_BYTES)),
    };
    let options = VhostOptions { serial: "sawmill-example".into(), ..VhostOptions::new(socket) };
    let door = match &control {
        Some(control) if takes_over => take_over(options, device, control)?,
        _ => VhostDoor::start(options, device)?,
    };
    println!("{}", door.address());
    match control {
        Some(control) => {
            let _ = std::fs::remove_file(&control);
            give(&door, &UnixListener::bind(control)?)?;
        }
        None => {
            std::io::stdin().read_to_end(&mut Vec::new())?;
            door.stop(Stop::Drained);
        }
    }
    eprintln!("{:#?}", door.counts());
    Ok(())
}
