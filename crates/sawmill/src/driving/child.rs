//! Drivers that this process starts: one at a time, or a new one beside the old one that it
//! replaces.
//!
//! Invariants: every started process is waited for. None gets this process's keys to stores, unless
//! they are named. Not here: what the end of a driver means (`driving`).

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::path::Path;
use std::process::{Child, Command, ExitStatus};
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::time::Duration;

use parking_lot::Mutex;
use rustix::io::retry_on_intr;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};
use sawmill_driver::protocol::SOCKET_VARIABLE;

use sawmill_console::exit::{Exit, Failure, Result};

/// The wait before the first restart; each further wait is twice as long.
pub(crate) const BACK_OFF_MIN: Duration = Duration::from_millis(50);
/// The longest wait before a restart, however often drivers have died.
const BACK_OFF_MAX: Duration = Duration::from_secs(5);
/// After a driver has lived this long, the next restart waits the minimum again.
const LIFE_TIME_MIN: Duration = Duration::from_secs(1);

/// Prefixes of variables with keys to stores, which a driver must not get.
const STORES: [&str; 3] = ["AWS_", "AZURE_", "GOOGLE_"];
/// Words in the names of our own secret variables.
const SECRETS: [&str; 4] = ["KEY", "SECRET", "TOKEN", "PASSWORD"];

/// The command of a driver, and its processes.
pub(crate) struct Drivers {
    command: Vec<OsString>,
    /// Secret variables that drivers get anyway.
    passed: Vec<OsString>,
    alive: Arc<Mutex<BTreeSet<u32>>>,
    back_off: Mutex<Duration>,
}

impl Drivers {
    /// `passed` names variables of this process's environment that drivers get even if they are
    /// secrets.
    pub(crate) fn new(command: Vec<OsString>, passed: Vec<OsString>) -> Self {
        Drivers { command, passed, alive: Arc::default(), back_off: Mutex::new(BACK_OFF_MIN) }
    }

    /// Starts a driver. `ended` is called with the process and its exit status.
    pub(crate) fn start(
        &self,
        socket: &Path,
        ended: impl FnOnce(u32, ExitStatus) + Send + 'static,
    ) -> Result<u32> {
        let Some((program, arguments)) = self.command.split_first() else {
            return Err(Failure::usage("there is no driver command; give one after --"));
        };
        let program_text = program.display();
        let mut driver = Command::new(program);
        driver.args(arguments).env(SOCKET_VARIABLE, socket);
        // P132: a driver is any program, and the keys would give it every volume of the store.
        for (name, _) in
            std::env::vars_os().filter(|(name, _)| is_secret(name) && !self.passed.contains(name))
        {
            driver.env_remove(name);
        }
        // The thread first: a driver that nobody waits for would count as alive forever.
        let (sender, receiver) = sync_channel::<Child>(1);
        let alive = Arc::clone(&self.alive);
        let wait = move || {
            // No driver comes if it could not be started.
            let Ok(mut child) = receiver.recv() else { return };
            let pid = child.id();
            if let Ok(status) = reap(&mut child, &alive) {
                ended(pid, status);
            }
        };
        std::thread::Builder::new()
            .name("driver-wait".into())
            .spawn(wait)
            .map_err(|error| Failure::io("cannot wait for the driver", &error))?;
        let child = driver.spawn().map_err(|error| {
            let exit = match error.kind() {
                std::io::ErrorKind::NotFound => Exit::NotFound,
                std::io::ErrorKind::PermissionDenied => Exit::Denied,
                _ => Exit::Unavailable,
            };
            Failure::caused(exit, format!("cannot start the driver {program_text}"), error)
        })?;
        let pid = child.id();
        // Before the thread knows the driver: it removes the number when the process has ended.
        self.alive.lock().insert(pid);
        // The thread ends only after it has received, so this cannot fail.
        let _ = sender.send(child);
        Ok(pid)
    }

