//! Payloads of the handshake (hello, welcome, cookie) and of discovery (seek, found).
//!
//! Invariants: names are UTF-8 of at most [`NAME_BYTES_MAX`] bytes; the handshake that carries the
//! payloads authenticates their content, except in discovery, which proves nothing.
//!
//! Not here: the handshake itself (`crates/link/src/session`).

use super::{LINKS_MAX, PROOF_BYTES, check_length, check_reserved, text};
use crate::Result;
use crate::error::check_field;
use crate::layout::layout;

layout! {
    /// The initiator's first message; its name follows.
    hello_at, "Hello", 40;
    VERSION_MIN: 0, 1, "version_min";
    VERSION_MAX: 1, 1, "version_max";
    PLACES: 2, 2, "places";
    PLACE_BYTES: 4, 4, "place_bytes";
    CONNECTION: 8, 8, "connection";
    INSTANCE: 16, 16, "instance";
    LINKS: 32, 1, "links";
    NAME_BYTES: 33, 1, "name_bytes";
    RESERVED: 34, 6, "reserved";
}

layout! {
    /// The target's answer; its name follows.
    welcome_at, "Welcome", 56;
    VERSION: 0, 1, "version";
    LINKS: 1, 1, "links";
    PLACES: 2, 2, "places";
    PLACE_BYTES: 4, 4, "place_bytes";
    CONNECTION: 8, 8, "connection";
    INSTANCE: 16, 16, "instance";
    SILENCE_MAX_S: 32, 2, "silence_max_s";
    NAME_BYTES: 34, 1, "name_bytes";
    RESERVED: 35, 21, "reserved";
}

layout! {
    /// A seek or its answer; a name follows.
    seek_at, "Seek", 32;
    TOKEN: 0, 8, "token";
    INSTANCE: 8, 16, "instance";
    SEALED: 24, 1, "sealed";
    NAME_BYTES: 25, 1, "name_bytes";
    RESERVED: 26, 6, "reserved";
}

layout! {
    /// The answer of a target under load to a hello.
    cookie_at, "Cookie", 32;
    COOKIE: 0, 16, "cookie";
    PROOF: 16, 16, "proof";
}

/// The longest name of an initiator or target.
pub const NAME_BYTES_MAX: usize = 64;
/// The most places of a connection.
pub const PLACES_MAX: u16 = 4096;
/// The least and the most bytes of a place; they are whole grains.
pub const PLACE_BYTES_RANGE: std::ops::RangeInclusive<u32> = 4096..=(4 << 20);
/// The longest payload of a handshake.
pub const GREETING_BYTES_MAX: usize = welcome_at::SIZE + NAME_BYTES_MAX;

/// The parameters that an initiator requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    /// The versions it speaks, first and last.
    pub versions: (u8, u8),
    /// The places it would like.
    pub places: u16,
    /// The bytes of a place it would like.
    pub place_bytes: u32,
    /// The initiator's number for the connection: packets to the initiator carry it.
    pub connection: u64,
    /// This run of the initiator: a new connection of the same run replaces its old one.
    pub instance: [u8; 16],
    /// Links it will join.
    pub links: u8,
    /// A name for people.
    pub name: String,
}

/// The parameters that a target grants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Welcome {
    /// The version that both must use.
    pub version: u8,
    /// Links that it takes.
    pub links: u8,
    /// Places granted: commands that may be unanswered at a time.
    pub places: u16,
    /// Bytes of each.
    pub place_bytes: u32,
    /// The target's number for the connection: packets to the target carry it.
    pub connection: u64,
    /// This run of the target.
    pub instance: [u8; 16],
    /// The target gives up a connection that was silent for this long.
    pub silence_max_s: u16,
    /// A name for people.
    pub name: String,
}

fn check_name(what: &'static str, name: &str) -> Result<()> {
    check_field(what, "name_bytes", "longer than 64", name.len() <= NAME_BYTES_MAX)
}

fn check_sizes(what: &'static str, places: u16, place_bytes: u32, links: u8) -> Result<()> {
    check_field(what, "places", "none or more than 4096", (1..=PLACES_MAX).contains(&places))?;
    let whole = PLACE_BYTES_RANGE.contains(&place_bytes) && place_bytes.is_multiple_of(4096);
    check_field(what, "place_bytes", "not whole pages from 4 KiB to 4 MiB", whole)?;
    let some = (1..=LINKS_MAX).contains(&usize::from(links));
    check_field(what, "links", "none or more than 8", some)
}

