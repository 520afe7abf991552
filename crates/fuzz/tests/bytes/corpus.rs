//! Makes the corpora, from the golden vectors and from inputs made here. Files with other names
//! were found by the fuzzer and stay.

use std::path::Path;
use std::sync::Arc;

use sawmill_device::BlockDeviceExt;
use sawmill_format::checkpoint::checkpoint_key;
use sawmill_format::crc::payload_check;
use sawmill_format::ids::{PutId, VolumeId};
use sawmill_format::journal::{RECORD_HEADER_BYTES, RecordHeader, RecordOperation, Superblock};
use sawmill_format::link::statement::{Body, Command, Note, NoteKind, Operation, Reply};
use sawmill_format::packed_write;
use sawmill_fuzz::store_image::{NAME, Objects};
use sawmill_store::{Blocking, Class};
use sawmill_volume::{CreateOptions, FlushMode, OpenOptions, Volume};

use super::folder;

/// Run by hand when inputs are added: `cargo test -p sawmill-fuzz write_corpus -- --ignored`.
#[test]
#[ignore = "writes the files the other tests read"]
fn write_corpus() {
    vectors();
    journals();
    stores();
    handshakes();
    requests();
    guests();
    frontends();
    link_peers();
    streams();
    machines();
    keys_and_frames();
    texts();
    kernels();
    super::processes::write_all();
    super::foreign::write_all();
}

