//! A guest and its frontend, by hand: memory in a memfd, rings written entry by entry, and the
//! vhost-user frontend of the crate `vhost`.

use std::collections::VecDeque;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rustix::event::EventfdFlags;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use vhost::vhost_user::message::{VhostUserInflight, VhostUserProtocolFeatures};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryMmap};
use vmm_sys_util::eventfd::EventFd;
use vmm_sys_util::poll::PollContext;

pub(crate) const MEMORY_BYTES: u64 = 8 << 20;
pub(crate) const QUEUE_SIZE: u16 = 64;
/// A queue's rings lie here, one queue after the other.
const RINGS_AT: u64 = 0x10000;
const RINGS_BYTES: u64 = 0x10000;
const AVAILABLE_AT: u64 = 0x1000;
const USED_AT: u64 = 0x2000;
const INDIRECT_AT: u64 = 0x3000;
/// Where a request with this head has its header, its status, and 64 KiB for data.
const HEADERS_AT: u64 = 0x100000;
pub(crate) const DATA_AT: u64 = 0x200000;
pub(crate) const DATA_BYTES: u64 = 64 << 10;
/// The frontend's address of the memory, unlike any address of the guest.
const USER_AT: u64 = 0x7000_0000_0000;
/// A wait that ends this late is a hang.
const HANG: Duration = Duration::from_secs(60);

pub(crate) const NEXT: u16 = 1;
pub(crate) const WRITE: u16 = 2;
pub(crate) const INDIRECT: u16 = 4;

pub(crate) const READ: u32 = 0;
pub(crate) const STORE: u32 = 1;
pub(crate) const FLUSH: u32 = 4;
pub(crate) const GET_ID: u32 = 8;
pub(crate) const DISCARD: u32 = 11;
pub(crate) const WRITE_ZEROES: u32 = 13;

/// All that the door offers.
pub(crate) const ALL: u64 = u64::MAX;
pub(crate) const F_FLUSH: u64 = 1 << 9;
pub(crate) const F_LOG_ALL: u64 = 1 << 26;
pub(crate) const F_EVENT_IDX: u64 = 1 << 29;

/// A part of a chain: address, length, whether the device writes it.
pub(crate) type Part = (u64, u32, bool);

/// A descriptor as it stands in a table: address, length, flags, next.
pub(crate) type Entry = (u64, u32, u16, u16);

/// The state of one queue's driver.
pub(crate) struct Driver {
    pub(crate) kick: EventFd,
    pub(crate) call: EventFd,
    pub(crate) error: EventFd,
    pub(crate) available: u16,
    pub(crate) seen: u16,
    free: VecDeque<u16>,
    /// The parts that each head in flight took.
    taken: Vec<Vec<u16>>,
}

pub(crate) struct Guest {
    pub(crate) memory: GuestMemoryMmap,
    pub(crate) file: File,
    pub(crate) drivers: Vec<Driver>,
    pub(crate) inflight: Option<(VhostUserInflight, File)>,
    /// Virtio features wanted, if they are offered.
    pub(crate) wants: u64,
    pub(crate) indirect: bool,
}

impl Guest {
    pub(crate) fn new(queues: usize) -> Self {
        let memfd = memfd_create("guest", MemfdFlags::CLOEXEC).expect("memory");
        ftruncate(&memfd, MEMORY_BYTES).expect("memory");
        let file = File::from(memfd);
        let offset = FileOffset::new(file.try_clone().expect("a descriptor"), 0);
        let range = (GuestAddress(0), MEMORY_BYTES as usize, Some(offset));
        let memory = GuestMemoryMmap::from_ranges_with_files([range]).expect("a mapping");
        let driver = || Driver {
            kick: new_event(),
            call: new_event(),
            error: new_event(),
            available: 0,
            seen: 0,
            free: (0..QUEUE_SIZE).collect(),
            taken: vec![Vec::new(); QUEUE_SIZE.into()],
        };
        let drivers = (0..queues).map(|_| driver()).collect();
        Guest { memory, file, drivers, inflight: None, wants: ALL & !F_LOG_ALL, indirect: false }
    }

    /// Connects, and starts every queue at the guest's current position.
    pub(crate) fn connect(&mut self, path: &Path) -> Frontend {
        let mut front =
            Frontend::connect(path, self.drivers.len() as u64).expect("the door listens");
        front.set_owner().expect("an answer");
        let features = front.get_features().expect("an answer");
        let protocol_features = front.get_protocol_features().expect("an answer");
        front.set_protocol_features(protocol_features).expect("an answer");
        front.set_hdr_flags(vhost::vhost_user::message::VhostUserHeaderFlag::NEED_REPLY);
        front.set_features(features & self.wants).expect("they were offered");
        if protocol_features.contains(VhostUserProtocolFeatures::INFLIGHT_SHMFD) {
            self.share_inflight(&mut front);
        }
        self.share_memory(&front);
        for queue in 0..self.drivers.len() {
            self.start(&mut front, queue);
        }
        front
    }

