//! Both ends of a link as commands use them: keys, places, a connection, and its status.
//!
//! Modules: [`location`] (addresses as users type them), [`remote`] (a connected initiator),
//! [`end_report`] (the status of a running end), [`standing`] (what a target keeps for the next
//! one). Not here: packets and threads (`sawmill-link`), doors, volumes.

pub(crate) mod end_report;
pub(crate) mod location;
pub(crate) mod remote;
pub(crate) mod standing;

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use sawmill_link::session::{KeyError, PreSharedKey, Security};

use crate::busy_poll::BusyPoll;
use sawmill_console::exit::{Exit, Failure, Result};

/// Only many small requests on many connections need more than one.
const RECEIVERS_DEFAULT: u32 = 1;

/// How many threads of a target receive at an address.
#[derive(Args)]
pub(crate) struct ReceiversOption {
    /// Receiving threads per UDP or Ethernet address. Each takes memory: 8 MiB for Ethernet, a few
    /// MiB under load for UDP.
    #[arg(long, value_name = "N", default_value_t = RECEIVERS_DEFAULT,
          value_parser = clap::value_parser!(u32).range(1..=64))]
    receivers: u32,
}

impl ReceiversOption {
    pub(crate) fn count(&self) -> usize {
        self.receivers as usize
    }
}

/// How the receivers of a link wait.
#[derive(Args)]
pub(crate) struct BusyPollOption {
    /// Whether receivers look for the next packet before they sleep: auto (while packets come one
    /// by one at short intervals and no other thread wants the core; not where one core is allowed,
    /// or processor time is limited, at the start) or never.
    #[arg(long, value_name = "WHEN", value_enum, default_value_t = BusyPoll::Never)]
    busy_poll: BusyPoll,
}

impl BusyPollOption {
    pub(crate) fn spin_time_max(&self) -> Duration {
        self.busy_poll.spin_time_max()
    }
}

/// How both ends authenticate each other.
#[derive(Args)]
pub(crate) struct KeyOptions {
    /// The key file, the same at both ends; `sawmill link key FILE` makes one.
    #[arg(long, value_name = "FILE")]
    key_file: Option<PathBuf>,

    /// Use no key: anyone who can reach the network reads and writes. The other end must be
    /// --insecure too.
    #[arg(long, conflicts_with = "key_file")]
    insecure: bool,
}

impl KeyOptions {
    /// The requested security; there is no default.
    pub(crate) fn security(&self) -> Result<Security> {
        match &self.key_file {
            Some(path) => Ok(Security::Key(PreSharedKey::read(path).map_err(key_failed)?)),
            None if self.insecure => Ok(Security::Insecure),
            None => Err(Failure::usage(
                "a link needs the same key at both ends: make one with `sawmill link key FILE`, \
                 copy FILE to the other machine, and give --key-file FILE at both ends; or give \
                 --insecure at both ends to use no key",
            )),
        }
    }
}

/// The failure for a key that cannot be read or made.
pub(crate) fn key_failed(error: KeyError) -> Failure {
    let exit = match &error {
        KeyError::Read { source, .. } | KeyError::Write { source, .. } => {
            Failure::io("", source).exit()
        }
        KeyError::Open { .. } => Exit::Refused,
        KeyError::Malformed { .. } | KeyError::Line { .. } | KeyError::Long { .. } => Exit::Usage,
        KeyError::Exists { .. } => Exit::Exists,
        KeyError::Random => Exit::Unavailable,
    };
    Failure::new(exit, error.to_string()).caused_by(error)
}
