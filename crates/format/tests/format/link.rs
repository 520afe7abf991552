//! The link's packets, and what a target keeps: golden vectors, and what is refused, rule by rule.

use sawmill_format::FormatError;
use sawmill_format::crc::crc32c;
use sawmill_format::export_state::{self, ExportState};
use sawmill_format::layout::Table;
use sawmill_format::link::control::{self, Exports, OpenAnswer};
use sawmill_format::link::greeting::{self, Cookie, Hello, Seek, Welcome};
use sawmill_format::link::statement::*;
use sawmill_format::link::{self, HEADER_BYTES, NUMBER_END, Packet, PacketKind, TAIL_BYTES};

use crate::samples::Case;

const COMMAND: Command = Command {
    operation: Operation::Write,
    place: 258,
    flags: FUA,
    export: 7,
    use_number: 0x0102_0304,
    address: 1 << 20,
    length: 130,
};
const REPLY: Reply = Reply { place: 258, use_number: 0x0102_0304, status: 10, length: 4 };
pub(crate) const JOIN: Note =
    Note { kind: NoteKind::Join, link: 1, packet_bytes: 128, token: 0x7a67_6174 };
/// Newest first; the last two touch.
const RUNS: [(u64, u64); 3] = [(700, 702), (90, 95), (80, 89)];

/// A packet around `body`, with the tail of a connection without a key.
fn packet(kind: PacketKind, link: u8, number: u64, body: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; HEADER_BYTES];
    let length = (HEADER_BYTES + body.len() + TAIL_BYTES) as u32;
    Packet { kind, length, connection: 0x0123_4567_89ab_cdef, link, number }.encode(&mut bytes);
    bytes.extend_from_slice(body);
    let tail = crc32c(&bytes);
    bytes.extend(tail.to_le_bytes());
    bytes.resize(length as usize, 0);
    bytes
}

pub(crate) fn body_of(room: usize, write: impl FnOnce(&mut Body<'_>)) -> Vec<u8> {
    let mut bytes = vec![0xee; room];
    let mut body = Body::new(&mut bytes);
    write(&mut body);
    let used = body.used();
    bytes.truncate(used);
    bytes
}

/// Whether what is pushed fits is another test's matter.
pub(crate) fn pushed(fits: bool) {
    assert!(fits, "the room was made for it");
}

fn every_statement() -> Vec<u8> {
    body_of(1160, |body| {
        pushed(body.ack(1, 250, &RUNS));
        pushed(body.command(&COMMAND, 128, |into| into.fill(0xab)));
        pushed(body.data(258, 0x0102_0304, 128, 2, |into| into.copy_from_slice(b"cd")));
        pushed(body.reply(&REPLY, 4, |into| into.copy_from_slice(b"full")));
        pushed(body.note(&Note { kind: NoteKind::Ping, link: 2, packet_bytes: 0, token: 0 }));
        pushed(body.note(&JOIN));
        pushed(body.note(&Note { kind: NoteKind::Joined, ..JOIN }));
        pushed(body.note(&Note { kind: NoteKind::Leave, link: 7, packet_bytes: 0, token: 0 }));
        pushed(body.close(12, "it ends"));
    })
}

fn padded_join() -> Vec<u8> {
    body_of(128 - HEADER_BYTES - TAIL_BYTES, |body| {
        pushed(body.note(&JOIN));
        body.pad();
    })
}

/// All statements of a body, or why one of them cannot be read.
pub(crate) fn statements(body: &[u8]) -> Result<Vec<Statement<'_>>, FormatError> {
    Statements::new(body).collect()
}

fn packet_case(name: &'static str, link: u8, body: &[u8]) -> Case {
    let bytes = packet(PacketKind::Sealed, link, 0x1234, body);
    let (header, expected) = (Packet::decode(&bytes).unwrap(), body.to_vec());
    Case {
        name,
        value: format!("{header:#?}\n{:#?}", statements(body).unwrap()),
        bytes,
        table: link::packet_at::TABLE,
        decode: Box::new(move |bytes| {
            let found = Packet::decode(bytes)?;
            let (rest, tail) = bytes.split_at(bytes.len() - TAIL_BYTES);
            let sealed = tail[..4] == crc32c(rest).to_le_bytes() && tail[4..] == [0; 12];
            let body = &rest[HEADER_BYTES..];
            Ok(found == header
                && sealed
                && body == expected
                && statements(body)? == statements(&expected)?)
        }),
    }
}

