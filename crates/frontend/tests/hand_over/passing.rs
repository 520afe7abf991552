//! Messages with descriptors, between two ends that may break the protocol.

use std::fs::File;
use std::io::{IoSlice, Read, Seek, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::io::{FdFlags, fcntl_getfd};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use sawmill_device::ErrorKind;
use sawmill_frontend::passing::{receive, send};

/// The golden parcel, and the head of the message that it makes with its three descriptors.
const PARCEL: &[u8] = include_bytes!("v1-two-pieces.bin");
const HEAD: &[u8; 16] = b"SWM1\x03\0\0\0\xd6\0\0\0\0\0\0\0";

fn pair() -> (UnixStream, UnixStream) {
    UnixStream::pair().expect("a pair of sockets")
}

/// The kind and text of the expected error.
fn refused(stream: &UnixStream, bytes_max: usize, descriptors_max: usize) -> (ErrorKind, String) {
    let error = receive(stream, bytes_max, descriptors_max).expect_err("it must not be taken");
    (error.kind(), error.to_string())
}

fn head(descriptors: u32, length: u64) -> Vec<u8> {
    [&b"SWM1"[..], &descriptors.to_le_bytes(), &length.to_le_bytes()].concat()
}

fn send_with(stream: &UnixStream, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(descriptors)));
    let sent = sendmsg(stream, &[IoSlice::new(bytes)], &mut control, SendFlags::empty());
    assert_eq!(sent, Ok(bytes.len()));
}

/// Writes through one descriptor what the other one must read.
fn same_file(mine: &File, theirs: OwnedFd) -> bool {
    let mut theirs = File::from(theirs);
    theirs.set_len(0).and_then(|()| theirs.rewind()).expect("a file");
    theirs.write_all(b"through another descriptor").expect("a file");
    let mut text = String::new();
    let mut mine = mine.try_clone().expect("a duplicate");
    mine.rewind().and_then(|()| mine.read_to_string(&mut text)).expect("a file");
    text == "through another descriptor"
}

#[test]
fn the_message_of_the_golden_parcel_is_sent_and_received_as_its_page_shows() {
    let golden = [&HEAD[..], PARCEL].concat();
    let (near, mut far) = pair();
    send(&near, PARCEL, &[near.as_fd(); 3]).expect("sent");
    let mut bytes = vec![0; golden.len()];
    far.read_exact(&mut bytes).expect("as long");
    assert!(bytes == golden, "a message is sent otherwise than it was");
    send_with(&near, &golden, &[near.as_fd(); 3]);
    let (bytes, descriptors) = receive(&far, PARCEL.len(), 3).expect("received");
    assert!(bytes == PARCEL && descriptors.len() == 3);
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/format/hand_over.md");
    let page = std::fs::read_to_string(page).expect("the page of this format");
    let hex: Vec<String> = HEAD.iter().map(|byte| format!("{byte:02x}")).collect();
    assert!(page.contains(&format!("```\n{}\n```", hex.join(" "))), "the page lacks the head");
}

#[test]
fn messages_arrive_one_by_one_with_their_own_descriptors() {
    let (near, far) = pair();
    let files = [tempfile::tempfile().expect("a file"), tempfile::tempfile().expect("a file")];
    send(&near, b"first", &[files[0].as_fd()]).expect("sent");
    send(&near, b"", &[]).expect("sent");
    send(&near, b"third", &[files[1].as_fd(), files[0].as_fd()]).expect("sent");
    let (bytes, mut descriptors) = receive(&far, 100, 4).expect("received");
    assert_eq!((&bytes[..], descriptors.len()), (&b"first"[..], 1));
    assert!(same_file(&files[0], descriptors.remove(0)));
    let (bytes, descriptors) = receive(&far, 0, 0).expect("received");
    assert_eq!((bytes.len(), descriptors.len()), (0, 0));
    let (bytes, mut descriptors) = receive(&far, 5, 2).expect("received");
    assert_eq!((&bytes[..], descriptors.len()), (&b"third"[..], 2));
    assert!(same_file(&files[1], descriptors.remove(0)));
    assert!(same_file(&files[0], descriptors.remove(0)));
}

