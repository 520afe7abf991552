//! The saved index: what makes the cache warm after a restart.
//!
//! Invariants: a saved index is never trusted. A random tag, which the disk holds too, ties it to a
//! disk; at each read, checksums verify which bytes a cell really holds. So it may be old, and
//! needs no order between its own writes and those to the disk.
//!
//! Not here: the encoding of the index (`sawmill_format::cache_index`).

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

use sawmill_format::cache_index::{CacheEntry, CacheIndex, VERSION};

use super::eviction::Tier;
use super::index::{FrameFacts, WriteTurn};
use super::{FrameKey, IndexState, OwnerId, ReadCache};

/// The disk's first page: magic and tag.
pub(super) const HEADER_BYTES: u64 = 4096;
const HEADER_MAGIC: [u8; 8] = *b"SAWCACHE";

/// The lists whose cells hold frames.
pub(super) const QUEUES: [Tier; 2] = [Tier::Probation, Tier::Main];

impl ReadCache {
    /// At open: loads what was saved, or starts empty.
    pub(super) fn restore(&mut self) {
        let tag = self.read_tag();
        self.index_state = match (tag, self.index_path.clone()) {
            (Some(tag), Some(path)) => self.restore_from(&path, tag),
            _ => IndexState::New,
        };
        self.tag = tag.or_else(|| self.write_tag());
        match &self.index_state {
            IndexState::New => tracing::info!(cells = self.layout.cells, "read cache: new"),
            IndexState::Restored { frames } => tracing::info!(frames, "read cache: index restored"),
            IndexState::Discarded { reason } => {
                tracing::warn!(%reason, "read cache: saved index not used, starting empty");
            }
        }
    }

    fn read_tag(&self) -> Option<u64> {
        let mut header = [0; 16];
        self.place.enter()?.read_at(0, &mut header).ok()?;
        let (magic, tag) = header.split_first_chunk::<8>()?;
        let tag = u64::from_le_bytes(tag.try_into().ok()?);
        (*magic == HEADER_MAGIC).then_some(tag)
    }

    fn write_tag(&self) -> Option<u64> {
        let tag = getrandom::u64().ok()?;
        let mut header = vec![0; HEADER_BYTES as usize];
        header[..8].copy_from_slice(&HEADER_MAGIC);
        header[8..16].copy_from_slice(&tag.to_le_bytes());
        match self.place.enter()?.write_at(0, &header) {
            Ok(()) => Some(tag),
            Err(error) => {
                tracing::warn!(%error, "read cache: cannot mark the disk; the index will not be \
                    saved");
                None
            }
        }
    }

    fn restore_from(&mut self, path: &Path, tag: u64) -> IndexState {
        let discarded = |reason: String| IndexState::Discarded { reason };
        let bytes = match fs::read(path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return IndexState::New,
            Err(error) => return discarded(format!("{}: {error}", path.display())),
        };
        let index = match CacheIndex::decode(&bytes, tag) {
            Ok(index) => index,
            Err(error) => return discarded(format!("{}: {error}", path.display())),
        };
        if index.version != VERSION {
            // Its checksums cannot tell versions of a self-checked block apart (decision 0007).
            return discarded(format!("{}: of an older version of Sawmill", path.display()));
        }
        if index.frame_bytes != self.layout.frame_bytes {
            let (was, is) = (index.frame_bytes, self.layout.frame_bytes);
            return discarded(format!(
                "{}: made for frames of {was} bytes, now {is}",
                path.display()
            ));
        }
        *self.owners.get_mut() = index.owners;
        for entry in &index.entries {
            self.restore_entry(entry);
        }
        IndexState::Restored { frames: self.state.get_mut().eviction.filled() }
    }

