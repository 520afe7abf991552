//! Segments: batches of records as objects. Modules: [`batch`] (when a batch is full), `coalesce`
//! (what a batch leaves at each address), [`builder`] (a batch becomes bytes), `buffers` (the
//! memory for that), [`resident`] (segments whose data is still in the journal), [`table`] (all
//! segments).
//!
//! Not here: their bytes (`sawmill_format::segment`), puts (`engine::log_tail`) and reads (`read`).

pub(crate) mod batch;
pub(crate) mod buffers;
pub(crate) mod builder;
mod coalesce;
pub(crate) mod resident;
pub(crate) mod table;