#[test]
fn a_long_message_with_more_descriptors_than_the_kernel_takes_at_once_arrives_whole() {
    let (near, far) = pair();
    let (reader, _writer) = std::io::pipe().expect("a pipe");
    let file = tempfile::tempfile().expect("a file");
    for count in [253, 254, 400] {
        let mut descriptors = vec![reader.as_fd(); count];
        descriptors[count - 1] = file.as_fd();
        let long: Vec<u8> = (0..5_000_000u32).map(|at| (at >> 3) as u8).collect();
        std::thread::scope(|threads| {
            threads.spawn(|| send(&near, &long, &descriptors).expect("sent"));
            let (bytes, mut received) = receive(&far, long.len(), count).expect("received");
            assert!(bytes == long);
            assert_eq!(received.len(), count);
            assert!(same_file(&file, received.pop().expect("the last")));
        });
    }
}

#[test]
fn what_is_received_is_not_inherited_by_other_programs() {
    let (near, far) = pair();
    send(&near, b"x", &[near.as_fd()]).expect("sent");
    let (_, descriptors) = receive(&far, 1, 1).expect("received");
    assert!(fcntl_getfd(&descriptors[0]).expect("open").contains(FdFlags::CLOEXEC));
}

#[test]
fn a_peer_that_sends_nonsense_is_distinguished_from_one_that_is_gone() {
    let nonsense = |bytes: &[u8], bytes_max, descriptors_max| {
        let (mut near, far) = pair();
        near.write_all(bytes).expect("room");
        drop(near);
        refused(&far, bytes_max, descriptors_max)
    };
    assert_eq!(nonsense(b"", 9, 9).0, ErrorKind::Closed);
    assert_eq!(nonsense(&head(0, 5)[..9], 9, 9).0, ErrorKind::Closed);
    assert_eq!(nonsense(&[&head(0, 5)[..], b"1234"].concat(), 9, 9).0, ErrorKind::Closed);
    let cases = [
        (b"GET / HTTP/1.1\r\n\r\n".to_vec(), "starts with"),
        (head(0, 10), "the limit of 9 bytes"),
        (head(0, u64::MAX), "the limit of 9 bytes"),
        (head(10, 0), "10 descriptors; 9 is the limit"),
        (head(u32::MAX, 0), "descriptors; 9 is the limit"),
        (head(2, 0), "declares 2 descriptors but has 0"),
    ];
    for (bytes, part) in cases {
        let (kind, text) = nonsense(&bytes, 9, 9);
        assert_eq!(kind, ErrorKind::Invalid, "{text}");
        assert!(text.contains(part), "{text}");
    }
    let (near, far) = pair();
    drop(far);
    assert_eq!(send(&near, b"x", &[]).expect_err("no process listens").kind(), ErrorKind::Closed);
}

#[test]
fn a_declared_length_takes_no_memory_before_its_bytes_come() {
    let (mut near, far) = pair();
    near.write_all(&head(0, 1 << 60)).expect("room");
    drop(near);
    assert_eq!(refused(&far, usize::MAX, 0).0, ErrorKind::Closed);
}

#[test]
fn descriptors_beyond_the_limit_or_undeclared_are_refused_and_closed() {
    for (bytes, limit, part) in [
        (head(0, 0), 4, "declares 0 descriptors but has 1"),
        (head(0, 0), 0, "more descriptors than the limit of 0"),
        (head(2, 0), 4, "declares 2 descriptors but has 1"),
    ] {
        let (near, far) = pair();
        let (reader, mut writer) = std::io::pipe().expect("a pipe");
        send_with(&near, &bytes, &[reader.as_fd()]);
        drop(reader);
        let (kind, text) = refused(&far, 9, limit);
        assert_eq!(kind, ErrorKind::Invalid, "{text}");
        assert!(text.contains(part), "{text}");
        let error = writer.write(b"x").expect_err("the last reader was closed");
        assert_eq!(error.kind(), std::io::ErrorKind::BrokenPipe);
    }
}

#[test]
fn a_peer_that_says_nothing_is_unavailable() {
    let (near, far) = pair();
    far.set_read_timeout(Some(Duration::from_millis(1))).expect("a timeout");
    assert_eq!(refused(&far, 9, 9).0, ErrorKind::Unavailable);
    near.set_write_timeout(Some(Duration::from_millis(1))).expect("a timeout");
    let error = send(&near, &vec![0; 64 << 20], &[]).expect_err("the other end does not take it");
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
}
