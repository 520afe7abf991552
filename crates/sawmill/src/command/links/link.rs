//! `sawmill link`: keys, discovery, exports and link status.
//!
//! Invariant: discovery proves nothing: an answer does not make its sender a trusted target.
//!
//! Not here: exports and connections of a running end (`target`, `attach`), its status document
//! (`link::end_report`), packets (`sawmill_link`).

use std::collections::BTreeMap;
use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::{Args, Subcommand};
use sawmill_format::link::greeting::{NAME_BYTES_MAX, Seek};
use sawmill_format::link::{HEADER_BYTES, Packet, PacketKind};
use sawmill_link::carrier::address::AddressError;
use sawmill_link::carrier::{Burst, LinkAddress, Peer, reach};
use sawmill_link::initiator::InitiatorOptions;
use sawmill_link::legible;
use sawmill_link::session::{PreSharedKey, unguessable};
use serde::Serialize;

use crate::command::Context;
use crate::link::end_report::{
    self, CacheReport, ConnectionReport, EndReport, LinkReport, RateReport,
};
use crate::link::location::LinkLocation;
use crate::link::remote::{Remote, own_name};
use crate::link::{KeyOptions, key_failed};
use sawmill_console::exit::{Exit, Failure, Result};
use sawmill_console::output;
use sawmill_console::units::{
    exact_duration, human_count, human_duration, human_size, parse_duration,
};

/// The time for answers, unless the user sets one: enough to repeat a question three times.
const ANSWERS_TIME_DEFAULT: Duration = Duration::from_secs(1);
/// The time over which rates are measured, unless the user sets one.
const RATES_TIME_DEFAULT: Duration = Duration::from_secs(1);
/// Interval at which a question is repeated, because it may get lost.
const SEEK_EVERY: Duration = Duration::from_millis(250);
/// The longest answer in bytes; a longer packet is cut and then ignored.
const FOUND_BYTES_MAX: usize = 2048;

/// Make keys for links, find targets, list their exports, and show link status.
#[derive(Args)]
pub(in crate::command) struct Arguments {
    #[command(subcommand)]
    action: Action,
}

#[derive(Subcommand)]
enum Action {
    /// Make a key for both ends of a link: a new file that only its owner can read.
    Key(Key),
    /// Find targets. Discovery replies are unauthenticated: they prove nothing.
    Find(FindArguments),
    /// List the exports of a target.
    List(List),
    /// Show the links of this user's running `target` and `attach` processes.
    Status(Status),
}

#[derive(Args)]
struct Key {
    /// The file to create. An existing file is never overwritten.
    #[arg(value_name = "FILE")]
    file: PathBuf,
}

#[derive(Args)]
struct FindArguments {
    /// Ask by raw Ethernet on this interface (needs CAP_NET_RAW). May be repeated.
    #[arg(long, value_name = "INTERFACE")]
    interface: Vec<String>,

    /// Ask by UDP at this address, HOST[:PORT][@INTERFACE], which may be a broadcast address. May
    /// be repeated. Without --udp and --interface, the default is a broadcast (255.255.255.255) on
    /// every interface.
    #[arg(long, value_name = "ADDRESS", value_parser = parse_query_address)]
    udp: Vec<QueryAddress>,

    /// Find only the target with this name.
    #[arg(long, value_name = "NAME")]
    name: Option<String>,

    /// How long to wait for answers.
    #[arg(long, value_name = "DURATION", value_parser = parse_duration,
          default_value = exact_duration(ANSWERS_TIME_DEFAULT))]
    wait: Duration,
}

/// A UDP address to ask.
#[derive(Clone, Debug, PartialEq, Eq)]
struct QueryAddress {
    to: SocketAddr,
    /// Through this interface, whatever the routes say.
    interface: Option<String>,
}

