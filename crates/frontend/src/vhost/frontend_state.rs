//! The setup of one frontend (features, memory, queues), and the effect of each of its messages on
//! it.
//!
//! Invariants: a queue runs exactly while it has everything it needs, is enabled, and the door is
//! not held. What a running queue was built from changes only while it is paused with nothing in
//! flight. Not here: the bytes of messages, and the life of a connection.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use parking_lot::Mutex;
use sawmill_device::BlockDevice;

use super::Violation;
use super::inflight::Inflight;
use super::memory::{DirtyLog, Memory, RegisteredRegion};
use super::message::{
    Area, Event, Message, REGIONS_MAX, Region, Reply, RingAddresses, config_changed,
    feature as spoken,
};
use super::metrics::Counters;
use super::protocol::{CacheMode, ID_BYTES, WRITEBACK_OFFSET, config_of, feature, features_of};
use super::queue::{BusyError, Queue, QueueSetup};
use super::ring::Ring;
use super::wire::{self, End, WireMessage};

/// The state that a door has for all its frontends.
pub(super) struct DoorState {
    pub(super) device: Arc<dyn BlockDevice>,
    pub(super) queues_max: u16,
    pub(super) queue_size_max: u16,
    pub(super) id: [u8; ID_BYTES],
    pub(super) counters: Arc<Counters>,
    /// Queues that are running, or that were detached with requests in the device.
    /// Bounded by twice `queues_max`: a queue takes nothing while a detached one has requests in
    /// the device, so the detached ones here are of one connection.
    pub(super) roster: Mutex<Vec<Arc<Queue>>>,
}

/// One queue as the frontend has set it up so far.
#[derive(Default)]
pub(super) struct QueueDraft {
    pub(super) size: u16,
    pub(super) addresses: Option<RingAddresses>,
    pub(super) base: u16,
    pub(super) kick: Option<Arc<OwnedFd>>,
    pub(super) call: Option<Arc<OwnedFd>>,
    pub(super) error: Option<Arc<OwnedFd>>,
    /// The frontend's setting; without one, the protocol defines the default.
    pub(super) enabled: Option<bool>,
    pub(super) running: Option<Arc<Queue>>,
}

/// One frontend.
pub(super) struct FrontendState {
    pub(super) door_state: Arc<DoorState>,
    pub(super) socket: Arc<OwnedFd>,
    pub(super) features: u64,
    pub(super) protocol_features: u64,
    pub(super) status: u64,
    pub(super) cache_mode: CacheMode,
    pub(super) memory: Arc<Memory>,
    pub(super) log: Option<(Area, Arc<DirtyLog>)>,
    pub(super) inflight: Option<Arc<Inflight>>,
    pub(super) backend_channel: Option<Arc<OwnedFd>>,
    pub(super) drafts: Vec<QueueDraft>,
}

const PROTOCOL_FEATURES: u64 = spoken::MQ
    | spoken::LOG_SHMFD
    | spoken::REPLY_ACK
    | spoken::BACKEND_REQ
    | spoken::CONFIG
    | spoken::INFLIGHT_SHMFD
    | spoken::RESET_DEVICE
    | spoken::CONFIGURE_MEM_SLOTS
    | spoken::STATUS;

fn violation<T>(text: impl Into<String>) -> Result<T, Violation> {
    Err(Violation::new(text))
}

impl FrontendState {
    pub(super) fn new(door_state: Arc<DoorState>, socket: Arc<OwnedFd>) -> Self {
        door_state.counters.connections.fetch_add(1, Relaxed);
        FrontendState {
            drafts: (0..door_state.queues_max).map(|_| QueueDraft::default()).collect(),
            door_state,
            socket,
            features: 0,
            protocol_features: 0,
            status: 0,
            cache_mode: CacheMode::Writeback,
            memory: Arc::default(),
            log: None,
            inflight: None,
            backend_channel: None,
        }
    }

