//! The needs of clones: pins are read after the checkpoint that allows a delete is durable, and
//! before the delete.
//!
//! Why that is safe: a clone puts its pin and *then* checks whether its cut is still kept. If it
//! found the cut kept, that was before the checkpoint without the cut was durable, so its pin
//! exists when we read. Pins are numbered one after the other and read by name, so a list that lags
//! cannot hide one.
//!
//! Invariant: only a definite "not there" ends the search. A pin that cannot be read holds up the
//! delete.
//!
//! Not here: how a clone puts its pin (`cuts::clones`), and finding released ones (`cleanup`).

use std::sync::Arc;

use sawmill_format::kept_block::{CutEntry, CutKind, Pin, pin_key};
use sawmill_store::{Class, StoreErrorKind};

use super::context::Context;
use super::messages::{Event, PinOutcome};
use crate::cuts::NumberedPin;
use crate::store_calls::{store_error, want};
use crate::{Error, ErrorKind};

/// Requests the next pin that was never seen; if there is none, `doomed` may be deleted.
pub(super) fn request_pin(context: &Arc<Context>, number: u64, doomed: Vec<u32>) {
    let pin_number = context.stored.view().cuts.lock().pins_next.max(1);
    let key = pin_key(context.attachment.record.volume_id, pin_number);
    let callback_context = context.clone();
    let callback = move |outcome| {
        let pin_outcome = PinOutcome { number, doomed, pin_number, outcome };
        callback_context.mailbox.push_event(Event::PinOutcome(pin_outcome));
    };
    context.attachment.store.get(want(key, None, Class::Background), Box::new(callback));
}

/// The result of a request for a pin.
pub(super) enum Pins {
    /// There was another pin: the next one is requested.
    More,
    /// All existing pins are known now.
    AllKnown { number: u64, doomed: Vec<u32> },
    /// The pin is unreadable.
    Failed { number: u64, error: Error },
}

/// Notes a pin and requests the next.
pub(super) fn handle(context: &Arc<Context>, pin_outcome: PinOutcome) -> Pins {
    let PinOutcome { number, doomed, pin_number, outcome } = pin_outcome;
    let volume_id = context.attachment.record.volume_id;
    let pin = match outcome {
        Err(error) if error.kind() == StoreErrorKind::NotFound => {
            return Pins::AllKnown { number, doomed };
        }
        Err(error) => Err(store_error(&error)),
        Ok(bytes) => Pin::decode(&bytes, volume_id, pin_number)
            .map_err(|error| Error::new(ErrorKind::Corrupt, error.to_string()).with_source(error)),
    };
    let pin = match pin {
        Ok(pin) => pin,
        Err(error) => {
            let key = pin_key(volume_id, pin_number);
            let text = format!("dead segments, because {key} cannot be read");
            return Pins::Failed { number, error: Error::caused(error.kind(), text, error) };
        }
    };
    context.stored.view().cuts.lock().note(&NumberedPin { pin_number, pin });
    request_pin(context, number, doomed);
    Pins::More
}

/// Whether a known clone needs something.
pub(super) fn is_pinned(context: &Context) -> bool {
    context.stored.view().cuts.lock().cuts.iter().any(|cut| cut.kind == CutKind::Pin)
}

/// The clones of these pins are gone.
pub(super) fn release(context: &Context, pin_numbers: &[u64]) {
    let is_released = |cut: &CutEntry| cut.kind == CutKind::Pin && pin_numbers.contains(&cut.pin);
    context.stored.view().cuts.lock().cuts.retain(|cut| !is_released(cut));
}