/// A packet of a link's peer: its statements, in the pieces of `link_peer`.
fn link_piece(how: u8, write: impl FnOnce(&mut Body<'_>)) -> Vec<u8> {
    let mut room = [0; 1000];
    let mut body = Body::new(&mut room);
    write(&mut body);
    let used = body.used();
    [&(used as u16).to_le_bytes()[..], &[how], &room[..used]].concat()
}

/// After the piece, time passes.
const LATER: u8 = 1 << 6;

fn command_piece(
    place: u16,
    operation: Operation,
    use_number: u64,
    range: (u64, u64),
    inline: &[u8],
) -> Vec<u8> {
    let (address, length) = range;
    let command = Command { operation, place, flags: 0, export: 0, use_number, address, length };
    link_piece(LATER, |body| {
        body.command(&command, inline.len(), |into| into.copy_from_slice(inline));
    })
}

fn answered(place: u16, use_number: u64, status: u8, bytes: &[u8]) -> Vec<u8> {
    let reply = Reply { place, use_number, status, length: bytes.len() as u32 };
    link_piece(LATER, |body| {
        body.reply(&reply, bytes.len(), |into| into.copy_from_slice(bytes));
    })
}

fn bytes_of(place: u16, use_number: u64, offset: u32, bytes: usize) -> Vec<u8> {
    link_piece(LATER, |body| {
        body.data(place, use_number, offset, bytes, |into| into.fill(4));
    })
}

fn link_peers() {
    use Operation::*;
    let ranges: [(u32, &[u8]); 2] = [(0, b"abc"), (600, b"de")];
    let mut packed = vec![0; packed_write::encoded_bytes(ranges.iter().copied()) as usize];
    packed_write::encode(ranges.iter().copied(), &mut packed).expect("room");
    let operations = [
        command_piece(0, Write, 2, (512, 300), &[1; 256]),
        bytes_of(0, 2, 256, 44),
        command_piece(1, WritePacked, 1, (4096, packed.len() as u64), &packed),
        command_piece(2, Read, 1, (512, 4000), &[]),
        command_piece(3, Allocation, 1, (0, 65536), &[]),
        command_piece(0, Flush, 3, (0, 0), &[]),
        command_piece(1, Discard, 2, (4096, 4096), &[]),
        command_piece(2, WriteZeroes, 2, (0, 65536), &[]),
        command_piece(3, Prefetch, 2, (0, 4096), &[]),
        command_piece(0, List, 4, (0, 0), &[]),
        command_piece(1, Open, 3, (0, 4), b"disk"),
        command_piece(2, Close, 3, (0, 0), &[]),
    ];
    write("link_target", "all-operations", &operations.concat());
    let note = |kind, link, packet_bytes| Note { kind, link, packet_bytes, token: 5 };
    let notes = [
        link_piece(LATER, |body| {
            body.note(&note(NoteKind::Ping, 0, 0));
        }),
        link_piece(1, |body| {
            body.note(&note(NoteKind::Join, 1, 1200));
            body.pad();
        }),
        link_piece(LATER, |body| {
            body.ack(0, 100, &[(2, 2), (0, 0)]);
            body.note(&note(NoteKind::Leave, 0, 0));
        }),
        link_piece(1, |body| {
            body.close(12, "it ends");
        }),
    ];
    write("link_target", "notes", &notes.concat());
    write("link_initiator", "notes", &notes.concat());
    let replies = [
        answered(1, 1, 0, &[]),
        answered(0, 2, 0, &[9; 300]),
        answered(2, 1, 0, &8192u64.to_le_bytes()),
        answered(3, 1, 10, b"full"),
        bytes_of(0, 3, 0, 640),
        answered(0, 3, 7, b"not now"),
        link_piece(3 << 6, |body| {
            body.ack(0, 0, &[(2, 4)]);
        }),
        // UNKNOWN: a target that has forgotten the connection.
        vec![0, 0, 6 << 3 | 1],
    ];
    write("link_initiator", "replies", &replies.concat());
}

/// Packets are opaque to a stream, but for their lengths.
fn streams() {
    let packet = |declared_bytes: u32, bytes: usize| {
        let mut packet = vec![bytes as u8; bytes];
        packet[4..8].copy_from_slice(&declared_bytes.to_le_bytes());
        packet
    };
    let whole = [packet(24, 24), packet(60, 60), packet(25, 25)].concat();
    write("link_stream", "whole-packets", &[&[16][..], &whole].concat());
    write("link_stream", "byte-by-byte", &[&[0][..], &whole].concat());
    write("link_stream", "cut-short", &[&[3][..], &whole, &packet(60, 30)].concat());
    write("link_stream", "too-short", &[&[5][..], &whole, &packet(23, 60)].concat());
    write("link_stream", "too-long", &[&[5][..], &whole, &packet(65537, 60)].concat());
}

fn machines() {
    let (one, two) = ("1".repeat(64), "Ab".repeat(32));
    let good = format!("# name key exports\n\n  db1 {one} disk1,logs:ro\nbackup\t{two}  *:ro\r\n");
    write("link_machines", "two", good.as_bytes());
    write("link_machines", "a-key-twice", format!("a {one} *\nb {one} *\n").as_bytes());
    write("link_machines", "a-name-twice", format!("a {one} x\na {two} x\n").as_bytes());
    write("link_machines", "an-export-twice", format!("a {one} x,x:ro\n").as_bytes());
    write("link_machines", "key-first", format!("{one} a *\n").as_bytes());
}

fn keys_and_frames() {
    let digits = "0123456789abcdefABCDEF0000000000".repeat(2);
    write("key_file", "with-a-newline", format!("{digits}\n").as_bytes());
    write("key_file", "without-one", digits.as_bytes());
    write("key_file", "two-newlines", format!("{digits}\n\n").as_bytes());
    write("key_file", "a-digit-short", &digits.as_bytes()[1..]);
    let vectors = Path::new(env!("CARGO_MANIFEST_DIR")).join("../format/vectors");
    let packet = std::fs::read(vectors.join("link_packet/v1-every-statement.bin"));
    let packet = packet.expect("a vector");
    let frame =
        |from: [u8; 6]| [&[2, 0, 0, 0, 0, 1][..], &from, &[0x88, 0xB5], &packet, &[0; 46]].concat();
    write("ethernet_frame", "padded", &frame([2, 0, 0, 0, 0, 9]));
    write("ethernet_frame", "from-a-group", &frame([0xFF; 6]));
    write("ethernet_frame", "header-alone", &frame([2, 0, 0, 0, 0, 9])[..14]);
}

pub(super) fn write(target: &str, name: &str, bytes: &[u8]) {
    std::fs::create_dir_all(folder(target)).expect("a folder");
    std::fs::write(folder(target).join(name), bytes).expect("a file");
}

fn vectors() {
    let places = [
        ("segment", "segment"),
        ("checkpoint", "checkpoint"),
        ("map_part", "map_part"),
        ("volume_record", "small_objects"),
        ("staging", "small_objects"),
        ("cache_index", "small_objects"),
        ("journal", "small_objects"),
        ("export_state", "small_objects"),
        ("name_record", "small_objects"),
        ("newest_state", "small_objects"),
        ("boot_set", "small_objects"),
        ("pin", "small_objects"),
        ("role", "small_objects"),
        ("transfer_progress", "small_objects"),
        ("link_packet", "link_packet"),
        ("link_greeting", "link_greeting"),
        ("link_control", "link_control"),
        ("packed_write", "packed_write"),
    ];
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../format/vectors");
    for (kind, target) in places {
        for entry in std::fs::read_dir(root.join(kind)).expect("the golden vectors").flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            if let Some(name) = name.strip_suffix(".bin") {
                write(
                    target,
                    &format!("{kind}-{name}"),
                    &std::fs::read(entry.path()).expect("a vector"),
                );
            }
        }
    }
}

