//! The mount holder of one mount, watched as long as this process serves the mount: it has the
//! newest facts, and if it dies, a new one replaces it.
//!
//! Invariants: a dead mount holder is replaced only while this process serves the mount (two mount
//! holders would not know of each other), and only while there is a mount. A mount holder that
//! starts slowly does not delay a hand-off. Not here: what a mount holder does.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::{Condvar, Mutex, MutexGuard};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{Shutdown, shutdown};
use sawmill_device::Result;

use super::options::MountHolderOptions;
use crate::DoorPiece;
use crate::mount_holder::{MountHolder, lives};

/// Mount holders are started at most this often: if none survives, retrying costs next to nothing.
const RESTART_EVERY: Duration = Duration::from_secs(1);

/// A watched mount holder. When this is dropped, it continues unwatched.
pub(super) struct HolderWatch {
    context: Arc<WatchContext>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

struct WatchContext {
    how: MountHolderOptions,
    state: Mutex<WatchState>,
    changed: Condvar,
}

struct WatchState {
    mount_holder: Arc<MountHolder>,
    /// It was started as a replacement and does not hold anything yet.
    is_starting: bool,
    /// What the mount holder holds.
    piece: Arc<DoorPiece>,
    /// Hangs up when the mount holder ends.
    line: Option<Arc<OwnedFd>>,
    /// The mount holder is not watched any more.
    is_over: bool,
}

impl HolderWatch {
    /// Watches `mount_holder`, which holds `door_piece`.
    pub(super) fn new(
        how: &MountHolderOptions,
        mount_holder: MountHolder,
        door_piece: DoorPiece,
    ) -> Self {
        let (mount_holder, piece) = (Arc::new(mount_holder), Arc::new(door_piece));
        let state =
            WatchState { mount_holder, is_starting: false, piece, line: None, is_over: false };
        let context =
            WatchContext { how: how.clone(), state: Mutex::new(state), changed: Condvar::new() };
        let context = Arc::new(context);
        let watching = context.clone();
        let thread =
            std::thread::Builder::new().name("fuse-holder".into()).spawn(move || watching.watch());
        let thread = thread.inspect_err(|error| {
            tracing::warn!(%error, "fuse: cannot start a thread to watch the mount holder; its \
                death goes unnoticed");
        });
        HolderWatch { context, thread: Mutex::new(thread.ok()) }
    }

    /// Gives the mount holder new facts to hold.
    pub(super) fn update(&self, piece: DoorPiece) -> Result<()> {
        let mut state = self.context.state.lock();
        self.context.settle(&mut state);
        // Set before the mount holder is told: a replacement that starts in the meantime gets the
        // new facts.
        state.piece = Arc::new(piece);
        match state.mount_holder.update(&state.piece) {
            Err(_) if MountHolder::at(&self.context.how.socket).is_none() => {
                self.context.replace(&mut state)
            }
            done => done,
        }
    }

    /// Leaves the mount holder to the next server.
    pub(super) fn leave(&self) {
        self.end_watch();
        self.context.state.lock().mount_holder.leave();
    }

    /// Ends the mount holder.
    pub(super) fn end(&self) {
        self.end_watch();
        self.context.state.lock().mount_holder.end();
    }

