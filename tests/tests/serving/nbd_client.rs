//! The client against a server that nobody here wrote: `nbdkit`.

use std::process::{Child, Stdio};

use sawmill_tests::machine;
use sawmill_tests::nbd::{Client, Command, Extent, Failure, Style, flag, list};

/// An nbdkit in the foreground, ended when dropped.
struct Kit {
    child: Child,
    uri: String,
    _folder: tempfile::TempDir,
}

fn nbdkit(arguments: &[&str]) -> Kit {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let socket = folder.path().join("socket");
    let pid_file = folder.path().join("pid");
    let child = machine::command("nbdkit")
        .args(["--foreground", "--exit-with-parent", "--unix"])
        .arg(&socket)
        .arg("--pidfile")
        .arg(&pid_file)
        .args(arguments)
        .stderr(Stdio::null())
        .spawn()
        .expect("nbdkit starts");
    // nbdkit writes its pid file when it is ready.
    machine::wait_for("nbdkit is ready", || pid_file.exists().then_some(()));
    Kit { child, uri: format!("nbd+unix:///?socket={}", socket.display()), _folder: folder }
}

impl Drop for Kit {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn what_is_written_is_read_back_in_both_dialects() {
    let kit = nbdkit(&["memory", "4M"]);
    for (dialect, offset) in [(Style::Simple, 1000), (Style::Structured, 70_001)] {
        let client = Client::connect(&kit.uri, dialect).expect("nbdkit answers");
        assert_eq!(client.export().size_bytes, 4 << 20);
        client.write(offset, b"planks").expect("a write in range");
        assert_eq!(client.read(offset, 6).expect("a read in range"), b"planks");
        client.flush().expect("memory can be flushed");
    }
}

#[test]
fn many_requests_in_flight_each_get_their_own_answer() {
    let kit = nbdkit(&["memory", "4M"]);
    let client = Client::connect(&kit.uri, Style::Structured).expect("nbdkit answers");
    let writes: Vec<_> = (0..256_u64)
        .map(|n| {
            client.submit(&Command::Write {
                offset: n * 4096,
                bytes: vec![n as u8; 4096],
                fua: false,
            })
        })
        .collect();
    for write in writes {
        write.wait().expect("a write in range");
    }
    let reads: Vec<_> = (0..256_u64)
        .map(|n| client.submit(&Command::Read { offset: n * 4096, length: 4096 }))
        .collect();
    for (n, read) in reads.into_iter().enumerate() {
        assert_eq!(read.wait().expect("a read in range").bytes, vec![n as u8; 4096]);
    }
    assert_eq!(client.in_flight(), 0);
}

#[test]
fn an_error_of_the_server_is_reported_with_its_number_and_the_connection_lives_on() {
    let kit =
        nbdkit(&["--filter=error", "memory", "1M", "error-pwrite=EIO", "error-pwrite-rate=100%"]);
    let client = Client::connect(&kit.uri, Style::Structured).expect("nbdkit answers");
    assert_eq!(client.write(0, b"lost"), Err(Failure::Errno(5)));
    assert_eq!(client.read(0, 4), Ok(vec![0; 4]));
}

#[test]
fn a_dead_server_fails_every_request_in_flight() {
    let mut kit = nbdkit(&["--filter=delay", "memory", "1M", "delay-write=60"]);
    let client = Client::connect(&kit.uri, Style::Structured).expect("nbdkit answers");
    let stuck: Vec<_> = (0..8_u64)
        .map(|n| {
            client.submit(&Command::Write { offset: n * 512, bytes: vec![1; 512], fua: false })
        })
        .collect();
    kit.child.kill().expect("nbdkit still runs");
    for pending in stuck {
        assert_eq!(pending.wait(), Err(Failure::Gone));
    }
    assert_eq!(client.flush(), Err(Failure::Gone));
}

#[test]
fn allocation_is_reported_run_by_run() {
    let kit = nbdkit(&["memory", "1M"]);
    let client = Client::connect(&kit.uri, Style::Structured).expect("nbdkit answers");
    client.write(32 << 10, &[7; 32 << 10]).expect("a write in range");
    let reply =
        client.call(&Command::BlockStatus { offset: 0, length: 128 << 10 }).expect("memory knows");
    let hole = Extent { length: 32 << 10, flags: 3 };
    let data = Extent { length: 32 << 10, flags: 0 };
    assert_eq!(reply.extents[..2], [hole, data]);
}

#[test]
fn exports_are_listed_and_flags_are_seen() {
    let kit = nbdkit(&["--readonly", "memory", "1M"]);
    assert_eq!(list(&kit.uri).expect("nbdkit lists"), [""]);
    let client = Client::connect(&kit.uri, Style::Structured).expect("nbdkit answers");
    assert_ne!(client.export().flags & flag::READ_ONLY, 0);
}
