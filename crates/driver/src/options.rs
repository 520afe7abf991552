//! The options of a device with a driver: the table in `docs/format/driver.md`.
//!
//! Options are checked together when all are known: their order does not matter. The host's options
//! override what a driver says.
//!
//! Invariants: options in effect have passed `check`, so none conflict. A later driver changes no
//! option: what it says must agree with those in effect.
//!
//! Not here: the batch layer's own (`batch::options`).

use std::time::Duration;

use sawmill_device::{Error, ErrorKind, Geometry, Operations, Result};

use crate::batch::BatchOptions;
use crate::batch::options::{number, truth};
use crate::protocol::ControlFacts;

/// How requests reach the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// One by one.
    Plain,
    /// Writes in chunks.
    Batch,
}

/// What happens to requests when the driver has died.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeathPolicy {
    /// They wait for the next driver.
    Wait,
    /// They fail until there is a next driver.
    Fail,
}

/// The options of a device with a driver, in either mode, as the host and the first driver set
/// them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceOptions {
    /// How requests reach the driver.
    pub mode: Mode,
    /// Sizes and queues, for either mode, and the options of the batch layer.
    pub batch: BatchOptions,
    /// Plain mode: commands may start and end at any byte.
    pub byte_granular: bool,
    /// Plain mode: the longest read or write.
    pub request_bytes_max: u32,
    /// The device cannot be changed.
    pub read_only: bool,
    /// Plain mode: flushes go to the driver; otherwise everything it answered is durable.
    pub can_flush: bool,
    /// Plain mode: a single write can be durable.
    pub can_fua: bool,
    /// The device outlives its driver.
    pub recoverable: bool,
    /// What happens to requests without a driver.
    pub on_death: DeathPolicy,
    /// The longest wait for a driver. Zero: no limit.
    pub death_timeout: Duration,
    /// A driver that takes longer for a command counts as dead. Zero: never.
    pub request_timeout: Duration,
}

impl Default for DeviceOptions {
    fn default() -> Self {
        DeviceOptions {
            mode: Mode::Plain,
            batch: BatchOptions::default(),
            byte_granular: false,
            request_bytes_max: 1 << 20,
            read_only: false,
            can_flush: true,
            can_fua: false,
            recoverable: true,
            on_death: DeathPolicy::Wait,
            death_timeout: Duration::ZERO,
            request_timeout: Duration::ZERO,
        }
    }
}

/// The longest request of a plain driver.
const REQUEST_BYTES_MAX: u32 = 32 << 20;
/// The most memory for a queue's requests.
const MEMORY_BYTES_MAX: u64 = 1 << 32;

impl DeviceOptions {
    /// Sets the option with this name from text.
    ///
    /// # Errors
    /// `NotFound` for an unknown name, `Invalid` for an invalid value.
    pub fn set(&mut self, name: &str, value: &str) -> Result<()> {
        let seconds = || {
            let seconds: f64 = value.trim().parse().unwrap_or(-1.0);
            let duration = Duration::try_from_secs_f64(seconds);
            duration.map_err(|_| bad(format!("{name}={value} is not a number of seconds")))
        };
        match name {
            "mode" => {
                self.mode = match value {
                    "plain" => Mode::Plain,
                    "batch" => Mode::Batch,
                    _ => return Err(bad(format!("mode={value} is neither plain nor batch"))),
                }
            }
            "on_death" => {
                self.on_death = match value {
                    "wait" => DeathPolicy::Wait,
                    "fail" => DeathPolicy::Fail,
                    _ => return Err(bad(format!("on_death={value} is neither wait nor fail"))),
                }
            }
            "byte_granular" => self.byte_granular = truth(name, value)?,
            "request_bytes_max" => {
                let bytes = u32::try_from(number(name, value)?);
                self.request_bytes_max =
                    bytes.map_err(|_| bad(format!("{name}={value} is too large")))?;
            }
            "read_only" => self.read_only = truth(name, value)?,
            "can_flush" => self.can_flush = truth(name, value)?,
            "can_fua" => self.can_fua = truth(name, value)?,
            "recoverable" => self.recoverable = truth(name, value)?,
            "death_timeout_s" => self.death_timeout = seconds()?,
            "request_timeout_s" => self.request_timeout = seconds()?,
            _ => self.batch.set(name, value)?,
        }
        Ok(())
    }

