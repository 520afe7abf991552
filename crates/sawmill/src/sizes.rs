//! Default sizes of new journals and read caches, from the free space of their disk, which all
//! journals of one command share.
//!
//! Invariants: existing files keep their size, so that a default never resizes a journal or empties
//! a cache. No default takes more than a quarter of the free space for all journals together, or
//! for the cache, unless a quarter is below the minimum size.
//!
//! Not here: the smallest journal that works (`sawmill_volume::limits`), the notation of sizes
//! (`sawmill_console::units`).

use std::fs::File;
use std::io::{Seek, SeekFrom};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use sawmill_console::units::human_size;

/// The largest default of a journal.
pub(crate) const JOURNAL_BYTES: u64 = 1 << 30;
/// The largest default of a read cache.
pub(crate) const CACHE_BYTES: u64 = 4 << 30;
/// The least default of a read cache.
const CACHE_BYTES_MIN: u64 = 16 << 20;

const MIB: u64 = 1 << 20;

/// The size of each new journal of a command with `volumes` volumes, of which each needs `least`.
pub(crate) fn journal(free_bytes: u64, volumes: usize, least: u64) -> u64 {
    let share = free_bytes / 4 / (volumes as u64).max(1);
    // The least comes last: no smaller journal works, however little space is free.
    (share / MIB * MIB).min(JOURNAL_BYTES).max(least)
}

/// The size of a new read cache, which all volumes of a process share.
pub(crate) fn cache(free_bytes: u64) -> u64 {
    (free_bytes / 4 / MIB * MIB).clamp(CACHE_BYTES_MIN, CACHE_BYTES)
}

/// The size of new journals.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum JournalSize {
    /// As the user requested.
    Given(u64),
    /// A share of the space that was free, for this number of volumes.
    Share { free_bytes: u64, volumes: usize },
}

impl JournalSize {
    /// The requested size, or a share of the disk that holds `place`.
    pub(crate) fn new(size_bytes: Option<u64>, place: &Path, volumes: usize) -> Self {
        match size_bytes {
            Some(bytes) => JournalSize::Given(bytes),
            None => JournalSize::Share { free_bytes: free_bytes(place), volumes },
        }
    }

    /// The size of the journal at `path`, whether it exists or not.
    pub(crate) fn of(self, path: &Path, least: u64) -> u64 {
        match self {
            JournalSize::Given(bytes) => bytes,
            JournalSize::Share { free_bytes, volumes } => length_of(path)
                // A smaller file cannot be a journal of this volume, and counts as new.
                .filter(|bytes| *bytes >= least)
                .unwrap_or_else(|| journal(free_bytes, volumes, least)),
        }
    }
}

/// The size of the read cache at `path`, whether it exists or not.
pub(crate) fn cache_of(path: &Path, size_bytes: Option<u64>) -> u64 {
    let existing = || length_of(path).filter(|bytes| *bytes >= CACHE_BYTES_MIN);
    size_bytes.or_else(existing).unwrap_or_else(|| cache(free_bytes(path)))
}

/// One line about the disk space that the volumes of a process take on this machine.
pub(crate) fn taken<'a>(
    journals: impl Iterator<Item = &'a Path>,
    cache: Option<&Path>,
) -> Option<String> {
    let journals: Vec<u64> = journals.filter_map(length_of).collect();
    let cache = cache.and_then(length_of).map(human_size);
    let journal = (!journals.is_empty()).then(|| {
        let total = human_size(journals.iter().sum());
        match journals.len() {
            1 => format!("the journal takes {total}"),
            count => format!("the journals of {count} volumes take {total} together"),
        }
    });
    match (journal, cache) {
        (None, None) => None,
        (Some(journal), None) => Some(format!("{journal}; there is no read cache")),
        (None, Some(cache)) => Some(format!("the read cache takes up to {cache}")),
        (Some(journal), Some(cache)) if journals.len() == 1 => {
            Some(format!("{journal}, the read cache up to {cache}"))
        }
        (Some(journal), Some(cache)) => {
            Some(format!("{journal}, the read cache that they share up to {cache}"))
        }
    }
}

/// Bytes of a file or a block device; `None`: there is none that can be read.
fn length_of(path: &Path) -> Option<u64> {
    let kind = path.metadata().ok()?.file_type();
    // Opening a pipe would wait for its other end.
    let has_length = kind.is_file() || kind.is_block_device();
    has_length.then(|| File::open(path).ok()?.seek(SeekFrom::End(0)).ok())?
}

