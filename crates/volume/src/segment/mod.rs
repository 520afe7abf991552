//! Segments: objects made of records. Modules: [`builder`] (records become a segment; when it is
//! full), `coalesce` (what they leave at each address), `buffers` (the memory for that),
//! [`resident`] (segments whose data is still in the journal), [`table`] (all segments), `entries`
//! (how the table keeps them).
//!
//! Not here: their bytes (`sawmill_format::segment`), puts (`engine::log_tail`) and reads (`read`).

pub(crate) mod buffers;
pub(crate) mod builder;
mod coalesce;
pub(crate) mod entries;
pub(crate) mod resident;
pub(crate) mod table;
