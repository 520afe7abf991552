//! The load of a story: random requests, and the outcome of each.
//!
//! Invariant: writes begin and end at tiles, so that the judge can tell them apart. Not here: the
//! judge (`oracle`), when they are submitted (`story`).

use std::sync::mpsc::Sender;

use sawmill_device::{BlockDevice, Error, Exchange, Flags, Operation, Outcome, Request};
use sawmill_format::packed_write;
use sawmill_link::PackedDevice;
use sawmill_link::initiator::RemoteDevice;

use crate::network::Dice;
use crate::oracle::{TILE, pattern};

/// Bytes of each device.
pub(crate) const SIZE_BYTES: u64 = 64 << 10;
/// Where most requests go.
const HOT_BYTES: u64 = 8 << 10;
/// A packed write fits the smallest places that a target grants here; a longer one fails.
const PACKED_BYTES_MAX: u64 = 4096;

/// The kinds of requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    Read,
    Write,
    Packed,
    Zeroes,
    Discard,
    Flush,
}

/// A random request: its device, and its ranges there (address, length).
#[derive(Clone, Debug)]
pub(crate) struct RandomRequest {
    pub(crate) kind: Kind,
    pub(crate) device: usize,
    pub(crate) ranges: Vec<(u64, u64)>,
    pub(crate) fua: bool,
}

/// The outcome of a request.
pub(crate) struct Completion {
    pub(crate) id: u64,
    pub(crate) request: LoadRequest,
    pub(crate) error: Option<Error>,
    /// The bytes that were read.
    pub(crate) bytes: Vec<u8>,
}

/// A submitted request, with its user and time.
#[derive(Clone, Copy)]
pub(crate) struct LoadRequest {
    pub(crate) kind: Kind,
    pub(crate) device: usize,
    pub(crate) fua: bool,
    pub(crate) user: u64,
    /// Whether the user had been cut off before.
    pub(crate) barred: bool,
    pub(crate) since_ns: u64,
    /// How long all of the user's links had been cut together by then.
    pub(crate) cut_ns: u64,
}

struct PendingRequest {
    id: u64,
    request: LoadRequest,
    /// The address of a write, over all devices; `buffer`: the bytes of a packed write or a read.
    at: u64,
    buffer: Vec<u8>,
    sender: Sender<Completion>,
}

impl Exchange for PendingRequest {
    fn fill(&mut self, offset: u64, into: &mut [u8]) {
        if self.request.kind == Kind::Packed {
            let start = offset as usize;
            return into.copy_from_slice(&self.buffer[start..start + into.len()]);
        }
        pattern(self.id, self.at + offset, into);
    }

    fn buffer(&mut self) -> &mut [u8] {
        &mut self.buffer
    }

    fn complete(self: Box<Self>, outcome: Outcome) {
        let completion = Completion {
            id: self.id,
            request: self.request,
            error: outcome.err(),
            bytes: self.buffer,
        };
        self.sender.send(completion).expect("the story listens");
    }
}

fn range(dice: &mut Dice, most_bytes: u64) -> (u64, u64) {
    let hot = if dice.permille(700) { HOT_BYTES } else { SIZE_BYTES };
    let length = ((1 + dice.below(most_bytes / TILE)) * TILE).min(hot);
    (dice.below((hot - length) / TILE + 1) * TILE, length)
}

/// Short ranges with gaps between them, from a random address on.
fn packed_ranges(dice: &mut Dice) -> Vec<(u64, u64)> {
    let (mut at, _) = range(dice, TILE);
    let (mut ranges, mut bytes) = (Vec::new(), 16);
    for _ in 0..1 + dice.below(20) {
        let length = (1 + dice.below(16)) * TILE;
        // Each adds an entry of eight bytes.
        bytes += length + 8;
        if at + length > SIZE_BYTES || bytes > PACKED_BYTES_MAX {
            break;
        }
        ranges.push((at, length));
        at += length + (1 + dice.below(30)) * TILE;
    }
    if ranges.is_empty() { vec![(0, TILE)] } else { ranges }
}

/// Draws a request for one of `devices`; a reader's request changes nothing.
pub(crate) fn draw(dice: &mut Dice, devices: usize, reader: bool) -> RandomRequest {
    let (kind, device) = (dice.below(100), dice.below(devices as u64) as usize);
    let most = [TILE, 512, 5000, 40_000][dice.below(4) as usize];
    let kind = match kind {
        0..36 if !reader => Kind::Write,
        36..44 if !reader => Kind::Packed,
        44..50 if !reader => Kind::Zeroes,
        50..55 if !reader => Kind::Discard,
        0..90 => Kind::Read,
        _ => Kind::Flush,
    };
    let ranges = match kind {
        Kind::Flush => Vec::new(),
        Kind::Packed => packed_ranges(dice),
        _ => vec![range(dice, most)],
    };
    let fua = matches!(kind, Kind::Write | Kind::Packed | Kind::Zeroes) && dice.permille(150);
    RandomRequest { kind, device, ranges, fua }
}

/// Submits it to `device`.
pub(crate) fn submit(
    device: &RemoteDevice,
    id: u64,
    drawn: &RandomRequest,
    request: LoadRequest,
    sender: Sender<Completion>,
) {
    let base = drawn.device as u64 * SIZE_BYTES;
    let (address, length) = drawn.ranges.first().copied().unwrap_or_default();
    let flags = Flags { fua: drawn.fua, no_unmap: false };
    let mut waiting =
        PendingRequest { id, request, at: base + address, buffer: Vec::new(), sender };
    let operation = match drawn.kind {
        Kind::Packed => {
            waiting.buffer = payload(id, base, &drawn.ranges);
            let length = waiting.buffer.len() as u64;
            let request = Request::new(Operation::Write, address, length, flags, Box::new(waiting));
            return device.submit_packed(request);
        }
        Kind::Read => {
            waiting.buffer = vec![0; length as usize];
            Operation::Read
        }
        Kind::Write => Operation::Write,
        Kind::Zeroes => Operation::WriteZeroes,
        Kind::Discard => Operation::Discard,
        Kind::Flush => Operation::Flush,
    };
    device.submit(Request::new(operation, address, length, flags, Box::new(waiting)));
}

fn payload(id: u64, base: u64, ranges: &[(u64, u64)]) -> Vec<u8> {
    let (first, _) = ranges[0];
    let bytes: Vec<(u32, Vec<u8>)> = ranges
        .iter()
        .map(|(address, length)| {
            let mut bytes = vec![0; *length as usize];
            pattern(id, base + address, &mut bytes);
            ((address - first) as u32, bytes)
        })
        .collect();
    let slices = bytes.iter().map(|(offset, bytes)| (*offset, bytes.as_slice()));
    let mut payload = vec![0; packed_write::encoded_bytes(slices.clone()) as usize];
    packed_write::encode(slices, &mut payload).expect("a packed write");
    payload
}
