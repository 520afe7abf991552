//! A first pass over a whole trace: its disks and how far they reach, how long it lasts, and its
//! busiest minute. Also the layout of its disks on the simulated one.
//!
//! Invariants: no two disks share a byte of the simulated one. Every range that the survey has seen
//! read or written has a place.
//!
//! Not here: reading a trace (`crate::trace`), playing it (`play`), the price of the busiest minute
//! (`prices`).

use std::collections::{BTreeMap, HashMap};

use sawmill_volume::limits;

use crate::trace::{Operation, Request};
use sawmill_console::exit::{Failure, Result};
use sawmill_console::units::human_size;

const MINUTE_NS: u64 = 60_000_000_000;
const SECOND_NS: u64 = 1_000_000_000;
/// Each disk starts at a multiple of this, so that no two share a part of the map.
const DISK_STEP_BYTES: u64 = 16 << 20;
/// The unit of layout when the disks reach too far to be placed whole, one after the other.
const SLAB_BYTES: u64 = 1 << 30;

/// One disk of a trace.
#[derive(Default)]
struct Disk {
    end: u64,
    /// Parts that the trace reads or writes.
    slabs: BTreeMap<u64, ()>,
}

/// The busiest minute: reads and writes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Busiest {
    pub(super) requests_per_s: f64,
    pub(super) bytes_per_s: f64,
}

/// What a trace needs of a disk, and its rates: counted while it is read for the first time.
#[derive(Default)]
pub(super) struct Survey {
    pub(super) requests: u64,
    pub(super) reads: u64,
    pub(super) writes: u64,
    pub(super) span_ns: u64,
    pub(super) busiest: Busiest,
    disks: BTreeMap<u64, Disk>,
    minute: u64,
    minute_requests: u64,
    minute_bytes: u64,
}

impl Survey {
    pub(super) fn observe(&mut self, request: &Request) {
        self.requests += 1;
        self.span_ns = self.span_ns.max(request.at_ns);
        if request.length == 0 {
            return;
        }
        let minute = request.at_ns / MINUTE_NS;
        if minute != self.minute {
            self.close_minute();
            self.minute = minute;
        }
        let disk = self.disks.entry(request.device).or_default();
        disk.end = disk.end.max(request.address + request.length);
        self.reads += u64::from(request.operation == Operation::Read);
        self.writes += u64::from(request.operation == Operation::Write);
        if matches!(request.operation, Operation::Read | Operation::Write) {
            self.minute_requests += 1;
            self.minute_bytes += request.length;
            let slabs =
                request.address / SLAB_BYTES..=(request.address + request.length - 1) / SLAB_BYTES;
            // Only of reads and writes: a discard of a whole disk would make every slab of it one
            // in use.
            slabs.for_each(|slab| {
                disk.slabs.insert(slab, ());
            });
        }
    }

    /// Call this after the last request.
    pub(super) fn close_minute(&mut self) {
        // The rate of a trace that is shorter than a minute is that of its whole length.
        let seconds = (self.span_ns.clamp(SECOND_NS, MINUTE_NS)) as f64 / SECOND_NS as f64;
        let busiest = &mut self.busiest;
        busiest.requests_per_s = busiest.requests_per_s.max(self.minute_requests as f64 / seconds);
        busiest.bytes_per_s = busiest.bytes_per_s.max(self.minute_bytes as f64 / seconds);
        (self.minute_requests, self.minute_bytes) = (0, 0);
    }

    pub(super) fn disks(&self) -> usize {
        self.disks.len()
    }

    /// The layout of the disks on one of `size_bytes`, or of the smallest size that holds them.
    pub(super) fn lay_out(&self, size_bytes: Option<u64>) -> Result<Layout> {
        // Whole disks first: addresses stay together as they were, which decides how extents merge.
        let layout = self.side_by_side().unwrap_or_else(|| self.in_slabs());
        let reach = human_size(layout.least_bytes);
        match size_bytes {
            Some(size) if size < layout.least_bytes => Err(Failure::usage(format!(
                "--size {} is too small: the trace reaches to {reach}",
                human_size(size)
            ))),
            _ if layout.size_bytes > limits::SIZE_BYTES_MAX => Err(Failure::usage(format!(
                "the trace reaches to {reach}; a volume has at most {}",
                human_size(limits::SIZE_BYTES_MAX)
            ))),
            Some(size) => Ok(Layout { size_bytes: size, ..layout }),
            None => Ok(layout),
        }
    }

    /// None if the disks together reach further than a volume can.
    fn side_by_side(&self) -> Option<Layout> {
        let mut bases = HashMap::new();
        let mut at = 0u64;
        for (device, disk) in &self.disks {
            bases.insert(*device, at);
            let next = at.checked_add(disk.end)?;
            // The last disk needs no padding after it.
            (next <= limits::SIZE_BYTES_MAX).then_some(())?;
            at = next.next_multiple_of(DISK_STEP_BYTES);
        }
        let end = self.disks.last_key_value().map_or(0, |(device, disk)| bases[device] + disk.end);
        let size_bytes = end.max(1).next_multiple_of(SLAB_BYTES);
        Some(Layout { size_bytes, least_bytes: end, place: DiskPlacement::SideBySide(bases) })
    }

