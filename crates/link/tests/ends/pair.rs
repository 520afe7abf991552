//! A target and an initiator in this process, joined by loopback.

use std::sync::Arc;
use std::time::Duration;

use sawmill_device::{BlockDevice, BlockDeviceExt, Flags, Geometry, Operation, Request};
use sawmill_link::carrier::LinkAddress;
use sawmill_link::clock::SteadyClock;
use sawmill_link::initiator::{Initiator, InitiatorOptions, OpenMode, RemoteDevice};
use sawmill_link::session::{PreSharedKey, Security, unguessable};
use sawmill_link::target::{Target, TargetOptions};
use sawmill_link::threads::{Attached, Listener};
use sawmill_link::{PackedDevice, Unpack};

/// Longer than anything here takes, on any machine: only a hang reaches it.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) fn key() -> Security {
    Security::Key(PreSharedKey::from_bytes([9; 32]))
}

/// Ports that were free a moment ago.
pub(crate) fn free_addresses(kinds: &[&str]) -> Vec<LinkAddress> {
    let held: Vec<_> = kinds
        .iter()
        .map(|kind| {
            let tcp = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
            let port = tcp.local_addr().expect("bound").port();
            (tcp, format!("{kind}:127.0.0.1:{port}").parse().expect("an address"))
        })
        .collect();
    held.into_iter().map(|(_, address)| address).collect()
}

pub(crate) fn listen(
    device: Arc<dyn BlockDevice>,
    addresses: &[LinkAddress],
    security: Security,
) -> Listener {
    let options = TargetOptions { name: "target".into(), ..TargetOptions::default() };
    let target = Target::new(options, security, Arc::new(SteadyClock), unguessable());
    target.add("disk", Arc::new(Unpack::new(device)), None).expect("the first export");
    Listener::new(target, addresses, 1).expect("free addresses")
}

pub(crate) fn attach(addresses: &[LinkAddress], security: Security, options: InitiatorOptions) -> Attached {
    let clock = Arc::new(SteadyClock);
    let initiator = Initiator::new(options, security, addresses.len(), clock, unguessable());
    Attached::new(initiator, addresses).expect("threads")
}

pub(crate) fn open(attached: &Attached) -> RemoteDevice {
    let mode = OpenMode::default();
    let answer = attached.initiator().ask_open("disk", mode).wait(PATIENCE).expect("an answer");
    attached.initiator().opened("disk", mode, &answer).expect("a device")
}

/// All of it, as a device.
pub(crate) struct Pair {
    // Dropped in this order.
    device: RemoteDevice,
    _attached: Attached,
    _listener: Listener,
}

impl Pair {
    pub(crate) fn new(device: Arc<dyn BlockDevice>, kinds: &[&str], security: &dyn Fn() -> Security) -> Self {
        let addresses = free_addresses(kinds);
        let listener = listen(device, &addresses, security());
        let attached = attach(&addresses, security(), InitiatorOptions::default());
        Pair { device: open(&attached), _attached: attached, _listener: listener }
    }
}

impl Pair {
    /// One packed write, waited for.
    pub(crate) fn write_packed(&self, address: u64, payload: Vec<u8>) -> sawmill_device::Result<()> {
        struct Packed<'a>(&'a RemoteDevice);
        impl BlockDevice for Packed<'_> {
            fn geometry(&self) -> &Geometry {
                self.0.geometry()
            }
            fn submit(&self, request: Request) {
                self.0.submit_packed(request);
            }
        }
        let length = payload.len() as u64;
        Packed(&self.device).call(Operation::Write, address, length, Flags::default(), payload).map(drop)
    }
}

impl PackedDevice for Pair {
    fn packed_bytes_max(&self) -> u32 {
        self.device.packed_bytes_max()
    }

    fn packed_span_bytes_max(&self) -> u32 {
        self.device.packed_span_bytes_max()
    }

    fn submit_packed(&self, request: Request) {
        self.device.submit_packed(request);
    }
}

impl BlockDevice for Pair {
    fn geometry(&self) -> &Geometry {
        self.device.geometry()
    }

    fn submit(&self, request: Request) {
        self.device.submit(request);
    }
}
