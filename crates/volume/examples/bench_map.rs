//! Measures the map of a volume: memory, lookups, checkpoints, opening.
//!
//! `bench_map lookups EXTENTS [PAGES_MAX]`: makes a map of 1 TiB with `EXTENTS` extents of 1 to
//! `PAGES_MAX` (1) pages, scattered evenly, and looks up a million random pages, one by one. Also
//! measures what one load costs whose address depends on the load before, in as much memory.
//!
//! `bench_map checkpoints FOLDER CHANGES...`: opens the volume that `bench_volume map FOLDER ...`
//! made, reads a page that nothing was written to, and for each of `CHANGES` writes as many
//! scattered pages and a checkpoint: how many bytes of map it put, and how much memory it took at
//! its peak.
//!
//! Not here: the memory of a serving process (`bench/run.py --only memory`).

use std::error::Error;
use std::path::Path;
use std::time::{Duration, Instant};

use sawmill_device::BlockDeviceExt;
use sawmill_store::StoreOptions;
use sawmill_volume::map::{MapExtent, ObjectMap};
use sawmill_volume::{OpenOptions, RecoveryStep, Safety, Volume};

type Outcome<T> = Result<T, Box<dyn Error>>;

const PAGE: u64 = 4096;
const TIB: u64 = 1 << 40;
const KIB: u64 = 1 << 10;
const LOOKUPS: usize = 1_000_000;
/// Extents loaded at once.
const BATCH: u64 = 100_000;

struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }
}

/// A line of the kernel's account of this process, in bytes.
fn memory_bytes(line: &str) -> Outcome<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let found = status.lines().find_map(|text| text.strip_prefix(line)?.strip_prefix(':'));
    let text = found.ok_or_else(|| format!("/proc/self/status has no {line}"))?;
    Ok(text.trim().trim_end_matches(" kB").parse::<u64>()? * KIB)
}

fn percentile(sorted: &[u64], share: f64) -> u64 {
    sorted[((sorted.len() - 1) as f64 * share) as usize]
}

fn lookups(extents: u64, pages_max: u64) -> Outcome<()> {
    let share = TIB / PAGE / extents;
    if share < pages_max {
        return Err(format!("{extents} extents of up to {pages_max} pages do not fit 1 TiB").into());
    }
    let resident_before = memory_bytes("VmRSS")?;
    let map = ObjectMap::new(TIB);
    let mut random = Random(0x5eed);
    let start = Instant::now();
    let mut batch = Vec::new();
    for index in 0..extents {
        let pages = 1 + random.below(pages_max);
        let address = (index * share + random.below(share - pages + 1)) * PAGE;
        let data_offset = (random.below(2048 - pages) * PAGE) as u32;
        let sequence = 1 + random.below(1 << 20) as u32;
        batch.push(MapExtent { address, length: pages * PAGE, sequence, data_offset });
        if batch.len() as u64 == BATCH || index + 1 == extents {
            map.import(&batch)?;
            batch.clear();
        }
    }
    let loaded = start.elapsed();
    drop(batch);
    let resident = memory_bytes("VmRSS")? - resident_before;
    let mut took = Vec::with_capacity(LOOKUPS);
    let mut clock = Vec::with_capacity(LOOKUPS);
    let mut found = 0;
    for _ in 0..LOOKUPS {
        let address = random.below(TIB / PAGE) * PAGE;
        let start = Instant::now();
        map.lookup(address, PAGE, &mut |piece| found += u64::from(piece.location.is_some()));
        took.push(start.elapsed().as_nanos() as u64);
        let start = Instant::now();
        clock.push(start.elapsed().as_nanos() as u64);
    }
    took.sort_unstable();
    clock.sort_unstable();
    let clock_ns = percentile(&clock, 0.5);
    let net = |share| percentile(&took, share).saturating_sub(clock_ns);
    println!(
        "{extents} extents of 1 to {pages_max} pages: {:.1} bytes each counted, {:.1} resident; \
         loaded in {:.2} s; {LOOKUPS} lookups ({found} found): p50 {} ns, p99 {} ns, without the \
         {clock_ns} ns of the clock; a dependent load from as much memory takes {:.0} ns",
        map.memory_bytes() as f64 / extents as f64,
        resident as f64 / extents as f64,
        loaded.as_secs_f64(),
        net(0.5),
        net(0.99),
        dependent_load_ns(resident),
    );
    Ok(())
}

/// Nanoseconds of a load whose address the load before it gave, at random places of so much memory.
fn dependent_load_ns(bytes: u64) -> f64 {
    const LINE_WORDS: usize = 8;
    let lines = (bytes as usize / 64).max(2);
    let mut random = Random(0x10ad);
    // One cycle through all lines (Sattolo).
    let mut order: Vec<u32> = (0..lines as u32).collect();
    for index in (1..lines).rev() {
        order.swap(index, random.below(index as u64) as usize);
    }
    let mut memory = vec![0_usize; lines * LINE_WORDS];
    for (line, next) in order.into_iter().enumerate() {
        memory[line * LINE_WORDS] = next as usize * LINE_WORDS;
    }
    let start = Instant::now();
    let mut at = 0;
    for _ in 0..LOOKUPS {
        at = memory[at];
    }
    let took = start.elapsed();
    std::hint::black_box(at);
    took.as_nanos() as f64 / LOOKUPS as f64
}

