//! Passes a peer's bytes to the link's decoders: packets and their statements, greetings, controls,
//! packed writes; and a datagram or Ethernet frame to what finds the packet in it.
//!
//! Invariant: accepted input is what the encoder writes, keeps its rules, and lies within its
//! packet.
//!
//! Not here: an initiator or a target that gets such bytes (`link_peer`); packets in a stream
//! (`stream`).

use sawmill_format::layout::Field;
use sawmill_format::link::control::{self, OpenAnswer, opened_at};
use sawmill_format::link::greeting::{
    Cookie, Hello, NAME_BYTES_MAX, Seek, Welcome, hello_at, seek_at, welcome_at,
};
use sawmill_format::link::statement::{Body, Data, Statement, Statements, TEXT_BYTES_MAX};
use sawmill_format::link::{
    GRAIN_BYTES, HEADER_BYTES, LINKS_MAX, MAGIC, NUMBER_END, PACKET_BYTES_MAX, Packet, VERSION,
    packet_at,
};
use sawmill_format::packed_write::{self, PackedWrite, SPAN_BYTES_MAX};

use sawmill_link::fuzzing::{packet_in, packet_in_frame};

use crate::mend::{put, u32_at};

pub(crate) fn packet(bytes: &[u8]) {
    body(bytes);
    whole(bytes);
    // An Ethernet frame ends with padding, so what lies behind a packet is cut off.
    if let Some(packet) = packet_in(&mut bytes.to_vec()) {
        whole(packet);
    }
    let mut mended = bytes.to_vec();
    mended.resize(bytes.len().clamp(HEADER_BYTES, PACKET_BYTES_MAX), 0);
    put(&mut mended, packet_at::MAGIC, &MAGIC.to_le_bytes());
    let kind = mended[packet_at::KIND.offset] % 9 + 1;
    put(&mut mended, packet_at::VERSION, &[VERSION]);
    put(&mut mended, packet_at::KIND, &[kind]);
    let length = mended.len() as u32;
    put(&mut mended, packet_at::LENGTH, &length.to_le_bytes());
    mended[packet_at::NUMBER.offset + 7] %= LINKS_MAX as u8;
    assert!(Packet::decode(&mended).is_ok(), "nothing else is asked of a header");
    whole(&mended);
    let mut frame = [&mended[..], &[0; 46]].concat();
    assert_eq!(packet_in(&mut frame).map(|packet| &*packet), Some(&mended[..]));
}

/// An Ethernet frame of any station: its header, and what follows.
pub(crate) fn frame(bytes: &[u8]) {
    let mut frame = bytes.to_vec();
    let Some((from, packet)) = packet_in_frame(&mut frame) else { return };
    assert_eq!(from, bytes[6..12], "the sender is the one that the header names");
    assert_eq!(from[0] & 1, 0, "the sender is one station, so that no answer goes to many");
    assert_eq!(packet, &bytes[14..14 + packet.len()], "the packet begins behind the header");
    whole(packet);
}

fn whole(bytes: &[u8]) {
    let Ok(packet) = Packet::decode(bytes) else { return };
    let length = packet.length as usize;
    assert!((HEADER_BYTES..=bytes.len().min(PACKET_BYTES_MAX)).contains(&length));
    assert!(usize::from(packet.link) < LINKS_MAX && packet.number < NUMBER_END);
    let mut again = [0; HEADER_BYTES];
    packet.encode(&mut again);
    assert_eq!(again, bytes[..HEADER_BYTES], "there is one encoding for each value");
    assert_eq!(
        Packet::decode(&bytes[..length]),
        Ok(packet),
        "what lies behind a packet is no matter"
    );
    body(&bytes[HEADER_BYTES..length]);
}

/// Any bytes as the body of an authentic packet.
fn body(bytes: &[u8]) {
    // Not zeroes, so that an encoder that leaves a byte unwritten is noticed.
    let mut again = vec![0xee; bytes.len()];
    let mut into = Body::new(&mut again);
    let mut statements = Statements::new(bytes);
    let mut readable = true;
    for statement in statements.by_ref() {
        let Ok(statement) = statement else {
            readable = false;
            break;
        };
        check(&statement);
        assert!(write(&statement, &mut into), "what was read has room where it came from");
    }
    assert!(
        statements.next().is_none(),
        "nothing comes after the end, or after what cannot be read"
    );
    let used = into.used();
    assert_eq!(again[..used], bytes[..used], "there is one encoding for each value");
    assert!(
        !readable || bytes[used..].iter().all(|byte| *byte == 0),
        "only zeroes follow the last statement"
    );
}