fn parse_query_address(text: &str) -> Result<QueryAddress, String> {
    let text = if text.starts_with("udp:") { text.to_owned() } else { format!("udp:{text}") };
    let read = text.parse().map_err(|error: AddressError| error.to_string())?;
    let LinkAddress::Udp(place) = read else {
        return Err(format!("'{text}' is not a UDP address; write HOST[:PORT][@INTERFACE]"));
    };
    let to = place.resolve().map_err(|error| format!("'{text}': {error}"))?;
    Ok(QueryAddress { to, interface: place.interface })
}

/// Broadcasts on each interface. The kernel alone would choose the default route's interface, or
/// none without a default route.
fn every_interface() -> Vec<QueryAddress> {
    const UP_AND_BROADCAST: u32 = 0x1 | 0x2;
    let to = SocketAddr::from(([255; 4], sawmill_link::carrier::address::PORT_DEFAULT));
    let hears = |path: &Path| {
        let flags = std::fs::read_to_string(path.join("flags")).unwrap_or_default();
        let flags = u32::from_str_radix(flags.trim().trim_start_matches("0x"), 16);
        flags.is_ok_and(|flags| flags & UP_AND_BROADCAST == UP_AND_BROADCAST)
    };
    let interfaces = std::fs::read_dir("/sys/class/net").into_iter().flatten().flatten();
    let interfaces = interfaces.filter(|entry| hears(&entry.path()));
    let by = |entry: std::fs::DirEntry| QueryAddress {
        to,
        interface: entry.file_name().into_string().ok(),
    };
    let all: Vec<QueryAddress> = interfaces.map(by).collect();
    if all.is_empty() { vec![QueryAddress { to, interface: None }] } else { all }
}

#[derive(Args)]
struct List {
    /// The target: link:ADDRESS[,ADDRESS...].
    #[arg(value_name = "LINK")]
    link: String,

    #[command(flatten)]
    key: KeyOptions,
}

#[derive(Args)]
struct Status {
    /// Measure rates over this long; 0: no rates.
    #[arg(long, value_name = "DURATION", value_parser = parse_duration,
          default_value = exact_duration(RATES_TIME_DEFAULT))]
    over: Duration,
}

pub(in crate::command) fn run(context: &Context, arguments: &Arguments) -> Result<Exit> {
    match &arguments.action {
        Action::Key(key) => {
            PreSharedKey::random()
                .and_then(|secret| secret.write(&key.file))
                .map_err(key_failed)?;
            let file = key.file.display().to_string();
            match context.json {
                true => output::json(&serde_json::json!({ "key_file": file }))?,
                false => output::line(&format!(
                    "{file}: new key; copy it to the other end over a secure channel"
                ))?,
            }
            Ok(Exit::Ok)
        }
        Action::Find(action) => find(context, action),
        Action::List(action) => list(context, action),
        Action::Status(action) => status(context, action),
    }
}

/// A target that answered.
#[derive(Serialize)]
struct TargetEntry {
    name: String,
    /// The id of this run of the target.
    instance: String,
    /// The address it answered from, in the form that `attach` takes.
    address: String,
    sealed: bool,
}