/// Bytes and objects below a folder.
fn below(folder: &Path) -> Outcome<(u64, u64)> {
    let (mut bytes, mut objects) = (0, 0);
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        let (more_bytes, more_objects) = match entry.file_type()?.is_dir() {
            true => below(&entry.path())?,
            false => (entry.metadata()?.len(), 1),
        };
        (bytes, objects) = (bytes + more_bytes, objects + more_objects);
    }
    Ok((bytes, objects))
}

/// The map objects that the store holds, by the checkpoint that put them.
fn map_objects(folder: &Path, volume: &Volume) -> Outcome<Vec<(String, u64, u64)>> {
    let maps = folder.join("store").join(volume.record().volume_id.to_string()).join("map");
    let mut found = Vec::new();
    for entry in std::fs::read_dir(maps)? {
        let entry = entry?;
        let (bytes, objects) = below(&entry.path())?;
        found.push((entry.file_name().to_string_lossy().into_owned(), bytes, objects));
    }
    found.sort();
    Ok(found)
}

fn checkpoints(folder: &Path, changes: &[u64]) -> Outcome<()> {
    let folder = folder.canonicalize()?;
    let url = format!("file://{}/store", folder.display());
    let store = sawmill_store::open(&url, StoreOptions::default())?;
    let mut options = OpenOptions::new(folder.join("journal"));
    options.staging_folder = folder.clone();
    options.checkpoint_bytes = u64::MAX;
    // The segments are not there: nothing of them can be moved.
    options.gc.start = 0.0;
    let start = Instant::now();
    let volume = Volume::open(store, "map", options)?;
    let opened = start.elapsed();
    let mut page = vec![0; PAGE as usize];
    volume.read_at(TIB / 2, page.len())?;
    let read = start.elapsed();
    let steps = volume.recovery().steps.iter();
    let map: Duration = steps.filter(|one| one.step == RecoveryStep::Map).map(|one| one.took).sum();
    println!(
        "{} extents: open in {:.3} s, of that the map {:.3} s, first read after {:.3} s; {:.0} MiB \
         resident, {:.0} at the peak",
        volume.status().extents,
        opened.as_secs_f64(),
        map.as_secs_f64(),
        read.as_secs_f64(),
        memory_bytes("VmRSS")? as f64 / (1 << 20) as f64,
        memory_bytes("VmHWM")? as f64 / (1 << 20) as f64,
    );
    let mut random = Random(0xc4a6e);
    page.fill(0x5a);
    for count in changes {
        let newest = map_objects(&folder, &volume)?.pop().map_or(String::new(), |last| last.0);
        for _ in 0..*count {
            volume.write_at(random.below(TIB / PAGE) * PAGE, &page)?;
        }
        volume.wait(Safety::Stored, None)?;
        // The peak is counted from here.
        std::fs::write("/proc/self/clear_refs", "5")?;
        let before = memory_bytes("VmRSS")?;
        let start = Instant::now();
        if !volume.checkpoint(Duration::from_secs(600)) {
            return Err("the checkpoint did not end in 10 minutes".into());
        }
        let took = start.elapsed();
        let new = map_objects(&folder, &volume)?.into_iter().filter(|(name, ..)| *name > newest);
        let (bytes, objects) =
            new.fold((0, 0), |sum, (_, bytes, objects)| (sum.0 + bytes, sum.1 + objects));
        println!(
            "{count} pages changed: a checkpoint put {:.2} MiB of map in {objects} objects, in \
             {:.2} s, and took {:.1} MiB more memory at its peak",
            bytes as f64 / (1 << 20) as f64,
            took.as_secs_f64(),
            memory_bytes("VmHWM")?.saturating_sub(before) as f64 / (1 << 20) as f64,
        );
    }
    let start = Instant::now();
    volume.close()?;
    println!("closed in {:.2} s", start.elapsed().as_secs_f64());
    Ok(())
}

fn main() -> Outcome<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words.as_slice() {
        ["lookups", extents] => lookups(extents.parse()?, 1),
        ["lookups", extents, pages_max] => lookups(extents.parse()?, pages_max.parse()?),
        ["checkpoints", folder, changes @ ..] => {
            let changes: Vec<u64> =
                changes.iter().map(|one| one.parse()).collect::<Result<_, _>>()?;
            checkpoints(folder.as_ref(), &changes)
        }
        _ => {
            Err("usage: bench_map lookups EXTENTS [PAGES_MAX] | checkpoints FOLDER CHANGES..."
                .into())
        }
    }
}