    /// Receives one message, executes it, and answers.
    pub(super) fn serve_one(&mut self) -> Result<(), End> {
        let WireMessage { header, payload, descriptors } = wire::receive(&self.socket)?;
        let done = Message::parse(header.request, &payload)
            .and_then(|message| self.obey(message, descriptors.into_iter()));
        // Only after it was executed: this very message may have negotiated it.
        let must_acknowledge =
            header.needs_reply() && self.protocol_features & spoken::REPLY_ACK != 0;
        let (reply, descriptor) = match done {
            Ok((Some(reply), descriptor)) => (reply, descriptor),
            Ok((None, _)) if must_acknowledge => (Reply::Number(0), None),
            Ok((None, _)) => return Ok(()),
            Err(reason) if must_acknowledge => {
                let request = header.request;
                tracing::warn!(request, %reason, "vhost-user: refused a message of the frontend");
                self.door_state.counters.violations.fetch_add(1, Relaxed);
                (Reply::Number(1), None)
            }
            Err(violation) => return Err(violation.into()),
        };
        let descriptor = descriptor.as_ref().map(AsFd::as_fd);
        wire::send(&self.socket, &reply.to_bytes(header.request), descriptor)
    }

    fn obey(
        &mut self,
        message: Message,
        mut descriptors: impl Iterator<Item = OwnedFd>,
    ) -> Result<(Option<Reply>, Option<OwnedFd>), Violation> {
        let mut next_descriptor =
            || descriptors.next().ok_or_else(|| Violation::new("a descriptor is missing"));
        let reply = match message {
            Message::GetFeatures => Reply::Number(self.offered()),
            Message::GetProtocolFeatures => Reply::Number(PROTOCOL_FEATURES),
            Message::GetQueueCount => Reply::Number(self.door_state.queues_max.into()),
            Message::GetMemSlots => Reply::Number(REGIONS_MAX as u64),
            Message::GetStatus => Reply::Number(self.status),
            Message::GetRingBase { queue } => self.stop_ring(queue)?,
            Message::GetConfig { offset, size, flags } => self.config(offset, size, flags),
            Message::GetInflight(shape) => {
                let fits = (1..=self.door_state.queues_max).contains(&shape.queues);
                let size_fits = shape.queue_size <= self.door_state.queue_size_max;
                if !fits || !size_fits || !shape.queue_size.is_power_of_two() {
                    return violation(format!("an in-flight region for {shape:?} is too large"));
                }
                // Not kept here: the frontend gives it back with `SetInflight`, also to the server
                // that comes after a death.
                let region = Inflight::create(shape.queues, shape.queue_size)?;
                let file = region
                    .file()
                    .map_err(|error| Violation::caused("the in-flight region", error))?;
                return Ok((Some(Reply::Inflight(region.shape())), Some(file)));
            }
            Message::SetLogBase(area) => {
                let log =
                    Arc::new(DirtyLog::open(next_descriptor()?, area.offset, area.size_bytes)?);
                self.alter(|frontend| {
                    frontend.log = Some((area, log));
                    Ok(())
                })?;
                // The one setting that always gets a reply.
                Reply::Log(area)
            }
            Message::SetMemTable(regions) => {
                let files = descriptors.map(|file| Arc::new(File::from(file)));
                let registered_regions: Vec<RegisteredRegion> = regions
                    .iter()
                    .zip(files)
                    .map(|(region, file)| RegisteredRegion { region: *region, file })
                    .collect();
                if registered_regions.len() != regions.len() {
                    return violation(format!(
                        "{} files for {} regions",
                        registered_regions.len(),
                        regions.len()
                    ));
                }
                return self.set_memory(registered_regions).map(|()| (None, None));
            }
            setting => return self.set(setting, descriptors).map(|()| (None, None)),
        };
        Ok((Some(reply), None))
    }

