//! The file of the machines that may attach to a link's target, and the file with one key.
//!
//! Invariants: machines have names and keys of their own, and no message shows a key. A key file is
//! 64 hex digits and at most a newline; its key is written again as the same digits.
//!
//! Not here: the permissions of the files; addresses and rights alone (`text`).

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;

use sawmill_format::link::greeting::NAME_BYTES_MAX;
use sawmill_link::fuzzing;
use sawmill_link::session::KeyError;

/// The length of a key as people write it.
const KEY_DIGITS: usize = 64;

/// The content of the file.
pub(crate) fn run(bytes: &[u8]) {
    match fuzzing::machines(bytes) {
        Ok(machines) => {
            let names = machines.iter().map(|machine| machine.name.len());
            assert!(names.into_iter().all(|bytes| (1..=NAME_BYTES_MAX).contains(&bytes)));
            assert!(machines.len() <= bytes.len(), "a line for each machine");
        }
        Err(error) => {
            let message = error.to_string();
            assert!(keys(bytes).all(|key| !message.contains(&key)), "{message}");
        }
    }
}

/// The keys of a file, unless the exports of their line repeat them: an export may have any name.
fn keys(bytes: &[u8]) -> impl Iterator<Item = String> {
    let text = String::from_utf8_lossy(bytes).into_owned();
    let keys: Vec<String> = text
        .lines()
        .filter_map(|line| {
            let words: Vec<&str> = line.split_whitespace().collect();
            let [_, key, exports] = words[..] else { return None };
            let is_key =
                key.len() == KEY_DIGITS && key.bytes().all(|digit| digit.is_ascii_hexdigit());
            (is_key && !exports.contains(key)).then(|| key.to_owned())
        })
        .collect();
    keys.into_iter().filter(move |key| text.matches(key.as_str()).count() == 1)
}

/// The content of a key file.
pub(crate) fn key_file(bytes: &[u8]) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (path, again) = (folder.path().join("key"), folder.path().join("again"));
    fs::write(&path, bytes).expect("a file");
    fs::set_permissions(&path, Permissions::from_mode(0o600)).expect("our file");
    let digits = bytes.strip_suffix(b"\n").unwrap_or(bytes);
    let is_key = digits.len() == KEY_DIGITS && digits.iter().all(u8::is_ascii_hexdigit);
    match fuzzing::key_file(&path, &again) {
        Ok(()) => {
            let written = fs::read(&again).expect("it was written");
            assert!(is_key, "nothing else is a key");
            assert_eq!(written, [&digits.to_ascii_lowercase()[..], b"\n"].concat());
        }
        Err(error) => {
            assert!(!is_key && matches!(error, KeyError::Malformed { .. }), "{error}");
            // The rest of the text is always the same: nothing of the file is shown.
            let message = error.to_string();
            assert!(message.starts_with(&format!("the key file {} is", path.display())));
            assert!(!again.exists(), "no key is written");
        }
    }
}
