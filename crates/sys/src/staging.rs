//! Memory that outlives the process: a file in a tmpfs, mapped shared, and a ring of reserved slots
//! in it.
//!
//! The ring is the unwritten end of the journal. Writers [`Ring::reserve`] a slot, fill it and
//! publish it; the only [`Consumer`] writes published spans to the journal disk and declares them
//! written; then their memory may be reused. Positions grow without end; byte `p` lives at `p %
//! capacity`.
//!
//! Invariants (they make the safe interface sound):
//! 1. `low <= written <= next` and `next - low <= capacity`, so no two live positions share memory.
//! 2. A [`StagingSlot`] is the only access to its range until it is published; ranges are handed
//!    out once.
//! 3. A [`FillProof`] exists only for a range that is completely filled. Reading it takes
//!    `low` shared and checks that the range has not been given up; giving up takes `low`
//!    exclusively.
//! 4. Only the consumer moves `written`, and it cannot hold a borrowed span while it does. It moves
//!    back, to what memory still holds, only after a failed sync.
//! 5. What `head` writes is in memory before the slot after it can be reserved: after the death of
//!    the process, a slot that was reserved and never filled can be skipped.
//!
//! Not here: what a record is, when to write, durability; the owner of a file (`ownership`).

mod ownership;

use std::fs::File;
use std::io;
use std::ops::{Deref, DerefMut};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{self, AtomicU32, Ordering};

use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;

use self::ownership::{allocate, fault_of, invalid, is_fresh};
use crate::BLOCK_BYTES;
use crate::mapping::Mapping;
use crate::sync::{AtomicU64, Mutex, RwLock, switch_point};

/// Bytes before the ring: one page of header, one page of live words.
const PREFIX_BYTES: u64 = 2 * BLOCK_BYTES;

/// A staging file: a header page, live words, and the ring's bytes.
///
/// A process that has it open may write it, and holds its lock, because a copied journal names the
/// memory of the original, which may be in use.
pub struct StagingFile {
    file: File,
    path: PathBuf,
    prefix: Mapping,
    ring: Mapping,
    capacity_bytes: u64,
}

impl StagingFile {
    /// Where the first live word is: the position up to which the journal disk has been written.
    pub const WRITTEN_OFFSET_BYTES: u64 = BLOCK_BYTES;
    /// Where the second is: not zero when a sync of the journal disk has failed.
    pub const SYNC_FAILED_OFFSET_BYTES: u64 = BLOCK_BYTES + 8;
    /// Where the third is: the position up to which the journal disk has been synced.
    pub const SYNCED_OFFSET_BYTES: u64 = BLOCK_BYTES + 16;

    /// Makes a new staging file (replacing one of that name) with a ring of `capacity_bytes`.
    pub fn create(path: &Path, capacity_bytes: u64) -> io::Result<Self> {
        Self::map(allocate(path, capacity_bytes)?, path, capacity_bytes)
    }

    /// The same from preallocated memory, which is used up; `None` if none fits.
    pub fn take_spare(spare: &Path, path: &Path, capacity_bytes: u64) -> io::Result<Option<Self>> {
        // Rename first, then inspect: another process may preallocate a new file under the old name
        // at any time.
        match std::fs::rename(spare, path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            other => other?,
        }
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let file = rustix::fs::open(path, flags, Mode::empty()).map(File::from);
        if let Ok(file) = file
            && is_fresh(&file, PREFIX_BYTES + capacity_bytes)?
        {
            return Self::map(file, path, capacity_bytes).map(Some);
        }
        std::fs::remove_file(path)?;
        Ok(None)
    }

    /// Preallocates memory for a staging file that is made later, because allocating its pages
    /// takes milliseconds. Nothing may write to it.
    pub fn preallocate(spare: &Path, capacity_bytes: u64) -> io::Result<()> {
        allocate(spare, capacity_bytes).map(drop)
    }

