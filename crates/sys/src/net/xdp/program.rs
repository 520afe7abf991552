//! The program that an interface runs for each frame that arrives: it sends frames of one EtherType
//! to one socket, and passes all others on as usual. Its fifteen instructions are encoded here and
//! loaded with bpf(2).
//!
//! Invariants: a link in a file descriptor attaches it, so it disappears with the process, however
//! that ends; a frame whose socket is gone is passed on like any other. Not here: sockets.

use std::ffi::c_long;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use super::super::Interface;

// From linux/bpf.h and linux/if_link.h.
const MAP_CREATE: c_long = 0;
const MAP_UPDATE_ELEM: c_long = 2;
const PROG_LOAD: c_long = 5;
const LINK_CREATE: c_long = 28;
const LINK_DETACH: c_long = 34;
const MAP_TYPE_XSKMAP: u32 = 17;
const PROG_TYPE_XDP: u32 = 6;
const ATTACH_TYPE_XDP: u32 = 37;
const PROG_HAS_FRAGMENTS: u32 = 1 << 5;
const REDIRECT_MAP: i32 = 51;
const XDP_PASS: i32 = 2;
/// Offsets in `struct xdp_md`.
const DATA: i16 = 0;
const DATA_END: i16 = 4;
const RECEIVE_QUEUE: i16 = 16;

#[repr(C)]
struct MapCreate {
    map_type: u32,
    key_bytes: u32,
    value_bytes: u32,
    entries: u32,
}

#[repr(C)]
struct MapUpdate {
    map: u32,
    padding: u32,
    key: u64,
    value: u64,
    flags: u64,
}

#[repr(C)]
struct ProgramLoad {
    program_type: u32,
    instructions: u32,
    first: u64,
    license: u64,
    log_level: u32,
    log_bytes: u32,
    log: u64,
    kernel_version: u32,
    flags: u32,
    name: [u8; 16],
    interface: u32,
    attach_type: u32,
}

#[repr(C)]
struct LinkCreate {
    program: u32,
    interface: u32,
    attach_type: u32,
    flags: u32,
}

/// The attached program; dropping this detaches it.
pub(super) struct Program {
    link: OwnedFd,
    map: OwnedFd,
}

impl Drop for Program {
    fn drop(&mut self) {
        // Closing the link is enough, but takes a moment, in which no other program could be
        // attached.
        let _ = bpf(LINK_DETACH, &self.link.as_raw_fd().cast_unsigned());
    }
}

/// Whether frames may come in several pieces (Linux 5.18).
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Fragments {
    None,
    Accepted,
}

impl Program {
    /// Attaches it: in the driver if that supports it, otherwise behind it.
    ///
    /// Errors: EPERM without CAP_BPF and CAP_NET_ADMIN; EBUSY where the interface has a program
    /// already.
    pub(super) fn attach(
        interface: &Interface,
        ethertype: u16,
        fragments: Fragments,
    ) -> io::Result<Self> {
        let map = MapCreate { map_type: MAP_TYPE_XSKMAP, key_bytes: 4, value_bytes: 4, entries: 1 };
        let map = descriptor(MAP_CREATE, &map)?;
        let instructions = instructions(&map, ethertype);
        let mut name = [0; 16];
        name[..12].copy_from_slice(b"sawmill_link");
        let load = ProgramLoad {
            program_type: PROG_TYPE_XDP,
            instructions: instructions.len() as u32,
            first: instructions.as_ptr() as u64,
            license: c"MIT OR Apache-2.0".as_ptr() as u64,
            log_level: 0,
            log_bytes: 0,
            log: 0,
            kernel_version: 0,
            flags: if fragments == Fragments::Accepted { PROG_HAS_FRAGMENTS } else { 0 },
            name,
            interface: 0,
            attach_type: ATTACH_TYPE_XDP,
        };
        let program = descriptor(PROG_LOAD, &load)?;
        let link = LinkCreate {
            program: program.as_raw_fd().cast_unsigned(),
            interface: interface.index,
            attach_type: ATTACH_TYPE_XDP,
            flags: 0,
        };
        Ok(Program { link: descriptor(LINK_CREATE, &link)?, map })
    }

