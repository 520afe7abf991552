//! The part of a volume's past that is kept: the block at the end of a checkpoint since version 2,
//! the orders in the log that change it, and the pins by which clones hold their ancestors.
//!
//! Invariants: cuts are sorted by kind, number, sequence and name; names are unique; lineage and
//! dead segments are sorted by sequence.
//!
//! Not here: which segment a cut needs, and when a cut ends (the engine decides).

use crate::error::{check_field, check_identity};
use crate::ids::{PutId, VolumeId};
use crate::layout::layout;
use crate::preamble::{self, CRC_BYTES, Kind};
use crate::{FormatError, Result, crc};

layout! {
    /// Bytes of the head of the block; cuts, lineage and dead segments follow.
    kept_at, "Kept block", 32;
    RETENTION_S: 0, 8, "retention_s";
    PINS_NEXT: 8, 8, "pins_next";
    CUT_COUNT: 16, 4, "cut_count";
    LINEAGE_COUNT: 20, 4, "lineage_count";
    DEAD_COUNT: 24, 4, "dead_count";
    RESERVED: 28, 4, "reserved";
}

layout! {
    /// Bytes of one cut.
    cut_at, "Cut entry", 192;
    NUMBER: 0, 8, "number";
    PUT_ID: 8, 16, "put_id";
    THROUGH_SEQUENCE: 24, 8, "through_sequence";
    POSITION: 32, 8, "position";
    WALL_UNIX_MS: 40, 8, "wall_unix_ms";
    PIN: 48, 8, "pin";
    KIND: 56, 1, "kind";
    NAME_BYTES: 57, 1, "name_bytes";
    RESERVED: 58, 2, "reserved";
    ATTACHED_S: 60, 4, "attached_s";
    NAME: 64, 128, "name";
}

layout! {
    /// Bytes of one ancestor.
    lineage_at, "Lineage entry", 48;
    THROUGH_SEQUENCE: 0, 8, "through_sequence";
    VOLUME_ID: 8, 16, "volume_id";
    PIN: 24, 8, "pin";
    CUT_NUMBER: 32, 8, "cut_number";
    CUT_THROUGH: 40, 8, "cut_through";
}

layout! {
    /// Bytes of one dead segment.
    dead_at, "Dead entry", 16;
    SEQUENCE: 0, 8, "sequence";
    SINCE: 8, 8, "since";
}

layout! {
    /// Bytes of a pin: an object of the base, made by the process that clones it.
    pin_at, "Pin", 224;
    PREAMBLE: 0, 16, "preamble";
    VOLUME_ID: 16, 16, "volume_id";
    PUT_ID: 32, 16, "put_id";
    PIN_NUMBER: 48, 8, "pin_number";
    CLONE_ID: 56, 16, "clone_id";
    NUMBER: 72, 8, "number";
    THROUGH_SEQUENCE: 80, 8, "through_sequence";
    NAME_BYTES: 88, 1, "name_bytes";
    RESERVED: 89, 3, "reserved";
    NAME: 92, 128, "name";
    CRC: 220, 4, "crc";
}

/// The longest name of a snapshot.
pub const NAME_BYTES_MAX: usize = 128;
const WHAT: &str = "kept block";
const ORDER: &str = "order";
const PIN: &str = Kind::Pin.name();

/// Why a cut is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum CutKind {
    /// A checkpoint inside the retention window; everything after it is kept too.
    Retained = 1,
    /// A snapshot: it has a name.
    Snapshot = 2,
    /// A clone needs it.
    Pin = 3,
}

/// A past state that can be restored: a checkpoint, and the segments after it up to some last one.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CutEntry {
    /// Why it is kept.
    pub kind: CutKind,
    /// The checkpoint it begins from.
    pub number: u64,
    /// The last segment it includes.
    pub through_sequence: u64,
    /// The name of a snapshot; empty for the other kinds.
    pub name: String,
    /// The put of the checkpoint.
    pub put_id: PutId,
    /// All writes below this journal position are included.
    pub position: u64,
    /// The time of the state, in milliseconds since 1970, UTC, by the writer's clock.
    pub wall_unix_ms: u64,
    /// The number of a pin; 0 for the other kinds.
    pub pin: u64,
    /// For a retained checkpoint, how long the volume had been attached by then, in seconds,
    /// rounded up; 0 when its writer was of an older version, and for the other kinds.
    pub attached_s: u32,
}