    /// Opens a staging file left by an earlier process; `None` when there is none. One that another
    /// user may have made or may write is `InvalidData`, because a folder such as /dev/shm is open
    /// to all users. `WouldBlock`: a living process has it open.
    pub fn open(path: &Path) -> io::Result<Option<Self>> {
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
        let file = match rustix::fs::open(path, flags, Mode::empty()) {
            Ok(file) => File::from(file),
            Err(Errno::NOENT) => return Ok(None),
            Err(Errno::LOOP) => return Err(invalid("it is a symbolic link")),
            // Only root can open another user's file.
            Err(Errno::ACCESS) => return Err(invalid("it belongs to another user")),
            Err(error) => return Err(error.into()),
        };
        let about = rustix::fs::fstat(&file)?;
        if let Some(fault) = fault_of(&about) {
            return Err(invalid(fault));
        }
        let length = about.st_size as u64;
        if length <= PREFIX_BYTES || !length.is_multiple_of(BLOCK_BYTES) {
            return Err(invalid("it is cut short"));
        }
        Self::map(file, path, length - PREFIX_BYTES).map(Some)
    }

    fn map(file: File, path: &Path, capacity_bytes: u64) -> io::Result<Self> {
        rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive)?;
        let too_large = || {
            io::Error::new(io::ErrorKind::InvalidInput, "the staging ring does not fit in memory")
        };
        let capacity = usize::try_from(capacity_bytes).map_err(|_| too_large())?;
        let prefix = Mapping::plain(&file, 0, PREFIX_BYTES as usize)?;
        let ring = Mapping::doubled(&file, PREFIX_BYTES, capacity)?;
        Ok(StagingFile { file, path: path.to_owned(), prefix, ring, capacity_bytes })
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The ring's capacity.
    #[must_use]
    pub fn capacity_bytes(&self) -> u64 {
        self.capacity_bytes
    }

    /// A copy of the header page.
    #[must_use]
    pub fn header(&mut self) -> Vec<u8> {
        let mut page = vec![0; BLOCK_BYTES as usize];
        // SAFETY: the header page is mapped, `&mut self` excludes other access, the target is as
        // long.
        unsafe { std::ptr::copy_nonoverlapping(self.prefix.at(0), page.as_mut_ptr(), page.len()) };
        page
    }

    /// One of the live words, by its place in the file.
    fn word(&self, offset_bytes: u64) -> &atomic::AtomicU64 {
        debug_assert!((BLOCK_BYTES..PREFIX_BYTES).contains(&offset_bytes), "on the second page");
        // SAFETY: the callers name one of the three places above. The second page is mapped as long
        // as `self`, they are aligned, and only ever used through these atomics.
        unsafe { atomic::AtomicU64::from_ptr(self.prefix.at(offset_bytes as usize).cast::<u64>()) }
    }

    fn written_word(&self) -> &atomic::AtomicU64 {
        switch_point();
        self.word(Self::WRITTEN_OFFSET_BYTES)
    }

    fn failed_word(&self) -> &atomic::AtomicU64 {
        self.word(Self::SYNC_FAILED_OFFSET_BYTES)
    }

    fn synced_word(&self) -> &atomic::AtomicU64 {
        self.word(Self::SYNCED_OFFSET_BYTES)
    }

    /// The position up to which the earlier process recorded a sync of the journal disk, or zero.
    #[must_use]
    pub fn synced(&mut self) -> u64 {
        self.synced_word().load(Ordering::Acquire)
    }

    /// The position up to which the earlier process had written the journal disk.
    #[must_use]
    pub fn written(&mut self) -> u64 {
        self.written_word().load(Ordering::Acquire)
    }

    /// Whether the earlier process met a failed sync: what it had written may not be durable
    /// although it can be read.
    #[must_use]
    pub fn sync_failed(&mut self) -> bool {
        self.failed_word().load(Ordering::Acquire) != 0
    }

    /// Records, for the next process that opens this memory, that a sync of the journal disk has
    /// failed, or may fail from now on without being recorded.
    pub fn doubt_syncs(&mut self) {
        self.failed_word().store(1, Ordering::Release);
    }

    /// Copies ring bytes at `position`, at most the capacity, as an earlier process left them.
    pub fn copy_out(&mut self, position: u64, into: &mut [u8]) {
        assert!(
            into.len() as u64 <= self.capacity_bytes,
            "at most the ring's capacity can be copied"
        );
        let from = self.ring.at((position % self.capacity_bytes) as usize);
        // SAFETY: the doubled mapping makes `capacity` bytes readable from any start; `&mut self`
        // means that no ring exists yet, so nothing writes them.
        unsafe { std::ptr::copy_nonoverlapping(from, into.as_mut_ptr(), into.len()) };
    }

