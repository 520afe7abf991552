//! Sockets that move many packets with one system call, which the standard library cannot do.
//!
//! Modules: [`DatagramSocket`] (UDP, with the kernel's segmentation and its reverse),
//! [`FrameSocket`] and [`FrameRing`] (raw Ethernet), [`FrameGroup`] (several sockets share frames),
//! [`open_xdp`] (the same, bypassing the kernel's network layer), [`Interface`] (what the kernel
//! knows of one).
//!
//! Invariant: nothing here allocates after construction, and no call waits. Not here: what the
//! bytes mean, which lengths are right, who waits for what.

mod datagrams;
mod fanout;
mod frames;
mod interface;
mod name;
mod xdp;

pub use datagrams::{DatagramOptions, DatagramRun, DatagramSocket, Inbox, RUNS_MAX};
pub use fanout::FrameGroup;
pub use frames::{ETHERNET_HEADER_BYTES, FRAMES_MAX, Frame, FrameRing, FrameSocket, split_frame};
pub use interface::Interface;
pub use xdp::{XdpInbox, XdpOutbox, XdpSocket, open_xdp};

use std::ffi::{c_int, c_void};
use std::io;
use std::os::fd::{AsFd, AsRawFd};

use rustix::net::sockopt;

/// Binds a socket to one interface: it sends and receives only there.
///
/// Errors: ENODEV where there is no such interface; EPERM if it is bound to another one already.
pub fn bind_to_interface(socket: impl AsFd, name: &str) -> io::Result<()> {
    set_option(socket, libc::SOL_SOCKET, libc::SO_BINDTODEVICE, name.as_bytes())
}

/// Requests kernel buffers of this size, beyond the machine's limit if permitted. Getting less is
/// not a failure.
pub fn grow_buffers(socket: impl AsFd, buffer_bytes: usize) -> io::Result<()> {
    let socket = socket.as_fd();
    if sockopt::set_socket_recv_buffer_size_force(socket, buffer_bytes).is_err() {
        sockopt::set_socket_recv_buffer_size(socket, buffer_bytes)?;
    }
    if sockopt::set_socket_send_buffer_size_force(socket, buffer_bytes).is_err() {
        sockopt::set_socket_send_buffer_size(socket, buffer_bytes)?;
    }
    Ok(())
}

/// A waiting receiver of a stream is woken when so many bytes are there, or its end.
pub fn wake_for(socket: impl AsFd, bytes: usize) -> io::Result<()> {
    let bytes = c_int::try_from(bytes).map_err(io::Error::other)?;
    set_number(socket, libc::SOL_SOCKET, libc::SO_RCVLOWAT, bytes)
}

fn set_number(socket: impl AsFd, level: c_int, name: c_int, value: c_int) -> io::Result<()> {
    set_option(socket, level, name, &value.to_ne_bytes())
}

fn set_option(socket: impl AsFd, level: c_int, name: c_int, value: &[u8]) -> io::Result<()> {
    let descriptor = socket.as_fd().as_raw_fd();
    let length = libc::socklen_t::try_from(value.len()).map_err(io::Error::other)?;
    // SAFETY: the kernel reads `length` bytes at the pointer, which are those of `value`, and keeps
    // nothing.
    let result = unsafe {
        libc::setsockopt(descriptor, level, name, value.as_ptr().cast::<c_void>(), length)
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// The count that a system call gave, or its error.
fn counted(result: c_int) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}
