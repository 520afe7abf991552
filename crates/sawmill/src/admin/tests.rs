//! The admin server against its own client and against plain HTTP, with made-up callbacks.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;

use super::status::VolumeStatus;
use super::*;
use crate::control::protocol::{ControlRequest as Asked, PastChange, REQUEST_BYTES_MAX};
use sawmill_console::exit::Exit;

/// Two volumes. A wait for `stored` times out; without a timeout it reports that the writer is
/// fenced.
fn callbacks() -> Callbacks {
    let named = |name: &str| VolumeStatus { name: name.to_owned(), ..VolumeStatus::default() };
    Callbacks {
        status: Box::new(move |only| ProcessStatus {
            pid: 4711,
            volumes: ["oak", "ash"]
                .into_iter()
                .filter(|name| only.is_none_or(|only| only == *name))
                .map(named)
                .collect(),
            ..ProcessStatus::default()
        }),
        waiter: Box::new(|name, safety, timeout, _| match (safety, timeout) {
            (Safety::Logged, _) => Ok(true),
            (Safety::Stored, Some(_)) => Ok(false),
            (Safety::Stored, None) => {
                Err(Failure::new(Exit::Fenced, format!("{name}: fenced by epoch 7")))
            }
        }),
        carry_out: Box::new(|name, request, _| match request {
            Asked::CollectGarbage { threshold: 1.0 } => {
                Ok(serde_json::json!({ "moved_bytes": 7, "moved_segments": 1 }))
            }
            Asked::Past(past) => Ok(serde_json::json!({ "undo": format!("{past:?}") })),
            Asked::Resize { size_bytes: 0 } => {
                Err(Failure::usage(format!("{name}: no disk has 0 bytes")))
            }
            Asked::Resize { size_bytes } => Ok(serde_json::json!({ "size_bytes": size_bytes })),
            Asked::AddDoor(_) | Asked::RemoveDoor { .. } | Asked::HandOff(_) => {
                Err(Failure::usage(format!("{name}: there is nothing but this")))
            }
            Asked::WarmRoom
            | Asked::Warm(_)
            | Asked::BeginRecording { .. }
            | Asked::EndRecording { .. } => {
                Err(Failure::usage(format!("{name}: nor is there a cache")))
            }
            Asked::CollectGarbage { threshold: 2.0 } => panic!("a bug, on purpose"),
            Asked::CollectGarbage { .. } => Err(Failure::new(Exit::InUse, format!("{name}: busy"))),
        }),
    }
}

fn start(folder: &Path) -> Admin {
    let control =
        ListenAddress::Control { path: folder.join(control::WRITER_SOCKET), volume: "oak".into() };
    let loopback = ListenAddress::Loopback("127.0.0.1:0".parse().unwrap());
    Admin::start(callbacks(), vec![control, loopback]).unwrap()
}

