//! Commands and answers: fixed layouts, little-endian.
//!
//! Invariant: the bytes are those of `docs/format/driver.md`, from which drivers in other languages
//! are built. Not here: whether a command suits the device's memory (`client::lane`), whether an
//! answer is to a command that the driver has (`host::attached_driver`).

use sawmill_device::{Error, ErrorKind, Result};

/// Bytes of a command on the wire.
pub const COMMAND_BYTES: usize = 64;
/// Bytes of an answer on the wire.
pub const ANSWER_BYTES: usize = 16;

const FUA: u32 = 1;
const NO_UNMAP: u32 = 2;
const AGAIN: u32 = 4;

/// The kinds of commands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the table in docs/format/driver.md says what each is")]
pub enum CommandKind {
    Read = 1,
    Write = 2,
    Flush = 3,
    Discard = 4,
    WriteZeroes = 5,
    Chunk = 6,
    End = 7,
}

impl CommandKind {
    fn of(number: u32) -> Option<Self> {
        use CommandKind::{Chunk, Discard, End, Flush, Read, Write, WriteZeroes};
        let all = [Read, Write, Flush, Discard, WriteZeroes, Chunk, End];
        all.into_iter().find(|kind| *kind as u32 == number)
    }
}

/// A command for a driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Command {
    /// The kind.
    pub kind: CommandKind,
    /// Make it durable before answering.
    pub fua: bool,
    /// The space must stay allocated.
    pub no_unmap: bool,
    /// A former driver had this command.
    pub again: bool,
    /// The number for the answer.
    pub number: u64,
    /// First byte on the device.
    pub address: u64,
    /// Bytes.
    pub length: u64,
    /// The place of its bytes in the queue's memory.
    pub offset: u64,
    /// For a chunk: the number of entries.
    pub entries: u64,
    /// For a chunk: the last ordinal that was assigned when it was closed.
    pub horizon: u64,
    /// For a chunk: all ordinals below this are answered.
    pub floor: u64,
}

impl Command {
    /// A command of this kind, with this number, and nothing else.
    #[must_use]
    pub fn new(kind: CommandKind, number: u64) -> Self {
        let (fua, no_unmap, again) = (false, false, false);
        let (address, length, offset, entries, horizon, floor) = (0, 0, 0, 0, 0, 0);
        Command {
            kind,
            fua,
            no_unmap,
            again,
            number,
            address,
            length,
            offset,
            entries,
            horizon,
            floor,
        }
    }

    /// Encodes the command.
    #[must_use]
    pub fn encode(&self) -> [u8; COMMAND_BYTES] {
        let flag = |is_set: bool, flag| if is_set { flag } else { 0 };
        let flags = flag(self.fua, FUA) | flag(self.no_unmap, NO_UNMAP) | flag(self.again, AGAIN);
        let mut bytes = [0; COMMAND_BYTES];
        bytes[..4].copy_from_slice(&(self.kind as u32).to_le_bytes());
        bytes[4..8].copy_from_slice(&flags.to_le_bytes());
        let fields = [
            self.number,
            self.address,
            self.length,
            self.offset,
            self.entries,
            self.horizon,
            self.floor,
        ];
        for (place, field) in bytes[8..].chunks_exact_mut(8).zip(fields) {
            place.copy_from_slice(&field.to_le_bytes());
        }
        bytes
    }

    /// Decodes the commands of a packet.
    ///
    /// # Errors
    /// `Invalid`: what is wrong.
    pub fn decode_all(packet: &[u8]) -> Result<Vec<Self>> {
        let (commands, rest) = packet.as_chunks::<COMMAND_BYTES>();
        if commands.is_empty() || !rest.is_empty() {
            return Err(bad(format!(
                "a packet of {} bytes does not hold whole commands",
                packet.len()
            )));
        }
        commands.iter().map(Self::decode).collect()
    }

    fn decode(bytes: &[u8; COMMAND_BYTES]) -> Result<Self> {
        let number = u32_at(bytes, 0);
        let kind = CommandKind::of(number)
            .ok_or_else(|| bad(format!("a command of unknown kind {number}")))?;
        let flags = u32_at(bytes, 4);
        // A driver that ignored a flag would do less than it was asked, and answer success.
        if flags & !(FUA | NO_UNMAP | AGAIN) != 0 {
            return Err(bad(format!("a command with unknown flags {flags:#x}")));
        }
        Ok(Command {
            kind,
            fua: flags & FUA != 0,
            no_unmap: flags & NO_UNMAP != 0,
            again: flags & AGAIN != 0,
            number: u64_at(bytes, 8),
            address: u64_at(bytes, 16),
            length: u64_at(bytes, 24),
            offset: u64_at(bytes, 32),
            entries: u64_at(bytes, 40),
            horizon: u64_at(bytes, 48),
            floor: u64_at(bytes, 56),
        })
    }
}

