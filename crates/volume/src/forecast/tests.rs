//! The forecast against a brute-force disk of 512-byte units, which knows nothing of the engine;
//! and the rules that the brute force leaves out: age, checkpoints, refusals.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

const UNIT: u64 = 512;
const SEGMENT: u64 = 256 << 10;
const HOLE: u64 = limits::GC_HOLE_BYTES_MAX;

/// Where a unit of the disk lies: segment and unit in it.
type Location = Option<(u32, u64)>;

/// Everything is recounted from the units each time.
struct BruteForce {
    units: Vec<Location>,
    /// Data units by segment; segments without live units are forgotten.
    sizes: BTreeMap<u32, u64>,
    pending: Vec<(usize, bool)>,
    next: u32,
    policy: Option<GcPolicy>,
    plugs: bool,
    data_segment_bytes: u64,
    moved_bytes: u64,
}

impl BruteForce {
    fn new(size_bytes: u64, policy: Option<GcPolicy>, plugs: bool) -> Self {
        BruteForce {
            units: vec![None; (size_bytes / UNIT) as usize],
            sizes: BTreeMap::new(),
            pending: Vec::new(),
            next: 1,
            policy,
            plugs,
            data_segment_bytes: 0,
            moved_bytes: 0,
        }
    }

    fn touch(&mut self, address: u64, length: u64, is_write: bool) {
        let units = (address / UNIT) as usize..((address + length) / UNIT) as usize;
        self.pending.extend(units.map(|unit| (unit, is_write)));
        let written = self.pending.iter().filter(|(_, is_write)| *is_write).count() as u64;
        if written * UNIT >= SEGMENT {
            self.seal();
        }
    }

    fn seal(&mut self) {
        let last: BTreeMap<usize, bool> = self.pending.drain(..).collect();
        if last.is_empty() {
            return;
        }
        let mut data = 0;
        for (unit, is_write) in last {
            self.units[unit] = is_write.then_some((self.next, data));
            data += u64::from(is_write);
        }
        self.data_segment_bytes += data * UNIT;
        self.sizes.insert(self.next, data);
        self.next += 1;
        self.collect();
    }

    fn live(&self, segment: u32) -> u64 {
        self.units.iter().flatten().filter(|(of, _)| *of == segment).count() as u64
    }

    /// Live and data units of each segment that has any live.
    fn usage(&mut self) -> BTreeMap<u32, (u64, u64)> {
        let all = self.sizes.iter().map(|(segment, size)| (*segment, (self.live(*segment), *size)));
        let used: BTreeMap<u32, (u64, u64)> = all.filter(|(_, (live, _))| *live > 0).collect();
        self.sizes.retain(|segment, _| used.contains_key(segment));
        used
    }

    fn collect(&mut self) {
        let Some(policy) = self.policy else { return };
        loop {
            let usage = self.usage();
            let live: u64 = usage.values().map(|(live, _)| live).sum();
            let data: u64 = usage.values().map(|(_, data)| data).sum();
            if data == live || live as f64 / data as f64 >= policy.start {
                return;
            }
            let mut order: Vec<_> = usage.iter().filter(|(_, (live, data))| live < data).collect();
            order.sort_by(|(a, (la, da)), (b, (lb, db))| (la * db).cmp(&(lb * da)).then(a.cmp(b)));
            let (mut left, mut moved, mut victims) = (data, 0, Vec::new());
            for (segment, (its_live, its_data)) in order {
                let too_much = (moved + its_live) * UNIT > 8 * SEGMENT && !victims.is_empty();
                if too_much || live as f64 / left as f64 >= policy.stop {
                    break;
                }
                victims.push(*segment);
                left -= its_data - its_live;
                moved += its_live;
            }
            self.move_out(&victims);
        }
    }