fn find(context: &Context, arguments: &FindArguments) -> Result<Exit> {
    let name = arguments.name.as_deref().unwrap_or_default();
    if name.len() > NAME_BYTES_MAX {
        return Err(Failure::usage(format!(
            "--name: a target's name has at most {NAME_BYTES_MAX} bytes"
        )));
    }
    let everywhere = arguments.interface.is_empty() && arguments.udp.is_empty();
    let at = if everywhere { every_interface() } else { arguments.udp.clone() };
    // Answers must repeat it, so that nobody answers who has not seen the question.
    let token = unguessable()();
    let question = question(token, name)?;
    let deadline = Instant::now() + arguments.wait;
    let (mut found, mut failed, mut asking) = (BTreeMap::new(), None, 0);
    std::thread::scope(|scope| {
        let question = &question;
        let by_udp =
            at.iter().map(|at| scope.spawn(move || seek_udp(at, question, token, deadline)));
        let by_ethernet = arguments
            .interface
            .iter()
            .map(|name| scope.spawn(move || seek_ethernet(name, question, token, deadline)));
        let seekers: Vec<_> = by_udp.collect::<Vec<_>>().into_iter().chain(by_ethernet).collect();
        for seeker in seekers {
            let panicked = |_| {
                let text = "a thread that looked for targets panicked; report this bug \
                            with the log";
                Failure::new(Exit::Internal, text)
            };
            match seeker.join().map_err(panicked)? {
                Ok(all) => {
                    // Questions are repeated, so a target answers more than once: the map keeps one
                    // answer.
                    asking += 1;
                    found.extend(
                        all.into_iter().map(|one| ((one.name.clone(), one.address.clone()), one)),
                    );
                }
                // Some of the interfaces may lead nowhere.
                Err(failure) if everywhere => failed = Some(failure),
                Err(failure) => return Err(failure),
            }
        }
        Ok::<(), Failure>(())
    })?;
    if let Some(failure) = failed.filter(|_| asking == 0) {
        return Err(failure);
    }
    let entries: Vec<TargetEntry> = found.into_values().collect();
    if context.json {
        output::json(&entries)?;
        return Ok(Exit::Ok);
    }
    if entries.is_empty() {
        output::line("no target answered")?;
        return Ok(Exit::Ok);
    }
    output::table(
        &["target", "address", "security", "instance"],
        entries.into_iter().map(row_of).collect(),
    )?;
    Ok(Exit::Ok)
}

/// The name is unauthenticated: it must not contain terminal control sequences.
fn row_of(entry: TargetEntry) -> Vec<String> {
    let sealed = if entry.sealed { "key" } else { "insecure" }.to_owned();
    vec![legible(&entry.name).into_owned(), entry.address, sealed, entry.instance]
}

fn question(token: u64, name: &str) -> Result<Vec<u8>> {
    // Question and answer have one form. Instance and security are those of a target: whoever asks
    // has none.
    let seek = Seek { token, instance: [0; 16], sealed: false, name: name.to_owned() };
    let body = seek.encode().map_err(|error| Failure::usage(error.to_string()).caused_by(error))?;
    let mut packet = vec![0; HEADER_BYTES];
    packet.extend_from_slice(&body);
    let length = packet.len() as u32;
    Packet { kind: PacketKind::Seek, length, connection: 0, link: 0, number: 0 }
        .encode(&mut packet);
    Ok(packet)
}

/// The answer to our question in a packet, if there is one.
fn found_in(packet: &[u8], token: u64, address: String) -> Option<TargetEntry> {
    let header = Packet::decode(packet).ok().filter(|header| header.kind == PacketKind::Found)?;
    let body = packet.get(HEADER_BYTES..header.length as usize)?;
    let seek = Seek::decode(body).ok().filter(|seek| seek.token == token)?;
    let instance = seek.instance.iter().map(|byte| format!("{byte:02x}")).collect();
    Some(TargetEntry { name: seek.name, instance, address, sealed: seek.sealed })
}

