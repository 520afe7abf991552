//! Builds the volumes that `bench/` opens with the real binary to measure recovery and memory.
//!
//! `bench_volume log FOLDER [SEGMENTS]`: a volume of 1 TiB named `log` with `SEGMENTS` (2,000)
//! segments of 512 extents of 4 KiB past its only checkpoint and 500 more in the journal alone,
//! left as a killed process leaves it. The store is `FOLDER/store`, the journal `FOLDER/journal`,
//! the staging folder `FOLDER`.
//!
//! `bench_volume map FOLDER EXTENTS PAGES_MAX`: a volume of 1 TiB named `map` whose checkpoint has
//! `EXTENTS` extents of 1 to `PAGES_MAX` pages, scattered evenly, each at a random place of a
//! random segment. The segments themselves are not there: opening needs the map alone. The first
//! page of each 16 GiB stays a hole, so that there is something to read.

use std::error::Error;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use sawmill_device::BlockDeviceExt;
use sawmill_format::checkpoint::{Checkpoint, PartEntry, SegmentEntry, checkpoint_key};
use sawmill_format::ids::PutId;
use sawmill_format::map_part::{MapExtent, PartIdentity, encode_part, part_crc, part_key};
use sawmill_store::{Blocking, Class, ObjectStore, StoreOptions};
use sawmill_volume::map::GROUP_BYTES;
use sawmill_volume::{CreateOptions, OpenOptions, Safety, Volume};

type Outcome<T> = Result<T, Box<dyn Error>>;

const PAGE: u64 = 4096;
const TIB: u64 = 1 << 40;
const EXTENTS_PER_SEGMENT: u64 = 512;
/// Records that only the journal has.
const UNSTORED_RECORDS: u64 = 500;
/// Segments of the volume that is only a map.
const SEGMENT_BYTES: u64 = 8 << 20;

struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }
}

fn store(folder: &Path) -> Outcome<Arc<dyn ObjectStore>> {
    std::fs::create_dir_all(folder)?;
    let folder = folder.canonicalize()?;
    Ok(sawmill_store::open(&format!("file://{}/store", folder.display()), StoreOptions::default())?)
}

fn build_log(folder: &Path, segments: u64) -> Outcome<()> {
    let store = store(folder)?;
    let segment_bytes = (EXTENTS_PER_SEGMENT * PAGE) as u32;
    sawmill_volume::create(
        &*store,
        "log",
        &CreateOptions { segment_bytes, ..CreateOptions::new(TIB) },
    )?;
    let mut options = OpenOptions::new(folder.join("journal"));
    options.staging_folder = folder.to_owned();
    options.segment_age_max = Duration::ZERO;
    options.checkpoint_bytes = u64::MAX;
    let volume = Volume::open(store, "log", options)?;
    let bytes = vec![0x5a; PAGE as usize];
    let start = Instant::now();
    let write = |index: u64| {
        // An odd factor makes every page come once, far from the one before.
        let page = index.wrapping_mul(0x9e37_79b9_7f4a_7c15) % (TIB / PAGE);
        volume.write_at(page * PAGE, &bytes)
    };
    let stored = segments * EXTENTS_PER_SEGMENT;
    (0..stored).try_for_each(write)?;
    volume.wait(Safety::Stored, None)?;
    let status = volume.status();
    // Less than a segment: it stays in the journal.
    (stored..stored + UNSTORED_RECORDS).try_for_each(write)?;
    volume.flush()?;
    println!(
        "{} extents in {} segments, built in {:.1} s",
        status.extents,
        status.segments,
        start.elapsed().as_secs_f64()
    );
    volume.close_now();
    Ok(())
}

