//! Inputs in the formats of other programs: an NBD server's and a store's answers, headers of disk
//! images, write logs, and traces.

use sawmill_format::write_log::{Entry, Flags, Superblock};
use sawmill_nbd_proto::{
    EXTENDED_REPLY_MAGIC, SIMPLE_REPLY_MAGIC, STRUCTURED_REPLY_MAGIC, chunk, info, option,
    push_option_reply, reply,
};

use super::corpus::write;

pub(super) fn write_all() {
    handshakes();
    answers();
    images();
    logs();
    traces();
    stores();
}

/// The choice of each style, in the first byte.
const SIMPLE: u8 = 0;
const STRUCTURED: u8 = 1;
const EXTENDED: u8 = 2;

/// The kind of what follows, in the first byte: 0 is a handshake.
const LIST: u8 = 1 << 6;
/// A multiple of three, so that adding a style still selects that style.
const ANSWERS: u8 = 0b1000_0001;

fn option_reply(option: u32, kind: u32, data: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    push_option_reply(&mut bytes, option, kind, data);
    bytes
}

fn handshakes() {
    let hello = b"NBDMAGICIHAVEOPT\0\x03";
    let size = [&info::EXPORT.to_be_bytes()[..], &(1u64 << 30).to_be_bytes(), &[5, 0xed]].concat();
    let blocks = [&info::BLOCK_SIZE.to_be_bytes()[..], &[0, 0, 0, 1, 0, 0, 16, 0, 2, 0, 0, 0]];
    let go = [
        option_reply(option::GO, reply::INFO, &size),
        option_reply(option::GO, reply::INFO, b"\0\x01disk"),
        option_reply(option::GO, reply::INFO, &blocks.concat()),
        option_reply(option::GO, reply::ACK, &[]),
    ];
    let go = go.concat();
    let write_handshake = |name: &str, style: u8, output: &[u8]| {
        write("nbd_client", name, &[&[style], &hello[..], output].concat());
    };
    write_handshake("handshake-simple", SIMPLE, &go);
    for (name, style, header_option) in [
        ("handshake-structured", STRUCTURED, option::STRUCTURED_REPLY),
        ("handshake-extended", EXTENDED, option::EXTENDED_HEADERS),
    ] {
        let context = b"\0\0\0\x01base:allocation";
        let output = [
            option_reply(header_option, reply::ACK, &[]),
            option_reply(option::SET_META_CONTEXT, reply::META_CONTEXT, context),
            option_reply(option::SET_META_CONTEXT, reply::ACK, &[]),
            go.clone(),
        ];
        write_handshake(name, style, &output.concat());
    }
    let unknown = option_reply(option::GO, reply::ERR_UNKNOWN, b"no such export");
    write_handshake("handshake-unknown-name", SIMPLE, &unknown);
    let exports = [
        option_reply(option::LIST, reply::SERVER, b"\0\0\0\x04disk"),
        option_reply(option::LIST, reply::SERVER, b"\0\0\0\x05othermore about it"),
        option_reply(option::LIST, reply::ACK, &[]),
    ];
    write_handshake("list", LIST, &exports.concat());
}