/// A range of sequences whose segments belong to another volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LineageEntry {
    /// Sequences up to this one, and above that of the entry before, are segments of that volume.
    pub through_sequence: u64,
    /// The ancestor.
    pub volume_id: VolumeId,
    /// The number of our pin there.
    pub pin: u64,
    /// The checkpoint of the ancestor that our pin names.
    pub cut_number: u64,
    /// The last segment of the ancestor that our pin names.
    pub cut_through: u64,
}

/// A segment without live bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DeadEntry {
    /// The segment.
    pub sequence: u64,
    /// The number of the checkpoint that first found it dead.
    pub since: u64,
}

/// The block.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KeptBlock {
    /// How far back every moment is kept; 0: not at all.
    pub retention_s: u64,
    /// The first pin number that did not exist yet.
    pub pins_next: u64,
    /// The kept cuts, sorted.
    pub cuts: Vec<CutEntry>,
    /// The volumes that own the segments below our own, sorted.
    pub lineage: Vec<LineageEntry>,
    /// The dead segments, each with the checkpoint that found it dead, sorted.
    pub dead: Vec<DeadEntry>,
}

impl KeptBlock {
    /// Whether the block is empty, so that it can be left out.
    pub fn is_empty(&self) -> bool {
        *self == KeptBlock::default()
    }