    /// The messages that change something and have no reply of their own.
    fn set(
        &mut self,
        message: Message,
        mut descriptors: impl Iterator<Item = OwnedFd>,
    ) -> Result<(), Violation> {
        let mut next_descriptor =
            || descriptors.next().ok_or_else(|| Violation::new("a descriptor is missing"));
        match message {
            Message::SetOwner | Message::SetLogFd => Ok(()),
            Message::ResetOwner | Message::ResetDevice | Message::SetStatus(0) => self.reset(),
            Message::SetStatus(status) => {
                self.status = status;
                Ok(())
            }
            Message::SetFeatures(features) => self.set_features(features),
            Message::SetProtocolFeatures(features) => {
                if features & !PROTOCOL_FEATURES != 0 {
                    return violation(format!("protocol features {features:#x} were not offered"));
                }
                self.protocol_features = features;
                Ok(())
            }
            Message::SetRingSize { queue, size } => self.set_ring_size(queue, size),
            Message::SetRingAddresses { queue, addresses } => {
                self.alter_draft(queue, |draft| draft.addresses = Some(addresses))
            }
            Message::SetRingBase { queue, base } => match u16::try_from(base) {
                Ok(base) => self.alter_draft(queue, |draft| draft.base = base),
                Err(_) => violation(format!("a ring base of {base}")),
            },
            Message::EnableRing { queue, enable } => {
                self.alter_draft(queue, |draft| draft.enabled = Some(enable != 0))
            }
            Message::SetRingEvent { event, queue, given } => {
                let file = if given { Some(Arc::new(next_descriptor()?)) } else { None };
                self.set_event(event, queue, file)
            }
            Message::SetBackendChannel => {
                let channel = next_descriptor()?;
                wire::set_times(&channel)
                    .map_err(|error| Violation::caused("cannot create a channel", error))?;
                self.backend_channel = Some(Arc::new(channel));
                // A frontend that reconnects knows the device as it was when it left.
                self.announce_config();
                Ok(())
            }
            Message::SetConfig { offset, bytes } => self.set_config(offset, &bytes),
            Message::SetInflight(shape) => {
                let region = Arc::new(Inflight::open(next_descriptor()?, shape)?);
                self.alter(|frontend| {
                    frontend.inflight = Some(region);
                    Ok(())
                })
            }
            Message::AddRegion(region) => self
                .add_region(RegisteredRegion { region, file: Arc::new(next_descriptor()?.into()) }),
            Message::RemoveRegion(region) => self.remove_region(region),
            other => violation(format!("{other:?} is out of order")),
        }
    }

    fn offered(&self) -> u64 {
        features_of(&self.door_state.device.geometry())
            | feature::PROTOCOL_FEATURES
            | feature::LOG_ALL
    }

    fn set_features(&mut self, features: u64) -> Result<(), Violation> {
        if features & !self.offered() != 0 {
            return violation(format!("features {features:#x} were not offered"));
        }
        self.alter(|frontend| {
            frontend.features = features;
            Ok(())
        })
    }

    fn set_memory(&mut self, regions: Vec<RegisteredRegion>) -> Result<(), Violation> {
        let memory = Memory::map(regions)?;
        tracing::debug!(bytes = memory.size_bytes(), "vhost-user: the guest's memory is mapped");
        self.alter(|frontend| {
            frontend.memory = Arc::new(memory);
            Ok(())
        })
    }

    fn add_region(&mut self, added: RegisteredRegion) -> Result<(), Violation> {
        let mut regions = self.memory.regions().to_vec();
        if regions.len() >= REGIONS_MAX {
            return violation(format!("more than {REGIONS_MAX} regions of memory"));
        }
        regions.push(added);
        self.set_memory(regions)
    }

    fn remove_region(&mut self, removed: Region) -> Result<(), Violation> {
        // Frontends need not repeat the file offset of a region.
        let of = |region: Region| (region.guest, region.size_bytes, region.user);
        let mut regions = self.memory.regions().to_vec();
        let Some(position) = regions.iter().position(|entry| of(entry.region) == of(removed))
        else {
            return violation(format!("{removed:?} is not in the memory table"));
        };
        regions.remove(position);
        self.set_memory(regions)
    }

    fn set_ring_size(&mut self, queue: u32, size: u32) -> Result<(), Violation> {
        match u16::try_from(size) {
            Ok(size) if size.is_power_of_two() && size <= self.door_state.queue_size_max => {
                self.alter_draft(queue, |draft| draft.size = size)
            }
            _ => violation(format!(
                "a queue of {size} entries; only powers of two up to {} are supported",
                self.door_state.queue_size_max
            )),
        }
    }

