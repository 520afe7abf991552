//! Each format: a good file, a bad line, an empty file, one cut short, and packed ones.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::lines::LineReader;
use super::*;

struct Files(tempfile::TempDir);

impl Files {
    fn new() -> Self {
        Files(tempfile::tempdir().unwrap())
    }

    fn write(&self, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
        let path = self.0.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        path
    }
}

fn read_with(path: &Path, options: ReadOptions) -> Result<(Vec<Request>, u64)> {
    let mut trace = Trace::open(path, options)?;
    let mut requests = Vec::new();
    while let Some(request) = trace.next()? {
        requests.push(request);
    }
    Ok((requests, trace.bad_lines()))
}

fn read(bytes: impl AsRef<[u8]>) -> Result<Vec<Request>> {
    let files = Files::new();
    read_with(&files.write("trace", bytes), ReadOptions::default()).map(|(requests, _)| requests)
}

fn format_of(bytes: impl AsRef<[u8]>) -> Format {
    let files = Files::new();
    Trace::open(&files.write("trace", bytes), ReadOptions::default()).unwrap().format()
}

fn request(at_ns: u64, operation: Operation, device: u64, address: u64, length: u64) -> Request {
    Request { at_ns, operation, device, address, length }
}

use Operation::{Discard, Flush, Read, Write, Zero};

const BLKPARSE: &str = "\
  8,16   3        4     0.000011950  3645  I   R 800 + 256 [java]
  8,16   3        5     0.000026421  3645  D   R 800 + 256 [java]
  8,16   3        5     0.000026500  3645  P   N [java]
  8,16   1        7     0.500026421  3557  D  WS 8 + 8 [java]
  8,16   1        8     0.500026421  3557  C  WS 8 + 8 [0]
  8,16   1        9     0.600026421  3557  D   D 16 + 8 [java]
  8,16   1       10     0.700026421  3557  D  FN [java]
CPU0 (8,16):
 Reads Queued:           0,        0KiB\t Writes Queued:           0,        0KiB
Total (8,16):
";

/// The text of each format of lines, how many requests are in it, and a line that is wrong in it.
const TEXTS: [(Format, &str, usize, &str); 10] = [
    (Format::Blkparse, BLKPARSE, 4, "8,16 3 5 soon 3645 D R 800 + 256 [java]"),
    (
        Format::Blkreplay,
        "Copyright Somebody\n\nstart ; sector ; length ; op\n 0.5 ; 8 ; 16 ; W ; 0.0 ; 0.0\n\
          1.5 ; 8 ; 16 ; R ; 0 ; 0\n",
        2,
        " 2.5 ; 8 ; 16 ; X ; 0.0 ; 0.0",
    ),
    (
        Format::Msr,
        "128166385295514663,hm,0,Write,9056014336,2048,2833\n\
         128166385305514663,hm,0,Read,512,512,1\n",
        2,
        "128166385295514663,hm,0,Wipe,9056014336,2048,2833",
    ),
    (
        Format::Systor,
        "Timestamp,Response,IOType,LUN,Offset,Size\n1455591804.31,0.006,R,0,4096,512\n\
         1455591805.3,,W,1,8,8\n",
        2,
        "1455591804.31,0.006,R,zero,4096,512",
    ),
    (
        Format::Tencent,
        "1538323200,8,128,1,1058\n1538323199,16,128,0,1063\n",
        2,
        "1538323199,16,128,2,1063",
    ),
    (
        Format::Fiu,
        "89967324197109 4254 pool rm 508500296 8 W 6 0 b5e9f4e5ab62a4fff5313a606b0ad4e3\n",
        1,
        "89967324197109 4254 nfsd 508500296 8 W 6 0 beef",
    ),
    (Format::AsciiNs, "0 0 303567 7 0\n26214000 1 240840 6 1\n", 2, "26214000 1 240840 6"),
    (Format::AsciiMs, "0.000 5 174224064 16 1\n0.221 5 162947904 16 0\n", 2, "0.221 5 -8 16 0"),
    (
        Format::AsciiMsBytes,
        "0.000 0 200626176 4096 0\n223.412 0 512 36864 1\n",
        2,
        "0.1 0 512 36864 yes",
    ),
    (
        Format::Wiscsee,
        "39949 D read 299008 4096 0.5 0 False\n0 C read 299008 4096 0.6 0.1 False\n\
         1 D discard 0 4096 0.7 0 False\n",
        2,
        "39949 D read 299008 4096 never 0 False",
    ),
];

#[test]
fn each_format_of_lines_is_known_by_its_content_and_read_whole() {
    for (format, text, count, _) in TEXTS {
        assert_eq!(format_of(text), format);
        assert_eq!(read(text).unwrap().len(), count, "{format:?}");
    }
}