fn check(statement: &Statement<'_>) {
    match statement {
        Statement::Command(command, inline) => {
            let payload = if command.operation.sends_payload() { command.length } else { 0 };
            assert!(inline.len() as u64 <= payload);
        }
        Statement::Data(data) => {
            assert!((data.offset as usize).is_multiple_of(GRAIN_BYTES) && !data.bytes.is_empty())
        }
        Statement::Reply(reply, inline) => assert!(inline.len() <= reply.length as usize),
        Statement::Ack(ack) => {
            let mut end = ack.largest + 1;
            assert_eq!(ack.runs().next().map(|run| run.1), Some(ack.largest));
            for (first, last) in ack.runs() {
                assert!(first <= last && last < end, "no number twice, and none below zero");
                end = first;
            }
        }
        Statement::Note(note) => assert!(usize::from(note.link) < LINKS_MAX),
        Statement::Close(_, text) => assert!(text.len() <= TEXT_BYTES_MAX),
    }
}

fn write(statement: &Statement<'_>, into: &mut Body<'_>) -> bool {
    match *statement {
        Statement::Command(command, inline) => {
            into.command(&command, inline.len(), |room| room.copy_from_slice(inline))
        }
        Statement::Data(Data { place, use_number, offset, bytes }) => {
            into.data(place, use_number, offset, bytes.len(), |room| room.copy_from_slice(bytes))
        }
        Statement::Reply(reply, inline) => {
            into.reply(&reply, inline.len(), |room| room.copy_from_slice(inline))
        }
        Statement::Ack(ack) => {
            let runs: Vec<_> = ack.runs().collect();
            into.ack(ack.link, ack.delay_us, &runs)
        }
        Statement::Note(note) => into.note(&note),
        Statement::Close(status, text) => into.close(status, text),
    }
}

pub(crate) fn greeting(bytes: &[u8]) {
    greetings(bytes);
    greetings(&named(bytes, hello_at::SIZE, hello_at::NAME_BYTES, hello_at::RESERVED));
    greetings(&named(bytes, welcome_at::SIZE, welcome_at::NAME_BYTES, welcome_at::RESERVED));
    greetings(&named(bytes, seek_at::SIZE, seek_at::NAME_BYTES, seek_at::RESERVED));
}

/// A structure with a name behind it, whose length and reserved bytes are valid.
fn named(bytes: &[u8], size: usize, name_bytes: Field, reserved: Field) -> Vec<u8> {
    // Otherwise nearly every input would be refused before its name is read.
    let mut bytes = bytes.to_vec();
    bytes.resize(bytes.len().clamp(size, size + NAME_BYTES_MAX), 0);
    let length = (bytes.len() - size) as u8;
    put(&mut bytes, name_bytes, &[length]);
    bytes[reserved.offset..reserved.offset + reserved.size].fill(0);
    bytes
}

fn greetings(bytes: &[u8]) {
    const WRITTEN: &str = "what was read can be written";
    if let Ok(hello) = Hello::decode(bytes) {
        assert_eq!(hello.encode().expect(WRITTEN), bytes);
    }
    if let Ok(welcome) = Welcome::decode(bytes) {
        assert_eq!(welcome.encode().expect(WRITTEN), bytes);
    }
    if let Ok(cookie) = Cookie::decode(bytes) {
        assert_eq!(cookie.encode()[..], *bytes);
    }
    if let Ok(seek) = Seek::decode(bytes) {
        assert_eq!(seek.encode().expect(WRITTEN), bytes);
    }
}

pub(crate) fn controls(bytes: &[u8]) {
    let mut opened = bytes.to_vec();
    opened.resize(opened_at::SIZE, 0);
    opened[opened_at::RESERVED.offset..opened_at::RESERVATION.offset].fill(0);
    for bytes in [bytes, &opened] {
        if let Ok(opened) = OpenAnswer::decode(bytes) {
            assert_eq!(opened.encode()[..], *bytes);
        }
    }
    exports(bytes);
    if let Ok(exports) = control::exports(bytes) {
        let rest = [bytes, &[1; 9]].concat();
        assert_eq!(
            control::exports(&rest).ok(),
            Some(exports),
            "what lies behind a list is not of it"
        );
    }
    allocation(bytes);
}