    /// Starts the ring at `position`, a whole number of blocks. The header page is written last: a
    /// file that has one is complete.
    #[must_use]
    pub fn into_ring(self, position: u64, header: &[u8]) -> (Arc<Ring>, Consumer) {
        static RINGS: AtomicU32 = AtomicU32::new(0);
        assert!(position.is_multiple_of(BLOCK_BYTES), "the ring starts at a whole block");
        assert!(header.len() <= BLOCK_BYTES as usize, "the header is one page");
        self.written_word().store(position, Ordering::Release);
        self.synced_word().store(0, Ordering::Release);
        // SAFETY: the header page is mapped, `self` is owned so nobody else uses it, the source
        // fits.
        unsafe { std::ptr::copy_nonoverlapping(header.as_ptr(), self.prefix.at(0), header.len()) };
        let id = RINGS.fetch_add(1, Ordering::Relaxed);
        let ring = Arc::new(Ring {
            staging: self,
            id,
            end: Mutex::new(End { next: position, is_closed: false }),
            next_seen: AtomicU64::new(position),
            low: RwLock::new(position),
            position_max: AtomicU64::new(u64::MAX),
            kept_from: AtomicU64::new(u64::MAX),
        });
        (ring.clone(), Consumer { ring })
    }
}

/// Why a slot cannot be reserved now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReserveError {
    /// The consumer has to write more of the ring first.
    Staging,
    /// The journal behind has no room: [`Ring::set_position_max`].
    Journal,
    /// The ring takes no more: [`Ring::close`].
    Closed,
}

/// How far a reservation may reach.
struct Bounds {
    position_max: u64,
    /// Memory from here on is not given up for it.
    kept_from: u64,
}

/// The end of the ring; its lock defines the order.
struct End {
    next: u64,
    is_closed: bool,
}

/// The ring of reserved slots in a staging file, and the writers' end of it.
pub struct Ring {
    staging: StagingFile,
    id: u32,
    end: Mutex<End>,
    next_seen: AtomicU64,
    low: RwLock<u64>,
    position_max: AtomicU64,
    kept_from: AtomicU64,
}

impl Ring {
    /// Lets another process open this memory. Nothing may be reserved any more.
    pub fn unlock(&self) {
        // Unlocking an open descriptor cannot fail; the lock also ends with the last mapping.
        let _ = rustix::fs::flock(&self.staging.file, FlockOperation::Unlock);
    }

    /// Whether the file still has its name: without it, no process finds this memory after this
    /// one's death.
    #[must_use]
    pub fn has_name(&self) -> bool {
        rustix::fs::fstat(&self.staging.file).is_ok_and(|about| about.st_nlink > 0)
    }

    /// Reserves `bytes` at the end. `head` gets the slot's position and its bytes, under the lock
    /// that defines the order, so its effects have the order of the positions. It must be short and
    /// must not panic.
    pub fn reserve<T>(
        &self,
        bytes: u64,
        head: impl FnOnce(u64, &mut [u8]) -> T,
    ) -> Result<(StagingSlot<'_>, T), ReserveError> {
        assert!(
            bytes > 0 && bytes <= self.staging.capacity_bytes,
            "a slot of {bytes} bytes does not fit"
        );
        let mut at = self.end.lock();
        if at.is_closed {
            return Err(ReserveError::Closed);
        }
        let end = at.next + bytes;
        let bounds = Bounds {
            position_max: self.position_max.load(Ordering::Acquire),
            kept_from: self.kept_from.load(Ordering::Acquire),
        };
        self.take(&mut at.next, end, &bounds, head)
    }

    /// Reserves whatever brings the end to a whole block, at least `bytes_min`; nothing when it is
    /// one already. It may reach two blocks past the journal's room, and gives up memory that is
    /// kept, so that a flush can end in a whole block even when both are full. `head` as for
    /// [`reserve`](Self::reserve).
    pub fn reserve_to_block<T>(
        &self,
        bytes_min: u64,
        head: impl FnOnce(u64, &mut [u8]) -> T,
    ) -> Result<Option<(StagingSlot<'_>, T)>, ReserveError> {
        let mut at = self.end.lock();
        if at.next.is_multiple_of(BLOCK_BYTES) {
            return Ok(None);
        }
        let end = (at.next + bytes_min).next_multiple_of(BLOCK_BYTES);
        let position_max =
            self.position_max.load(Ordering::Acquire).saturating_add(2 * BLOCK_BYTES);
        let bounds = Bounds { position_max, kept_from: u64::MAX };
        self.take(&mut at.next, end, &bounds, head).map(Some)
    }