/// The requests are those of the target, numbered from 1: two reads, 1 and 3, of 512 and 1500
/// bytes; 7 asks for the allocation.
fn answers() {
    let simple = |errno: u32, cookie: u64, bytes: &[u8]| {
        let magic = SIMPLE_REPLY_MAGIC.to_be_bytes();
        [&magic, &errno.to_be_bytes()[..], &cookie.to_be_bytes(), bytes].concat()
    };
    let output = [
        simple(0, 1, &[0xa1; 512]),
        simple(0, 2, &[]),
        simple(5, 3, &[]),
        simple(0, 5, &[]),
        simple(28, 4, &[]),
        simple(95, 7, &[]),
        simple(0, 6, &[]),
    ];
    write("nbd_client", "answers-simple", &[&[ANSWERS + SIMPLE], &output.concat()[..]].concat());
    for (name, style) in [("answers-structured", STRUCTURED), ("answers-extended", EXTENDED)] {
        let chunk = |flags: u16, kind: u16, cookie: u64, payload: &[u8]| {
            let length = payload.len() as u32;
            let (magic, padding): (u32, &[u8]) = match style {
                EXTENDED => (EXTENDED_REPLY_MAGIC, &[0; 12]),
                _ => (STRUCTURED_REPLY_MAGIC, &[]),
            };
            let head =
                [&magic.to_be_bytes()[..], &flags.to_be_bytes(), &kind.to_be_bytes()].concat();
            let tail = [&cookie.to_be_bytes()[..], padding, &length.to_be_bytes(), payload];
            [head, tail.concat()].concat()
        };
        let data = |at: u64, bytes: &[u8]| [&at.to_be_bytes()[..], bytes].concat();
        let hole = |at: u64, length: u32| data(at, &length.to_be_bytes());
        let runs: &[u32] = if style == EXTENDED {
            &[1, 2, 0, 65536, 0, 0, 0, 4096, 0, 3]
        } else {
            &[1, 65536, 0, 4096, 3]
        };
        let kind = if style == EXTENDED { chunk::BLOCK_STATUS_EXT } else { chunk::BLOCK_STATUS };
        let output = [
            chunk(0, chunk::OFFSET_DATA, 3, &data((1 << 40) + 700, &[0xb2; 800])),
            chunk(0, chunk::OFFSET_DATA, 1, &data(0, &[0xa1; 100])),
            chunk(chunk::DONE, chunk::OFFSET_HOLE, 3, &hole(1 << 40, 700)),
            chunk(chunk::DONE, chunk::OFFSET_DATA, 1, &data(100, &[0xa2; 412])),
            chunk(
                chunk::DONE,
                kind,
                7,
                &runs.iter().flat_map(|n| n.to_be_bytes()).collect::<Vec<_>>(),
            ),
            chunk(chunk::DONE, chunk::ERROR, 2, b"\0\0\0\x1c\0\x04full"),
            chunk(chunk::DONE, chunk::NONE, 4, &[]),
            chunk(chunk::DONE, chunk::NONE, 6, &[]),
            chunk(chunk::DONE, chunk::ERROR_BIT | 2, 5, b"\0\0\0\x05\0\0\0\0\0\0\0\0\x10\0"),
        ];
        write("nbd_client", name, &[&[ANSWERS + style], &output.concat()[..]].concat());
    }
}

/// How the image is checked, its length, and its pieces.
fn image(format: u8, length: u64, pieces: &[(u64, &[u8])]) -> Vec<u8> {
    let mut input = vec![format];
    input.extend(&length.to_le_bytes()[..6]);
    for (at, bytes) in pieces {
        input.extend(&at.to_le_bytes()[..6]);
        input.extend((bytes.len() as u16).to_le_bytes());
        input.extend_from_slice(bytes);
    }
    input
}