#[test]
fn a_bad_line_is_an_error_that_names_file_line_and_form_or_is_counted() {
    let files = Files::new();
    for (format, text, count, bad) in TEXTS {
        let bad_first = text.rsplit_once("CPU0").map_or(text, |(events, _)| events);
        let path = files.write("odd.trace", format!("{bad_first}{bad}\n"));
        let error =
            read_with(&path, ReadOptions::default()).err().unwrap_or_else(|| panic!("{format:?}"));
        let error = error.to_string();
        let line = format!("odd.trace: line {}: expected '", bad_first.lines().count() + 1);
        assert!(error.contains(&line) && error.contains("--skip-bad-lines"), "{error}");
        let skip = ReadOptions { skip_bad_lines: true, ..ReadOptions::default() };
        let (requests, bad_lines) = read_with(&path, skip).unwrap();
        assert_eq!((requests.len(), bad_lines), (count, 1), "{format:?}");
    }
}

#[test]
fn what_the_lines_say_is_what_is_read() {
    let blkparse = [
        request(0, Read, 8 << 32 | 16, 800 * 512, 256 * 512),
        request(500_000_000, Write, 8 << 32 | 16, 4096, 4096),
        request(600_000_000, Discard, 8 << 32 | 16, 8192, 4096),
        request(700_000_000, Flush, 8 << 32 | 16, 0, 0),
    ];
    assert_eq!(read(BLKPARSE).unwrap(), blkparse);
    let fiu = request(0, Write, 6 << 32, 508_500_296 * 512, 4096);
    assert_eq!(read(TEXTS[5].1).unwrap(), [fiu]);
    let msr = read(TEXTS[2].1).unwrap();
    assert_eq!(
        msr,
        [request(0, Write, 0, 9_056_014_336, 2048), request(1_000_000_000, Read, 0, 512, 512)]
    );
    let ascii = read(TEXTS[8].1).unwrap();
    assert_eq!(ascii[1], request(223_412_000, Read, 0, 512, 36864));
    // Times never go back.
    assert_eq!(read(TEXTS[4].1).unwrap()[1], request(0, Read, 1063, 8192, 65536));
}

#[test]
fn a_text_of_queued_events_alone_is_read_by_them() {
    let text = BLKPARSE.replace("  D  ", "  Q  ");
    assert_eq!(read(text).unwrap().len(), 4);
}

#[test]
fn our_own_format_takes_columns_in_any_order_and_any_unit() {
    let text = "# made by hand\noperation,time_ms,length_bytes,address_sectors,remark\n\
                W,1.5,100,2,x\n\
                discard,2.5,50,0,y\nflush,2.5,,,\nZ,3,7,1,\nread,4,7,1,\n";
    assert_eq!(format_of(text), Format::Csv);
    let expected = [
        request(0, Write, 0, 1024, 100),
        request(1_000_000, Discard, 0, 0, 50),
        request(1_000_000, Flush, 0, 0, 0),
        request(1_500_000, Zero, 0, 512, 7),
        request(2_500_000, Read, 0, 512, 7),
    ];
    assert_eq!(read(text).unwrap(), expected);
    let error = read(format!("{text}W,5,many,0,\n")).err().unwrap().to_string();
    assert!(error.contains("line 8: expected the columns that the header names"), "{error}");
    let named = ReadOptions { format: Some(Format::Csv), ..ReadOptions::default() };
    let path = Files::new();
    let path = path.write("headless.csv", "W,1,2,3\n").clone();
    assert!(read_with(&path, named).is_err());
}

fn vscsi_record(command: u16, sector: u64, bytes: u32, microseconds: u64) -> Vec<u8> {
    let mut record = Vec::new();
    record.extend(7u32.to_le_bytes());
    record.extend(bytes.to_le_bytes());
    record.extend(1u32.to_le_bytes());
    record.extend(command.to_le_bytes());
    record.extend(1u16.to_le_bytes());
    record.extend(sector.to_le_bytes());
    record.extend(microseconds.to_le_bytes());
    record
}

#[test]
fn vscsi_records_are_read_and_a_torn_one_is_an_error() {
    let mut bytes = [vscsi_record(0x2a, 63, 4096, 1000), vscsi_record(0x28, 8, 512, 3000)].concat();
    assert_eq!(format_of(&bytes), Format::Vscsi);
    let expected = [request(0, Write, 0, 63 * 512, 4096), request(2_000_000, Read, 0, 4096, 512)];
    assert_eq!(read(&bytes).unwrap(), expected);
    bytes.extend(&vscsi_record(0x28, 8, 512, 3000)[..20]);
    let error = read(&bytes).err().unwrap().to_string();
    assert!(
        error.contains("record 3: expected a record of 32 bytes") && error.contains("20 bytes"),
        "{error}"
    );
}

