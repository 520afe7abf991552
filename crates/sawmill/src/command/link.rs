//! `sawmill link`: keys, who is there, what is shown, how links do.
//!
//! Invariant: what is found proves nothing: a name that answered is an answer, not a target that is trusted.

use std::collections::BTreeMap;
use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::{Args, Subcommand};
use sawmill_format::link::greeting::{NAME_BYTES_MAX, Seek};
use sawmill_format::link::{HEADER_BYTES, Packet, PacketKind};
use sawmill_link::carrier::{Batch, LinkAddress, Peer, reach};
use sawmill_link::initiator::InitiatorOptions;
use sawmill_link::session::{PreSharedKey, unguessable};
use serde::Serialize;

use super::Context;
use crate::doors::plan::resolve;
use crate::exit::{Exit, Failure, Result};
use crate::link::KeyOptions;
use crate::link::place::LinkPlace;
use crate::link::remote::{Remote, own_name};
use crate::link::told::{self, CacheTold, ConnectionTold, EndTold, LinkTold};
use crate::output;
use crate::units::{human_count, human_size, parse_duration};

/// How often a question is said again that may have got lost.
const SEEK_EVERY: Duration = Duration::from_millis(250);
/// The longest answer.
const FOUND_BYTES_MAX: usize = 2048;

/// Make keys for links, find targets, list what they show, and see how links do.
#[derive(Args)]
pub(super) struct Arguments {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// Make a key: a new file that only its owner can read, for both ends of a link.
    Key(Key),
    /// Ask who is there. Any machine of the network can answer: what is found proves nothing.
    Find(Find),
    /// List what a target shows.
    List(List),
    /// Show how the links of this user's running `target` and `attach` do.
    Status(Status),
}

#[derive(Args)]
struct Key {
    /// The file to make. One that is there stays as it is.
    #[arg(value_name = "FILE")]
    file: PathBuf,
}

#[derive(Args)]
struct Find {
    /// Ask by raw Ethernet on this interface (needs CAP_NET_RAW); as often as there are.
    #[arg(long, value_name = "INTERFACE")]
    interface: Vec<String>,

    /// Ask by UDP at this address, HOST:PORT, which may be a broadcast address; as often as there are.
    /// Without any question asked for: 255.255.255.255:9700.
    #[arg(long, value_name = "ADDRESS", value_parser = resolve)]
    udp: Vec<SocketAddr>,

    /// Only the target of this name.
    #[arg(long, value_name = "NAME")]
    name: Option<String>,

    /// How long to wait for answers.
    #[arg(long, value_name = "DURATION", value_parser = parse_duration, default_value = "1s")]
    wait: Duration,
}

#[derive(Args)]
struct List {
    /// Where: link:ADDRESS[,ADDRESS...].
    #[arg(value_name = "LINK")]
    link: String,

    #[command(flatten)]
    key: KeyOptions,
}

#[derive(Args)]
struct Status {
    /// Measure rates over so long; 0: none.
    #[arg(long, value_name = "DURATION", value_parser = parse_duration, default_value = "1s")]
    over: Duration,
}

pub(super) fn run(context: &Context, arguments: &Arguments) -> Result<Exit> {
    match &arguments.what {
        What::Key(key) => {
            PreSharedKey::random()?.write(&key.file)?;
            let file = key.file.display().to_string();
            match context.json {
                true => output::json(&serde_json::json!({ "key_file": file }))?,
                false => {
                    output::line(&format!("{file}: a new key; bring it to the other end unseen by others"))?
                }
            }
            Ok(Exit::Ok)
        }
        What::Find(asked) => find(context, asked),
        What::List(asked) => list(context, asked),
        What::Status(asked) => status(context, asked),
    }
}

/// A target that answered.
#[derive(Serialize)]
struct Found {
    name: String,
    /// This run of it.
    instance: String,
    /// Where it answered from, as `attach` takes it.
    address: String,
    sealed: bool,
}