    fn share_inflight(&mut self, front: &mut Frontend) {
        if self.inflight.is_none() {
            let request = VhostUserInflight::new(0, 0, self.drivers.len() as u16, QUEUE_SIZE);
            self.inflight = Some(front.get_inflight_fd(&request).expect("a region"));
        }
        let (shape, file) = self.inflight.as_ref().expect("just made");
        front.set_inflight_fd(shape, file.as_raw_fd()).expect("it is the door's own");
    }

    pub(crate) fn share_memory(&self, front: &Frontend) {
        let region = VhostUserMemoryRegionInfo {
            guest_phys_addr: 0,
            memory_size: MEMORY_BYTES,
            userspace_addr: USER_AT,
            mmap_offset: 0,
            mmap_handle: self.file.as_raw_fd(),
        };
        front.set_mem_table(&[region]).expect("it is memory");
    }

    pub(crate) fn rings(&self, queue: usize) -> VringConfigData {
        let at = USER_AT + ring(queue, 0);
        VringConfigData {
            queue_max_size: QUEUE_SIZE,
            queue_size: QUEUE_SIZE,
            flags: 0,
            desc_table_addr: at,
            used_ring_addr: at + USED_AT,
            avail_ring_addr: at + AVAILABLE_AT,
            log_addr: None,
        }
    }

    pub(crate) fn start(&self, front: &mut Frontend, queue: usize) {
        let driver = &self.drivers[queue];
        front.set_vring_num(queue, QUEUE_SIZE).expect("a size");
        // After the death of a backend, a frontend knows only the used index.
        front.set_vring_base(queue, self.used(queue)).expect("a base");
        front.set_vring_addr(queue, &self.rings(queue)).expect("in memory");
        front.set_vring_call(queue, &driver.call).expect("an event");
        front.set_vring_err(queue, &driver.error).expect("an event");
        front.set_vring_kick(queue, &driver.kick).expect("an event");
        front.set_vring_enable(queue, true).expect("enabled");
    }

    pub(crate) fn put(&self, address: u64, bytes: &[u8]) {
        self.memory.write_slice(bytes, GuestAddress(address)).expect("in memory");
    }

    pub(crate) fn get(&self, address: u64, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        self.memory.read_slice(&mut bytes, GuestAddress(address)).expect("in memory");
        bytes
    }

    pub(crate) fn put_descriptor(
        &self,
        table: u64,
        index: u16,
        part: (u64, u32),
        flags: u16,
        next: u16,
    ) {
        let mut bytes = part.0.to_le_bytes().to_vec();
        bytes.extend(part.1.to_le_bytes());
        bytes.extend(flags.to_le_bytes());
        bytes.extend(next.to_le_bytes());
        self.put(table + 16 * u64::from(index), &bytes);
    }

    /// Writes a chain into the table, without making it available. Returns its head.
    pub(crate) fn lay_out(&mut self, queue: usize, parts: &[Part]) -> u16 {
        let indirect = self.indirect;
        let driver = &mut self.drivers[queue];
        let count = if indirect { 1 } else { parts.len() };
        let heads: Vec<u16> =
            (0..count).map(|_| driver.free.pop_front().expect("the queue has room")).collect();
        let head = heads[0];
        driver.taken[usize::from(head)].clone_from(&heads);
        let at = |n: usize| if indirect { n as u16 } else { heads[n] };
        // An indirect table of up to 16 entries per head.
        let indirect_at = ring(queue, INDIRECT_AT + 256 * u64::from(head));
        let table = if indirect { indirect_at } else { ring(queue, 0) };
        for (n, (address, length, write)) in parts.iter().enumerate() {
            let last = n + 1 == parts.len();
            let flags = if *write { WRITE } else { 0 } | if last { 0 } else { NEXT };
            let next = if last { 0 } else { at(n + 1) };
            self.put_descriptor(table, at(n), (*address, *length), flags, next);
        }
        if indirect {
            let bytes = 16 * parts.len() as u32;
            self.put_descriptor(ring(queue, 0), head, (indirect_at, bytes), INDIRECT, 0);
        }
        head
    }

    /// Makes a head available, without a kick.
    pub(crate) fn offer(&mut self, queue: usize, head: u16) {
        let entry = ring(
            queue,
            AVAILABLE_AT + 4 + 2 * u64::from(self.drivers[queue].available % QUEUE_SIZE),
        );
        self.put(entry, &head.to_le_bytes());
        self.drivers[queue].available = self.drivers[queue].available.wrapping_add(1);
        self.set_available(queue, self.drivers[queue].available);
    }

    pub(crate) fn set_available(&self, queue: usize, index: u16) {
        let place = GuestAddress(ring(queue, AVAILABLE_AT + 2));
        self.memory.store(index.to_le(), place, Ordering::SeqCst).expect("in memory");
    }

    /// Requests a call after this index, with event indices.
    pub(crate) fn want_call_after(&self, queue: usize, index: u16) {
        let place = GuestAddress(ring(queue, AVAILABLE_AT + 4 + 2 * u64::from(QUEUE_SIZE)));
        self.memory.store(index.to_le(), place, Ordering::SeqCst).expect("in memory");
    }