    /// Takes over one entry, unless it does not fit into this cache or contradicts an earlier one.
    fn restore_entry(&mut self, entry: &CacheEntry) {
        let tier = QUEUES.into_iter().find(|tier| *tier as u8 == entry.tier);
        let (Ok(sequence), Some(tier)) = (u32::try_from(entry.sequence), tier) else { return };
        let owner = OwnerId(entry.owner);
        let key = FrameKey { owner, sequence, epoch: entry.epoch, frame: entry.frame };
        let state = self.state.get_mut();
        // A cache that was made smaller keeps the cells it still has.
        let free = entry.cell < self.layout.cells && state.eviction.tier(entry.cell) == Tier::Free;
        if !free || self.index.find(&key).is_some() {
            return;
        }
        let facts = FrameFacts { data_bytes: entry.data_bytes, crcs: entry.crcs };
        self.index.restore(&mut state.turn, entry.cell, &key, &facts);
        if tier == Tier::Main {
            // It was hit before: what nobody has read yet must not take its cell.
            self.index.visit(entry.cell);
        }
        state.eviction.restore(entry.cell, tier);
        state.bytes += u64::from(entry.data_bytes);
        state.frame_number_max = state.frame_number_max.max(entry.frame);
    }

    /// Saves the index, so that the next open is warm. Insertions wait while it is copied, reads do
    /// not.
    ///
    /// Does nothing when the cache was opened without a path, or was let go of.
    pub fn save_index(&self) -> io::Result<()> {
        let (Some(path), Some(_entered)) = (self.index_path.as_deref(), self.place.enter()) else {
            return Ok(());
        };
        let Some(cache_tag) = self.tag else {
            return Err(io::Error::other(
                "the cache disk could not be marked at open, so its index is not saved",
            ));
        };
        let _one_at_a_time = self.saving.lock();
        let bytes = self.picture(cache_tag).encode().map_err(io::Error::other)?;
        let mut new = path.as_os_str().to_owned();
        new.push(".new");
        let mut file = File::create(&new)?;
        file.write_all(&bytes)?;
        // Otherwise a power cut may leave an empty file under the name, and neither index.
        file.sync_all()?;
        fs::rename(&new, path)
    }

    /// The entries, oldest first, so that restoring them in order restores the queues. A frame that
    /// was hit in probation is saved as one of main, where it would go next.
    fn picture(&self, cache_tag: u64) -> CacheIndex {
        let state = self.state.lock();
        let mut owners = self.owners.lock().clone();
        let mut entries = Vec::with_capacity(state.eviction.filled() as usize);
        for tier in QUEUES.into_iter().rev() {
            let cells = state.eviction.oldest_first(tier);
            entries.extend(cells.map(|cell| {
                let tier = if self.index.is_visited(cell) { Tier::Main } else { tier };
                self.entry(&state.turn, cell, tier)
            }));
        }
        drop(state);
        // A key may carry the owner of another cache by mistake; it is no reason to lose the rest.
        entries.retain(|entry| (entry.owner as usize) < owners.len());
        // Owners without frames, such as deleted volumes, are not carried along.
        let mut used = vec![false; owners.len()];
        entries.iter().for_each(|entry| used[entry.owner as usize] = true);
        let mut renumbered = Vec::with_capacity(owners.len());
        let mut count = 0;
        for is_used in &used {
            renumbered.push(count);
            count += u32::from(*is_used);
        }
        entries.iter_mut().for_each(|entry| entry.owner = renumbered[entry.owner as usize]);
        let mut is_used = used.iter();
        owners.retain(|_| *is_used.next().unwrap_or(&false));
        let (frame_bytes, cell_count) = (self.layout.frame_bytes, self.layout.cells);
        CacheIndex { version: VERSION, frame_bytes, cell_count, cache_tag, owners, entries }
    }

    fn entry(&self, turn: &WriteTurn, cell: u32, tier: Tier) -> CacheEntry {
        let (key, facts) = self.index.entry(turn, cell);
        CacheEntry {
            owner: key.owner.0,
            sequence: u64::from(key.sequence),
            epoch: key.epoch,
            frame: key.frame,
            cell,
            data_bytes: facts.data_bytes,
            tier: tier as u8,
            crcs: facts.crcs,
        }
    }
}
