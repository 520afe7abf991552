//! How volumes are opened again on a new connection, and closed.
//!
//! Invariants: requests wait until all volumes are open again. A volume is opened again by its
//! reservation, and never takes over. A flush does not succeed if a target that kept unflushed
//! writes is gone.
//!
//! Not here: a volume's first opening (`device`).

use std::sync::Arc;
use std::sync::atomic::Ordering;

use sawmill_device::{Error, ErrorKind, Result};
use sawmill_format::link::control::OpenAnswer;

use super::Control;
use crate::initiator::device::{Answer, NOT_OPEN, OpenMode, answered_by, read_opened};
use crate::initiator::{Initiator, OpenExport};

/// The volumes that were requested again on connection `local`, in order, starting with the first
/// that is not open.
#[derive(Default)]
pub(super) struct Reopening {
    local: u64,
    asked: Vec<(Answer, Arc<OpenExport>)>,
}

impl Control {
    /// A volume is open from now on, as `answer` reports. The answer may have come on an earlier
    /// connection.
    pub(in crate::initiator) fn add_volume(
        &mut self,
        of: &Initiator,
        export: &str,
        mode: OpenMode,
        open_answer: OpenAnswer,
        answer: &[u8],
    ) -> Result<Arc<OpenExport>> {
        let mut shown = of.view.write();
        let number = u8::try_from(shown.volumes.len()).ok().filter(|number| *number < NOT_OPEN);
        let number = number.ok_or_else(|| {
            Error::new(ErrorKind::Full, "this initiator has too many volumes open")
        })?;
        let volume = Arc::new(OpenExport {
            export: export.to_owned(),
            mode,
            answer: open_answer,
            number,
            flushed: 0.into(),
            closed: false.into(),
            loss: Default::default(),
        });
        shown.volumes.push(Arc::clone(&volume));
        self.cache_identities.push(open_answer.cache_identity);
        of.pendings.set_number(number, open_answer.volume);
        // It was opened on an earlier connection, so it is not open on this one.
        let stale = shown.live.as_mut().filter(|live| live.local != answered_by(answer));
        let again = stale.map(|live| live.opened = false).is_some();
        drop(shown);
        if again {
            self.open_again(of);
        }
        Ok(volume)
    }

    /// Requests all volumes again on a new connection; requests resume when all are open. They are
    /// sent after the step.
    pub(super) fn open_again(&mut self, of: &Initiator) {
        let (local, volumes) = {
            let shown = of.view.read();
            let Some(live) = &shown.live else { return };
            (live.local, shown.volumes.clone())
        };
        let (closed, open): (Vec<_>, Vec<_>) =
            volumes.into_iter().partition(|volume| volume.closed.load(Ordering::SeqCst));
        // Otherwise a close would hit the volumes that have their numbers on the new connection.
        closed.iter().for_each(|volume| of.pendings.set_number(volume.number, NOT_OPEN));
        let asked: Vec<_> =
            open.into_iter().map(|volume| (ask_again(of, &volume), volume)).collect();
        if asked.is_empty() {
            all_open(of, local);
        }
        self.reopening = Reopening { local, asked };
    }

    /// Checks whether the volumes that were requested again are open. Repeated requests are sent
    /// after the step.
    pub(super) fn look_at_reopened(&mut self, of: &Initiator) {
        while let Some((answer, volume)) = self.reopening.asked.first() {
            let Some(outcome) = answer.poll() else { return };
            let volume = Arc::clone(volume);
            match outcome.and_then(|bytes| read_opened(&bytes)) {
                Ok(opened) if opened.size_bytes < volume.answer.size_bytes => {
                    let text = format!("{}: the export is smaller than before", volume.export);
                    return self.fail(of, Error::new(ErrorKind::Refused, text));
                }
                Ok(opened) => self.reopened(of, &volume, &opened),
                // The target is stopping, or the former user's requests are not done: ask again.
                Err(error) if error.kind() == ErrorKind::Unavailable => {
                    self.reopening.asked[0].0 = ask_again(of, &volume);
                    return;
                }
                Err(error) => return self.fail(of, error),
            }
            if self.reopening.asked.is_empty() {
                all_open(of, self.reopening.local);
            }
        }
    }

    /// The first of the volumes that were requested again is open.
    fn reopened(&mut self, of: &Initiator, volume: &OpenExport, answer: &OpenAnswer) {
        of.pendings.set_number(volume.number, answer.volume);
        let cache_identity = &mut self.cache_identities[usize::from(volume.number)];
        if std::mem::replace(cache_identity, answer.cache_identity) != answer.cache_identity {
            volume.volatile_writes_lost(of.pendings.changes(volume.number));
        }
        self.reopening.asked.remove(0);
    }

    /// Closes a volume when all of its requests are answered.
    pub(in crate::initiator) fn close_volume(&mut self, of: &Initiator, volume: &OpenExport) {
        if volume.closed.swap(true, Ordering::SeqCst) {
            return;
        }
        self.closing.retain(|earlier| earlier.poll().is_none());
        self.closing.push(of.queue_close(volume.number));
    }
}

/// All volumes are open on connection `local`.
fn all_open(of: &Initiator, local: u64) {
    if let Some(live) = of.view.write().live.as_mut().filter(|live| live.local == local) {
        live.opened = true;
    }
}

/// Uses the volume's reservation: if another initiator has had the export since, the reservation is
/// over. Never takes over: an initiator that has the export now took it over, or was admitted after
/// we were given up.
fn ask_again(of: &Initiator, volume: &OpenExport) -> Answer {
    let mode = OpenMode { take_over: false, ..volume.mode };
    of.queue_open(&volume.export, mode, volume.answer.reservation)
}
