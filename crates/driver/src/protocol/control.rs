//! Control packets: a kind, and lines of text.
//!
//! Invariant: a fact is one line, whatever its value holds: line ends and NULs become blanks.
//!
//! Not here: which facts a kind of packet has (`docs/format/driver.md`), how long a packet may be
//! (`packet`).

use std::fmt::{Display, Write as _};
use std::str::FromStr;

use sawmill_device::{Error, ErrorKind, Result};

/// What a control packet is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the table in docs/format/driver.md says what each is")]
pub enum ControlKind {
    Hello = 1,
    Welcome = 2,
    Queue = 3,
    Attached = 4,
    Refused = 5,
    Doors = 6,
    Finish = 7,
    Leave = 8,
    Ask = 9,
    Answer = 10,
}

impl ControlKind {
    fn of(number: u32) -> Option<Self> {
        use ControlKind::{
            Answer, Ask, Attached, Doors, Finish, Hello, Leave, Queue, Refused, Welcome,
        };
        let all = [Hello, Welcome, Queue, Attached, Refused, Doors, Finish, Leave, Ask, Answer];
        all.into_iter().find(|kind| *kind as u32 == number)
    }
}

/// Lines `name=value`, in order. A name may occur more than once.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ControlFacts(Vec<(String, String)>);

impl ControlFacts {
    /// Adds a fact.
    #[must_use]
    pub fn with(mut self, name: &str, value: impl Display) -> Self {
        self.add(name, value);
        self
    }

    /// Adds a fact.
    pub fn add(&mut self, name: &str, value: impl Display) {
        // The text of an error may have several lines.
        self.0.push((name.to_owned(), value.to_string().replace(['\n', '\0'], " ")));
    }

    /// These facts, followed by others.
    #[must_use]
    pub fn and(mut self, others: &ControlFacts) -> Self {
        self.0.extend_from_slice(&others.0);
        self
    }

    /// The first value of this name.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&str> {
        self.iter().find(|(key, _)| *key == name).map(|(_, value)| value)
    }

    /// The first value of this name, parsed.
    ///
    /// # Errors
    /// `Invalid` if there is none, or it cannot be parsed.
    pub fn parsed<T: FromStr>(&self, name: &str) -> Result<T> {
        let value = self.get(name).ok_or_else(|| bad(format!("a control packet has no {name}")))?;
        value.parse().map_err(|_| bad(format!("a control packet says {name}={value}")))
    }

    /// Whether this fact is true.
    #[must_use]
    pub fn is_true(&self, name: &str) -> bool {
        self.get(name) == Some("1")
    }

    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(name, value)| (name.as_str(), value.as_str()))
    }
}

/// A control packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Control {
    /// The kind of the packet.
    pub kind: ControlKind,
    /// The content of the packet.
    pub facts: ControlFacts,
}

impl Control {
    /// Makes a packet.
    #[must_use]
    pub fn new(kind: ControlKind, facts: ControlFacts) -> Self {
        Control { kind, facts }
    }

    /// Encodes the packet.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut text = String::new();
        for (name, value) in self.facts.iter() {
            // A write to a string does not fail.
            let _ = writeln!(text, "{name}={value}");
        }
        let mut bytes = (self.kind as u32).to_le_bytes().to_vec();
        bytes.extend_from_slice(text.as_bytes());
        bytes
    }

    /// Decodes a packet.
    ///
    /// # Errors
    /// `Invalid`: what is wrong.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let Some((kind, text)) = bytes.split_first_chunk() else {
            return Err(bad(format!("a control packet of {} bytes", bytes.len())));
        };
        let number = u32::from_le_bytes(*kind);
        let kind = ControlKind::of(number)
            .ok_or_else(|| bad(format!("a control packet of unknown kind {number}")))?;
        let text = std::str::from_utf8(text)
            .map_err(|_| bad("a control packet that is not UTF-8".into()))?;
        let mut facts = ControlFacts::default();
        // Not `lines`, which takes a carriage return as a part of the line end.
        for line in text.split_terminator('\n') {
            // Only the first: the URIs of doors have more of them in the value.
            let (name, value) = line
                .split_once('=')
                .ok_or_else(|| bad(format!("a control packet with the line '{line}'")))?;
            facts.add(name, value);
        }
        Ok(Control { kind, facts })
    }
}

fn bad(text: String) -> Error {
    Error::new(ErrorKind::Invalid, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_packet_is_read_as_it_was_written() {
        let facts = ControlFacts::default()
            .with("protocol", 1)
            .with("door", "nbd nbd+unix:///?socket=/a=b")
            .with("door", "")
            .with("last", "ends in \r");
        let packet = Control::new(ControlKind::Doors, facts);
        assert_eq!(Control::decode(&packet.encode()).unwrap(), packet);
    }

    #[test]
    fn a_value_with_lines_stays_one_line() {
        let facts = ControlFacts::default().with("message", "one\ntwo=2\n");
        let read = Control::decode(&Control::new(ControlKind::Refused, facts).encode()).unwrap();
        assert_eq!(read.facts.iter().collect::<Vec<_>>(), [("message", "one two=2 ")]);
    }

    #[test]
    fn malformed_packets_are_refused_with_the_field() {
        let error_text = |bytes: &[u8]| Control::decode(bytes).unwrap_err().to_string();
        assert!(error_text(&[1, 0, 0]).contains("3 bytes"));
        assert!(error_text(&[77, 0, 0, 0]).contains("unknown kind 77"));
        assert!(error_text(b"\x01\0\0\0size").contains("the line 'size'"));
        assert!(error_text(b"\x01\0\0\0a=\xff\n").contains("not UTF-8"));
    }
}
