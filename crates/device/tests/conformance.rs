//! The contract, run on every device and every layer of this crate.

use std::sync::Arc;

use sawmill_device::layer::{Decision, Fault, Gate, Meter, ReadOnly};
use sawmill_device::{
    BlockDevice, Geometry, MemoryDevice, NullDevice, Operations, Request, conformance,
};

const SIZE_BYTES: u64 = 64 << 20;

#[test]
fn a_memory_device_keeps_the_contract() {
    conformance::all(&|| Arc::new(MemoryDevice::new(SIZE_BYTES)));
}

#[test]
fn a_device_of_the_smallest_and_of_an_odd_size_keeps_the_contract() {
    conformance::all(&|| Arc::new(MemoryDevice::new(conformance::SIZE_BYTES_MIN)));
    conformance::all(&|| Arc::new(MemoryDevice::new(conformance::SIZE_BYTES_MIN + 12_345)));
}

#[test]
fn a_device_without_the_optional_operations_keeps_the_contract() {
    let operations = Operations { discard: false, write_zeroes: false, allocation: false };
    let full = MemoryDevice::new(SIZE_BYTES).geometry();
    let plain = Geometry { operations, request_bytes_max: 1 << 20, ..full };
    conformance::all(&|| Arc::new(MemoryDevice::with_geometry(plain)));
}

#[test]
fn random_requests_with_many_seeds_agree_with_a_byte_vector() {
    for seed in 100..108 {
        let device = Arc::new(MemoryDevice::new(SIZE_BYTES));
        conformance::random_requests_agree_with_a_byte_vector(device, seed, 1000);
    }
}

#[test]
fn a_null_device_keeps_every_clause_that_does_not_need_memory() {
    for clause in conformance::NULL {
        (clause.test)(Arc::new(NullDevice::new(SIZE_BYTES)));
    }
}

#[test]
fn a_read_only_layer_keeps_the_contract_of_a_read_only_device() {
    conformance::read_only(&|| Arc::new(ReadOnly::new(MemoryDevice::new(SIZE_BYTES))));
    conformance::read_only(&|| Arc::new(ReadOnly::new(NullDevice::new(SIZE_BYTES))));
}

#[test]
fn a_fault_layer_without_faults_keeps_the_contract() {
    conformance::all(&|| {
        Arc::new(Fault::new(MemoryDevice::new(SIZE_BYTES), |_: &Request| Decision::Pass))
    });
}

#[test]
fn a_meter_keeps_the_contract() {
    conformance::all(&|| Arc::new(Meter::new(MemoryDevice::new(SIZE_BYTES))));
}

#[test]
fn a_gate_keeps_the_contract() {
    conformance::all(&|| Arc::new(Gate::new(Arc::new(MemoryDevice::new(SIZE_BYTES)))));
    conformance::read_only(&|| {
        Arc::new(Gate::new(Arc::new(ReadOnly::new(MemoryDevice::new(SIZE_BYTES)))))
    });
}

#[test]
fn layers_keep_the_contract_on_top_of_each_other() {
    conformance::all(&|| {
        let device: Arc<dyn BlockDevice> = Arc::new(Meter::new(MemoryDevice::new(SIZE_BYTES)));
        Arc::new(Meter::new(Fault::new(device, |_: &Request| Decision::Pass)))
    });
}

#[test]
#[should_panic(expected = "D3")]
fn a_device_that_forgets_is_found_out() {
    conformance::d3_random_requests_agree_with_a_byte_vector(Arc::new(NullDevice::new(SIZE_BYTES)));
}

#[test]
#[should_panic(expected = "D5")]
fn a_device_that_forgets_neighbors_is_found_out() {
    conformance::d5_any_range_is_accepted_and_its_neighbors_keep_their_bytes(Arc::new(
        NullDevice::new(SIZE_BYTES),
    ));
}
