//! The keeper of one mount, seen to as long as this process serves the mount: it knows the newest facts,
//! and when it dies another takes its place.
//!
//! Invariants: a keeper is started in the place of a dead one only while the mount is this process's to
//! serve (two keepers would know nothing of each other), and only while there is a mount; one that is slow to
//! start keeps nobody from leaving. Not here: what a keeper does.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::{Condvar, Mutex, MutexGuard};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{Shutdown, shutdown};
use sawmill_device::Result;

use super::options::KeeperOptions;
use crate::Handed;
use crate::keeper::{Keeper, lives};

/// Between a keeper's start and the next one's: where none can live, trying takes next to nothing.
const PAUSE: Duration = Duration::from_secs(1);

/// A keeper, watched. Dropped, it goes on unwatched.
pub(super) struct Kept {
    inside: Arc<Inside>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

struct Inside {
    how: KeeperOptions,
    held: Mutex<Held>,
    changed: Condvar,
}

struct Held {
    keeper: Arc<Keeper>,
    /// It was started in another's place and does not hold anything yet.
    starting: bool,
    /// What it holds.
    handed: Arc<Handed>,
    /// Hangs up when it ends.
    line: Option<Arc<OwnedFd>>,
    /// Nobody watches any more.
    over: bool,
}

impl Kept {
    /// Watches `keeper`, which holds what `handed` says.
    pub(super) fn new(how: &KeeperOptions, keeper: Keeper, handed: Handed) -> Self {
        let (keeper, handed) = (Arc::new(keeper), Arc::new(handed));
        let held = Held { keeper, starting: false, handed, line: None, over: false };
        let inside = Inside { how: how.clone(), held: Mutex::new(held), changed: Condvar::new() };
        let inside = Arc::new(inside);
        let watching = inside.clone();
        let thread = std::thread::Builder::new().name("fuse-keeper".into()).spawn(move || watching.watch());
        let thread = thread.inspect_err(|error| {
            tracing::warn!(%error, "fuse: cannot start a thread to watch the keeper; its death goes \
                unnoticed");
        });
        Kept { inside, thread: Mutex::new(thread.ok()) }
    }

    /// Gives the keeper other facts to hold.
    pub(super) fn update(&self, handed: Handed) -> Result<()> {
        let mut held = self.inside.held.lock();
        self.inside.settle(&mut held);
        held.handed = Arc::new(handed);
        match held.keeper.update(&held.handed) {
            Err(_) if Keeper::at(&self.inside.how.socket).is_none() => self.inside.replace(&mut held),
            done => done,
        }
    }

    /// Leaves the keeper to whoever serves next.
    pub(super) fn leave(&self) {
        self.end_watch();
        self.inside.held.lock().keeper.leave();
    }

    /// Ends the keeper.
    pub(super) fn end(&self) {
        self.end_watch();
        self.inside.held.lock().keeper.end();
    }

    fn end_watch(&self) {
        {
            let mut held = self.inside.held.lock();
            held.over = true;
            if let Some(line) = &held.line {
                let _ = shutdown(line, Shutdown::Both);
            }
            if held.starting {
                // Whoever waits for its answer has an error at once.
                held.keeper.reap();
            }
        }
        self.inside.changed.notify_all();
        if let Some(thread) = self.thread.lock().take() {
            let _ = thread.join();
        }
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        self.end_watch();
    }
}

impl Held {
    fn mountpoint(&self) -> &str {
        self.handed.facts.get("mountpoint").map_or("", String::as_str)
    }
}

impl Inside {
    /// The thread.
    fn watch(&self) {
        let mut held = self.held.lock();
        loop {
            self.settle(&mut held);
            if held.over {
                return;
            }
            let watched = Arc::clone(&held.keeper);
            match watched.watch() {
                Ok(line) => {
                    let line = Arc::new(line);
                    held.line = Some(line.clone());
                    MutexGuard::unlocked(&mut held, || wait_for_end(&line));
                    held.line = None;
                }
                Err(error) if Keeper::at(&self.how.socket).is_some() => {
                    tracing::warn!("fuse: the keeper is running, but its death would go unnoticed: {error}");
                    return;
                }
                Err(_) => (),
            }
            self.settle(&mut held);
            // The keeper of a mount that is gone ends by itself.
            if held.over || !held.handed.descriptors.iter().all(lives) {
                return;
            }
            if !Arc::ptr_eq(&watched, &held.keeper) {
                // Whoever had other facts for it came first.
                continue;
            }
            let replaced = self.replace(&mut held);
            let mountpoint = held.mountpoint();
            match replaced {
                Ok(()) => {
                    tracing::warn!(mountpoint, "fuse: the keeper died; a new one holds the mount now")
                }
                Err(error) => tracing::error!(
                    mountpoint,
                    "fuse: the keeper died: if this server dies too, users of the mount get errors. Starting \
                     a new keeper failed, retrying: {error}"
                ),
            }
            if !held.over {
                self.changed.wait_for(&mut held, PAUSE);
            }
        }
    }

    /// Waits for a start that another thread has begun.
    fn settle(&self, held: &mut MutexGuard<'_, Held>) {
        while held.starting {
            self.changed.wait(held);
        }
    }

    /// Starts another in the place of one that is dead, or that nobody can reach any more. Others may look
    /// at what is held meanwhile, and end it.
    fn replace(&self, held: &mut MutexGuard<'_, Held>) -> Result<()> {
        let next = Arc::new(Keeper::spawn(&self.how.socket, &self.how.command)?);
        let before = std::mem::replace(&mut held.keeper, Arc::clone(&next));
        let handed = Arc::clone(&held.handed);
        held.starting = true;
        let told = MutexGuard::unlocked(held, || next.update(&handed));
        held.starting = false;
        self.changed.notify_all();
        match told {
            Ok(()) => before.reap(),
            Err(_) => {
                next.reap();
                held.keeper = before;
            }
        }
        told
    }
}

fn wait_for_end(line: &OwnedFd) {
    while lives(line) {
        // Whatever comes besides a hang-up is looked at by the condition.
        let _ = poll(&mut [PollFd::new(line, PollFlags::empty())], None);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    fn who_leaves_does_not_wait_for_a_keeper_that_is_slow_to_start() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let (socket, number) = (folder.path().join("socket"), folder.path().join("number"));
        // It has the socket, so that one can connect, and never answers.
        let script = format!("echo $$ > {0}.new; mv {0}.new {0}; exec sleep 600", number.display());
        let how =
            KeeperOptions { socket: socket.clone(), command: vec!["sh".into(), "-c".into(), script.into()] };
        let dead = Keeper::spawn(&socket, &["true".into()]).expect("it starts");
        dead.reap();
        let kept = Kept::new(&how, dead, Handed::new("fuse"));
        let deadline = Instant::now() + Duration::from_secs(60);
        while !number.exists() {
            assert!(Instant::now() < deadline, "waited in vain for another keeper");
            std::thread::yield_now();
        }
        let process = std::fs::read_to_string(&number).expect("written");
        let process = std::path::Path::new("/proc").join(process.trim());
        let held = kept.inside.held.lock();
        assert!(held.starting && process.exists(), "who looks must not wait until the start has failed");
        drop(held);
        kept.leave();
        assert!(!process.exists(), "it would hold the mount, and the next server would not know");
        assert!(Keeper::at(&socket).is_none(), "the next server may start its own");
    }
}