/// The result of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer {
    /// The number of the command.
    pub number: u64,
    /// 0, or the error.
    pub errno: i32,
}

impl Answer {
    /// Encodes the answer.
    #[must_use]
    pub fn encode(&self) -> [u8; ANSWER_BYTES] {
        let mut bytes = [0; ANSWER_BYTES];
        bytes[..8].copy_from_slice(&self.number.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.errno.to_le_bytes());
        bytes
    }

    /// Decodes the answers of a packet.
    ///
    /// # Errors
    /// `Invalid`: what is wrong.
    pub fn decode_all(packet: &[u8]) -> Result<Vec<Self>> {
        let (answers, rest) = packet.as_chunks::<ANSWER_BYTES>();
        if answers.is_empty() || !rest.is_empty() {
            return Err(bad(format!(
                "a packet of {} bytes does not hold whole answers",
                packet.len()
            )));
        }
        answers.iter().map(Self::decode).collect()
    }

    fn decode(bytes: &[u8; ANSWER_BYTES]) -> Result<Self> {
        let (errno, reserved) = (u32_at(bytes, 8).cast_signed(), u32_at(bytes, 12));
        // Linux has no errno beyond 4095. The reserved bytes are zero, so that a later version can
        // use them.
        if !(0..=4095).contains(&errno) || reserved != 0 {
            return Err(bad(format!("an answer with errno {errno} and reserved {reserved}")));
        }
        Ok(Answer { number: u64_at(bytes, 0), errno })
    }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes[at..at + 4].iter().rev().fold(0, |value, byte| value << 8 | u32::from(*byte))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}

fn bad(text: String) -> Error {
    Error::new(ErrorKind::Invalid, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_has_its_documented_bytes() {
        let command = Command {
            kind: CommandKind::Chunk,
            fua: true,
            no_unmap: false,
            again: true,
            number: 0x0102_0304_0506_0708,
            address: 2,
            length: 3,
            offset: 4096,
            entries: 5,
            horizon: 6,
            floor: 7,
        };
        let bytes = command.encode();
        assert_eq!(bytes[..16], [6, 0, 0, 0, 5, 0, 0, 0, 8, 7, 6, 5, 4, 3, 2, 1]);
        assert_eq!(
            (bytes[16], bytes[24], bytes[33], bytes[40], bytes[48], bytes[56]),
            (2, 3, 16, 5, 6, 7)
        );
        let two = [bytes, Command::new(CommandKind::End, 0).encode()].concat();
        assert_eq!(
            Command::decode_all(&two).unwrap(),
            [command, Command::new(CommandKind::End, 0)]
        );
    }

    #[test]
    fn an_answer_has_its_documented_bytes() {
        let answer = Answer { number: 0x0102_0304_0506_0708, errno: 28 };
        assert_eq!(answer.encode(), [8, 7, 6, 5, 4, 3, 2, 1, 28, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(Answer::decode_all(&answer.encode()).unwrap(), [answer]);
    }

    #[test]
    fn malformed_commands_are_refused_with_the_field() {
        let command = |change: fn(&mut [u8; COMMAND_BYTES])| {
            let mut bytes = Command::new(CommandKind::Read, 1).encode();
            change(&mut bytes);
            Command::decode_all(&bytes).unwrap_err().to_string()
        };
        assert!(command(|bytes| bytes[0] = 9).contains("unknown kind 9"));
        assert!(command(|bytes| bytes[4] = 8).contains("unknown flags 0x8"));
        assert!(Command::decode_all(&[]).is_err() && Command::decode_all(&[0; 65]).is_err());
        let mut bytes = Answer { number: 1, errno: 0 }.encode();
        bytes[12] = 1;
        assert!(Answer::decode_all(&bytes).is_err());
        assert!(Answer::decode_all(&Answer { number: 1, errno: -5 }.encode()).is_err());
        assert!(Answer::decode_all(&[0; 8]).is_err());
    }
}