fn case<T: PartialEq + std::fmt::Debug + 'static>(
    name: &'static str,
    table: Table,
    bytes: Vec<u8>,
    value: T,
    decode: fn(&[u8]) -> sawmill_format::Result<T>,
) -> Case {
    let text = format!("{value:#?}");
    Case {
        name,
        bytes,
        value: text,
        table,
        decode: Box::new(move |bytes| Ok(decode(bytes)? == value)),
    }
}

fn hello_value() -> Hello {
    Hello {
        versions: (1, 1),
        places: 256,
        place_bytes: 256 << 10,
        connection: 0x1111_2222_3333_4444,
        instance: *b"initiator's run1",
        links: 2,
        name: "host-a".into(),
    }
}

fn welcome_value() -> Welcome {
    Welcome {
        version: 1,
        links: 2,
        places: 128,
        place_bytes: 64 << 10,
        connection: 0x5555_6666_7777_8888,
        instance: *b"the target's run",
        silence_max_s: 120,
        name: "store-1".into(),
    }
}

const COOKIE: Cookie = Cookie { cookie: *b"say this with it", proof: *b"it is from there" };

fn seek_value() -> Seek {
    Seek { token: 0x0102_0304_0506_0708, instance: [0; 16], sealed: false, name: "store-1".into() }
}

fn opened_value() -> OpenAnswer {
    OpenAnswer {
        export: 3,
        size_bytes: 10 << 30,
        block_bytes: 4096,
        preferred_bytes: 64 << 10,
        request_bytes_max: 1 << 20,
        read_only: false,
        shared_cache: true,
        discard: true,
        write_zeroes: false,
        allocation: true,
        reservation: 0x7e6e_7572_6521_0001,
        cache_identity: *b"who keeps writes",
    }
}

const EXPORTS: [(&str, u64); 2] = [("disk1", 10 << 30), ("café", 512)];
const ALLOCATION: [(u64, bool); 3] = [(4096, true), (1 << 40, false), (512, true)];

pub(crate) fn list(exports: &[(&str, u64)], bytes_max: usize) -> Vec<u8> {
    control::list_exports(bytes_max, exports.iter().copied())
}

pub(crate) fn encode_runs(runs: &[(u64, bool)], room: usize) -> Vec<u8> {
    let mut bytes = vec![0; room];
    let used = control::put_runs(&mut bytes, runs.iter().copied());
    bytes.truncate(used);
    bytes
}

/// The vectors of this module.
pub(crate) fn cases() -> Vec<Case> {
    let found = Seek { instance: welcome_value().instance, sealed: true, ..seek_value() };
    let seek_at = greeting::seek_at::TABLE;
    vec![
        export_state(),
        packet_case("link_packet/v1-every-statement", 1, &every_statement()),
        packet_case("link_packet/v1-padded-join", 1, &padded_join()),
        case(
            "link_greeting/v1-hello",
            greeting::hello_at::TABLE,
            hello_value().encode().unwrap(),
            hello_value(),
            Hello::decode,
        ),
        case(
            "link_greeting/v1-welcome",
            greeting::welcome_at::TABLE,
            welcome_value().encode().unwrap(),
            welcome_value(),
            Welcome::decode,
        ),
        case(
            "link_greeting/v1-cookie",
            greeting::cookie_at::TABLE,
            COOKIE.encode().to_vec(),
            COOKIE,
            Cookie::decode,
        ),
        case(
            "link_greeting/v1-seek",
            seek_at,
            seek_value().encode().unwrap(),
            seek_value(),
            Seek::decode,
        ),
        case("link_greeting/v1-found", seek_at, found.encode().unwrap(), found, Seek::decode),
        case(
            "link_control/v1-opened",
            control::opened_at::TABLE,
            opened_value().encode().to_vec(),
            opened_value(),
            OpenAnswer::decode,
        ),
        case(
            "link_control/v1-exports",
            control::list_at::TABLE,
            list(&EXPORTS, 4096),
            Exports {
                named: EXPORTS.map(|(name, bytes)| (name.to_owned(), bytes)).to_vec(),
                left_out: 0,
            },
            control::exports,
        ),
        case(
            "link_control/v1-allocation",
            control::list_at::TABLE,
            encode_runs(&ALLOCATION, 64),
            ALLOCATION.to_vec(),
            |bytes| Ok(control::runs(bytes)?.collect()),
        ),
    ]
}

