//! Facts about doors of other processes: vhost-user frontends, FUSE mounts, packets of a mount
//! holder.
//!
//! Invariants: a door takes over from any facts, hands over the same facts again and serves, or
//! reports why it cannot. A mount is taken over only where it was asked for.
//!
//! Not here: how pieces travel, and taking over an NBD server (`hand_over`); ublk devices, whose
//! facts are a number and a name.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use sawmill_device::MemoryDevice;
use sawmill_frontend::fuzzing;
use sawmill_frontend::vhost::{VhostDoor, VhostOptions};
use sawmill_frontend::{Door, DoorPiece, Stop};

use crate::nbd::no_thread_panicked;

/// Small, so that many of them cost little.
const DEVICE_BYTES: u64 = 64 << 10;
/// The size of each file behind a region.
const REGION_BYTES: u64 = 64 << 10;
/// The mount that the FUSE door asks for; nothing is mounted there.
const MOUNTPOINT: &str = "/proc";

type DoorFacts = BTreeMap<String, String>;

/// A line for each fact: its name, a blank, its value.
pub(crate) fn run(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    let facts: DoorFacts = text
        .lines()
        .filter_map(|line| line.split_once(' '))
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect();
    fuse(&facts);
    vhost(&facts);
    no_thread_panicked();
}

fn fuse(facts: &DoorFacts) {
    let kernel = File::open("/dev/null").expect("it is there").into();
    let piece = DoorPiece { facts: facts.clone(), ..piece("fuse", vec![kernel]) };
    fuzzing::fuse_hand_over(Path::new(MOUNTPOINT), "disk", piece);
}

fn piece(what: &str, descriptors: Vec<OwnedFd>) -> DoorPiece {
    DoorPiece { what: what.to_owned(), descriptors, ..DoorPiece::default() }
}

fn vhost(facts: &DoorFacts) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("vhost.sock");
    let Some((door, handed_facts)) = take_over(&path, facts) else { return };
    drop(door);
    let again = take_over(&path, &handed_facts).map(|(_, again)| again);
    assert_eq!(again, Some(handed_facts), "what a door hands over is taken over as the same");
}

/// A door that has taken over from these facts and serves, and the facts that it hands over.
fn take_over(path: &PathBuf, facts: &DoorFacts) -> Option<(VhostDoor, DoorFacts)> {
    let _ = std::fs::remove_file(path);
    let listener = UnixListener::bind(path).expect("the path is free");
    let (frontend, socket) = UnixStream::pair().expect("a socket");
    let descriptors = std::iter::once(socket.into()).chain(files(facts)).collect();
    let session = DoorPiece { facts: facts.clone(), ..piece("frontend", descriptors) };
    let pieces = vec![piece("listener", vec![listener.into()]), session];
    let device = Arc::new(MemoryDevice::new(DEVICE_BYTES));
    let (door, quiet) =
        VhostDoor::take_over(VhostOptions::new(path.clone()), device, pieces).ok()?;
    let mut handed = quiet.hand_over().expect("it is quiet");
    quiet.resume();
    drop(frontend);
    door.stop(Stop::Now);
    Some((door, handed.pop().expect("the frontend's piece").facts))
}

/// The descriptors behind the connection that these facts name, in the order of `hand_over`.
fn files(facts: &DoorFacts) -> Vec<OwnedFd> {
    let number =
        |name: &str| facts.get(name).and_then(|text| text.parse::<u64>().ok()).unwrap_or(0);
    let event = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("an event");
    let mut files: Vec<_> = (0..number("regions").min(8)).map(|_| memory()).collect();
    files.extend(facts.get("log").map(|_| memory()));
    files.extend(facts.get("inflight").map(|_| memory()));
    files.extend(facts.get("backend_channel").map(|_| event()));
    for queue in 0..number("queues").min(16) {
        let names = ["kick", "call", "error"].map(|event| format!("queue.{queue}.{event}"));
        files.extend(names.iter().filter(|name| facts.contains_key(*name)).map(|_| event()));
    }
    files
}

/// The memory of a guest. As an in-flight region it has one queue of 16 entries.
fn memory() -> OwnedFd {
    let memory = memfd_create("guest", MemfdFlags::CLOEXEC).expect("memory");
    ftruncate(&memory, REGION_BYTES).expect("memory");
    let version_and_entries = [1, 0, 16, 0];
    rustix::io::pwrite(&memory, &version_and_entries, 8).expect("memory");
    memory
}

/// A packet on a mount holder's socket. The first byte is the number of its descriptors.
pub(crate) fn mount_holder(bytes: &[u8]) {
    let Some((count, bytes)) = bytes.split_first() else { return };
    let file = || -> OwnedFd { File::open("/dev/null").expect("it is there").into() };
    fuzzing::mount_holder_packet(bytes, (0..count % 8).map(|_| file()).collect());
}