    /// Only the parts in use, in order.
    fn in_slabs(&self) -> Layout {
        let disks = self.disks.iter();
        let used = disks.flat_map(|(device, disk)| disk.slabs.keys().map(|slab| (*device, *slab)));
        let slabs: BTreeMap<_, _> = used.zip(0..).collect();
        let size_bytes = (slabs.len() as u64).max(1).saturating_mul(SLAB_BYTES);
        Layout { size_bytes, least_bytes: size_bytes, place: DiskPlacement::Slabs(slabs) }
    }
}

enum DiskPlacement {
    SideBySide(HashMap<u64, u64>),
    Slabs(BTreeMap<(u64, u64), u64>),
}

/// Where the addresses of a trace's disks are on the simulated one.
pub(super) struct Layout {
    pub(super) size_bytes: u64,
    /// The smallest size that holds the trace.
    least_bytes: u64,
    place: DiskPlacement,
}

impl Layout {
    /// Calls `visit(address, length)` for each part of a request's range. A part without an address
    /// is discarded or zeroed space that the trace never reads or writes.
    pub(super) fn each(
        &self,
        request: &Request,
        mut visit: impl FnMut(u64, u64) -> Result<()>,
    ) -> Result<()> {
        let &Request { device, address, length, .. } = request;
        match &self.place {
            DiskPlacement::SideBySide(bases) => {
                let base = bases.get(&device).copied().unwrap_or(0);
                visit(base + address, length)
            }
            DiskPlacement::Slabs(slabs) => {
                let end = address + length;
                // Only slabs in use: a discard may span billions that are not.
                let range = (device, address / SLAB_BYTES)..(device, end.div_ceil(SLAB_BYTES));
                for (&(_, slab), place) in slabs.range(range) {
                    let first = address.max(slab * SLAB_BYTES);
                    let stop = end.min((slab + 1) * SLAB_BYTES);
                    visit(place * SLAB_BYTES + first % SLAB_BYTES, stop - first)?;
                }
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(device: u64, address: u64, length: u64) -> Request {
        Request { at_ns: 0, operation: Operation::Write, device, address, length }
    }

    fn places(layout: &Layout, request: &Request) -> Vec<(u64, u64)> {
        let mut places = Vec::new();
        let mut visit = |address, length| {
            places.push((address, length));
            Ok(())
        };
        layout.each(request, &mut visit).unwrap();
        places
    }

    #[test]
    fn disks_lie_side_by_side_and_never_share_a_place() {
        let mut survey = Survey::default();
        let (first, second) = (request(7, 1 << 20, 4096), request(9, 0, 512));
        [&first, &second].into_iter().for_each(|request| survey.observe(request));
        let layout = survey.lay_out(None).unwrap();
        assert_eq!(layout.size_bytes, 1 << 30);
        assert_eq!(places(&layout, &first), [(1 << 20, 4096)]);
        assert_eq!(places(&layout, &second), [(16 << 20, 512)]);
        assert_eq!(survey.lay_out(Some(5 << 30)).unwrap().size_bytes, 5 << 30);
        let least = (16 << 20) + 512;
        assert_eq!(
            survey.lay_out(Some(least)).unwrap().size_bytes,
            least,
            "a disk may end where they end"
        );
        assert!(survey.lay_out(Some(least - 512)).is_err());
        assert!(survey.lay_out(Some(1 << 20)).err().unwrap().to_string().contains("--size 1 MiB"));
    }

    #[test]
    fn disks_that_reach_too_far_keep_only_what_they_use() {
        let mut survey = Survey::default();
        let far = request(1, (40 << 40) - 100, 200);
        let near = request(2, (30 << 40) + 5, 10);
        [&far, &near].into_iter().for_each(|request| survey.observe(request));
        let layout = survey.lay_out(None).unwrap();
        assert_eq!(layout.size_bytes, 3 << 30);
        assert_eq!(places(&layout, &far), [((1 << 30) - 100, 100), (1 << 30, 100)]);
        assert_eq!(places(&layout, &near), [((2 << 30) + 5, 10)]);
        let elsewhere = Request { operation: Operation::Discard, ..request(1, 0, 100) };
        assert!(places(&layout, &elsewhere).is_empty());
        // A loop over each slab of this one would take minutes.
        let all = Request { operation: Operation::Discard, ..request(2, 0, 1 << 63) };
        assert_eq!(places(&layout, &all), [(2 << 30, 1 << 30)]);
    }

    #[test]
    fn the_busiest_minute_counts_and_a_short_trace_is_not_thinned_to_one() {
        let mut survey = Survey::default();
        for (at_s, count) in [(0, 60), (61, 600), (200, 1)] {
            for _ in 0..count {
                survey.observe(&Request { at_ns: at_s * SECOND_NS, ..request(0, 0, 1000) });
            }
        }
        survey.close_minute();
        assert_eq!((survey.busiest.requests_per_s, survey.busiest.bytes_per_s), (10.0, 10_000.0));
        let mut short = Survey::default();
        (0..30).for_each(|n| {
            short.observe(&Request { at_ns: n * SECOND_NS / 10, ..request(0, 0, 1000) })
        });
        short.close_minute();
        assert!((short.busiest.requests_per_s - 30.0 / 2.9).abs() < 1e-9);
    }
}