const TAG: u64 = 0x1122_3344_5566_7788;

fn superblock(revision: u64, trim: u64, bound: (u64, u64)) -> Superblock {
    Superblock {
        volume_id: VolumeId([7; 16]),
        journal_tag: TAG,
        revision,
        epoch: bound.0,
        intent_epoch: 0,
        intent_put_id: PutId([0; 16]),
        capacity_bytes: 8192,
        trim,
        logged: trim,
        stored_sequence: 3,
        stored_position: trim,
        clean: false,
        bound_epoch: bound.0,
        bound_position: bound.1,
        memory: None,
        ring_copy: None,
    }
}

/// An input of `journal_image`: records one after the other from `trim`, in a ring of two blocks.
fn journal(
    choices: u8,
    trim: u64,
    bound: (u64, u64),
    records: &[(RecordOperation, u32, u64)],
) -> Vec<u8> {
    let mut ring = vec![0u8; 8192];
    let mut position = trim;
    for (operation, bytes, epoch) in records {
        let is_write = *operation == RecordOperation::Write;
        let payload = vec![0x5a; if is_write { *bytes as usize } else { 0 }];
        let pad = *operation == RecordOperation::Pad;
        let header = RecordHeader {
            slot_bytes: RECORD_HEADER_BYTES as u32 + if is_write || pad { *bytes } else { 0 },
            position,
            tag: TAG,
            operation: *operation,
            epoch: *epoch,
            logged: trim,
            address: if pad { 0 } else { 4096 },
            length: if pad { 0 } else { u64::from(*bytes) },
            payload_crc: if is_write { payload_check(&payload) } else { 0 },
        };
        let mut head = [0; RECORD_HEADER_BYTES];
        header.encode(&mut head);
        for (at, byte) in head.iter().chain(&payload).enumerate() {
            ring[(position as usize + at) % 8192] = *byte;
        }
        position += u64::from(header.slot_bytes);
    }
    let newer = superblock(2, trim, bound).encode().expect("a superblock");
    let older = superblock(1, trim.saturating_sub(4096), bound).encode().expect("a superblock");
    let used = ring.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
    [&[choices, 1][..], &newer[..160], &older[..160], &ring[..used]].concat()
}

fn journals() {
    use RecordOperation::{Discard, Pad, Void, Write, Zero};
    let mixed = [
        (Write, 100, 2),
        (Discard, 8192, 2),
        (Zero, 512, 2),
        (Void, 0, 2),
        (Pad, 200, 2),
        (Write, 9, 2),
    ];
    write("journal_image", "mixed", &journal(0, 4096, (2, 0), &mixed));
    write(
        "journal_image",
        "over-the-seam",
        &journal(3, 4096 + 8192 * 5, (2, 0), &mixed[..1].repeat(30)),
    );
    let epochs = [(Write, 50, 1), (Write, 60, 1), (Write, 70, 2), (Write, 80, 1)];
    write("journal_image", "bound-within", &journal(1, 0, (2, 270), &epochs));
    write("journal_image", "empty", &journal(0, 0, (1, 0), &[]));
    write(
        "journal_image",
        "full",
        &journal(3, 8192, (2, 0), &[(Write, 4016, 2), (Write, 4016, 2)]),
    );
}