    fn move_out(&mut self, victims: &[u32]) {
        let is_victim =
            |location: &Location| location.is_some_and(|(segment, _)| victims.contains(&segment));
        let mut moving: Vec<usize> =
            (0..self.units.len()).filter(|at| is_victim(&self.units[*at])).collect();
        if self.plugs {
            let gaps: Vec<_> = moving.windows(2).map(|pair| pair[0] + 1..pair[1]).collect();
            let small = gaps.into_iter().filter(|gap| gap.len() as u64 * UNIT <= HOLE);
            let plugs: Vec<usize> =
                small.flatten().filter(|at| self.units[*at].is_some()).collect();
            moving.extend(plugs);
            moving.sort_unstable();
        }
        for output in moving.chunks((SEGMENT / UNIT) as usize) {
            for (data, unit) in (0..).zip(output) {
                self.units[*unit] = Some((self.next, data));
            }
            self.sizes.insert(self.next, output.len() as u64);
            self.moved_bytes += output.len() as u64 * UNIT;
            self.next += 1;
        }
    }

    fn extents(&self) -> u64 {
        let follows = |pair: &[Location]| match pair {
            [Some((a, at)), Some((b, next))] => a == b && at + 1 == *next,
            _ => false,
        };
        let joined = self.units.windows(2).filter(|pair| follows(pair)).count();
        (self.units.iter().flatten().count() - joined) as u64
    }
}

fn options(size_bytes: u64) -> ForecastOptions {
    ForecastOptions {
        segment_bytes: SEGMENT as u32,
        segment_age_max: Duration::ZERO,
        ..ForecastOptions::new(size_bytes)
    }
}

/// A write or a discard: first unit, units, whether it writes. Most are in a hot eighth of the
/// disk.
fn request() -> impl Strategy<Value = (u64, u64, bool)> {
    let hot = (0u64..512, 1u64..64, Just(true));
    let cold = (0u64..4000, 1u64..90, prop::bool::weighted(0.9));
    prop_oneof![3 => hot, 2 => cold]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn a_forecast_is_what_recounting_every_unit_gives(
        requests in prop::collection::vec(request(), 1..700),
        stop in 0.70f64..0.9,
        is_collected in prop::bool::weighted(0.8),
        plugs in any::<bool>(),
    ) {
        let size_bytes = 4096 * UNIT;
        let policy = is_collected.then(|| GcPolicy { start: 0.70, stop, ..GcPolicy::default() });
        let options = ForecastOptions { gc: policy, plugs, ..options(size_bytes) };
        let mut forecast = Forecast::new(options).unwrap();
        let mut brute = BruteForce::new(size_bytes, policy, plugs);
        let mut written_bytes = 0;
        for (unit, units, is_write) in requests {
            let (address, length) = (unit * UNIT, units * UNIT);
            if is_write {
                forecast.write(address, length, Duration::ZERO).unwrap();
                written_bytes += length;
            } else {
                forecast.discard(address, length, Duration::ZERO).unwrap();
            }
            brute.touch(address, length, is_write);
        }
        let report = forecast.finish().unwrap();
        brute.seal();
        let usage = brute.usage();
        prop_assert_eq!(report.written_bytes, written_bytes);
        prop_assert_eq!(report.data_segment_bytes, brute.data_segment_bytes);
        prop_assert_eq!(report.coalesced_bytes, written_bytes - brute.data_segment_bytes);
        prop_assert_eq!(report.moved_bytes, brute.moved_bytes);
        prop_assert_eq!(report.extents, brute.extents());
        prop_assert_eq!(
            report.live_bytes, UNIT * usage.values().map(|(live, _)| live).sum::<u64>()
        );
        let used_bytes = report.data_bytes - report.dead_bytes;
        prop_assert_eq!(used_bytes, UNIT * usage.values().map(|(_, data)| data).sum::<u64>());
    }
}

const SECOND: Duration = Duration::from_secs(1);

#[test]
fn a_segment_is_sealed_by_size_by_age_and_at_the_end() {
    let mut forecast =
        Forecast::new(ForecastOptions { segment_age_max: 5 * SECOND, ..options(1 << 30) }).unwrap();
    forecast.write(0, SEGMENT, Duration::ZERO).unwrap();
    forecast.write(SEGMENT, 100, SECOND).unwrap();
    forecast.write(SEGMENT, 100, 5 * SECOND).unwrap();
    forecast.write(SEGMENT, 100, 6 * SECOND).unwrap();
    let report = forecast.finish().unwrap();
    assert_eq!(report.data_segments, 3);
    assert_eq!((report.coalesced_bytes, report.data_segment_bytes), (100, SEGMENT + 200));
    assert_eq!(report.requests.put_segments, 3);
}