fn find(context: &Context, asked: &Find) -> Result<Exit> {
    let name = asked.name.as_deref().unwrap_or_default();
    if name.len() > NAME_BYTES_MAX {
        return Err(Failure::usage(format!("--name: a target's name has at most {NAME_BYTES_MAX} bytes")));
    }
    let everywhere = asked.interface.is_empty() && asked.udp.is_empty();
    let all = everywhere.then(|| SocketAddr::from(([255; 4], sawmill_link::carrier::address::DEFAULT_PORT)));
    let token = unguessable()();
    let question = question(token, name)?;
    let deadline = Instant::now() + asked.wait;
    let mut found = BTreeMap::new();
    std::thread::scope(|scope| {
        let question = &question;
        let by_udp = asked.udp.iter().chain(&all).map(|to| {
            let to = *to;
            scope.spawn(move || seek_udp(to, question, token, deadline))
        });
        let by_ethernet = asked
            .interface
            .iter()
            .map(|name| scope.spawn(move || seek_ethernet(name, question, token, deadline)));
        let seekers: Vec<_> = by_udp.chain(by_ethernet.collect::<Vec<_>>()).collect();
        for seeker in seekers {
            let died = |_| Failure::new(Exit::Internal, "a thread that asked has died");
            for one in seeker.join().map_err(died)?? {
                found.insert((one.name.clone(), one.address.clone()), one);
            }
        }
        Ok::<(), Failure>(())
    })?;
    let found: Vec<Found> = found.into_values().collect();
    if context.json {
        output::json(&found)?;
        return Ok(Exit::Ok);
    }
    if found.is_empty() {
        output::line("no target answered")?;
        return Ok(Exit::Ok);
    }
    let sealed = |sealed| if sealed { "key" } else { "insecure" }.to_owned();
    let rows = found.into_iter().map(|one| vec![one.name, one.address, sealed(one.sealed), one.instance]);
    output::table(&["target", "address", "security", "instance"], rows.collect())?;
    Ok(Exit::Ok)
}

fn question(token: u64, name: &str) -> Result<Vec<u8>> {
    let seek = Seek { token, instance: [0; 16], sealed: false, name: name.to_owned() };
    let body = seek.encode().map_err(|error| Failure::usage(error.to_string()))?;
    let mut packet = vec![0; HEADER_BYTES];
    packet.extend_from_slice(&body);
    let length = packet.len() as u32;
    Packet { kind: PacketKind::Seek, length, connection: 0, link: 0, number: 0 }.encode(&mut packet);
    Ok(packet)
}

/// The answer to our question that a packet holds.
fn found_in(packet: &[u8], token: u64, address: String) -> Option<Found> {
    let header = Packet::decode(packet).ok().filter(|header| header.kind == PacketKind::Found)?;
    let body = packet.get(HEADER_BYTES..header.length as usize)?;
    let seek = Seek::decode(body).ok().filter(|seek| seek.token == token)?;
    let instance = seek.instance.iter().map(|byte| format!("{byte:02x}")).collect();
    Some(Found { name: seek.name, instance, address, sealed: seek.sealed })
}

fn seek_udp(to: SocketAddr, question: &[u8], token: u64, deadline: Instant) -> Result<Vec<Found>> {
    let cannot = |error: io::Error| Failure::io(format!("cannot ask at udp:{to}"), &error);
    let any = if to.is_ipv6() { "[::]:0" } else { "0.0.0.0:0" };
    let socket = UdpSocket::bind(any).map_err(cannot)?;
    socket.set_broadcast(true).map_err(cannot)?;
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
        let wait = deadline.min(next).saturating_duration_since(now).max(Duration::from_millis(1));
        socket.set_read_timeout(Some(wait)).map_err(cannot)?;
        // Nothing yet, or nobody listens there: the next question may be answered.
        if let Ok((bytes, from)) = socket.recv_from(&mut packet) {
            found.extend(found_in(&packet[..bytes], token, format!("udp:{from}")));
        }
    }
}

