//! Commands about devices, given to the driver over `/dev/ublk-control`.
//!
//! Invariants: every call waits for the answer with its own number. A command's buffer lives until
//! that answer has come: where a wait failed, the buffer stays for the driver, and a later call
//! passes over the late answer. Not here: the order of commands; requests.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::ptr::NonNull;

use io_uring::{IoUring, cqueue, opcode, squeue, types};
use rustix::fs::{Mode, OFlags};

use super::abi::{self, ControlCommand, DeviceInfo, Parameters};

/// The character device of a ublk device, for its server.
#[must_use]
pub fn char_path(id: u32) -> PathBuf {
    format!("/dev/ublkc{id}").into()
}

/// The block device of a ublk device, for its users.
#[must_use]
pub fn node_path(id: u32) -> PathBuf {
    format!("/dev/ublkb{id}").into()
}

/// The driver's control node, which receives commands.
pub struct Control {
    ring: IoUring<squeue::Entry128, cqueue::Entry>,
    file: File,
    /// The device that was commanded last, and whether it is one without privileges.
    last: Option<(u32, bool)>,
    lent: LentBuffers,
}

/// The longest answer of a command, with the path in front.
const BUFFER_BYTES: usize = 4096;
/// Cores that an answer about a queue's cores can name.
const CORES_MAX: usize = 8192;

/// Bytes that the driver reads and writes, aligned for any of its structures.
#[repr(C, align(8))]
struct Buffer([u8; BUFFER_BYTES]);

/// The buffers of commands that the driver has not answered, by the number of their command.
///
/// One that is never answered is never freed, because the driver may still write to it.
#[derive(Default)]
struct LentBuffers {
    commands: u64,
    /// Bounded by the commands whose wait failed, and one more.
    unanswered: HashMap<u64, NonNull<Buffer>>,
}

// SAFETY: each pointer came from a box of plain bytes, and this structure is its only owner on our
// side, so it may move to another thread as the box might.
unsafe impl Send for LentBuffers {}

impl LentBuffers {
    /// Lends a buffer to a new command; returns the number of the command, and the address.
    fn lend(&mut self, buffer: Box<Buffer>) -> (u64, NonNull<Buffer>) {
        self.commands += 1;
        let buffer = NonNull::from(Box::leak(buffer));
        self.unanswered.insert(self.commands, buffer);
        (self.commands, buffer)
    }

    /// Takes back the buffer of a command that is answered, or that the driver never got.
    fn take_back(&mut self, number: u64) -> Option<Box<Buffer>> {
        let buffer = self.unanswered.remove(&number)?;
        // SAFETY: the pointer came from a box in `lend`, and was removed from the only place that
        // holds it, so it is freed once. The driver writes to it no more, see above.
        Some(unsafe { Box::from_raw(buffer.as_ptr()) })
    }

    /// Looks for the answer of command `number` among `answers`, each a command's number and its
    /// result. An answer ends the loan of its own command alone.
    fn find_answer(
        &mut self,
        number: u64,
        answers: impl Iterator<Item = (u64, i32)>,
    ) -> Option<(i32, Box<Buffer>)> {
        for (answered, result) in answers {
            let buffer = self.take_back(answered);
            if answered == number {
                return buffer.map(|buffer| (result, buffer));
            }
        }
        None
    }
}

impl Control {
    /// Opens the driver's control node. `NotFound`: the module `ublk_drv` is not loaded.
    pub fn open() -> io::Result<Self> {
        let flags = OFlags::RDWR | OFlags::CLOEXEC;
        let file = File::from(rustix::fs::open("/dev/ublk-control", flags, Mode::empty())?);
        Ok(Control {
            ring: IoUring::builder().build(2)?,
            file,
            last: None,
            lent: LentBuffers::default(),
        })
    }

    /// The features of the driver, see [`super::feature`].
    pub fn features(&mut self) -> io::Result<u64> {
        let mut answer = [0; 8];
        self.command(abi::GET_FEATURES, u32::MAX, 0, &[], &mut answer)?;
        Ok(u64::from_ne_bytes(answer))
    }

    /// Adds a device; the driver returns the values that it chose in `info`.
    pub fn add(&mut self, info: &mut DeviceInfo) -> io::Result<()> {
        let mut bytes = info_bytes(info);
        self.command(abi::ADD_DEV, info.id, 0, &[], &mut bytes)?;
        *info = info_from(&bytes);
        self.last = Some((info.id, is_unprivileged(info)));
        Ok(())
    }

    /// Sets what the users of a device see. Only before its start.
    pub fn set_parameters(&mut self, id: u32, parameters: &Parameters) -> io::Result<()> {
        let mut parameters = *parameters;
        (parameters.len, parameters.types) = (abi::PARAMETERS_BYTES, abi::PARAMETERS_TYPES);
        self.command_on(abi::SET_PARAMS, id, 0, &mut parameters_bytes(&parameters))
    }

