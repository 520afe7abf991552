//! Power loss: what lay in memory is gone, and what had not been synced to the journal's disk is
//! there, half there or garbage. Every write accepted before a completed flush is kept; torn
//! records are dropped, never served.
//!
//! The loss is made by hand on a dead server's files: the staging memory is removed, and the
//! journal is damaged past its flushed position as a disk without power would.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::Path;

use sawmill_testkit::Dice;
use sawmill_tests::load::{Load, Mix};
use sawmill_tests::stamp::check_flushed_kept;
use sawmill_tests::store;
use sawmill_tests::test_bed::{TestBed, field};
use serde_json::Value;

const VOLUME_BYTES: u64 = 8 << 20;
const ROUNDS: usize = 24;
/// Where the ring begins in a journal, by `docs/format/journal.md`.
const RING_START: u64 = 8192;
const SECTOR: u64 = 512;

fn unsigned(document: &Value, name: &str) -> u64 {
    let found = field(document, name).and_then(Value::as_u64);
    found.unwrap_or_else(|| panic!("no number {name} in {document:#}"))
}

/// How the unsynced part of the journal ends up.
#[derive(Clone, Copy, Debug)]
enum Tail {
    /// As it was written.
    Kept,
    /// Never written.
    Zeroes,
    /// Each sector by itself is there or garbage.
    Mixed,
    /// A few flipped bits.
    Flipped,
}

fn damage(journal: &Path, from: u64, to: u64, capacity: u64, tail: Tail, dice: &mut Dice) {
    let file =
        OpenOptions::new().read(true).write(true).open(journal).expect("the journal is there");
    let offset_of = |position: u64| RING_START + position % capacity;
    let mut position = from;
    while position < to {
        let length = (SECTOR - position % SECTOR).min(to - position);
        let hit = match tail {
            Tail::Kept => false,
            Tail::Zeroes => true,
            Tail::Mixed => dice.one_in(2),
            Tail::Flipped => dice.one_in(200),
        };
        if hit {
            let mut bytes = vec![0; length as usize];
            match tail {
                Tail::Mixed => bytes = dice.bytes(length as usize),
                Tail::Flipped => {
                    file.read_exact_at(&mut bytes, offset_of(position)).expect("readable");
                    let bit = dice.below(length * 8);
                    bytes[(bit / 8) as usize] ^= 1 << (bit % 8);
                }
                Tail::Kept | Tail::Zeroes => {}
            }
            file.write_all_at(&bytes, offset_of(position)).expect("writable");
        }
        position += length;
    }
}

/// The highest position that any record in the ring says was flushed when it was made. What is on
/// the disk with such a mark was written after that sync, so no power loss can take what is below
/// the mark.
fn highest_mark(journal: &Path, capacity: u64, from: u64, to: u64) -> u64 {
    let bytes = std::fs::read(journal).expect("the journal is there");
    let ring = &bytes[RING_START as usize..];
    let word = |at: usize| {
        let eight = ring.get(at..at + 8).and_then(|eight| eight.try_into().ok());
        eight.map_or(0, u64::from_le_bytes)
    };
    let mut mark = 0;
    let mut at = 0;
    while let Some(found) = ring[at..].iter().position(|&byte| byte == b'S') {
        at += found;
        let position = word(at + 8);
        if ring[at..].starts_with(b"SWJR")
            && (from..to).contains(&position)
            && position % capacity == at as u64
        {
            mark = mark.max(word(at + 40));
        }
        at += 1;
    }
    mark
}

#[test]
fn flushed_writes_survive_power_loss_and_torn_records_are_dropped() {
    let bed = TestBed::new(&store::folder());
    bed.create("disk", "8M", &["--segment-bytes", "256K"]);
    let journal = bed.path("journal");
    let path = journal.display().to_string();
    let options = ["--journal", path.as_str(), "--journal-bytes", "16M", "--admin", "127.0.0.1:0"];
    // Flushes are the test's own, so that the flushed position is known.
    let mix = Mix { flush_once_in: u64::MAX, fua_once_in: u64::MAX, ..Mix::default() };
    let mut load = Load::new(VOLUME_BYTES, Dice::seeded("power_loss"), mix);
    let (mut kept_count, mut lost_count) = (0, 0);
    for round in 0..ROUNDS {
        // The machine does not reboot, so the test declares the power loss.
        let flags: &[&str] = if round > 0 { &["--accept-memory-loss"] } else { &[] };
        let server = bed.serve("disk").with(&options).with(flags).start();
        let client = server.connect();
        if round > 0 {
            let image = client.read_all().expect("readable after power loss");
            let verdict = check_flushed_kept(&load.log, &image)
                .unwrap_or_else(|violation| panic!("after power loss {round}: {violation}"));
            kept_count += verdict.kept;
            lost_count += verdict.lost;
            load.log.rebase(&image);
        }
        let clients = [client];
        let before = load.dice.below(300);
        load.run(&clients, before);
        let flush = load.log.submit_flush();
        clients[0].flush().expect("flushed");
        load.log.flushes[flush].completed = Some(load.log.clock.tick());
        let logged = unsigned(&server.status(), "logged");
        let after = 1 + load.dice.below(300);
        load.drive(&clients, after, || server.kill());

        for entry in std::fs::read_dir(bed.memory()).expect("the folder in memory").flatten() {
            std::fs::remove_file(entry.path()).expect("memory is lost");
        }
        let report = bed.sawmill(&["inspect", "journal", &path, "--json"]).json();
        let capacity = unsigned(&report, "capacity_bytes");
        let from = unsigned(&report, "from");
        let to = from + capacity;
        // The engine may have synced more by itself: what its marks cover was on the disk.
        let marked =
            unsigned(&report, "flushed_through").max(highest_mark(&journal, capacity, from, to));
        let from = logged.max(marked);
        let tail = [Tail::Kept, Tail::Zeroes, Tail::Mixed, Tail::Flipped][round % 4];
        damage(&journal, from, to, capacity, tail, &mut load.dice);
    }
    println!("{ROUNDS} power losses: {kept_count} writes kept, {lost_count} unflushed ones lost");
    assert!(
        kept_count > 0 && lost_count > 0,
        "nothing kept or nothing lost: this run proves nothing"
    );
}
