//! The options of a batching device: BUSE's, with its names and defaults (thesis, section 4.4.2),
//! and additional ones.
//!
//! Invariants: `set` compares no options; `check` does, when the device is made, so their order
//! does not matter. The longest request fits into one chunk, with an entry for each area that it
//! touches.
//!
//! Not here: which process may change them (`host`).

use std::time::Duration;

use sawmill_device::{Error, ErrorKind, Geometry, Operations, Result};

use super::chunk::ENTRY_BYTES;

/// The largest collision table: a counter of eight bytes for each area.
pub const AREAS_MAX: u64 = 1 << 24;
/// The largest write chunk, and the largest shared memory of a queue. Larger offsets have another
/// meaning (BUSE thesis, section 4.2.1).
pub const SHARED_BYTES_MAX: u64 = 1 << 32;
/// The most queues of a device.
pub const QUEUES_MAX: u32 = 256;
/// The most concurrent requests of a queue.
pub const QUEUE_DEPTH_MAX: u32 = 4096;

/// The options of a device in batch mode, by the names of BUSE's configfs. Sizes are bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatchOptions {
    /// Size of the disk: a positive multiple of `blocksize`.
    pub size: u64,
    /// Logical block: 512 or 4096.
    pub blocksize: u32,
    /// The smallest efficient request; 0: one block.
    pub io_min: u32,
    /// The preferred request size; 0: one block.
    pub io_opt: u32,
    /// Write queues, and as many for reads: usually one for each core.
    pub hw_queues: u32,
    /// The threads of a queue stay on one core, and requests go to the queue of the core they come
    /// from.
    pub tie_queues: bool,
    /// The most reads of a queue that the driver has at a time.
    pub queue_depth: u32,
    /// Writes are collected into pieces of shared memory of this size, including entries.
    pub write_chunk_size: u64,
    /// Shared memory of a write queue: a multiple of `write_chunk_size`.
    pub write_shm_size: u64,
    /// Shared memory of a read queue, for its reads in flight.
    pub read_shm_size: u64,
    /// Writes in the same area of this size are numbered in order. A multiple of `blocksize`.
    pub collision_area_size: u64,
    /// Whether discards go to the driver.
    pub can_discard: bool,
    /// Whether write-zeroes go to the driver; otherwise zeroes are written as data.
    pub can_write_zeroes: bool,
    /// A flush orders writes and makes nothing durable (BUSE thesis, section 4.2.1): it completes
    /// immediately.
    pub weak_flush: bool,
    /// A chunk of this age goes to the driver even if it is not full. Zero: never by age, as in
    /// BUSE.
    pub chunk_age_max: Duration,
}

impl Default for BatchOptions {
    fn default() -> Self {
        BatchOptions {
            size: 1 << 30,
            blocksize: 512,
            io_min: 0,
            io_opt: 0,
            hw_queues: 1,
            tie_queues: false,
            queue_depth: 64,
            write_chunk_size: 2 << 20,
            write_shm_size: 32 << 20,
            read_shm_size: 32 << 20,
            collision_area_size: 4096,
            can_discard: false,
            can_write_zeroes: false,
            weak_flush: false,
            chunk_age_max: Duration::from_millis(100),
        }
    }
}

impl BatchOptions {
    /// Sets the option with this name (as in BUSE's configfs) from text. Numbers may be hexadecimal
    /// (`0x`) or octal (`0`), as in BUSE. Does not check whether options conflict:
    /// [`check`](Self::check) does.
    ///
    /// # Errors
    /// `NotFound` for an unknown name, `Invalid` for a value that is not a number or a boolean.
    pub fn set(&mut self, name: &str, value: &str) -> Result<()> {
        let wide = || number(name, value);
        let narrow = || {
            let number = number(name, value)?;
            u32::try_from(number).map_err(|_| bad(format!("{name}={value} is too large")))
        };
        match name {
            "size" => self.size = wide()?,
            "blocksize" => self.blocksize = narrow()?,
            "io_min" => self.io_min = narrow()?,
            "io_opt" => self.io_opt = narrow()?,
            "hw_queues" => self.hw_queues = narrow()?,
            "tie_queues" => self.tie_queues = truth(name, value)?,
            "queue_depth" => self.queue_depth = narrow()?,
            "write_chunk_size" => self.write_chunk_size = wide()?,
            "write_shm_size" => self.write_shm_size = wide()?,
            "read_shm_size" => self.read_shm_size = wide()?,
            "collision_area_size" => self.collision_area_size = wide()?,
            // Requests go straight to the queues, so there is no scheduler to switch off.
            "no_scheduler" => drop(truth(name, value)?),
            "can_discard" => self.can_discard = truth(name, value)?,
            "can_write_zeroes" => self.can_write_zeroes = truth(name, value)?,
            "weak_flush" => self.weak_flush = truth(name, value)?,
            "chunk_age_max_ms" => self.chunk_age_max = Duration::from_millis(wide()?),
            "can_write_same" | "can_secure_erase" => {
                if truth(name, value)? {
                    return Err(bad(format!(
                        "{name}: kernels do not send such requests any more; leave it at 0"
                    )));
                }
            }
            _ => return Err(Error::new(ErrorKind::NotFound, format!("there is no option {name}"))),
        }
        Ok(())
    }

    /// Bytes of a chunk for entries; the data follows them.
    #[must_use]
    pub fn metadata_bytes(&self) -> u64 {
        // An entry covers at least one block. So a chunk never runs out of entries before it runs
        // out of room for data.
        self.write_chunk_size / u64::from(self.blocksize) * ENTRY_BYTES as u64
    }