    /// Sends frames of receive queue 0 to this socket, which is bound to that queue.
    pub(super) fn redirect_to(&self, socket: &OwnedFd) -> io::Result<()> {
        let (key, value) = (0u32, socket.as_raw_fd());
        let update = MapUpdate {
            map: self.map.as_raw_fd().cast_unsigned(),
            padding: 0,
            key: (&raw const key) as u64,
            value: (&raw const value) as u64,
            flags: 0,
        };
        bpf(MAP_UPDATE_ELEM, &update).map(|_| ())
    }
}

/// ```c
/// if (data + 14 <= data_end && *(u16 *)(data + 12) == ethertype)
///     return bpf_redirect_map(map, receive_queue, XDP_PASS);   // PASS where no socket is there
/// return XDP_PASS;
/// ```
fn instructions(map: &OwnedFd, ethertype: u16) -> [u64; 15] {
    const LOAD_16: u8 = 0x69;
    const LOAD_32: u8 = 0x61;
    const LOAD_CONSTANT_64: u8 = 0x18;
    const IS_MAP: u8 = 1;
    const MOVE: u8 = 0xBF;
    const MOVE_CONSTANT: u8 = 0xB7;
    const ADD_CONSTANT: u8 = 0x07;
    const JUMP_IF_GREATER: u8 = 0x2D;
    const JUMP_UNLESS_CONSTANT: u8 = 0x55;
    const CALL: u8 = 0x85;
    const EXIT: u8 = 0x95;
    // The number that the processor reads from the two bytes.
    let ethertype = i32::from(u16::from_ne_bytes(ethertype.to_be_bytes()));
    [
        instruction(LOAD_32, 2, 1, DATA_END, 0),
        instruction(LOAD_32, 3, 1, DATA, 0),
        instruction(MOVE, 4, 3, 0, 0),
        instruction(ADD_CONSTANT, 4, 0, 0, 14),
        instruction(JUMP_IF_GREATER, 4, 2, 8, 0),
        instruction(LOAD_16, 3, 3, 12, 0),
        instruction(JUMP_UNLESS_CONSTANT, 3, 0, 6, ethertype),
        instruction(LOAD_32, 2, 1, RECEIVE_QUEUE, 0),
        instruction(LOAD_CONSTANT_64, 1, IS_MAP, 0, map.as_raw_fd()),
        0,
        instruction(MOVE_CONSTANT, 3, 0, 0, XDP_PASS),
        instruction(CALL, 0, 0, 0, REDIRECT_MAP),
        instruction(EXIT, 0, 0, 0, 0),
        // The jumps lead here.
        instruction(MOVE_CONSTANT, 0, 0, 0, XDP_PASS),
        instruction(EXIT, 0, 0, 0, 0),
    ]
}

/// A `struct bpf_insn`, as it lies in memory.
fn instruction(code: u8, to: u8, from: u8, offset: i16, constant: i32) -> u64 {
    let registers = if cfg!(target_endian = "little") { to | from << 4 } else { to << 4 | from };
    let ([o0, o1], [c0, c1, c2, c3]) = (offset.to_ne_bytes(), constant.to_ne_bytes());
    u64::from_ne_bytes([code, registers, o0, o1, c0, c1, c2, c3])
}

fn descriptor<T>(command: c_long, attributes: &T) -> io::Result<OwnedFd> {
    let number = bpf(command, attributes)?;
    // SAFETY: these commands answer with a new descriptor, which nobody else has.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

fn bpf<T>(command: c_long, attributes: &T) -> io::Result<RawFd> {
    // SAFETY: `attributes` begins with what the command reads (a prefix of `union bpf_attr`, the
    // rest counts as zero) and its length is said; what it points to lives through the call and is
    // only read.
    let result =
        unsafe { libc::syscall(libc::SYS_bpf, command, &raw const *attributes, size_of::<T>()) };
    RawFd::try_from(result).ok().filter(|&number| number >= 0).ok_or_else(io::Error::last_os_error)
}
