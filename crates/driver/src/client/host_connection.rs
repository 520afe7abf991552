//! A driver's connections to its host, from HELLO to ATTACHED.
//!
//! Invariant: a host that sends something invalid gets no further. Not here: the commands on the
//! queues (`lane`).

use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use sawmill_device::{Error, ErrorKind, Result};
use sawmill_sys::AttachedMemory;

use super::driver::{Abilities, Device, DeviceLink, Door};
use super::lane::Lane;
use super::options::Options;
use crate::protocol::{
    Control, ControlFacts, ControlKind, PACKET_BYTES_MAX, PROTOCOL, PacketSocket,
};

/// The control connection and the lanes of a driver that its host has accepted.
pub(super) struct HostConnection {
    pub(super) device: Device,
    pub(super) control: Arc<PacketSocket>,
    pub(super) lanes: Vec<Lane>,
    /// Why there are no more commands, once the host has said so.
    pub(super) is_replaced: bool,
    buffer: Vec<u8>,
}

/// A message of the host to an attached driver.
#[derive(PartialEq, Eq)]
pub(super) enum HostMessage {
    Doors(Vec<Door>),
    /// A message that was only noted.
    News,
    End,
}

impl HostConnection {
    /// Connects a driver to the host.
    pub(super) fn attach(
        control: PacketSocket,
        socket: PathBuf,
        abilities: Abilities,
        options: &Options,
    ) -> Result<Self> {
        let program = std::env::args().next().unwrap_or_default();
        let mut hello = ControlFacts::default().with("protocol", PROTOCOL).with("program", program);
        if options.replaces {
            hello.add("replace", 1);
        }
        abilities.declare(&mut hello, options.mode());
        for (name, value) in options.facts.iter() {
            hello.add(name, value);
        }
        control.send(&Control::new(ControlKind::Hello, hello).encode(), &[])?;
        let control = Arc::new(control);
        let device = Device {
            link: DeviceLink::Host(Arc::clone(&control)),
            welcome: Arc::default(),
            socket: socket.to_owned(),
        };
        let buffer = vec![0; PACKET_BYTES_MAX];
        let mut connection =
            HostConnection { device, control, lanes: Vec::new(), is_replaced: false, buffer };
        connection.greet()?;
        // After the greeting, because options given to the host may ask for more than the driver
        // has declared.
        abilities.suffice(&connection.device.welcome)?;
        Ok(connection)
    }

    fn greet(&mut self) -> Result<()> {
        loop {
            let (packet, files) = self.receive()?.ok_or_else(gone)?;
            let facts = packet.facts;
            match packet.kind {
                ControlKind::Welcome => {
                    require_protocol(facts.parsed("protocol")?)?;
                    self.device.welcome = Arc::new(facts);
                }
                ControlKind::Queue => self.add_queue(&facts, files)?,
                // A device without queues would never give this driver anything to do.
                ControlKind::Attached if !self.lanes.is_empty() => return Ok(()),
                ControlKind::Refused => return Err(refusal(&facts)),
                kind => {
                    return Err(odd(format!(
                        "the host sent {kind:?} before a driver was attached"
                    )));
                }
            }
        }
    }

    fn add_queue(&mut self, facts: &ControlFacts, files: Vec<OwnedFd>) -> Result<()> {
        let queue: usize = facts.parsed("queue")?;
        let is_batch = self.device.option("mode") == Some("batch");
        let names: &[&str] =
            if is_batch { &["memory_bytes", "read_memory_bytes"] } else { &["memory_bytes"] };
        // A socket and a memory for each lane. With any other number, it is unknown which file is
        // which.
        if files.len() != 2 * names.len() {
            return Err(odd(format!("the host sent {} open files for queue {queue}", files.len())));
        }
        let mut files = files.into_iter();
        for (at, name) in names.iter().enumerate() {
            let (Some(socket), Some(memory)) = (files.next(), files.next()) else {
                return Err(gone());
            };
            let memory = AttachedMemory::open(memory, facts.parsed(name)?).map_err(|error| {
                Error::caused(ErrorKind::Invalid, format!("memory of queue {queue}"), error)
            })?;
            let lane = Lane::new(queue, socket.into(), memory);
            // The other lane of a queue in batch mode has its reads.
            self.lanes.push(if is_batch && at == 0 { lane.taking_chunks() } else { lane });
        }
        Ok(())
    }

