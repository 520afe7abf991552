//! The options of a copier: which volumes, and how. Not here: when to copy again (the caller
//! decides), and the options of an open (`crate::options`).

use sawmill_store::ObjectStore;

/// The options of a copier.
#[derive(Clone, Debug, Default)]
pub struct CopyOptions {
    /// The name of the replica's source, for people.
    pub source_text: String,
    /// The destination is an earlier primary, or a promoted one: it becomes a replica, and writes
    /// that only it has are lost.
    pub fail_back: bool,
}

/// A volume by its store and its name there.
#[derive(Clone, Copy)]
pub struct VolumeAt<'a> {
    /// The store that has the volume, or will have it.
    pub store: &'a dyn ObjectStore,
    /// Its name there.
    pub name: &'a str,
}

impl<'a> VolumeAt<'a> {
    /// The volume `name` of `store`.
    #[must_use]
    pub fn new(store: &'a dyn ObjectStore, name: &'a str) -> Self {
        VolumeAt { store, name }
    }
}
