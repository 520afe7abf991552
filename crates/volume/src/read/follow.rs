//! A read-only attachment beside a writer moves to the writer's newest cut
//! ([decision 0009](../../../docs/decisions/0009-a-reader-beside-a-writer-follows.md)).
//!
//! Invariant: it never moves to an older cut than it has shown.

use std::sync::Arc;

use super::ReadContext;
use crate::attachment::Attachment;
use crate::recovery::Reporter;
use crate::recovery::stored::stored_of;
use crate::view::View;
use crate::{Error, ErrorKind, Result};

/// Moves a read-only attachment to the newest cut, because a segment it needs is gone. One at a
/// time; a second caller finds that the first has moved on already.
pub(super) fn follow(context: &ReadContext, missing: &Arc<View>) -> Result<bool> {
    let _one_at_a_time = context.fetcher.following.lock();
    if !Arc::ptr_eq(&context.stored.view(), missing) {
        return Ok(false);
    }
    let mut reporter = Reporter::new(&*context.attachment.world);
    let Attachment { store, record, .. } = &*context.attachment;
    let stored = stored_of(&**store, record.clone(), &mut reporter)?;
    if stored.end.position < context.mailbox.stored() {
        let text = "the store shows an older cut than before, which is not used";
        return Err(Error::new(ErrorKind::Unavailable, text));
    }
    tracing::info!("now reading the cut at position {}", stored.end.position);
    context.mailbox.set_stored(
        stored.end.position,
        stored.end.stored_sequence,
        stored.newest.number_max,
    );
    context.stored.replace_view(stored.view);
    Ok(true)
}
