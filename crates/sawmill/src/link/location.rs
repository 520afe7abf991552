//! The place of a remote device as users type it: `link:udp:10.0.0.1,tcp:10.0.1.1:9800/disk1`.
//!
//! Invariant: parsing what is shown gives the same place. Not here: whether a target is there.

use std::fmt;

use sawmill_link::carrier::LinkAddress;

use sawmill_console::exit::{Failure, Result};

/// Links to a target, and optionally one of its exports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LinkLocation {
    pub(crate) addresses: Vec<LinkAddress>,
    pub(crate) export: Option<String>,
}

impl LinkLocation {
    /// Parses `link:ADDRESS[,ADDRESS...][/EXPORT]`.
    pub(crate) fn parse(text: &str) -> Result<LinkLocation> {
        let Some(place) = text.strip_prefix("link:") else {
            return Err(Failure::usage(format!(
                "'{text}' is not a link; write link:ADDRESS[,ADDRESS...]/EXPORT, as in \
                 link:udp:10.0.0.1,udp:10.0.1.1/disk1"
            )));
        };
        // No address has a slash, so the first one ends the list.
        let (list, export) = match place.split_once('/') {
            Some((list, export)) if !export.is_empty() => (list, Some(export.to_owned())),
            Some((list, _)) => (list, None),
            None => (place, None),
        };
        Ok(LinkLocation { addresses: list_of(list)?, export })
    }

    /// The export, which is required here.
    pub(crate) fn export(&self) -> Result<&str> {
        self.export.as_deref().ok_or_else(|| {
            Failure::usage(format!(
                "'{self}' names no export; write {self}/EXPORT; `sawmill link list {self}` lists \
                the exports"
            ))
        })
    }
}

impl fmt::Display for LinkLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, address) in self.addresses.iter().enumerate() {
            write!(f, "{}{address}", if index == 0 { "link:" } else { "," })?;
        }
        self.export.as_ref().map_or(Ok(()), |export| write!(f, "/{export}"))
    }
}

/// Parses addresses with commas between them; a link has at most eight.
pub(crate) fn list_of(text: &str) -> Result<Vec<LinkAddress>> {
    const LINKS_MAX: usize = sawmill_format::link::LINKS_MAX;
    let addresses = LinkAddress::list(text)
        .map_err(|error| Failure::usage(error.to_string()).caused_by(error))?;
    match addresses.len() {
        0..=LINKS_MAX => Ok(addresses),
        count => {
            Err(Failure::usage(format!("{count} links are too many; give at most {LINKS_MAX}")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_reads_what_it_shows() {
        for text in [
            "link:udp:10.0.0.1:9700/disk1",
            "link:udp:[fe80::2%eth1]:9700,tcp:store.lan:9800,eth:eth1/disk1@position:5",
            "link:eth:eth0",
        ] {
            assert_eq!(LinkLocation::parse(text).unwrap().to_string(), text);
        }
        let short = LinkLocation::parse("link:udp:10.0.0.1/disk1").unwrap();
        assert_eq!(short.to_string(), "link:udp:10.0.0.1:9700/disk1");
    }

    #[test]
    fn what_is_no_place_is_refused_with_what_to_write() {
        let table = [
            ("udp:10.0.0.1/disk1", "link:ADDRESS"),
            ("link:", "empty"),
            ("link:10.0.0.1/disk1", "udp:, tcp:, eth: or xdp:"),
            ("link:udp:10.0.0.1:0/disk1", "port"),
            ("link:eth:eth0,eth:eth0/disk1", "twice"),
            ("link:eth:a,eth:b,eth:c,eth:d,eth:e,eth:f,eth:g,eth:h,eth:i/disk1", "at most 8"),
        ];
        for (text, word) in table {
            let message = LinkLocation::parse(text).unwrap_err().to_string();
            assert!(message.contains(word), "{text}: {message}");
        }
        let whole = LinkLocation::parse("link:eth:eth0/").unwrap();
        assert!(
            whole.export().unwrap_err().to_string().contains("sawmill link list link:eth:eth0")
        );
    }
}