    fn set_event(
        &mut self,
        event: Event,
        queue: u32,
        file: Option<Arc<OwnedFd>>,
    ) -> Result<(), Violation> {
        match event {
            Event::Kick => {
                let Some(kick) = file else {
                    return violation("a queue without a kick event is not supported");
                };
                // The thread must never block in a read that another process has emptied.
                let flags = rustix::fs::fcntl_getfl(&*kick).and_then(|flags| {
                    rustix::fs::fcntl_setfl(&*kick, flags | rustix::fs::OFlags::NONBLOCK)
                });
                flags.map_err(|error| Violation::caused("the kick event", error))?;
                self.alter_draft(queue, |draft| draft.kick = Some(kick))
            }
            Event::Call => {
                let draft = self.draft(queue)?;
                // Without halting the queue: frontends change this event while the guest runs, and
                // a halt waits for all requests in flight.
                draft.call.clone_from(&file);
                if let Some(running) = &draft.running {
                    running.set_call(file);
                }
                Ok(())
            }
            Event::Error => self.alter_draft(queue, |draft| draft.error = file),
        }
    }

    fn config(&self, offset: u32, size: u32, flags: u32) -> Reply {
        let geometry = self.door_state.device.geometry();
        let mut config = config_of(&geometry, self.door_state.queues_max, self.cache_mode).to_vec();
        // Parsing has bounded both.
        config.resize(config.len().max((offset + size) as usize), 0);
        let bytes = config[offset as usize..(offset + size) as usize].to_vec();
        Reply::Config { offset, flags, bytes }
    }

    fn set_config(&mut self, offset: u32, bytes: &[u8]) -> Result<(), Violation> {
        let &[writeback @ (0 | 1)] = bytes else {
            return violation(format!("{} bytes of configuration at {offset}", bytes.len()));
        };
        if offset != WRITEBACK_OFFSET {
            return violation(format!("the configuration at {offset} is read-only"));
        }
        self.alter(|frontend| {
            frontend.cache_mode = CacheMode::of(writeback);
            Ok(())
        })
    }

    /// Notifies the frontend that the device has another size. It may ignore that.
    pub(super) fn announce_config(&self) {
        let Some(channel) = &self.backend_channel else { return };
        if let Err(error) = wire::send(channel, &config_changed(), None) {
            tracing::warn!(?error, "vhost-user: cannot notify the frontend of the new size");
        }
    }

    fn draft(&mut self, queue: u32) -> Result<&mut QueueDraft, Violation> {
        let count = self.drafts.len();
        let draft = self.drafts.get_mut(queue as usize);
        draft.ok_or_else(|| Violation::new(format!("queue {queue} of {count}")))
    }

    fn alter_draft(
        &mut self,
        queue: u32,
        change: impl FnOnce(&mut QueueDraft),
    ) -> Result<(), Violation> {
        self.halt(queue)?;
        change(self.draft(queue)?);
        self.run_what_can_run()
    }

    /// Changes something that running queues are built from.
    fn alter(
        &mut self,
        change: impl FnOnce(&mut Self) -> Result<(), Violation>,
    ) -> Result<(), Violation> {
        for queue in 0..self.drafts.len() as u32 {
            self.halt(queue)?;
        }
        // Whatever the result is, the queues resume.
        let changed = change(self);
        let outcome = self.run_what_can_run();
        changed.and(outcome)
    }

    /// Ends a queue; the requests it took are answered. It may be built again.
    fn halt(&mut self, queue: u32) -> Result<(), Violation> {
        let draft = self.draft(queue)?;
        if let Some(running) = draft.running.take() {
            // Without a deadline it waits, unless the door is stopped immediately.
            let _ = running.pause(None);
            draft.base = running.base();
        }
        Ok(())
    }

    fn stop_ring(&mut self, queue: u32) -> Result<Reply, Violation> {
        self.halt(queue)?;
        let draft = self.draft(queue)?;
        // The protocol starts a queue again with the next kick event, and not before.
        draft.kick = None;
        Ok(Reply::RingBase { queue, base: draft.base.into() })
    }

    fn reset(&mut self) -> Result<(), Violation> {
        for queue in 0..self.drafts.len() as u32 {
            self.halt(queue)?;
            let draft = self.draft(queue)?;
            let (call, error) = (draft.call.take(), draft.error.take());
            *draft = QueueDraft { call, error, ..QueueDraft::default() };
        }
        (self.status, self.cache_mode) = (0, CacheMode::Writeback);
        Ok(())
    }

