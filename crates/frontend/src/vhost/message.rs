//! The messages of vhost-user: parsed from bytes and converted to bytes, pure. Source: the
//! vhost-user protocol in QEMU's documentation (interop/vhost-user). Numbers are in the machine's
//! own byte order, because both ends run on it.
//!
//! Invariant: parsing touches nothing but its arguments and cannot panic. Not here: sockets and
//! descriptors, and the effect of a message.

use super::Violation;

/// Bytes of a message before its payload.
pub(super) const HEADER_BYTES: usize = 12;
/// The longest payload: a memory table of 128 regions.
pub(super) const PAYLOAD_BYTES_MAX: usize = 8 + REGIONS_MAX * REGION_BYTES;
/// Regions of guest memory.
pub(super) const REGIONS_MAX: usize = 128;
/// The most descriptors with one message.
pub(super) const DESCRIPTORS_MAX: usize = 32;
const REGION_BYTES: usize = 32;
/// The end of a virtio device's configuration space.
const CONFIG_BYTES_MAX: u32 = 256;

const VERSION: u32 = 1;
const VERSION_MASK: u32 = 3;
const REPLY: u32 = 1 << 2;
const NEED_REPLY: u32 = 1 << 3;

/// The protocol features that this door offers.
pub(super) mod feature {
    pub(crate) const MQ: u64 = 1 << 0;
    pub(crate) const LOG_SHMFD: u64 = 1 << 1;
    pub(crate) const REPLY_ACK: u64 = 1 << 3;
    pub(crate) const BACKEND_REQ: u64 = 1 << 5;
    pub(crate) const CONFIG: u64 = 1 << 9;
    pub(crate) const INFLIGHT_SHMFD: u64 = 1 << 12;
    pub(crate) const RESET_DEVICE: u64 = 1 << 13;
    pub(crate) const CONFIGURE_MEM_SLOTS: u64 = 1 << 15;
    pub(crate) const STATUS: u64 = 1 << 16;
}

/// The header of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) request: u32,
    flags: u32,
    pub(super) payload_bytes: usize,
}

impl Header {
    pub(super) fn parse(bytes: &[u8; HEADER_BYTES]) -> Result<Self, Violation> {
        let mut fields = Fields(bytes);
        let header = Header {
            request: fields.u32()?,
            flags: fields.u32()?,
            payload_bytes: fields.u32()? as usize,
        };
        let Header { request, flags, payload_bytes } = header;
        if flags & VERSION_MASK != VERSION || flags & REPLY != 0 {
            return Err(Violation::new(format!("message {request} has flags {flags:#x}")));
        }
        if payload_bytes > PAYLOAD_BYTES_MAX {
            return Err(Violation::new(format!(
                "message {request} has a payload of {payload_bytes} bytes"
            )));
        }
        Ok(header)
    }

    /// Whether the frontend waits for the result.
    pub(super) fn needs_reply(&self) -> bool {
        self.flags & NEED_REPLY != 0
    }
}

/// A region of guest memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Region {
    /// Its address for the guest.
    pub(super) guest: u64,
    pub(super) size_bytes: u64,
    /// Its address in the frontend, the unit of ring addresses.
    pub(super) user: u64,
    /// Where it begins in its file.
    pub(super) file_offset: u64,
}

/// The places of a ring's parts, as addresses of the frontend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct RingAddresses {
    /// Bit 0: writes to the used ring go to the dirty log, at `log`.
    pub(super) flags: u32,
    pub(super) descriptors: u64,
    pub(super) used: u64,
    pub(super) available: u64,
    /// The guest's address of the used ring, for the dirty log.
    pub(super) log: u64,
}

/// A part of a shared file: the in-flight region or the dirty log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Area {
    pub(super) size_bytes: u64,
    pub(super) offset: u64,
}

/// The shape of the in-flight region.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct InflightShape {
    pub(super) area: Area,
    pub(super) queues: u16,
    pub(super) queue_size: u16,
}

/// The purpose of a queue's event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Event {
    /// The guest has added requests to the queue.
    Kick,
    /// The guest must check the queue.
    Call,
    /// The queue is broken.
    Error,
}