    pub(crate) fn kick(&self, queue: usize) {
        self.drivers[queue].kick.write(1).expect("an event");
    }

    pub(crate) fn used(&self, queue: usize) -> u16 {
        let place = GuestAddress(ring(queue, USED_AT + 2));
        u16::from_le(self.memory.load(place, Ordering::SeqCst).expect("in memory"))
    }

    /// The next used head, if there is one; frees its descriptors.
    pub(crate) fn reap(&mut self, queue: usize) -> Option<u16> {
        let seen = self.drivers[queue].seen;
        if self.used(queue) == seen {
            return None;
        }
        let entry = self.get(ring(queue, USED_AT + 4 + 8 * u64::from(seen % QUEUE_SIZE)), 8);
        let head = u16::try_from(u32::from_le_bytes([entry[0], entry[1], entry[2], entry[3]]))
            .expect("a head");
        let driver = &mut self.drivers[queue];
        driver.seen = seen.wrapping_add(1);
        let taken = std::mem::take(&mut driver.taken[usize::from(head)]);
        assert!(!taken.is_empty(), "head {head} was used twice, or never offered");
        driver.free.extend(taken);
        Some(head)
    }

    /// Waits for the next used head.
    pub(crate) fn wait(&mut self, queue: usize) -> u16 {
        loop {
            self.want_call_after(queue, self.drivers[queue].seen);
            if let Some(head) = self.reap(queue) {
                return head;
            }
            wait_for(&self.drivers[queue].call, "a call");
        }
    }

    /// Prepares the usual request: a header, data, a status. Returns its head.
    pub(crate) fn prepare(
        &mut self,
        queue: usize,
        kind: u32,
        sector: u64,
        data: &[u8],
        read: u32,
    ) -> u16 {
        let head = *self.drivers[queue].free.front().expect("the queue has room");
        self.put(header_at(head), &header(kind, sector));
        self.put(status_at(head), &[0xff]);
        let mut parts = vec![(header_at(head), 16, false)];
        if !data.is_empty() {
            self.put(data_at(head), data);
            parts.push((data_at(head), data.len() as u32, false));
        }
        if read > 0 {
            parts.push((data_at(head), read, true));
        }
        parts.push((status_at(head), 1, true));
        self.lay_out(queue, &parts)
    }

    /// Executes one request; returns its status and the data that it read.
    pub(crate) fn execute(
        &mut self,
        queue: usize,
        kind: u32,
        sector: u64,
        data: &[u8],
        read: u32,
    ) -> (u8, Vec<u8>) {
        let head = self.prepare(queue, kind, sector, data, read);
        self.offer(queue, head);
        self.kick(queue);
        assert_eq!(self.wait(queue), head);
        (self.status(head), self.get(data_at(head), read as usize))
    }

    pub(crate) fn status(&self, head: u16) -> u8 {
        self.get(status_at(head), 1)[0]
    }

    /// Writes the descriptor table's first entries as they are, and offers head 0.
    pub(crate) fn offer_raw(&mut self, entries: &[Entry]) {
        for (n, (address, length, flags, next)) in entries.iter().enumerate() {
            self.put_descriptor(ring(0, 0), n as u16, (*address, *length), *flags, *next);
        }
        self.put(header_at(0), &header(READ, 0));
        self.offer(0, 0);
        self.kick(0);
    }
}

fn new_event() -> EventFd {
    EventFd::new(EventfdFlags::NONBLOCK.bits() as i32).expect("an event")
}

pub(crate) fn ring(queue: usize, offset: u64) -> u64 {
    RINGS_AT + queue as u64 * RINGS_BYTES + offset
}

pub(crate) fn available_at(queue: usize) -> u64 {
    ring(queue, AVAILABLE_AT)
}

pub(crate) fn header_at(head: u16) -> u64 {
    HEADERS_AT + 64 * u64::from(head)
}

pub(crate) fn status_at(head: u16) -> u64 {
    header_at(head) + 32
}

pub(crate) fn data_at(head: u16) -> u64 {
    DATA_AT + DATA_BYTES * u64::from(head)
}

pub(crate) fn header(kind: u32, sector: u64) -> Vec<u8> {
    [&kind.to_le_bytes()[..], &[0; 4], &sector.to_le_bytes()].concat()
}

/// The one range of a discard or write-zeroes.
pub(crate) fn range(sector: u64, sectors: u32, flags: u32) -> Vec<u8> {
    [&sector.to_le_bytes()[..], &sectors.to_le_bytes(), &flags.to_le_bytes()].concat()
}

/// Waits until an event is signaled, and resets it.
pub(crate) fn wait_for(event: &EventFd, what: &str) {
    let waiting = PollContext::new().expect("poll works");
    waiting.add(event, 0u32).expect("an event");
    // An interrupted wait is not a hang.
    let woken = waiting.wait_timeout(HANG).expect("poll works").iter().count();
    assert!(woken > 0, "{what} never came");
    event.read().expect("it was signaled");
}