    /// What the users of a device see.
    pub fn parameters(&mut self, id: u32) -> io::Result<Parameters> {
        let request = Parameters { len: abi::PARAMETERS_BYTES, ..Parameters::default() };
        let mut bytes = parameters_bytes(&request);
        self.command_on(abi::GET_PARAMS, id, 0, &mut bytes)?;
        Ok(parameters_from(&bytes))
    }

    /// Starts a device whose queues all wait for requests; `pid` is the process that serves it.
    /// While this runs the kernel already reads the partition table.
    pub fn start(&mut self, id: u32, pid: u32) -> io::Result<()> {
        self.command_on(abi::START_DEV, id, pid.into(), &mut [])
    }

    /// Stops a device: its node vanishes. A living server answers the requests it has; others fail.
    pub fn stop(&mut self, id: u32) -> io::Result<()> {
        self.command_on(abi::STOP_DEV, id, 0, &mut [])
    }

    /// Removes a device. Returns when its character device is closed and its number is free.
    pub fn delete(&mut self, id: u32) -> io::Result<()> {
        self.command_on(abi::DEL_DEV, id, 0, &mut [])?;
        // The number may be another device's from now on.
        self.last = None;
        Ok(())
    }

    /// What the driver knows of a device. `NotFound`.
    pub fn info(&mut self, id: u32) -> io::Result<DeviceInfo> {
        let mut bytes = info_bytes(&DeviceInfo::default());
        self.command(abi::GET_DEV_INFO2, id, 0, &char_bytes(id), &mut bytes)?;
        Ok(info_from(&bytes))
    }

    /// The cores from which a queue gets its requests.
    pub fn queue_cores(&mut self, id: u32, queue: u16) -> io::Result<Vec<usize>> {
        let mut mask = [0; CORES_MAX / 8];
        self.command_on(abi::GET_QUEUE_AFFINITY, id, queue.into(), &mut mask)?;
        let words = mask
            .chunks_exact(8)
            .map(|word| u64::from_ne_bytes(word.try_into().unwrap_or_default()));
        let cores = words.enumerate().flat_map(|(n, word)| {
            (0..64).filter(move |bit| word >> bit & 1 == 1).map(move |bit| 64 * n + bit)
        });
        Ok(cores.collect())
    }

    /// Begins to take over a device whose server is gone. `ResourceBusy` until the kernel has
    /// noticed that.
    pub fn start_recovery(&mut self, id: u32) -> io::Result<()> {
        self.command_on(abi::START_USER_RECOVERY, id, 0, &mut [])
    }

    /// Ends the takeover: all queues wait for requests; `pid` is the process that serves the
    /// device now.
    pub fn end_recovery(&mut self, id: u32, pid: u32) -> io::Result<()> {
        self.command_on(abi::END_USER_RECOVERY, id, pid.into(), &mut [])
    }

    /// Changes the size of a running device (Linux 6.16).
    pub fn update_size(&mut self, id: u32, sectors: u64) -> io::Result<()> {
        self.command_on(abi::UPDATE_SIZE, id, sectors, &mut [])
    }

    /// Gives one command on an existing device.
    fn command_on(&mut self, number: u32, id: u32, data: u64, bytes: &mut [u8]) -> io::Result<()> {
        // The driver wants the path in front for a device without privileges, and only for such a
        // one: it judges by the node's owner whether the device may be commanded.
        let path = char_bytes(id);
        let unprivileged = match self.last {
            Some((last, unprivileged)) if last == id => unprivileged,
            _ => is_unprivileged(&self.info(id)?),
        };
        self.last = Some((id, unprivileged));
        self.command(number, id, data, if unprivileged { &path } else { &[] }, bytes)
    }

    /// Gives one command and waits for its answer. The driver sees `path` and then `bytes`, and
    /// writes to `bytes`.
    fn command(
        &mut self,
        number: u32,
        id: u32,
        data: u64,
        path: &[u8],
        bytes: &mut [u8],
    ) -> io::Result<()> {
        let length = path.len() + bytes.len();
        let mut buffer = Box::new(Buffer([0; BUFFER_BYTES]));
        buffer.0[..path.len()].copy_from_slice(path);
        buffer.0[path.len()..length].copy_from_slice(bytes);
        let (command_number, lent) = self.lent.lend(buffer);
        let command = ControlCommand {
            dev_id: id,
            queue_id: u16::MAX,
            len: length as u16,
            addr: if length == 0 { 0 } else { lent.as_ptr() as u64 },
            data,
            dev_path_len: path.len() as u16,
            ..ControlCommand::default()
        };
        let fd = types::Fd(self.file.as_raw_fd());
        let entry = opcode::UringCmd80::new(fd, number).cmd(command.bytes()).build();
        let entry = entry.user_data(command_number);
        // SAFETY: the only memory the driver may touch is the buffer, which `self.lent` keeps until
        // the answer with this command's number has come, and forever if it never comes. The file
        // is open as long as the ring.
        if unsafe { self.ring.submission().push(&entry) }.is_err() {
            // The ring is full of commands that the kernel would not take.
            self.lent.take_back(command_number);
            return Err(rustix::io::Errno::BUSY.into());
        }
        let (result, buffer) = self.answer(command_number)?;
        if result < 0 {
            return Err(io::Error::from_raw_os_error(-result));
        }
        bytes.copy_from_slice(&buffer.0[path.len()..length]);
        Ok(())
    }

