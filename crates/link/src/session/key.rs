//! The key that both ends of a connection share in advance: 32 random bytes, in a file as 64 hex
//! digits.
//!
//! Invariants: the bytes are overwritten when the key is dropped, and are never printed. A file is
//! never overwritten, never written with access for others than its owner, and never read if others
//! can access it.
//!
//! Not here: where the file is, how it gets to the other machine, files with the keys of many
//! machines (`crate::target`).

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use aws_lc_rs::constant_time::verify_slices_are_equal;
use sawmill_device::Error;
use zeroize::Zeroizing;

/// Bytes of a key.
pub const KEY_BYTES: usize = 32;
const DIGITS: usize = 2 * KEY_BYTES;

/// A key shared by both ends of a connection.
pub struct PreSharedKey(Zeroizing<[u8; KEY_BYTES]>);

/// Why there is no key: what happened, with which file, and what to do.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    /// The system gave no random bytes.
    #[error("cannot make a key: the system gave no random bytes")]
    Random,
    /// The file could not be read.
    #[error("cannot read the key file {path}: {source}")]
    Read {
        /// The key file.
        path: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
    /// Others than the owner can access the file.
    #[error(
        "the key file {path} is open to others than its owner (mode {mode:04o}): chmod 600 {path}, \
         and make a new key if others have read it"
    )]
    Open {
        /// The key file.
        path: PathBuf,
        /// Its permissions.
        mode: u32,
    },
    /// The file does not contain a key.
    #[error(
        "the key file {path} is not a key: it must be {DIGITS} hex digits and at most a newline"
    )]
    Malformed {
        /// The key file.
        path: PathBuf,
    },
    /// A line of a file of machines is invalid.
    #[error("{path}, line {line}: {why}")]
    Line {
        /// The file.
        path: PathBuf,
        /// Counted from 1.
        line: usize,
        /// What is wrong with it.
        #[source]
        why: Error,
    },
    /// The file is too long for a key file.
    #[error("{path} is longer than {bytes_max} bytes")]
    Long {
        /// The file.
        path: PathBuf,
        /// The longest valid length.
        bytes_max: usize,
    },
    /// The file exists already.
    #[error("{path} exists already and keys are never overwritten: remove it or name another file")]
    Exists {
        /// The key file.
        path: PathBuf,
    },
    /// The file could not be written; nothing of it is left.
    #[error("cannot write the key file {path}: {source}")]
    Write {
        /// The key file.
        path: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
}

impl PreSharedKey {
    /// A new key from the system's random source.
    pub fn random() -> Result<Self, KeyError> {
        let mut key = Zeroizing::new([0; KEY_BYTES]);
        aws_lc_rs::rand::fill(&mut key[..]).map_err(|_| KeyError::Random)?;
        Ok(Self(key))
    }

    /// The key with these bytes.
    pub fn from_bytes(bytes: [u8; KEY_BYTES]) -> Self {
        Self(Zeroizing::new(bytes))
    }

    /// Reads a file of 64 hex digits and at most one newline. A pipe works too.
    pub fn read(path: &Path) -> Result<Self, KeyError> {
        let malformed = || KeyError::Malformed { path: path.to_owned() };
        let text = match read_private(path, DIGITS + 1) {
            Err(KeyError::Long { .. }) => return Err(malformed()),
            read => read?,
        };
        Self::parse(text.strip_suffix(b"\n").unwrap_or(&text)).ok_or_else(malformed)
    }

    /// Parses a key of 64 hex digits.
    pub(crate) fn parse(digits: &[u8]) -> Option<Self> {
        let digits: &[u8; DIGITS] = digits.try_into().ok()?;
        let mut key = Zeroizing::new([0; KEY_BYTES]);
        for (byte, pair) in key.iter_mut().zip(digits.chunks_exact(2)) {
            let value = |digit: u8| (digit as char).to_digit(16);
            *byte = (value(pair[0])? << 4 | value(pair[1])?) as u8;
        }
        Some(Self(key))
    }

    /// Whether both keys are equal.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        verify_slices_are_equal(&self.0[..], &other.0[..]).is_ok()
    }

    /// Writes the key to a new file that only its owner can read, and syncs it.
    pub fn write(&self, path: &Path) -> Result<(), KeyError> {
        let cannot = |source: io::Error| match source.kind() {
            io::ErrorKind::AlreadyExists => KeyError::Exists { path: path.to_owned() },
            _ => KeyError::Write { path: path.to_owned(), source },
        };
        let mut file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(path)
            .map_err(cannot)?;
        let mut text = Zeroizing::new([b'\n'; DIGITS + 1]);
        for (digits, byte) in text.chunks_exact_mut(2).zip(self.0.iter()) {
            digits.copy_from_slice(&[digit(byte >> 4), digit(byte & 15)]);
        }
        file.write_all(&text[..]).and_then(|()| file.sync_all()).map_err(|error| {
            // Half a key would be refused later, and block the next attempt.
            let _ = std::fs::remove_file(path);
            cannot(error)
        })
    }

    /// The bytes, for the handshake.
    pub(super) fn bytes(&self) -> &[u8; KEY_BYTES] {
        &self.0
    }
}

impl std::fmt::Debug for PreSharedKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("PreSharedKey(..)")
    }
}

