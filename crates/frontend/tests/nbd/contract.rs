//! The NBD server under the contract of every door.

use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use sawmill_device::BlockDevice;
use sawmill_frontend::nbd::{Listen, NbdOptions, NbdServer};
use sawmill_frontend::{Door, DoorPiece, QuietDoor};

use crate::client::{Client, GO, READ, Style, info};
use crate::conformance::{BLOCK_BYTES, DoorSubject, DoorUser, OpenDoor, keep_every_clause};
use crate::hand_over::{export, handed};

/// A folder for the socket.
struct NbdSubject(tempfile::TempDir);

impl NbdSubject {
    fn path(&self) -> PathBuf {
        self.0.path().join("nbd.sock")
    }

    fn options(&self) -> NbdOptions {
        NbdOptions::new(Listen::Unix(self.path()))
    }

    fn client(&self) -> Client {
        Client::hello(UnixStream::connect(self.path()).expect("the server listens"), 3)
    }
}

impl DoorSubject for NbdSubject {
    fn open(&self, device: Arc<dyn BlockDevice>) -> OpenDoor {
        let server = NbdServer::start(self.options()).expect("the server starts");
        server.add_export(export("disk", device)).expect("a fresh name");
        let mut client = self.client();
        client.agree(Style::Structured);
        client.go("disk");
        OpenDoor { door: Arc::new(server), user: Box::new(client) }
    }

    fn take_over(&self, old: Box<dyn QuietDoor>, device: Arc<dyn BlockDevice>) -> Arc<dyn Door> {
        let exports = vec![export("disk", device)];
        let (next, quiet_door) = NbdServer::take_over_quiet(self.options(), exports, handed(&*old))
            .expect("it is whole");
        old.release();
        quiet_door.resume();
        Arc::new(next)
    }

    fn fail_to_take_over(&self, pieces: Vec<DoorPiece>, device: Arc<dyn BlockDevice>) {
        let exports = vec![export("disk", device)];
        drop(NbdServer::take_over_quiet(self.options(), exports, pieces).expect("it is whole"));
    }

    fn reopened_size(&self, _door: Arc<dyn Door>, _device: Arc<dyn BlockDevice>) -> u64 {
        let replies = self.client().option(GO, &info("disk", &[]));
        // The type of the information, 0 for the export, then its size.
        let size = replies.iter().find_map(|(_, data)| data.strip_prefix(&[0, 0])?.first_chunk());
        u64::from_be_bytes(*size.expect("the export is described"))
    }
}

impl DoorUser for Client {
    fn begin_write(&mut self, block: u64, byte: u8) {
        let bytes = self.write_bytes(0, block * BLOCK_BYTES as u64, &[byte; BLOCK_BYTES]);
        self.send(&bytes);
    }

    fn is_answered(&self) -> bool {
        let mut sockets = [PollFd::new(&self.stream, PollFlags::IN)];
        poll(&mut sockets, Some(&Timespec::default())).expect("it is polled") > 0
    }

    fn finish_write(&mut self) {
        assert_eq!(self.answer().error, 0);
    }

    fn read(&mut self, block: u64) -> Vec<u8> {
        let answer = self.call(0, READ, block * BLOCK_BYTES as u64, BLOCK_BYTES as u64);
        assert_eq!(answer.error, 0, "{}", answer.text);
        answer.data
    }
}

#[test]
fn a_server_keeps_every_clause_of_a_door() {
    keep_every_clause(|| NbdSubject(tempfile::tempdir().expect("a temporary folder")));
}