    /// The longest read or write: it fits into one chunk, with an entry for each collision area
    /// that it touches.
    #[must_use]
    pub fn request_bytes_max(&self) -> u64 {
        let blocksize = u64::from(self.blocksize);
        let data = (self.write_chunk_size - self.metadata_bytes()) / blocksize * blocksize;
        // A read needs room in the memory of its queue, and a geometry has 32 bits for the limit.
        data.min(self.read_shm_size).min(u64::from(u32::MAX) / blocksize * blocksize)
    }

    /// Checks that the options do not conflict.
    ///
    /// # Errors
    /// `Invalid`: which option, and its valid values.
    pub fn check(&self) -> Result<()> {
        self.check_device()?;
        let blocksize = u64::from(self.blocksize);
        let (chunk, memory) = (self.write_chunk_size, self.write_shm_size);
        if chunk == 0 || !chunk.is_multiple_of(4096) {
            return Err(bad(format!(
                "write_chunk_size={chunk} is not a positive multiple of 4096"
            )));
        }
        if self.request_bytes_max() == 0 {
            let text = format!("write_chunk_size={chunk} holds no block of {blocksize} bytes");
            return Err(bad(format!("{text} beside its metadata")));
        }
        if memory == 0 || !memory.is_multiple_of(chunk) || memory > SHARED_BYTES_MAX {
            let text = format!(
                "write_shm_size={memory} is not a positive multiple of write_chunk_size={chunk}"
            );
            return Err(bad(format!("{text}, or more than {SHARED_BYTES_MAX}")));
        }
        if self.read_shm_size < blocksize.max(4096) || self.read_shm_size > SHARED_BYTES_MAX {
            let text = format!(
                "read_shm_size={} is not from 4096 to {SHARED_BYTES_MAX}",
                self.read_shm_size
            );
            return Err(bad(text));
        }
        let area = self.collision_area_size;
        if area == 0 || !area.is_multiple_of(blocksize) {
            let text = format!(
                "collision_area_size={area} is not a positive multiple of blocksize={blocksize}"
            );
            return Err(bad(text));
        }
        if self.size.div_ceil(area) > AREAS_MAX {
            let least = (self.size.div_ceil(AREAS_MAX)).next_power_of_two();
            let text =
                format!("collision_area_size={area} makes more than {AREAS_MAX} areas of the disk");
            return Err(bad(format!("{text}: give at least {least}")));
        }
        Ok(())
    }

    /// Checks the options that every device has, in chunks or not.
    pub(crate) fn check_device(&self) -> Result<()> {
        let blocksize = u64::from(self.blocksize);
        if ![512, 4096].contains(&self.blocksize) {
            return Err(bad(format!("blocksize={} is neither 512 nor 4096", self.blocksize)));
        }
        if self.size == 0 || !self.size.is_multiple_of(blocksize) || self.size > i64::MAX as u64 {
            return Err(bad(format!(
                "size={} is not a positive multiple of blocksize={blocksize}",
                self.size
            )));
        }
        for (name, value) in [("io_min", self.io_min), ("io_opt", self.io_opt)] {
            if value != 0 && (value < self.blocksize || !value.is_power_of_two()) {
                let text = format!(
                    "{name}={value} is neither 0 nor a power of two of at least {blocksize}"
                );
                return Err(bad(text));
            }
        }
        for (name, value, most) in [
            ("hw_queues", self.hw_queues, QUEUES_MAX),
            ("queue_depth", self.queue_depth, QUEUE_DEPTH_MAX),
        ] {
            if value == 0 || value > most {
                return Err(bad(format!("{name}={value} is not from 1 to {most}")));
            }
        }
        Ok(())
    }

    /// The geometry of the device.
    #[must_use]
    pub fn geometry(&self) -> Geometry {
        Geometry {
            size_bytes: self.size,
            block_bytes: self.blocksize,
            preferred_bytes: self.io_opt.max(self.io_min).max(self.blocksize),
            request_bytes_max: self.request_bytes_max() as u32,
            read_only: false,
            shared_cache: true,
            operations: Operations {
                discard: self.can_discard,
                write_zeroes: self.can_write_zeroes,
                allocation: false,
            },
        }
    }
}

fn bad(text: String) -> Error {
    Error::new(ErrorKind::Invalid, text)
}

pub(crate) fn number(name: &str, value: &str) -> Result<u64> {
    let value = value.trim();
    let parsed = match value.strip_prefix("0x").or_else(|| value.strip_prefix("0X")) {
        Some(digits) => u64::from_str_radix(digits, 16),
        None if value.len() > 1 && value.starts_with('0') => u64::from_str_radix(&value[1..], 8),
        None => value.parse(),
    };
    parsed.map_err(|_| bad(format!("{name}={value} is not a number")))
}

pub(crate) fn truth(name: &str, value: &str) -> Result<bool> {
    match value.trim() {
        "1" | "y" | "yes" | "on" => Ok(true),
        "0" | "n" | "no" | "off" => Ok(false),
        _ => Err(bad(format!("{name}={value} is neither 0 nor 1"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chunk_must_hold_a_block_beside_its_metadata() {
        let sizes = |write_chunk_size| BatchOptions {
            size: 1 << 20,
            blocksize: 4096,
            write_chunk_size,
            write_shm_size: 16 * write_chunk_size,
            ..BatchOptions::default()
        };
        let refused = sizes(4096).check().unwrap_err().to_string();
        assert!(refused.contains("write_chunk_size=4096 holds no block"), "{refused}");
        assert!(sizes(8192).check().is_ok() && sizes(8192).request_bytes_max() == 4096);
    }
}
