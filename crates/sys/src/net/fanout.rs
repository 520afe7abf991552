//! Several sockets share the frames of one interface (PACKET_FANOUT), so that several threads can
//! receive them.
//!
//! The kernel's own hash knows IP and little else: frames of any other protocol would all go to one
//! socket. So a small program chooses, by the sender and by some bytes of the payload.
//!
//! Invariants: a frame goes to one socket; frames from one sender that are equal in those bytes go
//! to the same one, as long as the group has the same sockets. A group is this process's own. A
//! socket leaves it when its ring is dropped. Not here: the sockets (`frames`).

use std::ffi::c_int;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::{Arc, Weak};

use libc::{sock_filter, sock_fprog};
use parking_lot::Mutex;
use rustix::io::Errno;
use rustix::net::sockopt;

use super::frames::{FrameSocket, SOL_PACKET};
use super::{counted, set_number};

const PACKET_FANOUT: c_int = 18;
const PACKET_FANOUT_DATA: c_int = 22;
/// A program chooses (PACKET_FANOUT_CBPF).
const BY_PROGRAM: c_int = 6;
/// The kernel finds a number that no other group has (PACKET_FANOUT_FLAG_UNIQUEID).
const NEW_NUMBER: c_int = 0x2000;
/// Where the Ethernet header begins, for a program.
const HEADER_AT: u32 = 0xFFE0_0000;
/// The last bytes of the sender's address.
const SENDER_BYTES: [u32; 2] = [HEADER_AT + 10, HEADER_AT + 11];

const LOAD_BYTE: u16 = (libc::BPF_LD | libc::BPF_B | libc::BPF_ABS) as u16;
const COPY_TO_X: u16 = (libc::BPF_MISC | libc::BPF_TAX) as u16;
const XOR_X: u16 = (libc::BPF_ALU | libc::BPF_XOR | libc::BPF_X) as u16;
const RETURN: u16 = (libc::BPF_RET | libc::BPF_A) as u16;

/// Sockets that share the frames of an interface.
#[derive(Default)]
pub struct FrameGroup {
    /// Bounded by the receivers of an address.
    members: Mutex<Vec<Weak<FrameSocket>>>,
}

impl FrameGroup {
    /// Adds a bound socket. The group deals frames out by the sender and these bytes of a payload.
    ///
    /// Errors: those of the kernel; ENETDOWN if the interface is down (before Linux 6.13);
    /// EOPNOTSUPP if the kernel is too old (before 4.12); EAGAIN if the group ended just now. Then
    /// the socket receives all frames.
    pub fn add(&self, socket: &Arc<FrameSocket>, payload_bytes: &[u32]) -> io::Result<()> {
        let mut members = self.members.lock();
        members.retain(|member| member.upgrade().is_some_and(|socket| number_of(&socket).is_ok()));
        // A member may belong to an interface that was removed since: then the kernel refuses.
        let joined = members.iter().rev().filter_map(Weak::upgrade).find(|member| {
            number_of(member).and_then(|number| join(socket, number, BY_PROGRAM)).is_ok()
        });
        match joined {
            // Who was a member before and after the join kept the group's number from others.
            Some(member) if number_of(&member).is_err() => {
                return Err(Errno::AGAIN.into());
            }
            Some(_) => {}
            None => {
                join(socket, 0, BY_PROGRAM | NEW_NUMBER)
                    .map_err(|error| refusal(error, sockopt::socket_error(socket)))?;
                choose_by(socket, payload_bytes)?;
            }
        }
        members.push(Arc::downgrade(socket));
        Ok(())
    }
}

fn join(socket: &FrameSocket, number: c_int, how: c_int) -> io::Result<()> {
    set_number(socket, SOL_PACKET, PACKET_FANOUT, number | how << 16)
}

/// Why a socket cannot begin a group. EINVAL has two reasons: the interface is down, which the
/// socket reports as its own error, or the kernel does not know how to find a number and takes that
/// for an invalid one.
fn refusal(error: io::Error, of_socket: rustix::io::Result<Result<(), Errno>>) -> io::Error {
    match (Errno::from_io_error(&error), of_socket) {
        (Some(Errno::INVAL), Ok(Err(reason))) => reason.into(),
        (Some(Errno::INVAL), _) => Errno::OPNOTSUPP.into(),
        _ => error,
    }
}

/// The number of a socket's group.
fn number_of(socket: &FrameSocket) -> io::Result<c_int> {
    let (mut value, mut length): (c_int, _) = (0, size_of::<c_int>() as libc::socklen_t);
    let (descriptor, into) = (socket.as_fd().as_raw_fd(), (&raw mut value).cast());
    // SAFETY: the kernel writes at most `length` bytes, which are those of `value`.
    counted(unsafe {
        libc::getsockopt(descriptor, SOL_PACKET, PACKET_FANOUT, into, &raw mut length)
    })?;
    match value >> 16 {
        0 => Err(Errno::INVAL.into()),
        _ => Ok(value & 0xFFFF),
    }
}

/// Gives a group its program: the bytes, combined.
fn choose_by(socket: &FrameSocket, payload_bytes: &[u32]) -> io::Result<()> {
    let step = |code, k| sock_filter { code, jt: 0, jf: 0, k };
    let mut steps = Vec::new();
    for at in SENDER_BYTES.iter().chain(payload_bytes) {
        steps.push(step(COPY_TO_X, 0));
        steps.push(step(LOAD_BYTE, *at));
        steps.push(step(XOR_X, 0));
    }
    steps.push(step(RETURN, 0));
    let program = sock_fprog { len: steps.len() as u16, filter: steps.as_mut_ptr() };
    let length = size_of::<sock_fprog>() as libc::socklen_t;
    let (descriptor, from) = (socket.as_fd().as_raw_fd(), (&raw const program).cast());
    // SAFETY: the kernel reads one `struct sock_fprog`, and the steps behind its pointer, which
    // live until the end of this function, and keeps neither.
    counted(unsafe { libc::setsockopt(descriptor, SOL_PACKET, PACKET_FANOUT_DATA, from, length) })
        .map(|_| ())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interface_that_is_down_is_told_from_a_kernel_that_is_too_old() {
        let errno = |error: Errno, of_socket| {
            Errno::from_io_error(&refusal(error.into(), of_socket)).expect("a system error")
        };
        assert_eq!(errno(Errno::INVAL, Ok(Err(Errno::NETDOWN))), Errno::NETDOWN);
        assert_eq!(errno(Errno::INVAL, Ok(Ok(()))), Errno::OPNOTSUPP);
        assert_eq!(errno(Errno::NOMEM, Ok(Err(Errno::NETDOWN))), Errno::NOMEM);
    }
}