    pub(crate) fn encode(&self) -> Result<Vec<u8>> {
        let mut head = [0; kept_at::SIZE];
        kept_at::RETENTION_S.put(&mut head, self.retention_s.to_le_bytes());
        kept_at::PINS_NEXT.put(&mut head, self.pins_next.to_le_bytes());
        kept_at::CUT_COUNT.put_count(&mut head, WHAT, self.cuts.len())?;
        kept_at::LINEAGE_COUNT.put_count(&mut head, WHAT, self.lineage.len())?;
        kept_at::DEAD_COUNT.put_count(&mut head, WHAT, self.dead.len())?;
        let mut bytes = head.to_vec();
        for cut in &self.cuts {
            bytes.extend(cut.encode()?);
        }
        for entry in &self.lineage {
            let mut row = [0; lineage_at::SIZE];
            lineage_at::THROUGH_SEQUENCE.put(&mut row, entry.through_sequence.to_le_bytes());
            lineage_at::VOLUME_ID.put(&mut row, entry.volume_id.0);
            lineage_at::PIN.put(&mut row, entry.pin.to_le_bytes());
            lineage_at::CUT_NUMBER.put(&mut row, entry.cut_number.to_le_bytes());
            lineage_at::CUT_THROUGH.put(&mut row, entry.cut_through.to_le_bytes());
            bytes.extend(row);
        }
        for entry in &self.dead {
            let mut row = [0; dead_at::SIZE];
            dead_at::SEQUENCE.put(&mut row, entry.sequence.to_le_bytes());
            dead_at::SINCE.put(&mut row, entry.since.to_le_bytes());
            bytes.extend(row);
        }
        Ok(bytes)
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<KeptBlock> {
        preamble::check_available(WHAT, bytes, kept_at::SIZE)?;
        let (head, rows) = bytes.split_at(kept_at::SIZE);
        let sizes = [kept_at::CUT_COUNT, kept_at::LINEAGE_COUNT, kept_at::DEAD_COUNT]
            .map(|field| u64::from(field.u32(head)));
        let [cuts, lineage, dead] = sizes;
        let need = cuts * cut_at::SIZE as u64
            + lineage * lineage_at::SIZE as u64
            + dead * dead_at::SIZE as u64;
        check_field(
            WHAT,
            "cut_count",
            "the counts do not agree with kept_bytes",
            need == rows.len() as u64,
        )?;
        preamble::check_reserved(Kind::Checkpoint, head, &[kept_at::RESERVED])?;
        let (cuts, rows) = rows.split_at(cuts as usize * cut_at::SIZE);
        let (lineage, dead) = rows.split_at(lineage as usize * lineage_at::SIZE);
        let kept = KeptBlock {
            retention_s: kept_at::RETENTION_S.u64(head),
            pins_next: kept_at::PINS_NEXT.u64(head),
            cuts: cuts.chunks_exact(cut_at::SIZE).map(CutEntry::decode).collect::<Result<_>>()?,
            lineage: lineage.chunks_exact(lineage_at::SIZE).map(get_lineage).collect(),
            dead: dead.chunks_exact(dead_at::SIZE).map(get_dead).collect(),
        };
        check_field(WHAT, "retention_s", "no block says that nothing is kept", !kept.is_empty())?;
        Ok(kept)
    }

    /// Whether the fields keep the rules of the block.
    pub(crate) fn check(&self) -> Result<()> {
        let cuts = self.cuts.is_sorted_by(|one, next| one < next);
        check_field(WHAT, "number", "the cuts are not sorted, or one is there twice", cuts)?;
        let lineage =
            self.lineage.is_sorted_by(|one, next| one.through_sequence < next.through_sequence);
        check_field(WHAT, "through_sequence", "the lineage is not sorted", lineage)?;
        let dead = self.dead.is_sorted_by(|one, next| one.sequence < next.sequence);
        check_field(WHAT, "sequence", "the dead segments are not sorted", dead)?;
        for cut in &self.cuts {
            let is_valid = cut.name.is_empty() != (cut.kind == CutKind::Snapshot);
            check_field(WHAT, "name", "snapshots have names, and nothing else has", is_valid)?;
            let fits = cut.name.len() <= NAME_BYTES_MAX;
            check_field(WHAT, "name_bytes", "a name is too long", fits)?;
        }
        Ok(())
    }
}

fn get_lineage(row: &[u8]) -> LineageEntry {
    LineageEntry {
        through_sequence: lineage_at::THROUGH_SEQUENCE.u64(row),
        volume_id: VolumeId(lineage_at::VOLUME_ID.array(row)),
        pin: lineage_at::PIN.u64(row),
        cut_number: lineage_at::CUT_NUMBER.u64(row),
        cut_through: lineage_at::CUT_THROUGH.u64(row),
    }
}

fn get_dead(row: &[u8]) -> DeadEntry {
    DeadEntry { sequence: dead_at::SEQUENCE.u64(row), since: dead_at::SINCE.u64(row) }
}

/// The name in a field of 128 bytes; what follows it is zero.
fn get_name(bytes: &[u8], name_bytes: u8) -> Result<String> {
    let why = "it is not UTF-8 text of at most 128 bytes";
    let wrong = FormatError::Field { what: WHAT, field: "name", why };
    let (name, rest) = bytes.split_at_checked(usize::from(name_bytes)).ok_or(wrong.clone())?;
    check_field(WHAT, "name", "bytes follow after its end", rest.iter().all(|byte| *byte == 0))?;
    str::from_utf8(name).map(str::to_owned).map_err(|_| wrong)
}

/// A name as a field, and its length; a longer name is refused.
fn name_field(what: &'static str, name: &str) -> Result<([u8; NAME_BYTES_MAX], u8)> {
    let mut field = [0; NAME_BYTES_MAX];
    let start = field.get_mut(..name.len());
    let start = start.ok_or(FormatError::Field { what, field: "name", why: "it is too long" })?;
    start.copy_from_slice(name.as_bytes());
    Ok((field, name.len() as u8))
}

impl CutEntry {
    fn encode(&self) -> Result<[u8; cut_at::SIZE]> {
        let mut row = [0; cut_at::SIZE];
        let (name, name_bytes) = name_field(WHAT, &self.name)?;
        cut_at::NUMBER.put(&mut row, self.number.to_le_bytes());
        cut_at::PUT_ID.put(&mut row, self.put_id.0);
        cut_at::THROUGH_SEQUENCE.put(&mut row, self.through_sequence.to_le_bytes());
        cut_at::POSITION.put(&mut row, self.position.to_le_bytes());
        cut_at::WALL_UNIX_MS.put(&mut row, self.wall_unix_ms.to_le_bytes());
        cut_at::PIN.put(&mut row, self.pin.to_le_bytes());
        cut_at::KIND.put(&mut row, [self.kind as u8]);
        cut_at::NAME_BYTES.put(&mut row, [name_bytes]);
        cut_at::ATTACHED_S.put(&mut row, self.attached_s.to_le_bytes());
        cut_at::NAME.put(&mut row, name);
        Ok(row)
    }

