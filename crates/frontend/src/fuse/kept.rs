//! The keeper of one mount, seen to as long as this process serves the mount: it knows the newest facts,
//! and when it dies another takes its place.
//!
//! Invariants: a keeper is started in the place of a dead one only while the mount is this process's to
//! serve (two keepers would know nothing of each other), and only while there is a mount. Not here: what a
//! keeper does.

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
    keeper: Keeper,
    /// What it holds.
    handed: Handed,
    /// Hangs up when it ends.
    line: Option<Arc<OwnedFd>>,
    /// Nobody watches any more.
    over: bool,
}

impl Kept {
    /// Watches `keeper`, which holds what `handed` says.
    pub(super) fn new(how: &KeeperOptions, keeper: Keeper, handed: Handed) -> Self {
        let held = Mutex::new(Held { keeper, handed, line: None, over: false });
        let inside = Arc::new(Inside { how: how.clone(), held, changed: Condvar::new() });
        let watching = inside.clone();
        let thread = std::thread::Builder::new().name("fuse-keeper".into()).spawn(move || watching.watch());
        let thread = thread.inspect_err(|error| {
            tracing::warn!(%error, "fuse: no thread to see to the keeper; were it to die, nobody would know");
        });
        Kept { inside, thread: Mutex::new(thread.ok()) }
    }

    /// Gives the keeper other facts to hold.
    pub(super) fn update(&self, handed: Handed) -> Result<()> {
        let mut held = self.inside.held.lock();
        held.handed = handed;
        match held.keeper.update(&held.handed) {
            Err(_) if Keeper::at(&self.inside.how.socket).is_none() => held.replace(&self.inside.how),
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
    /// Starts another in the place of one that is dead.
    fn replace(&mut self, how: &KeeperOptions) -> Result<()> {
        self.keeper.reap();
        self.keeper = Keeper::start(&how.socket, &how.command, &self.handed)?;
        Ok(())
    }

    fn mountpoint(&self) -> &str {
        self.handed.facts.get("mountpoint").map_or("", String::as_str)
    }
}

impl Inside {
    /// The thread.
    fn watch(&self) {
        let mut held = self.held.lock();
        while !held.over {
            match held.keeper.watch() {
                Ok(line) => {
                    let line = Arc::new(line);
                    held.line = Some(line.clone());
                    MutexGuard::unlocked(&mut held, || wait_for_end(&line));
                    held.line = None;
                }
                Err(error) if Keeper::at(&self.how.socket).is_some() => {
                    tracing::warn!("fuse: the keeper lives, but nobody will know when it dies: {error}");
                    return;
                }
                Err(_) => (),
            }
            // The keeper of a mount that is gone ends by itself.
            if held.over || !held.handed.descriptors.iter().all(lives) {
                return;
            }
            let replaced = held.replace(&self.how);
            let mountpoint = held.mountpoint();
            match replaced {
                Ok(()) => {
                    tracing::warn!(mountpoint, "fuse: the keeper had died; another holds the mount now")
                }
                Err(error) => tracing::error!(
                    mountpoint,
                    "fuse: the keeper has died: if this server dies, users of the mount get errors. Another \
                     cannot be started, and is tried again: {error}"
                ),
            }
            if !held.over {
                self.changed.wait_for(&mut held, PAUSE);
            }
        }
    }
}

fn wait_for_end(line: &OwnedFd) {
    while lives(line) {
        // Whatever comes besides a hang-up is looked at by the condition.
        let _ = poll(&mut [PollFd::new(line, PollFlags::empty())], None);
    }
}
