//! Open files that travel with bytes over a Unix socket (`SCM_RIGHTS`): one call of the kernel at a
//! time.
//!
//! Invariant: every received descriptor is returned or closed; a program that this process executes
//! inherits none. Not here: messages made of several calls, and what the bytes mean.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

/// Descriptors that the kernel takes with one call.
pub const DESCRIPTORS_MAX: usize = 253;
const CONTROL_BYTES: usize = rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX));

/// The result of one receive call.
#[derive(Debug)]
pub struct ReceiveResult {
    /// Bytes that were received; 0 at the end of the stream.
    pub bytes: usize,
    /// Open files that came with them.
    pub descriptors: Vec<OwnedFd>,
    /// A packet was longer than the buffer: the rest of it is lost.
    pub is_cut: bool,
    /// A descriptor could not be received: this process has no room for one more open file.
    pub descriptors_lost: bool,
}

/// Sends `bytes`, or as many of them as a stream takes now, with `descriptors`. Returns how many
/// bytes went.
///
/// Fails as `sendmsg` does, and with `INVAL` for more than [`DESCRIPTORS_MAX`] descriptors.
pub fn send(
    socket: impl AsFd,
    bytes: &[u8],
    descriptors: &[BorrowedFd<'_>],
) -> Result<usize, Errno> {
    let mut space = [MaybeUninit::uninit(); CONTROL_BYTES];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(Errno::INVAL);
    }
    rustix::io::retry_on_intr(|| {
        sendmsg(&socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)
    })
}

/// Receives into `buffer` what there is, with its descriptors. Fails as `recvmsg` does.
pub fn receive(socket: impl AsFd, buffer: &mut [u8]) -> Result<ReceiveResult, Errno> {
    let mut space = [MaybeUninit::uninit(); CONTROL_BYTES];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let message = rustix::io::retry_on_intr(|| {
        recvmsg(&socket, &mut [IoSliceMut::new(buffer)], &mut control, RecvFlags::CMSG_CLOEXEC)
    })?;
    let mut descriptors = Vec::new();
    for ancillary in control.drain() {
        if let RecvAncillaryMessage::ScmRights(received_descriptors) = ancillary {
            descriptors.extend(received_descriptors);
        }
    }
    Ok(ReceiveResult {
        bytes: message.bytes,
        descriptors,
        is_cut: message.flags.contains(ReturnFlags::TRUNC),
        descriptors_lost: message.flags.contains(ReturnFlags::CTRUNC),
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::{UnixDatagram, UnixStream};

    use super::*;

    #[test]
    fn descriptors_come_with_the_bytes_they_were_sent_with() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let (near_end, far_end) = UnixStream::pair().unwrap();
        assert_eq!(send(&ours, b"take it", &[far_end.as_fd(), far_end.as_fd()]), Ok(7));
        let mut buffer = [0; 16];
        let received = receive(&theirs, &mut buffer).unwrap();
        assert_eq!((&buffer[..received.bytes], received.descriptors.len()), (&b"take it"[..], 2));
        assert!(!received.is_cut && !received.descriptors_lost);
        assert_eq!(send(&received.descriptors[0], b"x", &[]), Ok(1));
        assert_eq!(receive(&near_end, &mut buffer).unwrap().bytes, 1);
    }

    #[test]
    fn more_descriptors_than_the_kernel_takes_are_refused() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let many = vec![ours.as_fd(); DESCRIPTORS_MAX + 1];
        assert_eq!(send(&ours, b"x", &many), Err(Errno::INVAL));
    }

    #[test]
    fn a_packet_longer_than_the_buffer_is_said_to_be_cut() {
        let (ours, theirs) = UnixDatagram::pair().unwrap();
        send(&ours, b"long", &[]).unwrap();
        assert!(receive(&theirs, &mut [0; 2]).unwrap().is_cut);
    }
}
