//! The values behind the golden packets: one case per file in `crates/driver/vectors`.
//!
//! The tests in Go (`sdk/go/sawmill`) and Python (`sdk/python/tests/test_vectors.py`) repeat the
//! same values. Not here: the comparison (`main`).

use std::ops::Range;

use sawmill_driver::batch::chunk::{ChunkEntry, ENTRY_BYTES, entries};
use sawmill_driver::protocol::{
    ANSWER_BYTES, Answer, COMMAND_BYTES, Command, CommandKind, Control, ControlFacts, ControlKind,
};

/// A field: its bytes in the layout, and its name on the page.
pub(crate) type Field = (Range<usize>, &'static str);

pub(crate) const COMMAND_FIELDS: [Field; 9] = [
    (0..4, "kind"),
    (4..8, "flags"),
    (8..16, "number"),
    (16..24, "address"),
    (24..32, "length"),
    (32..40, "offset"),
    (40..48, "entries"),
    (48..56, "horizon"),
    (56..64, "floor"),
];
pub(crate) const ANSWER_FIELDS: [Field; 3] =
    [(0..8, "number"), (8..12, "errno"), (12..16, "reserved")];
pub(crate) const ENTRY_FIELDS: [Field; 4] =
    [(0..8, "sector"), (8..16, "sectors"), (16..24, "write_number"), (24..32, "flag")];

/// Decodes the vector, and tells whether it is the case's value.
type Decode = Box<dyn Fn(&[u8]) -> Result<bool, String>>;

/// One golden vector.
pub(crate) struct Case {
    /// `<structure>/v1-<case>`: the version is that of the protocol.
    pub(crate) name: &'static str,
    /// The encoded value.
    pub(crate) bytes: Vec<u8>,
    /// The fields and their places, for the dump.
    pub(crate) rows: Vec<Field>,
    /// Bytes that mean nothing.
    pub(crate) padding: Vec<Range<usize>>,
    /// The value, for readers.
    pub(crate) value: String,
    pub(crate) decode: Decode,
}

pub(crate) fn all() -> Vec<Case> {
    let mut cases = greetings();
    cases.extend(later_packets());
    cases.extend(commands());
    cases.extend(answers());
    cases.push(chunk());
    cases
}

fn control(name: &'static str, kind: ControlKind, lines: &[(&str, &str)]) -> Case {
    let facts =
        lines.iter().fold(ControlFacts::default(), |facts, (name, value)| facts.with(name, *value));
    let value = Control::new(kind, facts);
    let bytes = value.encode();
    let mut rows = vec![(0..4, "kind")];
    let mut start = 4;
    for line in bytes[4..].split_inclusive(|byte| *byte == b'\n') {
        rows.push((start..start + line.len(), "line"));
        start += line.len();
    }
    Case {
        name,
        bytes,
        rows,
        padding: Vec::new(),
        value: format!("{value:#?}"),
        decode: Box::new(move |bytes| {
            Control::decode(bytes).map(|found| found == value).map_err(|error| error.to_string())
        }),
    }
}

/// The handshake of a driver.
fn greetings() -> Vec<Case> {
    use ControlKind::{Attached, Doors, Hello, Queue, Refused, Welcome};
    vec![
        control(
            "control/v1-hello",
            Hello,
            &[
                ("protocol", "1"),
                ("program", "/usr/local/bin/wörk"),
                ("replace", "1"),
                ("mode", "batch"),
                ("size", "4398046511104"),
                ("hw_queues", "2"),
            ],
        ),
        control(
            "control/v1-welcome",
            Welcome,
            &[
                ("protocol", "1"),
                ("name", "disk1"),
                ("generation", "2"),
                ("again", "1"),
                ("mode", "batch"),
                ("size", "4398046511104"),
                ("blocksize", "512"),
                ("hw_queues", "2"),
                ("collision_area_size", "4096"),
                ("write_chunk_size", "4096"),
                ("metadata_bytes", "256"),
            ],
        ),
        control(
            "control/v1-queue",
            Queue,
            &[("queue", "1"), ("memory_bytes", "33554432"), ("read_memory_bytes", "16777216")],
        ),
        control("control/v1-attached", Attached, &[]),
        control(
            "control/v1-doors",
            Doors,
            &[
                ("door", "nbd nbd+unix:///disk1?socket=/run/sawmill/disk1.sock"),
                ("door", "ublk /dev/ublkb0"),
            ],
        ),
        control(
            "control/v1-refused",
            Refused,
            &[("errno", "16"), ("message", "disk1 has a driver")],
        ),
    ]
}

/// The ends of a driver, and a question to a host.
fn later_packets() -> Vec<Case> {
    use ControlKind::{Answer, Ask, Finish, Leave};
    vec![
        control("control/v1-finish", Finish, &[("reason", "replaced")]),
        control("control/v1-leave-ended", Leave, &[("outcome", "ended")]),
        control(
            "control/v1-leave-failed",
            Leave,
            &[("outcome", "failed"), ("message", "no backup:\nthe disk\0is full")],
        ),
        control("control/v1-ask", Ask, &[("ask", "status")]),
        control(
            "control/v1-answer",
            Answer,
            &[("errno", "0"), ("message", ""), ("name", "disk1"), ("state", "running")],
        ),
    ]
}

/// The fields of each element of a packet.
fn repeated(fields: &[Field], element_bytes: usize, count: usize) -> Vec<Field> {
    let element = |n: usize| {
        let start = n * element_bytes;
        fields.iter().map(move |(at, name)| (start + at.start..start + at.end, *name))
    };
    (0..count).flat_map(element).collect()
}

fn command_case(name: &'static str, value: Vec<Command>) -> Case {
    Case {
        name,
        bytes: value.iter().flat_map(Command::encode).collect(),
        rows: repeated(&COMMAND_FIELDS, COMMAND_BYTES, value.len()),
        padding: Vec::new(),
        value: value.iter().map(|command| format!("{command:#?}")).collect::<Vec<_>>().join("\n"),
        decode: Box::new(move |bytes| {
            Command::decode_all(bytes)
                .map(|found| found == value)
                .map_err(|error| error.to_string())
        }),
    }
}

fn commands() -> Vec<Case> {
    use CommandKind::{Chunk, Discard, End, Flush, Read, Write, WriteZeroes};
    let read = Command {
        address: 0x0a0b_0c0d_0e00,
        length: 0x1200,
        offset: 0x2_1000,
        ..Command::new(Read, 0x0102_0304_0506_0708)
    };
    let write = Command {
        address: 0x1a1b_1c1d_1e00,
        length: 0x600,
        offset: 0x3000,
        ..Command::new(Write, 0x1112_1314_1516_1718)
    };
    let flush = Command::new(Flush, 0xf1f2_f3f4_f5f6_f7f8);
    let range = |kind, number| Command {
        address: 0x2a2b_2c2d_2e00,
        length: 0x3_0405_0600,
        ..Command::new(kind, number)
    };
    let discard = range(Discard, 0x2122_2324_2526_2728);
    let zeroes = range(WriteZeroes, 0x3132_3334_3536_3738);
    let chunk = Command {
        again: true,
        length: (METADATA_BYTES + DATA_BYTES) as u64,
        offset: 0x2000,
        entries: VALUES.len() as u64,
        horizon: 0x5152_5354_5556_5758,
        floor: 0x6162_6364_6566_6768,
        ..Command::new(Chunk, 0x4142_4344_4546_4748)
    };
    vec![
        command_case("command/v1-read", vec![read]),
        command_case("command/v1-write-fua", vec![Command { fua: true, ..write }]),
        command_case("command/v1-flush", vec![flush]),
        command_case("command/v1-discard", vec![discard]),
        command_case("command/v1-write-zeroes", vec![zeroes]),
        command_case("command/v1-keep-space", vec![Command { no_unmap: true, ..zeroes }]),
        command_case("command/v1-chunk-again", vec![chunk]),
        command_case("command/v1-end", vec![Command::new(End, 0)]),
        command_case("command/v1-two", vec![Command { again: true, ..write }, flush]),
    ]
}

fn answer_case(name: &'static str, value: Vec<Answer>) -> Case {
    Case {
        name,
        bytes: value.iter().flat_map(Answer::encode).collect(),
        rows: repeated(&ANSWER_FIELDS, ANSWER_BYTES, value.len()),
        padding: Vec::new(),
        value: value.iter().map(|answer| format!("{answer:#?}")).collect::<Vec<_>>().join("\n"),
        decode: Box::new(move |bytes| {
            Answer::decode_all(bytes).map(|found| found == value).map_err(|error| error.to_string())
        }),
    }
}

fn answers() -> Vec<Case> {
    let done = Answer { number: 0x0102_0304_0506_0708, errno: 0 };
    let no_space = Answer { number: 0x1112_1314_1516_1718, errno: 28 };
    let late = Answer { number: 0xf1f2_f3f4_f5f6_f7f8, errno: 110 };
    vec![
        answer_case("answer/v1-done", vec![done]),
        answer_case("answer/v1-no-space", vec![no_space]),
        answer_case("answer/v1-two", vec![done, late]),
    ]
}

/// For a `write_chunk_size` of 4096 and a `blocksize` of 512: room for 8 entries.
const CHUNK_BYTES: usize = 4096;
const METADATA_BYTES: usize = 256;
const DATA_BYTES: usize = 2048;
const AREA_BYTES: u64 = 4096;
/// The value of the other bytes of the chunk.
const PADDING: u8 = 0xee;

/// The border between two collision areas.
const BORDER: u64 = 0x102_0304_0000;

/// A write across the border, and a newer one over a part of it; each entry with the byte that its
/// data repeat.
const VALUES: [(ChunkEntry, u8); 3] = [
    (ChunkEntry { address: BORDER - 512, length: 512, write_number: 0x0102_0304_0506_0708 }, 0xa1),
    (ChunkEntry { address: BORDER, length: 1024, write_number: 0x1112_1314_1516_1718 }, 0xb2),
    (ChunkEntry { address: BORDER + 512, length: 512, write_number: 0x1112_1314_1516_171a }, 0xc3),
];

fn chunk() -> Case {
    const { assert!(BORDER.is_multiple_of(AREA_BYTES)) };
    let mut bytes = vec![PADDING; CHUNK_BYTES];
    let names = ["data of entry 0", "data of entry 1", "data of entry 2"];
    let mut data_rows = Vec::new();
    let mut end = METADATA_BYTES;
    for (n, (entry, value)) in VALUES.iter().enumerate() {
        bytes[n * ENTRY_BYTES..][..ENTRY_BYTES].copy_from_slice(&entry.encode());
        let data = end..end + entry.length as usize;
        bytes[data.clone()].fill(*value);
        end = data.end;
        data_rows.push((data, names[n]));
    }
    assert_eq!(end, METADATA_BYTES + DATA_BYTES);
    let padding = vec![VALUES.len() * ENTRY_BYTES..METADATA_BYTES, end..CHUNK_BYTES];
    let mut rows = repeated(&ENTRY_FIELDS, ENTRY_BYTES, VALUES.len());
    rows.push((padding[0].clone(), "padding"));
    rows.extend(data_rows);
    rows.push((padding[1].clone(), "padding"));
    let texts: Vec<_> = VALUES.iter().map(|(entry, _)| format!("{entry:#?}")).collect();
    Case {
        name: "write_chunk/v1-overlap",
        bytes,
        rows,
        padding,
        value: texts.join("\n"),
        decode: Box::new(|bytes| {
            let parsed: Option<Vec<_>> = entries(bytes, METADATA_BYTES, VALUES.len()).collect();
            let parsed = parsed.ok_or("an entry makes no sense")?;
            let is_value = |((entry, data), (expected, value)): (&(ChunkEntry, &[u8]), _)| {
                entry == expected && data.iter().all(|byte| byte == value)
            };
            let expected = VALUES.iter().map(|(entry, value)| (entry, value));
            Ok(parsed.len() == VALUES.len() && parsed.iter().zip(expected).all(is_value))
        }),
    }
}
