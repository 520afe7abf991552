//! Messages of a hand-off from a fuzzer.
//!
//! Not here: the parcel of doors, whose pieces have a target of their own (`hand_over`).

use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use super::{Message, receive_message, send_message};

/// A message that takes longer hangs.
const HANG: Duration = Duration::from_secs(60);

pub(crate) fn messages(stream: &UnixStream) -> (usize, String) {
    let mut count = 0;
    loop {
        let message = match receive(stream) {
            Ok(message) => message,
            Err(refusal) => return (count, refusal),
        };
        let (near, far) = UnixStream::pair().expect("a socket");
        send_message(&near, &message).expect("it fits the socket");
        assert_eq!(receive(&far), Ok(message), "what is sent is received");
        count += 1;
    }
}

fn receive(stream: &UnixStream) -> Result<Message, String> {
    receive_message(stream, Some(Instant::now() + HANG)).map_err(|failure| failure.to_string())
}
