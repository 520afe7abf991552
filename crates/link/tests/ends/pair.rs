//! A target and an initiator in this process, joined by loopback.

use std::net::{TcpListener, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;

use sawmill_device::{BlockDevice, BlockDeviceExt, Flags, Geometry, Operation, Request};
use sawmill_link::carrier::LinkAddress;
use sawmill_link::clock::SteadyClock;
use sawmill_link::initiator::{Initiator, InitiatorOptions, OpenMode, RemoteDevice};
use sawmill_link::session::{PreSharedKey, Security, unguessable};
use sawmill_link::target::{Target, TargetOptions};
use sawmill_link::threads::{InitiatorThreads, Listener};
use sawmill_link::{PackedDevice, Unpacker};

/// Longer than anything here takes, on any machine: only a hang reaches it.
pub(crate) const ANSWER_TIME_MAX: Duration = Duration::from_secs(60);

pub(crate) fn key() -> Security {
    Security::Key(PreSharedKey::from_bytes([9; 32]))
}

/// Addresses whose ports are free for TCP and UDP, each given out once. They lie below the ports
/// that the kernel hands out by itself, so that no socket of another test takes one before it is
/// bound here.
pub(crate) fn free_addresses(kinds: &[&str]) -> Vec<LinkAddress> {
    static NEXT: AtomicU16 = AtomicU16::new(12_000);
    let free = |port: &u16| {
        TcpListener::bind(("127.0.0.1", *port)).is_ok()
            && UdpSocket::bind(("127.0.0.1", *port)).is_ok()
    };
    let mut ports = std::iter::repeat_with(|| NEXT.fetch_add(1, Ordering::Relaxed)).filter(free);
    kinds
        .iter()
        .map(|kind| {
            let port = ports.next().expect("ports do not end");
            format!("{kind}:127.0.0.1:{port}").parse().expect("an address")
        })
        .collect()
}

pub(crate) fn listen(
    device: Arc<dyn BlockDevice>,
    addresses: &[LinkAddress],
    security: Security,
) -> Listener {
    let options = TargetOptions { name: "target".into(), ..TargetOptions::default() };
    let target = Target::new(options, security, Arc::new(SteadyClock), unguessable());
    target.add("disk", Arc::new(Unpacker::new(device)), None).expect("the first export");
    Listener::new(target, addresses, 1).expect("free addresses")
}

pub(crate) fn attach(
    addresses: &[LinkAddress],
    security: Security,
    options: InitiatorOptions,
) -> InitiatorThreads {
    let clock = Arc::new(SteadyClock);
    let initiator = Initiator::new(options, security, addresses.len(), clock, unguessable());
    InitiatorThreads::new(initiator, addresses).expect("threads")
}

pub(crate) fn open(attached: &InitiatorThreads) -> RemoteDevice {
    open_in(attached, OpenMode::default())
}

fn open_in(attached: &InitiatorThreads, mode: OpenMode) -> RemoteDevice {
    let answer =
        attached.initiator().request_open("disk", mode).wait(ANSWER_TIME_MAX).expect("an answer");
    attached.initiator().opened("disk", mode, &answer).expect("a device")
}

/// The whole pair, as a device.
pub(crate) struct Pair {
    // Dropped in this order.
    device: RemoteDevice,
    _attached: InitiatorThreads,
    _listener: Listener,
}

impl Pair {
    pub(crate) fn new(
        device: Arc<dyn BlockDevice>,
        kinds: &[&str],
        security: &dyn Fn() -> Security,
    ) -> Self {
        Self::opened_in(OpenMode::default(), device, kinds, security)
    }

    pub(crate) fn opened_in(
        mode: OpenMode,
        device: Arc<dyn BlockDevice>,
        kinds: &[&str],
        security: &dyn Fn() -> Security,
    ) -> Self {
        let addresses = free_addresses(kinds);
        let listener = listen(device, &addresses, security());
        let attached = attach(&addresses, security(), InitiatorOptions::default());
        Pair { device: open_in(&attached, mode), _attached: attached, _listener: listener }
    }
}

impl Pair {
    /// Executes one packed write, and waits for its answer.
    pub(crate) fn write_packed(
        &self,
        address: u64,
        payload: Vec<u8>,
    ) -> sawmill_device::Result<()> {
        struct PackedRemote<'a>(&'a RemoteDevice);
        impl BlockDevice for PackedRemote<'_> {
            fn geometry(&self) -> Geometry {
                self.0.geometry()
            }
            fn submit(&self, request: Request) {
                self.0.submit_packed(request);
            }
        }
        let length = payload.len() as u64;
        PackedRemote(&self.device)
            .call(Operation::Write, address, length, Flags::default(), payload)
            .map(drop)
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
    fn geometry(&self) -> Geometry {
        self.device.geometry()
    }

    fn submit(&self, request: Request) {
        self.device.submit(request);
    }
}
