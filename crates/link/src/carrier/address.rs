//! Addresses of the ends of a link as users write them.
//!
//! | written | means |
//! |---|---|
//! | `udp:10.0.0.1` | UDP, port 9700 |
//! | `udp:10.0.0.1:9800` | another port |
//! | `udp:[fe80::2%eth1]:9700` | IPv6 stands in brackets |
//! | `tcp:store.lan:9700` | TCP, a host by its name |
//! | `udp:10.0.0.1:9700@eth1` | only over interface eth1, whatever the routes say |
//! | `eth:eth1` | raw Ethernet on interface eth1 |
//! | `xdp:eth1` | the same Ethernet frames past the kernel's network layer (AF_XDP) |
//!
//! A list has commas between its addresses. For an initiator, an address is where to reach the
//! target; for a target, where to listen (`udp:0.0.0.0`, `udp:[::]` for every address).
//!
//! Invariant: parsing what is shown gives the same address. Not here: opening anything.

use std::fmt;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::str::FromStr;

/// The port if none is given.
pub const PORT_DEFAULT: u16 = 9700;

/// The kernel's interface names are shorter than this.
const INTERFACE_NAME_BYTES: usize = 16;

/// One end of a link.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum LinkAddress {
    /// `udp:HOST[:PORT][@INTERFACE]`.
    Udp(HostPort),
    /// `tcp:HOST[:PORT][@INTERFACE]`.
    Tcp(HostPort),
    /// `eth:INTERFACE`.
    Ethernet(String),
    /// `xdp:INTERFACE`.
    Xdp(String),
}

/// A host and a port of it.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct HostPort {
    /// An address or a name; IPv6 without its brackets.
    pub host: String,
    /// The port.
    pub port: u16,
    /// The one interface to use.
    pub interface: Option<String>,
}

impl HostPort {
    /// The first address of the host. May wait for a name server.
    ///
    /// Errors: the name is unknown.
    pub fn resolve(&self) -> io::Result<SocketAddr> {
        (self.host.as_str(), self.port).to_socket_addrs()?.next().ok_or_else(|| {
            io::Error::new(
                io::ErrorKind::NotFound,
                format!("host \"{}\" has no address", self.host),
            )
        })
    }
}

impl LinkAddress {
    /// Parses a list with commas.
    ///
    /// Errors: as for one address; an empty list; a duplicate.
    pub fn list(text: &str) -> Result<Vec<Self>, AddressError> {
        let mut addresses = Vec::new();
        for entry in text.split(',') {
            let address: LinkAddress = entry.trim().parse()?;
            if addresses.contains(&address) {
                return Err(wrong(entry, "it is listed twice", "write each link once"));
            }
            addresses.push(address);
        }
        Ok(addresses)
    }
}

/// What is wrong with an address, and what to write instead.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct AddressError(String);

impl fmt::Display for AddressError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for AddressError {}

fn wrong(text: &str, what: &str, instead: &str) -> AddressError {
    AddressError(format!("link address \"{text}\": {what}; {instead}"))
}

impl FromStr for LinkAddress {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        let kinds = "write udp:HOST[:PORT], tcp:HOST[:PORT], eth:INTERFACE or xdp:INTERFACE";
        match text.split_once(':') {
            Some(("udp", written)) => Ok(LinkAddress::Udp(parse_host_port(text, written)?)),
            Some(("tcp", written)) => Ok(LinkAddress::Tcp(parse_host_port(text, written)?)),
            Some(("eth", name)) => Ok(LinkAddress::Ethernet(interface(text, name)?)),
            Some(("xdp", name)) => Ok(LinkAddress::Xdp(interface(text, name)?)),
            _ if text.is_empty() => Err(wrong(text, "it is empty", kinds)),
            _ => Err(wrong(text, "it does not start with udp:, tcp:, eth: or xdp:", kinds)),
        }
    }
}

fn parse_host_port(text: &str, written: &str) -> Result<HostPort, AddressError> {
    let (written, interface) = match written.split_once('@') {
        Some((written, name)) => (written, Some(interface(text, name)?)),
        None => (written, None),
    };
    let (host, port) = if let Some(inside) = written.strip_prefix('[') {
        let Some((host, after)) = inside.split_once(']') else {
            return Err(wrong(text, "a bracket is missing", "write [::1]:9700"));
        };
        let address = host.split_once('%').map_or(host, |(address, _)| address);
        if address.parse::<std::net::Ipv6Addr>().is_err() {
            return Err(wrong(
                text,
                "the brackets do not contain an IPv6 address",
                "write [::1]:9700",
            ));
        }
        match after.strip_prefix(':') {
            Some(port) => (host, Some(port)),
            None if after.is_empty() => (host, None),
            None => return Err(wrong(text, "no port follows the bracket", "write [::1]:9700")),
        }
    } else {
        match written.split_once(':') {
            Some((_, port)) if port.contains(':') => {
                return Err(wrong(text, "IPv6 needs brackets", "write [::1]:9700"));
            }
            Some((host, port)) => (host, Some(port)),
            None => (written, None),
        }
    };
    if host.is_empty()
        || host.contains(|character: char| character.is_whitespace() || "/[]".contains(character))
    {
        return Err(wrong(
            text,
            "it has no host",
            "write an address or a name, like 10.0.0.1:9700",
        ));
    }
    let port = match port.map(str::parse::<u16>) {
        None => PORT_DEFAULT,
        Some(Ok(port)) if port > 0 => port,
        Some(_) => {
            return Err(wrong(
                text,
                "its port is not a number from 1 to 65535",
                "write a valid one, or omit it",
            ));
        }
    };
    Ok(HostPort { host: host.to_owned(), port, interface })
}