/// The free space where `path` is or would be created. If it is unknown, the disk counts as large.
pub(crate) fn free_bytes(path: &Path) -> u64 {
    rustix::fs::statvfs(nearest_existing(path))
        .map_or(u64::MAX, |found| found.f_bavail.saturating_mul(found.f_frsize))
}

/// The nearest existing folder at or above `path`, where `path` would be created.
pub(crate) fn nearest_existing(path: &Path) -> PathBuf {
    let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf());
    absolute.ancestors().find(|folder| folder.is_dir()).unwrap_or(Path::new("/")).to_path_buf()
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;
    const LEAST: u64 = 32 << 20;

    #[test]
    fn a_large_disk_gets_the_largest_defaults() {
        assert_eq!(journal(1000 * GIB, 1, LEAST), JOURNAL_BYTES);
        assert_eq!(journal(1000 * GIB, 100, LEAST), JOURNAL_BYTES);
        assert_eq!(cache(1000 * GIB), CACHE_BYTES);
        assert_eq!((journal(u64::MAX, 1, LEAST), cache(u64::MAX)), (JOURNAL_BYTES, CACHE_BYTES));
    }

    #[test]
    fn a_small_disk_gives_a_quarter_to_journals_and_a_quarter_to_the_cache() {
        assert_eq!(journal(2 * GIB, 1, LEAST), GIB / 2);
        assert_eq!(cache(2 * GIB), GIB / 2);
        assert_eq!(journal(2 * GIB - 1, 1, LEAST), GIB / 2 - MIB, "whole MiB");
    }

    #[test]
    fn the_volumes_of_a_command_share_the_quarter() {
        assert_eq!(journal(40 * GIB, 100, LEAST), 102 * MIB);
        for volumes in 1..=300 {
            let each = journal(40 * GIB, volumes, LEAST);
            assert!(each * volumes as u64 <= 10 * GIB || each == LEAST, "{volumes}: {each}");
        }
    }

    #[test]
    fn no_default_is_below_its_minimum() {
        assert_eq!(journal(0, 100, LEAST), LEAST);
        assert_eq!(journal(40 * GIB, 100, 256 * MIB), 256 * MIB, "large segments need more");
        assert_eq!(cache(0), CACHE_BYTES_MIN);
    }

    #[test]
    fn what_exists_keeps_its_size_and_what_was_given_wins() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let share = JournalSize::Share { free_bytes: 2 * GIB, volumes: 2 };
        assert_eq!(share.of(&path, LEAST), GIB / 4);
        File::create(&path).unwrap().set_len(100 * MIB).unwrap();
        assert_eq!(share.of(&path, LEAST), 100 * MIB);
        assert_eq!(share.of(&path, 256 * MIB), 256 * MIB, "too small to be used");
        assert_eq!(JournalSize::new(Some(7), &path, 2).of(&path, LEAST), 7);
        assert_eq!(cache_of(&path, None), 100 * MIB);
        assert_eq!(cache_of(&path, Some(64 * MIB)), 64 * MIB);
    }

    #[test]
    fn what_has_no_length_counts_as_new() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        for path in [&*pipe, folder.path(), Path::new("/nonexistent/journal")] {
            assert_eq!(length_of(path), None, "{}", path.display());
        }
    }

    #[test]
    fn what_is_taken_is_reported_for_all_volumes_together() {
        let folder = tempfile::tempdir().unwrap();
        let make = |name: &str| {
            let path = folder.path().join(name);
            File::create(&path).unwrap().set_len(32 * MIB).unwrap();
            path
        };
        let (one, two, cache) = (make("one"), make("two"), make("cache"));
        let text =
            |journals: &[&Path], cache: Option<&Path>| taken(journals.iter().copied(), cache);
        assert_eq!(
            text(&[&one, &two], Some(&cache)).unwrap(),
            "the journals of 2 volumes take 64 MiB together, the read cache that they share up to \
             32 MiB"
        );
        assert_eq!(
            text(&[&one], Some(&cache)).unwrap(),
            "the journal takes 32 MiB, the read cache up to 32 MiB"
        );
        assert_eq!(
            text(&[&one], None).unwrap(),
            "the journal takes 32 MiB; there is no read cache"
        );
        assert_eq!(text(&[], None), None);
    }
}
