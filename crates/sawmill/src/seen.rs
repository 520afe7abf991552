//! What this machine has seen of a volume in each store: a file in the volume's state folder,
//! written after each attach, now and then while it is served, and at each clean end. It outlives
//! the journal, so a store that was restored from a backup, or an old copy of it, is recognized
//! even without the journal.
//!
//! Invariants: only the process that has the volume attached for writing remembers what was seen.
//! An unreadable file counts as no file, and nothing is refused because of it. Not here: its bytes
//! (`sawmill_format::newest_state`), and what is refused (`sawmill_volume::open`).

use std::fs;
use std::io;
use std::path::Path;

use sawmill_format::ids::VolumeId;
use sawmill_volume::{Age, NewestState, RealWorld, Volume, World, age_of};
use serde::Serialize;

use crate::config::{Paths, STORE_FILE};
use crate::durable;
use crate::moment::human_time;
use sawmill_console::exit::{Failure, Result};

const FILE: &str = "newest";

/// What was seen of the volume whose state folder is `folder`.
pub(crate) fn of(folder: &Path, volume_id: VolumeId) -> Option<NewestState> {
    let path = folder.join(FILE);
    let bytes = match fs::read(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
        read => read.map_err(|error| error.to_string()),
    };
    let newest = bytes.and_then(|bytes| {
        NewestState::decode(&bytes, volume_id).map_err(|error| error.to_string())
    });
    let newest = newest.inspect_err(|error| {
        tracing::warn!(
            "{}: {error}; cannot tell whether the store is older than before",
            path.display()
        );
    });
    newest.ok()
}

/// Remembers the newest state of a volume that this process has attached for writing. Returns its
/// newest segment if that is remembered now.
pub(crate) fn remember(folder: &Path, volume: &Volume) -> Option<u64> {
    let status = volume.status();
    if status.read_only {
        return None;
    }
    let state = NewestState {
        volume_id: status.volume_id,
        epoch: status.epoch,
        stored_sequence: status.stored_sequence,
        wall_unix_ms: RealWorld::default().unix_ms(),
    };
    let path = folder.join(FILE);
    // Durable, because it must outlive the journal and a power cut (P210).
    let written = state.encode().map_err(io::Error::other);
    if let Err(error) = written.and_then(|bytes| durable::replace(&path, &bytes)) {
        tracing::warn!(
            "cannot write {}: {error}; an older store may go unnoticed later",
            path.display()
        );
        // A state newer than the one that the volume now has would make the next start refuse it.
        if let Err(failure) = forget(folder) {
            tracing::warn!("{failure}");
        }
        return None;
    }
    Some(state.stored_sequence)
}

/// The store gets another history from now on: what was seen of the old one does not apply to it.
pub(crate) fn forget(folder: &Path) -> Result<()> {
    let path = folder.join(FILE);
    match fs::remove_file(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(Failure::io(format!("cannot remove {}", path.display()), &error))
        }
        _ => Ok(()),
    }
}

/// Another store in which this machine knows the same volume.
#[derive(Serialize)]
pub(crate) struct OtherStore {
    store: String,
    /// This machine's newest attachment there, if remembered.
    epoch: Option<u64>,
    seen_unix_ms: Option<u64>,
}

/// The other stores in which this machine knows a volume.
pub(crate) fn elsewhere(paths: &Paths, volume_id: VolumeId, store_url: &str) -> Vec<OtherStore> {
    let Ok(Ok(folders)) = paths.state_folder().map(fs::read_dir) else { return Vec::new() };
    let (id, here) = (volume_id.to_string(), store_url.trim_end_matches('/'));
    let folders = folders.flatten().filter(|entry| {
        let name = entry.file_name();
        let rest = name.to_str().and_then(|name| name.strip_prefix(&id));
        // A replica's folder has its store behind the id (`Paths::volume_folder`).
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('-'))
    });
    let mut found: Vec<OtherStore> = folders
        .filter_map(|entry| {
            let store = fs::read_to_string(entry.path().join(STORE_FILE)).ok()?;
            let store = store.trim_end_matches(['/', '\n']).to_owned();
            let newest = of(&entry.path(), volume_id);
            let (epoch, seen_unix_ms) =
                newest.map(|newest| (newest.epoch, newest.wall_unix_ms)).unzip();
            (store != here).then_some(OtherStore { store, epoch, seen_unix_ms })
        })
        .collect();
    found.sort_by(|one, other| one.store.cmp(&other.store));
    found
}