fn seek_udp(
    at: &QueryAddress,
    question: &[u8],
    token: u64,
    deadline: Instant,
) -> Result<Vec<TargetEntry>> {
    let (to, by) =
        (at.to, at.interface.as_ref().map(|name| format!("@{name}")).unwrap_or_default());
    let cannot =
        |error: io::Error| Failure::io(format!("cannot send a question to udp:{to}{by}"), &error);
    let any = if to.is_ipv6() { "[::]:0" } else { "0.0.0.0:0" };
    let socket = UdpSocket::bind(any).map_err(cannot)?;
    socket.set_broadcast(true).map_err(cannot)?;
    if let Some(name) = &at.interface {
        sawmill_sys::net::bind_to_interface(&socket, name).map_err(cannot)?;
    }
    let (mut found, mut packet, mut next) = (Vec::new(), [0; FOUND_BYTES_MAX], Instant::now());
    loop {
        let now = Instant::now();
        if now >= deadline {
            return Ok(found);
        }
        if now >= next {
            next = now + SEEK_EVERY;
            socket.send_to(question, to).map_err(cannot)?;
        }
        // Not zero, which the socket refuses.
        let wait = deadline.min(next).saturating_duration_since(now).max(Duration::from_millis(1));
        socket.set_read_timeout(Some(wait)).map_err(cannot)?;
        // Nothing yet, or nothing listens there; the next question may be answered.
        if let Ok((bytes, from)) = socket.recv_from(&mut packet) {
            found.extend(found_in(&packet[..bytes], token, format!("udp:{from}")));
        }
    }
}

fn seek_ethernet(
    interface: &str,
    question: &[u8],
    token: u64,
    deadline: Instant,
) -> Result<Vec<TargetEntry>> {
    let address = format!("eth:{interface}");
    let read: LinkAddress =
        address.parse().map_err(|error| Failure::caused(Exit::Usage, "--interface", error))?;
    let cannot = |error: &io::Error| Failure::io("cannot ask", error);
    let (mut carrier, everybody) = reach(&read, Duration::ZERO).map_err(|error| cannot(&error))?;
    let mut burst = Burst::new(1, question.len());
    // The burst has room for exactly this.
    let _ = burst.push(question);
    let (mut found, mut next) = (Vec::new(), Instant::now());
    loop {
        let now = Instant::now();
        if now >= deadline {
            return Ok(found);
        }
        if now >= next {
            next = now + SEEK_EVERY;
            carrier.sender.send(&everybody, &burst, 0).map_err(|error| cannot(&error))?;
        }
        let wait = deadline.min(next).saturating_duration_since(now);
        let mut each = |peer: &Peer, packet: &mut [u8]| {
            // `attach` finds the target again through its interface.
            tracing::debug!("{address}: packet from {peer:?}");
            found.extend(found_in(packet, token, address.clone()));
        };
        carrier.receiver.receive(Some(wait), false, &mut each).map_err(|error| cannot(&error))?;
    }
}

/// One export.
#[derive(Serialize)]
struct ExportEntry {
    name: String,
    size_bytes: u64,
}

fn list(context: &Context, arguments: &List) -> Result<Exit> {
    let location = LinkLocation::parse(&arguments.link)?;
    let options = InitiatorOptions { name: own_name(), ..InitiatorOptions::default() };
    let remote = Remote::connect(&location, arguments.key.security()?, options)?;
    let exports = remote.exports()?;
    if exports.left_out > 0 {
        tracing::warn!("{} more exports do not fit into the target's answer", exports.left_out);
    }
    let exports =
        exports.named.into_iter().map(|(name, size_bytes)| ExportEntry { name, size_bytes });
    match context.json {
        true => output::json(&exports.collect::<Vec<_>>())?,
        false => {
            let rows = exports.map(|export| {
                vec![legible(&export.name).into_owned(), human_size(export.size_bytes)]
            });
            output::table(&["export", "size"], rows.collect())?;
        }
    }
    Ok(Exit::Ok)
}

fn status(context: &Context, arguments: &Status) -> Result<Exit> {
    let folder = context.paths.links_folder()?;
    let (mut ends, since) = (end_report::query_all(&folder), Instant::now());
    if !arguments.over.is_zero() && !ends.is_empty() {
        std::thread::sleep(arguments.over);
        let before = std::mem::replace(&mut ends, end_report::query_all(&folder));
        measure(&before, &mut ends, since.elapsed());
    }
    if context.json {
        output::json(&ends)?;
        return Ok(Exit::Ok);
    }
    if ends.is_empty() {
        output::line("no links of this user run here")?;
        return Ok(Exit::Ok);
    }
    let header = [
        "end",
        "process",
        "peer",
        "link",
        "state",
        "sends",
        "receives",
        "lost",
        "again",
        "rtt",
        "places in use",
        "waiting",
        "packet",
    ];
    output::table(&header, ends.iter().flat_map(rows_of).collect())?;
    for cache in ends.iter().filter_map(|end| end.cache.as_ref()) {
        output::line(&cache_line(cache))?;
    }
    Ok(Exit::Ok)
}