impl Hello {
    const WHAT: &'static str = "link hello";

    /// The payload's bytes, or which field cannot be written.
    pub fn encode(&self) -> Result<Vec<u8>> {
        self.check()?;
        let mut bytes = vec![0; hello_at::SIZE];
        hello_at::VERSION_MIN.put(&mut bytes, [self.versions.0]);
        hello_at::VERSION_MAX.put(&mut bytes, [self.versions.1]);
        hello_at::PLACES.put(&mut bytes, self.places.to_le_bytes());
        hello_at::PLACE_BYTES.put(&mut bytes, self.place_bytes.to_le_bytes());
        hello_at::CONNECTION.put(&mut bytes, self.connection.to_le_bytes());
        hello_at::INSTANCE.put(&mut bytes, self.instance);
        hello_at::LINKS.put(&mut bytes, [self.links]);
        hello_at::NAME_BYTES.put(&mut bytes, [self.name.len() as u8]);
        bytes.extend_from_slice(self.name.as_bytes());
        Ok(bytes)
    }

    /// Reads the whole payload.
    pub fn decode(bytes: &[u8]) -> Result<Hello> {
        check_length(Self::WHAT, bytes, hello_at::SIZE)?;
        check_reserved(Self::WHAT, hello_at::RESERVED, bytes)?;
        let name_bytes = usize::from(hello_at::NAME_BYTES.u8(bytes));
        let whole = bytes.len() == hello_at::SIZE + name_bytes;
        check_field(Self::WHAT, "name_bytes", "it does not agree with the length", whole)?;
        let hello = Hello {
            versions: (hello_at::VERSION_MIN.u8(bytes), hello_at::VERSION_MAX.u8(bytes)),
            places: hello_at::PLACES.u16(bytes),
            place_bytes: hello_at::PLACE_BYTES.u32(bytes),
            connection: hello_at::CONNECTION.u64(bytes),
            instance: hello_at::INSTANCE.array(bytes),
            links: hello_at::LINKS.u8(bytes),
            name: text(Self::WHAT, &bytes[hello_at::SIZE..], name_bytes)?.to_owned(),
        };
        hello.check()?;
        Ok(hello)
    }

    fn check(&self) -> Result<()> {
        check_field(
            Self::WHAT,
            "version_max",
            "below version_min",
            self.versions.0 <= self.versions.1,
        )?;
        check_field(Self::WHAT, "connection", "zero", self.connection != 0)?;
        check_sizes(Self::WHAT, self.places, self.place_bytes, self.links)?;
        check_name(Self::WHAT, &self.name)
    }
}

impl Welcome {
    const WHAT: &'static str = "link welcome";

    /// The payload's bytes, or which field cannot be written.
    pub fn encode(&self) -> Result<Vec<u8>> {
        self.check()?;
        let mut bytes = vec![0; welcome_at::SIZE];
        welcome_at::VERSION.put(&mut bytes, [self.version]);
        welcome_at::LINKS.put(&mut bytes, [self.links]);
        welcome_at::PLACES.put(&mut bytes, self.places.to_le_bytes());
        welcome_at::PLACE_BYTES.put(&mut bytes, self.place_bytes.to_le_bytes());
        welcome_at::CONNECTION.put(&mut bytes, self.connection.to_le_bytes());
        welcome_at::INSTANCE.put(&mut bytes, self.instance);
        welcome_at::SILENCE_MAX_S.put(&mut bytes, self.silence_max_s.to_le_bytes());
        welcome_at::NAME_BYTES.put(&mut bytes, [self.name.len() as u8]);
        bytes.extend_from_slice(self.name.as_bytes());
        Ok(bytes)
    }

