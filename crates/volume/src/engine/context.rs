//! What the engine reaches of an open volume. Not here: what it owns ([`super::Engine`]).

use std::sync::Arc;

use super::mailbox::Mailbox;
use crate::attachment::Attachment;
use crate::journal::Journal;
use crate::map::JournalMap;
use crate::record::Record;
use crate::stored_data::StoredData;
use crate::threads::pool::Pool;
use crate::write::WriteContext;

/// See the head of this file.
pub(crate) struct Context {
    pub(crate) attachment: Arc<Attachment>,
    pub(crate) journal: Option<Arc<Journal>>,
    pub(crate) journal_map: Arc<JournalMap<Arc<Record>>>,
    pub(crate) stored: Arc<StoredData>,
    pub(crate) mailbox: Arc<Mailbox>,
    /// Those who wait on the way of a write: the engine makes room for them, or fails them.
    pub(crate) write: Arc<WriteContext>,
    /// Garbage collection's own thread: users must never wait for it.
    pub(crate) collector: Arc<Pool>,
}