#[test]
fn samples_are_in_order_bounded_and_end_with_the_last_state() {
    let mut forecast = Forecast::new(options(1 << 30)).unwrap();
    for n in 0..3000 {
        forecast.write(n % 64 * SEGMENT, SEGMENT, SECOND * n as u32).unwrap();
    }
    let report = forecast.finish().unwrap();
    let samples = &report.samples;
    assert!(samples.len() > 200 && samples.len() < 600, "{}", samples.len());
    assert!(
        samples.windows(2).all(|pair| pair[0].at <= pair[1].at && pair[0].puts <= pair[1].puts)
    );
    let last = samples.last().unwrap();
    assert_eq!((last.at, last.written_bytes), (SECOND * 2999, 3000 * SEGMENT));
}

#[test]
fn what_is_dead_goes_behind_the_second_checkpoint_that_found_it_dead() {
    let size_bytes = 64 * SEGMENT;
    let mut forecast = Forecast::new(ForecastOptions { gc: None, ..options(size_bytes) }).unwrap();
    for n in 0..1000 {
        forecast.write(n % 64 * SEGMENT, SEGMENT, Duration::ZERO).unwrap();
    }
    let report = forecast.finish().unwrap();
    assert_eq!((report.live_bytes, report.moved_bytes), (size_bytes, 0));
    // Two times what makes a checkpoint worth its price, and a little.
    assert!(report.dead_bytes <= 12 * SEGMENT, "{}", report.dead_bytes);
    assert!(report.checkpoints >= 100 && report.requests.put_checkpoints >= 2 * report.checkpoints);
    assert!(
        report.requests.list == 2 * report.checkpoints
            && report.requests.delete > report.requests.list
    );
}

#[test]
fn what_is_dead_is_let_go_when_a_busy_time_ends() {
    let mut forecast = Forecast::new(options(1 << 30)).unwrap();
    forecast.write(0, SEGMENT, Duration::ZERO).unwrap();
    forecast.write(0, SEGMENT, Duration::ZERO).unwrap();
    assert_eq!(forecast.report.checkpoints, 0);
    forecast.read(0, 1, 10 * SECOND).unwrap();
    assert_eq!(forecast.report.checkpoints, 2);
    let report = forecast.finish().unwrap();
    assert_eq!((report.segments, report.dead_bytes, report.checkpoints), (1, 0, 2));
}

#[test]
fn reads_are_counted_as_if_nothing_were_cached() {
    let mut forecast = Forecast::new(options(1 << 30)).unwrap();
    forecast.write(4096, SEGMENT, Duration::ZERO).unwrap();
    // A hole, what was written, a hole.
    forecast.read(0, 1 << 20, SECOND).unwrap();
    forecast.read(8192, 4096, SECOND).unwrap();
    let report = forecast.finish().unwrap();
    assert_eq!((report.reads, report.read_bytes), (2, (1 << 20) + 4096));
    assert_eq!(report.requests.get_reads_max, 4);
    assert_eq!(report.requests.get_max(), 4);
}

#[test]
fn what_no_volume_can_be_or_hold_is_refused() {
    for (size_bytes, segment_bytes) in
        [(0, 8 << 20), (u64::MAX, 8 << 20), (1 << 30, 3 << 20), (1 << 30, 1)]
    {
        let refused =
            Forecast::new(ForecastOptions { segment_bytes, ..ForecastOptions::new(size_bytes) });
        assert_eq!(refused.err().map(|error| error.kind()), Some(ErrorKind::Invalid));
    }
    let mut forecast = Forecast::new(options(1 << 20)).unwrap();
    for (address, length) in [(1 << 20, 1), ((1 << 20) - 1, 2), (u64::MAX, 2)] {
        let refused = [
            forecast.write(address, length, SECOND),
            forecast.read(address, length, SECOND),
            forecast.discard(address, length, SECOND),
        ];
        assert!(
            refused
                .into_iter()
                .all(|r| r.err().map(|error| error.kind()) == Some(ErrorKind::Invalid))
        );
    }
    let report = forecast.finish().unwrap();
    assert_eq!((report.writes, report.written_bytes), (0, 0), "what is refused is not counted");
    assert_eq!((report.reads, report.discards), (0, 0));
}
