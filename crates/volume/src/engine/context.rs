//! The parts of an open volume that the engine uses. Not here: what it owns ([`super::Engine`]).

use std::sync::Arc;

use super::mailbox::Mailbox;
use crate::attachment::Attachment;
use crate::journal::Journal;
use crate::map::JournalMap;
use crate::record::Record;
use crate::stored_data::StoredData;
use crate::threads::pool::Pool;
use crate::write::WriteContext;

/// References to the parts of an open volume that the engine shares with reads and writes.
pub(crate) struct Context {
    pub(crate) attachment: Arc<Attachment>,
    pub(crate) journal: Option<Arc<Journal>>,
    pub(crate) journal_map: Arc<JournalMap<Arc<Record>>>,
    pub(crate) stored: Arc<StoredData>,
    pub(crate) mailbox: Arc<Mailbox>,
    /// Writers that wait: the engine makes room for them, or fails them.
    pub(crate) write: Arc<WriteContext>,
    /// The thread of garbage collection: users must never wait for it.
    pub(crate) collector: Arc<Pool>,
    /// The thread that puts written data into the read cache: neither users nor garbage collection
    /// wait for it.
    pub(crate) cache_filler: Arc<Pool>,
    /// The thread that loads what an open left of the map. It waits for no disk, and readers may
    /// wait for it.
    pub(crate) map_loader: Arc<Pool>,
}
