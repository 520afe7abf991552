//! Keeps the tables of errors in `docs/guide/doors.md` equal to the functions that doors, links and
//! drivers use. Tests only.
//!
//! Invariants: a kind of error without a row does not compile. An errno without a name fails the
//! test.
//!
//! Not here: these functions, each in the crate of its protocol.

use sawmill_device::ErrorKind;
use sawmill_driver::client::kind_of_refusal;
use sawmill_driver::host::refused_errno;
use sawmill_frontend::{fuse, nbd, ublk, vhost};
use sawmill_link::{kind_of, status_of};

use crate::nbd_device;

/// Linux has no error number above this.
const ERRNO_MAX: i32 = 133;

/// What users read of a kind. A new kind does not compile without its line.
fn meaning(kind: ErrorKind) -> &'static str {
    match kind {
        ErrorKind::Invalid => "the request is wrong",
        ErrorKind::ReadOnly => "the device cannot be written",
        ErrorKind::NotFound => "something named does not exist",
        ErrorKind::Exists => "something of that name exists already",
        ErrorKind::Refused => "the safe answer is to stop",
        ErrorKind::Fenced => "another writer has the volume",
        ErrorKind::Unavailable => "the store, a disk or a driver failed; it may work later",
        ErrorKind::Denied => "the store refuses access",
        ErrorKind::InUse => "another process holds it",
        ErrorKind::Full => "no space is left",
        ErrorKind::Corrupt => "bytes failed their check",
        ErrorKind::Closed => "the device is closed",
        ErrorKind::TimedOut => "nobody answered in the time that was set",
        ErrorKind::Unreachable => "no path leads to the bytes",
        ErrorKind::Internal => "a bug, or a device that broke its contract",
    }
}

fn name(errno: i32) -> &'static str {
    match errno {
        1 => "EPERM",
        2 => "ENOENT",
        5 => "EIO",
        13 => "EACCES",
        16 => "EBUSY",
        17 => "EEXIST",
        19 => "ENODEV",
        22 => "EINVAL",
        28 => "ENOSPC",
        30 => "EROFS",
        67 => "ENOLINK",
        75 => "EOVERFLOW",
        95 => "ENOTSUP",
        108 => "ESHUTDOWN",
        110 => "ETIMEDOUT",
        122 => "EDQUOT",
        // A door that begins to use another errno must tell its users of it in the guide.
        other => panic!("errno {other} has no name here"),
    }
}

fn nbd_name(kind: ErrorKind) -> &'static str {
    name(i32::try_from(nbd::errno(kind)).expect("an errno"))
}

fn virtio_name(kind: ErrorKind) -> &'static str {
    match vhost::status(kind) {
        1 => "IOERR",
        other => panic!("virtio has no failure {other}"),
    }
}

fn table(header: &[&str], rows: impl Iterator<Item = Vec<String>>) -> String {
    let line = |cells: &[String]| format!("| {} |\n", cells.join(" | "));
    let header: Vec<String> = header.iter().map(ToString::to_string).collect();
    let dashes = format!("|{}\n", "---|".repeat(header.len()));
    let rows: String = rows.map(|row| line(&row)).collect();
    line(&header) + &dashes + &rows
}

/// A row for each errno with a kind of its own, and a last one for all others.
fn errnos(kind_of: impl Fn(i32) -> ErrorKind) -> Vec<(String, ErrorKind)> {
    // EIO says nothing more precise, so it stands for every errno without a kind of its own.
    let other = kind_of(5);
    let mut rows: Vec<(String, ErrorKind)> = (1..=ERRNO_MAX)
        .filter(|errno| kind_of(*errno) != other)
        .map(|errno| (name(errno).to_owned(), kind_of(errno)))
        .collect();
    rows.push(("any other".to_owned(), other));
    rows
}

fn answers() -> String {
    let header =
        ["kind", "what happened", "NBD", "ublk", "FUSE", "vhost-user", "link", "ANSWER", "REFUSED"];
    let row = |kind: ErrorKind| {
        vec![
            format!("{kind:?}"),
            meaning(kind).to_owned(),
            nbd_name(kind).to_owned(),
            name(ublk::errno(kind)).to_owned(),
            name(fuse::errno(kind)).to_owned(),
            virtio_name(kind).to_owned(),
            status_of(kind).to_string(),
            name(kind.errno()).to_owned(),
            name(refused_errno(kind)).to_owned(),
        ]
    };
    table(&header, ErrorKind::ALL.into_iter().map(row))
}

fn answers_of_drivers() -> String {
    let header = ["a driver answers", "kind", "NBD", "ublk", "FUSE", "vhost-user"];
    let row = |(errno, kind): (String, ErrorKind)| {
        vec![
            errno,
            format!("{kind:?}"),
            nbd_name(kind).to_owned(),
            name(ublk::errno(kind)).to_owned(),
            name(fuse::errno(kind)).to_owned(),
            virtio_name(kind).to_owned(),
        ]
    };
    table(&header, errnos(ErrorKind::of_driver).into_iter().map(row))
}

fn refusals() -> String {
    let row = |(errno, kind): (String, ErrorKind)| {
        vec![errno, format!("{kind:?}"), format!("-{}", name(kind.errno()))]
    };
    table(&["the host refuses with", "Rust", "C"], errnos(kind_of_refusal).into_iter().map(row))
}

fn answers_of_nbd_servers() -> String {
    let kind_of = |errno: i32| nbd_device::kind_of(errno.unsigned_abs());
    let row = |(errno, kind): (String, ErrorKind)| vec![errno, format!("{kind:?}")];
    table(&["an NBD server answers", "kind"], errnos(kind_of).into_iter().map(row))
}

#[test]
fn the_guide_says_what_each_door_answers_to_each_error() {
    let parts = [
        ("Answers to users", answers()),
        ("Answers of drivers", answers_of_drivers()),
        ("Refusals to drivers", refusals()),
        ("Answers of NBD servers", answers_of_nbd_servers()),
    ];
    let text: Vec<String> =
        parts.into_iter().map(|(title, table)| format!("### {title}\n\n{table}")).collect();
    crate::guide::compare("doors.md", &text.join("\n"));
}

#[test]
fn a_link_brings_every_kind_unchanged() {
    for kind in ErrorKind::ALL {
        assert_eq!(kind_of(status_of(kind)), kind);
    }
}