    /// Reads the whole payload.
    pub fn decode(bytes: &[u8]) -> Result<Welcome> {
        check_length(Self::WHAT, bytes, welcome_at::SIZE)?;
        check_reserved(Self::WHAT, welcome_at::RESERVED, bytes)?;
        let name_bytes = usize::from(welcome_at::NAME_BYTES.u8(bytes));
        let whole = bytes.len() == welcome_at::SIZE + name_bytes;
        check_field(Self::WHAT, "name_bytes", "it does not agree with the length", whole)?;
        let welcome = Welcome {
            version: welcome_at::VERSION.u8(bytes),
            links: welcome_at::LINKS.u8(bytes),
            places: welcome_at::PLACES.u16(bytes),
            place_bytes: welcome_at::PLACE_BYTES.u32(bytes),
            connection: welcome_at::CONNECTION.u64(bytes),
            instance: welcome_at::INSTANCE.array(bytes),
            silence_max_s: welcome_at::SILENCE_MAX_S.u16(bytes),
            name: text(Self::WHAT, &bytes[welcome_at::SIZE..], name_bytes)?.to_owned(),
        };
        welcome.check()?;
        Ok(welcome)
    }

    fn check(&self) -> Result<()> {
        check_field(Self::WHAT, "connection", "zero", self.connection != 0)?;
        check_sizes(Self::WHAT, self.places, self.place_bytes, self.links)?;
        check_name(Self::WHAT, &self.name)
    }
}

/// A seek, or its answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seek {
    /// Chosen by the seeker; the answer carries it.
    pub token: u64,
    /// Found: this run of the target. Seek: zero.
    pub instance: [u8; 16],
    /// Found: a key is needed.
    pub sealed: bool,
    /// Found: the target's name. Seek: the name sought, empty for any.
    pub name: String,
}

impl Seek {
    const WHAT: &'static str = "link seek";

    /// The body's bytes, or which field cannot be written.
    pub fn encode(&self) -> Result<Vec<u8>> {
        check_name(Self::WHAT, &self.name)?;
        let mut bytes = vec![0; seek_at::SIZE];
        seek_at::TOKEN.put(&mut bytes, self.token.to_le_bytes());
        seek_at::INSTANCE.put(&mut bytes, self.instance);
        seek_at::SEALED.put(&mut bytes, [u8::from(self.sealed)]);
        seek_at::NAME_BYTES.put(&mut bytes, [self.name.len() as u8]);
        bytes.extend_from_slice(self.name.as_bytes());
        Ok(bytes)
    }

    /// Reads the whole body.
    pub fn decode(bytes: &[u8]) -> Result<Seek> {
        check_length(Self::WHAT, bytes, seek_at::SIZE)?;
        check_reserved(Self::WHAT, seek_at::RESERVED, bytes)?;
        let name_bytes = usize::from(seek_at::NAME_BYTES.u8(bytes));
        let whole = bytes.len() == seek_at::SIZE + name_bytes && name_bytes <= NAME_BYTES_MAX;
        check_field(Self::WHAT, "name_bytes", "it does not agree with the length", whole)?;
        let sealed = seek_at::SEALED.u8(bytes);
        check_field(Self::WHAT, "sealed", "neither 0 nor 1", sealed <= 1)?;
        Ok(Seek {
            token: seek_at::TOKEN.u64(bytes),
            instance: seek_at::INSTANCE.array(bytes),
            sealed: sealed == 1,
            name: text(Self::WHAT, &bytes[seek_at::SIZE..], name_bytes)?.to_owned(),
        })
    }
}

/// The answer of a target under load to a hello.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cookie {
    /// The initiator sends it before the same hello. Only the target can read it.
    pub cookie: [u8; PROOF_BYTES],
    /// Proves that the cookie comes from the holder of the key and is for this hello.
    pub proof: [u8; PROOF_BYTES],
}

impl Cookie {
    const WHAT: &'static str = "link cookie";

    /// The body's bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; cookie_at::SIZE] {
        let mut bytes = [0; cookie_at::SIZE];
        cookie_at::COOKIE.put(&mut bytes, self.cookie);
        cookie_at::PROOF.put(&mut bytes, self.proof);
        bytes
    }

    /// Reads the whole body.
    pub fn decode(bytes: &[u8]) -> Result<Cookie> {
        check_length(Self::WHAT, bytes, cookie_at::SIZE)?;
        check_field(Self::WHAT, "length", "too long", bytes.len() == cookie_at::SIZE)?;
        let (cookie, proof) = (cookie_at::COOKIE.array(bytes), cookie_at::PROOF.array(bytes));
        Ok(Cookie { cookie, proof })
    }
}
