//! What only drivers do: they are killed, replaced and ended, with requests in flight.
//!
//! Every request must succeed, whether the old driver or the new one answers it. Written data must
//! also survive, unless the driver keeps its bytes in its own memory; the first kill shows which.
//!
//! Invariant: loads end by themselves when the device has failed. Not here: how a driver is killed
//! (`scene`).

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use sawmill_device::{BlockDevice, BlockDeviceExt};
use sawmill_driver::DeathPolicy;

use super::scene::{Scene, wrong};
use super::{DeviceKind, LOOK_EVERY, Outcome};
use sawmill_console::exit::{Exit, Failure, Result};

const WRITERS: u64 = 4;
/// Part of the device that one writer has for itself.
const STRIPE_BYTES: u64 = 1 << 20;
/// How many times the driver is killed, or replaced.
const ROUNDS: usize = 5;
/// Requests of the load between two kills or replacements.
const REQUESTS: u64 = 40;

/// A clause of a driver's life.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Life {
    Killed,
    Replaced,
    Ended,
}

/// All clauses of a driver's life, in the order in which they run.
pub(super) const ALL: [Life; 3] = [Life::Killed, Life::Replaced, Life::Ended];

impl Life {
    pub(super) fn name(self) -> &'static str {
        match self {
            Life::Killed => "driver_killed_with_commands_outstanding_and_every_request_answered",
            Life::Replaced => "driver_replaced_under_load_and_every_request_answered",
            Life::Ended => "driver_ends_in_order_after_end",
        }
    }

    pub(super) fn judge(self, scene: &mut Scene) -> Outcome {
        let options = scene.options();
        if self == Life::Killed && !options.recoverable {
            return Outcome::LeftOut("recoverable=0: the device ends with its driver".to_owned());
        }
        if self == Life::Killed && options.on_death == DeathPolicy::Fail {
            return Outcome::LeftOut(
                "on_death=fail: requests fail while no driver is connected".to_owned(),
            );
        }
        let judged = match self {
            Life::Killed | Life::Replaced => self.under_load(scene),
            Life::Ended => ended(scene),
        };
        judged.map_or_else(|why| Outcome::Failed(why.to_string()), Outcome::Ok)
    }

    fn under_load(self, scene: &mut Scene) -> Result<String> {
        let keeps = scene.kind == DeviceKind::Full && keeps_its_bytes(scene, self)?;
        let load = Load::new(scene.device(), scene.kind, keeps);
        let changed = std::thread::scope(|scope| {
            for writer in 0..WRITERS {
                let load = &load;
                scope.spawn(move || load.note(load.work(writer)));
            }
            let changed = (0..ROUNDS).try_for_each(|_| {
                load.goes_on(scene)?;
                match self {
                    Life::Killed => scene.kill_and_start(),
                    _ => scene.replace(),
                }
            });
            let changed = changed.and_then(|()| load.goes_on(scene));
            load.is_over.store(true, SeqCst);
            if let Err(why) = &changed {
                // Every waiting request gets an error now; what the load then reports is not the
                // cause.
                load.note(Err(why.clone()));
                scene.fail(&why.to_string());
            }
            changed
        });
        match load.wrong.into_inner().unwrap_or_default() {
            Some(why) => Err(why),
            None => changed.map(|()| match (keeps, scene.kind) {
                (false, DeviceKind::Full) => {
                    "its bytes went with it, so only the answers were checked".to_owned()
                }
                _ => String::new(),
            }),
        }
    }
}

/// Whether bytes that were flushed outlive the driver. Bytes that are neither there nor zero are an
/// error.
fn keeps_its_bytes(scene: &mut Scene, life: Life) -> Result<bool> {
    let (device, address) = (scene.device(), 5 << 20);
    let failed = |error: sawmill_device::Error| lost("before the driver changed", error);
    device.write_at(address, &[0xA7; 8192]).map_err(failed)?;
    device.flush().map_err(failed)?;
    match life {
        Life::Killed => scene.kill_and_start()?,
        _ => scene.replace()?,
    }
    let bytes =
        device.read_at(address, 8192).map_err(|error| lost("after the driver changed", error))?;
    match bytes.iter().find(|byte| **byte != bytes[0]) {
        None if bytes[0] == 0xA7 => Ok(true),
        None if bytes[0] == 0 => Ok(false),
        _ => Err(wrong("after the driver changed, only a part of the flushed bytes was there")),
    }
}

