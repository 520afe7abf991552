//! The options of a driver.
//!
//! Invariant: of these options, only those that were set are sent, so the host's own options or the
//! defaults of the protocol apply to all others.
//!
//! Not here: what the options of the protocol mean (`docs/format/driver.md`).

use std::path::PathBuf;

use crate::options::Mode;
use crate::protocol::ControlFacts;

/// How a driver is served. Options that are not set have the protocol's defaults.
#[derive(Clone, Debug, Default)]
pub struct Options {
    pub(super) name: Option<String>,
    pub(super) threads: usize,
    pub(super) facts: ControlFacts,
    pub(super) socket: Option<PathBuf>,
    pub(super) replaces: bool,
    pub(super) is_quiet: bool,
    /// `None`: as the environment says.
    pub(super) is_own_host: Option<bool>,
}

impl Options {
    /// Only defaults: what a driver that replaces another one needs.
    #[must_use]
    pub fn new() -> Self {
        Options::default()
    }

    /// A device with this many bytes.
    #[must_use]
    pub fn sized(bytes: u64) -> Self {
        Options::default().option("size", bytes)
    }

    /// An option of the protocol.
    #[must_use]
    pub fn option(mut self, name: &str, value: impl std::fmt::Display) -> Self {
        self.facts.add(name, value);
        self
    }

    /// The name of a device that is made here; the default is that in `SAWMILL_NAME`, or the
    /// program's name and process id.
    #[must_use]
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = Some(name.into());
        self
    }

    /// Worker threads for each queue; 0 means 1. With one thread and one queue, that is the calling
    /// thread. In a driver that is its own host, the threads of a ublk device's queues call the
    /// driver unless this is above 1.
    #[must_use]
    pub fn threads(mut self, threads: usize) -> Self {
        self.threads = threads;
        self
    }

    /// The driver socket of a host; it overrides `SAWMILL_DRIVER`.
    #[must_use]
    pub fn socket(mut self, path: impl Into<PathBuf>) -> Self {
        self.socket = Some(path.into());
        self
    }

    /// Replace the driver that serves the device, whose doors this one gets. For a driver that is
    /// its own host, the variable `SAWMILL_REPLACE=1` says the same; if nobody serves the device,
    /// it is started.
    #[must_use]
    pub fn replace(mut self) -> Self {
        self.replaces = true;
        self
    }

    /// A host that is started here prints nothing on our standard error.
    #[must_use]
    pub fn quiet(mut self) -> Self {
        self.is_quiet = true;
        self
    }

    /// Be the host of the device, unless a host started this driver: this process opens the doors,
    /// and the driver's functions run on the threads of ublk queues, or on threads of the device.
    /// The variable `SAWMILL_HOST=none` says the same.
    #[must_use]
    pub fn own_host(mut self) -> Self {
        self.is_own_host = Some(true);
        self
    }

    /// Start a host in another process, whatever `SAWMILL_HOST` says.
    #[must_use]
    pub fn host_process(mut self) -> Self {
        self.is_own_host = Some(false);
        self
    }

    pub(super) fn mode(&self) -> Mode {
        if self.facts.get("mode") == Some("batch") { Mode::Batch } else { Mode::Plain }
    }
}

/// Parses a size such as `4096`, `512K`, `64M`, `2G`, `1T`.
#[must_use]
pub fn parse_size(text: &str) -> Option<u64> {
    let shift = match text.as_bytes().last()? {
        b'K' => 10,
        b'M' => 20,
        b'G' => 30,
        b'T' => 40,
        _ => return text.parse().ok(),
    };
    // The last byte is ASCII, so no character is cut in two.
    let number: u64 = text[..text.len() - 1].parse().ok()?;
    // A product that wraps around would make a small device of a size that is too large.
    number.checked_mul(1 << shift)
}

#[cfg(test)]
mod tests {
    use super::parse_size;

    #[test]
    fn sizes_are_numbers_with_a_unit_or_none() {
        assert_eq!(
            ["4096", "1K", "64M", "2T"].map(|text| parse_size(text).unwrap_or(0)),
            [4096, 1024, 64 << 20, 2 << 40]
        );
        for bad in ["", "M", "64MB", "-1", "99999999T", "1é"] {
            assert_eq!(parse_size(bad), None, "{bad}");
        }
    }
}
