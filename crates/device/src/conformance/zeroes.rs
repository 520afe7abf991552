//! The clauses about ranges without data: zeroed, discarded, and the holes that an allocation query
//! reports.
//!
//! Not here: that a discard inside a long series of requests keeps the contract (`super`, D3).

use super::{Device, expect, is_zero, read, write};
use crate::{Allocation, BlockDevice, BlockDeviceExt, ErrorKind, Flags, Operation};

/// D9: write-zeroes gives zeroes; discard gives zeroes or what was there; neighbors stay; long
/// ranges work.
pub fn d9_zeroed_ranges_read_as_zeroes(device: Device) {
    let geometry = device.geometry();
    let no_unmap = Flags { no_unmap: true, ..Flags::default() };
    let ranges =
        [(4096, 4096), (4097, 1), (1000, 100_000), (65_535, 65_538), (511, 2), (0, 200_000)];
    for (address, length) in ranges {
        if geometry.operations.write_zeroes {
            for flags in [Flags::default(), no_unmap, Flags { fua: true, ..no_unmap }] {
                write(&device, 0, &vec![9; 300_000]);
                expect(
                    device.call(Operation::WriteZeroes, address, length, flags, Vec::new()),
                    "D9: write-zeroes",
                );
                check_cleared(&device, address, length, |byte| byte == 0);
            }
        }
        if geometry.operations.discard {
            write(&device, 0, &vec![9; 300_000]);
            expect(device.discard(address, length), "D9: discard");
            check_cleared(&device, address, length, |byte| byte == 0 || byte == 9);
        }
    }
    write(&device, geometry.size_bytes - 10, &[9; 10]);
    if geometry.operations.discard {
        expect(device.discard(0, geometry.size_bytes), "D9: a discard of the whole device");
    }
    if geometry.operations.write_zeroes {
        expect(device.write_zeroes(0, geometry.size_bytes), "D9: write-zeroes of the whole device");
        assert!(is_zero(&read(&device, 0, 300_000)), "D9: the whole device is zero");
        assert!(
            is_zero(&read(&device, geometry.size_bytes - 10, 10)),
            "D9: the whole device is zero"
        );
    }
}

/// D11: an allocation answer covers its range exactly, in runs that are not empty, and a hole reads
/// as zeroes.
pub fn d11_allocation_covers_the_range_and_holes_read_as_zeroes(device: Device) {
    let geometry = device.geometry();
    if !geometry.operations.allocation {
        let kind = device.allocation(0, 4096).map_err(|error| error.kind());
        return assert_eq!(kind, Err(ErrorKind::Invalid), "D6: an unsupported query is Invalid");
    }
    if !geometry.read_only {
        for address in [10_000, 500_000, 501_000, 3_000_000] {
            write(&device, address, &[3; 5000]);
        }
    }
    let ranges =
        [(0, 4_000_000), (500_001, 1), (10_500, 100), (499_999, 7001), (0, geometry.size_bytes)];
    for (address, length) in ranges {
        let runs = expect(device.allocation(address, length), "D11: an allocation query");
        check_runs(&device, address, length, &runs);
    }
}

fn check_runs(device: &Device, address: u64, length: u64, runs: &[Allocation]) {
    assert!(runs.iter().all(|run| run.length > 0), "D11: no run is empty");
    let total: u64 = runs.iter().map(|run| run.length).sum();
    assert_eq!(total, length, "D11: the runs cover the range at {address} exactly");
    let mut at = address;
    for run in runs {
        if !run.data {
            for place in [at, at + run.length.saturating_sub(100_000)] {
                let bytes = read(device, place, run.length.min(100_000) as usize);
                assert!(
                    is_zero(&bytes),
                    "D11: a hole of {} bytes at {at} reads as zeroes",
                    run.length
                );
            }
        }
        at += run.length;
    }
}

fn check_cleared(device: &Device, address: u64, length: u64, allowed: impl Fn(u8) -> bool) {
    let bytes = read(device, 0, 300_000);
    let range = address as usize..(address + length) as usize;
    let inside = bytes[range.clone()].iter().all(|byte| allowed(*byte));
    assert!(inside, "D9: the range of {length} bytes at {address} reads as it must");
    let outside = bytes[..range.start].iter().chain(&bytes[range.end..]).all(|byte| *byte == 9);
    assert!(outside, "D9: the bytes around {length} at {address} keep their values");
}