/// Status code and body of one request over TCP.
fn request(admin: &Admin, head: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(admin.address.unwrap()).unwrap();
    stream.write_all(format!("{head}\r\nConnection: close\r\n\r\n").as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let status = answer.split(' ').nth(1).unwrap().parse().unwrap();
    (status, answer.split_once("\r\n\r\n").unwrap().1.to_owned())
}

/// Status code and answer of a POST on the control socket.
fn post_to_control(folder: &Path, target: &str, body: &str) -> (u16, String) {
    let mut stream = UnixStream::connect(folder.join(control::WRITER_SOCKET)).unwrap();
    let length = body.len();
    let head = format!(
        "POST {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {length}"
    );
    // At once: a refusal may come before a second piece.
    stream.write_all(format!("{head}\r\n\r\n{body}").as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    (answer.split(' ').nth(1).unwrap().parse().unwrap(), answer)
}

fn get(admin: &Admin, target: &str) -> (u16, String) {
    request(admin, &format!("GET {target} HTTP/1.1\r\nHost: localhost"))
}

#[test]
fn a_control_socket_tells_about_its_volume_alone() {
    let folder = tempfile::tempdir().unwrap();
    let admin = start(folder.path());
    let status = control::attached(folder.path()).unwrap().unwrap();
    assert_eq!(status.pid, 4711);
    assert_eq!(status.volumes.iter().map(|v| v.name.as_str()).collect::<Vec<_>>(), ["oak"]);
    let (code, body) = get(&admin, "/status");
    assert_eq!(code, 200);
    let status: ProcessStatus = serde_json::from_str(&body).unwrap();
    assert_eq!(status.volumes.len(), 2, "the loopback address tells about all");
}

#[test]
fn a_wait_ends_with_yes_with_no_or_with_the_reason() {
    let folder = tempfile::tempdir().unwrap();
    let _admin = start(folder.path());
    let wait = |safety, timeout| control::wait(folder.path(), "oak", safety, timeout);
    assert!(wait("logged", None).unwrap());
    assert!(!wait("stored", Some(Duration::from_millis(1))).unwrap());
    let failure = wait("stored", None).unwrap_err();
    assert_eq!(failure.exit(), Exit::Fenced);
    assert!(failure.to_string().contains("oak: fenced by epoch 7"), "{failure}");
}

#[test]
fn changes_are_taken_on_the_control_socket_alone() {
    let folder = tempfile::tempdir().unwrap();
    let admin = start(folder.path());
    let ask = |request| control::query_writer::<serde_json::Value>(folder.path(), &request);
    assert_eq!(ask(Asked::CollectGarbage { threshold: 1.0 }).unwrap().unwrap()["moved_bytes"], 7);
    let busy = ask(Asked::CollectGarbage { threshold: 0.5 }).unwrap_err();
    assert!(busy.to_string().contains("oak: busy") && busy.exit() == Exit::InUse, "{busy}");
    let resized = ask(Asked::Resize { size_bytes: 4096 }).unwrap().unwrap();
    assert_eq!(resized["size_bytes"], 4096);
    assert!(ask(Asked::Resize { size_bytes: 0 }).unwrap_err().to_string().contains("oak"));
    let past = Asked::Past(PastChange::SetRetention(7));
    assert_eq!(ask(past.clone()).unwrap().unwrap()["undo"], "SetRetention(7)");
    let nobody =
        control::query_writer::<serde_json::Value>(Path::new("/nonexistent"), &past).unwrap();
    assert_eq!(nobody, None);
    for (body, code) in
        [("{\"shrink\":1}", 400), ("", 400), (&*" ".repeat(REQUEST_BYTES_MAX + 1), 400)]
    {
        assert_eq!(post_to_control(folder.path(), "/request", body).0, code);
    }
    let (_, answer) = post_to_control(folder.path(), "/request", "{\"shrink\":1}");
    assert!(answer.contains(&format!("\"{}", control::protocol::UNKNOWN_REQUEST)), "{answer}");
    assert_eq!(post_to_control(folder.path(), "/gc", "{}").0, 404);
    let (code, _) =
        request(&admin, "POST /request HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0");
    assert_eq!(code, 405, "not over TCP");
}

#[test]
fn a_change_that_panics_gives_its_permit_back() {
    let folder = tempfile::tempdir().unwrap();
    let _admin = start(folder.path());
    let ask = |threshold| {
        let request = Asked::CollectGarbage { threshold };
        control::query_writer::<serde_json::Value>(folder.path(), &request)
    };
    for _ in 0..Call::Change.calls_max() {
        assert_eq!(ask(2.0).unwrap_err().exit(), Exit::Internal);
    }
    assert_eq!(ask(1.0).unwrap().unwrap()["moved_bytes"], 7, "a permit is free");
}

#[test]
fn every_target_answers_and_others_say_what_there_is() {
    let folder = tempfile::tempdir().unwrap();
    let admin = start(folder.path());
    assert!(get(&admin, "/").1.starts_with("<!doctype html>"));
    assert!(get(&admin, "/style.css").1.contains(":root {"));
    assert!(get(&admin, "/script.js").1.contains("'use strict';"));
    assert!(get(&admin, "/metrics").1.contains("sawmill_volumes 2\n"));
    assert_eq!(
        get(&admin, "/wait?safety=logged&volume=ash"),
        (200, "{\"reached\":true}".to_owned())
    );
    let (code, body) = get(&admin, "/metrix");
    assert!(code == 404 && body.contains("/metrics"), "{code} {body}");
    for query in ["", "?safety=soon", "?safety=logged", "?safety=logged&volume=ash&timeout_ms=x"] {
        let (code, body) = get(&admin, &format!("/wait{query}"));
        assert!(code == 400 && body.contains("\"exit\":2"), "{query}: {code} {body}");
    }
    let (code, _) =
        request(&admin, "POST /status HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0");
    assert_eq!(code, 405);
}

#[test]
fn a_name_that_is_not_of_this_machine_is_refused_over_tcp() {
    let folder = tempfile::tempdir().unwrap();
    let admin = start(folder.path());
    for host in ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", "192.0.2.1"]
    {
        assert_eq!(
            request(&admin, &format!("GET /status HTTP/1.1\r\nHost: {host}")).0,
            403,
            "{host}"
        );
    }
    for host in ["127.0.0.1:9100", "localhost", "[::1]:80"] {
        assert_eq!(
            request(&admin, &format!("GET /status HTTP/1.1\r\nHost: {host}")).0,
            200,
            "{host}"
        );
    }
}

#[test]
fn the_socket_goes_with_the_server_and_a_stale_one_is_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(control::WRITER_SOCKET);
    drop(UnixListener::bind(&path).unwrap());
    let admin = start(folder.path());
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    assert!(control::attached(folder.path()).unwrap().is_some());
    drop(admin);
    assert!(!path.exists());
    assert!(control::attached(folder.path()).unwrap().is_none());
}

#[test]
fn a_path_too_long_for_a_socket_is_refused_with_what_to_set() {
    let path = Path::new("/tmp").join("x".repeat(120));
    let address = ListenAddress::Control { path, volume: "oak".into() };
    let failure = Admin::start(callbacks(), vec![address]).err().unwrap();
    assert!(
        failure.exit() == Exit::Usage && failure.to_string().contains("XDG_STATE_HOME"),
        "{failure}"
    );
}

#[test]
fn waits_of_others_hold_up_neither_changes_nor_our_own_waits() {
    let folder = tempfile::tempdir().unwrap();
    let (enter, entered) = std::sync::mpsc::channel();
    let release = Arc::new(Mutex::new(()));
    let guard = release.lock();
    let closed = Arc::clone(&release);
    let enter = Mutex::new(enter);
    let safety_waiter: Box<SafetyWaiter> = Box::new(move |_, safety, _, _| {
        if safety == Safety::Stored {
            enter.lock().send(()).unwrap();
            drop(closed.lock());
        }
        Ok(true)
    });
    let control = ListenAddress::Control {
        path: folder.path().join(control::WRITER_SOCKET),
        volume: "oak".into(),
    };
    let loopback = ListenAddress::Loopback("127.0.0.1:0".parse().unwrap());
    let admin =
        Admin::start(Callbacks { waiter: safety_waiter, ..callbacks() }, vec![control, loopback])
            .unwrap();
    let strangers: Vec<_> = (0..Call::LoopbackWait.calls_max())
        .map(|_| {
            let mut stream = TcpStream::connect(admin.address.unwrap()).unwrap();
            let head = "GET /wait?safety=stored&volume=oak HTTP/1.1\r\nHost: localhost\r\n\r\n";
            stream.write_all(head.as_bytes()).unwrap();
            entered.recv().unwrap();
            stream
        })
        .collect();
    assert_eq!(get(&admin, "/wait?safety=stored&volume=oak").0, 503, "the kind is full");
    assert_eq!(get(&admin, "/status").0, 200);
    assert!(control::wait(folder.path(), "oak", "logged", None).unwrap());
    let refused = {
        let resize = Asked::Resize { size_bytes: 0 };
        control::query_writer::<serde_json::Value>(folder.path(), &resize).unwrap_err()
    };
    assert!(refused.to_string().contains("no disk has 0 bytes"), "the change was made: {refused}");
    drop((guard, strangers));
}

#[test]
fn a_wait_of_others_ends_after_a_minute_and_our_own_when_we_say() {
    let folder = tempfile::tempdir().unwrap();
    let (sender, receiver) = std::sync::mpsc::channel();
    let sender = Mutex::new(sender);
    let safety_waiter: Box<SafetyWaiter> = Box::new(move |_, _, timeout, _| {
        sender.lock().send(timeout).unwrap();
        Ok(true)
    });
    let path = folder.path().join(control::WRITER_SOCKET);
    let control = ListenAddress::Control { path, volume: "oak".into() };
    let loopback = ListenAddress::Loopback("127.0.0.1:0".parse().unwrap());
    let callbacks = Callbacks { waiter: safety_waiter, ..callbacks() };
    let admin = Admin::start(callbacks, vec![control, loopback]).unwrap();
    let minute = Some(Duration::from_secs(60));
    for (timeout, expected) in [
        ("", minute),
        ("&timeout_ms=3600000", minute),
        ("&timeout_ms=5000", Some(Duration::from_secs(5))),
    ] {
        let target = format!("/wait?safety=stored&volume=oak{timeout}");
        assert_eq!(get(&admin, &target).0, 200);
        assert_eq!(receiver.recv(), Ok(expected), "{timeout}");
    }
    assert!(control::wait(folder.path(), "oak", "stored", None).unwrap());
    assert_eq!(receiver.recv(), Ok(None), "our own wait has no limit");
}

#[test]
fn a_page_of_another_site_receives_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let admin = start(folder.path());
    let from = |site: &str| {
        let head = format!("GET /status HTTP/1.1\r\nHost: localhost\r\nSec-Fetch-Site: {site}");
        request(&admin, &head).0
    };
    assert_eq!((from("same-origin"), from("none")), (200, 200));
    assert_eq!((from("cross-site"), from("same-site")), (403, 403));
}

