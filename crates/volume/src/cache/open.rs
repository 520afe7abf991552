//! Opens a read cache on a file or block device. Not here: what the cache does with its disk
//! (`super`), and its saved index (`persist`).

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use sawmill_sys::{DirectFile, OpenMode};

use super::{CacheOptions, ReadCache};
use crate::disk::{LockedDisk, local_file_kind};
use crate::{Error, Result, limits};

/// Opens (or makes) the read cache at `path`, a sparse file of `cache_bytes`; its index lies beside
/// it.
pub fn open_cache(path: &Path, cache_bytes: u64) -> Result<Arc<ReadCache>> {
    let failed = |error: io::Error| {
        let kind = local_file_kind(&error);
        let text = format!(
            "the read cache {} cannot be opened: {error}; give another with --cache, or \
            --cache-bytes 0",
            path.display()
        );
        Error::new(kind, text).with_source(error)
    };
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder).map_err(failed)?;
    }
    let (lock, disk) =
        DirectFile::create_sparse(path, cache_bytes, OpenMode::Cached).map_err(failed)?;
    let disk = LockedDisk { _lock: lock, disk };
    let mut index: PathBuf = path.to_owned();
    index.as_mut_os_string().push(".index");
    let options = CacheOptions { cache_bytes, frame_bytes: limits::FRAME_BYTES };
    Ok(Arc::new(ReadCache::open(Arc::new(disk), Some(index), options)))
}