/// A message of a frontend.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Message {
    GetFeatures,
    SetFeatures(u64),
    SetOwner,
    ResetOwner,
    SetMemTable(Vec<Region>),
    SetLogBase(Area),
    SetLogFd,
    SetRingSize { queue: u32, size: u32 },
    SetRingAddresses { queue: u32, addresses: RingAddresses },
    SetRingBase { queue: u32, base: u32 },
    GetRingBase { queue: u32 },
    SetRingEvent { event: Event, queue: u32, given: bool },
    GetProtocolFeatures,
    SetProtocolFeatures(u64),
    GetQueueCount,
    EnableRing { queue: u32, enable: u32 },
    SetBackendChannel,
    GetConfig { offset: u32, size: u32, flags: u32 },
    SetConfig { offset: u32, bytes: Vec<u8> },
    GetInflight(InflightShape),
    SetInflight(InflightShape),
    ResetDevice,
    GetMemSlots,
    AddRegion(Region),
    RemoveRegion(Region),
    SetStatus(u64),
    GetStatus,
}

impl Message {
    /// Parses a payload.
    pub(super) fn parse(request: u32, payload: &[u8]) -> Result<Self, Violation> {
        let mut fields = Fields(payload);
        let message = Self::from_fields(request, &mut fields)?;
        // A longer payload is another message than the one known here. Serving a part of it would
        // be a guess.
        if fields.0.is_empty() {
            Ok(message)
        } else {
            Err(Violation::new(format!("message {request} has {} bytes too many", fields.0.len())))
        }
    }

    fn from_fields(request: u32, fields: &mut Fields<'_>) -> Result<Self, Violation> {
        Ok(match request {
            1 => Message::GetFeatures,
            2 => Message::SetFeatures(fields.u64()?),
            3 => Message::SetOwner,
            4 => Message::ResetOwner,
            5 => Message::SetMemTable(fields.regions()?),
            6 => Message::SetLogBase(fields.area()?),
            7 => Message::SetLogFd,
            8 => Message::SetRingSize { queue: fields.u32()?, size: fields.u32()? },
            9 => Message::SetRingAddresses {
                queue: fields.u32()?,
                addresses: RingAddresses {
                    flags: fields.u32()?,
                    descriptors: fields.u64()?,
                    used: fields.u64()?,
                    available: fields.u64()?,
                    log: fields.u64()?,
                },
            },
            10 => Message::SetRingBase { queue: fields.u32()?, base: fields.u32()? },
            11 => {
                let queue = fields.u32()?;
                fields.u32()?;
                Message::GetRingBase { queue }
            }
            12 => fields.event(Event::Kick)?,
            13 => fields.event(Event::Call)?,
            14 => fields.event(Event::Error)?,
            15 => Message::GetProtocolFeatures,
            16 => Message::SetProtocolFeatures(fields.u64()?),
            17 => Message::GetQueueCount,
            18 => Message::EnableRing { queue: fields.u32()?, enable: fields.u32()? },
            21 => Message::SetBackendChannel,
            24 | 25 => fields.config(request)?,
            31 => Message::GetInflight(fields.inflight()?),
            32 => Message::SetInflight(fields.inflight()?),
            34 => Message::ResetDevice,
            36 => Message::GetMemSlots,
            37 => Message::AddRegion(fields.single_region()?),
            38 => Message::RemoveRegion(fields.single_region()?),
            39 => Message::SetStatus(fields.u64()?),
            40 => Message::GetStatus,
            _ => return Err(Violation::new(format!("message {request} is unknown"))),
        })
    }
}

/// A reply.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Reply {
    Number(u64),
    RingBase {
        queue: u32,
        base: u32,
    },
    Config {
        offset: u32,
        flags: u32,
        bytes: Vec<u8>,
    },
    Inflight(InflightShape),
    /// The dirty log is in use: repeats the request.
    Log(Area),
}

impl Reply {
    /// The whole message.
    pub(super) fn to_bytes(&self, request: u32) -> Vec<u8> {
        let mut payload = Vec::new();
        match self {
            Reply::Number(number) => payload.extend(number.to_ne_bytes()),
            Reply::RingBase { queue, base } => {
                payload.extend(queue.to_ne_bytes());
                payload.extend(base.to_ne_bytes());
            }
            Reply::Config { offset, flags, bytes } => {
                for field in [*offset, bytes.len() as u32, *flags] {
                    payload.extend(field.to_ne_bytes());
                }
                payload.extend(bytes);
            }
            Reply::Log(area) => {
                payload.extend(area.size_bytes.to_ne_bytes());
                payload.extend(area.offset.to_ne_bytes());
            }
            Reply::Inflight(shape) => {
                payload.extend(shape.area.size_bytes.to_ne_bytes());
                payload.extend(shape.area.offset.to_ne_bytes());
                payload.extend(shape.queues.to_ne_bytes());
                payload.extend(shape.queue_size.to_ne_bytes());
                // Frontends read the structure with the padding of a C compiler.
                payload.extend([0; 4]);
            }
        }
        [head(request, VERSION | REPLY, payload.len()), payload].concat()
    }
}

