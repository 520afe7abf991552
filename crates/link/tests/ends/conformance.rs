//! A remote device keeps the contract over every carrier.

use std::sync::Arc;

use sawmill_device::{MemoryDevice, conformance};
use sawmill_link::initiator::OpenMode;
use sawmill_link::session::Security;

use crate::pair::{Pair, key};

const SIZE_BYTES: u64 = 64 << 20;

fn keeps_the_contract(kinds: &[&str], security: &dyn Fn() -> Security) {
    conformance::all(&|| {
        Arc::new(Pair::new(Arc::new(MemoryDevice::new(SIZE_BYTES)), kinds, security))
    });
}

#[test]
fn a_device_by_udp_keeps_the_contract() {
    keeps_the_contract(&["udp"], &key);
}

#[test]
fn a_device_by_tcp_keeps_the_contract() {
    keeps_the_contract(&["tcp"], &key);
}

#[test]
fn a_device_by_several_links_of_several_kinds_keeps_the_contract() {
    keeps_the_contract(&["udp", "tcp", "udp"], &key);
}

#[test]
fn a_device_in_clear_keeps_the_contract() {
    keeps_the_contract(&["udp", "udp"], &|| Security::Insecure);
}

#[test]
fn a_device_opened_to_read_keeps_the_contract_of_read_only_devices() {
    let mode = OpenMode { read_only: true, ..OpenMode::default() };
    conformance::read_only(&|| {
        let memory = Arc::new(MemoryDevice::new(SIZE_BYTES));
        Arc::new(Pair::opened_in(mode, memory, &["udp", "tcp"], &key))
    });
}
