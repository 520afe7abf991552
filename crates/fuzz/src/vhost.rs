//! Passes a frontend's bytes and a guest's memory to a vhost-user door over a memory device.
//!
//! Invariants: the frontend gets an answer or loses its connection; a guest's queue serves or
//! stops. Nothing hangs, no thread of the door panics, and the next frontend is served.
//!
//! Not here: descriptors that do not fit their message: a frontend's bytes come with none, a
//! guest's memory with valid ones.

use std::fs::File;
use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use sawmill_device::MemoryDevice;
use sawmill_frontend::Door;
use sawmill_frontend::vhost::{VhostDoor, VhostOptions};

use crate::nbd::{PANICKED, exchange, watch_for_panics};

const DEVICE_BYTES: u64 = 64 << 10;
/// The guest's memory: the input lies at its beginning.
const GUEST_BYTES: u64 = 64 << 10;
const QUEUE_SIZE: u16 = 16;
/// The table is at the very beginning.
const AVAILABLE_AT: usize = 0x100;
const USED_AT: u64 = 0x200;
/// A wait that ends this late is a hang.
const HANG: Duration = Duration::from_secs(60);
/// Version 1, indirect descriptors, and protocol features.
const FEATURES: u64 = 1 << 32 | 1 << 30 | 1 << 28 | 1 << 14 | 1 << 13 | 1 << 9;

struct TestDoor {
    door: VhostDoor,
    path: PathBuf,
    _folder: tempfile::TempDir,
}

thread_local! {
    static SERVED: TestDoor = {
        watch_for_panics();
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("vhost.sock");
        let device = Arc::new(MemoryDevice::new(DEVICE_BYTES));
        let door = VhostDoor::start(VhostOptions::new(path.clone()), device).expect("the door \
            opens");
        TestDoor { door, path, _folder: folder }
    };
}

/// Runs `with` on a connection, then checks that the door still serves the next one.
fn connected(with: impl Fn(&UnixStream)) {
    SERVED.with(|served| {
        let stream = UnixStream::connect(&served.path).expect("the door listens");
        stream.set_read_timeout(Some(HANG)).expect("a socket");
        with(&stream);
        assert_eq!(served.door.counts().in_flight, 0, "something was taken and never answered");
        assert!(!PANICKED.load(Ordering::SeqCst), "a thread of the door panicked");
    });
}

/// A frontend's messages, without any descriptor.
pub(crate) fn messages(bytes: &[u8]) {
    connected(|stream| drop(exchange(stream, bytes)));
    let mended = mended(bytes);
    if mended != bytes {
        connected(|stream| drop(exchange(stream, &mended)));
    }
}

/// A version in each header, and a length that keeps the headers where they were.
fn mended(bytes: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    let mut at = 0;
    while let Some(head) = bytes.get_mut(at..at + 12) {
        head[4] = head[4] & 8 | 1;
        head[5..8].fill(0);
        // Short, so that one message does not swallow all that follow.
        let length = u32::from_ne_bytes([head[8], head[9], head[10], head[11]]) % 64;
        head[8..].copy_from_slice(&length.to_ne_bytes());
        at += 12 + length as usize;
    }
    bytes
}

/// A guest's memory: table, available ring, and everything they point to.
pub(crate) fn ring(bytes: &[u8]) {
    guest(bytes);
    let mut mended = bytes.to_vec();
    if let Some(available) =
        mended.get_mut(AVAILABLE_AT..AVAILABLE_AT + 4 + 2 * usize::from(QUEUE_SIZE))
    {
        // With random numbers, the queue would end before it reads any descriptor.
        available[2] %= QUEUE_SIZE as u8 + 1;
        available[3] = 0;
        for head in available[4..].chunks_exact_mut(2) {
            (head[0], head[1]) = (head[0] % QUEUE_SIZE as u8, 0);
        }
        if mended != bytes {
            guest(&mended);
        }
    }
}

fn guest(bytes: &[u8]) {
    let memory = File::from(memfd_create("guest", MemfdFlags::CLOEXEC).expect("memory"));
    ftruncate(&memory, GUEST_BYTES).expect("memory");
    memory.write_all_at(&bytes[..bytes.len().min(GUEST_BYTES as usize)], 0).expect("memory");
    let event = || -> OwnedFd {
        eventfd(1, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("an event")
    };
    let (kick, call) = (event(), event());
    connected(|stream| {
        let none: &[BorrowedFd<'_>] = &[];
        send_message(stream, 2, &[FEATURES], none);
        // One region, at address zero for guest and frontend.
        send_message(stream, 5, &[1, 0, GUEST_BYTES, 0, 0], &[memory.as_fd()]);
        send_message(stream, 8, &[u64::from(QUEUE_SIZE) << 32], none);
        send_message(stream, 9, &[0, 0, USED_AT, AVAILABLE_AT as u64, 0], none);
        send_message(stream, 10, &[0], none);
        send_message(stream, 13, &[0], &[call.as_fd()]);
        send_message(stream, 18, &[1 << 32], none);
        send_message(stream, 12, &[0], &[kick.as_fd()]);
        // Stops the queue: the answer comes after the answers to all requests that the queue took.
        send_message(stream, 11, &[0], none);
        let mut answer = [0; 20];
        (&mut &*stream).read_exact(&mut answer).expect("the queue stops");
    });
}

/// A message with its descriptors.
fn send_message(
    stream: &UnixStream,
    request: u32,
    payload: &[u64],
    descriptors: &[BorrowedFd<'_>],
) {
    let head = [request, 1, 8 * payload.len() as u32];
    let head = head.iter().flat_map(|field| field.to_ne_bytes());
    let bytes: Vec<u8> = head.chain(payload.iter().flat_map(|word| word.to_ne_bytes())).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() {
        ancillary.push(SendAncillaryMessage::ScmRights(descriptors));
    }
    let outcome = sendmsg(stream, &[IoSlice::new(&bytes)], &mut ancillary, SendFlags::NOSIGNAL);
    assert_eq!(outcome.expect("the door listens"), bytes.len());
}