/// What the engine puts into a store: a history with a checkpoint in it.
fn stores() {
    let store = Arc::new(Objects::default());
    let create = CreateOptions { flush: FlushMode::Stored, ..CreateOptions::new(1 << 20) };
    sawmill_volume::create(&*store, NAME, &create).expect("a fresh store");
    let attachment = |writes: u64| {
        let folder = tempfile::tempdir().expect("a folder");
        let mut options = OpenOptions::new(folder.path().join("journal"));
        options.staging_folder = folder.path().to_owned();
        options.journal_bytes = 32 << 20;
        let volume = Volume::open(store.clone(), NAME, options).expect("it opens");
        for number in 0..writes {
            volume.write_at((number * 1536) % (1 << 20), &[number as u8; 512]).expect("a write");
            volume.flush().expect("a flush");
        }
        volume.discard(512, 4096).expect("a discard");
        (volume, folder)
    };
    let (volume, _folder) = attachment(1);
    volume.flush().expect("a flush");
    write("store_image", "attached-first", &store.as_input());
    volume.close().expect("it closes");
    drop(volume);
    write("store_image", "closed-once", &store.as_input());
    let (volume, _folder) = attachment(4);
    volume.flush().expect("a flush");
    write("store_image", "attached-again", &store.as_input());
    let record = sawmill_volume::find(&*store, NAME).expect("it is there");
    let mut huge =
        sawmill_volume::inspect::checkpoint(&*store, &record, None).expect("there is one");
    (huge.number, huge.size_bytes) = (huge.number + 1, u64::MAX);
    let put = Blocking(&*store).put(
        &checkpoint_key(record.volume_id, huge.number),
        huge.encode().expect("a checkpoint").into(),
        Class::Upload,
    );
    put.expect("a free name");
    write("store_image", "checkpoint-of-a-size-that-cannot-be", &store.as_input());
}

fn option(number: u32, data: &[u8]) -> Vec<u8> {
    [b"IHAVEOPT", &number.to_be_bytes()[..], &(data.len() as u32).to_be_bytes(), data].concat()
}

fn handshakes() {
    let hello = &3u32.to_be_bytes()[..];
    let info = b"\0\0\0\x04disk\0\x04\0\0\0\x01\0\x02\0\x03";
    let meta = b"\0\0\0\x04disk\0\0\0\x02\0\0\0\x0fbase:allocation\0\0\0\x05base:";
    let all = [
        option(3, b""),
        option(6, info),
        option(5, b""),
        option(8, b""),
        option(9, meta),
        option(10, meta),
        option(99, b"unknown"),
        option(7, info),
    ];
    write("nbd_handshake", "all-options", &[hello, &all.concat()].concat());
    write("nbd_handshake", "by-name", &[&0u32.to_be_bytes()[..], &option(1, b"disk")].concat());
    write("nbd_handshake", "abort", &[hello, &option(11, b""), &option(2, b"")].concat());
    write(
        "nbd_handshake",
        "unknown-name",
        &[hello, &option(7, b"\0\0\0\x04none\0\0"), &option(3, b"")].concat(),
    );
}