/// Reads a file that only its owner can access, of at most `bytes_max` bytes. A pipe works too.
pub(crate) fn read_private(path: &Path, bytes_max: usize) -> Result<Zeroizing<Vec<u8>>, KeyError> {
    let cannot = |source| KeyError::Read { path: path.to_owned(), source };
    let mut file = File::open(path).map_err(cannot)?;
    let mode = file.metadata().map_err(cannot)?.permissions().mode() & 0o7777;
    if mode & 0o077 != 0 {
        return Err(KeyError::Open { path: path.to_owned(), mode });
    }
    // One byte more than allowed: a file that fills it is too long. The buffer never grows, so no
    // copy of a key is left in freed memory.
    let mut text = Zeroizing::new(vec![0; bytes_max + 1]);
    let mut filled = 0;
    while filled < text.len() {
        match file.read(&mut text[filled..]) {
            Ok(0) => break,
            Ok(bytes) => filled += bytes,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(cannot(error)),
        }
    }
    if filled > bytes_max {
        return Err(KeyError::Long { path: path.to_owned(), bytes_max });
    }
    text.truncate(filled);
    Ok(text)
}

fn digit(value: u8) -> u8 {
    if value < 10 { b'0' + value } else { b'a' + value - 10 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file_of(text: &[u8], mode: u32) -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("key");
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        (folder, path)
    }

    #[test]
    fn a_written_key_is_read_back_and_only_its_owner_may() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("key");
        let key = PreSharedKey::random().unwrap();
        key.write(&path).unwrap();
        let metadata = std::fs::metadata(&path).unwrap();
        assert_eq!((metadata.permissions().mode() & 0o777, metadata.len()), (0o600, 65));
        assert_eq!(PreSharedKey::read(&path).unwrap().bytes(), key.bytes());
    }

    #[test]
    fn digits_are_read_in_order_in_both_cases_with_or_without_a_newline() {
        let upper = b"000102030405060708090A0B0C0D0E0F101112131415161718191A1B1C1D1EFF\n";
        let mut bytes: [u8; 32] = std::array::from_fn(|i| i as u8);
        bytes[31] = 255;
        for text in [&upper[..], &upper[..64], &upper.to_ascii_lowercase()[..]] {
            let (_folder, path) = file_of(text, 0o400);
            assert_eq!(PreSharedKey::read(&path).unwrap().bytes(), &bytes);
        }
        let (folder, _) = file_of(b"", 0o600);
        let path = folder.path().join("again");
        PreSharedKey::from_bytes(bytes).write(&path).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), upper.to_ascii_lowercase());
    }

    #[test]
    fn two_random_keys_differ() {
        assert_ne!(
            PreSharedKey::random().unwrap().bytes(),
            PreSharedKey::random().unwrap().bytes()
        );
    }

    #[test]
    fn a_key_file_open_to_others_is_refused_with_how_to_mend_it() {
        for mode in [0o640, 0o604, 0o620, 0o601, 0o644] {
            let (_folder, path) = file_of(&[b'a'; 64], mode);
            let text = PreSharedKey::read(&path).unwrap_err().to_string();
            let mend = format!("chmod 600 {}", path.display());
            assert!(text.contains(&mend) && text.contains(&format!("{mode:04o}")), "{text}");
        }
    }

    #[test]
    fn what_is_not_a_key_is_refused_by_name() {
        let long = [b'a'; 100_000];
        let texts: [&[u8]; 8] = [
            b"",
            b"\n",
            &[b'a'; 63],
            &[b'a'; 65],
            &[b'g'; 64],
            &[&[b'a'; 64][..], b"\n\n"].concat(),
            &[&[b'a'; 63][..], b" \n"].concat(),
            &long,
        ];
        for text in texts {
            let (_folder, path) = file_of(text, 0o600);
            let error = PreSharedKey::read(&path).unwrap_err();
            assert!(matches!(error, KeyError::Malformed { .. }), "{error}");
            assert!(error.to_string().contains(path.to_str().unwrap()), "{error}");
        }
        let error = PreSharedKey::read(Path::new("/nowhere/key")).unwrap_err().to_string();
        assert!(error.contains("cannot read the key file /nowhere/key"), "{error}");
    }

    #[test]
    fn a_key_is_never_written_over_a_file_or_through_a_link() {
        let (folder, path) = file_of(b"precious", 0o600);
        let symlink = folder.path().join("symlink");
        std::os::unix::fs::symlink(folder.path().join("elsewhere"), &symlink).unwrap();
        for path in [&path, &symlink] {
            let error = PreSharedKey::random().unwrap().write(path).unwrap_err();
            assert!(matches!(error, KeyError::Exists { .. }), "{error}");
        }
        assert_eq!(std::fs::read(&path).unwrap(), b"precious");
        assert!(!folder.path().join("elsewhere").exists());
    }

    #[test]
    fn a_key_is_never_printed() {
        let key = PreSharedKey::from_bytes([0xab; 32]);
        assert_eq!(format!("{key:?}"), "PreSharedKey(..)");
        let security = format!("{:?}", crate::session::Security::Key(key));
        assert!(!security.contains("171") && !security.contains("ab"), "{security}");
    }
}
