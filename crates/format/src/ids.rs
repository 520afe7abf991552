//! The two random names of the store: of a volume, and of a put. Not here: making random ones (the
//! caller's work).

use std::fmt;
use std::str::FromStr;

/// The error for a text that is not an id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InvalidId {
    what: &'static str,
}

impl fmt::Display for InvalidId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: the text needs 32 lower-case hexadecimal digits", self.what)
    }
}

impl std::error::Error for InvalidId {}

const HEX_DIGITS: [u8; 16] = *b"0123456789abcdef";

macro_rules! id {
    ($(#[$doc:meta])* $name:ident, $what:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub [u8; 16]);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                let mut text = [0; 32];
                for (pair, byte) in text.chunks_exact_mut(2).zip(self.0) {
                    pair[0] = HEX_DIGITS[usize::from(byte >> 4)];
                    pair[1] = HEX_DIGITS[usize::from(byte & 15)];
                }
                f.write_str(str::from_utf8(&text).map_err(|_| fmt::Error)?)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}({self})", stringify!($name))
            }
        }

        /// Takes exactly 32 lower-case hexadecimal digits, so that an id has one text.
        impl FromStr for $name {
            type Err = InvalidId;

            fn from_str(text: &str) -> Result<Self, InvalidId> {
                parse(text).map(Self).ok_or(InvalidId { what: $what })
            }
        }
    };
}

id! {
    /// A volume, forever. Shown as 32 lower-case hexadecimal digits, in the order of the bytes.
    VolumeId, "volume id"
}
id! {
    /// One put of one object, so that an object can be told from another writer's object at the
    /// same key.
    PutId, "put id"
}

fn parse(text: &str) -> Option<[u8; 16]> {
    let digits =
        text.len() == 32 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    digits.then(|| u128::from_str_radix(text, 16).ok().map(u128::to_be_bytes))?
}
