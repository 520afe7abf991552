//! What a copier may be told.

/// See the head of this file.
#[derive(Clone, Debug, Default)]
pub struct CopyOptions {
    /// What the destination is called a replica of, for people.
    pub source_text: String,
    /// The destination is a primary of before, or a promoted one: it becomes a replica, and what it wrote
    /// that the source has not is lost.
    pub fail_back: bool,
}
