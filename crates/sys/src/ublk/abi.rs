//! The structures and numbers of the kernel's ublk driver, as `linux/ublk_cmd.h` fixes them.
//!
//! Invariant: sizes and offsets are those of the kernel, asserted when this is compiled. All
//! numbers are in the machine's byte order. Not here: sending them.

use std::mem::{offset_of, size_of};

/// The most tags of one queue.
pub const QUEUE_DEPTH_MAX: u16 = 4096;
/// The most bytes of one read or write: what fits between two tags in the offsets of the character
/// device.
pub const REQUEST_BYTES_MAX: u32 = 1 << 25;

/// The driver's features, which are also the flags of a device.
pub mod feature {
    /// The device waits for another server when its own dies.
    pub const USER_RECOVERY: u64 = 1 << 3;
    /// Requests that the dead server had not answered are given to the next one.
    pub const USER_RECOVERY_REISSUE: u64 = 1 << 4;
    /// The device belongs to a user without privileges.
    pub const UNPRIVILEGED_DEV: u64 = 1 << 5;
    /// Commands are encoded like ioctls.
    pub const CMD_IOCTL_ENCODE: u64 = 1 << 6;
    /// The server reads and writes the bytes of a request through the character device (Linux 6.5).
    pub const USER_COPY: u64 = 1 << 7;
    /// The size can change while the device runs (Linux 6.16).
    pub const UPDATE_SIZE: u64 = 1 << 10;
    /// A device can be made to wait for another server by a command (Linux 6.16).
    pub const QUIESCE: u64 = 1 << 12;
}

/// What the operation of a request can be.
pub mod operation {
    /// The server supplies bytes.
    pub const READ: u8 = 0;
    /// The server stores bytes.
    pub const WRITE: u8 = 1;
    /// Make all completed writes durable.
    pub const FLUSH: u8 = 2;
    /// The range is no longer needed.
    pub const DISCARD: u8 = 3;
    /// Make the range read as zeroes.
    pub const WRITE_ZEROES: u8 = 5;
}

/// Modifiers of a request, in the upper 24 bits of `op_flags`.
pub mod operation_flag {
    /// Answer only when this write is durable.
    pub const FUA: u32 = 1 << 13;
    /// Write-zeroes keeps the space.
    pub const NO_UNMAP: u32 = 1 << 15;
}

/// Attributes of a device in its parameters.
pub mod attribute {
    /// No write is accepted.
    pub const READ_ONLY: u32 = 1;
    /// The device has a cache that a flush empties.
    pub const VOLATILE_CACHE: u32 = 1 << 2;
    /// The device understands writes with FUA.
    pub const FUA: u32 = 1 << 3;
}

/// One request of the kernel.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IoDescriptor {
    /// The operation in the lowest eight bits, its modifiers above.
    pub op_flags: u32,
    /// Length of the range in sectors of 512 bytes.
    pub sectors: u32,
    /// First sector of the range.
    pub start_sector: u64,
    /// Address of the buffer, where the kernel copies the bytes itself.
    pub addr: u64,
}
const _: () =
    assert!(size_of::<IoDescriptor>() == 24 && offset_of!(IoDescriptor, start_sector) == 8);

/// What the driver knows of a device.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Queues; the driver gives no more than there are cores.
    pub queues: u16,
    /// Tags of each queue.
    pub queue_depth: u16,
    /// See [`DeviceInfo::state`].
    pub state: u16,
    /// Zero.
    pub pad0: u16,
    /// The longest read or write in bytes.
    pub request_bytes_max: u32,
    /// The number in `/dev/ublkbN`; `u32::MAX` asks for any.
    pub id: u32,
    /// The process that serves the device, or served it last; -1 for none.
    pub server_pid: i32,
    /// Zero.
    pub pad1: u32,
    /// The features in use, see [`feature`].
    pub flags: u64,
    /// 64 bits that the driver keeps for the server and does not look at.
    pub server_signature: u64,
    /// The user who added the device.
    pub owner_uid: u32,
    /// The group of that user.
    pub owner_gid: u32,
    /// Zero.
    pub reserved: [u64; 2],
}
const _: () = assert!(size_of::<DeviceInfo>() == 64 && offset_of!(DeviceInfo, id) == 12);
const _: () =
    assert!(offset_of!(DeviceInfo, flags) == 24 && offset_of!(DeviceInfo, server_signature) == 32);

/// How a device stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceState {
    /// Not started yet, or stopped.
    Dead,
    /// A server serves it.
    Live,
    /// Its server is gone; requests wait for the next one.
    Quiesced,
    /// A state that a newer kernel knows.
    Other(u16),
}

