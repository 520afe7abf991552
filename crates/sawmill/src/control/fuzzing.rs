//! Requests and answers of a control socket from a fuzzer.
//!
//! Not here: the server (`admin::fuzzing`), and where the bytes come from (`crates/fuzz`).

use std::path::Path;
use std::time::Duration;

use hyper::Method;

use super::http::{self, Answer};
use super::protocol::ControlRequest;

/// A process that takes longer hangs.
const HANG: Duration = Duration::from_secs(60);

pub(crate) fn request(bytes: &[u8]) -> Result<String, String> {
    let request: ControlRequest =
        serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
    let text = serde_json::to_string(&request).expect("a request can be written");
    let again: ControlRequest = serde_json::from_str(&text).expect("what is written can be read");
    assert_eq!(again, request, "{text}");
    Ok(text)
}

pub(crate) fn answer(socket: &Path) -> Result<Option<Vec<u8>>, String> {
    let answer = http::request(socket, Method::GET, "/status", Vec::new(), Some(HANG));
    match answer.map_err(|failure| failure.to_string())? {
        Answer::Nobody => panic!("a process listens"),
        Answer::Ended => Ok(None),
        Answer::Whole(body) => Ok(Some(body)),
    }
}