#[test]
fn a_list_ends_where_it_says_whatever_lies_behind_it() {
    let (mut buffer, newer) =
        (list(&[("an-older-list", 1), ("and-longer", 2)], 4096), list(&EXPORTS, 4096));
    buffer.resize(4096, 0);
    buffer[..newer.len()].copy_from_slice(&newer);
    assert_eq!(control::exports(&buffer), control::exports(&newer));
    let (mut buffer, newer) = (encode_runs(&[(7, true); 9], 400), encode_runs(&ALLOCATION, 400));
    buffer[..newer.len()].copy_from_slice(&newer);
    assert_eq!(control::runs(&buffer).unwrap().collect::<Vec<_>>(), ALLOCATION);
}

#[test]
fn each_rule_of_a_list_is_refused() {
    let cut = list(&EXPORTS, 32);
    assert_eq!(control::exports(&cut).unwrap().left_out, 1, "what did not fit is counted");
    assert!(control::exports(&cut[..cut.len() - 1]).is_err(), "shorter than it says");
    let runs = |change: fn(&mut Vec<u8>)| {
        let mut bytes = encode_runs(&ALLOCATION, 64);
        change(&mut bytes);
        control::runs(&bytes).map(Iterator::count).ok()
    };
    assert_eq!(runs(|_| ()), Some(3));
    assert_eq!(runs(|bytes| bytes[0] = 16), Some(2));
    assert_eq!(runs(|bytes| bytes[0] = 12), None, "half a run");
    assert_eq!(runs(|bytes| bytes[0] = 32), None, "longer than what came");
    assert_eq!(runs(|bytes| bytes[4] = 1), None, "it leaves nothing out");
    assert_eq!(runs(|bytes| bytes[16..24].fill(0)), None, "an empty run");
    let mut answer = opened_value().encode();
    answer[control::opened_at::RESERVATION.offset..][..8].fill(0);
    assert!(OpenAnswer::decode(&answer).is_err(), "no export's");
}

pub(crate) fn export_state_value() -> ExportState {
    ExportState {
        reservation: 0x7e6e_7572_6521_0001,
        failed_syncs: 2,
        epoch: 0,
        shared: true,
        identity: "/srv/images/disk.img".into(),
    }
}

fn export_state() -> Case {
    let value = export_state_value();
    Case {
        name: "export_state/v1-shared-file",
        bytes: value.encode().unwrap(),
        value: format!("{value:#?}"),
        table: export_state::at::TABLE,
        decode: Box::new(move |bytes| {
            Ok(ExportState::decode(bytes, "/srv/images/disk.img")? == value)
        }),
    }
}

fn refused_field(body: &[u8]) -> &'static str {
    match statements(body).unwrap_err() {
        FormatError::Field { field, .. } => field,
        FormatError::Reserved { .. } => "reserved",
        FormatError::Truncated { .. } => "truncated",
        other => panic!("{other}"),
    }
}

