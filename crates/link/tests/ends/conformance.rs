//! A remote device keeps the contract over every carrier.

use std::sync::Arc;

use sawmill_device::{MemoryDevice, conformance};
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