fn exports(bytes: &[u8]) {
    let Ok(exports) = control::exports(bytes) else { return };
    let named = exports.named;
    let held_bytes =
        named.iter().map(|(name, _)| size_of::<(String, u64)>() + name.capacity()).sum::<usize>();
    assert!(held_bytes <= 8 * bytes.len(), "a list larger than its bytes justify");
    let mut again =
        control::list_exports(bytes.len(), named.iter().map(|(name, bytes)| (&name[..], *bytes)));
    again[4..8].copy_from_slice(&exports.left_out.to_le_bytes());
    assert_eq!(again, bytes[..again.len()]);
}

/// A list of runs is encoded as it was decoded; and any bytes, taken as runs of a device, are
/// encoded in any amount of room.
fn allocation(bytes: &[u8]) {
    if let Ok(runs) = control::runs(bytes) {
        let runs: Vec<_> = runs.collect();
        let mut again = vec![0; bytes.len() + 8];
        let used = control::put_runs(&mut again, runs.iter().copied());
        assert_eq!((used, &again[..used]), (8 + runs.len() * 8, &bytes[..used]));
    }
    let room = bytes.first().map_or(0, |first| usize::from(*first) % 64);
    let wild = bytes.chunks_exact(8).map(|run| {
        let mut length = [0; 8];
        length.copy_from_slice(run);
        (u64::from_le_bytes(length), run[0] & 1 == 1)
    });
    let all = wild.clone().fold(0u64, |sum, run| sum.saturating_add(run.0));
    let mut cut = vec![0; room];
    let used = control::put_runs(&mut cut, wild);
    assert!(used <= room && used.is_multiple_of(8));
    assert_eq!(used == 0, room < 16);
    let Ok(runs) = control::runs(&cut) else {
        return assert!(room < 8, "what was written is read");
    };
    let decoded_bytes = runs.fold(0u64, |sum, run| sum.saturating_add(run.0));
    assert!(
        decoded_bytes == all || room < 16 || decoded_bytes >= u64::MAX >> 1,
        "{decoded_bytes} bytes of {all} are told"
    );
}

pub(crate) fn packed(bytes: &[u8]) {
    packed_write(bytes);
    packed_write(&mended_packed(bytes));
}

/// With a header, a number of entries that fits, and a last entry that takes the remaining data.
fn mended_packed(bytes: &[u8]) -> Vec<u8> {
    use packed_write::{MAGIC, VERSION, at, entry_at};
    let mut bytes = bytes.to_vec();
    bytes.resize(bytes.len().max(at::SIZE + entry_at::SIZE), 0);
    let room = ((bytes.len() - at::SIZE) / entry_at::SIZE) as u32;
    let count = u32_at(&bytes, at::ENTRY_COUNT).unwrap_or(0).clamp(1, room.min(16));
    let table = at::SIZE + count as usize * entry_at::SIZE;
    let data_bytes = (bytes.len() - table) as u32;
    put(&mut bytes, at::MAGIC, &MAGIC.to_le_bytes());
    put(&mut bytes, at::VERSION, &VERSION.to_le_bytes());
    put(&mut bytes, at::RESERVED, &[0; 2]);
    put(&mut bytes, at::ENTRY_COUNT, &count.to_le_bytes());
    put(&mut bytes, at::DATA_BYTES, &data_bytes.to_le_bytes());
    let mut left = data_bytes;
    for (index, entry) in bytes[at::SIZE..table].chunks_exact_mut(entry_at::SIZE).enumerate() {
        let length_field = u32_at(entry, entry_at::LENGTH).unwrap_or(0);
        let length = if index + 1 == count as usize { left } else { length_field.min(left) };
        put(entry, entry_at::LENGTH, &length.to_le_bytes());
        left -= length;
    }
    bytes
}

fn packed_write(bytes: &[u8]) {
    let Ok(packed) = PackedWrite::decode(bytes) else { return };
    let mut free_from = 0;
    for (index, (offset, range)) in packed.entries().enumerate() {
        assert!(!range.is_empty());
        assert!(
            if index == 0 { offset >= free_from } else { offset > free_from },
            "in order, and none touch"
        );
        free_from = offset + range.len() as u32;
    }
    assert_eq!(free_from, packed.span_bytes());
    assert!(free_from <= SPAN_BYTES_MAX);
    let length = packed_write::encoded_bytes(packed.entries());
    assert_eq!(length as usize, bytes.len());
    let mut again = vec![0; bytes.len()];
    assert_eq!(packed_write::encode(packed.entries(), &mut again).ok(), Some(bytes.len()));
    assert_eq!(again, bytes);
}