/// The message to a frontend, on the backend's channel, that the configuration space has changed.
pub(super) fn config_changed() -> Vec<u8> {
    head(2, VERSION, 0)
}

fn head(request: u32, flags: u32, payload_bytes: usize) -> Vec<u8> {
    let fields = [request, flags, payload_bytes as u32];
    fields.iter().flat_map(|field| field.to_ne_bytes()).collect()
}

/// Takes numbers from the front.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], Violation> {
        let Some((head, rest)) = self.0.split_first_chunk() else {
            return Err(Violation::new(format!("a message ends inside a field of {N} bytes")));
        };
        self.0 = rest;
        Ok(*head)
    }

    fn u16(&mut self) -> Result<u16, Violation> {
        Ok(u16::from_ne_bytes(self.take()?))
    }

    fn u32(&mut self) -> Result<u32, Violation> {
        Ok(u32::from_ne_bytes(self.take()?))
    }

    fn u64(&mut self) -> Result<u64, Violation> {
        Ok(u64::from_ne_bytes(self.take()?))
    }

    fn area(&mut self) -> Result<Area, Violation> {
        Ok(Area { size_bytes: self.u64()?, offset: self.u64()? })
    }

    fn event(&mut self, event: Event) -> Result<Message, Violation> {
        let number = self.u64()?;
        // The lowest byte is the queue; bit 8 says that there is no descriptor.
        Ok(Message::SetRingEvent {
            event,
            queue: (number & 0xff) as u32,
            given: number & 0x100 == 0,
        })
    }

    fn inflight(&mut self) -> Result<InflightShape, Violation> {
        let shape =
            InflightShape { area: self.area()?, queues: self.u16()?, queue_size: self.u16()? };
        if !self.0.is_empty() {
            // The specification shows the structure without padding, and some frontends send it
            // with.
            let _padding: [u8; 4] = self.take()?;
        }
        Ok(shape)
    }

    fn region(&mut self) -> Result<Region, Violation> {
        let region = Region {
            guest: self.u64()?,
            size_bytes: self.u64()?,
            user: self.u64()?,
            file_offset: self.u64()?,
        };
        // Here once, so that no later sum of an address and an offset inside the region overflows.
        let fits = |start: u64| start.checked_add(region.size_bytes).is_some();
        if region.size_bytes == 0
            || !fits(region.guest)
            || !fits(region.user)
            || !fits(region.file_offset)
        {
            return Err(Violation::new(format!("{region:?} is empty or overflows")));
        }
        Ok(region)
    }

    fn single_region(&mut self) -> Result<Region, Violation> {
        self.u64()?;
        self.region()
    }

    fn regions(&mut self) -> Result<Vec<Region>, Violation> {
        let (count, _padding) = (self.u32()? as usize, self.u32()?);
        // Each region comes with a descriptor, and one message carries that many. Frontends with
        // more regions add them one by one.
        if count > DESCRIPTORS_MAX {
            return Err(Violation::new(format!(
                "a memory table of {count} regions; {DESCRIPTORS_MAX} is the limit"
            )));
        }
        (0..count).map(|_| self.region()).collect()
    }

    fn config(&mut self, request: u32) -> Result<Message, Violation> {
        let (offset, size, flags) = (self.u32()?, self.u32()?, self.u32()?);
        let bytes = std::mem::take(&mut self.0).to_vec();
        if size as usize != bytes.len()
            || offset.checked_add(size).is_none_or(|end| end > CONFIG_BYTES_MAX)
        {
            let text =
                format!("configuration of {size} bytes at {offset} with {} bytes", bytes.len());
            return Err(Violation::new(text));
        }
        Ok(match request {
            24 => Message::GetConfig { offset, size, flags },
            _ => Message::SetConfig { offset, bytes },
        })
    }
}
