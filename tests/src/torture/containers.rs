//! Restarts as of a container: shared memory is new each time, the state folder stays. A life ends
//! with `kill -9`, or with SIGTERM, a delay, and `kill -9`.
//!
//! What must hold: a server that detects the container keeps its memory beside the journal, and
//! `kill -9` loses nothing; otherwise (undetected, or with shared memory by option) the next start
//! is refused. Writes accepted before SIGTERM are never lost once the server had time to log them.

use std::time::Duration;

use rustix::process::Signal;

use super::Torture;
use super::volume::{AttachOptions, Loss, NextAttach, Volume};
use crate::machine;
use crate::nbd::Client;
use crate::server::Server;
use crate::test_bed::{TestBed, field};

/// `docker stop` waits this long before it kills.
const GRACE: Duration = Duration::from_secs(10);
const NEW_SHARED_MEMORY: &str = "mount -t tmpfs none /dev/shm && exec \"$@\"";

impl Torture {
    /// The way to run a server in a container; `None` if this machine has none.
    pub(super) fn contained(&mut self, volume: &mut Volume) -> Option<AttachOptions> {
        if !rustix::process::geteuid().is_root() {
            self.report.did("container not possible here");
            return None;
        }
        // A start that gives up removes its memory.
        self.proxy.stop_faults();
        let mut through = vec!["unshare", "--mount", "--propagation", "private"];
        let mut staging = None;
        match self.dice.below(3) {
            0 => self.report.did("container without a namespace of its own that shows"),
            1 => {
                through.push("--ipc");
                staging = Some("/dev/shm".to_owned());
                self.report.did("container with its shared memory named");
            }
            _ => {
                through.push("--ipc");
                self.report.did("container");
            }
        }
        through.extend(["sh", "-c", NEW_SHARED_MEMORY, "sh"]);
        let is_hidden = volume.memories().iter().any(|memory| memory.starts_with("/dev/shm"));
        if volume.loss == Loss::Nothing && is_hidden {
            // The previous life was outside a container.
            volume.note_lost(Loss::Memory, NextAttach::refuses_if(!volume.may_be_clean));
        }
        let through = through.into_iter().map(str::to_owned).collect();
        Some(AttachOptions { through, staging, ..AttachOptions::default() })
    }

    pub(super) fn end_contained(
        &mut self,
        volume: &mut Volume,
        server: Server,
        clients: &[Client],
    ) {
        let is_graceful = self.dice.one_in(2);
        volume.may_be_clean = false;
        if !is_graceful {
            self.load_and_kill(volume, server, clients);
            return self.judge_memory(volume, true);
        }
        let is_away = !volume.is_folder() && self.dice.one_in(2);
        let groups = 1 + self.dice.below(60);
        let (clock, proxy) = (volume.commits.log.clock.clone(), self.proxy.clone());
        let (mut stop_tick, mut stop) = (0, None);
        let bed = &volume.bed;
        let counts = volume.commits.drive(clients, groups, || {
            if is_away {
                proxy.shut();
            }
            stop_tick = clock.tick();
            stop = Some(stop_with_grace(bed, server));
            proxy.open();
        });
        self.note(volume, counts);
        volume.logged = stop_tick;
        match stop {
            Some(Stop::Orderly) => {
                self.report.did("container stopped in order");
                // Everything answered is in the store.
                volume.stored = volume.commits.log.clock.tick();
            }
            Some(Stop::Killed) => {
                self.report.did("container stopped, then killed");
                self.report.kills += 1;
                // With its store reachable, it may have closed cleanly.
                self.judge_memory(volume, is_away);
            }
            Some(Stop::Wrong(how)) => self.violation(volume, &how),
            None => {}
        }
    }

    /// The container is gone, and its shared memory with it.
    fn judge_memory(&mut self, volume: &mut Volume, is_needed: bool) {
        let state = volume.bed.path("state");
        if volume.memories().iter().any(|memory| memory.starts_with(&state)) {
            self.report.did("container left its memory beside the journal");
        } else {
            self.report.did("container took its memory with it");
            volume.note_lost(Loss::Memory, NextAttach::refuses_if(is_needed));
        }
    }
}

enum Stop {
    Orderly,
    Killed,
    Wrong(String),
}

/// As `docker stop`: SIGTERM, then `kill -9`, once everything accepted had time to be logged.
fn stop_with_grace(bed: &TestBed, mut server: Server) -> Stop {
    server.signal(Signal::TERM);
    let began = std::time::Instant::now();
    machine::wait_for("the server has ended, or logged everything", || {
        (!server.is_running() || is_logged(bed) || began.elapsed() > GRACE).then_some(())
    });
    if server.is_running() {
        server.kill();
        return Stop::Killed;
    }
    let ended = server.finished();
    match ended.code {
        Some(0) => Stop::Orderly,
        code => Stop::Wrong(format!("SIGTERM ended in {code:?}: {}", ended.stderr)),
    }
}

/// Whether everything accepted is logged, as far as the server reports it.
fn is_logged(bed: &TestBed) -> bool {
    let Some(output) = bed.sawmill(&["info", "disk", "--json"]).into_ok() else { return false };
    let document: serde_json::Value = serde_json::from_str(&output).unwrap_or_default();
    let number =
        |name: &str| field(&document["positions"], name).and_then(serde_json::Value::as_u64);
    number("accepted").is_some_and(|accepted| number("logged") == Some(accepted))
}
