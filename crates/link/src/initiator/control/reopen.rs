//! How exports are opened again on a new connection, and closed.
//!
//! Invariants: requests wait until all exports are open again. An export is opened again by its
//! reservation, and never takes over. A flush does not succeed if a target that kept unflushed
//! writes is gone.
//!
//! Not here: the first opening of an export (`device`).

use std::sync::Arc;
use std::sync::atomic::Ordering;

use sawmill_device::{Error, ErrorKind, Result};
use sawmill_format::link::control::OpenAnswer;

use super::Control;
use crate::initiator::device::{Answer, NOT_OPEN, OpenMode, answered_by, read_opened};
use crate::initiator::{Initiator, OpenExport};

/// The exports that were requested again on connection `local`, in order, starting with the first
/// that is not open.
#[derive(Default)]
pub(super) struct Reopening {
    local: u64,
    requests: Vec<(Answer, Arc<OpenExport>)>,
}

impl Control {
    /// An export is open from now on, as `answer` reports. The answer may have come on an earlier
    /// connection.
    pub(in crate::initiator) fn add_export(
        &mut self,
        of: &Initiator,
        export: &str,
        mode: OpenMode,
        open_answer: OpenAnswer,
        answer: &[u8],
    ) -> Result<Arc<OpenExport>> {
        let mut view = of.view.write();
        let number = u8::try_from(view.open_exports.len()).ok().filter(|number| *number < NOT_OPEN);
        let number = number.ok_or_else(|| {
            Error::new(ErrorKind::Full, "this initiator has too many exports open")
        })?;
        let open_export = Arc::new(OpenExport {
            export: export.to_owned(),
            mode,
            answer: open_answer,
            number,
            flushed: 0.into(),
            is_closed: false.into(),
            loss: Default::default(),
        });
        view.open_exports.push(Arc::clone(&open_export));
        self.cache_identities.push(open_answer.cache_identity);
        of.pendings.set_number(number, open_answer.export);
        // It was opened on an earlier connection, so it is not open on this one.
        let stale = view.live.as_mut().filter(|live| live.local != answered_by(answer));
        let must_open_again = stale.map(|live| live.is_open = false).is_some();
        drop(view);
        if must_open_again {
            self.open_again(of);
        }
        Ok(open_export)
    }

    /// Requests all exports again on a new connection; requests resume when all are open. They are
    /// sent after the step.
    pub(super) fn open_again(&mut self, of: &Initiator) {
        let (local, open_exports) = {
            let view = of.view.read();
            let Some(live) = &view.live else { return };
            (live.local, view.open_exports.clone())
        };
        let (closed, open): (Vec<_>, Vec<_>) =
            open_exports.into_iter().partition(|export| export.is_closed.load(Ordering::SeqCst));
        // Otherwise a close would hit the exports that have their numbers on the new connection.
        closed.iter().for_each(|export| of.pendings.set_number(export.number, NOT_OPEN));
        let requests: Vec<_> =
            open.into_iter().map(|export| (request_again(of, &export), export)).collect();
        if requests.is_empty() {
            all_open(of, local);
        }
        self.reopening = Reopening { local, requests };
    }

    /// Checks whether the exports that were requested again are open. Repeated requests are sent
    /// after the step.
    pub(super) fn check_reopened(&mut self, of: &Initiator) {
        while let Some((answer, open_export)) = self.reopening.requests.first() {
            let Some(outcome) = answer.poll() else { return };
            let open_export = Arc::clone(open_export);
            match outcome.and_then(|bytes| read_opened(&bytes)) {
                Ok(open_answer) if open_answer.size_bytes < open_export.answer.size_bytes => {
                    let (now, before) = (open_answer.size_bytes, open_export.answer.size_bytes);
                    let text = format!(
                        "{}: the export has {now} bytes and had {before}; restore its size at \
                         the target, then attach again",
                        open_export.export
                    );
                    return self.fail(of, Error::new(ErrorKind::Refused, text));
                }
                Ok(open_answer) => self.reopened(of, &open_export, &open_answer),
                // The target is stopping, or the former user's requests are not done: ask again.
                Err(error) if error.kind() == ErrorKind::Unavailable => {
                    self.reopening.requests[0].0 = request_again(of, &open_export);
                    return;
                }
                Err(error) => return self.fail(of, error),
            }
            if self.reopening.requests.is_empty() {
                all_open(of, self.reopening.local);
            }
        }
    }

    /// The target has opened the first of the requested exports again: takes its new number, and
    /// notes the writes that the target's machine has lost.
    fn reopened(&mut self, of: &Initiator, open_export: &OpenExport, answer: &OpenAnswer) {
        of.pendings.set_number(open_export.number, answer.export);
        let cache_identity = &mut self.cache_identities[usize::from(open_export.number)];
        if std::mem::replace(cache_identity, answer.cache_identity) != answer.cache_identity {
            open_export.volatile_writes_lost(of.pendings.changes(open_export.number));
        }
        self.reopening.requests.remove(0);
    }

    /// Closes an export when all of its requests are answered.
    pub(in crate::initiator) fn close_export(&mut self, of: &Initiator, open_export: &OpenExport) {
        if open_export.is_closed.swap(true, Ordering::SeqCst) {
            return;
        }
        self.closing.retain(|earlier| earlier.poll().is_none());
        self.closing.push(of.queue_close(open_export.number));
    }
}

/// All exports are open on connection `local`.
fn all_open(of: &Initiator, local: u64) {
    if let Some(live) = of.view.write().live.as_mut().filter(|live| live.local == local) {
        live.is_open = true;
    }
}

/// Uses the export's reservation: if another initiator has had the export since, the reservation is
/// over. Never takes over: an initiator that has the export now took it over, or was admitted after
/// we were given up.
fn request_again(of: &Initiator, open_export: &OpenExport) -> Answer {
    let mode = OpenMode { take_over: false, ..open_export.mode };
    of.queue_open(&open_export.export, mode, open_export.answer.reservation)
}
