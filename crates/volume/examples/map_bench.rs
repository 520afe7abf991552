//! Measures the two maps: bytes per extent, time per insert and lookup, export and import.
//!
//! `cargo run --release -p sawmill-volume --example map_bench [extents]...` (without counts: 1 M
//! and 10 M). The resident size is what the process grew by, the allocator's own cost included; it
//! says something for the first map of a run only, as the later ones reuse freed memory. Lookup
//! times are the best of three rounds.

use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use sawmill_volume::map::{JournalMap, MapExtent, ObjectMap};

const PAGE: u64 = 4096;
const LOOKUPS: u64 = 2_000_000;

struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        ((u128::from(self.0) * u128::from(bound)) >> 64) as u64
    }
}

/// Resident bytes of this process, 0 where the kernel does not tell.
fn resident_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    statm.split(' ').nth(1).and_then(|pages| pages.parse::<u64>().ok()).unwrap_or(0) * PAGE
}

fn per(start: Instant, count: u64) -> f64 {
    start.elapsed().as_nanos() as f64 / count as f64
}

/// Random extents of 1 to `pages_max` pages at random pages until the map holds `extents`.
fn object_map(name: &str, extents: u64, size_bytes: u64, pages_max: u64) {
    let resident = resident_bytes();
    let map = ObjectMap::new(size_bytes);
    let mut random = Random(0x5eed);
    let mut inserts = 0;
    let start = Instant::now();
    while map.extents() < extents && inserts < 4 * extents {
        let address = random.below(size_bytes / PAGE - pages_max) * PAGE;
        let length = (1 + random.below(pages_max)) * PAGE;
        map.insert(
            address,
            length,
            (inserts / 256) as u32,
            (inserts % 256) as u32 * 65536,
            &mut |_, _| {},
        );
        inserts += 1;
    }
    let insert_ns = per(start, inserts);
    let resident = resident_bytes().saturating_sub(resident);
    let best_of_three =
        |threads| (0..3).map(|_| lookups(&map, size_bytes, threads)).fold(f64::MAX, f64::min);
    let (lookup_ns, shared_ns) = (best_of_three(1), best_of_three(2));

    let start = Instant::now();
    let parts: Vec<Vec<MapExtent>> =
        map.groups().into_iter().map(|group| map.export_group(group)).collect();
    let export_ms = start.elapsed().as_millis();
    let exported: usize = parts.iter().map(Vec::len).sum();
    let copy = ObjectMap::new(size_bytes);
    let start = Instant::now();
    for part in &parts {
        copy.import(part).expect("an export imports");
    }
    let import_ms = start.elapsed().as_millis();

    let held = map.extents() as f64;
    println!(
        "object map, {name}: {} extents, {} GiB of {}",
        map.extents(),
        map.mapped_bytes() >> 30,
        size_bytes >> 30
    );
    println!(
        "  memory {} MiB = {:.1} B/extent; resident {} MiB = {:.1} B/extent; imported {:.1} \
        B/extent",
        map.memory_bytes() >> 20,
        map.memory_bytes() as f64 / held,
        resident >> 20,
        resident as f64 / held,
        copy.memory_bytes() as f64 / copy.extents() as f64,
    );
    println!(
        "  insert {insert_ns:.0} ns, lookup of 4 KiB {lookup_ns:.0} ns, by 2 threads \
         {shared_ns:.0} ns each; export {exported} in {export_ms} ms, import {import_ms} ms"
    );
}

/// Nanoseconds per lookup of a random page, in each of `threads`.
fn lookups(map: &ObjectMap, size_bytes: u64, threads: u64) -> f64 {
    let start = Instant::now();
    std::thread::scope(|scope| {
        for thread in 0..threads {
            scope.spawn(move || {
                let mut random = Random(0xcafe + thread);
                let mut sum = 0u64;
                for _ in 0..LOOKUPS {
                    let address = random.below(size_bytes / PAGE) * PAGE;
                    map.lookup(address, PAGE, &mut |piece| sum += piece.length);
                }
                assert_eq!(black_box(sum), LOOKUPS * PAGE);
            });
        }
    });
    per(start, LOOKUPS)
}

/// Entries of one page at random pages, first fresh, then each replaced by a newer one.
fn journal_map(entries: u64) {
    let map = JournalMap::new();
    let value = Arc::new(());
    let size_bytes = 64 << 30;
    let addresses: Vec<u64> = {
        let mut random = Random(0xbeef);
        (0..entries).map(|_| random.below(size_bytes / PAGE) * PAGE).collect()
    };
    let mut rounds = Vec::new();
    for round in 0..3 {
        let start = Instant::now();
        for (&address, index) in addresses.iter().zip(0..) {
            map.insert(address, PAGE, round * entries + index, value.clone());
        }
        rounds.push(per(start, entries));
    }
    let start = Instant::now();
    let mut hits = 0;
    for &address in &addresses {
        map.lookup(address, PAGE, &mut |piece| hits += u64::from(piece.entry.is_some()));
    }
    let lookup_ns = per(start, entries);
    assert_eq!(hits, entries);
    let held = map.entries();
    let start = Instant::now();
    for (&address, index) in addresses.iter().zip(0..) {
        map.remove(address, PAGE, 2 * entries + index);
    }
    let remove_ns = per(start, entries);
    assert!(map.is_empty());
    println!(
        "journal map: {held} entries of 4 KiB: fresh insert {:.0} ns, replace {:.0} ns, \
         lookup {lookup_ns:.0} ns, remove {remove_ns:.0} ns",
        rounds[0], rounds[2]
    );
}

fn huge_ranges() {
    let size_bytes: u64 = 2 << 40;
    let map = ObjectMap::new(size_bytes);
    let start = Instant::now();
    map.remove(0, size_bytes, &mut |_, _| {});
    let empty = start.elapsed();
    let mut random = Random(1);
    for _ in 0..10_000 {
        map.insert(random.below(size_bytes / PAGE) * PAGE, PAGE, 1, 0, &mut |_, _| {});
    }
    let start = Instant::now();
    map.remove(0, size_bytes, &mut |_, _| {});
    println!(
        "discard of 2 TiB: empty map {empty:?}, 10 000 scattered extents {:?}",
        start.elapsed()
    );
}

fn main() {
    let mut counts: Vec<u64> =
        std::env::args().skip(1).filter_map(|count| count.parse().ok()).collect();
    if counts.is_empty() {
        counts = vec![1_000_000, 10_000_000];
    }
    for &extents in &counts {
        object_map("1 to 16 pages, half full", extents, extents * 68 * 1024, 16);
        object_map("single pages, one in five", extents, extents * 5 * PAGE, 1);
        object_map("single pages, shattered", extents, extents * PAGE * 10 / 9, 1);
    }
    for entries in [10_000, 100_000, 1_000_000] {
        journal_map(entries);
    }
    huge_ranges();
}
