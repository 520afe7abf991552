//! The machines that may attach: a file with a line for each, its name, its key and what it may
//! open.
//!
//! ```text
//! # name   key (64 hex digits)   exports: with commas; NAME:ro to read only; * for all, *:ro
//! db1      6f1c…                 disk1,logs:ro
//! backup   91aa…                 *:ro
//! ```
//!
//! Invariants: a file with any invalid line gives no machines; no message contains a key. One
//! machine has one line, and no key occurs twice, because a key identifies its machine.
//!
//! Not here: which key made a packet (`keys`), when the file is read again (the binary does that).

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::Path;

use sawmill_device::{Error, ErrorKind, Result};
use sawmill_format::link::control::{EXPORT_BYTES_MAX, OPEN_READ_ONLY, OPEN_TAKE_OVER};
use sawmill_format::link::greeting::NAME_BYTES_MAX;

use crate::session::KeyError;
use crate::session::key::{PreSharedKey, read_private};

/// The longest file: room for about ten thousand machines.
const FILE_BYTES_MAX: usize = 1 << 20;

/// The access to an export.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Access {
    Read,
    Write,
}

/// What a machine may open.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rights {
    /// The access to exports that are not named.
    others: Option<Access>,
    by_name: BTreeMap<String, Access>,
}

/// A machine that may attach.
#[derive(Debug)]
pub struct Machine {
    /// A name for people; unique among the machines of this target.
    pub name: String,
    /// The key that only this machine and the target have.
    pub key: PreSharedKey,
    /// What it may open.
    pub rights: Rights,
}

impl Rights {
    /// The right to write everything.
    #[must_use]
    pub fn all() -> Self {
        Rights { others: Some(Access::Write), by_name: BTreeMap::new() }
    }

    /// Parses `disk1,logs:ro`.
    ///
    /// # Errors
    /// `Invalid`: an entry that names no export, or one that is there twice.
    pub fn parse(text: &str) -> Result<Self> {
        let invalid = |text: String| Error::new(ErrorKind::Invalid, text);
        let mut rights = Rights::default();
        for entry in text.split(',') {
            let (name, access) = match entry.strip_suffix(":ro") {
                Some(name) => (name, Access::Read),
                None => (entry, Access::Write),
            };
            if name.is_empty() || name.len() > EXPORT_BYTES_MAX {
                return Err(invalid(format!("'{entry}' is not EXPORT, EXPORT:ro, * or *:ro")));
            }
            let before = match name {
                "*" => rights.others.replace(access),
                name => rights.by_name.insert(name.to_owned(), access),
            };
            if before.is_some() {
                return Err(invalid(format!("'{name}' is listed twice")));
            }
        }
        Ok(rights)
    }

    fn to(&self, export: &str) -> Option<Access> {
        self.by_name.get(export).copied().or(self.others)
    }

    /// Whether the machine may know of `export`.
    pub(super) fn shows(&self, export: &str) -> bool {
        self.to(export).is_some()
    }

    /// Whether the machine may only read `export`.
    pub(super) fn only_reads(&self, export: &str) -> bool {
        self.to(export) == Some(Access::Read)
    }

    /// Fails unless `export` may be opened with these flags. The error does not reveal whether the
    /// export exists.
    pub(super) fn allow(&self, export: &str, flags: u8) -> Result<()> {
        let denied = |text: String| Err(Error::new(ErrorKind::Denied, text));
        match self.to(export) {
            Some(Access::Write) => Ok(()),
            Some(Access::Read) if flags & OPEN_READ_ONLY == 0 => {
                denied(format!("this machine's key may only read {export:?}: open it read-only"))
            }
            Some(Access::Read) if flags & OPEN_TAKE_OVER != 0 => denied(format!(
                "this machine's key may only read {export:?}: it may not take it over"
            )),
            Some(Access::Read) => Ok(()),
            None => denied(format!("this machine's key may not open {export:?}")),
        }
    }
}

/// Reads the file of machines.
///
/// # Errors
/// What is wrong, with the line.
pub fn read_machines(path: &Path) -> std::result::Result<Vec<Machine>, KeyError> {
    parse(path, &read_private(path, FILE_BYTES_MAX)?)
}

