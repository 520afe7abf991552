//! An initiator that is connected to a target, and its first answers.
//!
//! Invariants: whoever waits for a target is told what came back instead of an answer, also when nothing
//! proves it; a link that cannot be opened at all is an error only when no other is left.

use std::sync::Arc;
use std::time::{Duration, Instant};

use sawmill_device::ErrorKind;
use sawmill_format::link::control::{self, Exports};
use sawmill_link::carrier::{LinkAddress, reach};
use sawmill_link::clock::SteadyClock;
use sawmill_link::initiator::{Answer, Initiator, InitiatorOptions, OpenMode, RemoteDevice};
use sawmill_link::session::{Security, unguessable};
use sawmill_link::threads::Attached;

use crate::link::place::LinkPlace;
use sawmill_console::exit::{Exit, Failure, Result};

/// How long a target may take to answer for the first time.
const ANSWER_WITHIN: Duration = Duration::from_secs(20);
/// A refusal that nothing proves counts when nothing better came for so long.
const HINT_WITHIN: Duration = Duration::from_secs(2);
/// How often it is looked whether an answer has come.
const LOOK_EVERY: Duration = Duration::from_millis(5);
/// How often a target is asked again that asks for it.
const ASK_AGAIN_EVERY: Duration = Duration::from_millis(50);

/// A connection on its way, or made.
pub(crate) struct Remote {
    pub(crate) attached: Attached,
    place: LinkPlace,
}

impl Remote {
    /// Begins to connect.
    pub(crate) fn connect(
        place: &LinkPlace,
        security: Security,
        options: InitiatorOptions,
    ) -> Result<Remote> {
        check(&place.addresses)?;
        let clock = Arc::new(SteadyClock);
        let initiator = Initiator::new(options, security, place.addresses.len(), clock, unguessable());
        let attached = Attached::new(initiator, &place.addresses)
            .map_err(|error| Failure::io("cannot start the threads of a link", &error))?;
        Ok(Remote { attached, place: place.clone() })
    }

    /// The initiator.
    pub(crate) fn initiator(&self) -> &Arc<Initiator> {
        self.attached.initiator()
    }

    /// Opens an export.
    pub(crate) fn open(&self, export: &str, mode: OpenMode) -> Result<RemoteDevice> {
        let bytes =
            self.answer(|| self.initiator().ask_open(export, mode)).map_err(|failure| {
                match failure.exit() {
                    Exit::InUse => Failure::new(
                        Exit::InUse,
                        format!(
                            "{export}: {failure}: pass --take-over to fence it, or --shared at every \
                             initiator"
                        ),
                    ),
                    _ => failure.of_volume(export),
                }
            })?;
        Ok(self.initiator().opened(export, mode, &bytes)?)
    }

    /// Names and sizes of what the target shows.
    pub(crate) fn exports(&self) -> Result<Exports> {
        let bytes = self.answer(|| self.initiator().ask_list())?;
        control::exports(&bytes).map_err(|error| Failure::new(Exit::Internal, error.to_string()))
    }

    fn answer(&self, ask: impl Fn() -> Answer) -> Result<Vec<u8>> {
        let deadline = Instant::now() + ANSWER_WITHIN;
        let mut hinted: Option<Instant> = None;
        let mut answer = ask();
        loop {
            match answer.poll() {
                Some(Err(error)) if error.kind() == ErrorKind::Unavailable && Instant::now() < deadline => {
                    std::thread::sleep(ASK_AGAIN_EVERY);
                    answer = ask();
                }
                Some(outcome) => return Ok(outcome?),
                None => std::thread::sleep(LOOK_EVERY),
            }
            let hint = self.initiator().hint();
            let since = hint.as_ref().map(|_| *hinted.get_or_insert_with(Instant::now));
            if let (Some(hint), Some(since)) = (hint, since)
                && since.elapsed() >= HINT_WITHIN
            {
                return Err(Failure::new(Exit::Denied, format!("{}: {hint}", self.place)));
            }
            if Instant::now() >= deadline {
                return Err(self.nobody());
            }
        }
    }

    fn nobody(&self) -> Failure {
        let text = format!(
            "no target answered at {} in {} s; check that `sawmill target` runs there and that no firewall \
             blocks it; `sawmill link find` shows the targets of this network",
            self.place,
            ANSWER_WITHIN.as_secs()
        );
        Failure::new(Exit::Unavailable, text)
    }
}

/// Says at once what no waiting mends: no such host or interface, no right to raw frames.
fn check(addresses: &[LinkAddress]) -> Result<()> {
    let mut first = None;
    let mut usable = 0;
    for address in addresses {
        let opened = match address {
            // Connecting may take its time, and succeed later.
            LinkAddress::Tcp(place) => place.resolve().map(drop),
            _ => reach(address, Duration::ZERO).map(drop),
        };
        match opened {
            Ok(()) => usable += 1,
            Err(error) => {
                tracing::warn!("link {address}: open failed, retrying: {error}");
                first.get_or_insert_with(|| match error.kind() {
                    std::io::ErrorKind::PermissionDenied => Failure::io("cannot open a link", &error),
                    _ => Failure::new(Exit::NotFound, format!("cannot open link {address}: {error}")),
                });
            }
        }
    }
    match first {
        Some(failure) if usable == 0 => Err(failure),
        _ => Ok(()),
    }
}

/// What this end calls itself.
pub(crate) fn own_name() -> String {
    let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
    fitting(&name).to_owned()
}

/// As much of a name as a greeting may carry.
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
