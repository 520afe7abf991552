//! A volume whose loops and whose time go when a test lets them.
#![allow(unreachable_pub, missing_docs, reason = "the tests' own")]

mod busy_writers;
mod garbage_bound;
mod kept_memory;
mod watch;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use sawmill_device::{BlockDeviceExt, ErrorKind};
use sawmill_volume::{RealWorld, SteppedVolume, Volume, World};

use crate::faulty::{Machine, until, write_tile};

/// A world where time passes on request.
struct ManualTimeWorld(RealWorld, AtomicU64);

impl World for ManualTimeWorld {
    fn now(&self) -> Duration {
        Duration::from_millis(1000 + self.1.load(Ordering::SeqCst))
    }
    fn unix_ms(&self) -> u64 {
        self.0.unix_ms()
    }
    fn random(&self) -> sawmill_volume::Result<[u8; 16]> {
        self.0.random()
    }
    fn boot_id(&self) -> sawmill_volume::Result<[u8; 16]> {
        self.0.boot_id()
    }
    fn disks(&self) -> &dyn sawmill_volume::Disks {
        self.0.disks()
    }
}

/// A volume whose loops go when the test lets them.
pub struct SteppedScene {
    world: Arc<ManualTimeWorld>,
    stepped: SteppedVolume,
}

impl SteppedScene {
    pub fn new(machine: &Machine) -> Self {
        let world = Arc::new(ManualTimeWorld(RealWorld::default(), AtomicU64::new(0)));
        let dynamic: Arc<dyn World> = world.clone();
        let store = machine.rig.store.clone();
        let stepped = SteppedVolume::open(dynamic, store, "disk", &machine.options).unwrap();
        let mut attached = SteppedScene { world, stepped };
        write_tile(attached.volume(), 0, 1);
        attached.until("the first write is stored", |volume| {
            let positions = volume.status().positions;
            positions.stored == positions.accepted
        });
        attached
    }

    pub fn volume(&self) -> &Arc<Volume> {
        self.stepped.volume()
    }

    pub fn pass(&self, ms: u64) {
        self.world.1.fetch_add(ms, Ordering::SeqCst);
    }

    /// Steps both loops; returns how long the engine would rest if nothing woke it.
    pub fn step(&mut self) -> Option<Duration> {
        while self.stepped.step_journal_quietly() {}
        self.stepped.step_engine(self.world.now())
    }

    /// Steps until something is so; no time passes.
    pub fn until(&mut self, what: &str, mut so: impl FnMut(&Volume) -> bool) {
        until(what, || {
            let _ = self.step();
            so(self.stepped.volume())
        });
    }

    /// What a flush is answered, while so many milliseconds pass at each step.
    pub fn flush(&mut self, step_ms: u64) -> Result<(), ErrorKind> {
        let volume = self.volume().clone();
        let flush_thread = thread::spawn(move || volume.flush().map_err(|error| error.kind()));
        self.until_with("the flush is answered", step_ms, |_| flush_thread.is_finished());
        flush_thread.join().unwrap()
    }

    pub fn until_with(&mut self, what: &str, step_ms: u64, mut so: impl FnMut(&Volume) -> bool) {
        until(what, || {
            self.pass(step_ms);
            let _ = self.step();
            so(self.stepped.volume())
        });
    }
}
