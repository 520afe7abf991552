//! The device contract for caches of every policy, on devices that answer immediately, or late and
//! in any order; and for `Unpacker`.

use std::sync::Arc;

use sawmill_device::{BlockDevice, Geometry, MemoryDevice, Operations, conformance};
use sawmill_link::Unpacker;
use sawmill_link::cache::{Cache, Options, Policy};

use crate::below::{LowerDevice, Mode};

const SIZE_BYTES: u64 = 16 << 20;

fn small(policy: Policy) -> Options {
    Options { policy, cache_bytes_max: 256 << 10, dirty_bytes_max: 64 << 10, ..Options::default() }
}

fn late(policy: Policy, options: Options) -> Arc<dyn BlockDevice> {
    let below = LowerDevice::over(MemoryDevice::new(SIZE_BYTES), Mode::Late, 7);
    Arc::new(Cache::new(below, &Options { policy, ..options }).unwrap())
}

#[test]
fn a_write_back_cache_keeps_the_contract() {
    conformance::all(&|| {
        let below = Unpacker::new(MemoryDevice::new(SIZE_BYTES));
        Arc::new(Cache::new(below, &Options::default()).unwrap())
    });
    conformance::all(&|| late(Policy::WriteBack, Options::default()));
}

#[test]
fn a_cache_much_smaller_than_the_device_keeps_the_contract() {
    conformance::all(&|| late(Policy::WriteBack, small(Policy::WriteBack)));
    let tiny =
        Options { cache_bytes_max: 64 << 10, dirty_bytes_max: 16 << 10, ..Options::default() };
    conformance::all(&|| late(Policy::WriteBack, Options { write_backs_max: 1, ..tiny }));
}

#[test]
fn write_through_and_write_around_keep_the_contract() {
    conformance::all(&|| late(Policy::WriteThrough, small(Policy::WriteThrough)));
    conformance::all(&|| late(Policy::WriteAround, small(Policy::WriteAround)));
}

#[test]
fn odd_sizes_short_requests_and_missing_operations_will_do() {
    let operations = Operations { discard: false, write_zeroes: false, allocation: false };
    let full = MemoryDevice::new(SIZE_BYTES + 12_345).geometry();
    let plain = Geometry { operations, request_bytes_max: 8192, preferred_bytes: 4096, ..full };
    for policy in [Policy::WriteBack, Policy::WriteThrough, Policy::WriteAround] {
        conformance::all(&|| {
            let below = LowerDevice::over(MemoryDevice::with_geometry(plain), Mode::Late, 3);
            Arc::new(Cache::new(below, &small(policy)).unwrap())
        });
    }
}

#[test]
fn a_read_only_device_stays_one() {
    let full = MemoryDevice::new(SIZE_BYTES).geometry();
    let read_only = Geometry { read_only: true, ..full };
    conformance::read_only(&|| {
        let below = Unpacker::new(MemoryDevice::with_geometry(read_only));
        Arc::new(Cache::new(below, &Options::default()).unwrap())
    });
}

#[test]
fn a_device_that_unpacks_keeps_the_contract() {
    conformance::all(&|| Arc::new(Unpacker::new(MemoryDevice::new(SIZE_BYTES))));
}
