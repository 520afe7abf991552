//! The client of control sockets: finds the process that serves a volume and asks it.
//!
//! Invariants: if nothing listens, no process of *this machine* has the volume attached. A process
//! that listens but does not answer is an error; it never counts as "not attached". The client
//! waits for a volume in the middle of a hand-off.
//!
//! Not here: how a request travels over the socket (`http`).

use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use hyper::Method;
use serde::de::DeserializeOwned;

use super::protocol::{ControlRequest, REQUEST_TARGET, WaitReply};
use super::{WRITER_SOCKET, http};
use crate::admin::status::{ProcessStatus, VolumeStatus};
use crate::config::VolumeAddress;
use sawmill_console::exit::{Exit, Failure, Result};

/// Time for a healthy process to answer a question that needs no waiting.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(10);

/// Time for a hand-off between two processes.
const HAND_OFF_TIME_MAX: Duration = Duration::from_secs(10);

/// Interval of checks during a hand-off.
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// How many times to ask processes that end without an answer.
const ASKED_MAX: u32 = 100;

/// Extra time for the answer of a long poll beyond its own deadline.
const POLL_SLACK: Duration = Duration::from_secs(10);

/// The name of a read-only attachment's socket.
pub(crate) fn reader_socket(pid: u32) -> String {
    format!("reader-{pid}.sock")
}

/// Removes the sockets of readers that have died. A socket gets its name only when a process
/// listens on it, so a socket without a listener has no owner.
pub(crate) fn sweep_dead_readers(volume_folder: &Path) {
    for socket in sockets(volume_folder) {
        let is_reader =
            socket.file_name().is_some_and(|name| name.as_bytes().starts_with(b"reader-"));
        let refused = |error: io::Error| error.kind() == io::ErrorKind::ConnectionRefused;
        if is_reader && UnixStream::connect(&socket).is_err_and(refused) {
            // Another server may remove it too.
            let _ = fs::remove_file(&socket);
        }
    }
}

/// The process that serves the volume for writing, or one that serves it read-only, or `None`.
/// During a hand-off: the process that has it afterwards.
pub(crate) fn attached(volume_folder: &Path) -> Result<Option<ProcessStatus>> {
    attached_within(volume_folder, HAND_OFF_TIME_MAX)
}

