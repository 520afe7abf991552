//! One HTTP request over a Unix socket.
//!
//! Invariant: the result tells apart a socket without a listener, a connection that ends before its
//! answer, and an answer. A truncated answer is an error. Not here: what is requested, and whether
//! it may be repeated (`client`).

use std::io;
use std::path::Path;
use std::time::Duration;

use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Bytes;
use hyper::header::HOST;
use hyper::{Method, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;

use super::protocol::{Refusal, UNKNOWN_REQUEST};
use sawmill_console::exit::{Exit, Failure, Result};

/// The longest answer of a process: the status of thousands of volumes.
const ANSWER_BYTES_MAX: usize = 64 << 20;

/// The result of a request.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Answer {
    /// Nothing listens.
    Nobody,
    /// A process accepted the connection and closed it without an answer.
    Ended,
    /// The body of an answer with status 200.
    Whole(Vec<u8>),
}

/// The failure of a process that listens and does not answer.
pub(super) fn silent(socket: &Path, why: impl std::fmt::Display) -> Failure {
    Failure::new(
        Exit::Unavailable,
        format!(
            "a process listens on {} but does not answer ({why}); check that process before you \
            continue",
            socket.display()
        ),
    )
}

/// The failure of an answer that broke off, or is too long.
fn unread(socket: &Path, error: Box<dyn std::error::Error + Send + Sync>) -> Failure {
    silent(socket, &error).caused_by(io::Error::other(error))
}

/// Sends one request and waits for its answer, for at most `patience`.
pub(super) fn request(
    socket: &Path,
    method: Method,
    target: &str,
    body: Vec<u8>,
    patience: Option<Duration>,
) -> Result<Answer> {
    let runtime =
        tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .enable_time()
            .build()
            .map_err(|error| Failure::io("cannot start a client of control sockets", &error))?;
    let exchange = exchange(socket, method, target, body);
    runtime.block_on(async {
        match patience {
            None => exchange.await,
            Some(patience) => tokio::time::timeout(patience, exchange).await.unwrap_or_else(|_| {
                Err(silent(socket, format_args!("within {} s", patience.as_secs())))
            }),
        }
    })
}

async fn exchange(socket: &Path, method: Method, target: &str, body: Vec<u8>) -> Result<Answer> {
    let stream = match UnixStream::connect(socket).await {
        Ok(stream) => stream,
        Err(error)
            if matches!(
                error.kind(),
                // A socket that refuses was left by a process that died.
                io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused
            ) =>
        {
            return Ok(Answer::Nobody);
        }
        Err(error) => {
            let text = format!("cannot connect to the process behind {}", socket.display());
            return Err(Failure::io(text, &error));
        }
    };
    let silent = |error: hyper::Error| silent(socket, &error).caused_by(error);
    let handshake = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await;
    let (mut sender, connection) = handshake.map_err(silent)?;
    // It ends with the sender, or when the other end closes; the request reports errors.
    tokio::spawn(connection);
    let request = hyper::Request::builder()
        .method(method)
        .uri(target)
        // HTTP/1.1 demands the header, even where nobody looks at it.
        .header(HOST, "localhost")
        .body(Full::<Bytes>::from(body))
        .map_err(|error| Failure::caused(Exit::Internal, format!("cannot ask {target}"), error))?;
    let response = match sender.send_request(request).await {
        Ok(response) => response,
        Err(error) if is_ended(&error) => return Ok(Answer::Ended),
        Err(error) => return Err(silent(error)),
    };
    let status = response.status();
    let body = Limited::new(response.into_body(), ANSWER_BYTES_MAX).collect().await;
    let body = body.map_err(|error| unread(socket, error))?.to_bytes();
    match status {
        StatusCode::OK => Ok(Answer::Whole(body.to_vec())),
        _ => Err(refusal(status, &body)),
    }
}

/// Whether a connection ended before the answer began.
fn is_ended(error: &hyper::Error) -> bool {
    use std::error::Error as _;
    let cause =
        error.source().and_then(|cause| cause.downcast_ref::<io::Error>()).map(io::Error::kind);
    error.is_incomplete_message()
        || error.is_canceled()
        // A process that ends may close the connection while the request is still being sent.
        || matches!(cause, Some(io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe))
}

/// The failure that a refused request carries: a [`Refusal`].
fn refusal(status: StatusCode, body: &[u8]) -> Failure {
    let Refusal { error, exit } = match serde_json::from_slice(body) {
        Ok(refusal) => refusal,
        Err(error) => {
            let what = format!(
                "the serving process answered with HTTP status {status} and an invalid refusal"
            );
            return Failure::caused(Exit::Internal, what, error);
        }
    };
    let known = sawmill_console::exit::TABLE
        .iter()
        .map(|(known, _, _)| *known)
        .find(|known| known.code() == exit);
    let text = match error.starts_with(UNKNOWN_REQUEST) {
        // The requests that it knows, which it lists, are no help.
        true => "the serving process is older than this command and does not know its request: \
                 replace it by this version with `sawmill handoff VOL`, or restart it"
            .to_owned(),
        false => format!("the serving process says: {error}"),
    };
    Failure::new(known.unwrap_or(Exit::Internal), text)
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixListener;

    use super::*;

    /// The result for an answer of which only the first bytes arrive.
    fn outcome_of(answer: &'static [u8]) -> Result<Answer> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("sock");
        let listener = UnixListener::bind(&path).unwrap();
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let _ = stream.read(&mut [0; 4096]).unwrap();
            stream.write_all(answer).unwrap();
        });
        let outcome =
            request(&path, Method::GET, "/status", Vec::new(), Some(Duration::from_secs(60)));
        server.join().unwrap();
        outcome
    }

    #[test]
    fn an_answer_that_was_cut_short_is_no_answer() {
        let whole = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nbody";
        assert_eq!(outcome_of(whole).unwrap(), Answer::Whole(b"body".to_vec()));
        for cut in 0..whole.len() {
            let outcome = outcome_of(&whole[..cut]);
            assert!(
                !matches!(outcome, Ok(Answer::Whole(_) | Answer::Nobody)),
                "cut at {cut}: {outcome:?}"
            );
        }
    }

    #[test]
    fn a_refusal_keeps_its_exit_code() {
        let failure =
            refusal(StatusCode::CONFLICT, br#"{"error": "fenced by epoch 7", "exit": 6}"#);
        assert_eq!(failure.exit(), Exit::Fenced);
        assert!(failure.to_string().contains("epoch 7"), "{failure}");
    }

    #[test]
    fn a_refusal_that_is_no_json_says_its_status_and_why() {
        let failure = refusal(StatusCode::BAD_GATEWAY, b"<html>");
        assert_eq!(failure.exit(), Exit::Internal);
        assert!(failure.to_string().contains("502"), "{failure}");
        assert!(failure.to_string().contains("line 1 column 1"), "{failure}");
    }
}