    /// Builds and starts every queue that has everything it needs.
    pub(super) fn run_what_can_run(&mut self) -> Result<(), Violation> {
        let mut first = Ok(());
        for index in 0..self.drafts.len() {
            if self.drafts[index].running.is_some() {
                continue;
            }
            // A queue that cannot run does not affect the others.
            let started = self.setup(index).and_then(|setup| setup.map(Queue::start).transpose());
            match started {
                Err(why) => first = first.and(Err(why.of(format!("queue {index}")))),
                Ok(None) => (),
                Ok(Some(queue)) => {
                    let mut roster = self.door_state.roster.lock();
                    // Queues of connections that are gone stay listed as long as the device has
                    // requests of theirs: `before` waits for these.
                    roster.retain(|queue| !queue.is_over());
                    roster.push(queue.clone());
                    drop(roster);
                    self.drafts[index].running = Some(queue);
                }
            }
        }
        first
    }

    fn setup(&self, index: usize) -> Result<Option<QueueSetup>, Violation> {
        let draft = &self.drafts[index];
        // Without the feature there is no message to enable a queue.
        let is_enabled = draft.enabled.unwrap_or(self.features & feature::PROTOCOL_FEATURES == 0);
        let (Some(addresses), Some(kick)) = (draft.addresses, &draft.kick) else { return Ok(None) };
        if !is_enabled || draft.size == 0 || self.memory.regions().is_empty() {
            return Ok(None);
        }
        let address = |user: u64| self.memory.guest_address(user);
        let is_logged = self.features & feature::LOG_ALL != 0;
        let ring = Ring {
            memory: self.memory.clone(),
            log: self.log.as_ref().filter(|_| is_logged).map(|(_, log)| log.clone()),
            size: draft.size,
            descriptors: address(addresses.descriptors)?,
            available: address(addresses.available)?,
            used: address(addresses.used)?,
            has_event_idx: self.features & feature::EVENT_IDX != 0,
            has_indirect: self.features & feature::INDIRECT != 0,
        };
        let index = index as u16;
        let inflight = match &self.inflight {
            Some(region) => match region.queue(index, draft.size) {
                Some(queue) => Some(queue),
                None => {
                    return violation(format!(
                        "queue {index} has no place in the in-flight region"
                    ));
                }
            },
            None => None,
        };
        let before =
            self.door_state.roster.lock().iter().filter(|queue| queue.lingers()).cloned().collect();
        Ok(Some(QueueSetup {
            index,
            ring,
            inflight,
            base: draft.base,
            kick: kick.clone(),
            call: draft.call.clone(),
            error: draft.error.clone(),
            negotiated: self.features,
            cache_mode: match self.features & feature::FLUSH {
                // A guest without flushes cannot use a cache.
                0 => CacheMode::Writethrough,
                _ => self.cache_mode,
            },
            id: self.door_state.id,
            device: self.door_state.device.clone(),
            counters: self.door_state.counters.clone(),
            before,
        }))
    }

    /// Pauses every queue with nothing in flight. After `deadline`, all run again.
    pub(super) fn pause(&mut self, deadline: Option<Instant>) -> Result<(), BusyError> {
        let running: Vec<&Arc<Queue>> =
            self.drafts.iter().filter_map(|draft| draft.running.as_ref()).collect();
        let outcome = running.iter().try_for_each(|queue| queue.pause(deadline));
        if outcome.is_err() {
            self.start();
        }
        outcome
    }

    /// Resumes paused queues.
    pub(super) fn start(&mut self) {
        for queue in self.drafts.iter().filter_map(|draft| draft.running.as_ref()) {
            if let Err(violation) = queue.run() {
                tracing::error!(%violation, "vhost-user: cannot resume a queue");
            }
        }
    }
}

impl Drop for FrontendState {
    /// The connection is gone: do not touch the guest's memory any more.
    fn drop(&mut self) {
        for draft in &self.drafts {
            if let Some(queue) = &draft.running {
                queue.detach();
            }
        }
        self.door_state.counters.connections.fetch_sub(1, Relaxed);
    }
}
