//! From one driver that is its own host to the next, while users work: they see a pause.
//!
//! | the driver that serves | the next one |
//! |---|---|
//! | | asks `hand_over` at the device's socket, with a stream socket |
//! | flushes, makes its doors quiet, flushes; sends the doors | |
//! | | sends `take` |
//! | leaves doors and name, and calls its driver no more; sends `gone` | |
//! | | takes the name, opens the doors |
//!
//! Invariants: until `take` has come, the driver that serves decides alone, and goes on if anything
//! fails. From then on it answers nothing. So no two drivers serve at once. A next driver that dies
//! behind `take` is like a driver that was killed.
//!
//! Not here: how the stream travels (`docs/format/driver.md`, ASK), messages with open files
//! (`sawmill_frontend::passing`).

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::sockopt::socket_peercred;
use rustix::net::{RecvFlags, recv};
use rustix::process::geteuid;
use sawmill_device::{Error, ErrorKind, Result};
use sawmill_doors::DoorPlan;
use sawmill_frontend::{DoorPiece, pack, passing, unpack};

use crate::client::host_connection::query_with;
use crate::protocol::PacketSocket;

/// The longest message: a door has at most some thousand connections.
const MESSAGE_BYTES_MAX: usize = 256 << 20;
/// The most open files of a message.
const DESCRIPTORS_MAX: usize = 1 << 20;
/// Time for the next driver to send `take`: it has only to look at what it got.
const TAKE_TIME_MAX: Duration = Duration::from_secs(10);

/// The first piece of what is sent in place of doors, with the reason.
const REFUSED: &str = "refused";
const TAKE: &[u8] = b"take";
const GONE: &[u8] = b"gone";

/// The driver that is to serve next, as the one that serves knows it.
#[derive(Clone, Debug)]
pub(super) struct NextDriver(Arc<UnixStream>);

impl NextDriver {
    pub(super) fn new(stream: Arc<UnixStream>) -> Self {
        NextDriver(stream)
    }

    /// Sends the doors, and waits until they are taken.
    ///
    /// # Errors
    /// They are not: it is gone, or says nothing.
    pub(super) fn offer(&self, doors: &[DoorPiece]) -> Result<()> {
        let limited = self.0.set_write_timeout(Some(TAKE_TIME_MAX));
        limited.and_then(|()| self.0.set_read_timeout(Some(TAKE_TIME_MAX))).map_err(no_limit)?;
        let (bytes, descriptors) = pack(doors);
        passing::send(&self.0, &bytes, &descriptors)?;
        expect(&self.0, TAKE)
    }

    /// Whether it has given up already.
    pub(super) fn is_gone(&self) -> bool {
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        // It says nothing before it has an offer.
        !matches!(recv(&*self.0, &mut [0], flags), Err(Errno::AGAIN))
    }

    /// Says why it gets nothing.
    pub(super) fn refuse(&self, why: &Error) {
        let piece = DoorPiece::new(REFUSED).with("message", why);
        let (bytes, _) = pack(std::slice::from_ref(&piece));
        // If it is gone, it needs no reason.
        let _ = passing::send(&self.0, &bytes, &[]);
    }

    /// Says that all that it took is its own now.
    pub(super) fn leave(&self) {
        // If it is gone, the device waits as after any death of a driver.
        let _ = passing::send(&self.0, GONE, &[]);
    }
}

/// The driver that serves a device, as the next one knows it.
pub(super) struct ServingDriver(PacketSocket);