fn attached_within(volume_folder: &Path, time_max: Duration) -> Result<Option<ProcessStatus>> {
    let deadline = Instant::now() + time_max;
    loop {
        match attached_now(volume_folder)? {
            Some(process) if process.handing_over && process.volumes.is_empty() => {
                if Instant::now() >= deadline {
                    let text = format!(
                        "process {} is handing off the volume in {} to another process; try again",
                        process.pid,
                        volume_folder.display()
                    );
                    return Err(Failure::new(Exit::Unavailable, text));
                }
            }
            other => return Ok(other),
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

fn attached_now(volume_folder: &Path) -> Result<Option<ProcessStatus>> {
    for socket in sockets(volume_folder) {
        if let Some(body) = query(&socket, "/status", Some(ANSWER_TIME_MAX))? {
            let status = serde_json::from_slice(&body).map_err(|error| {
                let what = format!("{} sent an invalid status", socket.display());
                Failure::caused(Exit::Internal, what, error)
            })?;
            return Ok(Some(status));
        }
    }
    Ok(None)
}

/// Finds a volume by name if this machine serves it: its folder and the process's answer. It needs
/// no store, so it works while the store is unreachable.
pub(crate) fn served(
    state_folder: &Path,
    address: &VolumeAddress,
) -> Result<Option<(PathBuf, ProcessStatus)>> {
    let Ok(folders) = fs::read_dir(state_folder) else { return Ok(None) };
    let mut silent = None;
    for folder in folders.flatten().map(|entry| entry.path()).filter(|path| path.is_dir()) {
        let process = match attached(&folder) {
            Ok(Some(process)) => process,
            Ok(None) => continue,
            // It may belong to another volume.
            Err(failure) => {
                silent.get_or_insert(failure);
                continue;
            }
        };
        let is_it = |volume: &VolumeStatus| {
            volume.name == address.name && volume.store == address.store_url
        };
        if process.volumes.iter().any(is_it) {
            return Ok(Some((folder, process)));
        }
    }
    // The volume was found nowhere: it may be the one of the process that is silent.
    silent.map_or(Ok(None), Err)
}

/// Waits until everything accepted so far is as safe as `safety` says (`logged` or `stored`).
/// Returns `false` if the timeout expires first.
pub(crate) fn wait(
    volume_folder: &Path,
    name: &str,
    safety: &str,
    timeout: Option<Duration>,
) -> Result<bool> {
    let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
    let parameters = match deadline {
        Some(deadline) => {
            let left = deadline.saturating_duration_since(Instant::now());
            format!("/wait?safety={safety}&timeout_ms={}", left.as_millis())
        }
        None => format!("/wait?safety={safety}"),
    };
    // A wait without a timeout has no limit here either: the process may wait for its store.
    let patience = deadline.map(|_| timeout.unwrap_or_default() + POLL_SLACK);
    let Some(body) = query(&volume_folder.join(WRITER_SOCKET), &parameters, patience)? else {
        return Err(Failure::new(
            Exit::NotFound,
            format!(
                "volume {name} is not served for writing on this machine, so there is nothing to \
                 wait for; start it with: sawmill serve {name}"
            ),
        ));
    };
    let WaitReply { reached } = serde_json::from_slice(&body).map_err(|error| {
        let what = format!("the process that serves {name} sent an invalid answer");
        Failure::caused(Exit::Internal, what, error)
    })?;
    Ok(reached)
}

/// What the writer of a volume reports about it.
pub(crate) fn volume_status(volume_folder: &Path) -> Result<Option<VolumeStatus>> {
    Ok(attached(volume_folder)?.and_then(|process| process.volumes.into_iter().next()))
}

/// Sends a request to the process that serves a volume for writing, and waits for the result
/// without a time limit. `None`: no process serves it here.
pub(crate) fn query_writer<T: DeserializeOwned>(
    volume_folder: &Path,
    request: &ControlRequest,
) -> Result<Option<T>> {
    carry_out(&volume_folder.join(WRITER_SOCKET), request)
}

/// As [`query_writer`], but if no process serves the volume for writing, asks one that serves it
/// read-only.
pub(crate) fn query_any<T: DeserializeOwned>(
    volume_folder: &Path,
    name: &str,
    request: &ControlRequest,
) -> Result<T> {
    for socket in sockets(volume_folder) {
        if let Some(answer) = carry_out(&socket, request)? {
            return Ok(answer);
        }
    }
    Err(not_served(name))
}

/// A request that ends without an answer is an error. It may have been carried out, so it is not
/// sent again.
fn carry_out<T: DeserializeOwned>(socket: &Path, request: &ControlRequest) -> Result<Option<T>> {
    let body = serde_json::to_vec(request)
        .map_err(|error| Failure::caused(Exit::Internal, "cannot write the request", error))?;
    match http::request(socket, Method::POST, REQUEST_TARGET, body, None)? {
        http::Answer::Nobody => Ok(None),
        http::Answer::Ended => Err(http::silent(socket, "it closed the connection")),
        http::Answer::Whole(body) => serde_json::from_slice(&body).map(Some).map_err(|error| {
            let what = format!("the process behind {} sent an invalid answer", socket.display());
            Failure::caused(Exit::Internal, what, error)
        }),
    }
}

/// The failure of a command that is for served volumes.
pub(crate) fn not_served(name: &str) -> Failure {
    let text =
        format!("volume {name} is not served on this machine; start it with: sawmill serve {name}");
    Failure::new(Exit::NotFound, text)
}

/// The control sockets in a volume's folder, the writer's first.
fn sockets(volume_folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(volume_folder) else { return Vec::new() };
    let mut sockets: Vec<PathBuf> = entries
        .filter_map(|entry| entry.ok().map(|entry| entry.path()))
        .filter(|path| path.extension().is_some_and(|extension| extension == "sock"))
        .collect();
    // The writer's name sorts first, and a reader is asked only if there is no writer.
    sockets.sort();
    sockets
}

/// Sends a question, which is safe to repeat. `None`: nothing listens. A process that ends without
/// an answer may have handed over just then, so its successor is asked.
fn query(socket: &Path, target: &str, patience: Option<Duration>) -> Result<Option<Vec<u8>>> {
    for _ in 0..ASKED_MAX {
        match http::request(socket, Method::GET, target, Vec::new(), patience)? {
            http::Answer::Nobody => return Ok(None),
            http::Answer::Whole(body) => return Ok(Some(body)),
            http::Answer::Ended => std::thread::sleep(LOOK_EVERY),
        }
    }
    Err(http::silent(socket, "it closed the connection"))
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixListener;

    use super::*;
    use crate::control::protocol::{ResizeReply, WarmRoomReply};

    #[test]
    fn no_process_listens_in_a_folder_that_does_not_exist() {
        assert!(attached(Path::new("/nonexistent/folder")).unwrap().is_none());
    }

    #[test]
    fn a_socket_left_by_a_dead_process_means_no_writer() {
        let folder = tempfile::tempdir().unwrap();
        drop(std::os::unix::net::UnixListener::bind(folder.path().join(WRITER_SOCKET)).unwrap());
        assert!(attached(folder.path()).unwrap().is_none());
        let error = wait(folder.path(), "disk1", "stored", None).unwrap_err();
        assert_eq!(error.exit(), Exit::NotFound);
        assert!(error.to_string().contains("sawmill serve disk1"), "{error}");
    }

    /// Answers once that the volume is being handed over, as the predecessor does.
    fn hand_over_once(listener: &UnixListener) {
        let (mut stream, _) = listener.accept().unwrap();
        let body = r#"{"version":"1","pid":7,"uptime_ms":1,"handing_over":true,
            "volumes":[],"doors":[],"stores":[],"cache":null}"#;
        let _ = stream.read(&mut [0; 4096]).unwrap();
        write!(stream, "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len()).unwrap();
    }

    #[test]
    fn a_volume_on_its_way_to_another_process_is_waited_for_and_never_unattached() {
        let folder = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(folder.path().join(WRITER_SOCKET)).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| hand_over_once(&listener));
            let failure = attached_within(folder.path(), Duration::ZERO).unwrap_err();
            assert_eq!(failure.exit(), Exit::Unavailable);
            assert!(failure.to_string().contains("process 7 is handing"), "{failure}");
        });
        std::thread::scope(|scope| {
            let ends = scope.spawn(|| {
                (0..3).for_each(|_| hand_over_once(&listener));
                drop(listener);
            });
            assert!(
                attached(folder.path()).unwrap().is_none(),
                "it has ended, and nobody came after it"
            );
            ends.join().unwrap();
        });
    }

    #[test]
    fn a_query_of_an_ending_process_goes_to_its_successor_and_a_change_does_not() {
        let folder = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(folder.path().join(WRITER_SOCKET)).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                (0..3).for_each(|_| drop(listener.accept().unwrap()));
                hand_over_once(&listener);
            });
            let failure = attached_within(folder.path(), Duration::ZERO).unwrap_err();
            assert!(failure.to_string().contains("process 7 is handing"), "{failure}");
        });
        std::thread::scope(|scope| {
            scope.spawn(|| drop(listener.accept().unwrap()));
            // The change may have been made, so the client must not send it again.
            let resize = ControlRequest::Resize { size_bytes: 4096 };
            let failure = query_writer::<ResizeReply>(folder.path(), &resize).unwrap_err();
            assert!(failure.to_string().contains("does not answer"), "{failure}");
        });
    }

    #[test]
    fn a_server_that_does_not_know_a_request_is_named_as_older_and_what_to_do_is_said() {
        let folder = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(folder.path().join(WRITER_SOCKET)).unwrap();
        let failure = std::thread::scope(|scope| {
            scope.spawn(|| {
                let (mut stream, _) = listener.accept().unwrap();
                let body = r#"{"error":"unknown request: unknown variant `warm_room`, expected one
                    of `collect_garbage`, `past` at line 1 column 11","exit":2}"#
                    .replace('\n', "");
                let _ = stream.read(&mut [0; 4096]).unwrap();
                let head = "HTTP/1.1 400 Bad Request\r\nContent-Length";
                write!(stream, "{head}: {}\r\n\r\n{body}", body.len()).unwrap();
            });
            let room = ControlRequest::WarmRoom;
            query_any::<WarmRoomReply>(folder.path(), "disk1", &room).unwrap_err()
        });
        let text = failure.to_string();
        assert!(text.contains("older than this command") && text.contains("restart it"), "{text}");
        assert!(!text.contains("collect_garbage"), "{text}");
        assert_eq!(failure.exit(), Exit::Usage);
    }

    #[test]
    fn sockets_of_dead_readers_are_swept_and_others_stay() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let live = UnixListener::bind(path(&reader_socket(1))).unwrap();
        drop(UnixListener::bind(path(&reader_socket(2))).unwrap());
        drop(UnixListener::bind(path(WRITER_SOCKET)).unwrap());
        sweep_dead_readers(folder.path());
        assert_eq!(sockets(folder.path()), [path(WRITER_SOCKET), path(&reader_socket(1))]);
        drop(live);
    }
}