    /// All options in effect, as text.
    #[must_use]
    pub fn facts(&self) -> ControlFacts {
        let batch = &self.batch;
        let truth = u8::from;
        let mode = if self.mode == Mode::Batch { "batch" } else { "plain" };
        let facts = ControlFacts::default()
            .with("mode", mode)
            .with("size", batch.size)
            .with("blocksize", batch.blocksize)
            .with("byte_granular", truth(self.byte_granular))
            .with("hw_queues", batch.hw_queues)
            .with("tie_queues", truth(batch.tie_queues))
            .with("queue_depth", batch.queue_depth)
            .with("request_bytes_max", self.longest_request())
            .with("read_only", truth(self.read_only))
            .with("can_flush", truth(self.can_flush))
            .with("can_fua", truth(self.can_fua))
            .with("can_discard", truth(batch.can_discard))
            .with("can_write_zeroes", truth(batch.can_write_zeroes))
            .with("recoverable", truth(self.recoverable))
            .with("on_death", if self.on_death == DeathPolicy::Wait { "wait" } else { "fail" })
            .with("death_timeout_s", self.death_timeout.as_secs_f64())
            .with("request_timeout_s", self.request_timeout.as_secs_f64())
            .with("io_min", batch.io_min)
            .with("io_opt", batch.io_opt);
        if self.mode == Mode::Plain {
            return facts;
        }
        facts
            .with("collision_area_size", batch.collision_area_size)
            .with("write_chunk_size", batch.write_chunk_size)
            .with("write_shm_size", batch.write_shm_size)
            .with("read_shm_size", batch.read_shm_size)
            .with("weak_flush", truth(batch.weak_flush))
            .with("no_scheduler", 1)
            .with("chunk_age_max_ms", batch.chunk_age_max.as_millis())
            .with("metadata_bytes", batch.metadata_bytes())
    }

    /// Checks whether a later driver says something that differs from the options in effect. Given
    /// options override what it says, as they did for the first driver.
    ///
    /// # Errors
    /// `Invalid`: which option.
    pub fn agrees(&self, driver_facts: &ControlFacts, host_facts: &ControlFacts) -> Result<()> {
        let mut other = self.clone();
        // A restarted driver repeats what it said at first, also where the host's options overrode
        // it.
        let counts = |name| !IS_NO_OPTION.contains(&name) && host_facts.get(name).is_none();
        for (name, value) in driver_facts.iter().filter(|(name, _)| counts(name)) {
            other.set(name, value)?;
            if other.clone().normal() != *self {
                let facts = self.facts();
                let current = facts.get(name).unwrap_or("another value");
                return Err(bad(format!(
                    "{name}={value}: the device has {current}, which cannot change while it exists"
                )));
            }
        }
        Ok(())
    }

    /// Applies what the first driver says, except for given options.
    ///
    /// # Errors
    /// `NotFound`, `Invalid`: which option, and its valid values.
    pub fn declared(driver_facts: &ControlFacts, host_facts: &ControlFacts) -> Result<Self> {
        let mut options = DeviceOptions::default();
        let driver_facts = driver_facts.iter().filter(|(name, _)| !IS_NO_OPTION.contains(name));
        // The host's options come last and win.
        for (name, value) in driver_facts.chain(host_facts.iter()) {
            options.set(name, value)?;
        }
        options.check()?;
        Ok(options.normal())
    }

    /// Resets plain-mode options in batch mode: they mean nothing there, but a driver may set both.
    fn normal(mut self) -> Self {
        if self.mode == Mode::Batch {
            (self.byte_granular, self.can_fua, self.can_flush) = (false, false, true);
            self.request_bytes_max = DeviceOptions::default().request_bytes_max;
        }
        self
    }

    /// The longest read or write.
    #[must_use]
    pub fn longest_request(&self) -> u32 {
        match self.mode {
            Mode::Plain => self.request_bytes_max,
            Mode::Batch => self.batch.request_bytes_max() as u32,
        }
    }

    /// Memory of a queue in plain mode.
    #[must_use]
    pub fn memory_bytes(&self) -> u64 {
        // Enough for a full queue of the longest requests.
        u64::from(self.batch.queue_depth) * u64::from(self.request_bytes_max.next_multiple_of(4096))
    }

    /// Checks that the options do not conflict.
    ///
    /// # Errors
    /// `Invalid`: which option, and its valid values.
    pub fn check(&self) -> Result<()> {
        match self.mode {
            Mode::Batch => {
                self.batch.check()?;
                if self.read_only {
                    return Err(bad("read_only=1 needs mode=plain".to_owned()));
                }
            }
            Mode::Plain => {
                self.batch.check_device()?;
                let (bytes, block) = (self.request_bytes_max, self.batch.blocksize);
                if !(4096..=REQUEST_BYTES_MAX).contains(&bytes) || !bytes.is_multiple_of(block) {
                    let text = format!(
                        "request_bytes_max={bytes} is not a multiple of blocksize={block} from 4096"
                    );
                    return Err(bad(format!("{text} to {REQUEST_BYTES_MAX}")));
                }
                if self.memory_bytes() > MEMORY_BYTES_MAX {
                    let depth = self.batch.queue_depth;
                    let text =
                        format!("queue_depth={depth} times request_bytes_max={bytes} is more than");
                    return Err(bad(format!("{text} {MEMORY_BYTES_MAX} bytes")));
                }
            }
        }
        if self.can_fua && !self.can_flush {
            return Err(bad("can_fua=1 needs can_flush=1".to_owned()));
        }
        Ok(())
    }

