//! The options of a copier.

/// See the head of this file.
#[derive(Clone, Debug, Default)]
pub struct CopyOptions {
    /// The name of the replica's source, for people.
    pub source_text: String,
    /// The destination is an earlier primary, or a promoted one: it becomes a replica, and writes
    /// that only it has are lost.
    pub fail_back: bool,
}
