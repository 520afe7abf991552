//! The write log's golden vector: what the writer makes of fixed entries, read back and replayed.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use sawmill_format::layout::Table;
use sawmill_format::write_log::{Entry, Flags, Superblock, entry_at, superblock_at};
use sawmill_testkit::vectors::{dump_head, dump_row, hex};
use sawmill_verify::image::Image;
use sawmill_verify::power_cut::{PowerCut, Replay};
use sawmill_verify::recording::{LogWriter, Recording};
use sawmill_verify::stamp::CutTime;

const DISK_BYTES: u64 = 8192;
const SECTOR_BYTES: usize = 512;

fn vector() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("vectors/write_log/v1-five-entries.bin")
}

fn entry(sector: u64, sector_count: u64, flags: Flags) -> Entry {
    let data = !(flags.has(Flags::DISCARD) || flags.has(Flags::FLUSH));
    Entry { sector, sector_count, flags, data_bytes: if data { sector_count * 512 } else { 0 } }
}

fn at(time: u64) -> CutTime {
    CutTime { promised: time, visible: time }
}

/// A write, a flush, a write with FUA, a discard, and zeroes.
fn write(path: &Path) -> Recording {
    let mut log = LogWriter::create(path).unwrap();
    log.add(entry(1, 2, Flags::default()), &[0xa1; 1024], at(1)).unwrap();
    log.add(entry(0, 0, Flags::FLUSH), &[], at(2)).unwrap();
    log.add(entry(4, 1, Flags::FUA), &[0xb2; 512], at(3)).unwrap();
    log.add(entry(2, 1, Flags::DISCARD), &[], at(4)).unwrap();
    log.add(entry(4, 2, Flags::default()), &[], at(5)).unwrap();
    log.finish().unwrap()
}

#[test]
fn the_writer_makes_the_vector_and_the_reader_reads_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("log");
    write(&path);
    assert!(
        std::fs::read(&path).unwrap() == std::fs::read(vector()).unwrap(),
        "the format has changed"
    );
    let recording = Recording::open(&vector()).unwrap();
    let shape = |n: usize| {
        let entry = recording.entries[n].entry;
        (entry.sector, entry.sector_count, entry.flags.0)
    };
    let shapes: Vec<_> = (0..recording.entries.len()).map(shape).collect();
    assert_eq!(shapes, [(1, 2, 0), (0, 0, 1), (4, 1, 2), (2, 1, 4), (4, 2, 0)]);
}