fn images() {
    let write_image = |name: &str, format: u8, pieces: &[(u64, &[u8])]| {
        write("image_headers", name, &image(format, 1 << 20, pieces));
    };
    write_image("raw-like-qcow2", 0, &[(0, b"QFI\xfb")]);
    let qcow2: [(u64, &[u8]); 3] =
        [(0, b"QFI\xfb\0\0\0\x03"), (20, &[0, 0, 0, 16]), (100, &[0, 0, 0, 104])];
    write_image("qcow2", 1, &qcow2);
    let over: [(u64, &[u8]); 4] = [
        (8, &[0, 0, 0, 0, 0, 0, 0, 136]),
        (16, &[0, 0, 0, 8]),
        (104, b"\xe2\x79\x2a\xca\0\0\0\x05qcow2\0\0\0\x68\x03\xf8\x57\0\0\0\x02ab\0\0\0\0\0\0"),
        (136, b"./ab    \xe2\x79\x2a\xca\0\0\0\x03raw"),
    ];
    write_image("qcow2-over-a-file", 1, &[&qcow2[..], &over].concat());
    write_image("qcow2-data-file", 1, &[&qcow2[..], &[(79, &[4])]].concat());
    let second: [(u64, &[u8]); 4] = [
        (0, b"QFI\xfb\0\0\0\x02"),
        (8, &[0, 0, 0, 0, 0, 0, 0, 72]),
        (16, &[0, 0, 0, 4, 0, 0, 0, 9]),
        (72, b"base"),
    ];
    write_image("qcow2-version-2", 1, &second);
    let vmdk: [(u64, &[u8]); 3] = [(0, b"KDMV"), (12, &[8]), (28, &[1, 0, 0, 0, 0, 0, 0, 0, 20])];
    let text = b"# Disk DescriptorFile\ncreateType=\"monolithicSparse\"\nRW 8 SPARSE \"a.vmdk\"\n";
    write_image("vmdk", 2, &[&vmdk[..], &[(512, text)]].concat());
    let flat = b"createType=\"monolithicFlat\"\nRW 8 FLAT \"/etc/hosts\" 0\n";
    write_image("vmdk-flat", 2, &[&vmdk[..], &[(512, flat)]].concat());
    let (metadata, parameters) = (
        b"\x06\xa2\x7c\x8b\x90\x47\x9a\x4b\xb8\xfe\x57\x5f\x05\x0f\x88\x6e",
        b"\x37\x67\xa1\xca\x36\xfa\x43\x4d\xb3\xb6\x33\xf0\xaa\x44\xe7\x6b",
    );
    let table = 192 << 10;
    let vhdx: [(u64, &[u8]); 8] = [
        (0, b"vhdxfile"),
        (table, b"regi\0\0\0\0\x01"),
        (table + 16, metadata),
        (table + 32, &[0, 0, 8, 0]),
        (512 << 10, b"metadata\0\0\x01"),
        ((512 << 10) + 32, parameters),
        ((512 << 10) + 48, &[0, 16]),
        ((512 << 10) + 4096 + 4, &[1]),
    ];
    write_image("vhdx", 3, &vhdx);
    let region = [&metadata[..], &(512u64 << 10).to_le_bytes(), &[0; 8]].concat().repeat(100);
    let repeated: [(u64, &[u8]); 3] =
        [(table + 8, &[100]), (table + 16, &region), ((512 << 10) + 10, &[0, 8])];
    write_image("vhdx-repeats-its-metadata", 3, &[&vhdx[..], &repeated].concat());
    let dynamic: [(u64, &[u8]); 3] =
        [(0, b"conectix"), (16, &[0, 0, 0, 0, 0, 0, 2, 0]), (60, &[0, 0, 0, 3])];
    write_image("vpc-dynamic", 4, &[&dynamic[..], &[(512, b"cxsparse")]].concat());
    let end = (1 << 20) - 512;
    write_image("vpc-fixed", 4, &[(end, b"conectix"), (end + 60, &[0, 0, 0, 2])]);
    write_image("vdi", 5, &[(0x40, &[0x7f, 0x10, 0xda, 0xbe]), (0x4c, &[1])]);
}

/// A log of these entries, with data that distinguish them.
fn log(sector_bytes: u32, entries: &[(u64, u64, Flags)]) -> Vec<u8> {
    let entry_count = entries.len() as u64;
    let mut bytes = Superblock { entry_count, sector_bytes }.encode().to_vec();
    bytes.resize(sector_bytes as usize, 0);
    for (number, &(sector, sector_count, flags)) in entries.iter().enumerate() {
        let entry = Entry { sector, sector_count, flags, data_bytes: 0 };
        let end = bytes.len() + sector_bytes as usize;
        bytes.extend(entry.encode());
        bytes.resize(end, 0);
        let data_bytes = entry.data_sectors() * u64::from(sector_bytes);
        bytes.resize(end + data_bytes as usize, 0x11 * (number as u8 + 1));
    }
    bytes
}