/// Remarks about a volume in `store_url` whose log ends there with `end`: an epoch and a segment.
pub(crate) fn remarks(
    paths: &Paths,
    volume_id: VolumeId,
    store_url: &str,
    end: Option<(u64, u64)>,
) -> Vec<String> {
    let folder = paths.volume_folder(&volume_id.to_string(), store_url).ok();
    let newest = folder.and_then(|folder| of(&folder, volume_id)).zip(end);
    let older = newest
        .filter(|(newest, (epoch, sequence))| age_of(newest, *epoch, *sequence) == Age::Older);
    let older = older.map(|(newest, (epoch, sequence))| {
        format!(
            "the store is older than what this machine has seen in it ({}: epoch {}, segment {}): \
             it ends in epoch {epoch} with segment {sequence}. It was restored from a backup, is \
             an old copy, or has lost objects",
            human_time(newest.wall_unix_ms),
            newest.epoch,
            newest.stored_sequence
        )
    });
    let others = elsewhere(paths, volume_id, store_url).into_iter().map(|other| {
        let when = match (other.epoch, other.seen_unix_ms) {
            (Some(epoch), Some(at)) => format!(
                ", attached there in epoch {epoch} until \
                {}",
                human_time(at)
            ),
            _ => String::new(),
        };
        format!(
            "this machine knows the same volume in {}{when}: one of the two is a copy or a \
             replica, or both names mean the same place",
            other.store
        )
    });
    older.into_iter().chain(others).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: VolumeId = VolumeId([0xab; 16]);

    fn put(folder: &Path, epoch: u64, stored_sequence: u64) {
        let state = NewestState { volume_id: ID, epoch, stored_sequence, wall_unix_ms: 0 };
        durable::replace(&folder.join(FILE), &state.encode().unwrap()).unwrap();
    }

    #[test]
    fn an_older_store_and_the_same_volume_elsewhere_are_reported() {
        let state = tempfile::tempdir().unwrap();
        let paths = Paths { state_home: Some(state.path().into()), ..Paths::default() };
        let remarks_of = |store: &str, end| remarks(&paths, ID, store, Some(end));
        assert!(remarks_of("file:///one", (7, 9)).is_empty(), "nothing was seen yet");
        let one = paths.volume_folder(&ID.to_string(), "file:///one").unwrap();
        crate::folders::make_volume_folder(&one, "file:///one").unwrap();
        put(&one, 7, 9);
        assert!(
            remarks_of("file:///one", (7, 9)).is_empty()
                && remarks_of("file:///one/", (8, 1)).is_empty()
        );
        assert!(remarks_of("file:///one", (7, 8))[0].contains("older"));
        let copy = remarks_of("file:///two", (7, 8));
        assert!(copy.len() == 1 && copy[0].contains("file:///one"), "{copy:?}");
        forget(&one).unwrap();
        forget(&one).unwrap();
        assert!(remarks_of("file:///one", (7, 8)).is_empty(), "another history");
    }

    #[test]
    fn a_damaged_file_says_nothing() {
        let folder = tempfile::tempdir().unwrap();
        put(folder.path(), 7, 9);
        assert_eq!(of(folder.path(), ID).map(|newest| newest.epoch), Some(7));
        assert_eq!(of(folder.path(), VolumeId([1; 16])), None, "another volume's");
        fs::write(folder.path().join(FILE), b"garbage").unwrap();
        assert_eq!(of(folder.path(), ID), None);
    }
}
