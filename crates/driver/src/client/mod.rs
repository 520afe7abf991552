//! The driver's side of the protocol: how a program becomes a block device.
//!
//! Files: `driver` (the interface), `options`, `host` (the process that holds the device),
//! `host_connection` and `lane` (connections), `serve` (commands become calls), `work` (threads),
//! `caller`, `in_process` (a driver as a device of its own process), `own_host`, `end_request` (a
//! driver that opens the doors itself). Start with `docs/guide/driver-rust.md`.
//!
//! Invariant: a host is started only if neither the options nor the environment name one, and only
//! a host that was started here ends when the program gives up.
//!
//! Not here: the bytes (`protocol`), the device (`host` of this crate).

mod caller;
mod driver;
mod end_request;
mod host;
mod host_connection;
mod in_process;
mod lane;
mod options;
mod own_host;
mod serve;
#[cfg(test)]
mod tests;
mod work;

pub use driver::{Abilities, Chunk, ChunkDriver, Device, Door, Driver, errno};
pub use host::{
    DOORS_VARIABLE, HOST_VARIABLE, NAME_VARIABLE, PROGRAM_VARIABLE, REPLACE_VARIABLE, find,
};
pub use host_connection::{kind_of_refusal, query};
pub use in_process::InProcess;
pub use options::{Options, parse_size};

use std::path::{Path, PathBuf};

use sawmill_device::{ErrorKind, Result};

use self::host::Host;
use self::host_connection::HostConnection;
use self::serve::{ChunkHandler, Plain};
use self::work::Handler;
use crate::protocol::PacketSocket;

/// Why a driver is no longer needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Another driver has replaced it.
    Replaced,
    /// The device ended.
    Ended,
}

/// A host that was found or started, before a driver is introduced; or none, for a driver that is
/// its own host. The process that connected counts, not the one that serves, so a program may drop
/// its privileges in between.
pub struct Connection {
    way: Way,
    options: Options,
}

/// How a driver gets to its device.
enum Way {
    /// Through a host.
    Host { control: PacketSocket, socket: PathBuf, host: Option<Host> },
    /// The device is to be made in this process, with these doors.
    Own { doors: Vec<String> },
}

/// Connects to the host that started this program, otherwise to a new one with these doors (lines
/// like `nbd=unix:/path`, `ublk`, `loop=/folder`; if none, those in `SAWMILL_DOORS`, separated by
/// spaces).
///
/// # Errors
/// `NotFound` without a host; the reason why it did not start.
pub fn connect(doors: &[&str], options: &Options) -> Result<Connection> {
    let mut host = None;
    let socket = match host::socket_path(options) {
        Some(socket) => socket,
        None if host::is_own(options)? => {
            // A driver that takes the place of another gets the doors of that one.
            let way = Way::Own {
                doors: match host::replaces(options)? {
                    true => host::named_doors(doors),
                    false => host::doors(doors)?,
                },
            };
            return Ok(Connection { way, options: options.clone() });
        }
        None => host.insert(Host::start(&host::doors(doors)?, options)?).socket.clone(),
    };
    let control = PacketSocket::connect(&socket)?;
    Ok(Connection { way: Way::Host { control, socket, host }, options: options.clone() })
}

impl Connection {
    /// The socket of the host; `None` for a driver that is its own host.
    #[must_use]
    pub fn socket(&self) -> Option<&Path> {
        match &self.way {
            Way::Host { socket, .. } => Some(socket),
            Way::Own { .. } => None,
        }
    }

    /// Serves a device with this driver until it is replaced or the device ends.
    ///
    /// # Errors
    /// `Invalid` or `InUse` if the host refuses, `Closed` if it disappeared.
    pub fn serve(self, driver: impl Driver + 'static) -> Result<Outcome> {
        match &self.way {
            Way::Host { .. } => self.serve_by(&Plain::new(&driver)),
            Way::Own { doors } => own_host::serve(driver, doors, &self.options),
        }
    }

    /// As [`Connection::serve`], for a driver of chunks; the options must have `mode=batch`.
    ///
    /// # Errors
    /// As [`Connection::serve`].
    pub fn serve_chunks(self, driver: &dyn ChunkDriver) -> Result<Outcome> {
        self.serve_by(&ChunkHandler::new(driver))
    }

    /// Gives up before serving: a host that was started for this ends.
    pub fn give_up(self) {
        // A host that somebody else has started is not this process's to end.
        if let Way::Host { control, host: Some(_), .. } = &self.way {
            // If the host is gone, that is what we want.
            let _ = host_connection::query_on(control, "fail");
        }
    }

    fn serve_by(self, handler: &dyn Handler) -> Result<Outcome> {
        let options = self.options;
        let Way::Host { control, socket, host } = self.way else {
            return Err(own_host::needs_host());
        };
        let outcome = HostConnection::attach(control, socket, handler.abilities(), &options)
            .and_then(|connection| work::run(connection, handler, options.threads));
        match (outcome, host) {
            // A host of this process says why it ended on its standard output. "The host is gone"
            // alone would not help anybody.
            (Err(error), Some(host)) if error.kind() == ErrorKind::Closed => Err(host.why(error)),
            (outcome, _) => outcome,
        }
    }
}

/// Connects and serves ([`connect`], [`Connection::serve`]).
///
/// # Errors
/// As those functions.
pub fn serve(driver: impl Driver + 'static, doors: &[&str], options: &Options) -> Result<Outcome> {
    connect(doors, options)?.serve(driver)
}

/// As [`serve`], for a driver of chunks.
///
/// # Errors
/// As [`serve`].
pub fn serve_chunks(
    driver: &dyn ChunkDriver,
    doors: &[&str],
    options: &Options,
) -> Result<Outcome> {
    connect(doors, &options.clone().option("mode", "batch"))?.serve_chunks(driver)
}

/// Replaces the driver of the device with this name; that driver exits without an error.
///
/// # Errors
/// `NotFound` without such a device; as [`serve`].
pub fn rerun(name: &str, driver: impl Driver + 'static, options: &Options) -> Result<Outcome> {
    serve(driver, &[], &replacing(name, options)?)
}

/// The options of a driver that replaces the one of the device with this name, wherever that is
/// served.
///
/// # Errors
/// `NotFound` without such a device.
pub fn replacing(name: &str, options: &Options) -> Result<Options> {
    let options = options.clone().replace();
    // A driver that a host has started serves that host's device, and can replace that of another
    // host, but no driver without one.
    if host::socket_path(&options).is_none() && host::is_own(&options)? {
        own_host::require_served(name)?;
        return Ok(options.name(name));
    }
    Ok(options.socket(find(name)?))
}
