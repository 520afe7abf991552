//! An initiator that is connected to a target, and the target's first answers.
//!
//! Invariants: while a target does not answer, the caller also learns of unauthenticated refusals.
//! A link that cannot be opened is an error only if no other link is left.
//!
//! Not here: addresses as users type them (`location`), reconnecting and requests
//! (`sawmill_link::initiator`).

use std::sync::Arc;
use std::time::{Duration, Instant};

use sawmill_device::ErrorKind;
use sawmill_format::link::control::{self, Exports};
use sawmill_link::carrier::{LinkAddress, reach};
use sawmill_link::clock::SteadyClock;
use sawmill_link::initiator::{Answer, Initiator, InitiatorOptions, OpenMode, RemoteDevice};
use sawmill_link::session::{Security, unguessable};
use sawmill_link::threads::InitiatorThreads;

use crate::link::location::LinkLocation;
use sawmill_console::exit::{Exit, Failure, Result};

/// Time for a target to answer for the first time.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(20);
/// An unauthenticated refusal counts if nothing better arrived for this long.
const HINT_TIME_MIN: Duration = Duration::from_secs(2);
/// Interval of checks for an answer.
const LOOK_EVERY: Duration = Duration::from_millis(5);
/// Interval of requests to a target that asks to be asked again.
const ASK_AGAIN_EVERY: Duration = Duration::from_millis(50);

/// A connection that is being made, or was made.
pub(crate) struct Remote {
    pub(crate) threads: InitiatorThreads,
    location: LinkLocation,
}

impl Remote {
    /// Starts to connect, and does not wait for the target. Fails if no address can be used.
    pub(crate) fn connect(
        location: &LinkLocation,
        security: Security,
        options: InitiatorOptions,
    ) -> Result<Remote> {
        check(&location.addresses)?;
        let clock = Arc::new(SteadyClock);
        let initiator =
            Initiator::new(options, security, location.addresses.len(), clock, unguessable());
        let attached = InitiatorThreads::new(initiator, &location.addresses)
            .map_err(|error| Failure::io("cannot start the threads of a link", &error))?;
        Ok(Remote { threads: attached, location: location.clone() })
    }

    /// The initiator.
    pub(crate) fn initiator(&self) -> &Arc<Initiator> {
        self.threads.initiator()
    }

    /// Opens an export. `InUse` if another initiator has it and `mode` does not take it over.
    pub(crate) fn open(&self, export: &str, mode: OpenMode) -> Result<RemoteDevice> {
        let bytes = self.answer(|| self.initiator().request_open(export, mode)).map_err(
            |failure| match failure.exit() {
                Exit::InUse => {
                    let text = format!(
                        "{export}: {failure}: pass --take-over to fence it, or --shared at every \
                         initiator"
                    );
                    Failure::new(Exit::InUse, text).caused_by(failure)
                }
                _ => failure.of_volume(export),
            },
        )?;
        Ok(self.initiator().opened(export, mode, &bytes)?)
    }

    /// Names and sizes of the target's exports.
    pub(crate) fn exports(&self) -> Result<Exports> {
        let bytes = self.answer(|| self.initiator().request_list())?;
        control::exports(&bytes)
            .map_err(|error| Failure::new(Exit::Internal, error.to_string()).caused_by(error))
    }

    fn answer(&self, ask: impl Fn() -> Answer) -> Result<Vec<u8>> {
        let deadline = Instant::now() + ANSWER_TIME_MAX;
        let mut hinted: Option<Instant> = None;
        let mut answer = ask();
        loop {
            match answer.poll() {
                Some(Err(error))
                    if error.kind() == ErrorKind::Unavailable && Instant::now() < deadline =>
                {
                    std::thread::sleep(ASK_AGAIN_EVERY);
                    answer = ask();
                }
                Some(outcome) => return Ok(outcome?),
                None => std::thread::sleep(LOOK_EVERY),
            }
            let hint = self.initiator().hint();
            // An authenticated answer may still come, so a hint must stand for a while before it
            // counts.
            let since = hint.as_ref().map(|_| *hinted.get_or_insert_with(Instant::now));
            if let (Some(hint), Some(since)) = (hint, since)
                && since.elapsed() >= HINT_TIME_MIN
            {
                return Err(Failure::caused(Exit::Denied, &self.location, hint));
            }
            if Instant::now() >= deadline {
                return Err(self.unanswered());
            }
        }
    }

    fn unanswered(&self) -> Failure {
        let text = format!(
            "no target answered at {} in {} s; check that `sawmill target` runs there and that no \
             firewall blocks it; `sawmill link find` shows the targets of this network",
            self.location,
            ANSWER_TIME_MAX.as_secs()
        );
        Failure::new(Exit::Unavailable, text)
    }
}

/// Fails immediately on permanent errors: no such host or interface, no permission for raw frames.
fn check(addresses: &[LinkAddress]) -> Result<()> {
    let mut first = None;
    let mut usable = 0;
    for address in addresses {
        let opened = match address {
            // A TCP connection may take time, and succeed later.
            LinkAddress::Tcp(place) => place.resolve().map(drop),
            _ => reach(address, Duration::ZERO).map(drop),
        };
        match opened {
            Ok(()) => usable += 1,
            Err(error) => {
                tracing::warn!("link {address}: open failed, retrying: {error}");
                // Kept and not returned: another link may lead to the target.
                first.get_or_insert_with(|| match error.kind() {
                    std::io::ErrorKind::PermissionDenied => {
                        Failure::io("cannot open a link", &error)
                    }
                    _ => Failure::caused(
                        Exit::NotFound,
                        format!("cannot open link {address}"),
                        error,
                    ),
                });
            }
        }
    }
    match first {
        Some(failure) if usable == 0 => Err(failure),
        _ => Ok(()),
    }
}

/// The name of this end.
pub(crate) fn own_name() -> String {
    let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
    fitting(&name).to_owned()
}

/// The part of a name that fits into a greeting.
fn fitting(name: &str) -> &str {
    let most = sawmill_format::link::greeting::NAME_BYTES_MAX.min(name.len());
    let end = (0..=most).rev().find(|end| name.is_char_boundary(*end)).unwrap_or(0);
    &name[..end]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_names_are_cut_between_characters() {
        assert_eq!(fitting("store"), "store");
        assert_eq!(fitting(&"ä".repeat(40)).len(), 64);
        assert_eq!(fitting(&format!("a{}", "ä".repeat(40))).len(), 63);
    }
}