fn interface(text: &str, name: &str) -> Result<String, AddressError> {
    let is_wrong = |character: char| {
        character.is_whitespace() || character.is_control() || "/:@".contains(character)
    };
    if name.is_empty() || name.len() >= INTERFACE_NAME_BYTES || name.contains(is_wrong) {
        let what = format!("\"{name}\" is not a valid interface name");
        return Err(wrong(text, &what, "use one that `ip link` shows, like eth0"));
    }
    Ok(name.to_owned())
}

impl fmt::Display for HostPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (open, close) = if self.host.contains(':') { ("[", "]") } else { ("", "") };
        write!(f, "{open}{}{close}:{}", self.host, self.port)?;
        self.interface.as_ref().map_or(Ok(()), |name| write!(f, "@{name}"))
    }
}

impl fmt::Display for LinkAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LinkAddress::Udp(host_port) => write!(f, "udp:{host_port}"),
            LinkAddress::Tcp(host_port) => write!(f, "tcp:{host_port}"),
            LinkAddress::Ethernet(name) => write!(f, "eth:{name}"),
            LinkAddress::Xdp(name) => write!(f, "xdp:{name}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_spelling_of_the_table_is_read_and_shown_in_full() {
        let table = [
            ("udp:10.0.0.1", "udp:10.0.0.1:9700"),
            ("udp:10.0.0.1:9800", "udp:10.0.0.1:9800"),
            ("udp:[fe80::2%eth1]:9700", "udp:[fe80::2%eth1]:9700"),
            ("udp:[::]", "udp:[::]:9700"),
            ("tcp:store.lan:9700", "tcp:store.lan:9700"),
            ("udp:10.0.0.1:9700@eth1", "udp:10.0.0.1:9700@eth1"),
            ("tcp:[::1]@eth1", "tcp:[::1]:9700@eth1"),
            ("eth:eth1", "eth:eth1"),
            ("xdp:eth1", "xdp:eth1"),
        ];
        for (written, display) in table {
            let address: LinkAddress = written.parse().expect(written);
            assert_eq!(address.to_string(), display);
            assert_eq!(display.parse().as_ref(), Ok(&address), "what is shown reads back");
        }
    }

    #[test]
    fn an_invalid_address_is_refused_with_what_is_wrong_and_what_to_write() {
        let table = [
            ("", "it is empty"),
            ("10.0.0.1", "does not start with"),
            ("UDP:10.0.0.1", "does not start with"),
            ("udp:", "has no host"),
            ("udp::9700", "has no host"),
            ("udp:a b", "has no host"),
            ("udp:::1", "IPv6 needs brackets"),
            ("udp:[::1", "a bracket is missing"),
            ("udp:[::1]9700", "no port follows"),
            ("udp:[10.0.0.1]:9700", "do not contain an IPv6 address"),
            ("tcp:host:0", "its port"),
            ("tcp:host:65536", "its port"),
            ("tcp:host:", "its port"),
            ("tcp:host@", "\"\" is not a valid interface"),
            ("eth:", "\"\" is not a valid interface"),
            ("eth:a/b", "\"a/b\" is not"),
            ("xdp:", "\"\" is not a valid interface"),
            ("eth:a-name-longer-than-any", "is not a valid interface"),
        ];
        for (written, what) in table {
            let error = written.parse::<LinkAddress>().expect_err(written).to_string();
            assert!(error.contains(what) && error.contains(';'), "{written:?}: {error}");
        }
    }

    #[test]
    fn a_list_holds_each_link_once() {
        let list = LinkAddress::list("udp:10.0.0.1, eth:eth1,tcp:[::1]").expect("three");
        assert_eq!(list.len(), 3);
        for wrong in ["", "udp:a,", "eth:a,eth:a", "udp:a,udp:a:9700"] {
            assert!(LinkAddress::list(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn an_address_resolves_without_a_name_server() {
        let host_port = |text: &str| match text.parse().expect(text) {
            LinkAddress::Udp(host_port) | LinkAddress::Tcp(host_port) => host_port,
            LinkAddress::Ethernet(_) | LinkAddress::Xdp(_) => panic!("no host"),
        };
        assert_eq!(
            host_port("udp:127.0.0.1").resolve().expect("known"),
            "127.0.0.1:9700".parse().unwrap()
        );
        assert_eq!(host_port("tcp:[::1]:7").resolve().expect("known"), "[::1]:7".parse().unwrap());
    }
}