fn seek_ethernet(interface: &str, question: &[u8], token: u64, deadline: Instant) -> Result<Vec<Found>> {
    let address = format!("eth:{interface}");
    let read: LinkAddress =
        address.parse().map_err(|error| Failure::usage(format!("--interface: {error}")))?;
    let cannot = |error: &io::Error| Failure::io("cannot ask", error);
    let (mut carrier, everybody) = reach(&read, Duration::ZERO).map_err(|error| cannot(&error))?;
    let mut batch = Batch::new(1, question.len());
    // It has room for just this.
    let _ = batch.push(question);
    let (mut found, mut next) = (Vec::new(), Instant::now());
    loop {
        let now = Instant::now();
        if now >= deadline {
            return Ok(found);
        }
        if now >= next {
            next = now + SEEK_EVERY;
            carrier.sender.send(&everybody, &batch, 0).map_err(|error| cannot(&error))?;
        }
        let wait = deadline.min(next).saturating_duration_since(now);
        let mut each = |peer: &Peer, packet: &mut [u8]| {
            // `attach` finds it again by its interface.
            tracing::debug!("{address}: {peer:?} says something");
            found.extend(found_in(packet, token, address.clone()));
        };
        carrier.receiver.receive(Some(wait), false, &mut each).map_err(|error| cannot(&error))?;
    }
}

/// One export.
#[derive(Serialize)]
struct Shown {
    name: String,
    size_bytes: u64,
}

fn list(context: &Context, asked: &List) -> Result<Exit> {
    let place = LinkPlace::parse(&asked.link)?;
    let options = InitiatorOptions { name: own_name(), ..InitiatorOptions::default() };
    let remote = Remote::connect(&place, asked.key.security()?, options)?;
    let exports = remote.exports()?;
    let exports = exports.into_iter().map(|(name, size_bytes)| Shown { name, size_bytes });
    match context.json {
        true => output::json(&exports.collect::<Vec<_>>())?,
        false => {
            let rows = exports.map(|export| vec![export.name, human_size(export.size_bytes)]);
            output::table(&["export", "size"], rows.collect())?;
        }
    }
    Ok(Exit::Ok)
}

/// A link with how much it sends at present.
#[derive(Serialize)]
struct Measured<'a> {
    #[serde(flatten)]
    told: &'a EndTold,
    /// Bytes sent a second, by connection and link.
    sent_bytes_per_s: Vec<Vec<u64>>,
}

fn status(context: &Context, asked: &Status) -> Result<Exit> {
    let folder = context.places.links_folder()?;
    let (before, since) = (told::ask_all(&folder), Instant::now());
    let all = match asked.over.is_zero() || before.is_empty() {
        true => before.clone(),
        false => {
            std::thread::sleep(asked.over);
            told::ask_all(&folder)
        }
    };
    let over = since.elapsed();
    let ends: Vec<Measured> =
        all.iter().map(|told| Measured { sent_bytes_per_s: rates(&before, told, over), told }).collect();
    if context.json {
        output::json(&ends)?;
        return Ok(Exit::Ok);
    }
    if ends.is_empty() {
        output::line("no links of this user run here")?;
        return Ok(Exit::Ok);
    }
    let header = ["end", "process", "peer", "link", "state", "sends", "lost", "rtt", "credits", "packet"];
    output::table(&header, ends.iter().flat_map(rows_of).collect())?;
    for cache in ends.iter().filter_map(|end| end.told.cache.as_ref()) {
        output::line(&cache_line(cache))?;
    }
    Ok(Exit::Ok)
}