    fn end_watch(&self) {
        {
            let mut state = self.context.state.lock();
            state.is_over = true;
            if let Some(line) = &state.line {
                // Looks to the watching thread like the end of the mount holder, and ends its wait.
                let _ = shutdown(line, Shutdown::Both);
            }
            if state.is_starting {
                // A thread that waits for its answer gets an error immediately.
                state.mount_holder.reap();
            }
        }
        self.context.changed.notify_all();
        if let Some(thread) = self.thread.lock().take() {
            let _ = thread.join();
        }
    }
}

impl Drop for HolderWatch {
    fn drop(&mut self) {
        self.end_watch();
    }
}

impl WatchState {
    fn mountpoint(&self) -> &str {
        self.piece.facts.get("mountpoint").map_or("", String::as_str)
    }
}

impl WatchContext {
    /// The watching thread.
    fn watch(&self) {
        let mut state = self.state.lock();
        loop {
            self.settle(&mut state);
            if state.is_over {
                return;
            }
            let mount_holder = Arc::clone(&state.mount_holder);
            match mount_holder.watch() {
                Ok(line) => {
                    let line = Arc::new(line);
                    state.line = Some(line.clone());
                    MutexGuard::unlocked(&mut state, || wait_for_end(&line));
                    state.line = None;
                }
                Err(error) if MountHolder::at(&self.how.socket).is_some() => {
                    tracing::warn!(
                        "fuse: the mount holder is running, but its death would go unnoticed: \
                        {error}"
                    );
                    return;
                }
                Err(_) => (),
            }
            self.settle(&mut state);
            // The mount holder of a removed mount ends by itself.
            if state.is_over || !state.piece.descriptors.iter().all(lives) {
                return;
            }
            if !Arc::ptr_eq(&mount_holder, &state.mount_holder) {
                // A thread with newer facts has replaced it already.
                continue;
            }
            let replaced = self.replace(&mut state);
            let mountpoint = state.mountpoint();
            match replaced {
                Ok(()) => {
                    tracing::warn!(
                        mountpoint,
                        "fuse: the mount holder died; a new one holds the mount now"
                    )
                }
                Err(error) => tracing::error!(
                    mountpoint,
                    "fuse: the mount holder died: if this server dies too, users of the mount get \
                     errors. Starting a new mount holder failed, retrying: {error}"
                ),
            }
            if !state.is_over {
                // With the lock released, so that a stop does not wait for the pause.
                self.changed.wait_for(&mut state, RESTART_EVERY);
            }
        }
    }

    /// Waits for a start that another thread has begun.
    fn settle(&self, state: &mut MutexGuard<'_, WatchState>) {
        while state.is_starting {
            self.changed.wait(state);
        }
    }

    /// Replaces a mount holder that is dead or unreachable. Other threads may inspect or end what
    /// is held during this.
    fn replace(&self, state: &mut MutexGuard<'_, WatchState>) -> Result<()> {
        let next = Arc::new(MountHolder::spawn(&self.how.socket, &self.how.command)?);
        // Entered before it has answered, so that a server that stops meanwhile can end it
        // (`end_watch`).
        let previous = std::mem::replace(&mut state.mount_holder, Arc::clone(&next));
        let piece = Arc::clone(&state.piece);
        state.is_starting = true;
        let outcome = MutexGuard::unlocked(state, || next.update(&piece));
        state.is_starting = false;
        self.changed.notify_all();
        match outcome {
            // Its process is dead or cannot be reached. Unreaped, it would stay as a zombie.
            Ok(()) => previous.reap(),
            Err(_) => {
                next.reap();
                state.mount_holder = previous;
            }
        }
        outcome
    }
}

fn wait_for_end(line: &OwnedFd) {
    while lives(line) {
        // The condition checks any event other than a hang-up.
        let _ = poll(&mut [PollFd::new(line, PollFlags::empty())], None);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    fn a_leaving_server_does_not_wait_for_a_mount_holder_that_is_slow_to_start() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let (socket, number) = (folder.path().join("socket"), folder.path().join("number"));
        // It has the socket, so that one can connect, and never answers.
        let script = format!("echo $$ > {0}.new; mv {0}.new {0}; exec sleep 600", number.display());
        let how = MountHolderOptions {
            socket: socket.clone(),
            command: vec!["sh".into(), "-c".into(), script.into()],
        };
        let dead = MountHolder::spawn(&socket, &["true".into()]).expect("it starts");
        dead.reap();
        let holder_watch = HolderWatch::new(&how, dead, DoorPiece::new("fuse"));
        let deadline = Instant::now() + Duration::from_secs(60);
        while !number.exists() {
            assert!(Instant::now() < deadline, "waited in vain for another mount holder");
            std::thread::yield_now();
        }
        let process = std::fs::read_to_string(&number).expect("written");
        let process = std::path::Path::new("/proc").join(process.trim());
        let state = holder_watch.context.state.lock();
        assert!(
            state.is_starting && process.exists(),
            "a look must not wait until the start has failed"
        );
        drop(state);
        holder_watch.leave();
        assert!(!process.exists(), "it would hold the mount, and the next server would not know");
        assert!(MountHolder::at(&socket).is_none(), "the next server may start its own");
    }
}