    fn receive(&mut self) -> Result<Option<(Control, Vec<OwnedFd>)>> {
        let Some(packet) = self.control.receive(&mut self.buffer)? else { return Ok(None) };
        Ok(Some((Control::decode(packet.bytes)?, packet.descriptors)))
    }

    /// Waits for the next message of the host to an attached driver.
    pub(super) fn receive_message(&mut self) -> Result<HostMessage> {
        let Some((packet, _)) = self.receive()? else { return Ok(HostMessage::End) };
        match packet.kind {
            ControlKind::Doors => Ok(HostMessage::Doors(doors(&packet.facts))),
            ControlKind::Finish => {
                self.is_replaced = packet.facts.get("reason") == Some("replaced");
                Ok(HostMessage::News)
            }
            kind => Err(odd(format!("the host sent {kind:?} to an attached driver"))),
        }
    }

    /// Notifies every thread that waits for the host that it is over.
    pub(super) fn break_off(control: &PacketSocket, lanes: &[Lane]) {
        // Closes the control connection last: without it the driver counts as gone, which does not
        // end the device.
        lanes.iter().for_each(|lane| lane.socket.close_both_ways());
        control.close_both_ways();
    }
}

fn doors(facts: &ControlFacts) -> Vec<Door> {
    let doors = facts.iter().filter(|(name, _)| *name == "door");
    let split = doors.filter_map(|(_, value)| value.split_once(' '));
    split
        .map(|(kind, address)| Door { kind: kind.to_owned(), address: address.to_owned() })
        .collect()
}

/// Sends a question to a host: `status`, `flush`, `end`, `fail` or `replace`. Returns the answer.
///
/// # Errors
/// `NotFound` if there is no host; the error of the host.
pub fn query(socket: &Path, what: &str) -> Result<ControlFacts> {
    query_on(&PacketSocket::connect(socket)?, what)
}

/// As [`query`], on a connection that carried no message yet.
pub(super) fn query_on(connection: &PacketSocket, what: &str) -> Result<ControlFacts> {
    query_with(connection, what, &[])
}

/// As [`query_on`], with open files.
pub(super) fn query_with(
    connection: &PacketSocket,
    what: &str,
    files: &[BorrowedFd<'_>],
) -> Result<ControlFacts> {
    let question = Control::new(ControlKind::Ask, ControlFacts::default().with("ask", what));
    connection.send(&question.encode(), files)?;
    let mut buffer = vec![0; PACKET_BYTES_MAX];
    let packet = connection.receive(&mut buffer)?.ok_or_else(gone)?;
    let answer = Control::decode(packet.bytes)?;
    if answer.kind != ControlKind::Answer {
        return Err(odd(format!("the host answered a question with {:?}", answer.kind)));
    }
    match answer.facts.parsed::<i32>("errno")? {
        0 => Ok(answer.facts),
        _ => Err(refusal(&answer.facts)),
    }
}

/// The kind of an errno with which a host refuses a driver or a question, as a positive number.
#[must_use]
pub fn kind_of_refusal(errno: i32) -> ErrorKind {
    match errno {
        2 | 19 => ErrorKind::NotFound, // ENOENT, ENODEV
        13 => ErrorKind::Denied,       // EACCES
        16 => ErrorKind::InUse,        // EBUSY
        22 => ErrorKind::Invalid,      // EINVAL
        28 => ErrorKind::Full,         // ENOSPC
        _ => ErrorKind::Refused,
    }
}

fn refusal(facts: &ControlFacts) -> Error {
    Error::new(
        kind_of_refusal(facts.parsed("errno").unwrap_or(5)),
        format!("the host refused: {}", facts.get("message").unwrap_or("it gave no reason")),
    )
}

pub(super) fn gone() -> Error {
    Error::new(ErrorKind::Closed, "the host is gone")
}

pub(super) fn odd(text: String) -> Error {
    Error::new(ErrorKind::Invalid, text)
}

fn require_protocol(protocol: u32) -> Result<()> {
    if protocol == PROTOCOL {
        return Ok(());
    }
    let text = format!("the host speaks protocol {protocol}, but this driver speaks {PROTOCOL}");
    Err(Error::new(ErrorKind::Refused, text))
}