impl ServingDriver {
    /// The driver at this socket; `None` if no process serves the device.
    pub(super) fn at(socket: &Path) -> Result<Option<Self>> {
        match PacketSocket::connect(socket) {
            Ok(control) => {
                require_own(&control)?;
                Ok(Some(ServingDriver(control)))
            }
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Asks for its doors. Its users wait from now on; if the offer is dropped, it goes on.
    pub(super) fn ask(self) -> Result<Offer> {
        let (near, far) = UnixStream::pair().map_err(|error| {
            Error::caused(ErrorKind::Unavailable, "cannot create a socket", error)
        })?;
        query_with(&self.0, "hand_over", &[far.as_fd()])?;
        // Of the two ends only that of the other process counts: its death must show.
        drop(far);
        let (bytes, descriptors) = passing::receive(&near, MESSAGE_BYTES_MAX, DESCRIPTORS_MAX)?;
        Offer::of(near, unpack(&bytes, descriptors)?)
    }
}

/// The doors of the driver that serves, which waits for a word.
pub(super) struct Offer {
    stream: UnixStream,
    doors: Vec<DoorPiece>,
}

impl Offer {
    fn of(stream: UnixStream, doors: Vec<DoorPiece>) -> Result<Self> {
        match doors.first() {
            Some(first) if first.what == REFUSED => {
                let why = first.fact("message")?;
                let text = format!("the driver that serves the device goes on: {why}");
                Err(Error::new(ErrorKind::Refused, text))
            }
            _ => Ok(Offer { stream, doors }),
        }
    }

    /// What the doors are.
    pub(super) fn plans(&self) -> Result<Vec<DoorPlan>> {
        let heads = self.doors.iter().filter(|piece| piece.what == "door");
        heads.map(|head| DoorPlan::parse(head.fact("plan")?)).collect()
    }

    /// Takes the doors. When this returns, the other driver has left them, or is dead.
    pub(super) fn take(self) -> Result<Vec<DoorPiece>> {
        passing::send(&self.stream, TAKE, &[])?;
        match expect(&self.stream, GONE) {
            Ok(()) => {}
            // Dead, it has nothing either. If it is not, it has the name, and that shows.
            Err(error) if error.kind() == ErrorKind::Closed => {
                tracing::warn!("the driver that was replaced ended early: {error}");
            }
            // It goes on: this process was too late.
            Err(error) => {
                let text = "the driver that serves the device waited no longer, and goes on";
                return Err(Error::caused(ErrorKind::TimedOut, text, error));
            }
        }
        Ok(self.doors)
    }
}

/// What another user's process hands over would be served with the rights of this one.
fn require_own(control: &PacketSocket) -> Result<()> {
    let failed =
        |error| Error::caused(ErrorKind::Unavailable, "cannot tell whose socket it is", error);
    let (peer, own) = (socket_peercred(control).map_err(failed)?.uid, geteuid());
    if peer == own || peer.is_root() {
        return Ok(());
    }
    let text = format!(
        "the driver that serves the device is a process of user {}; start this one as that user",
        peer.as_raw()
    );
    Err(Error::new(ErrorKind::Denied, text))
}

/// Waits for this word.
fn expect(stream: &UnixStream, word: &[u8]) -> Result<()> {
    let (bytes, _) = passing::receive(stream, word.len(), 0)?;
    if bytes == word {
        return Ok(());
    }
    Err(Error::new(ErrorKind::Invalid, "the other driver sent an unknown word"))
}

fn no_limit(error: std::io::Error) -> Error {
    Error::caused(ErrorKind::Unavailable, "cannot limit the time of a socket", error)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ends() -> (NextDriver, UnixStream) {
        let (serving, next) = UnixStream::pair().unwrap();
        (NextDriver::new(Arc::new(serving)), next)
    }

    fn doors() -> Vec<DoorPiece> {
        vec![DoorPiece::new("door").with("plan", "ublk").with("shows", "disk").with("pieces", 0)]
    }

    /// The next driver's side, up to the offer.
    fn offered(stream: UnixStream) -> Result<Offer> {
        let (bytes, descriptors) = passing::receive(&stream, MESSAGE_BYTES_MAX, DESCRIPTORS_MAX)?;
        Offer::of(stream, unpack(&bytes, descriptors)?)
    }

    #[test]
    fn doors_that_are_taken_are_left() {
        let (serving, next) = ends();
        std::thread::scope(|scope| {
            let taking = scope.spawn(|| {
                let offer = offered(next).unwrap();
                assert_eq!(offer.plans().unwrap(), [DoorPlan::parse("ublk").unwrap()]);
                offer.take().unwrap()
            });
            serving.offer(&doors()).unwrap();
            assert!(!taking.is_finished(), "it waits until they are left");
            serving.leave();
            assert_eq!(taking.join().unwrap()[0].fact("shows").unwrap(), "disk");
        });
    }

    #[test]
    fn doors_that_are_not_taken_stay() {
        let (serving, next) = ends();
        drop(next);
        assert!(serving.offer(&doors()).is_err(), "it died before");
        let (serving, next) = ends();
        std::thread::scope(|scope| {
            scope.spawn(|| drop(offered(next).unwrap()));
            assert_eq!(serving.offer(&doors()).unwrap_err().kind(), ErrorKind::Closed);
        });
        let (serving, next) = ends();
        passing::send(&next, b"tale", &[]).unwrap();
        assert_eq!(serving.offer(&doors()).unwrap_err().kind(), ErrorKind::Invalid);
    }

    #[test]
    fn a_next_driver_that_is_too_late_takes_nothing() {
        let (serving, next) = ends();
        let (bytes, descriptors) = pack(&[]);
        passing::send(&serving.0, &bytes, &descriptors).unwrap();
        let offer = offered(next).unwrap();
        serving.refuse(&Error::new(ErrorKind::Unavailable, "nothing came"));
        assert_eq!(offer.take().map(drop).unwrap_err().kind(), ErrorKind::TimedOut);
    }

    #[test]
    fn a_next_driver_that_gave_up_is_known_before_users_wait() {
        let (serving, next) = ends();
        assert!(!serving.is_gone());
        drop(next);
        assert!(serving.is_gone());
    }

    #[test]
    fn a_next_driver_learns_why_it_gets_nothing() {
        let (serving, next) = ends();
        serving.refuse(&Error::new(ErrorKind::Unavailable, "requests hang"));
        let error = offered(next).map(drop).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Refused);
        assert!(error.to_string().contains("goes on: requests hang"), "{error}");
    }
}