    /// How long to wait before a driver is started again.
    pub(crate) fn next_wait(&self, lived: Duration) -> Duration {
        let mut back_off = self.back_off.lock();
        // Waits grow only while drivers die at once: one that worked is needed again quickly.
        if lived >= LIFE_TIME_MIN {
            *back_off = BACK_OFF_MIN;
        }
        let now = *back_off;
        *back_off = (now * 2).min(BACK_OFF_MAX);
        now
    }

    /// Kills a process if it is one of these.
    pub(crate) fn kill(&self, pid: u32) {
        self.signal(pid, Signal::KILL);
    }

    /// Kills all of them.
    pub(crate) fn kill_all(&self) {
        let pids: Vec<u32> = self.alive.lock().iter().copied().collect();
        pids.into_iter().for_each(|pid| self.kill(pid));
    }

    /// Whether this is one of them.
    pub(crate) fn has(&self, pid: u32) -> bool {
        self.alive.lock().contains(&pid)
    }

    /// Whether all have ended.
    pub(crate) fn are_gone(&self) -> bool {
        self.alive.lock().is_empty()
    }

    /// Whether all that have not ended are among these.
    pub(crate) fn are_all_among(&self, pids: &BTreeSet<u32>) -> bool {
        self.alive.lock().is_subset(pids)
    }

    fn signal(&self, pid: u32, signal: Signal) {
        // Under the lock, in which `reap` gives numbers back: this one still means that process.
        let alive = self.alive.lock();
        if let Some(pid) = Pid::from_raw(pid.cast_signed()).filter(|_| alive.contains(&pid)) {
            // The process may have exited just now and not have been waited for.
            let _ = kill_process(pid, signal);
        }
    }
}

/// Waits for the end of a process, and removes its number from `alive`.
fn reap(child: &mut Child, alive: &Mutex<BTreeSet<u32>>) -> std::io::Result<ExitStatus> {
    let pid = child.id();
    if let Some(process) = Pid::from_raw(pid.cast_signed()) {
        // Leaves the process as a zombie, so that its number is not given to another yet. An error
        // is met again by the wait below.
        let ended = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        let _ = retry_on_intr(|| waitid(WaitId::Pid(process), ended));
    }
    // Both under the lock: a signal goes only to numbers that are still ours.
    let mut alive = alive.lock();
    alive.remove(&pid);
    child.wait()
}

/// Whether a variable of this name gives access to a store.
fn is_secret(name: &OsStr) -> bool {
    let name = name.to_string_lossy();
    let ours = name.starts_with("SAWMILL_") && SECRETS.iter().any(|word| name.contains(word));
    ours || STORES.iter().any(|store| name.starts_with(store))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn restarts_wait_longer_each_time_until_one_lives() {
        let drivers = Drivers::new(vec!["true".into()], Vec::new());
        let waits: Vec<u128> =
            (0..12).map(|_| drivers.next_wait(Duration::ZERO).as_millis()).collect();
        assert_eq!(waits[..4], [50, 100, 200, 400]);
        assert_eq!(waits.last(), Some(&5_000));
        assert_eq!(drivers.next_wait(Duration::from_secs(11)).as_millis(), 50);
    }

    #[test]
    fn a_driver_that_ended_is_reaped_and_counts_as_gone() {
        let drivers = Drivers::new(vec!["false".into()], Vec::new());
        let (sender, ended) = sync_channel(1);
        let pid = drivers
            .start(Path::new("/x"), move |pid, status| sender.send((pid, status)).unwrap())
            .unwrap();
        let (of, status) = ended.recv().unwrap();
        assert_eq!((of, status.code()), (pid, Some(1)));
        assert!(drivers.are_gone() && !drivers.has(pid));
        let again =
            waitid(WaitId::Pid(Pid::from_raw(pid.cast_signed()).unwrap()), WaitIdOptions::EXITED);
        assert_eq!(again.unwrap_err(), rustix::io::Errno::CHILD, "nobody left to wait for");
    }

    #[test]
    fn a_command_that_is_none_is_named() {
        let drivers = Drivers::new(vec!["/no/such/driver".into()], Vec::new());
        let message = drivers.start(Path::new("/x"), |_, _| ()).unwrap_err().to_string();
        assert!(message.contains("/no/such/driver"), "{message}");
    }
}