fn requests() {
    let commands: [(u16, u16, u64, u64); 11] = [
        (0, 1, 0, 512),
        (1, 1, 4096, 1024),
        (0, 0, 0, 8192),
        (0, 3, 0, 0),
        (0, 4, 4096, 4096),
        (2, 6, 8192, 512),
        (8, 7, 0, 65536),
        (0, 7, 0, 65536),
        (0, 5, 0, 4096),
        (4, 0, 65536, 512),
        (0, 77, 0, 0),
    ];
    for style in 0..3u8 {
        let mut bytes = vec![style];
        for (cookie, (flags, command, offset, length)) in commands.into_iter().enumerate() {
            let extended = style == 2;
            let has_payload = command == 1;
            let flags = flags | if extended && has_payload { 32 } else { 0 };
            let magic = if extended { 0x21e4_1c71u32 } else { 0x2560_9513 };
            bytes.extend(magic.to_be_bytes());
            bytes.extend(flags.to_be_bytes());
            bytes.extend(command.to_be_bytes());
            bytes.extend((cookie as u64).to_be_bytes());
            bytes.extend(offset.to_be_bytes());
            if extended {
                bytes.extend(length.to_be_bytes());
            } else {
                bytes.extend((length as u32).to_be_bytes());
            }
            bytes.extend(std::iter::repeat_n(0xab, if has_payload { length as usize } else { 0 }));
        }
        write("nbd_transmission", ["simple", "structured", "extended"][usize::from(style)], &bytes);
    }
}

/// A table with the head of chain n at entry 4n, and the data that the chains point to.
fn guest(chains: &[&[(u16, u32, u16, u16)]], header: &[u8]) -> Vec<u8> {
    let mut memory = vec![0; 0x800];
    for (n, chain) in chains.iter().enumerate() {
        for (m, (address, length, flags, next)) in chain.iter().enumerate() {
            let entry = [
                &u64::from(*address).to_le_bytes()[..],
                &length.to_le_bytes(),
                &flags.to_le_bytes(),
                &next.to_le_bytes(),
            ];
            let at = 16 * (4 * n + m);
            memory[at..at + 16].copy_from_slice(&entry.concat());
        }
        memory[0x104 + 2 * n] = 4 * n as u8;
    }
    memory[0x102] = chains.len() as u8;
    memory[0x400..0x400 + header.len()].copy_from_slice(header);
    memory
}

fn guests() {
    let header = |kind: u8, sector: u8| {
        let mut header = [0; 16];
        (header[0], header[8]) = (kind, sector);
        header
    };
    let (next, write, indirect) = (1u16, 2u16, 4u16);
    let read: &[_] = &[(0x400, 16, next, 1), (0x1000, 4096, next | write, 2), (0x500, 1, write, 0)];
    let second: &[_] =
        &[(0x400, 16, next, 5), (0x3000, 512, next | write, 6), (0x501, 1, write, 0)];
    write_ring("two-reads", &guest(&[read, second], &header(0, 1)));
    let store: &[_] = &[(0x400, 16, next, 1), (0x1000, 1024, next, 2), (0x500, 1, write, 0)];
    write_ring("a-write", &guest(&[store], &header(1, 3)));
    let discard: &[_] = &[(0x400, 32, next, 1), (0x500, 1, write, 0)];
    let range = [&header(11, 0)[..], &[0; 8], &8u32.to_le_bytes(), &0u32.to_le_bytes()].concat();
    write_ring("a-discard", &guest(&[discard], &range));
    // The table lies among the entries of the other chain.
    let table: &[_] = &[(0x40, 48, indirect, 0)];
    let inside: &[_] =
        &[(0x400, 16, next, 1), (0x1000, 512, next | write, 2), (0x500, 1, write, 0)];
    let mut memory = guest(&[table, inside], &header(0, 0));
    memory[0x102] = 1;
    write_ring("an-indirect-table", &memory);
}

fn write_ring(name: &str, memory: &[u8]) {
    write("vhost_ring", name, memory);
}