    /// Refuses all further reservations except padding. When this returns, every slot that will
    /// ever exist is reserved.
    pub fn close(&self) {
        self.end.lock().is_closed = true;
    }

    /// Whether [`close`](Self::close) was called.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.end.lock().is_closed
    }

    /// Takes `[next, end)`; the caller holds the lock on `next`.
    fn take<T>(
        &self,
        next: &mut u64,
        end: u64,
        bounds: &Bounds,
        head: impl FnOnce(u64, &mut [u8]) -> T,
    ) -> Result<(StagingSlot<'_>, T), ReserveError> {
        if end > bounds.position_max {
            return Err(ReserveError::Journal);
        }
        if end - *self.low.read() > self.staging.capacity_bytes {
            self.give_up_before(end, bounds.kept_from)?;
        }
        let position = *next;
        let start = self.staging.ring.at((position % self.staging.capacity_bytes) as usize);
        let mut slot =
            StagingSlot { ring: self, start, position, bytes: (end - position) as usize };
        let result = head(position, &mut slot);
        *next = end;
        self.next_seen.store(end, Ordering::Release);
        Ok((slot, result))
    }

    /// Gives up written bytes so that the ring can reach to `end`, and some more, to avoid doing
    /// this for every slot, but of what is kept no more than it must.
    fn give_up_before(&self, end: u64, kept_from: u64) -> Result<(), ReserveError> {
        let capacity = self.staging.capacity_bytes;
        // Lock before reading `written`, which moves back when a sync fails.
        let mut low = self.low.write();
        let written = self.staging.written_word().load(Ordering::Acquire);
        let need = end - capacity;
        if written.min(kept_from) < need {
            return Err(ReserveError::Staging);
        }
        let free_to = written.min(self.kept_from.load(Ordering::Acquire));
        *low = free_to.min(need + capacity / 8).max(need);
        Ok(())
    }

    /// The end of the last reserved slot.
    #[must_use]
    pub fn next(&self) -> u64 {
        self.next_seen.load(Ordering::Acquire)
    }

    /// The memory of everything before here may be used again: it is on the disk.
    #[must_use]
    pub fn low(&self) -> u64 {
        *self.low.read()
    }

    /// How far the consumer has got.
    #[must_use]
    pub fn written(&self) -> u64 {
        self.staging.written_word().load(Ordering::Acquire)
    }

    /// No slot may end past `position_max` from now on.
    pub fn set_position_max(&self, position_max: u64) {
        self.position_max.store(position_max, Ordering::Release);
    }

    /// Memory from `position` on is not given up from now on, even if it is written, except for
    /// [padding](Self::reserve_to_block).
    pub fn keep_from(&self, position: u64) {
        self.kept_from.store(position, Ordering::Release);
    }

    /// The ring's capacity.
    #[must_use]
    pub fn capacity_bytes(&self) -> u64 {
        self.staging.capacity_bytes
    }

    /// Copies what is left of bytes `[offset, offset + into.len())` of a published slot, and
    /// returns the number of first bytes that are gone: their memory was given up, so they are
    /// written. (A slot can be given up in part.)
    #[must_use]
    pub fn read(&self, slot: &FillProof, offset: u64, into: &mut [u8]) -> usize {
        assert_eq!(slot.ring, self.id, "the slot belongs to another ring");
        assert!(
            offset + into.len() as u64 <= u64::from(slot.bytes),
            "the read reaches past the slot"
        );
        let low = self.low.read();
        let given_up = low.saturating_sub(slot.position + offset).min(into.len() as u64);
        let into = &mut into[given_up as usize..];
        if into.is_empty() {
            return given_up as usize;
        }
        let position = slot.position + offset + given_up;
        let from = self.staging.ring.at((position % self.staging.capacity_bytes) as usize);
        // SAFETY: the range lies in a published slot, so nobody writes it (invariants 2, 3); it is
        // not given up while `low` is held; the doubled mapping makes it contiguous.
        unsafe { std::ptr::copy_nonoverlapping(from, into.as_mut_ptr(), into.len()) };
        given_up as usize
    }
}

/// A reserved range of the ring, to be filled and published. A slot that is dropped unpublished is
/// never reused.
pub struct StagingSlot<'a> {
    ring: &'a Ring,
    start: *mut u8,
    position: u64,
    bytes: usize,
}

impl StagingSlot<'_> {
    /// Declares the slot filled.
    #[must_use]
    pub fn publish(self) -> FillProof {
        FillProof { position: self.position, bytes: self.bytes as u32, ring: self.ring.id }
    }
}