fn srt_record(seconds: u32, block: u32, bytes: u32, flags: u32) -> Vec<u8> {
    let words = [56, 1, seconds, 500_000, 0, 0, bytes, block, 3 << 8, 0, 0, flags, 0, 0];
    words.iter().flat_map(|word: &u32| word.to_be_bytes()).collect()
}

#[test]
fn srt_records_are_read_and_a_torn_one_is_an_error() {
    let head = b"$$TR_IOREC-1.3\nversion = 1.3;\n\x0c".to_vec();
    let mut bytes =
        [head.clone(), srt_record(10, 16, 8192, 0), srt_record(11, 0, 1024, 1)].concat();
    assert_eq!(format_of(&bytes), Format::Srt);
    let expected = [request(0, Write, 3, 4096, 8192), request(1_000_000_000, Read, 3, 0, 1024)];
    assert_eq!(read(&bytes).unwrap(), expected);
    bytes.extend(&srt_record(12, 0, 1024, 1)[..54]);
    let error = read(&bytes).err().unwrap().to_string();
    assert!(error.contains("record 3: expected a whole record"), "{error}");
    let error = read(b"$$TR_IOREC-1.3\nno end").err().unwrap().to_string();
    assert!(error.contains("form feed"), "{error}");
}

fn tar(members: &[(&str, Vec<u8>)]) -> Vec<u8> {
    let mut tar = Vec::new();
    for (name, body) in members {
        let mut head = [0u8; 512];
        head[..name.len()].copy_from_slice(name.as_bytes());
        head[124..135].copy_from_slice(format!("{:011o}", body.len()).as_bytes());
        head[257..262].copy_from_slice(b"ustar");
        tar.extend(head);
        tar.extend(body);
        tar.resize(tar.len().next_multiple_of(512), 0);
    }
    tar.resize(tar.len() + 1024, 0);
    tar
}

/// An event: header with the time, then sector, sectors, device and operation, all below 128.
fn octf_event(time: u8, [sector, sectors, device, operation]: [u8; 4]) -> Vec<u8> {
    let io = [8, sector, 16, sectors, 32, device, 40, operation];
    let mut event = vec![10, 2, 16, time, 18, io.len() as u8];
    event.extend(io);
    event.insert(0, event.len() as u8);
    event
}

#[test]
fn events_of_all_cpus_are_sorted_by_time_and_a_torn_one_is_an_error() {
    let first = [octf_event(1, [8, 8, 1, 2]), octf_event(3, [0, 8, 1, 3])].concat();
    let second = octf_event(2, [1, 1, 1, 1]);
    let summary = ("t/octf.summary", vec![1, 2, 3]);
    let bytes = tar(&[summary, ("t/octf.trace.0", first.clone()), ("t/octf.trace.1", second)]);
    assert_eq!(format_of(&bytes), Format::Octf);
    let expected = [
        request(0, Write, 1, 4096, 4096),
        request(1, Read, 1, 512, 512),
        request(2, Discard, 1, 0, 4096),
    ];
    assert_eq!(read(&bytes).unwrap(), expected);
    let torn = tar(&[("t/octf.trace.0", first[..first.len() - 1].to_vec())]);
    let error = read(&torn).err().unwrap().to_string();
    assert!(error.contains("t/octf.trace.0 event 2: expected a whole event"), "{error}");
    let error = read(&bytes[..1540]).err().unwrap().to_string();
    assert!(error.contains("cut short"), "{error}");
}

#[test]
fn calls_on_files_are_replayed_by_time_with_offsets_and_descriptors() {
    let text = "1 0 open /data O_WRONLY 36\n1 10 write 36 4\n1 30 write 36 6\n1 40 close 36\n\
                1 50 write 36 9\n2 5 open \"/data/x\" O_RDWR 7\n2 20 pwrite 7 100 50\n2 60 fsync \
                7\n2 70 stat64 \"/data/x\" 0\n2 80 open \"/data/x\" O_RDWR 8\n2 90 pread 8 100 50\n\
                2 95 read 8 -1\n";
    assert_eq!(format_of(text), Format::Mobigen);
    let expected = [
        request(0, Write, 0, 0, 4),
        request(10_000, Write, 1, 100, 50),
        request(20_000, Write, 0, 4, 6),
        // The descriptor was closed: this is a file that the trace did not open.
        request(40_000, Write, 2, 0, 9),
        request(50_000, Flush, 1, 0, 0),
        request(80_000, Read, 1, 100, 50),
    ];
    assert_eq!(read(text).unwrap(), expected);
    let error = read(format!("{text}2 soon write 7 5\n")).err().unwrap().to_string();
    assert!(error.contains("line 13: expected 'THREAD"), "{error}");
    let error = read(format!("{text}2 99 write 7 many\n")).err().unwrap().to_string();
    assert!(
        error.contains("line 13: expected 'THREAD") && error.contains("write 7 many"),
        "{error}"
    );
}