/// Sets the rate of each link since `before`. A link that began after it has no rate.
fn measure(before: &[EndReport], now: &mut [EndReport], over: Duration) {
    let a_second = |new: u64, old: u64| {
        // A new connection counts from zero again, below its old number.
        (u128::from(new.saturating_sub(old)) * 1000 / over.as_millis().max(1)) as u64
    };
    for end in now {
        let Some(old_end) = before.iter().find(|old| old.pid == end.pid) else { continue };
        for connection in &mut end.connections {
            let same =
                |old: &&ConnectionReport| old.id == connection.id && old.peer == connection.peer;
            // A connection that is new has no earlier numbers to compare with.
            let Some(old) = old_end.connections.iter().find(same) else { continue };
            for (link, old) in connection.links.iter_mut().zip(&old.links) {
                link.rate = Some(RateReport {
                    sent_bytes_per_s: a_second(link.sent_bytes, old.sent_bytes),
                    received_bytes_per_s: a_second(link.received_bytes, old.received_bytes),
                    sent_packets_per_s: a_second(link.sent_packets, old.sent_packets),
                    received_packets_per_s: a_second(link.received_packets, old.received_packets),
                });
            }
        }
    }
}

fn rows_of(end: &EndReport) -> Vec<Vec<String>> {
    let first = |peer: &str| vec![end.kind.clone(), end.pid.to_string(), peer.to_owned()];
    let mut rows = Vec::new();
    for connection in &end.connections {
        // An attachment has one export, the last part of its name.
        let export = end.name.rsplit_once('/').filter(|_| end.kind == "attach");
        let peer = export
            .map_or(connection.peer.clone(), |(_, name)| format!("{}/{name}", connection.peer));
        let places = match connection.places {
            0 => "-".to_owned(),
            places => format!("{}/{places}", places - connection.places_free.min(places)),
        };
        for link in &connection.links {
            let mut row = first(&peer);
            row.extend(cells_of(link));
            row.extend([
                places.clone(),
                human_count(connection.waiting as u64),
                link.packet_bytes.to_string(),
            ]);
            rows.push(row);
        }
    }
    if rows.is_empty() {
        let mut row = first("none");
        row.extend(vec!["-".to_owned(); 10]);
        rows.push(row);
    }
    rows
}

/// The columns from `link` to `rtt`.
fn cells_of(link: &LinkReport) -> [String; 7] {
    let lost_percent = link.lost_packets as f64 * 100.0 / link.sent_packets.max(1) as f64;
    let rate = |bytes: fn(&RateReport) -> u64, packets: fn(&RateReport) -> u64| match &link.rate {
        Some(rate) => {
            format!("{}/s, {} packets/s", human_size(bytes(rate)), human_count(packets(rate)))
        }
        None => "-".to_owned(),
    };
    [
        link.address.clone().unwrap_or_else(|| link.link.to_string()),
        format!("{} {}", link.state, human_duration(Duration::from_millis(link.state_ms))),
        rate(|rate| rate.sent_bytes_per_s, |rate| rate.sent_packets_per_s),
        rate(|rate| rate.received_bytes_per_s, |rate| rate.received_packets_per_s),
        format!("{} ({lost_percent:.2} %)", human_count(link.lost_packets)),
        human_count(link.sent_again),
        if link.rtt_us == 0 { "-".to_owned() } else { format!("{} us", human_count(link.rtt_us)) },
    ]
}