    fn decode(row: &[u8]) -> Result<CutEntry> {
        preamble::check_reserved(Kind::Checkpoint, row, &[cut_at::RESERVED])?;
        Ok(CutEntry {
            kind: match cut_at::KIND.u8(row) {
                1 => CutKind::Retained,
                2 => CutKind::Snapshot,
                3 => CutKind::Pin,
                _ => {
                    return Err(FormatError::Field {
                        what: WHAT,
                        field: "kind",
                        why: "no such kind",
                    });
                }
            },
            number: cut_at::NUMBER.u64(row),
            through_sequence: cut_at::THROUGH_SEQUENCE.u64(row),
            name: get_name(cut_at::NAME.of(row), cut_at::NAME_BYTES.u8(row))?,
            put_id: PutId(cut_at::PUT_ID.array(row)),
            position: cut_at::POSITION.u64(row),
            wall_unix_ms: cut_at::WALL_UNIX_MS.u64(row),
            pin: cut_at::PIN.u64(row),
            attached_s: cut_at::ATTACHED_S.u32(row),
        })
    }
}

layout! {
    /// Bytes of an order: the data of a segment of kind `Order`.
    order_at, "Order", 176;
    KIND: 0, 1, "kind";
    NAME_BYTES: 1, 1, "name_bytes";
    RESERVED: 2, 6, "reserved";
    RETENTION_S: 8, 8, "retention_s";
    NUMBER: 16, 8, "number";
    PUT_ID: 24, 16, "put_id";
    THROUGH_SEQUENCE: 40, 8, "through_sequence";
    NAME: 48, 128, "name";
}

/// A user's order at a place of the log.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Order {
    /// The state here gets a name.
    CreateSnapshot(String),
    /// The snapshot of this name ends.
    DeleteSnapshot(String),
    /// How far back every moment is kept from here on, in seconds; 0: not at all.
    SetRetention(u64),
    /// From here on the disk is as it was at that cut.
    RollBack {
        /// The checkpoint it begins from.
        number: u64,
        /// The put of that checkpoint.
        put_id: PutId,
        /// The last segment it includes.
        through_sequence: u64,
    },
}

impl Order {
    /// Its bytes; a name that is too long is refused.
    pub fn encode(&self) -> Result<Vec<u8>> {
        let mut bytes = vec![0; order_at::SIZE];
        let kind = match self {
            Order::CreateSnapshot(name) | Order::DeleteSnapshot(name) => {
                let (name, name_bytes) = name_field(ORDER, name)?;
                order_at::NAME_BYTES.put(&mut bytes, [name_bytes]);
                order_at::NAME.put(&mut bytes, name);
                if matches!(self, Order::CreateSnapshot(_)) { 1 } else { 2 }
            }
            Order::SetRetention(retention_s) => {
                order_at::RETENTION_S.put(&mut bytes, retention_s.to_le_bytes());
                3
            }
            Order::RollBack { number, put_id, through_sequence } => {
                order_at::NUMBER.put(&mut bytes, number.to_le_bytes());
                order_at::PUT_ID.put(&mut bytes, put_id.0);
                order_at::THROUGH_SEQUENCE.put(&mut bytes, through_sequence.to_le_bytes());
                4
            }
        };
        order_at::KIND.put(&mut bytes, [kind]);
        Ok(bytes)
    }

    /// Reads an order; fields that its kind does not use are zero.
    pub fn decode(bytes: &[u8]) -> Result<Order> {
        preamble::check_available(ORDER, bytes, order_at::SIZE)?;
        check_field(ORDER, "length", "bytes follow after the end", bytes.len() == order_at::SIZE)?;
        let name = || get_name(order_at::NAME.of(bytes), order_at::NAME_BYTES.u8(bytes));
        let order = match order_at::KIND.u8(bytes) {
            1 => Order::CreateSnapshot(name()?),
            2 => Order::DeleteSnapshot(name()?),
            3 => Order::SetRetention(order_at::RETENTION_S.u64(bytes)),
            4 => Order::RollBack {
                number: order_at::NUMBER.u64(bytes),
                put_id: PutId(order_at::PUT_ID.array(bytes)),
                through_sequence: order_at::THROUGH_SEQUENCE.u64(bytes),
            },
            _ => {
                return Err(FormatError::Field {
                    what: ORDER,
                    field: "kind",
                    why: "no such kind of order",
                });
            }
        };
        if order.encode()? != bytes {
            return Err(FormatError::Reserved { what: ORDER });
        }
        Ok(order)
    }
}

/// A clone's hold on a volume. Pin numbers are taken one after the other and never freed, so that a
/// reader that gets the next one by name misses none; a clone that ends leaves a released
/// pin at [`released_key`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pin {
    /// The volume that is held.
    pub volume_id: VolumeId,
    /// This put.
    pub put_id: PutId,
    /// Which pin of the volume it is, from 1.
    pub pin_number: u64,
    /// The clone.
    pub clone_id: VolumeId,
    /// The checkpoint it begins from.
    pub number: u64,
    /// The last segment it needs.
    pub through_sequence: u64,
    /// The clone's name when it was made, for people.
    pub name: String,
}

