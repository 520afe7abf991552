//! Which requests are allowed: the protocol's rules and its error numbers. The device checks again.
//!
//! Invariant: looks only at the header of the request. Not here: what happens to a refused request.

use sawmill_device::Operation;

use super::super::protocol::{Command, NbdErrno, RequestHeader, Style, command_flag};
use super::{Connection, Refusal, payload_bytes_max};

impl Connection {
    /// Whether the request may go to the device, and as which operation. The device checks again;
    /// these are the protocol's rules and error numbers.
    pub(super) fn judge(&self, header: &RequestHeader) -> Result<Operation, Refusal> {
        let geometry = &self.session.geometry;
        let refuse = |errno, text: String| Err(Refusal(errno, text));
        let Some((command, operation)) = operation_of(header.command) else {
            return refuse(NbdErrno::Inval, format!("command {} is unknown", header.command));
        };
        let unfit = header.flags & !self.flags_of(command);
        if unfit != 0 {
            return refuse(NbdErrno::Inval, format!("flags {unfit:#x} do not fit {command:?}"));
        }
        let is_extended = self.session.style == Style::Extended;
        // The flag says that a payload follows. Without it, a write in an extended header has no
        // bytes.
        if is_extended && command == Command::Write && header.flags & command_flag::PAYLOAD_LEN == 0
        {
            return refuse(NbdErrno::Inval, "a write without the payload flag".into());
        }
        if command == Command::Flush {
            return Ok(operation);
        }
        if command == Command::BlockStatus && !self.session.block_status {
            return refuse(NbdErrno::Inval, "block status without a negotiated context".into());
        }
        let changes = matches!(command, Command::Write | Command::Trim | Command::WriteZeroes);
        if changes && geometry.read_only {
            return refuse(NbdErrno::Perm, format!("{command:?} refused: the export is read-only"));
        }
        let (offset, length) = (header.offset, header.length);
        // The protocol leaves an empty range undefined, and a device refuses it (D6).
        if length == 0 {
            return refuse(NbdErrno::Inval, format!("{command:?} of length zero"));
        }
        let limit = payload_bytes_max(geometry);
        if matches!(command, Command::Read | Command::Write) && length > limit.into() {
            // `EOVERFLOW` belongs to replies to reads: the protocol documents it for no other
            // command.
            let errno = if command == Command::Read { NbdErrno::Overflow } else { NbdErrno::Inval };
            return refuse(
                errno,
                format!("{command:?} of {length} bytes is longer than the limit of {limit}"),
            );
        }
        if offset.checked_add(length).is_none_or(|end| end > geometry.size_bytes) {
            let size = geometry.size_bytes;
            // The protocol asks for `ENOSPC` where data would lie beyond the end, and for `EINVAL`
            // where a client only asks about it.
            let errno = match command {
                Command::Write | Command::WriteZeroes => NbdErrno::NoSpace,
                _ => NbdErrno::Inval,
            };
            let text =
                format!("{command:?} of {length} bytes at {offset} reaches past the end at {size}");
            return refuse(errno, text);
        }
        Ok(operation)
    }

    /// The flags that a command may have. FUA is valid for all, and means nothing for a command
    /// that does not write.
    fn flags_of(&self, command: Command) -> u16 {
        let own = match command {
            Command::Read if self.session.style != Style::Simple => command_flag::DF,
            Command::Write if self.session.style == Style::Extended => command_flag::PAYLOAD_LEN,
            Command::WriteZeroes => command_flag::NO_HOLE | command_flag::FAST_ZERO,
            Command::BlockStatus => command_flag::REQ_ONE,
            Command::Read | Command::Write | Command::Disconnect | Command::Flush => 0,
            Command::Trim | Command::Cache => 0,
        };
        own | command_flag::FUA
    }
}

fn operation_of(number: u16) -> Option<(Command, Operation)> {
    let command = Command::from_number(number)?;
    let operation = match command {
        Command::Read => Operation::Read,
        Command::Write => Operation::Write,
        Command::Flush => Operation::Flush,
        Command::Trim => Operation::Discard,
        Command::Cache => Operation::Prefetch,
        Command::WriteZeroes => Operation::WriteZeroes,
        Command::BlockStatus => Operation::Allocation,
        Command::Disconnect => return None,
    };
    Some((command, operation))
}
