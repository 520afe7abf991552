//! How layouts are defined: one constant per field, used by encoder, decoder and the test of the
//! pages.
//!
//! Invariants: a table's fields follow each other without gaps and end at its size (checked at
//! compile time). All integers are little-endian. Access outside the given bytes is a bug of this
//! crate and panics, so every decoder checks the length of its input first.
//!
//! Not here: the tables (each is in the module of its structure), and their comparison with the
//! pages (`tests/format/pages.rs`).

use crate::{FormatError, Result};

/// One field: a row of a layout table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Field {
    /// Bytes before it.
    pub offset: usize,
    /// Its size in bytes.
    pub size: usize,
    /// Its name in code and pages.
    pub name: &'static str,
}

impl Field {
    /// Its bytes.
    #[inline]
    pub(crate) fn of(self, bytes: &[u8]) -> &[u8] {
        &bytes[self.offset..self.offset + self.size]
    }

    #[inline]
    pub(crate) fn array<const N: usize>(self, bytes: &[u8]) -> [u8; N] {
        debug_assert_eq!(N, self.size, "{}", self.name);
        let mut array = [0; N];
        array.copy_from_slice(&bytes[self.offset..self.offset + N]);
        array
    }

    #[inline]
    pub(crate) fn u8(self, bytes: &[u8]) -> u8 {
        u8::from_le_bytes(self.array(bytes))
    }

    #[inline]
    pub(crate) fn u16(self, bytes: &[u8]) -> u16 {
        u16::from_le_bytes(self.array(bytes))
    }

    #[inline]
    pub(crate) fn u32(self, bytes: &[u8]) -> u32 {
        u32::from_le_bytes(self.array(bytes))
    }

    #[inline]
    pub(crate) fn u64(self, bytes: &[u8]) -> u64 {
        u64::from_le_bytes(self.array(bytes))
    }

    #[inline]
    pub(crate) fn is_zero(self, bytes: &[u8]) -> bool {
        self.of(bytes).iter().all(|&byte| byte == 0)
    }

    /// Writes `value` (the little-endian bytes of an integer, or an id).
    #[inline]
    pub(crate) fn put<const N: usize>(self, bytes: &mut [u8], value: [u8; N]) {
        debug_assert_eq!(N, self.size, "{}", self.name);
        bytes[self.offset..self.offset + N].copy_from_slice(&value);
    }

    /// Writes a count to a field of 32 bits; a larger count is refused.
    pub(crate) fn put_count(
        self,
        bytes: &mut [u8],
        what: &'static str,
        count: usize,
    ) -> Result<()> {
        let why = "it does not fit 32 bits";
        let count = u32::try_from(count);
        let count = count.map_err(|_| FormatError::Field { what, field: self.name, why })?;
        self.put(bytes, count.to_le_bytes());
        Ok(())
    }
}

/// One layout table: the fields of a structure, or of one of its entries, that have a fixed place.
#[derive(Clone, Copy, Debug)]
pub struct Table {
    /// The heading of the table on its page.
    pub title: &'static str,
    /// Its fields, in order.
    pub fields: &'static [Field],
    /// Bytes of all fields.
    pub size: usize,
}

impl Table {
    /// Whether the fields follow each other without gaps and end at the size.
    pub(crate) const fn is_gapless(&self) -> bool {
        let (mut index, mut end) = (0, 0);
        while index < self.fields.len() {
            if self.fields[index].offset != end {
                return false;
            }
            end += self.fields[index].size;
            index += 1;
        }
        end == self.size
    }
}

/// Declares a module with one [`Field`] per row, `SIZE`, and `TABLE`.
macro_rules! layout {
    ($(#[$doc:meta])* $module:ident, $title:literal, $total:literal;
     $($name:ident: $offset:literal, $size:literal, $text:literal;)+) => {
        $(#[$doc])*
        pub mod $module {
            use crate::layout::{Field, Table};
            $(
                #[doc = concat!("Field `", $text, "` at byte ", $offset, ", ", $size, " bytes.")]
                pub const $name: Field = Field { offset: $offset, size: $size, name: $text };
            )+
            /// Bytes of all fields.
            pub const SIZE: usize = $total;
            /// The rows, as on the page.
            pub const TABLE: Table = Table { title: $title, fields: &[$($name),+], size: SIZE };
            const _: () = assert!(TABLE.is_gapless());
        }
    };
}
pub(crate) use layout;

/// Reads the 20 decimal digits of a key.
pub(crate) fn parse_number(digits: &str) -> Option<u64> {
    let shaped = digits.len() == 20 && digits.bytes().all(|byte| byte.is_ascii_digit());
    shaped.then(|| digits.parse().ok())?
}
