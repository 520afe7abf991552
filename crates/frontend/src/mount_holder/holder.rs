//! The process of the mount holder: holds, gives, ends.
//!
//! Its standard input is the socket that it listens on, made by the process that started it.
//!
//! Invariant: this process keeps a descriptor that it has passed on, because the receiver may die.
//! Not here: the processes that talk to it (`client`).

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt;

use super::wire::{Packet, receive, send};
use crate::DoorPiece;

/// Interval of the checks that the held descriptor is still alive. Polling it would wake this
/// process at every request, because the kernel notifies all waiters on the descriptor.
const LOOK_EVERY: Timespec = Timespec { tv_sec: 2, tv_nsec: 0 };
/// How long a client may be silent.
const SILENCE_TIME_MAX: Duration = Duration::from_secs(1);
/// The most servers that wait for the mount holder's end; usually there is one, and another during
/// a takeover.
const WATCHERS_MAX: usize = 8;
/// One of the last processes to be killed when memory is short: it uses next to none.
const OOM_SCORE: &str = "-900";

/// Runs the mount holder until what it holds is gone, or it is told to end. Call this in a process
/// that does nothing else, with the socket as standard input. Returns an error if that is not a
/// socket.
pub fn keep() -> std::io::Result<()> {
    // It must not end with a terminal or a process group, and must not block the removal of a
    // folder.
    let _ = rustix::process::setsid();
    let _ = std::env::set_current_dir("/");
    let _ = std::fs::write("/proc/self/oom_score_adj", OOM_SCORE);
    let listener = UnixListener::from(rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdin(), 3)?);
    let path = listener.local_addr()?.as_pathname().map(Path::to_path_buf);
    let mut holder = Holder { listener, path, held: None, watchers: Vec::new() };
    while holder.receive() {}
    holder.vanish();
    Ok(())
}

struct Holder {
    listener: UnixListener,
    path: Option<PathBuf>,
    held: Option<DoorPiece>,
    /// Connections of clients that wait for this process's end: they notice when the kernel closes
    /// these.
    watchers: Vec<OwnedFd>,
}

/// Whether the far end of this descriptor is still alive: a mount reports when it is gone, and so
/// does a socket.
pub(crate) fn lives(descriptor: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(descriptor, PollFlags::empty())];
    let no_wait = Timespec { tv_sec: 0, tv_nsec: 0 };
    let hangup = PollFlags::ERR | PollFlags::HUP | PollFlags::NVAL;
    !matches!(poll(&mut fds, Some(&no_wait)), Ok(n) if n > 0 && fds[0].revents().intersects(hangup))
}

impl Holder {
    /// Waits for a client, and handles its message. Returns `false` when it is time to end.
    fn receive(&mut self) -> bool {
        let mut fds = [PollFd::new(&self.listener, PollFlags::IN)];
        let ready_count = poll(&mut fds, Some(&LOOK_EVERY));
        // Before any message: a mount that is gone must not be given to the next server.
        if let Some(holding) = &self.held
            && !holding.descriptors.iter().all(lives)
        {
            return false;
        }
        match ready_count {
            // The process that started it exited before it said what to hold.
            Ok(0) => return self.held.is_some(),
            Ok(_) => (),
            Err(Errno::INTR) => return true,
            Err(_) => return false,
        }
        let Ok((socket, _)) = self.listener.accept() else { return true };
        !is_ours(&socket) || self.serve(socket)
    }

    fn serve(&mut self, socket: UnixStream) -> bool {
        // It serves one client at a time: a silent one must not keep the next server from the
        // mount.
        let outcome = socket.set_read_timeout(Some(SILENCE_TIME_MAX));
        if outcome.and_then(|()| socket.set_write_timeout(Some(SILENCE_TIME_MAX))).is_err() {
            return true;
        }
        match receive(&socket) {
            Ok(Packet::Hold(handed)) => {
                self.held = Some(handed);
                let _ = send(&socket, &Packet::Done);
                true
            }
            Ok(Packet::Give) => match self.held.take() {
                Some(holding) => {
                    // Lent to the packet and taken back: the client gets a duplicate.
                    let packet = Packet::Here(holding);
                    let _ = send(&socket, &packet);
                    if let Packet::Here(holding) = packet {
                        self.held = Some(holding);
                    }
                    true
                }
                None => self.end(&socket, &Packet::Nothing),
            },
            Ok(Packet::End) => {
                self.held.take();
                self.end(&socket, &Packet::Done)
            }
            Ok(Packet::Watch) => {
                // The places are few. Without this, servers that have ended would keep them.
                self.watchers.retain(lives);
                if self.watchers.len() < WATCHERS_MAX && send(&socket, &Packet::Done).is_ok() {
                    self.watchers.push(socket.into());
                }
                true
            }
            Ok(Packet::Done | Packet::Here(_) | Packet::Nothing) | Err(_) => true,
        }
    }

    /// Answers only once its place is free for another mount holder.
    fn end(&mut self, socket: &UnixStream, answer: &Packet) -> bool {
        self.vanish();
        let _ = send(socket, answer);
        false
    }

    fn vanish(&mut self) {
        if let Some(path) = self.path.take() {
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Only our own user, and root, may get what is held.
fn is_ours(socket: impl AsFd) -> bool {
    let own = rustix::process::geteuid();
    sockopt::socket_peercred(socket).is_ok_and(|peer| peer.uid == own || peer.uid.is_root())
}