impl Deref for StagingSlot<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the range is mapped for as long as the ring lives and belongs to this slot alone
        // (invariant 2).
        unsafe { std::slice::from_raw_parts(self.start, self.bytes) }
    }
}

impl DerefMut for StagingSlot<'_> {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: the range is mapped for as long as the ring lives, belongs to this slot alone
        // (invariant 2), and `&mut self` excludes other borrows of the slot.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.bytes) }
    }
}

/// Proof that a range of a ring is filled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FillProof {
    position: u64,
    bytes: u32,
    ring: u32,
}

impl FillProof {
    /// Where the slot begins.
    #[must_use]
    pub fn position(&self) -> u64 {
        self.position
    }

    /// Where it ends.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.position + u64::from(self.bytes)
    }
}

/// Adjacent published slots, or a part of them.
#[derive(Debug, PartialEq, Eq)]
pub struct Span {
    start: u64,
    end: u64,
    ring: u32,
}

impl Span {
    /// The span of one slot.
    #[must_use]
    pub fn of(slot: &FillProof) -> Self {
        Span { start: slot.position, end: slot.end(), ring: slot.ring }
    }

    /// Adds the slot that follows.
    pub fn extend(&mut self, slot: &FillProof) {
        assert!(
            slot.position == self.end && slot.ring == self.ring,
            "the slot does not follow the span"
        );
        self.end = slot.end();
    }

    /// First position.
    #[must_use]
    pub fn start(&self) -> u64 {
        self.start
    }

    /// Position past the last byte.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.end
    }

    /// Cuts off and returns `[start, position)`.
    #[must_use]
    pub fn split_to(&mut self, position: u64) -> Span {
        assert!(self.start <= position && position <= self.end, "the cut lies outside the span");
        let front = Span { start: self.start, end: position, ring: self.ring };
        self.start = position;
        front
    }
}

/// The only writer of the ring to the journal disk.
pub struct Consumer {
    ring: Arc<Ring>,
}

impl Consumer {
    /// The bytes of a span that has not been declared written.
    #[must_use]
    pub fn bytes(&self, span: &Span) -> &[u8] {
        assert_eq!(span.ring, self.ring.id, "the span belongs to another ring");
        assert!(span.start >= self.ring.written(), "the span's memory may have been given up");
        if span.start == span.end {
            return &[];
        }
        let from =
            self.ring.staging.ring.at((span.start % self.ring.staging.capacity_bytes) as usize);
        // SAFETY: the whole span is published, so nobody writes it; `low <= written <= span.start`,
        // and `written` moves only by `&mut self`, which this borrow excludes; the doubled mapping
        // makes the range contiguous, and its length is at most the capacity.
        unsafe { std::slice::from_raw_parts(from, (span.end - span.start) as usize) }
    }

    /// Declares a span written, the next one in order: its memory may be given up.
    pub fn declare_written(&mut self, span: Span) {
        assert!(
            span.ring == self.ring.id && span.start == self.ring.written(),
            "spans are written in order"
        );
        self.ring.staging.written_word().store(span.end, Ordering::Release);
    }

    /// Records, for the next process that opens this memory, that the journal disk has been synced
    /// up to `position`: earlier bytes must not be rewritten, because a power cut could leave that
    /// half done.
    pub fn declare_synced(&mut self, position: u64) {
        assert!(position <= self.ring.written(), "only what was written can be synced");
        self.ring.staging.synced_word().store(position, Ordering::Release);
    }

    /// Records, for the next process that opens this memory, that a sync of the journal disk has
    /// failed, and that only bytes before `durable` are certain: bytes written since that are still
    /// in memory count as not written, and are kept. The disk may have dropped them, and return old
    /// content.
    pub fn declare_sync_failed(&mut self, durable: u64) {
        let staging = &self.ring.staging;
        // Exclusively, so that no memory is given up while it is taken back here.
        let low = self.ring.low.write();
        let kept_through = durable.max(*low).min(self.ring.written());
        staging.failed_word().store(1, Ordering::Release);
        staging.written_word().store(kept_through, Ordering::Release);
    }
}

// SAFETY: the pointer is to a range that is this slot's alone (invariant 2) until `publish` takes
// the slot, so whichever thread has the slot is the only one to touch it.
unsafe impl Send for StagingSlot<'_> {}

#[cfg(test)]
mod tests;