/// A request that must succeed failed.
fn lost(what: impl std::fmt::Display, error: sawmill_device::Error) -> Failure {
    Failure::caused(Exit::Unavailable, what, error)
}

fn ended(scene: &mut Scene) -> Result<String> {
    let device = scene.device();
    let failed = |error: sawmill_device::Error| lost("a write before the end", error);
    if scene.kind != DeviceKind::ReadOnly {
        (0..20)
            .try_for_each(|number| device.write_at(number * 4096, &[9; 4096]))
            .map_err(failed)?;
    }
    drop(device);
    scene.end().map(|()| String::new())
}

/// Reads and writes; each thread has its own stripe.
struct Load {
    device: Arc<dyn BlockDevice>,
    kind: DeviceKind,
    keeps: bool,
    is_over: AtomicBool,
    answered: AtomicU64,
    wrong: Mutex<Option<Failure>>,
}

impl Load {
    fn new(device: Arc<dyn BlockDevice>, kind: DeviceKind, keeps: bool) -> Self {
        let (is_over, answered) = (AtomicBool::new(false), AtomicU64::new(0));
        Load { device, kind, keeps, is_over, answered, wrong: Mutex::default() }
    }

    fn note(&self, outcome: Result<()>) {
        if let Err(why) = outcome {
            // The other writers stop too: what they find after the first failure is no news.
            self.is_over.store(true, SeqCst);
            if let Ok(mut wrong) = self.wrong.lock() {
                wrong.get_or_insert(why);
            }
        }
    }

    /// Writes somewhere in the stripe and reads all of it again, until the load ends.
    fn work(&self, writer: u64) -> Result<()> {
        let stripe = writer * STRIPE_BYTES;
        let mut model = vec![0_u8; 64 << 10];
        let mut number = writer;
        while !self.is_over.load(SeqCst) {
            number += 1;
            let at =
                (number.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40) as usize % (model.len() - 5000);
            let length = 1 + (number as usize * 977) % 5000;
            if self.kind != DeviceKind::ReadOnly {
                let bytes = vec![(number % 255) as u8 + 1; length];
                let address = stripe + at as u64;
                let what = || format!("a write of {length} bytes at {address}");
                self.device.write_at(address, &bytes).map_err(|error| lost(what(), error))?;
                model[at..at + length].copy_from_slice(&bytes);
            }
            let what = || format!("a read of {} bytes at {stripe}", model.len());
            let mut read = Vec::with_capacity(model.len());
            while read.len() < model.len() {
                let address = stripe + read.len() as u64;
                let bytes = self.device.read_at(address, 8192);
                read.extend(bytes.map_err(|error| lost(what(), error))?);
            }
            if self.keeps && read != model {
                let place = read.iter().zip(&model).position(|(read, model)| read != model);
                let address = stripe + place.unwrap_or_default() as u64;
                return Err(wrong(format!(
                    "an answered write at {address} is not there after the driver changed"
                )));
            }
            self.answered.fetch_add(1, SeqCst);
        }
        Ok(())
    }

    /// Waits until more requests were answered.
    fn goes_on(&self, scene: &mut Scene) -> Result<()> {
        // Counted in answers, because time alone would also pass while nothing is answered.
        let target_count = self.answered.load(SeqCst) + REQUESTS;
        let deadline = Instant::now() + 4 * scene.within;
        while self.answered.load(SeqCst) < target_count && !self.is_over.load(SeqCst) {
            if let Some(how) = scene.driver_died() {
                return Err(wrong(format!("the driver ended during the clause: {how}")));
            }
            if Instant::now() > deadline {
                return Err(wrong("requests are not answered any more"));
            }
            std::thread::park_timeout(LOOK_EVERY / 10);
        }
        Ok(())
    }
}
