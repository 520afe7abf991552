//! The file of the machines that may attach to a link's target.
//!
//! Invariants: machines have names and keys of their own, and no message shows a key.
//!
//! Not here: the permissions of the file; addresses and rights alone (`text`).

use sawmill_format::link::greeting::NAME_BYTES_MAX;
use sawmill_link::fuzzing;

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