impl DeviceInfo {
    /// How the device stands.
    #[must_use]
    pub fn state(&self) -> DeviceState {
        match self.state {
            0 => DeviceState::Dead,
            1 => DeviceState::Live,
            2 => DeviceState::Quiesced,
            other => DeviceState::Other(other),
        }
    }
}

/// The facts of a device that its users see. Sectors are 512 bytes; `..._shift` is the logarithm of
/// bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Parameters {
    /// Filled in by [`super::Control`].
    pub len: u32,
    /// Filled in by [`super::Control`].
    pub types: u32,
    /// See [`attribute`].
    pub attributes: u32,
    /// The logical block: the unit of addresses and lengths.
    pub logical_block_shift: u8,
    /// The physical block: what is written without a read before it.
    pub physical_block_shift: u8,
    /// The length of requests that the device prefers.
    pub io_opt_shift: u8,
    /// The shortest length that suits the device.
    pub io_min_shift: u8,
    /// The longest read or write.
    pub request_sectors_max: u32,
    /// Requests do not cross multiples of this; 0 for none.
    pub chunk_sectors: u32,
    /// The size of the device.
    pub device_sectors: u64,
    /// Zero.
    pub virt_boundary_mask: u64,
    /// Zero.
    pub discard_alignment: u32,
    /// The unit of discards in bytes; at least 1.
    pub discard_granularity: u32,
    /// The longest discard; 0 for none at all.
    pub discard_sectors_max: u32,
    /// The longest write-zeroes; 0 for none at all.
    pub write_zeroes_sectors_max: u32,
    /// Ranges of one discard: 1, or 0 where there is no discard.
    pub discard_segments_max: u16,
    /// Zero.
    pub reserved: u16,
    /// Zero.
    pub tail: u32,
}
const _: () =
    assert!(size_of::<Parameters>() == 64 && offset_of!(Parameters, device_sectors) == 24);
const _: () = assert!(offset_of!(Parameters, discard_alignment) == 40);

/// Bytes of [`Parameters`] that the driver knows: the basic part and the one on discards.
pub(super) const PARAMETERS_BYTES: u32 = 60;
const _: () = assert!(offset_of!(Parameters, tail) == PARAMETERS_BYTES as usize);
/// The two parts that [`Parameters`] has.
pub(super) const PARAMETERS_TYPES: u32 = 0b11;

/// The payload of a command on `/dev/ublk-control`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ControlCommand {
    pub(super) dev_id: u32,
    pub(super) queue_id: u16,
    pub(super) len: u16,
    pub(super) addr: u64,
    pub(super) data: u64,
    pub(super) dev_path_len: u16,
    pub(super) pad: u16,
    pub(super) reserved: u32,
}
const _: () = assert!(size_of::<ControlCommand>() == 32 && offset_of!(ControlCommand, addr) == 8);

impl ControlCommand {
    /// The bytes as they lie in a submission entry.
    pub(super) fn bytes(&self) -> [u8; 80] {
        let mut bytes = [0; 80];
        bytes[..4].copy_from_slice(&self.dev_id.to_ne_bytes());
        bytes[4..6].copy_from_slice(&self.queue_id.to_ne_bytes());
        bytes[6..8].copy_from_slice(&self.len.to_ne_bytes());
        bytes[8..16].copy_from_slice(&self.addr.to_ne_bytes());
        bytes[16..24].copy_from_slice(&self.data.to_ne_bytes());
        bytes[24..26].copy_from_slice(&self.dev_path_len.to_ne_bytes());
        bytes
    }
}

/// The payload of a command on `/dev/ublkcN`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct IoCommand {
    pub(super) queue: u16,
    pub(super) tag: u16,
    pub(super) result: i32,
    pub(super) addr: u64,
}
const _: () = assert!(size_of::<IoCommand>() == 16 && offset_of!(IoCommand, addr) == 8);

impl IoCommand {
    /// The bytes as they lie in a submission entry.
    pub(super) fn bytes(&self) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[..2].copy_from_slice(&self.queue.to_ne_bytes());
        bytes[2..4].copy_from_slice(&self.tag.to_ne_bytes());
        bytes[4..8].copy_from_slice(&self.result.to_ne_bytes());
        bytes[8..].copy_from_slice(&self.addr.to_ne_bytes());
        bytes
    }
}

const IOC_WRITE: u32 = 1;
const IOC_READ: u32 = 2;

/// The number of a command, encoded like an ioctl of type `u`.
const fn encoded(direction: u32, number: u32, payload_bytes: usize) -> u32 {
    direction << 30 | (payload_bytes as u32) << 16 | (b'u' as u32) << 8 | number
}