#[test]
fn each_rule_of_a_statement_is_refused_by_the_name_of_its_field() {
    let command = |change: fn(&mut Command), inline: usize| {
        let mut command = COMMAND;
        change(&mut command);
        body_of(400, |body| pushed(body.command(&command, inline, |into| into.fill(1))))
    };
    assert_eq!(refused_field(&command(|_| (), 131)), "bytes", "more than the payload");
    assert_eq!(refused_field(&command(|_| (), 127)), "bytes", "neither a grain nor all");
    assert!(statements(&command(|_| (), 130)).is_ok());
    assert!(statements(&command(|_| (), 0)).is_ok());
    assert_eq!(
        refused_field(&command(|command| command.operation = Operation::Read, 128)),
        "bytes"
    );
    assert_eq!(refused_field(&command(|command| command.flags = 4, 0)), "flags");
    let open = |flags| {
        let command = Command { operation: Operation::Open, flags, ..COMMAND };
        body_of(400, |body| pushed(body.command(&command, 130, |into| into.fill(b'x'))))
    };
    assert!(statements(&open(7)).is_ok());
    assert_eq!(refused_field(&open(8)), "flags");
    assert_eq!(refused_field(&[1, 9]), "truncated");
    assert_eq!(refused_field(&[10]), "kind");
    assert_eq!(refused_field(&[0, 0, 1]), "reserved");
    let data = |offset, bytes| {
        body_of(400, |body| pushed(body.data(1, 1, offset, bytes, |into| into.fill(1))))
    };
    assert_eq!(refused_field(&data(127, 1)), "offset");
    assert_eq!(refused_field(&data(128, 0)), "bytes");
    assert_eq!(refused_field(&data(128, 20)[..39]), "truncated");
    let note = |link| body_of(400, |body| pushed(body.note(&Note { link, ..JOIN })));
    assert!(statements(&note(7)).is_ok());
    assert_eq!(refused_field(&note(8)), "link");
    assert_eq!(refused_field(&[&[9, 0, 145, 1][..], &[b'x'; 401]].concat()), "text_bytes");
    assert_eq!(refused_field(&[9, 0, 1, 0, 0xff]), "text");
}

#[test]
fn each_rule_of_an_acknowledgement_is_refused_by_the_name_of_its_field() {
    let ack = |link: u8, largest: u64, runs: &[(u16, u16)]| {
        let mut bytes = vec![4, link, runs.len() as u8, 0, 0, 0, 0, 0];
        bytes.extend(largest.to_le_bytes());
        bytes.extend(
            runs.iter().flat_map(|run| [run.0.to_le_bytes(), run.1.to_le_bytes()].concat()),
        );
        bytes
    };
    assert!(statements(&ack(7, 9, &[(0, 3), (2, 5)])).is_ok(), "down to number 0");
    assert_eq!(refused_field(&ack(7, 9, &[(0, 3), (2, 6)])), "runs", "below zero");
    assert_eq!(refused_field(&ack(7, 9, &[(0, 3), (8, 1)])), "runs", "a gap below zero");
    assert_eq!(refused_field(&ack(7, 9, &[(0, 3), (2, 0)])), "runs", "an empty one");
    assert_eq!(refused_field(&ack(7, 9, &[])), "runs");
    assert_eq!(refused_field(&ack(7, 9999, &[(0, 1); 33])), "runs");
    assert!(statements(&ack(7, 9999, &[(0, 1); 32])).is_ok());
    assert_eq!(refused_field(&ack(7, 9, &[(1, 3)])), "missing", "the newest was not named");
    assert_eq!(refused_field(&ack(8, 9, &[(0, 3)])), "link");
    assert!(statements(&ack(0, NUMBER_END - 1, &[(0, 3)])).is_ok());
    assert_eq!(refused_field(&ack(0, NUMBER_END, &[(0, 3)])), "largest");
    assert_eq!(refused_field(&ack(0, u64::MAX, &[(0, 3)])), "largest");
}

#[test]
fn a_run_longer_than_its_field_ends_the_acknowledgement() {
    let decoded_runs = |runs: &[(u64, u64)]| {
        let body = body_of(200, |body| pushed(body.ack(0, 0, runs)));
        let Statement::Ack(ack) = statements(&body).unwrap()[0] else {
            panic!("an acknowledgement")
        };
        ack.runs().collect::<Vec<_>>()
    };
    // Cut to 16 bits, these would be runs of 0 and 1 packets.
    assert_eq!(
        decoded_runs(&[(1 << 20, (1 << 20) + 65_535), (5, 9)]),
        [((1 << 20) + 1, (1 << 20) + 65_535)]
    );
    assert_eq!(decoded_runs(&[(100_000, 100_009), (5, 9)]), [(100_000, 100_009)]);
    assert_eq!(
        decoded_runs(&[(65_545, 65_545), (5, 9)]),
        [(65_545, 65_545), (5, 9)],
        "a gap of 65,535"
    );
}