#[test]
fn a_file_that_is_empty_or_something_else_or_missing_is_refused() {
    let error = read("").err().unwrap().to_string();
    assert!(error.contains("is empty"), "{error}");
    let error = read("Once upon a time\nthere was a disk.\n").err().unwrap().to_string();
    assert!(error.contains("--format"), "{error}");
    let files = Files::new();
    let missing =
        Trace::open(&files.0.path().join("missing"), ReadOptions::default()).err().unwrap();
    assert_eq!(missing.exit(), sawmill_console::exit::Exit::NotFound);
    let folder = Trace::open(files.0.path(), ReadOptions::default()).err().unwrap();
    assert!(folder.to_string().contains("not a regular file"), "{folder}");
}

#[test]
fn numbers_beyond_all_disks_and_times_beyond_all_pauses_are_bad_lines() {
    for bad in [
        "1.5 0 99999999999999999 16 1",
        "1266874889.7 0 8 8 0",
        "0.5 0 9007199254740992 9007199254740992 1",
    ] {
        // In milliseconds, a pause of a year is too long.
        let bad = bad.replace("1266874889.7", "31536000000.0");
        let error = read(format!("0.1 0 8 7 1\n{bad}\n")).err().unwrap().to_string();
        assert!(error.contains("line 2: expected"), "{error}");
    }
}

#[test]
fn a_request_longer_than_any_disk_takes_is_a_bad_line_that_is_named() {
    let text =
        format!("1 0 open /data O_WRONLY 36\n1 10 write 36 {}\n1 20 write 36 4\n", 1u64 << 40);
    let error = read(&text).err().unwrap().to_string();
    assert!(error.contains("line 2: expected a read or write of at most 1 GiB"), "{error}");
    // Offsets that overflow are refused, not wrapped.
    let most = i64::MAX;
    let text = format!(
        "1 0 open /d O_WRONLY 3\n1 1 write 3 {most}\n1 2 write 3 {most}\n1 3 write 3 {most}\n"
    );
    let files = Files::new();
    let options = ReadOptions { skip_bad_lines: true, ..ReadOptions::default() };
    let (requests, bad) = read_with(&files.write("trace", text), options).unwrap();
    assert_eq!((requests.len(), bad), (0, 3));
}

#[test]
fn a_packed_trace_reads_as_the_plain_one_and_a_cut_one_is_an_error() {
    let files = Files::new();
    let lines: String =
        (0..5000u64).map(|n| format!("{n}.5 0 {} 7 {}\n", n * 7919 % 100_003, n % 2)).collect();
    let plain = files.write("plain", &lines);
    let (expected, _) = read_with(&plain, ReadOptions::default()).unwrap();
    for program in ["gzip", "zstd", "xz", "bzip2"] {
        let packed = Command::new(program).arg("-c").arg(&plain).output();
        let packed = packed.unwrap_or_else(|error| panic!("{program} is needed: {error}"));
        let path = files.write("packed", &packed.stdout);
        assert_eq!(read_with(&path, ReadOptions::default()).unwrap().0, expected, "{program}");
        let path = files.write("cut", &packed.stdout[..packed.stdout.len() * 3 / 4]);
        let error = read_with(&path, ReadOptions::default()).err();
        let error = error.unwrap_or_else(|| panic!("{program}")).to_string();
        assert!(error.contains("cannot be decompressed to its end"), "{program}: {error}");
    }
}

#[test]
fn every_operation_of_blkreplays_own_loads_is_read() {
    let line = |flags: &str, sectors: u32| format!("0.5 ; 8 ; {sectors} ; {flags} ; 0.0 ; 0.0\n");
    for (flags, sectors, expected) in [
        ("R", 16, Operation::Read),
        ("r", 16, Operation::Read),
        ("RA", 16, Operation::Read),
        ("RAM", 16, Operation::Read),
        ("RSM", 16, Operation::Read),
        ("W", 16, Operation::Write),
        ("WS", 16, Operation::Write),
        ("WSM", 16, Operation::Write),
        ("WFS", 16, Operation::Write),
        ("FWFS", 16, Operation::Write),
        ("FWS", 0, Operation::Flush),
        ("FF", 0, Operation::Flush),
        ("F", 0, Operation::Flush),
        ("D", 16, Operation::Discard),
        ("DS", 16, Operation::Discard),
    ] {
        let text = line(flags, sectors);
        let request = LineReader::new(Format::Blkreplay, &text).read(&text).unwrap().unwrap();
        let place = if expected == Operation::Flush { (0, 0) } else { (4096, 8192) };
        assert_eq!(
            (request.operation, (request.address, request.length)),
            (expected, place),
            "{flags}"
        );
    }
}