fn cache_line(cache: &CacheReport) -> String {
    format!(
        "cache: {} dirty; {} written by users, {} sent, {} saved by {} partial writes; {} fetched",
        human_size(cache.dirty_bytes),
        human_size(cache.written_by_user_bytes),
        human_size(cache.sent_bytes),
        human_size(cache.saved_bytes),
        human_count(cache.partial_writes),
        human_size(cache.fetched_bytes)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_count_what_passed_meanwhile_and_not_what_passed_before() {
        let end = |pid, id: &str, sent_bytes| {
            let link = LinkReport {
                sent_bytes,
                received_packets: sent_bytes / 100,
                ..LinkReport::default()
            };
            let connection =
                ConnectionReport { id: id.into(), links: vec![link], ..Default::default() };
            EndReport { pid, connections: vec![connection], ..EndReport::default() }
        };
        let second = Duration::from_secs(1);
        let measured = |before: &EndReport, mut now: EndReport, over| {
            measure(std::slice::from_ref(before), std::slice::from_mut(&mut now), over);
            now.connections[0].links[0].rate
        };
        let old = end(1, "a", 1000);
        let rate = measured(&old, end(1, "a", 5000), second * 2);
        let expected = RateReport {
            sent_bytes_per_s: 2000,
            received_packets_per_s: 20,
            ..RateReport::default()
        };
        assert_eq!(rate, Some(expected));
        assert_eq!(measured(&old, end(2, "a", 5000), second), None, "another process");
        assert_eq!(measured(&old, end(1, "b", 5000), second), None, "another connection");
        assert_eq!(
            measured(&old, end(1, "a", 10), second),
            Some(RateReport::default()),
            "it connected again"
        );
    }

    #[test]
    fn a_place_to_ask_is_written_as_any_address_of_udp() {
        let at = |text: &str| parse_query_address(text).map(|at| (at.to.to_string(), at.interface));
        assert_eq!(at("10.0.0.1"), Ok(("10.0.0.1:9700".into(), None)));
        assert_eq!(
            at("udp:10.0.0.255:9800@eth1"),
            Ok(("10.0.0.255:9800".into(), Some("eth1".into())))
        );
        assert!(at("tcp:10.0.0.1").is_err() && at("10.0.0.1:x").is_err());
        let all = every_interface();
        assert!(
            !all.is_empty() && all.iter().all(|at| at.to.to_string() == "255.255.255.255:9700")
        );
    }

    #[test]
    fn a_name_that_a_stranger_chose_is_no_command_to_a_terminal() {
        let name = "\x1b[2J\x1b]0;title\x07\u{202e}erots".into();
        let row = row_of(TargetEntry {
            name,
            instance: "ab".into(),
            address: "udp:10.0.0.1".into(),
            sealed: true,
        });
        assert_eq!(row[0], "\\u{1b}[2J\\u{1b}]0;title\\u{7}\\u{202e}erots");
        assert_eq!(row[1..], ["udp:10.0.0.1", "key", "ab"]);
    }

    #[test]
    fn an_answer_to_another_question_is_none() {
        let packet = question(7, "store").unwrap();
        assert!(found_in(&packet, 7, String::new()).is_none(), "a question is no answer");
        let seek = Seek { token: 7, instance: [0xab; 16], sealed: true, name: "store".into() };
        let mut answer = vec![0; HEADER_BYTES];
        answer.extend(seek.encode().unwrap());
        let length = answer.len() as u32;
        Packet { kind: PacketKind::Found, length, connection: 0, link: 0, number: 0 }
            .encode(&mut answer);
        assert!(found_in(&answer, 8, String::new()).is_none());
        let found = found_in(&answer, 7, "udp:10.0.0.1:9700".into()).unwrap();
        assert!(found.sealed && found.name == "store" && found.instance.starts_with("abab"));
        assert!(found_in(&answer[..30], 7, String::new()).is_none());
    }
}