/// Parses the content of a file of machines; `path` is for messages.
pub(crate) fn parse(path: &Path, bytes: &[u8]) -> std::result::Result<Vec<Machine>, KeyError> {
    let wrong = |line: usize, why: Error| KeyError::Line { path: path.to_owned(), line, why };
    let text = str::from_utf8(bytes).map_err(|_| wrong(1, invalid("the file is not UTF-8")))?;
    let mut machines: Vec<Machine> = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let machine = machine(line).map_err(|why| wrong(index + 1, why))?;
        if machines.iter().any(|other| other.name == machine.name) {
            return Err(wrong(
                index + 1,
                invalid(format!("machine {} is listed twice", machine.name)),
            ));
        }
        if let Some(other) = machines.iter().find(|other| other.key.is_same(&machine.key)) {
            let text = format!(
                "{} has the key of {}: make a key for each machine",
                machine.name, other.name
            );
            return Err(wrong(index + 1, invalid(text)));
        }
        machines.push(machine);
    }
    if machines.is_empty() {
        return Err(wrong(text.lines().count().max(1), invalid("the file lists no machine")));
    }
    Ok(machines)
}

fn invalid(text: impl Into<Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::Invalid, text)
}

fn machine(line: &str) -> Result<Machine> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let [name, key, exports] = words[..] else {
        return Err(invalid(format!("{} words, but expected NAME KEY EXPORTS", words.len())));
    };
    if name.len() > NAME_BYTES_MAX {
        return Err(invalid(format!("the name is longer than {NAME_BYTES_MAX} bytes")));
    }
    if PreSharedKey::parse(name.as_bytes()).is_some() {
        return Err(invalid("the first word is a key, but the name comes first, then its key"));
    }
    // A word that is not a key may be a key with a typo, and so may the name: show neither.
    let key = PreSharedKey::parse(key.as_bytes())
        .ok_or_else(|| invalid("the second word is not a key of 64 hex digits"))?;
    Ok(Machine { name: name.to_owned(), key, rights: Rights::parse(exports)? })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn read(text: &str) -> std::result::Result<Vec<Machine>, String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("machines");
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        read_machines(&path).map_err(|error| error.to_string())
    }

    #[test]
    fn a_line_is_a_machine_with_its_key_and_its_exports() {
        let (one, two) = ("1".repeat(64), "A".repeat(64));
        let machines =
            read(&format!("# ours\n\n  db1 {one} disk1,logs:ro\nbackup\t{two}  *:ro\r\n")).unwrap();
        assert_eq!(
            machines.iter().map(|machine| &machine.name[..]).collect::<Vec<_>>(),
            ["db1", "backup"]
        );
        assert!(machines[0].key.is_same(&PreSharedKey::from_bytes([0x11; 32])));
        let to = |index: usize, export| machines[index].rights.to(export);
        assert_eq!(
            [to(0, "disk1"), to(0, "logs"), to(0, "disk2")],
            [Some(Access::Write), Some(Access::Read), None]
        );
        assert_eq!([to(1, "disk1"), to(1, "*")], [Some(Access::Read); 2]);
    }

    #[test]
    fn a_malformed_line_is_named_by_number_and_its_key_is_not_shown() {
        let (one, two) = ("1".repeat(64), "2".repeat(64));
        for (text, line, word) in [
            (String::new(), 1, "no machine"),
            ("# nobody\n".into(), 1, "no machine"),
            (format!("db1 {one}"), 1, "2 words"),
            (format!("a {one} *\n\ndb1 {two}9 *"), 3, "not a key of 64 hex digits"),
            (format!("a {one} *\na {two} *"), 2, "machine a is listed twice"),
            (format!("a {one} *\nb {one} *"), 2, "b has the key of a"),
            (format!("{one} db1 *"), 1, "the first word is a key"),
            (format!("{}9 db1 *", &one[..63]), 1, "the first word is a key"),
            (format!("{}x db1 *", &one[..63]), 1, "not a key of 64 hex digits"),
            (format!("a {one} *,*:ro"), 1, "twice"),
            (format!("a {one} disk1,,"), 1, "is not EXPORT"),
            (format!("a {one} :ro"), 1, "is not EXPORT"),
        ] {
            let error = read(&text).unwrap_err();
            assert!(
                error.contains(&format!("line {line}")) && error.contains(word),
                "{text}: {error}"
            );
            assert!(!error.contains(&one[..9]) && !error.contains(&two[..9]), "{error}");
        }
    }

    #[test]
    fn a_machine_that_may_only_read_opens_nothing_to_write_and_takes_nothing_over() {
        let rights = Rights::parse("disk1,logs:ro").unwrap();
        rights.allow("disk1", OPEN_TAKE_OVER).unwrap();
        rights.allow("logs", OPEN_READ_ONLY).unwrap();
        for (export, flags) in
            [("logs", 0), ("logs", OPEN_READ_ONLY | OPEN_TAKE_OVER), ("disk2", OPEN_READ_ONLY)]
        {
            assert_eq!(
                rights.allow(export, flags).unwrap_err().kind(),
                ErrorKind::Denied,
                "{export}"
            );
        }
        assert!(rights.shows("logs") && !rights.shows("disk2") && Rights::all().shows("disk2"));
    }
}