fn logs() {
    let (write_, flush, fua) = (Flags::default(), Flags::FLUSH, Flags::FUA);
    let mixed = [
        (1, 2, write_),
        (0, 0, flush),
        (4, 1, fua),
        (2, 1, Flags::DISCARD),
        (3, 3, write_),
        (0, 0, Flags::MARK),
        (4, 1, flush.with(fua)),
        (0, 2, write_.with(Flags::METADATA)),
    ];
    write("write_log", "mixed", &log(512, &mixed));
    write("write_log", "sectors-of-4-kib", &log(4096, &[(0, 1, write_), (1, 1, flush)]));
    write(
        "write_log",
        "far",
        &log(512, &[((1 << 50) - 1, 1, write_), (1 << 40, 9, Flags::DISCARD)]),
    );
    write("write_log", "none", &log(512, &[]));
    let mut cut_short = log(512, &[(0, 1, write_), (1, 4, write_)]);
    cut_short.truncate(cut_short.len() - 700);
    write("write_log", "cut-short", &cut_short);
}

/// The first byte is the format: 0 to detect it, otherwise its place in the list of formats. With
/// the highest bit, bad lines are skipped.
fn traces() {
    let lines: [(&str, &str); 8] = [
        ("csv", "operation,time_ms,length_bytes,address_sectors\nW,1.5,100,2\nflush,2.5,,\n"),
        (
            "blkparse",
            "8,16 3 5 0.000026421 3645 D R 800 + 256 [java]\n8,16 1 7 0.5 3557 D WS 8 + 8 [java]\n\
             8,16 1 10 0.7 3557 D FN [java]\nCPU0 (8,16):\n Reads Queued: 0, 0KiB\n",
        ),
        (
            "blkreplay",
            "start ; sector ; length ; op\n 0.5 ; 8 ; 16 ; W ; 0.0 ; 0.0\n 1 ; 8 ; 0 ; F\n",
        ),
        ("msr", "128166385295514663,hm,0,Write,9056014336,2048,2833\n"),
        ("tencent", "1538323200,8,128,1,1058\n1538323199,16,128,0,1063\n"),
        ("fiu", "89967324197109 4254 pool rm 508500296 8 W 6 0 b5e9f4e5ab62a4fff5313a606b0ad4e3\n"),
        ("ascii", "0.000 5 174224064 16 1\n0.221 5 162947904 16 0\n"),
        (
            "mobigen",
            "1 0 open /data O_WRONLY 36\n1 10 write 36 4\n2 5 open \"/data/x\" O_RDWR 7\n\
             2 20 pwrite 7 100 50\n2 60 fsync 7\n1 40 close 36\n",
        ),
    ];
    for (name, text) in lines {
        write("trace", name, &[b"\0", text.as_bytes()].concat());
        write(
            "trace",
            &format!("{name}-and-others"),
            &[b"\x80", text.as_bytes(), b"bad\x1b\n"].concat(),
        );
    }
    let vscsi = [
        &7u32.to_le_bytes()[..],
        &4096u32.to_le_bytes(),
        &1u32.to_le_bytes(),
        &0x2au16.to_le_bytes(),
        &1u16.to_le_bytes(),
        &63u64.to_le_bytes(),
        &1000u64.to_le_bytes(),
    ];
    write("trace", "vscsi", &[&[0], &vscsi.concat()[..], &vscsi.concat()].concat());
    let words = [56u32, 1, 10, 500_000, 0, 0, 8192, 16, 3 << 8, 0, 0, 0, 0, 0];
    let record = words.map(u32::to_be_bytes).concat();
    write("trace", "srt", &[b"\0$$TR_IOREC-1.3\n\x0c", &record[..], &record].concat());
    write("trace", "octf", &[&[0], &tar(b"t/octf.trace.0", &octf_events())[..]].concat());
}

/// Two events of Open CAS: a header with the time, then sector, sectors, device, operation.
fn octf_events() -> Vec<u8> {
    let event = |time: u8, [sector, sectors, device, operation]: [u8; 4]| {
        let request = [8, sector, 16, sectors, 32, device, 40, operation];
        [&[14, 10, 2, 16, time, 18, request.len() as u8], &request[..]].concat()
    };
    [event(1, [8, 8, 1, 2]), event(3, [0, 8, 1, 3])].concat()
}