fn frontends() {
    let message = |request: u32, payload: &[u64]| {
        let head = [request, 1, 8 * payload.len() as u32];
        let head = head.iter().flat_map(|field| field.to_ne_bytes());
        head.chain(payload.iter().flat_map(|word| word.to_ne_bytes())).collect::<Vec<u8>>()
    };
    let set_up = [
        message(3, &[]),
        message(1, &[]),
        message(15, &[]),
        message(16, &[0x1122b]),
        message(2, &[1 << 32 | 1 << 30 | 1 << 29]),
        message(17, &[]),
        message(36, &[]),
        message(39, &[3]),
        message(40, &[]),
        message(31, &[0, 0, 0x10_0001]),
        message(8, &[16 << 32]),
        message(9, &[0, 0, 0, 0, 0]),
        message(10, &[0]),
        message(18, &[1 << 32]),
        message(11, &[0]),
        message(34, &[]),
    ];
    write("vhost_messages", "set-up", &set_up.concat());
    // Offset and size, then the flags, which are half a word.
    let config = [24u32, 1, 20, 0, 8, 0, 0, 0].iter().flat_map(|field| field.to_ne_bytes());
    write("vhost_messages", "configuration", &config.collect::<Vec<u8>>());
}

fn texts() {
    let id = "00112233445566778899aabbccddeeff";
    let texts = [
        "10G",
        "1.5 TiB",
        "0.0009765625K",
        "30s",
        "1.5h",
        "s3://bucket/a/b?region=eu-1&endpoint=http://127.0.0.1:9000",
        "az://container/p?account=a",
        "gs://bucket/x/disk1?endpoint=https://h/",
        "file:///srv/a%20b/disk1",
        "/srv/disk-1.a_b",
        "memory:x/disk1",
        "s3://user:word@bucket/?sig=1",
        "volumes/disk1",
        id,
        &format!("{id}/checkpoint/00000000000000000042"),
        &format!("{id}/map/00000000000000000042-{id}/0000000a"),
        &sawmill_format::segment::segment_key(VolumeId([1; 16]), 77),
        "udp:10.0.0.1:9800@eth1,tcp:[fe80::2%eth1]:9700,eth:eth1,xdp:eth2",
        "disk1,logs:ro,*:ro",
        "nbd://[::1]:7/a%20name",
        "nbd+unix:///disk%31?socket=/run/a%2Fb",
        "SAWMILL_VOLUME=\"00ff%22\"\nSAWMILL_LINK=\"disk1\"\nSAWMILL_RECOVERING=\"1\"\n",
    ];
    for (number, text) in texts.iter().enumerate() {
        write("text", &format!("{number:02}"), text.as_bytes());
    }
}

/// The requests of the kernel: a head and arguments.
fn kernels() {
    let fuse = |opcode: u32, arguments: &[u8]| {
        let length = 40 + arguments.len() as u32;
        [
            &length.to_ne_bytes()[..],
            &opcode.to_ne_bytes(),
            &7u64.to_ne_bytes(),
            &2u64.to_ne_bytes(),
            &[0; 16],
            arguments,
        ]
        .concat()
    };
    let span = |length: u32, payload: &[u8]| {
        let numbers =
            [&0u64.to_ne_bytes()[..], &4096u64.to_ne_bytes(), &length.to_ne_bytes(), &[0; 20]];
        [&numbers.concat()[..], payload].concat()
    };
    write("fuse_request", "lookup", &fuse(1, b"disk1\0"));
    write("fuse_request", "read", &fuse(15, &span(8192, &[])));
    write("fuse_request", "write", &fuse(16, &span(512, &[5; 512])));
    write(
        "fuse_request",
        "init",
        &fuse(26, &[7u32, 41, 1 << 17, u32::MAX, 1].map(u32::to_ne_bytes).concat()),
    );
    write("fuse_request", "set-attributes", &fuse(4, &[1; 88]));
    write("fuse_request", "seek", &fuse(46, &[0; 24]));
    let ublk = |operation: u32, sectors: u32, start: u64| {
        [&operation.to_le_bytes()[..], &sectors.to_le_bytes(), &start.to_le_bytes(), &[0; 8]]
            .concat()
    };
    let requests: Vec<u8> = (0..8).flat_map(|operation| ublk(operation, 8, 64)).collect();
    write("ublk_request", "operations", &requests);
    write("ublk_request", "past-the-end", &ublk(1, u32::MAX, u64::MAX));
}