/// What lies where: first byte, size, name.
type Row = (usize, usize, &'static str);

/// The rows of a sector that begins with the fields of this table.
fn sector_rows(start: usize, table: Table) -> Vec<Row> {
    let mut rows: Vec<Row> =
        table.fields.iter().map(|field| (start + field.offset, field.size, field.name)).collect();
    rows.push((start + table.size, SECTOR_BYTES - table.size, ""));
    rows
}

/// All bytes of the vector, field by field, and its entries.
fn dump(bytes: &[u8]) -> String {
    let mut rows = sector_rows(0, superblock_at::TABLE);
    let (mut at, mut entries) = (SECTOR_BYTES, Vec::new());
    while at < bytes.len() {
        let entry = Entry::decode(&bytes[at..]).unwrap();
        let data_bytes = entry.data_sectors() as usize * SECTOR_BYTES;
        rows.extend(sector_rows(at, entry_at::TABLE));
        rows.extend((data_bytes > 0).then_some((at + SECTOR_BYTES, data_bytes, "data")));
        at += SECTOR_BYTES + data_bytes;
        entries.push(entry);
    }
    let mut text = dump_head("write_log/v1-five-entries", bytes.len());
    for (start, size, name) in rows {
        dump_row(&mut text, (start, size), name, &hex(&bytes[start..start + size]));
    }
    for entry in entries {
        writeln!(text, "\n{entry:#?}").unwrap();
    }
    text
}

#[test]
fn the_dump_shows_the_vector() {
    let text = std::fs::read_to_string(vector().with_extension("txt")).unwrap();
    assert_eq!(text, dump(&std::fs::read(vector()).unwrap()));
}

#[test]
fn cuts_of_the_vector_hold_what_the_definition_says() {
    let recording = Recording::open(&vector()).unwrap();
    let mut replay = Replay::new(&recording, Image::new(DISK_BYTES));
    let mut sectors = |cut: &str| {
        let image = replay.image(&cut.parse::<PowerCut>().unwrap()).unwrap();
        (0..6).map(|sector| image.read(sector * 512, 1)[0]).collect::<Vec<u8>>()
    };
    let (a, b) = (0xa1, 0xb2);
    assert_eq!(sectors("0:all"), [0; 6]);
    assert_eq!(sectors("1:none"), [0; 6]);
    assert_eq!(sectors("1:torn=0@512"), [0, a, 0, 0, 0, 0]);
    assert_eq!(sectors("2:none"), [0, a, a, 0, 0, 0]);
    assert_eq!(sectors("2:under-way@512"), [0, a, a, 0, b, 0]);
    assert_eq!(sectors("3:none"), [0, a, a, 0, b, 0]);
    assert_eq!(sectors("4:all"), [0, a, 0, 0, b, 0]);
    assert_eq!(sectors("5:without=3"), [0, a, a, 0, 0, 0]);
    assert_eq!(sectors("5:only=3"), [0, a, 0, 0, b, 0]);
    assert_eq!(sectors("0:all"), [0; 6], "a replay can go back");
}

#[test]
fn every_prefix_of_the_vector_is_refused_and_none_makes_the_reader_panic() {
    let folder = tempfile::tempdir().unwrap();
    let (bytes, path) = (std::fs::read(vector()).unwrap(), folder.path().join("log"));
    // The last entry's data are zeroes: a hole, which the reader does not touch until it replays.
    let headers = bytes.len() - 1024;
    for length in (0..headers).step_by(37) {
        std::fs::write(&path, &bytes[..length]).unwrap();
        assert!(Recording::open(&path).is_err(), "{length} bytes suffice");
    }
}

/// A log of sectors of 4 KiB, as another program may write it; all its data are sevens.
fn foreign(folder: &tempfile::TempDir, entries: &[Entry]) -> PathBuf {
    let sector_bytes: u32 = 4096;
    let sector = |bytes: &[u8]| [bytes, &vec![0; sector_bytes as usize - bytes.len()]].concat();
    let entry_count = entries.len() as u64;
    let mut bytes = sector(&Superblock { entry_count, sector_bytes }.encode());
    for entry in entries {
        bytes.extend(sector(&entry.encode()));
        bytes.resize(bytes.len() + (entry.data_sectors() as u32 * sector_bytes) as usize, 7);
    }
    let path = folder.path().join("foreign");
    std::fs::write(&path, bytes).unwrap();
    path
}

#[test]
fn an_entry_beyond_any_disk_is_refused_and_overflows_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let (write, discard) = (Flags::default(), Flags::DISCARD);
    for entry in [
        entry(1 << 60, 1, write),
        entry((1 << 51) - 1, 1, write),
        entry(0, 1 << 52, discard),
        entry(1, (1 << 51) - 1, discard),
    ] {
        let error = Recording::open(&foreign(&folder, &[entry])).unwrap_err().to_string();
        assert!(error.contains("beyond any disk"), "{error}");
    }
    let last = entry((1 << 51) - 2, 1, write);
    let recording = Recording::open(&foreign(&folder, &[last])).unwrap();
    assert_eq!(recording.end_bytes(), i64::MAX as u64 - 4095);
}

#[test]
fn a_mark_changes_nothing_even_if_it_claims_a_range() {
    let folder = tempfile::tempdir().unwrap();
    let mark = Flags::MARK.with(Flags::DISCARD);
    let entries = [entry(0, 1, Flags::default()), entry(0, 9, mark), entry(0, 0, Flags::FLUSH)];
    let recording = Recording::open(&foreign(&folder, &entries)).unwrap();
    assert_eq!(recording.end_bytes(), 4096);
    let mut replay = Replay::new(&recording, Image::new(DISK_BYTES));
    for cut in ["2:all", "3:all"] {
        let image = replay.image(&cut.parse::<PowerCut>().unwrap()).unwrap();
        assert_eq!(image.read(0, 1), [7], "{cut}");
    }
}

#[test]
#[ignore = "a tool: writes the vector"]
fn write_the_vector() {
    std::fs::create_dir_all(vector().parent().unwrap()).unwrap();
    write(&vector());
    std::fs::write(vector().with_extension("txt"), dump(&std::fs::read(vector()).unwrap()))
        .unwrap();
    std::fs::remove_file(vector().with_file_name("moments")).unwrap();
}