fn tar(name: &[u8], body: &[u8]) -> Vec<u8> {
    let mut tar = vec![0; 512];
    tar[..name.len()].copy_from_slice(name);
    tar[124..135].copy_from_slice(format!("{:011o}", body.len()).as_bytes());
    tar[257..262].copy_from_slice(b"ustar");
    tar.extend(body);
    tar.resize(2048, 0);
    tar
}

/// The first byte chooses the kind of store and the call, the second the status of the answer.
fn stores() {
    let (s3, google, azure) = (0u8, 1, 2);
    let (get, list, create, delete) = (0u8, 3 << 2, 6 << 2, 7 << 2);
    let (ok, not_found, conflict, busy) = (0, 7, 9, 15);
    let input = |choice: u8, status: u8, body: &str| [&[choice, status], body.as_bytes()].concat();
    let contents = |key: &str| {
        format!(
            "<Contents><Key>some/prefix/{key}</Key><LastModified>2024-01-01T00:00:00.000Z\
             </LastModified><Size>5</Size></Contents>"
        )
    };
    let page = format!(
        "<ListBucketResult>{}{}<IsTruncated>true</IsTruncated><NextContinuationToken>t\
         </NextContinuationToken></ListBucketResult>",
        contents("a/prefix/1"),
        contents("b/2")
    );
    let last_page = page
        .replace("true", "false")
        .replace("<NextContinuationToken>t</NextContinuationToken>", "");
    let blobs = "<EnumerationResults><Blobs><Blob><Name>some/prefix/a/prefix/1</Name><Properties>\
        <Last-Modified>Mon, 01 Jan 2024 00:00:00 GMT</Last-Modified><Content-Length>5\
        </Content-Length><Content-Type>x</Content-Type></Properties></Blob></Blobs><NextMarker/>\
        </EnumerationResults>";
    let missing = "<Error><Code>NoSuchKey</Code><Message>The key is not there.</Message></Error>";
    let half = "<DeleteResult><Error><Key>some/prefix/a/key</Key><Code>AccessDenied</Code>\
        <Message>no</Message></Error></DeleteResult>";
    let batch = "--edge\r\nContent-Type: application/http\r\nContent-ID: 0\r\n\r\nHTTP/1.1 404 The \
        specified blob does not exist.\r\nx-ms-error-code: BlobNotFound\r\n\r\n\r\n--edge--\r\n";
    let raw = "HTTP/1.1 200 OK\r\nContent-Length: 9999999999\r\nETag: \"e\"\r\nLast-Modified: Mon, \
        01 Jan 2024 00:00:00 GMT\r\n\r\nbody";
    let part =
        raw.replace("200 OK", "206 Part").replace("9999999999", "4\r\nContent-Range: bytes 0-3/9");
    for (name, bytes) in [
        ("s3-body", input(s3 | get, ok, "body")),
        ("s3-part", input(s3 | 1 << 2, 1, "body")),
        ("google-body", input(google | get, ok, "body")),
        ("azure-body", input(azure | get, ok, "body")),
        ("s3-missing", input(s3 | get, not_found, missing)),
        ("s3-list-page", input(s3 | list, ok, &page)),
        ("s3-list", input(s3 | list, ok, &last_page)),
        ("google-list", input(google | list, ok, &last_page)),
        ("azure-list", input(azure | list, ok, blobs)),
        ("s3-exists", input(s3 | create, conflict, missing)),
        ("google-create", input(google | create, ok, "")),
        ("azure-busy", input(azure | create, busy, "<Error><Code>ServerBusy</Code></Error>")),
        ("s3-delete", input(s3 | delete, ok, half)),
        ("azure-delete", input(azure | delete, 3, batch)),
        ("claims-more-than-it-sends", input(0x80 | s3 | get, 0, raw)),
        ("part-of-an-object", input(0x80 | s3 | 1 << 2, 0, &part)),
    ] {
        write("store_answers", name, &bytes);
    }
}