/// Extents spread evenly over 1 TiB, in order, each at a random place of a random segment.
fn scattered(extents: u64, pages_max: u64, segments: u64) -> impl Iterator<Item = MapExtent> {
    let mut random = Random(0x5eed);
    let share = TIB / PAGE / extents;
    (0..extents).map(move |index| {
        let pages = 1 + random.below(pages_max);
        let first = u64::from((index * share * PAGE).is_multiple_of(GROUP_BYTES));
        let first = first.min(share - pages);
        let address = (index * share + first + random.below(share - pages - first + 1)) * PAGE;
        // An extent lies in one group: what would cross the border is cut off.
        let length = (pages * PAGE).min(GROUP_BYTES - address % GROUP_BYTES);
        let data_offset = (random.below((SEGMENT_BYTES - length) / PAGE + 1) * PAGE) as u32;
        MapExtent { address, length, sequence: 1 + random.below(segments), data_offset }
    })
}

fn build_map(folder: &Path, extents: u64, pages_max: u64) -> Outcome<()> {
    if extents == 0 || pages_max == 0 || TIB / PAGE / extents < pages_max {
        return Err(format!("{extents} extents of up to {pages_max} pages do not fit 1 TiB").into());
    }
    let store = store(folder)?;
    let record = sawmill_volume::create(&*store, "map", &CreateOptions::new(TIB))?;
    let (volume_id, put_id, number) = (record.volume_id, PutId([0x5a; 16]), 2);
    let put =
        |key: &str, body: Vec<u8>| Blocking(&*store).put(key, Bytes::from(body), Class::Upload);

    // Segments are three quarters full of live data on average, so that none gets too full.
    let segments = (extents * (pages_max + 1) / 2 * PAGE / (SEGMENT_BYTES / 4 * 3)).max(1);
    let mut live = vec![0u64; segments as usize];
    let mut parts = Vec::new();
    let mut coming = scattered(extents, pages_max, segments).peekable();
    for group in 0..TIB / GROUP_BYTES {
        let end = (group + 1) * GROUP_BYTES;
        let inside: Vec<MapExtent> =
            std::iter::from_fn(|| coming.next_if(|extent| extent.address < end)).collect();
        inside.iter().for_each(|extent| live[extent.sequence as usize - 1] += extent.length);
        if inside.is_empty() {
            continue;
        }
        let identity = PartIdentity { volume_id, group, number, put_id };
        let body = encode_part(&identity, group * GROUP_BYTES, &inside)?;
        let (bytes, extents, crc) = (body.len() as u32, inside.len() as u32, part_crc(&body));
        parts.push(PartEntry { group, number, put_id, bytes, extents, crc });
        put(&part_key(&identity), body)?;
    }
    let entry = |(sequence, live_bytes): (u64, &u64)| SegmentEntry {
        sequence,
        epoch: 1,
        // By chance, a segment may get more than the usual size.
        data_bytes: SEGMENT_BYTES.max(*live_bytes),
        live_bytes: *live_bytes,
        wall_unix_ms: record.created_unix_ms,
        header_bytes: 64 << 10,
        object_bytes: SEGMENT_BYTES + (64 << 10),
        dead: false,
    };
    let root = Checkpoint {
        volume_id,
        put_id,
        number,
        epoch: 1,
        through_sequence: segments,
        next_sequence: segments + 1,
        position: segments * SEGMENT_BYTES,
        wall_unix_ms: record.created_unix_ms,
        attached_ms: 0,
        repeats: 0,
        size_bytes: TIB,
        clean: true,
        extent_total: extents,
        live_bytes: live.iter().sum(),
        segments: (1..).zip(&live).map(entry).collect(),
        parts,
        kept: sawmill_format::kept_block::KeptBlock::default(),
    };
    put(&checkpoint_key(volume_id, number), root.encode()?)?;
    println!("{extents} extents of {} GiB in {segments} segments", root.live_bytes >> 30);
    Ok(())
}

fn main() -> Outcome<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words.as_slice() {
        ["log", folder] => build_log(folder.as_ref(), 2000),
        ["log", folder, segments] => build_log(folder.as_ref(), segments.parse()?),
        ["map", folder, extents, pages_max] => {
            build_map(folder.as_ref(), extents.parse()?, pages_max.parse()?)
        }
        _ => Err("usage: bench_volume log FOLDER [SEGMENTS] | map FOLDER EXTENTS PAGES_MAX".into()),
    }
}