#[test]
fn each_rule_of_a_packet_is_refused() {
    let good = packet(PacketKind::Sealed, 7, NUMBER_END - 1, b"body");
    let longer = [&good[..], &[0xaa; 20]].concat();
    assert_eq!(
        Packet::decode(&longer),
        Packet::decode(&good),
        "padding of the carrier is no matter"
    );
    let changed = |at: usize, to: u8| {
        let mut bytes = good.clone();
        bytes[at] = to;
        Packet::decode(&bytes).unwrap_err()
    };
    let what = "link packet";
    let field = |error| matches!(error, FormatError::Field { .. });
    assert_eq!(changed(0, b'X'), FormatError::Magic { what });
    assert_eq!(changed(2, 2), FormatError::Version { what, found: 2, supported: 1 });
    assert!(field(changed(3, 0)) && field(changed(3, 10)), "no such kind");
    assert!(field(changed(4, 23)) && field(changed(4, good.len() as u8 + 1)), "no such length");
    assert!(field(changed(23, 8)), "no such link");
    assert_eq!(
        Packet::decode(&good[..23]),
        Err(FormatError::Truncated { what, need: 24, have: 23 })
    );
    let longest = packet(
        PacketKind::Sealed,
        0,
        0,
        &vec![0; link::PACKET_BYTES_MAX - HEADER_BYTES - TAIL_BYTES],
    );
    assert!(Packet::decode(&longest).is_ok());
    assert!(
        Packet::decode(&packet(PacketKind::Sealed, 0, 0, &vec![0; link::PACKET_BYTES_MAX - 39]))
            .is_err()
    );
}

#[test]
fn a_cookie_has_its_length_and_no_other() {
    let good = COOKIE.encode();
    assert_eq!(Cookie::decode(&good), Ok(COOKIE));
    assert!(
        Cookie::decode(&good[..31]).is_err()
            && Cookie::decode(&[&good[..], &[0]].concat()).is_err()
    );
}

#[test]
fn each_rule_of_a_greeting_is_refused_when_read_and_when_written() {
    let hello = |change: fn(&mut Hello)| {
        let mut hello = hello_value();
        change(&mut hello);
        hello.encode().is_ok()
    };
    assert!(hello(|hello| (hello.places, hello.place_bytes, hello.links) = (4096, 4 << 20, 8)));
    assert!(hello(|hello| hello.name = "x".repeat(64)));
    assert!(!hello(|hello| hello.name = "x".repeat(65)));
    assert!(!hello(|hello| hello.places = 0) && !hello(|hello| hello.places = 4097));
    assert!(!hello(|hello| hello.place_bytes = 4095) && !hello(|hello| hello.place_bytes = 5000));
    assert!(!hello(|hello| hello.place_bytes = (4 << 20) + 4096));
    assert!(!hello(|hello| hello.links = 0) && !hello(|hello| hello.links = 9));
    assert!(!hello(|hello| hello.connection = 0) && !hello(|hello| hello.versions = (2, 1)));
    let (hello, welcome) = (hello_value().encode().unwrap(), welcome_value().encode().unwrap());
    for at in 34..40 {
        let mut bytes = hello.clone();
        bytes[at] = 1;
        assert_eq!(
            Hello::decode(&bytes),
            Err(FormatError::Reserved { what: "link hello" }),
            "{at}"
        );
    }
    for at in 35..56 {
        let mut bytes = welcome.clone();
        bytes[at] = 1;
        assert_eq!(
            Welcome::decode(&bytes),
            Err(FormatError::Reserved { what: "link welcome" }),
            "{at}"
        );
    }
    assert!(Hello::decode(&[&hello[..], b"x"].concat()).is_err());
    assert!(Welcome::decode(&[&welcome[..], b"x"].concat()).is_err());
}