    /// The geometry of the device; requests are whole blocks, or bytes with `byte_granular`.
    #[must_use]
    pub fn geometry(&self) -> Geometry {
        let batch = &self.batch;
        Geometry {
            request_bytes_max: self.longest_request(),
            read_only: self.read_only,
            operations: Operations {
                discard: batch.can_discard && !self.read_only,
                write_zeroes: batch.can_write_zeroes && !self.read_only,
                allocation: false,
            },
            ..batch.geometry()
        }
    }
}

/// Fields of a HELLO that are not options.
const IS_NO_OPTION: [&str; 3] = ["protocol", "program", "replace"];

fn bad(text: String) -> Error {
    Error::new(ErrorKind::Invalid, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(text: &str) -> ControlFacts {
        text.split_whitespace().fold(ControlFacts::default(), |facts, word| {
            let (name, value) = word.split_once('=').unwrap();
            facts.with(name, value)
        })
    }

    fn error_text(driver_facts: &str, host_facts: &str) -> String {
        DeviceOptions::declared(&facts(driver_facts), &facts(host_facts)).unwrap_err().to_string()
    }

    #[test]
    fn given_options_override_what_the_driver_says() {
        let options = DeviceOptions::declared(
            &facts("protocol=1 size=1M can_discard=1"),
            &facts("size=2097152"),
        );
        assert!(options.is_err(), "1M is no number of this protocol");
        let options =
            DeviceOptions::declared(&facts("size=1048576 can_discard=1"), &facts("size=2097152"))
                .unwrap();
        assert_eq!(options.batch.size, 2 << 20);
        assert!(options.geometry().operations.discard);
    }

    #[test]
    fn options_in_effect_are_read_again_as_the_same() {
        let driver_facts = facts(
            "mode=batch size=1048576 death_timeout_s=1.5 on_death=fail weak_flush=1 io_opt=8192",
        );
        let options = DeviceOptions::declared(&driver_facts, &ControlFacts::default()).unwrap();
        let plain = facts("byte_granular=1 can_flush=0");
        options.agrees(&plain, &ControlFacts::default()).expect("says nothing in batch mode");
        let mut effective_facts = options.facts();
        assert_eq!(effective_facts.get("metadata_bytes"), Some("131072"));
        effective_facts = effective_facts
            .iter()
            .filter(|(name, _)| !["metadata_bytes", "request_bytes_max"].contains(name))
            .fold(ControlFacts::default(), |facts, (name, value)| facts.with(name, value));
        assert_eq!(
            DeviceOptions::declared(&effective_facts, &ControlFacts::default()).unwrap(),
            options
        );
        options.agrees(&effective_facts, &ControlFacts::default()).unwrap();
        let driver_facts = facts("weak_flush=1 size=4096");
        let message =
            options.agrees(&driver_facts, &ControlFacts::default()).unwrap_err().to_string();
        assert!(message.contains("size=4096") && message.contains("1048576"), "{message}");
        // A restarted driver repeats what it said at first, even if the host's options overrode it.
        options.agrees(&driver_facts, &facts("size=1048576")).unwrap();
    }

    #[test]
    fn what_does_not_go_together_is_named() {
        for (driver_facts, expected) in [
            ("sise=1", "no option sise"),
            ("mode=fast", "neither plain nor batch"),
            ("size=1000", "size=1000"),
            ("blocksize=1024", "blocksize=1024"),
            ("request_bytes_max=1000", "request_bytes_max=1000"),
            ("request_bytes_max=33554432 queue_depth=4096", "queue_depth=4096"),
            ("can_fua=1 can_flush=0", "can_flush=1"),
            ("mode=batch read_only=1", "mode=plain"),
            ("hw_queues=0", "hw_queues=0"),
            ("tie_queues=2", "neither 0 nor 1"),
            ("death_timeout_s=-1", "death_timeout_s=-1"),
            ("death_timeout_s=x", "seconds"),
            ("on_death=no", "neither wait nor fail"),
            ("recoverable=2", "neither 0 nor 1"),
            ("io_opt=3000", "io_opt=3000"),
        ] {
            let text = error_text(driver_facts, "");
            assert!(text.contains(expected), "{driver_facts}: {text}");
        }
    }
}