const fn control_read(number: u32) -> u32 {
    encoded(IOC_READ, number, size_of::<ControlCommand>())
}

const fn control_write(number: u32) -> u32 {
    encoded(IOC_READ | IOC_WRITE, number, size_of::<ControlCommand>())
}

const fn io(number: u32) -> u32 {
    encoded(IOC_READ | IOC_WRITE, number, size_of::<IoCommand>())
}

pub(super) const GET_QUEUE_AFFINITY: u32 = control_read(0x01);
pub(super) const ADD_DEV: u32 = control_write(0x04);
pub(super) const DEL_DEV: u32 = control_write(0x05);
pub(super) const START_DEV: u32 = control_write(0x06);
pub(super) const STOP_DEV: u32 = control_write(0x07);
pub(super) const SET_PARAMS: u32 = control_write(0x08);
pub(super) const GET_PARAMS: u32 = control_read(0x09);
pub(super) const START_USER_RECOVERY: u32 = control_write(0x10);
pub(super) const END_USER_RECOVERY: u32 = control_write(0x11);
pub(super) const GET_DEV_INFO2: u32 = control_read(0x12);
pub(super) const GET_FEATURES: u32 = control_read(0x13);
pub(super) const UPDATE_SIZE: u32 = control_write(0x15);
pub(super) const FETCH_REQ: u32 = io(0x20);
pub(super) const COMMIT_AND_FETCH_REQ: u32 = io(0x21);
// The numbers that the kernel's header gives, spelled out.
const _: () = assert!(ADD_DEV == 0xC020_7504 && GET_FEATURES == 0x8020_7513);
const _: () = assert!(FETCH_REQ == 0xC010_7520 && COMMIT_AND_FETCH_REQ == 0xC010_7521);

/// Where the descriptors of a queue lie in the character device.
pub(super) fn descriptors_offset(queue: u16, page_bytes: usize) -> u64 {
    let room = usize::from(QUEUE_DEPTH_MAX) * size_of::<IoDescriptor>();
    u64::from(queue) * room.next_multiple_of(page_bytes) as u64
}

/// Bytes of the descriptors of a queue.
pub(super) fn descriptors_bytes(queue_depth: u16, page_bytes: usize) -> usize {
    (usize::from(queue_depth) * size_of::<IoDescriptor>()).next_multiple_of(page_bytes)
}

/// Where the bytes of a request begin in the character device.
pub(super) fn payload_offset(queue: u16, tag: u16) -> u64 {
    0x8000_0000 + (u64::from(queue) << 41) + (u64::from(tag) << 25)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_lie_in_a_submission_as_the_kernel_reads_them() {
        let command = ControlCommand {
            dev_id: 0x0403_0201,
            queue_id: 0x0605,
            len: 0x0807,
            addr: 0x100F_0E0D_0C0B_0A09,
            data: 0x1817_1615_1413_1211,
            dev_path_len: 0x1A19,
            ..ControlCommand::default()
        };
        let counted: Vec<u8> = (1..=26).chain(std::iter::repeat_n(0, 54)).collect();
        assert_eq!(u32::from_ne_bytes(command.bytes()[..4].try_into().unwrap()), 0x0403_0201);
        if cfg!(target_endian = "little") {
            assert_eq!(command.bytes().as_slice(), counted);
        }
        let command = IoCommand { queue: 0x0201, tag: 0x0403, result: -1, addr: 7 };
        assert_eq!(i32::from_ne_bytes(command.bytes()[4..8].try_into().unwrap()), -1);
    }

    #[test]
    fn no_two_requests_share_an_offset() {
        let last_byte = payload_offset(0, 5) + u64::from(REQUEST_BYTES_MAX) - 1;
        assert!(last_byte < payload_offset(0, 6));
        let last_tag = payload_offset(0, QUEUE_DEPTH_MAX - 1) + u64::from(REQUEST_BYTES_MAX) - 1;
        assert!(last_tag < payload_offset(1, 0));
        assert!(i64::try_from(payload_offset(4095, QUEUE_DEPTH_MAX - 1)).is_ok());
    }

    #[test]
    fn descriptors_of_queues_do_not_overlap() {
        for page_bytes in [4096, 65536] {
            let end = descriptors_bytes(QUEUE_DEPTH_MAX, page_bytes) as u64;
            assert!(end <= descriptors_offset(1, page_bytes));
            assert_eq!(descriptors_offset(3, page_bytes) % page_bytes as u64, 0);
        }
        assert_eq!(descriptors_bytes(128, 4096), 4096);
        assert_eq!(descriptors_bytes(171, 4096), 8192);
    }
}