#[test]
fn connections_of_others_have_a_limit_and_places_come_free() {
    let folder = tempfile::tempdir().unwrap();
    let admin = start(folder.path());
    let connect = || TcpStream::connect(admin.address.unwrap()).unwrap();
    assert_eq!(LOOPBACK_CONNECTIONS_MAX, 64, "as promised (P112)");
    let mut idle: Vec<_> = (0..LOOPBACK_CONNECTIONS_MAX).map(|_| connect()).collect();
    let mut byte = [0];
    assert_eq!(connect().read(&mut byte).unwrap_or(0), 0, "one too many is closed");
    assert!(control::attached(folder.path()).unwrap().is_some(), "our own come in");
    idle.pop();
    // Its place becomes free when the server notices that it has closed.
    loop {
        let mut stream = connect();
        let request_outcome = stream
            .write_all(b"GET /status HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
        if request_outcome.is_ok() && stream.read(&mut byte).is_ok_and(|read| read == 1) {
            break;
        }
    }
}

#[test]
fn a_wait_whose_caller_hung_up_ends() {
    let folder = tempfile::tempdir().unwrap();
    let (enter, entered) = std::sync::mpsc::channel();
    let enter = Mutex::new(enter);
    let safety_waiter: Box<SafetyWaiter> = Box::new(move |_, safety, _, is_wanted| {
        if safety == Safety::Stored {
            enter.lock().send(()).unwrap();
            while is_wanted() {
                std::thread::yield_now();
            }
        }
        Ok(true)
    });
    let path = folder.path().join(control::WRITER_SOCKET);
    let control = ListenAddress::Control { path: path.clone(), volume: "oak".into() };
    let loopback = ListenAddress::Loopback("127.0.0.1:0".parse().unwrap());
    let admin =
        Admin::start(Callbacks { waiter: safety_waiter, ..callbacks() }, vec![control, loopback])
            .unwrap();
    let head = b"GET /wait?safety=stored&volume=oak HTTP/1.1\r\nHost: localhost\r\n\r\n";
    let own_head = b"GET /wait?safety=stored HTTP/1.1\r\nHost: localhost\r\n\r\n";
    // Far more requests than threads; each would hold a thread while the store is unreachable.
    for _ in 0..3 * Call::OwnWait.calls_max() {
        let mut stranger = TcpStream::connect(admin.address.unwrap()).unwrap();
        stranger.write_all(head).unwrap();
        entered.recv_timeout(Duration::from_secs(20)).expect("a thread is free");
        let mut own = std::os::unix::net::UnixStream::connect(&path).unwrap();
        own.write_all(own_head).unwrap();
        entered.recv_timeout(Duration::from_secs(20)).expect("a thread is free");
        drop((stranger, own));
        let blocked = |kind: Call| {
            admin.shared.as_ref().unwrap().blocked[kind as usize].load(Ordering::Relaxed)
        };
        while blocked(Call::OwnWait) + blocked(Call::LoopbackWait) > 0 {
            std::thread::yield_now();
        }
    }
}

/// A hand-off to a newer version begins with what the older one says of itself.
#[test]
fn the_cache_of_a_server_of_an_older_version_is_read() {
    let mut document = serde_json::to_value(status::CacheStatus::default()).unwrap();
    document.as_object_mut().unwrap().remove("cells");
    document["slots"] = 7.into();
    let cache: status::CacheStatus = serde_json::from_value(document).unwrap();
    assert_eq!(cache.cells, 7);
}

#[test]
fn no_path_is_shown_at_the_loopback_address() {
    let folder = tempfile::tempdir().unwrap();
    let status = Box::new(|_: Option<&str>| ProcessStatus {
        volumes: vec![VolumeStatus {
            journal_path: Some("/secret/journal".into()),
            ..VolumeStatus::default()
        }],
        cache: Some(status::CacheStatus { path: "/secret/cache".into(), ..Default::default() }),
        ..ProcessStatus::default()
    });
    let path = folder.path().join(control::WRITER_SOCKET);
    let control = ListenAddress::Control { path, volume: "oak".into() };
    let loopback = ListenAddress::Loopback("127.0.0.1:0".parse().unwrap());
    let admin = Admin::start(Callbacks { status, ..callbacks() }, vec![control, loopback]).unwrap();
    let (code, body) = get(&admin, "/status");
    assert!(code == 200 && !body.contains("secret"), "{body}");
    let own = control::attached(folder.path()).unwrap().unwrap();
    assert_eq!(own.cache.unwrap().path, "/secret/cache", "our own user sees it");
}

#[test]
fn our_own_connections_have_a_limit_too() {
    let folder = tempfile::tempdir().unwrap();
    let admin = start(folder.path());
    let path = folder.path().join(control::WRITER_SOCKET);
    let connect = || std::os::unix::net::UnixStream::connect(&path).unwrap();
    let idle: Vec<_> = (0..CONTROL_CONNECTIONS_MAX).map(|_| connect()).collect();
    let mut byte = [0];
    assert_eq!(connect().read(&mut byte).unwrap_or(0), 0, "one too many is closed");
    assert_eq!(get(&admin, "/status").0, 200, "others are not hurt");
    drop(idle);
}
