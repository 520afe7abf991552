//! Pieces of doors from another process.
//!
//! Invariants: any bytes are refused or are the only encoding of what they mean, and a server takes
//! over from any pieces or reports why it cannot.
//!
//! Not here: the messages in which pieces travel (`sawmill_frontend::passing`); taking over doors
//! other than NBD.

use std::fs::File;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use sawmill_device::MemoryDevice;
use sawmill_frontend::nbd::{Export, Listen, NbdOptions, NbdServer};
use sawmill_frontend::{Door, DoorPiece, Stop, pack, unpack};

use crate::nbd::no_thread_panicked;

/// Small, so that many of them cost little.
const DEVICE_BYTES: u64 = 64 << 10;

/// The first byte is the number of descriptors that accompany the pieces.
pub(crate) fn run(bytes: &[u8]) {
    let Some((count, bytes)) = bytes.split_first() else { return };
    let file = || -> OwnedFd { File::open("/dev/null").expect("it is there").into() };
    let Ok(pieces) = unpack(bytes, (0..count % 8).map(|_| file()).collect()) else { return };
    let (again, descriptors) = pack(&pieces);
    assert_eq!(again, bytes, "there is one encoding for each value");
    assert_eq!(descriptors.len(), usize::from(count % 8), "each descriptor belongs to a piece");
    no_thread_panicked();
    take_over(pieces);
    no_thread_panicked();
}

/// Uses descriptors that fit; only the facts and bytes are fuzzed.
fn take_over(mut pieces: Vec<DoorPiece>) {
    let mut clients = Vec::new();
    for piece in &mut pieces {
        piece.descriptors = match piece.what.as_str() {
            "listener" => {
                let Ok(listener) = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)) else { return };
                vec![listener.into()]
            }
            _ => {
                let Ok((near, far)) = UnixStream::pair() else { return };
                clients.push(near);
                vec![far.into()]
            }
        };
        // The socket belongs to another process and must not be removed.
        if piece.facts.get("transport").is_some_and(|transport| transport == "unix") {
            piece.facts.insert("address".into(), "/nowhere".into());
        }
    }
    let options = NbdOptions::new(Listen::Tcp(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))));
    let device = Arc::new(MemoryDevice::new(DEVICE_BYTES));
    let export = Export { name: "disk".into(), description: String::new(), device };
    if let Ok(server) = NbdServer::take_over(options, vec![export], pieces) {
        // Otherwise the stop would wait for clients that read no replies.
        drop(clients);
        server.stop(Stop::Drained);
    }
}