/// How much each link of each connection sent a second, since `before`.
fn rates(before: &[EndTold], now: &EndTold, over: Duration) -> Vec<Vec<u64>> {
    let old = before.iter().find(|old| old.pid == now.pid);
    let of_link = |connection: usize, link: usize, told: &LinkTold| {
        let old = old.and_then(|old| old.connections.get(connection)?.links.get(link));
        let sent = told.sent_bytes.saturating_sub(old.map_or(told.sent_bytes, |old| old.sent_bytes));
        (u128::from(sent) * 1000 / over.as_millis().max(1)) as u64
    };
    let of_connection = |(index, connection): (usize, &ConnectionTold)| {
        connection.links.iter().enumerate().map(|(link, told)| of_link(index, link, told)).collect()
    };
    now.connections.iter().enumerate().map(of_connection).collect()
}

fn rows_of(end: &Measured<'_>) -> Vec<Vec<String>> {
    let told = end.told;
    let first = |peer: &str| vec![told.kind.clone(), told.pid.to_string(), peer.to_owned()];
    let mut rows = Vec::new();
    for (connection, rates) in told.connections.iter().zip(&end.sent_bytes_per_s) {
        let credits = match connection.slots {
            0 => "-".to_owned(),
            slots => format!("{}/{slots}", connection.slots_free),
        };
        for (index, (link, rate)) in connection.links.iter().zip(rates).enumerate() {
            let lost = link.lost_packets as f64 * 100.0 / link.sent_packets.max(1) as f64;
            let mut row = first(&connection.peer);
            row.extend([
                link.address.clone().unwrap_or_else(|| index.to_string()),
                link.state.clone(),
                format!("{}/s", human_size(*rate)),
                format!("{} ({lost:.2} %)", human_count(link.lost_packets)),
                format!("{} us", human_count(link.rtt_us)),
                credits.clone(),
                link.packet_bytes.to_string(),
            ]);
            rows.push(row);
        }
        if connection.links.is_empty() {
            let mut row = first(&connection.peer);
            row.extend(["-", "down", "-", "-", "-", "-", "-"].map(str::to_owned));
            rows.push(row);
        }
    }
    if rows.is_empty() {
        let mut row = first("nobody");
        row.extend(vec!["-".to_owned(); 7]);
        rows.push(row);
    }
    rows
}

fn cache_line(cache: &CacheTold) -> String {
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
    fn rates_count_what_was_sent_meanwhile_and_not_what_was_sent_before() {
        let end = |pid, sent_bytes| {
            let links = vec![LinkTold { sent_bytes, ..LinkTold::default() }];
            let connections = vec![ConnectionTold { links, ..ConnectionTold::default() }];
            EndTold { pid, connections, ..EndTold::default() }
        };
        let second = Duration::from_secs(1);
        assert_eq!(rates(&[end(1, 1000)], &end(1, 5000), second * 2), [[2000]]);
        assert_eq!(rates(&[end(1, 1000)], &end(2, 5000), second), [[0]], "it was not asked before");
        assert_eq!(rates(&[end(1, 5000)], &end(1, 1000), second), [[0]], "it connected anew");
    }

    #[test]
    fn an_answer_to_another_question_is_none() {
        let packet = question(7, "store").unwrap();
        assert!(found_in(&packet, 7, String::new()).is_none(), "a question is no answer");
        let seek = Seek { token: 7, instance: [0xab; 16], sealed: true, name: "store".into() };
        let mut answer = vec![0; HEADER_BYTES];
        answer.extend(seek.encode().unwrap());
        let length = answer.len() as u32;
        Packet { kind: PacketKind::Found, length, connection: 0, link: 0, number: 0 }.encode(&mut answer);
        assert!(found_in(&answer, 8, String::new()).is_none());
        let found = found_in(&answer, 7, "udp:10.0.0.1:9700".into()).unwrap();
        assert!(found.sealed && found.name == "store" && found.instance.starts_with("abab"));
        assert!(found_in(&answer[..30], 7, String::new()).is_none());
    }
}