    /// Waits for the answer of a command.
    fn answer(&mut self, command_number: u64) -> io::Result<(i32, Box<Buffer>)> {
        loop {
            match self.ring.submit_and_wait(1) {
                Ok(_) => (),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => (),
                Err(error) => return Err(error),
            }
            let answers = self.ring.completion().map(|entry| (entry.user_data(), entry.result()));
            if let Some(answer) = self.lent.find_answer(command_number, answers) {
                return Ok(answer);
            }
        }
    }
}

fn is_unprivileged(info: &DeviceInfo) -> bool {
    info.flags & abi::feature::UNPRIVILEGED_DEV != 0
}

/// The path of the character device as the driver wants it.
fn char_bytes(id: u32) -> Vec<u8> {
    char_path(id).into_os_string().into_encoded_bytes()
}

const INFO_BYTES: usize = size_of::<DeviceInfo>();
const PARAMETERS_BYTES: usize = abi::PARAMETERS_BYTES as usize;

fn info_bytes(info: &DeviceInfo) -> [u8; INFO_BYTES] {
    // SAFETY: the structure has no padding (its fields add up to its size, asserted beside it), so
    // all its bytes are initialized, and any bytes are an array of bytes.
    unsafe { std::mem::transmute::<DeviceInfo, [u8; INFO_BYTES]>(*info) }
}

fn info_from(bytes: &[u8; INFO_BYTES]) -> DeviceInfo {
    // SAFETY: all fields are integers, so any bytes are a valid structure.
    unsafe { std::mem::transmute::<[u8; INFO_BYTES], DeviceInfo>(*bytes) }
}

fn parameters_bytes(parameters: &Parameters) -> [u8; PARAMETERS_BYTES] {
    // SAFETY: the structure has no padding (asserted beside it), so all its bytes are initialized,
    // and any bytes are an array of bytes.
    let all =
        unsafe { std::mem::transmute::<Parameters, [u8; size_of::<Parameters>()]>(*parameters) };
    let mut parameters = [0; PARAMETERS_BYTES];
    parameters.copy_from_slice(&all[..PARAMETERS_BYTES]);
    parameters
}

fn parameters_from(parameters: &[u8; PARAMETERS_BYTES]) -> Parameters {
    let mut all = [0; size_of::<Parameters>()];
    all[..PARAMETERS_BYTES].copy_from_slice(parameters);
    // SAFETY: all fields are integers, so any bytes are a valid structure.
    unsafe { std::mem::transmute::<[u8; size_of::<Parameters>()], Parameters>(all) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lend(lent: &mut LentBuffers, byte: u8) -> u64 {
        lent.lend(Box::new(Buffer([byte; BUFFER_BYTES]))).0
    }

    #[test]
    fn the_late_answer_of_a_command_whose_wait_failed_answers_no_other_command() {
        let mut lent = LentBuffers::default();
        let (failed, next) = (lend(&mut lent, 1), lend(&mut lent, 2));
        let mut answers = [(failed, -5), (next, 0), (77, 0)].into_iter();
        let (result, buffer) = lent.find_answer(next, &mut answers).expect("an answer");
        assert_eq!((result, buffer.0[0]), (0, 2), "the result and the memory of its own");
        assert_eq!(answers.next(), Some((77, 0)), "later answers are left for later calls");
        assert!(lent.unanswered.is_empty(), "the late answer ended its loan, too");
    }

    #[test]
    fn memory_that_the_driver_may_still_use_stays_until_its_own_answer() {
        let mut lent = LentBuffers::default();
        let (failed, next) = (lend(&mut lent, 1), lend(&mut lent, 2));
        assert!(lent.find_answer(next, [(next, 0)].into_iter()).is_some());
        assert!(lent.unanswered.contains_key(&failed), "the driver has not answered this one");
        let third = lend(&mut lent, 3);
        assert!(third != failed && third != next, "a number is used once");
        assert!(lent.find_answer(third, [(failed, 0)].into_iter()).is_none(), "not its answer");
        assert_eq!(lent.unanswered.keys().copied().collect::<Vec<_>>(), [third]);
    }
}
