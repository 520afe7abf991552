//! What the program reads from others over its sockets, and its configuration file.
//!
//! Invariants: a connection to the admin server ends with its client and is answered in HTTP; over
//! the loopback address it changes nothing, waits a minute at most and shows no path of the user. A
//! request or message that is accepted is the same when it is sent again. An answer that was cut
//! short is none. A file gives options of its command alone.
//!
//! Not here: pieces of doors in a hand-off (`hand_over`), and what carries a request out.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Duration;

use sawmill_frontend::passing;
use sawmill_program::fuzzing::{self, KnownOptions, OWN_PATH, ServedConnection};

const LOOPBACK_WAIT_MAX: Duration = Duration::from_secs(60);
/// The head of a message of a hand-off.
const MESSAGE_HEAD_BYTES: usize = 16;

/// The first byte chooses the control socket or the loopback address; the rest is what the client
/// sends.
pub(crate) fn admin_request(bytes: &[u8]) {
    let Some((choice, bytes)) = bytes.split_first() else { return };
    let served = match choice & 1 {
        0 => fuzzing::control_connection(bytes),
        _ => fuzzing::loopback_connection(bytes),
    };
    answers_in_http(&served, bytes);
    if choice & 1 == 0 {
        let posts = bytes.windows(4).filter(|word| *word == b"POST").count();
        assert!(served.carried_out.len() <= posts, "{served:?}");
        for request in &served.carried_out {
            let again = fuzzing::control_request(request.as_bytes());
            assert_eq!(again.as_ref(), Ok(request), "it is the same in another process");
        }
    } else {
        assert!(served.carried_out.is_empty(), "{served:?}");
        let is_short =
            |wait: &Option<Duration>| wait.is_some_and(|limit| limit <= LOOPBACK_WAIT_MAX);
        assert!(served.waits.iter().all(is_short), "{served:?}");
        let shows =
            |text: &[u8]| text.windows(OWN_PATH.len()).any(|word| word == OWN_PATH.as_bytes());
        assert!(!shows(&served.answers) || shows(bytes), "the user's path is shown");
    }
}

fn answers_in_http(served: &ServedConnection, bytes: &[u8]) {
    let answers = String::from_utf8_lossy(&served.answers);
    if answers.is_empty() {
        return;
    }
    assert!(!bytes.is_empty(), "nothing was asked");
    let status = answers.strip_prefix("HTTP/1.1 ").or_else(|| answers.strip_prefix("HTTP/1.0 "));
    let status = status.and_then(|rest| rest.get(..3)).and_then(|code| code.parse::<u16>().ok());
    let status = status.unwrap_or_else(|| panic!("not HTTP: {answers}"));
    assert!((100..600).contains(&status) && status != 500, "{answers}");
}

/// The JSON of a request to a control socket.
pub(crate) fn control_request(bytes: &[u8]) {
    match fuzzing::control_request(bytes) {
        Ok(text) => assert_eq!(fuzzing::control_request(text.as_bytes()), Ok(text)),
        Err(refusal) => assert!(!refusal.is_empty(), "a refusal says why"),
    }
}

/// What a process on a control socket answers.
pub(crate) fn control_answer(bytes: &[u8]) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("control.sock");
    let listener = UnixListener::bind(&path).expect("the path is free");
    let answer = bytes.to_vec();
    let server = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("a client");
        let (mut head, mut piece) = (Vec::new(), [0; 1024]);
        while !head.ends_with(b"\r\n\r\n") {
            let bytes = stream.read(&mut piece).expect("a request");
            assert!(bytes > 0, "a request has an end");
            head.extend_from_slice(&piece[..bytes]);
        }
        // A client that has heard enough may be gone.
        let _ = stream.write_all(&answer);
    });
    let answer = fuzzing::control_answer(&path);
    server.join().expect("the server");
    let text = String::from_utf8_lossy(bytes);
    match answer {
        Ok(Some(body)) => {
            assert!(text.contains("200"), "only a success has a body: {text}");
            assert!(body.len() <= bytes.len(), "the body was sent");
        }
        Ok(None) => {}
        Err(failure) => {
            let names_it = failure.contains("control.sock") || failure.contains("serving process");
            assert!(names_it, "{failure}");
        }
    }
}

/// With a first byte that is even, the rest is one message; otherwise it is what is on the socket.
pub(crate) fn hand_off_message(bytes: &[u8]) {
    let Some((choice, bytes)) = bytes.split_first() else { return };
    let (near, mut far) = UnixStream::pair().expect("a socket");
    let sent_bytes = if choice & 1 == 0 {
        passing::send(&far, bytes, &[]).expect("it fits the socket");
        MESSAGE_HEAD_BYTES + bytes.len()
    } else {
        far.write_all(bytes).expect("it fits the socket");
        bytes.len()
    };
    far.shutdown(Shutdown::Write).expect("our socket");
    let (count, refusal) = fuzzing::hand_off_messages(&near);
    assert!(count <= sent_bytes / MESSAGE_HEAD_BYTES, "each message has a head");
    assert!(!refusal.is_empty() || choice & 1 == 0, "a refusal says why");
}

thread_local! {
    static KNOWN: KnownOptions = KnownOptions::of_this_version();
}

/// The content of a configuration file, as different commands read it.
pub(crate) fn config_file(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    KNOWN.with(|known| {
        let outcomes = ["serve", "target", "gc"].map(|name| known.arguments(&text, name));
        let refusals = outcomes.iter().filter_map(|outcome| outcome.as_ref().err());
        assert!(refusals.clone().all(|refusal| !refusal.is_empty()), "a refusal says why");
        let count = refusals.count();
        assert!(count == 0 || count == outcomes.len(), "the whole file is checked: {outcomes:?}");
    });
}