impl Pin {
    /// The object's bytes; a name that is too long is refused.
    pub fn encode(&self) -> Result<Vec<u8>> {
        let mut bytes = vec![0; pin_at::SIZE - CRC_BYTES];
        let (name, name_bytes) = name_field(PIN, &self.name)?;
        preamble::put(&mut bytes, Kind::Pin, pin_at::SIZE);
        pin_at::VOLUME_ID.put(&mut bytes, self.volume_id.0);
        pin_at::PUT_ID.put(&mut bytes, self.put_id.0);
        pin_at::PIN_NUMBER.put(&mut bytes, self.pin_number.to_le_bytes());
        pin_at::CLONE_ID.put(&mut bytes, self.clone_id.0);
        pin_at::NUMBER.put(&mut bytes, self.number.to_le_bytes());
        pin_at::THROUGH_SEQUENCE.put(&mut bytes, self.through_sequence.to_le_bytes());
        pin_at::NAME_BYTES.put(&mut bytes, [name_bytes]);
        pin_at::NAME.put(&mut bytes, name);
        crc::seal(&mut bytes);
        Ok(bytes)
    }

    /// Reads the whole object.
    pub fn decode(bytes: &[u8], volume_id: VolumeId, pin_number: u64) -> Result<Pin> {
        preamble::open_whole(bytes, Kind::Pin, pin_at::SIZE)?;
        preamble::check_reserved(Kind::Pin, bytes, &[pin_at::RESERVED])?;
        check_identity(PIN, "volume_id", volume_id, VolumeId(pin_at::VOLUME_ID.array(bytes)))?;
        check_identity(PIN, "pin_number", pin_number, pin_at::PIN_NUMBER.u64(bytes))?;
        Ok(Pin {
            volume_id,
            put_id: PutId(pin_at::PUT_ID.array(bytes)),
            pin_number,
            clone_id: VolumeId(pin_at::CLONE_ID.array(bytes)),
            number: pin_at::NUMBER.u64(bytes),
            through_sequence: pin_at::THROUGH_SEQUENCE.u64(bytes),
            name: get_name(pin_at::NAME.of(bytes), pin_at::NAME_BYTES.u8(bytes))?,
        })
    }
}

/// The key of a pin.
pub fn pin_key(volume_id: VolumeId, pin_number: u64) -> String {
    format!("{}{pin_number:020}", pin_prefix(volume_id))
}

/// The prefix of all pins of a volume, for listing.
pub fn pin_prefix(volume_id: VolumeId) -> String {
    format!("{volume_id}/pin/")
}

/// The number in the key of a pin or a released pin.
pub fn parse_pin_number(key: &str) -> Option<u64> {
    crate::layout::parse_number(key.rsplit_once('/')?.1)
}

/// The key of a released pin, which says that the pin's clone is gone; the object is a copy of the
/// pin.
pub fn released_key(volume_id: VolumeId, pin_number: u64) -> String {
    format!("{}{pin_number:020}", released_prefix(volume_id))
}

/// The prefix of all released pins of a volume, for listing.
pub fn released_prefix(volume_id: VolumeId) -> String {
    format!("{volume_id}/released/")
}

/// The status that a status pin records of a volume: the `number` of a [`Pin`] at
/// [`status_pin_key`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u64)]
pub enum PinnedStatus {
    /// It is deleted; its data goes with its last pin.
    Deleted = 1,
    /// Its data is being deleted.
    Removed = 2,
    /// It lives, whatever earlier status pins record.
    Lives = 3,
}

impl PinnedStatus {
    /// The status that a pin's number stands for; `None` when it stands for none.
    pub fn of(pin: &Pin) -> Option<PinnedStatus> {
        [PinnedStatus::Deleted, PinnedStatus::Removed, PinnedStatus::Lives]
            .into_iter()
            .find(|status| *status as u64 == pin.number)
    }
}

/// The key of a status pin of a volume. Numbers are taken one after the other from 1 and never
/// freed; the newest counts. The key says `word`, which status pins were called once.
pub fn status_pin_key(volume_id: VolumeId, number: u64) -> String {
    format!("{}{number:020}", status_pin_prefix(volume_id))
}

/// The prefix of all status pins of a volume, for listing.
pub fn status_pin_prefix(volume_id: VolumeId) -> String {
    format!("{volume_id}/word/")
}

/// The key of what says that a volume is deleted, as used before there were status pins.
pub fn tombstone_key(volume_id: VolumeId) -> String {
    format!("{volume_id}/deleted")
}
